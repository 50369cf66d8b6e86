"""The life of every sharded unit (FSDP1, FSDP2): when it is full, when its full gradient stands, and how many are full at one time.

sharded -> all-gather -> full (forward) -> reshard -> all-gather -> full (backward) -> reshard
                                                                    full gradient -> reduce-scatter -> sharded gradient -> optimizer
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tracekit.memory.attribution import Attributed
from tracekit.memory.ownership import GATHERED, UNSHARDED, Ownership
from tracekit.trace import intervals
from tracekit.trace.events import Int64Array
from tracekit.trace.steps import PHASE_NAMES, Phases, Steps
from tracekit.units import NULL

#: Spans that leave the worker; of more, those of the first steps.
MOST_SPANS = 4000
ROOT, UNNAMED = "root", "not named"
STATES = {GATHERED: "full parameters", UNSHARDED: "full gradient"}


@dataclass(frozen=True)
class UnitSpan:
    """One stretch of time in which a unit was full; ``state`` is a value of STATES.

    ``end_ns`` is NULL where the log ends first. ``step`` is the number of the step in which it began, None outside all; ``phase`` likewise.
    """

    unit: str
    state: str
    step: int | None
    phase: str
    start_ns: int
    end_ns: int
    bytes: int


@dataclass(frozen=True)
class Lifecycle:
    """``spans`` in order of start. ``most_units`` and ``most_bytes``: full parameters at one time, at their highest each."""

    spans: list[UnitSpan]
    most_units: int = 0
    most_bytes: int = 0


def lifecycle(found: Attributed, phases: Phases, steps: Steps) -> Lifecycle:
    """The spans of all units; blocks of no named unit are the root's where a manifest names the others."""
    length, time = len(found.timeline.log), found.timeline.log.time
    rows = list(_spans(found.ownership, length))
    if not rows:
        return Lifecycle([])
    gathered = np.array([(start, end, amount) for code, _, start, end, amount in rows if code == GATHERED], np.int64).reshape(-1, 3)
    start = np.array([time[max(row[2], 0)] for row in rows], np.int64)
    end = np.array([time[row[3]] if row[3] < length else NULL for row in rows], np.int64)
    step, phase = steps.index_at(start), phases.at(start)
    spans = [
        UnitSpan(
            found.texts[unit] or (ROOT if found.from_manifest else UNNAMED),
            STATES[code],
            int(steps.number[step[i]]) if step[i] >= 0 else None,
            PHASE_NAMES[int(phase[i])],
            int(start[i]),
            int(end[i]),
            amount,
        )
        for i, (code, unit, _, _, amount) in enumerate(rows)
    ]
    ones = np.ones(len(gathered), np.int64)
    return Lifecycle(
        sorted(spans, key=lambda span: span.start_ns)[:MOST_SPANS],
        _highest(gathered[:, 0], gathered[:, 1], ones),
        _highest(gathered[:, 0], gathered[:, 1], gathered[:, 2]),
    )


def _spans(ownership: Ownership, length: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(category, unit, first event, event behind the last, most bytes) of each stretch in which any block of a unit is live."""
    chosen = np.flatnonzero(np.isin(ownership.category, list(STATES)))
    order = chosen[np.lexsort((ownership.start[chosen], ownership.unit[chosen], ownership.category[chosen]))]
    same = (np.diff(ownership.unit[order]) == 0) & (np.diff(ownership.category[order]) == 0)
    edges = [0, *(1 + np.flatnonzero(~same)).tolist(), len(order)] if len(order) else []
    for low, high in pairwise(edges):
        mine = order[low:high]
        start, end, size = ownership.start[mine], ownership.end[mine], ownership.bytes[mine]
        for first, last in zip(*(edge.tolist() for edge in intervals.union(start, end)), strict=True):
            inside = (start >= first) & (start < last)
            most = _highest(start[inside], end[inside], size[inside])
            yield int(ownership.category[mine[0]]), int(ownership.unit[mine[0]]), first, min(last, length), most


def _highest(start: Int64Array, end: Int64Array, amount: Int64Array) -> int:
    """The most that is live at one time; what ends where something begins is gone by then."""
    if not len(start):
        return 0
    time = np.concatenate([start, end])
    change = np.concatenate([amount, -amount])
    order = np.lexsort((change > 0, time))
    return int(np.cumsum(change[order]).max())
