"""What each stage of a pipeline does in which order, and when, if every action starts as soon as it can.

An action is a micro-batch in one model chunk: forward (``F``), backward for the input (``B``) and for the weights (``W``), or the
backward in one piece (``BW``). A rank of p holds v chunks; chunk c of rank i is number c p + i in the row of all p v chunks. ``F`` needs
the ``F`` of the chunk before, a backward its own ``F`` and the backward of the chunk after it; ``W`` needs its ``B``, and nobody waits for
it. A schedule is nothing but the order of the actions on every rank; times follow from it. Sources: see ``tracekit.estimate.pipeline``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

from tracekit.estimate.pipeline import check_schedule

Kind = Literal["F", "B", "W", "BW"]


class Action(NamedTuple):
    """One action: what, in which chunk of the row of all chunks, for which micro-batch."""

    kind: Kind
    chunk: int
    micro_batch: int


class TimedAction(NamedTuple):
    """An action on its rank, from ``start`` to ``end`` in the unit of the times."""

    action: Action
    rank: int
    start: Fraction
    end: Fraction


@dataclass(frozen=True)
class StepTimes:
    """A step of the pipeline. ``actions`` are ordered by their end; what depends on something comes after it."""

    actions: Sequence[TimedAction]
    stages: int

    @property
    def wall(self) -> Fraction:
        """Time from 0 to the end of the last action."""
        return max(timed.end for timed in self.actions)

    def of_rank(self, rank: int) -> list[TimedAction]:
        """The actions of one rank in order."""
        return [timed for timed in self.actions if timed.rank == rank]

    def busy(self, rank: int) -> Fraction:
        """Time that ``rank`` works."""
        return sum((timed.end - timed.start for timed in self.of_rank(rank)), Fraction(0))

    def span(self, rank: int) -> Fraction:
        """Time from the start of the first to the end of the last action of ``rank``."""
        actions = self.of_rank(rank)
        return actions[-1].end - actions[0].start

    def in_flight(self, rank: int, until: Literal["input", "weight"]) -> int:
        """Most activations ``rank`` holds at once, in chunks: from the start of F to the end of the backward for input or weight."""
        freeing = ("B", "BW") if until == "input" else ("W", "BW")
        now = most = 0
        for timed in self.of_rank(rank):
            now += timed.action.kind == "F"
            most = max(most, now)
            now -= timed.action.kind in freeing
        return most


def order(schedule: str, p: int, m: int, v: int, rank: int) -> list[Action]:
    """The actions of ``rank`` in the order it does them. Raises ``UsageError`` where the schedule cannot run."""
    check_schedule(schedule, p, m, v)
    if schedule == "gpipe":
        return [Action("F", rank, j) for j in range(m)] + [Action("BW", rank, j) for j in range(m)]
    if schedule == "interleaved_1f1b":
        warm_up = min(m * v, 2 * (p - rank - 1) + (v - 1) * p)
        forwards = [Action("F", chunk * p + rank, j) for chunk, j in _rounds(p, m, v)]
        backwards = [Action("BW", (v - 1 - chunk) * p + rank, j) for chunk, j in _rounds(p, m, v)]
        return _one_by_one(forwards, backwards, warm_up)
    if schedule == "1f1b":
        forwards = [Action("F", rank, j) for j in range(m)]
        return _one_by_one(forwards, [Action("BW", rank, j) for j in range(m)], min(m, p - rank - 1))
    if schedule == "zb_h1":
        return _split_backward(rank, m, warm_up=min(m, p - rank), delay=rank)
    return _split_backward(rank, m, warm_up=min(m, 2 * (p - rank) - 1), delay=2 * rank)


def _rounds(p: int, m: int, v: int) -> list[tuple[int, int]]:
    """(chunk of the rank, micro-batch) as interleaving takes them: p micro-batches through one chunk, the same p through the next."""
    return [(chunk, begin + j) for begin in range(0, m, p) for chunk in range(v) for j in range(p)]


def _one_by_one(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> list[Action]:
    """``warm_up`` forwards, then one forward and one backward in turn, then the backwards that are left."""
    steady = len(forwards) - warm_up
    turns = [action for j in range(steady) for action in (forwards[warm_up + j], backwards[j])]
    return [*forwards[:warm_up], *turns, *backwards[steady:]]


def _split_backward(rank: int, m: int, warm_up: int, delay: int) -> list[Action]:
    """``warm_up`` forwards, then B, W and F in turn; a W waits for ``delay`` more B, so that later stages fill the end with W."""
    actions = [Action("F", rank, j) for j in range(warm_up)]
    for j in range(m):
        actions.append(Action("B", rank, j))
        if j >= delay:
            actions.append(Action("W", rank, j - delay))
        if warm_up + j < m:
            actions.append(Action("F", rank, warm_up + j))
    return actions + [Action("W", rank, j) for j in range(max(0, m - delay), m)]


def simulate(schedule: str, p: int, m: int, v: int, f: Fraction, b: Fraction, w: Fraction) -> StepTimes:
    """When every action runs. ``f``, ``b``, ``w``: times of all v chunks of a rank together, for one micro-batch. Messages take no time.

    Raises ``UsageError`` where the schedule cannot run. An order in which ranks wait for each other for ever is a fault of this file:
    ``AssertionError``.
    """
    orders = [order(schedule, p, m, v, rank) for rank in range(p)]
    backward: Kind = "B" if schedule.startswith("zb_") else "BW"
    durations: dict[Kind, Fraction] = {"F": f / v, "B": b / v, "W": w / v, "BW": (b + w) / v}
    ends: dict[Action, Fraction] = {}
    actions: list[TimedAction] = []
    nexts, clocks = [0] * p, [Fraction(0)] * p
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(orders):
            while nexts[rank] < len(mine):
                action = mine[nexts[rank]]
                needs = needs_of(action, p * v, backward)
                if not all(need in ends for need in needs):
                    break
                start = max([clocks[rank], *(ends[need] for need in needs)])
                clocks[rank] = ends[action] = start + durations[action.kind]
                actions.append(TimedAction(action, rank, start, ends[action]))
                nexts[rank] += 1
                moved = True
    assert all(done == len(mine) for done, mine in zip(nexts, orders, strict=True)), f"{schedule} of {p} stages never ends"
    return StepTimes(sorted(actions, key=lambda timed: timed.end), p)


def needs_of(action: Action, chunks: int, backward: Kind) -> list[Action]:
    """The actions that have to be done before ``action``; ``backward`` is the kind that hands a gradient on."""
    if action.kind == "W":
        return [Action("B", action.chunk, action.micro_batch)]
    if action.kind == "F":
        return [Action("F", action.chunk - 1, action.micro_batch)] if action.chunk else []
    after = [Action(backward, action.chunk + 1, action.micro_batch)] if action.chunk + 1 < chunks else []
    return [Action("F", action.chunk, action.micro_batch), *after]
