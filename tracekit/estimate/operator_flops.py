"""FLOP and least traffic of single operators, from the shapes that a trace records: matrix products, convolutions, attention.

A multiplication and an addition are two FLOP. With A of [m, k] and B of [k, n]

    matrix product       2 m k n                                  (of each matrix of a batch)
    convolution          2 N O |out| (C / groups) |kernel|        once forward, once for each of its two gradients that is asked for
    attention, forward   2 B H Sq Sk (D + Dv)                     scores and weighted values, masked or not
    attention, backward  2 B H Sq Sk (3 D + 2 Dv)                 scores again, gradients of values, weights, queries, keys

as ``torch.utils.flop_counter`` counts them (the tests compare). Least traffic: every input and output once.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

Shape = list[int]


@dataclass(frozen=True)
class Cost:
    """Of one call: ``flop``; ``elements`` of all its inputs and outputs."""

    flop: int
    elements: int


def cost(name: str, shapes: Sequence[Shape | None], concrete: Sequence[str] = ()) -> Cost | None:
    """Cost of operator ``name`` with arguments of these shapes (None: no tensor); None where it is not known or sizes are missing.

    ``concrete``: values of the other arguments as text (``[2, 2]``, ``True``), '' where not recorded.
    """
    formula = _FORMULAS.get(name)
    try:
        return None if formula is None else formula(shapes, concrete)
    except (IndexError, ValueError, TypeError, SyntaxError, ZeroDivisionError):
        return None


def _product(first: int) -> Callable[[Sequence[Shape | None], Sequence[str]], Cost | None]:
    """Matrix product of the arguments ``first`` and ``first + 1``, of two dimensions or, in batches, three."""

    def formula(shapes: Sequence[Shape | None], _: Sequence[str]) -> Cost | None:
        a, b = shapes[first], shapes[first + 1]
        if not a or not b or len(a) != len(b) or len(a) not in (2, 3) or a[-1] != b[-2] or a[:-2] != b[:-2]:
            return None
        batch, (m, k), n = prod(a[:-2]), a[-2:], b[-1]
        return Cost(2 * batch * m * k * n, batch * (m * k + k * n + m * n))

    return formula


def _convolution(shapes: Sequence[Shape | None], concrete: Sequence[str]) -> Cost | None:
    x, weight = shapes[0], shapes[1]
    stride, padding, dilation, transposed, output_padding = (ast.literal_eval(concrete[i]) for i in range(3, 8))
    if not x or not weight:
        return None
    sizes = zip(x[2:], weight[2:], *(_each(v, len(x) - 2) for v in (stride, padding, dilation, output_padding)), strict=True)
    if transposed:
        out = [(n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, k, s, p, d, o in sizes]
        return Cost(2 * prod(x) * prod(weight[1:]), prod(x) + prod(weight) + x[0] * weight[1] * prod(out))
    out = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d, _ in sizes]
    result = x[0] * weight[0] * prod(out)
    return Cost(2 * result * prod(weight[1:]), prod(x) + prod(weight) + result)


def _each(value: list[int], count: int) -> list[int]:
    return list(value) * count if len(value) == 1 else list(value)


def _convolution_backward(shapes: Sequence[Shape | None], concrete: Sequence[str]) -> Cost | None:
    gradient, x, weight = shapes[:3]
    transposed, mask = ast.literal_eval(concrete[7]), ast.literal_eval(concrete[10])
    if not gradient or not x or not weight:
        return None
    one = 2 * (prod(x) if transposed else prod(gradient)) * prod(weight[1:])
    outputs = mask[0] * prod(x) + mask[1] * prod(weight)
    return Cost(one * sum(map(bool, mask[:2])), prod(gradient) + prod(x) + prod(weight) + outputs)


def _attention(first: int, swapped: bool = False) -> Callable[[Sequence[Shape | None], Sequence[str]], Cost | None]:
    """Forward of q, k, v of [B, H, S, D] (``swapped``: [B, S, H, D]) from argument ``first`` on; where ``first`` is 1, backward."""

    def formula(shapes: Sequence[Shape | None], _: Sequence[str]) -> Cost | None:
        found = shapes[first : first + 3]
        if len(found) < 3 or any(shape is None or len(shape) != 4 for shape in found):
            return None
        ordered = [[s[0], s[2], s[1], s[3]] if swapped else list(s) for s in found if s is not None]
        (b, h, sq, d), (_b, _h, sk, dk), (_bv, _hv, sv, dv) = ordered
        if d != dk or sk != sv:
            return None
        tensors = [prod(shape) for shape in ordered]
        result = b * h * sq * dv
        if first:
            return Cost(2 * b * h * sq * sk * (3 * d + 2 * dv), 2 * sum(tensors) + 2 * result)
        return Cost(2 * b * h * sq * sk * (d + dv), sum(tensors) + result)

    return formula


_FORMULAS: dict[str, Callable[[Sequence[Shape | None], Sequence[str]], Cost | None]] = {
    "aten::mm": _product(0),
    "aten::bmm": _product(0),
    "aten::_scaled_mm": _product(0),
    "aten::_int_mm": _product(0),
    "aten::addmm": _product(1),
    "aten::baddbmm": _product(1),
    "aten::_addmm_activation": _product(1),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    **{
        f"aten::_scaled_dot_product_{kernel}_attention{ending}": _attention(first)
        for kernel in ("flash", "efficient", "cudnn", "fused")
        for ending, first in (("", 0), ("_backward", 1))
    },
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention(0),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention(1),
    "aten::_flash_attention_forward": _attention(0, swapped=True),
    "aten::_flash_attention_backward": _attention(1, swapped=True),
    "aten::_efficient_attention_forward": _attention(0, swapped=True),
    "aten::_efficient_attention_backward": _attention(1, swapped=True),
    "flash_attn::_flash_attn_forward": _attention(0, swapped=True),
    "flash_attn::_flash_attn_backward": _attention(1, swapped=True),
}

#: Operators whose cost is known where their sizes are.
COUNTED = frozenset(_FORMULAS)
