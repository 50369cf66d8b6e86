"""A transformer layer and its parts on one rank: forward and backward by hand, the reference of the sharded computation.

Activations are (s, b, h): sequence, batch, hidden. A ``Block`` is what Megatron shards (arXiv:1909.08053): a linear whose columns are cut
(A), something that works on each share alone (GELU, or attention over whole heads), and a linear whose rows are cut (R):

    z = x A + a        u = middle(z)        y = u R + r
    dR = u^T dy,  dr = sum dy,  du = dy R^T        dz = middle'(du)        dA = x^T dz,  da = sum dz,  dx = dz A^T

with x^T dz the sum over all tokens. A layer is x1 = x + attention(norm1(x)), y = x1 + mlp(norm2(x1)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tracekit.simulate.attention import attend, attend_backward, causal_mask, delta_of
from tracekit.simulate.functions import Float, gelu, gelu_backward, linear

_EPSILON = 1e-5
Gradients = dict[str, Float]


@dataclass(frozen=True)
class Block:
    """Weights of a block: A (h, n), a (n), R (k, h), r (h). ``heads`` and ``kv_heads`` are 0 in an MLP."""

    name: str
    column: Float
    column_bias: Float
    row: Float
    row_bias: Float
    heads: int = 0
    kv_heads: int = 0
    causal: bool = False

    @property
    def head_size(self) -> int:
        """Elements of a head; 0 in an MLP."""
        return int(self.row.shape[0]) // self.heads if self.heads else 0


class Norm(NamedTuple):
    """Weights of a layer norm, each (h)."""

    gamma: Float
    beta: Float


class Middle(NamedTuple):
    """What ``middle_backward`` needs of its forward: z, and of attention out and lse."""

    z: Float
    out: Float | None = None
    lse: Float | None = None


def matmul_gradient(x: Float, dy: Float) -> Float:
    """Gradient of W in x W: x^T dy, summed over tokens."""
    return np.asarray(x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1]), np.float64)


def bias_gradient(dy: Float) -> Float:
    """Gradient of a bias: dy summed over tokens."""
    return np.asarray(dy.reshape(-1, dy.shape[-1]).sum(axis=0), np.float64)


def middle(z: Float, heads: int, kv_heads: int, causal: bool) -> tuple[Float, Middle]:
    """GELU (``heads`` 0) or attention over q, k, v side by side in ``z``: (s, b, (heads + 2 kv_heads) d) -> (s, b, heads d)."""
    if not heads:
        return gelu(z), Middle(z)
    q, k, v = _split(z, heads, kv_heads)
    out, lse = attend(q, k, v, _mask(z, causal))
    return out.reshape(*z.shape[:2], -1), Middle(z, out, lse)


def middle_backward(du: Float, saved: Middle, heads: int, kv_heads: int, causal: bool) -> Float:
    """Gradient of z from that of ``middle``'s output."""
    if not heads:
        return gelu_backward(saved.z, du)
    assert saved.out is not None and saved.lse is not None
    q, k, v = _split(saved.z, heads, kv_heads)
    dout = du.reshape(saved.out.shape)
    parts = attend_backward(q, k, v, saved.lse, delta_of(saved.out, dout), dout, _mask(saved.z, causal))
    return np.concatenate([part.reshape(*du.shape[:2], -1) for part in parts], axis=-1)


def _split(z: Float, heads: int, kv_heads: int) -> tuple[Float, Float, Float]:
    every = z.reshape(*z.shape[:2], heads + 2 * kv_heads, -1)
    return every[:, :, :heads], every[:, :, heads : heads + kv_heads], every[:, :, heads + kv_heads :]


def _mask(z: Float, causal: bool) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]] | None:
    places = np.arange(z.shape[0], dtype=np.int64)
    return causal_mask(places, places) if causal else None


def norm(x: Float, weights: Norm) -> tuple[Float, Float, Float]:
    """Layer norm over the hidden size: (y, normalised x, 1/deviation (s, b, 1))."""
    centred = x - x.mean(axis=-1, keepdims=True)
    inverse = 1 / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + _EPSILON)
    return centred * inverse * weights.gamma + weights.beta, centred * inverse, inverse


def norm_backward(dy: Float, normalised: Float, inverse: Float, weights: Norm) -> tuple[Float, Norm]:
    """(dx, gradients of the weights): dx = (g - mean(g) - xn mean(g xn)) / deviation with g = gamma dy."""
    g = dy * weights.gamma
    dx = (g - g.mean(axis=-1, keepdims=True) - normalised * (g * normalised).mean(axis=-1, keepdims=True)) * inverse
    return np.asarray(dx, np.float64), Norm(bias_gradient(dy * normalised), bias_gradient(dy))


def block_step(block: Block, x: Float, dy: Float) -> tuple[Float, Float, Gradients]:
    """(y, dx, gradients) of a block on one rank; ``dy`` is the gradient of y."""
    kind = (block.heads, block.kv_heads, block.causal)
    u, saved = middle(linear(x, block.column) + block.column_bias, *kind)
    y = linear(u, block.row) + block.row_bias
    dz = middle_backward(linear(dy, block.row.T), saved, *kind)
    gradients = {
        f"{block.name}.column": matmul_gradient(x, dz),
        f"{block.name}.column_bias": bias_gradient(dz),
        f"{block.name}.row": matmul_gradient(u, dy),
        f"{block.name}.row_bias": bias_gradient(dy),
    }
    return y, linear(dz, block.column.T), gradients


def deviations(attention: Block, norms: tuple[Norm, Norm], x: Float) -> tuple[Float, Float]:
    """1/deviation (s, b, 1) of both norms of a layer: by so much their backward enlarges the rounding of gradients that cancel out."""
    n1, _, inverse1 = norm(x, norms[0])
    return inverse1, norm(x + block_step(attention, n1, np.zeros_like(x))[0], norms[1])[2]


def layer_step(attention: Block, mlp: Block, norms: tuple[Norm, Norm], x: Float, dy: Float) -> tuple[Float, Float, Gradients]:
    """(y, dx, gradients) of a whole layer on one rank."""
    n1, xn1, inverse1 = norm(x, norms[0])
    # A block's backward needs its dy, which only exists after the forward of what follows: run its forward alone first.
    x1 = x + block_step(attention, n1, np.zeros_like(x))[0]
    n2, xn2, inverse2 = norm(x1, norms[1])
    y2, dn2, gradients = block_step(mlp, n2, dy)
    dx1, second = norm_backward(dn2, xn2, inverse2, norms[1])
    dx1 = dx1 + dy
    _, dn1, of_attention = block_step(attention, n1, dx1)
    dx, first = norm_backward(dn1, xn1, inverse1, norms[0])
    gradients |= of_attention
    for name, weights in (("norm1", first), ("norm2", second)):
        gradients |= {f"{name}.gamma": weights.gamma, f"{name}.beta": weights.beta}
    return x1 + y2, dx + dx1, gradients
