"""What one window keeps of its steps for the timeline: spans of its streams and of its host, coarsened until they fit.

A step of more pieces than it may keep is coarsened: short neighbours of one stream and one kind of work that begin in the same cell of
time become one span that says how many it holds; the cell grows until the step fits. Where kinds alternate so much that this does not
help, neighbours of different kinds are merged too, under the kind of the longest. No time is dropped: a merged span lasts from its first
start to its last end, pauses inside a cell included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from tracekit.analyses._common import text_of
from tracekit.job.activity import Activity, Work
from tracekit.job.operations import is_context
from tracekit.trace.codes import distinct_rows
from tracekit.trace.events import Category, Int64Array
from tracekit.trace.steps import PHASE_NAMES, step_times

#: Spans that a window keeps of its last step, and of the others together: of a large job's window fewer (they all meet in one process).
KEPT, KEPT_BEFORE, KEPT_BEFORE_IN_LARGE, LARGE = 3000, 9000, 3000, 64
#: Steps that are kept, the last ones.
MOST_STEPS = 100
#: Lanes of the host stand before all streams: annotations by their level of nesting, then phases.
HOST_LANE = -1
KEPT_ANNOTATIONS, MOST_LEVELS = 600, 8
_LONGEST_NAME = 160
#: With fewer cells than this a step shows too little of its course to keep kinds of work apart at any price.
_FEWEST_CELLS = 300


@dataclass(frozen=True)
class Spans:
    """Spans of one step on the window's own clock. ``name`` indexes ``names``, ``category`` indexes ``categories``.

    ``stream`` is HOST_LANE for phases and less for annotations; ``merged`` counts the pieces in each span. ``step`` is NULL without
    step marks; it lasts from ``low`` to ``high``.
    """

    step: int
    low: int
    high: int
    stream: Int64Array
    device: Int64Array
    start: Int64Array
    end: Int64Array
    name: Int64Array
    category: Int64Array
    merged: Int64Array
    names: list[str]
    categories: list[str]

    def at_most(self, limit: int) -> Spans:
        """The same step in about ``limit`` spans."""
        if len(self.start) <= limit:
            return self
        order = np.lexsort((self.start, self.stream, self.device))
        lane = np.cumsum(np.append(False, (np.diff(self.stream[order]) != 0) | (np.diff(self.device[order]) != 0)))
        pieces = _Pieces(
            lane.astype(np.int64), *(column[order] for column in (self.start, self.end, self.name, self.category, self.merged))
        )
        kept, start, end, merged = _coarsened(pieces, self.low, self.high, limit)
        rows = order[kept]
        changed = {name: getattr(self, name)[rows] for name in ("stream", "device", "name", "category")}
        return replace(self, start=start, end=end, merged=merged, **changed)


def steps_kept(activity: Activity) -> list[Spans]:
    """The spans of every step with device work (the last MOST_STEPS), in order; without step marks those of the whole window."""
    chosen = _steps_with_work(activity)
    if not chosen:
        return []
    world = max((group.size or 0 for group in activity.groups), default=0)
    before = KEPT_BEFORE if world <= LARGE else KEPT_BEFORE_IN_LARGE
    each = min(KEPT, before // max(1, len(chosen) - 1))
    window = _Window(activity)
    return [window.spans(*step, each) for step in chosen[:-1]] + [window.spans(*chosen[-1], KEPT)]


def _steps_with_work(activity: Activity) -> list[tuple[int, int, int]]:
    """(number, start, end) of the steps to keep."""
    times, found = step_times(activity.steps, activity.window), []
    for number, low, high in zip(times.number.tolist(), times.start.tolist(), times.end.tolist(), strict=True):
        first, last = np.searchsorted(activity.device.start, [low, high])
        if last > first:
            found.append((number, low, high))
    return found[-MOST_STEPS:]


@dataclass(frozen=True)
class _Pieces:
    """Work of one step, sorted by lane and start within each lane; ``merged`` counts what a piece holds already."""

    lane: Int64Array
    start: Int64Array
    end: Int64Array
    name: Int64Array
    category: Int64Array
    merged: Int64Array


class _Window:
    """One window; what all its steps share is worked out once."""

    def __init__(self, activity: Activity) -> None:
        self.activity = activity

    @cached_property
    def longest(self) -> int:
        """Duration [ns] of the longest piece on the device: no earlier start reaches into a step."""
        device = self.activity.device
        return int((device.end - device.start).max(initial=0))

    @cached_property
    def annotations(self) -> Int64Array:
        """Rows of the program's own ranges. Those of a backend and marks of steps are left out: operations and steps show them."""
        tables = self.activity.tables
        rows = tables.rows(Category.USER_ANNOTATION)
        rows = rows[tables.dur[rows] > 0]
        kept: Int64Array = rows[tables.each_text(tables.name[rows], is_context)]
        return kept

    def spans(self, number: int, low: int, high: int, limit: int) -> Spans:
        """About ``limit`` spans of one step."""
        activity, device = self.activity, self.activity.device
        first, last = np.searchsorted(device.start, [low - self.longest, high])
        rows = np.arange(first, last)
        rows = rows[device.end[rows] > low]
        # Streams of different devices are different lanes.
        lane = distinct_rows(device.device[rows], device.stream[rows])[1]
        order = np.lexsort((device.start[rows], lane))
        rows, lane = rows[order], lane[order].astype(np.int64)
        category, categories = _categories(activity, rows)
        name = device.name[rows].astype(np.int64)
        pieces = _Pieces(lane, device.start[rows], device.end[rows], name, category, np.ones(len(rows), np.int64))
        kept, start, end, merged = _coarsened(pieces, low, high, limit)
        codes, local = np.unique(name[kept], return_inverse=True)
        names = [text_of(activity.tables, int(code))[:_LONGEST_NAME] for code in codes]
        stream, devices = device.stream[rows[kept]].astype(np.int64), device.device[rows[kept]].astype(np.int64)
        local = local.astype(np.int64).reshape(-1)
        spans = Spans(number, low, high, stream, devices, start, end, local, category[kept], merged, names, categories)
        return self._with_host(spans, max(20, min(KEPT_ANNOTATIONS, limit // 4)))

    def _with_host(self, spans: Spans, most: int) -> Spans:
        """The spans with the host's annotations and phases in front, clipped to the step."""
        phases, tables, low, high = self.activity.phases, self.activity.tables, spans.low, spans.high
        inside = np.flatnonzero((phases.start < high) & (phases.end > low) & (phases.kind > 0))[:KEPT]
        rows, level = self._nested(low, high, most)
        codes, code = np.unique(tables.name[rows], return_inverse=True)
        names = [*spans.names, *PHASE_NAMES[1:], *(text_of(tables, int(c))[:_LONGEST_NAME] for c in codes)]
        first = len(spans.names) + len(PHASE_NAMES) - 1
        start = np.concatenate([tables.ts[rows], phases.start[inside]])
        end = np.concatenate([tables.ts[rows] + tables.dur[rows], phases.end[inside]])
        lane = np.concatenate([level - MOST_LEVELS + HOST_LANE, np.full(len(inside), HOST_LANE)])
        kind = np.repeat([len(spans.categories) + 1, len(spans.categories)], [len(rows), len(inside)])
        name = np.concatenate([first + code.reshape(-1), len(spans.names) + phases.kind[inside].astype(np.int64) - 1])
        return replace(
            spans,
            stream=np.concatenate([lane, spans.stream]),
            device=np.concatenate([np.full(len(start), HOST_LANE), spans.device]),
            start=np.concatenate([np.maximum(start, low), spans.start]),
            end=np.concatenate([np.minimum(end, high), spans.end]),
            name=np.concatenate([name, spans.name]),
            category=np.concatenate([kind, spans.category]),
            merged=np.concatenate([np.ones(len(start), np.int64), spans.merged]),
            names=names,
            categories=[*spans.categories, "phase", "annotation"],
        )

    def _nested(self, low: int, high: int, most: int) -> tuple[Int64Array, Int64Array]:
        """The ``most`` longest annotations of a step: (event rows, level of nesting below MOST_LEVELS)."""
        tables, rows = self.activity.tables, self.annotations
        rows = rows[(tables.ts[rows] < high) & (tables.ts[rows] + tables.dur[rows] > low)]
        rows = rows[np.argsort(-tables.dur[rows], kind="stable")[:most]]
        rows = rows[np.lexsort((-tables.dur[rows], tables.ts[rows]))]
        free = [0] * MOST_LEVELS  # when each level is free again
        level = np.zeros(len(rows), np.int64)
        for i, (begin, length) in enumerate(zip(tables.ts[rows].tolist(), tables.dur[rows].tolist(), strict=True)):
            level[i] = next((n for n, end in enumerate(free) if end <= begin), MOST_LEVELS - 1)
            free[level[i]] = begin + length
        return rows, level


def _categories(activity: Activity, rows: Int64Array) -> tuple[Int64Array, list[str]]:
    """Kind of work of each piece: compute, copy, or the kind of the collective."""
    names = ["compute", "communication", "copy"]
    work = activity.device.work[rows].astype(np.int64)
    kinds = pd.Categorical(activity.operations["kind"])
    known_kind = activity.device.operation[rows]
    communicates = (work == Work.COMMUNICATION) & (known_kind >= 0)
    result = work.copy()
    if communicates.any():
        codes = kinds.codes.astype(np.int64)[known_kind[communicates]]
        result[communicates] = np.where(codes >= 0, codes + len(names), int(Work.COMMUNICATION))
        names += [str(kind) for kind in kinds.categories]
    return result, names


def _coarsened(pieces: _Pieces, low: int, high: int, limit: int) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """(piece that names each span, start, end, pieces in it), at most about ``limit`` spans."""
    count = len(pieces.lane)
    if count <= limit:
        return np.arange(count, dtype=np.int64), pieces.start, pieces.end, pieces.merged
    lane, start, end, category = pieces.lane, pieces.start, pieces.end, pieces.category
    cell = max(1, (high - low) // limit)
    while True:
        short = end - start < cell
        slot = (start - low) // cell
        alike = short[1:] & short[:-1] & (slot[1:] == slot[:-1]) & (lane[1:] == lane[:-1])
        if cell < (high - low) // _FEWEST_CELLS:
            alike &= category[1:] == category[:-1]
        opens = np.append(True, ~alike)
        if int(opens.sum()) <= limit or cell > high - low:
            break
        cell *= 2
    first = np.flatnonzero(opens)
    run = np.cumsum(opens) - 1
    longest = np.lexsort((-(end - start), run))[first]  # runs are contiguous: the first of each run in this order is its longest
    return longest.astype(np.int64), start[first], np.maximum.reduceat(end, first), np.add.reduceat(pieces.merged, first)
