"""Bandwidth factors of collectives, as nccl-tests defines them (PERFORMANCE.md of nccl-tests)."""

from __future__ import annotations


def busbw_factor(kind: str, size: int) -> float | None:
    """busbw = algbw * factor, for a group of ``size`` ranks and algbw over the FULL tensor; None where no factor is defined.

    all_reduce 2 (x-1)/x; all_gather, reduce_scatter, all_to_all, gather, scatter (x-1)/x; broadcast, reduce, send, recv 1.
    """
    if size < 1:
        return None
    share = (size - 1) / size
    if kind == "all_reduce":
        return 2 * share
    if kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return share
    if kind in ("broadcast", "reduce", "send", "recv"):
        return 1.0
    return None
