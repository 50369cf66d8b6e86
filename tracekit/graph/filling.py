"""How long one pass of a pipeline of unequal stages takes in the order of GPipe, 1F1B, their looped and interleaved forms; messages take
no time.

Where stages are alike that is (v m + p - 1)(f + b). Where they are not, it is more than the slowest place's work and the others' fill and
drain: a place of 1F1B may hold p - i micro-batches only, and waits for a backward that the slowest place delays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tracekit.graph.replay import replay_of

#: Pieces beyond which it is not followed piece by piece.
MOST = 100_000
_Piece = tuple[bool, int, int]  # forward, stage, micro-batch


def order_of(place: int, places: int, held: int, batches: int, forwards_first: bool) -> list[_Piece]:
    """What a place of ``held`` stages does in order. Interleaved, rounds of as many micro-batches as there are places pass through one
    stage after the other."""
    turn = batches if forwards_first or held == 1 else places
    pairs = [(c, j) for begin in range(0, batches, turn) for c in range(held) for j in range(begin, min(begin + turn, batches))]
    forwards = [(True, c * places + place, j) for c, j in pairs]
    backwards = [(False, (held - 1 - c) * places + place, j) for c, j in pairs]
    behind = places - place - 1
    ahead = behind if held == 1 else 2 * behind + (held - 1) * places
    ahead = len(pairs) if forwards_first else min(len(pairs), ahead)
    turns = [piece for pair in zip(forwards[ahead:], backwards, strict=False) for piece in pair]
    return [*forwards[:ahead], *turns, *backwards[len(pairs) - ahead :]]


def run_ns(forward: Sequence[float], backward: Sequence[float], places: int, batches: int, forwards_first: bool) -> float | None:
    """Time of a pass [ns]; ``forward``, ``backward``: of one micro-batch on each stage [ns]. None where it is too long, or cannot run."""
    stages = len(forward)
    if 2 * stages * batches > MOST or stages % places:
        return None
    held = stages // places
    if held > 1 and not forwards_first and batches % places:
        return None
    work = [(place, *piece) for place in range(places) for piece in order_of(place, places, held, batches, forwards_first)]
    number = {piece: i for i, (_, *piece_of) in enumerate(work) for piece in [tuple(piece_of)]}
    sources = []
    for i, (place, up, stage, batch) in enumerate(work):
        beside = number.get((up, stage - 1 if up else stage + 1, batch))
        before = [i - 1] if i and work[i - 1][0] == place else []
        sources.append(before if beside is None else [*before, beside])
    cost = np.array([round((forward if up else backward)[stage]) for _, up, stage, _ in work], np.int64)
    end = replay_of(sources, cost)
    return None if end is None else float(end.max())
