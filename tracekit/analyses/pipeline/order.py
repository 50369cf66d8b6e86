"""The order of work on every rank of a pipeline: which schedule it is, and how long it takes if nothing but the order makes ranks wait.

A schedule is told by its order alone, where every rank's is known:

    gpipe                    one stage a rank, every forward before the first backward
    1f1b                     one stage a rank; stage i runs min(m, p-i) forwards ahead, then backward and forward in turn
    looped                   several stages a rank, every forward before the first backward
    interleaved_1f1b         several stages a rank, forwards ahead, then forward and backward in turn
    zb_h1, zb_h2             backward in two parts, one stage a rank, in the order of the paper (arXiv:2401.10241)
    zbv                      backward in two parts, stages i and 2p-1-i on one rank
    interleaved_zero_bubble  backward in two parts, several stages a rank, otherwise
    zero_bubble              backward in two parts, one stage a rank, otherwise
    forward_only             no backward at all
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tracekit.errors import UsageError
from tracekit.graph.replay import replay_of

UNKNOWN = "unknown"


class Piece(NamedTuple):
    """One piece of work: F, B (whole backward), I (for the input) or W (for the weights) of a stage and micro-batch."""

    kind: str
    stage: int
    micro_batch: int


Orders = Mapping[int, Sequence[Piece]]  # rank -> its pieces, in order
Duration = Callable[[Piece], float]


def schedule_of(orders: Orders, stages: int, micro_batches: int) -> tuple[str, str]:
    """(schedule, '') or ('unknown', why): by the order of work of one run of the schedule. ``stages``: of the whole pipeline."""
    held = {rank: sorted({piece.stage for piece in pieces}) for rank, pieces in orders.items()}
    kinds = {piece.kind for pieces in orders.values() for piece in pieces}
    if kinds == {"F"}:
        return "forward_only", ""
    several = any(len(own) > 1 for own in held.values())
    if kinds & {"I", "W"}:
        return _zero_bubble(orders, held, stages, micro_batches, several), ""
    if several:
        return _interleaved(orders)
    ahead = {own[0]: _ahead(orders[rank]) for rank, own in held.items()}
    as_1f1b = {stage: min(micro_batches, stages - stage) for stage in ahead}
    gpipe, one_by_one = all(n == micro_batches for n in ahead.values()), ahead == as_1f1b and all(map(_in_turn, orders.values()))
    if gpipe and one_by_one and micro_batches > 1:
        return UNKNOWN, "gpipe and 1f1b order the work of the stages that were read alike"
    if gpipe:
        return "gpipe", ""
    return ("1f1b", "") if one_by_one else (UNKNOWN, "the order of forward and backward is that of no schedule known here")


def _interleaved(orders: Orders) -> tuple[str, str]:
    if all(_ahead(pieces) == sum(piece.kind == "F" for piece in pieces) for pieces in orders.values()):
        return "looped", ""
    if all(map(_in_turn, orders.values())):
        return "interleaved_1f1b", ""
    return UNKNOWN, "the order of forward and backward is that of no schedule known here"


def _zero_bubble(orders: Orders, held: Mapping[int, Sequence[int]], stages: int, micro_batches: int, several: bool) -> str:
    if several:
        return "zbv" if all(len(own) == 2 and sum(own) == stages - 1 for own in held.values()) else "interleaved_zero_bubble"
    from tracekit.simulate.pipeline.order import order as simulated_order  # loaded where a schedule is looked at that closely

    for name in ("zb_h1", "zb_h2"):
        try:
            wanted = {own[0]: simulated_order(name, stages, micro_batches, 1, own[0]) for own in held.values()}
        except UsageError:
            continue  # it cannot run so few micro-batches
        spelled = {stage: [(w.kind.replace("B", "I"), w.micro_batch) for w in work] for stage, work in wanted.items()}
        if all([(piece.kind, piece.micro_batch) for piece in orders[rank]] == spelled[own[0]] for rank, own in held.items()):
            return name
    return "zero_bubble"


def _ahead(pieces: Sequence[Piece]) -> int:
    """Forwards before the first backward."""
    return next((i for i, piece in enumerate(pieces) if piece.kind != "F"), len(pieces))


def _in_turn(pieces: Sequence[Piece]) -> bool:
    """Forwards, then backward and forward in turn, then backwards."""
    kinds = "".join(piece.kind for piece in pieces).lstrip("F").rstrip("B")
    return "FF" not in kinds and "BB" not in kinds


def replay(orders: Orders, duration: Duration) -> dict[int, tuple[float, float]] | None:
    """Rank -> (time it works, time until all are done), in the unit of ``duration`` to a whole number: the graph's replay of every piece
    behind its rank's piece before and what it needs of another stage; messages take no time. None where ranks would wait for each other for
    ever: not all pieces were recorded.
    """
    work = [(rank, piece) for rank, pieces in orders.items() for piece in pieces]
    number = {_done(piece): i for i, (_, piece) in enumerate(work)}
    stages = {piece.stage for _, piece in work}
    sources: list[list[int]] = []
    for i, (rank, piece) in enumerate(work):
        needs = needed(piece, stages)
        if needs is not None and needs not in number:
            return None
        before = [i - 1] if i and work[i - 1][0] == rank else []
        sources.append(before if needs is None else [*before, number[needs]])
    cost = np.array([round(duration(piece)) for _, piece in work], np.int64)
    end = replay_of(sources, cost)
    if end is None:
        return None
    rank_of = np.array([rank for rank, _ in work], np.int64)
    wall = float(end.max(initial=0))
    return {rank: (float(cost[rank_of == rank].sum()), wall) for rank in orders}


def _done(piece: Piece) -> tuple[str, int, int]:
    """What others ask for when they need this piece."""
    return "B" if piece.kind == "I" else piece.kind, piece.stage, piece.micro_batch


def needed(piece: Piece, stages: set[int]) -> tuple[str, int, int] | None:
    """What another stage must have done first: ('F' or 'B', stage, micro-batch); None where nothing, or nothing that was recorded."""
    if piece.kind == "F" and piece.stage - 1 in stages:
        return "F", piece.stage - 1, piece.micro_batch
    if piece.kind in "BI" and piece.stage + 1 in stages:
        return "B", piece.stage + 1, piece.micro_batch
    return None


def replayed_share(orders: Orders, duration: Duration) -> float | None:
    """Bubble over wall time of a replay, mean over the ranks; None where it cannot be replayed or takes no time."""
    times = replay(orders, duration)
    if not times:
        return None
    shares = [1 - busy / wall for busy, wall in times.values() if wall > 0]
    return sum(shares) / len(shares) if shares else None
