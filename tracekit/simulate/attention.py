"""Attention by hand, forward and backward, whole and in blocks of keys.

Shapes: q, out and their gradients (i, b, a, d): query tokens, sequences, heads, elements of a head; k, v (j, b, g, d) with g heads of keys
and values, a a multiple of g (grouped-query attention: a/g query heads in a row read the same). A mask (i, j) is True where query i may see
key j; None lets every query see every key. Scores are q k / sqrt(d).

A block of keys gives a query an unfinished result: the largest score m, the sum l of exp(score - m) and the sum o of exp(score - m) v. Two
of them merge into one, exactly (online softmax: Milakov and Gimelshein, arXiv:1805.02867; in attention: arXiv:2205.14135). Once o/l is
final, backward needs no more than lse = m + log(l) and delta = sum(out dout) of each query, block by block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tracekit.simulate.functions import Float

Mask = npt.NDArray[np.bool_] | None


class Partial(NamedTuple):
    """Unfinished attention of some queries over some keys: ``m``, ``l`` (b, a, i) and ``o`` (i, b, a, d)."""

    m: Float
    l: Float  # noqa: E741 - the name it has in the papers
    o: Float


def scores(q: Float, k: Float, mask: Mask) -> Float:
    """Scores (b, a, i, j), -inf where the mask forbids."""
    found = np.einsum("ibad,jbad->baij", q, _each_head(k, q.shape[2]), optimize=True) / np.sqrt(q.shape[3])
    return np.asarray(found if mask is None else np.where(mask, found, -np.inf), np.float64)


def attend_block(q: Float, k: Float, v: Float, mask: Mask = None) -> Partial:
    """Unfinished attention of ``q`` over one block. A query that sees nothing in it gets m = -inf, l = 0, o = 0."""
    found = scores(q, k, mask)
    m = found.max(axis=-1, initial=-np.inf)
    weights = np.exp(found - np.where(np.isfinite(m), m, 0.0)[..., None])
    o = np.einsum("baij,jbad->ibad", weights, _each_head(v, q.shape[2]), optimize=True)
    return Partial(m, weights.sum(axis=-1), o)


def nothing_seen(q: Float) -> Partial:
    """The unfinished result before the first block: what merges with any other without a trace."""
    tokens, b, a, _ = q.shape
    return Partial(np.full((b, a, tokens), -np.inf), np.zeros((b, a, tokens)), np.zeros_like(q))


def merge(one: Partial, other: Partial) -> Partial:
    """Both blocks' results as that of one block with the keys of both."""
    m = np.maximum(one.m, other.m)
    zero = np.where(np.isfinite(m), m, 0.0)  # nothing seen yet on either side: exp(-inf) = 0 instead of NaN
    scale_one, scale_other = np.exp(one.m - zero), np.exp(other.m - zero)
    o = one.o * _of_queries(scale_one) + other.o * _of_queries(scale_other)
    return Partial(m, one.l * scale_one + other.l * scale_other, o)


def finish(partial: Partial) -> tuple[Float, Float]:
    """(out, lse (b, a, i)). Every query has to have seen a key."""
    return np.asarray(partial.o / _of_queries(partial.l), np.float64), np.asarray(partial.m + np.log(partial.l), np.float64)


def attend(q: Float, k: Float, v: Float, mask: Mask = None) -> tuple[Float, Float]:
    """(out, lse) over all keys at once."""
    return finish(attend_block(q, k, v, mask))


def attend_backward(q: Float, k: Float, v: Float, lse: Float, delta: Float, dout: Float, mask: Mask = None) -> tuple[Float, Float, Float]:
    """(dq, dk, dv) as far as this block of keys goes; over all blocks dq is their sum.

    ``lse`` (b, a, i) is that over all keys, ``delta`` (b, a, i) from ``delta_of``.
    """
    heads = q.shape[2]
    probabilities = np.exp(scores(q, k, mask) - lse[..., None])
    dv = np.einsum("baij,ibad->jbad", probabilities, dout, optimize=True)
    dp = np.einsum("ibad,jbad->baij", dout, _each_head(v, heads), optimize=True)
    ds = probabilities * (dp - delta[..., None]) / np.sqrt(q.shape[3])
    dq = np.einsum("baij,jbad->ibad", ds, _each_head(k, heads), optimize=True)
    dk = np.einsum("baij,ibad->jbad", ds, q, optimize=True)
    return np.asarray(dq, np.float64), _sum_heads(dk, k.shape[2]), _sum_heads(dv, v.shape[2])


def delta_of(out: Float, dout: Float) -> Float:
    """delta (b, a, i): sum over the head of out x its gradient."""
    return np.asarray(np.einsum("ibad,ibad->bai", out, dout), np.float64)


def causal_mask(queries: npt.NDArray[np.int64], keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Mask (i, j): a token sees those at its own place in the sequence and before. Both arguments are places in the sequence."""
    return np.asarray(keys[None, :] <= queries[:, None], np.bool_)


def _of_queries(values: Float) -> Float:
    """(b, a, i) -> (i, b, a, 1)."""
    return np.moveaxis(values, -1, 0)[..., None]


def _each_head(kv: Float, heads: int) -> Float:
    """Keys or values once for every query head."""
    return np.repeat(kv, heads // kv.shape[2], axis=2)


def _sum_heads(gradient: Float, kv_heads: int) -> Float:
    """Back from one gradient for each query head to one for each head of keys."""
    j, b, a, d = gradient.shape
    return np.asarray(gradient.reshape(j, b, kv_heads, a // kv_heads, d).sum(axis=3), np.float64)
