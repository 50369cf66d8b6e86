"""What collectives cost: bandwidth factors as nccl-tests defines them (its PERFORMANCE.md), logical steps and alpha-beta times."""

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


#: Algorithms of each kind, the usual one first. naive: everybody broadcasts its shard, one after the other.
ALGORITHMS = {
    "broadcast": ("tree", "star"),
    "scatter": ("star", "tree"),
    "gather": ("star", "tree"),
    "reduce": ("tree", "star"),
    "all_gather": ("ring", "naive"),
    "reduce_scatter": ("ring",),
    "all_reduce": ("ring", "tree", "star"),
    "all_to_all": ("pairwise",),
    "send": ("direct",),
}


def logical_steps(kind: str, algorithm: str, size: int) -> int:
    """Steps one after another in which something is sent, in a group of ``size`` ranks; 0 for a group of one (1 for a send).

    ring, pairwise, star x-1 (all_reduce 2 (x-1)); tree ceil(log2 x) (all_reduce twice that); naive all_gather x (x-1). ValueError for a
    size below 1, and for a kind and algorithm that do not go together (``ALGORITHMS``).
    """
    if algorithm not in ALGORITHMS.get(kind, ()):
        raise ValueError(f"no algorithm {algorithm} for {kind}")
    if size < 1:
        raise ValueError(f"a group of {size} ranks")
    if kind == "send":
        return 1
    once = (size - 1).bit_length() if algorithm == "tree" else size * (size - 1) if algorithm == "naive" else size - 1
    return 2 * once if kind == "all_reduce" else once


def seconds(kind: str, algorithm: str, size: int, full_bytes: float, latency_s: float, seconds_per_byte: float) -> float:
    """Time of a collective by the alpha-beta model: A for each logical step, B for each byte on the longest chain of messages.

    With S = ``full_bytes``, A = ``latency_s``, B = ``seconds_per_byte``, x = ``size`` and F = (x-1)/x:

        ring all_gather, reduce_scatter; pairwise all_to_all    (x-1) A + F S B
        ring all_reduce = reduce_scatter + all_gather           2 (x-1) A + 2 F S B
        star broadcast, reduce                                  (x-1) (A + S B)
        tree broadcast, reduce                                  ceil(log2 x) (A + S B)
        star scatter, gather                                    (x-1) A + F S B
        tree scatter, gather                                    ceil(log2 x) A + F S B
        star, tree all_reduce = reduce + broadcast              twice that of one
        naive all_gather: x star broadcasts of S/x              x (x-1) A + (x-1) S B
        send                                                    A + S B

    Each rank sends one message and receives one at a time (Thakur, Rabenseifner and Gropp, 2005, doi:10.1177/1094342005051521). Grows with
    S and with x. ValueError as ``logical_steps``, and for a negative size, latency or time a byte.
    """
    steps = logical_steps(kind, algorithm, size)
    if not (full_bytes >= 0 and latency_s >= 0 and seconds_per_byte >= 0):
        raise ValueError("bytes, latency and seconds a byte cannot be negative")
    share = (size - 1) / size
    if kind == "send":
        buffers = 1.0
    elif algorithm == "naive":
        buffers = float(size - 1)
    elif kind in ("scatter", "gather", "all_gather", "reduce_scatter", "all_to_all"):
        buffers = share
    elif algorithm == "ring":
        buffers = 2 * share
    else:
        buffers = float(steps)
    return steps * latency_s + buffers * full_bytes * seconds_per_byte
