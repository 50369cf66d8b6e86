"""Training steps and phases of one rank."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from tracekit.trace import intervals
from tracekit.trace.events import Category, Int8Array, Int32Array, Int64Array, RankTables
from tracekit.units import NS_PER_MS, NULL

#: Values of ``Phases.kind``; index 0 is "not known".
PHASE_NAMES = ("", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Steps:
    """Steps of one window, sorted by start, not overlapping.

    ``source``: 'ProfilerStep', 'iteration' or 'none' (no step marks: length 0).
    """

    number: Int64Array
    start: Int64Array
    end: Int64Array
    source: str

    def __len__(self) -> int:
        return len(self.number)

    def index_at(self, times: Int64Array) -> Int32Array:
        """Index of the step that holds each time (start <= t < end); -1 outside every step."""
        if not len(self.number):
            return np.full(len(times), -1, np.int32)
        index = np.searchsorted(self.start, times, side="right") - 1
        inside = (index >= 0) & (times < self.end[np.maximum(index, 0)])
        return np.where(inside, index, -1).astype(np.int32)


@dataclass(frozen=True)
class Phases:
    """Host intervals of known phase, sorted by start, not overlapping; ``kind`` indexes PHASE_NAMES."""

    start: Int64Array
    end: Int64Array
    kind: Int8Array

    def at(self, times: Int64Array) -> Int8Array:
        """Phase of each host time; 0 where not known."""
        if not len(self.start):
            return np.zeros(len(times), np.int8)
        index = np.searchsorted(self.start, times, side="right") - 1
        inside = (index >= 0) & (times < self.end[np.maximum(index, 0)])
        return np.where(inside, self.kind[np.maximum(index, 0)], 0).astype(np.int8)


# ---- finding them ---------------------------------------------------------------------------------------------------

_PROFILER_STEP = re.compile(r"ProfilerStep[#*]\s*(\d{1,15})$")
#: Marks of training loops that don't call profiler.step(): "iteration 12", "train_step#3", "## step 7 ##", "Iteration: 4".
_ITERATION = re.compile(r"(?:## )?(?:(?:train|training)[ _]?)?(?:iteration|iter|step)[ _#:]*(\d{1,15})(?: ##)?$", re.I)

_FORWARD = re.compile(r"(?:^|[^a-z])forward(?:[^a-z]|$)|^PP:\d+F\d+", re.I)
_BACKWARD = re.compile(r"(?:^|[^a-z])backward(?:[^a-z]|$)|^PP:\d+[BIW]\d+", re.I)
_OPTIMIZER = re.compile(r"^Optimizer\.(?:step|zero_grad)|(?:^|[^a-z])optimi[sz]er(?:[^a-z]|$)", re.I)
_AUTOGRAD = "autograd::engine::evaluate_function"
#: Pauses inside one phase that are shorter than this belong to it.
_PAUSE_NS = NS_PER_MS


def find_steps(tables: RankTables) -> Steps:
    """Steps by ProfilerStep on the host (its copy on the device is not a step), else by numbered iteration ranges, else none.

    Notes in ``tables.coverage`` when there are no step marks, or when marks were cut or overlap.
    """
    rows = tables.rows(Category.USER_ANNOTATION, Category.OPERATOR)
    for source, pattern in (("ProfilerStep", _PROFILER_STEP), ("iteration", _ITERATION)):
        number = _numbers(tables, rows, pattern)
        steps = _steps(tables, rows[number >= 0], number[number >= 0], source)
        if len(steps):
            if source == "iteration":
                tables.coverage.note("no ProfilerStep marks: steps are taken from numbered iteration ranges")
            return steps
    tables.coverage.note("no ProfilerStep marks (profiler.step() was not called): the whole trace is one window")
    nothing = np.empty(0, np.int64)
    return Steps(nothing, nothing, nothing, "none")


def _numbers(tables: RankTables, rows: Int64Array, pattern: re.Pattern[str]) -> Int64Array:
    """The number in the name of each row that matches; -1 otherwise."""
    used, inverse = np.unique(tables.name[rows], return_inverse=True)
    found = [pattern.match(tables.text(int(code))) for code in used]
    numbers = np.array([int(m.group(1)) if m else -1 for m in found] or [-1], np.int64)
    return numbers[inverse] if len(used) else np.full(len(rows), -1, np.int64)


def _steps(tables: RankTables, rows: Int64Array, number: Int64Array, source: str) -> Steps:
    start, duration = tables.ts[rows], tables.dur[rows]
    whole = (duration > 0) & (start != NULL)
    if not whole.all():
        tables.coverage.note(f"{int((~whole).sum())} step marks have no end: not counted as steps")
    start, number, end = start[whole], number[whole], (start + duration)[whole]
    order = np.lexsort((-end, start))
    start, end, number = start[order], end[order], number[order]
    _, first = np.unique(number, return_index=True)  # a mark seen on two threads is one step
    first.sort()
    start, end, number = start[first], end[first], number[first]
    overlap = end[:-1] > start[1:]
    if overlap.any():
        tables.coverage.note(f"{int(overlap.sum())} steps overlap the next one: they end where it starts")
        end[:-1] = np.minimum(end[:-1], start[1:])
        keep = end > start
        start, end, number = start[keep], end[keep], number[keep]
    return Steps(number, start, end, source)


def find_phases(tables: RankTables) -> Phases:
    """Forward, backward and optimizer on the host's clock: by annotations, and backward by the autograd engine's ranges.

    Where ranges of different phases overlap the latest started wins. Without any forward annotation, operators that autograd tracks
    (``Sequence number``) outside backward and optimizer are the forward.
    """
    kinds = [_by_name(tables, pattern) for pattern in (_FORWARD, _BACKWARD, _OPTIMIZER)]
    kinds[1] = _paused(intervals.union(*map(np.concatenate, zip(kinds[1], _autograd(tables), strict=True))))
    if not len(kinds[0][0]):
        kinds[0] = _tracked(tables, intervals.union(*map(np.concatenate, zip(kinds[1], kinds[2], strict=True))))
    return _one_line(kinds)


def _by_name(tables: RankTables, pattern: re.Pattern[str]) -> intervals.IntervalSet:
    rows = tables.rows(Category.USER_ANNOTATION)
    old = tables.rows(Category.OPERATOR) if pattern is _OPTIMIZER else rows[:0]
    rows = np.concatenate([rows, old])
    used, inverse = np.unique(tables.name[rows], return_inverse=True)
    verdict = np.array([pattern.search(tables.text(int(code))) is not None for code in used], np.bool_)
    rows = rows[verdict[inverse]] if len(used) else rows
    rows = rows[tables.dur[rows] > 0]
    return intervals.union(tables.ts[rows], tables.ts[rows] + tables.dur[rows])


def _autograd(tables: RankTables) -> intervals.IntervalSet:
    rows = tables.rows(Category.OPERATOR)
    codes = np.array([i for i, text in enumerate(tables.strings) if text and text.startswith(_AUTOGRAD)], np.int32)
    rows = rows[np.isin(tables.name[rows], codes)]
    rows = rows[tables.dur[rows] > 0]
    return intervals.union(tables.ts[rows], tables.ts[rows] + tables.dur[rows])


def _tracked(tables: RankTables, elsewhere: intervals.IntervalSet) -> intervals.IntervalSet:
    side = tables.side["autograd"]
    rows = side.rows[(side.columns["Sequence number"] >= 0) & ~(side.columns["Fwd thread id"] > 0)]
    rows = rows[(tables.category[rows] == Category.OPERATOR) & (tables.dur[rows] > 0)]
    found = _paused(intervals.union(tables.ts[rows], tables.ts[rows] + tables.dur[rows]))
    return intervals.subtract(found, elsewhere)


def _paused(found: intervals.IntervalSet) -> intervals.IntervalSet:
    """The set with short pauses filled."""
    start, end = found
    if len(start) < 2:
        return found
    opens = np.flatnonzero(np.append(True, start[1:] - end[:-1] > _PAUSE_NS))
    return start[opens], end[np.append(opens[1:], len(start)) - 1]


def _one_line(kinds: list[intervals.IntervalSet]) -> Phases:
    """One disjoint line of phases; where two overlap the latest started wins."""
    start = np.concatenate([s for s, _ in kinds])
    end = np.concatenate([e for _, e in kinds])
    kind = np.repeat(np.arange(1, 4, dtype=np.int8), [len(s) for s, _ in kinds])
    if not len(start):
        return Phases(start, end, kind)
    from tracekit.trace.sweep import innermost

    order = np.lexsort((-end, start))
    start, end, kind = start[order], end[order], kind[order]
    edges = np.unique(np.concatenate([start, end]))
    one = np.zeros(len(start), np.int64)
    top = innermost(one, start, end, np.zeros(len(edges), np.int64), edges, np.full(len(edges), len(start), np.int64))
    inside = top[:-1] >= 0
    return Phases(edges[:-1][inside], edges[1:][inside], kind[top[:-1][inside]])
