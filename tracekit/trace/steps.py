"""Training steps and phases of one rank."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from tracekit.notes import note
from tracekit.trace import intervals
from tracekit.trace.durations import FOREIGN_NS, host_window
from tracekit.trace.events import Category, Int8Array, Int32Array, Int64Array, RankTables
from tracekit.units import NS_PER_MS, NULL

#: Values of ``Phases.kind``; index 0 is "not known".
#: A step so many times as long as the median step says nothing of the usual one.
FAR_OFF = 2.0
PHASE_NAMES = ("", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Steps:
    """Steps of one window, sorted by start, not overlapping. A step ends where its annotation ends.

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
class StepTimes:
    """The steps of one window on its own clock. ``number`` is NULL for the whole window of a trace that marks no steps."""

    number: Int64Array
    start: Int64Array
    end: Int64Array

    def __len__(self) -> int:
        return len(self.number)


def step_times(steps: Steps, span: tuple[int, int]) -> StepTimes:
    """Marked steps; one step over ``span`` where the trace marks none; nothing where ``--steps`` left none of them."""
    if len(steps) or steps.source != "none":
        return StepTimes(steps.number, steps.start, steps.end)
    bounds = [np.array([edge], np.int64) for edge in span]
    return StepTimes(np.array([NULL], np.int64), bounds[0], bounds[1])


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
#: Marks of training loops that don't call profiler.step(): "iteration 12", "train_step#3", "## step 7 ##", "Iteration: 4", "global_step=5".
_ITERATION = re.compile(r"(?:## )?(?:(?:train|training|global)[ _-]?)?(?:iteration|iter|step)[ _#:=/\[-]{0,3}(\d{1,15})\]?(?: ##)?$", re.I)

#: What names say of the phase, in the order of PHASE_NAMES[1:]. A name that says two things ("forward_backward") says nothing.
_PHASES = (
    re.compile(r"(?:^|[^a-z])forward(?:[^a-z]|$)|^PP:\d+F\d+|^\w+\(F\)$", re.I),
    re.compile(r"(?:^|[^a-z])backward(?:[^a-z]|$)|^PP:\d+[BIW]\d+|^\w+\([BW]\)$", re.I),
    re.compile(r"^Optimizer\.(?:step|zero_grad)|(?:^|[^a-z])optim(?:i[sz]er)?(?:[^a-z]|$)", re.I),
)
_FORWARD, _BACKWARD, _OPTIMIZER = 1, 2, 3
_AUTOGRAD = "autograd::engine::evaluate_function"
_ACCUMULATE = "AccumulateGrad"
#: Pauses inside backward, or inside a forward known only by its operators, that are shorter than this belong to it.
_PAUSE_NS = NS_PER_MS
#: Where more of the time of tracked operators is outside all annotations of forward, or outside between two annotations of one forward,
#: the annotations are not the whole forward. What comes before the first one is the batch, what comes behind the last one the loss.
_UNCOVERED, _UNCOVERED_BETWEEN = 0.4, 0.1


def find_steps(tables: RankTables) -> Steps:
    """Steps by ProfilerStep on the host (its copy on the device is not a step), else by numbered iteration ranges, else none.

    Ranges inside another numbered range are its parts (micro-batches), not steps. Notes in ``tables.coverage`` when there are no step
    marks, or when marks were cut, repeat or overlap.
    """
    rows = tables.rows(Category.USER_ANNOTATION, Category.OPERATOR)
    seen = False
    for source, pattern in (("ProfilerStep", _PROFILER_STEP), ("iteration", _ITERATION)):
        number = _numbers(tables, rows, pattern)
        marks = number >= 0
        if not marks.any():
            continue
        seen = True
        steps = _steps(tables, rows[marks], number[marks], source)
        if len(steps):
            if source == "iteration":
                tables.coverage.note(note("steps_by_iteration"))
            return steps
    tables.coverage.note(note("no_whole_steps" if seen else "no_steps"))
    nothing = np.empty(0, np.int64)
    return Steps(nothing, nothing, nothing, "none")


def is_step_mark(text: str) -> bool:
    """Whether a range of this name may be a step."""
    return _PROFILER_STEP.match(text) is not None or _ITERATION.match(text) is not None


def _numbers(tables: RankTables, rows: Int64Array, pattern: re.Pattern[str]) -> Int64Array:
    """The number in the name of each row that matches; -1 otherwise."""

    def number(text: str) -> int:
        found = pattern.match(text)
        return int(found.group(1)) if found else -1

    return tables.each_text(tables.name[rows], number, np.int64)


def _steps(tables: RankTables, rows: Int64Array, number: Int64Array, source: str) -> Steps:
    start, duration = tables.ts[rows], tables.dur[rows]
    window = host_window(tables)
    complete = (duration > 0) & (duration < FOREIGN_NS) & (start >= window.low) & (start <= window.high)
    if not complete.all():
        tables.coverage.note(note("steps_without_end", (~complete).sum()))
    start, number, end = start[complete], number[complete], (start + duration)[complete]
    order = np.lexsort((-end, start))
    start, end, number = start[order], end[order], number[order]
    inner = np.append(False, end[1:] <= np.maximum.accumulate(end)[:-1])[: len(end)]
    if inner.any():
        tables.coverage.note(note("ranges_inside", inner.sum()))
    start, end, number = start[~inner], end[~inner], number[~inner]
    start, end, number = _each_number_once(tables, start, end, number)
    overlap = end[:-1] > start[1:]
    if overlap.any():
        tables.coverage.note(note("steps_overlap", overlap.sum()))
        end[:-1] = np.minimum(end[:-1], start[1:])
    return Steps(number, start, end, source)


def _each_number_once(
    tables: RankTables, start: Int64Array, end: Int64Array, number: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """A mark seen on two threads at one time is one step; one whose number comes back later (a new epoch) is another: numbered on."""
    used, first, inverse = np.unique(number, return_index=True, return_inverse=True)
    if len(used) == len(number):
        return start, end, number
    later = start >= end[first][inverse]
    once = later.copy()
    once[first] = True
    start, end, number = start[once], end[once], number[once]
    if later.any():
        number = numbered_on(number, frozenset())
        tables.coverage.note(note("steps_repeat", later.sum(), numbers=tuple(int(n) for n in number[later[once]])))
    return start, end, number


def numbered_on(number: Int64Array, used: frozenset[int]) -> Int64Array:
    """Step numbers, in order of time, none twice and none that is used already: from the first that repeats on they count on from the
    highest.
    """
    seen = set(used)
    shift, result = 0, []
    for own in number.tolist():
        if own + shift in seen:
            shift = max(seen) + 1 - own
        result.append(own + shift)
        seen.add(own + shift)
    return np.array(result, np.int64)


def find_phases(tables: RankTables) -> Phases:
    """Forward, backward and optimizer on the host's clock: by annotations, and backward by what the autograd engine runs.

    Where ranges of different phases overlap the latest started wins, but a forward inside backward is recomputation: backward. Operators
    that autograd tracks (``Sequence number``) outside backward and optimizer are forward as well where the annotations cover only part of
    them: there are none, or a framework or the user's model has ranges of that name around single modules.
    """
    rows, kind = _named(tables)
    sets = [_ranges(tables, rows[kind == k]) for k in (_FORWARD, _BACKWARD, _OPTIMIZER)]
    backward = intervals.union(*_ranges(tables, np.concatenate([rows[kind == _BACKWARD], _autograd(tables)])))
    start, end = sets[0]
    again = intervals.covered(start, start + 1, backward) > 0
    forward = intervals.union(start[~again], end[~again])
    optimizer = intervals.union(*sets[2])
    pause = np.array([0, 0, _PAUSE_NS, 0], np.int64)
    elsewhere = intervals.union(*(np.concatenate(pair) for pair in zip(backward, optimizer, strict=True)))
    tracked = intervals.subtract(_tracked(tables), elsewhere)
    if _in_part(tracked, forward, elsewhere):
        forward = intervals.union(*(np.concatenate(pair) for pair in zip(forward, tracked, strict=True)))
        pause[_FORWARD] = _PAUSE_NS
    return _filled(_one_line([forward, backward, optimizer]), pause)


def _named(tables: RankTables) -> tuple[Int64Array, Int8Array]:
    """(rows of ranges whose name says a phase, index of the phase): annotations, and the operators that stood for them before 2022."""
    rows = tables.rows(Category.USER_ANNOTATION, Category.OPERATOR)
    annotated = tables.category[rows] == Category.USER_ANNOTATION
    old = not annotated.any()
    by_annotation = np.zeros(len(tables.strings), np.int8)
    by_operator = np.zeros(len(tables.strings), np.int8)
    for code in np.unique(tables.name[rows]).tolist():
        text = tables.text(code)
        named_phases = [kind for kind, pattern in enumerate(_PHASES, _FORWARD) if pattern.search(text)]
        if len(named_phases) == 1:
            by_annotation[code] = named_phases[0]
            # "aten::nll_loss_forward" and the fused kernels of a compiler only sound like a phase.
            if text.startswith("Optimizer.") or (old and "::" not in text and not text.startswith("triton")):
                by_operator[code] = named_phases[0]
    kind = np.where(annotated, by_annotation[tables.name[rows]], by_operator[tables.name[rows]])
    return rows[kind > 0], kind[kind > 0]


def _ranges(tables: RankTables, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
    rows = rows[(tables.dur[rows] > 0) & (tables.ts[rows] != NULL)]
    return tables.ts[rows], tables.ts[rows] + tables.dur[rows]


def _in_part(tracked: intervals.IntervalSet, forward: intervals.IntervalSet, elsewhere: intervals.IntervalSet) -> bool:
    """Whether annotations of forward cover only part of the forward that the tracked operators are."""
    outside = intervals.subtract(tracked, forward)
    whole = intervals.measure(*tracked)
    if not len(forward[0]) or intervals.measure(*outside) > _UNCOVERED * whole:
        return True
    far = np.iinfo(np.int64).max
    ended, apart = (np.searchsorted(line[1], outside[0], side="right") for line in (forward, elsewhere))
    preceding, following = np.append(-far, forward[1])[ended], np.append(forward[0], far)[ended]
    began, ends = np.append(-far, elsewhere[1])[apart], np.append(elsewhere[0], far)[apart]
    between = (preceding > began) & (following < ends)
    return intervals.measure(outside[0][between], outside[1][between]) > _UNCOVERED_BETWEEN * whole


def _autograd(tables: RankTables) -> Int64Array:
    """Operators of backward: the engine's own ranges, gradient accumulation, and what was made by a forward on another thread."""
    rows = tables.rows(Category.OPERATOR)
    run = tables.each_text(tables.name[rows], lambda text: text.startswith(_AUTOGRAD) or text.endswith(_ACCUMULATE))
    side = tables.side["autograd"]
    made = side.rows[side.columns["Fwd thread id"] > 0]
    return np.concatenate([rows[run], made[tables.category[made] == Category.OPERATOR]])


def _tracked(tables: RankTables) -> intervals.IntervalSet:
    """Operators that autograd records for a backward to come."""
    side = tables.side["autograd"]
    rows = side.rows[(side.columns["Sequence number"] >= 0) & ~(side.columns["Fwd thread id"] > 0)]
    return intervals.union(*_ranges(tables, rows[tables.category[rows] == Category.OPERATOR]))


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


def _filled(line: Phases, pause: Int64Array) -> Phases:
    """The line with neighbours of one phase joined when no more than ``pause[kind]`` lies between them."""
    if len(line.start) < 2:
        return line
    gap = line.start[1:] - line.end[:-1]
    opens = np.flatnonzero(np.append(True, (line.kind[1:] != line.kind[:-1]) | (gap > pause[line.kind[1:]])))
    last = np.append(opens[1:], len(line.start)) - 1
    return Phases(line.start[opens], line.end[last], line.kind[opens])
