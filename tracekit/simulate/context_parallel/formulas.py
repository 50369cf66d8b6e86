"""What context parallel sends and computes, in closed form.

Symbols: c ranks, s tokens of a sequence, n = s/c of them on a rank, b sequences, a heads of queries and g of keys and values, d elements
each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple


@dataclass(frozen=True)
class Sizes:
    """Arguments with their defaults filled in, checked."""

    c: int
    s: int
    b: int
    a: int
    g: int
    d: int
    element_bytes: int
    causal: bool
    keep_gathered: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of one rank, n = s/c."""
        return self.s // self.c


class Expected(NamedTuple):
    """Bytes a rank sends and logical steps, forward and backward."""

    forward: int
    backward: int
    forward_steps: int
    backward_steps: int


def expected_sent(algorithm: str, sizes: Sizes) -> Expected:
    """What a rank sends, in closed form. One block: n tokens of queries are n b a d elements, of keys and values 2 n b g d."""
    hops, e, n = sizes.c - 1, sizes.element_bytes, sizes.tokens
    queries, keys = n * sizes.b * sizes.a * sizes.d * e, 2 * n * sizes.b * sizes.g * sizes.d * e
    if algorithm == "all_gather":
        again = 1 if sizes.keep_gathered else 2
        return Expected(hops * keys, again * hops * keys, hops, again * hops)
    if algorithm == "ring":
        return Expected(hops * keys, 2 * hops * keys, hops, 2 * hops)
    if algorithm == "ulysses":
        copies = math.lcm(sizes.g, sizes.c) // sizes.g
        traded = hops * (2 * queries + copies * keys) // sizes.c
        return Expected(traded, traded, 4 * hops, 4 * hops)
    statistics = n * sizes.b * sizes.a * e
    return Expected(hops * (2 * queries + 3 * statistics), hops * (3 * queries + 2 * statistics), 4 * hops, 3 * hops)


FORMULAS = {
    "all_gather": "forward F(c) 2 s b g d e, backward twice that (all-gather again unless kept, reduce-scatter of dk, dv)",
    "ring": "forward c-1 hops of B = 2 (s/c) b g d e, backward 2(c-1) of them, arXiv:2310.01889",
    "blockwise": "F(c) s b a e times 2d + 3 (q; lse twice; outputs, weights) in forward, 3d + 2 (q, dout; lse, delta; dq) in backward",
    "ulysses": "F(c) s b (2 a + 2 g) d e / c each way, arXiv:2309.14509; g rounded up to a multiple of c that it divides",
}


def expected_pairs(algorithm: str, layout: str, rank: int, sizes: Sizes) -> int:
    """Scores a rank computes in forward, in closed form: its queries' keys, or for blockwise its keys' queries."""
    n, c, s = sizes.tokens, sizes.c, sizes.s
    if algorithm == "ulysses":
        return (s * (s + 1) // 2 if sizes.causal else s * s) * sizes.b * (sizes.a // c)
    if not sizes.causal:
        return n * s * sizes.b * sizes.a
    if layout == "zigzag":
        part = n // 2
        return (part * (part + 1) + part * part * (2 * c - 1)) * sizes.b * sizes.a
    before = c - 1 - rank if algorithm == "blockwise" else rank
    return (n * (n + 1) // 2 + before * n * n) * sizes.b * sizes.a


def expected_imbalance(algorithm: str, layout: str, sizes: Sizes) -> Fraction:
    """Scores of the busiest rank over the mean: (2 s - n + 1)/(s + 1) for a causal mask over contiguous tokens, n = s/c; else 1."""
    if algorithm == "ulysses" or layout == "zigzag" or not sizes.causal:
        return Fraction(1)
    return Fraction(2 * sizes.s - sizes.tokens + 1, sizes.s + 1)
