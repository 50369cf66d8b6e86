"""Work of each step by class: what one run can be held against another, whatever its pids, streams and kernel names.

Per rank and step (the step that launched a piece of work, else the step it starts in; what was launched before the recording is left out):

    compute     calls and time of kernels and copies by the operator around their launch and its shapes; by kernel name where no
                operator is known; on CPU jobs of the top-level operators. Each piece counts by itself [ns]
    phase       the same time, summed over what forward, backward and optimizer launched [ns]
    collective  calls, full bytes, time (duration, transfer, wait) by axis, kind, purpose, element type and full size

A rank keeps its KEPT classes of compute with the largest time and adds up the rest under ``other``, exactly. Truncated windows are
left out: what their steps lack cannot be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tracekit.analyses._common import UNKNOWN_AXIS, axes, codes, text_of, whole
from tracekit.findings import Finding, Section
from tracekit.job.activity import Activity, Work
from tracekit.job.model import Job
from tracekit.trace.codes import distinct_rows
from tracekit.trace.events import BoolArray, Int64Array, RankTables
from tracekit.trace.steps import PHASE_NAMES, StepTimes, step_times
from tracekit.units import NS_PER_US, NULL

ORDER = 900

#: Classes of compute that one rank keeps; kernels named with a class; longest text of shapes.
KEPT, MOST_KERNELS, LONGEST_SHAPES = 200, 4, 160
OTHER = "other"
_PHASES = tuple(name for name in PHASE_NAMES if name)

ClassKey = tuple[str, str, str]  # operator, shapes, work


@dataclass(frozen=True)
class StepWork:
    """``keys[i]`` has ``calls[i, step]`` pieces of ``time[i, step]`` ns, of the kernels ``kernels[i]``; ``phases[p, step]`` ns."""

    keys: list[ClassKey]
    kernels: list[tuple[str, ...]]
    calls: Int64Array
    time: Int64Array
    phases: Int64Array
    has_phases: bool


def reduce(activity: Activity) -> StepWork | None:
    """Classes of one window; None where there was no work at all."""
    device, times = activity.device, step_times(activity.steps, activity.window)
    if not len(device):
        return None
    marked = len(activity.steps) > 0
    step = (
        np.where(device.launch_step >= 0, device.launch_step, device.step).astype(np.int64) if marked else np.zeros(len(device), np.int64)
    )
    own = (device.work != Work.COMMUNICATION) & ~_launched_before(activity)
    chosen = np.flatnonzero(own & (step >= 0) & (step < len(times)))
    step, length = step[chosen], (device.end - device.start)[chosen]
    work = device.work[chosen].astype(np.int64)
    name, row = _operator(activity, chosen)
    dims = _dims(activity.tables, row)
    first, key = _as_met(distinct_rows(work, name, dims)[1])
    calls, time = _sums(key, step, length, len(first), len(times))
    kept, rest = _largest(time)
    keys = [_key(activity.tables, int(name[i]), int(dims[i]), int(work[i])) for i in first[kept]]
    kernels = _kernel_names(activity, key, device.name[chosen], kept)
    calls_kept, time_kept = [calls[kept]], [time[kept]]
    if len(rest):
        keys.append((OTHER, "", "compute"))
        kernels.append(())
        calls_kept.append(calls[rest].sum(axis=0, keepdims=True))
        time_kept.append(time[rest].sum(axis=0, keepdims=True))
    phases = _phases(activity, chosen, step, length, times)
    return StepWork(keys, kernels, np.concatenate(calls_kept), np.concatenate(time_kept), phases, len(activity.phases.start) > 0)


def _as_met(code: Int64Array) -> tuple[Int64Array, Int64Array]:
    """(where each class is met first, the class of each entry), classes numbered in the order in which they are met."""
    first = np.full(int(code.max(initial=-1)) + 1, len(code))
    np.minimum.at(first, code, np.arange(len(code)))
    order = np.argsort(first, kind="stable")
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    return first[order].astype(np.int64), number[code]


def _launched_before(activity: Activity) -> BoolArray:
    """Work without a launch that starts before any of its stream that has one: a step ahead of the recording launched it."""
    device = activity.device
    known = device.launch_ts != NULL
    if activity.on_cpu or not known.any():
        return np.zeros(len(device), np.bool_)
    stream = distinct_rows(device.device, device.stream)[1]
    first = np.full(int(stream.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, stream[known], device.start[known])
    before: BoolArray = ~known & (device.start < first[stream])
    return before


def _operator(activity: Activity, chosen: Int64Array) -> tuple[Int64Array, Int64Array]:
    """(code of the name a piece of work goes by, events row of its operator or -1)."""
    device, tables = activity.device, activity.tables
    row = device.row[chosen] if activity.on_cpu else device.operator_row[chosen].astype(np.int64)
    name = np.where(row >= 0, tables.name[np.maximum(row, 0)], device.name[chosen]).astype(np.int64)
    return name, row


def _dims(tables: RankTables, row: Int64Array) -> Int64Array:
    """Code of the shapes text of each operator row; 0 where none is recorded."""
    side = tables.side["shapes"]
    at = side.at(row)
    if not len(side):
        return np.zeros(len(row), np.int64)
    return np.where((row >= 0) & (at >= 0), side.columns["Input Dims"][np.maximum(at, 0)], 0).astype(np.int64)


def _sums(key: Int64Array, step: Int64Array, values: Int64Array, count: int, steps: int) -> tuple[Int64Array, Int64Array]:
    calls, total = np.zeros((count, steps), np.int64), np.zeros((count, steps), np.int64)
    np.add.at(calls, (key, step), 1)
    np.add.at(total, (key, step), values)
    return calls, total


def _largest(time: Int64Array) -> tuple[Int64Array, Int64Array]:
    order = np.argsort(-time.sum(axis=1), kind="stable").astype(np.int64)
    return order[:KEPT], order[KEPT:]


def _key(tables: RankTables, name: int, dims: int, work: int) -> ClassKey:
    shapes = text_of(tables, dims) if dims else ""
    if len(shapes) > LONGEST_SHAPES:
        shapes = shapes[:LONGEST_SHAPES] + "…"
    return text_of(tables, name), shapes, Work(work).name.lower()


def _kernel_names(activity: Activity, key: Int64Array, name: Any, kept: Int64Array) -> list[tuple[str, ...]]:
    """The kernels that a class ran, by name; nothing on CPU jobs, whose operators are the work."""
    if activity.on_cpu:
        return [() for _ in kept]
    ones, codes = distinct_rows(key, np.asarray(name, np.int64))[0]
    found: dict[int, list[int]] = {}
    for one, code in zip(ones.tolist(), codes.tolist(), strict=True):
        found.setdefault(one, []).append(code)
    return [tuple(sorted(text_of(activity.tables, int(code)) for code in found.get(int(k), ()))[:MOST_KERNELS]) for k in kept]


def _phases(activity: Activity, chosen: Int64Array, step: Int64Array, length: Int64Array, times: StepTimes) -> Int64Array:
    """Time of what each phase launched, by step; work without a known launch has no phase."""
    device = activity.device
    called = device.start[chosen] if activity.on_cpu else device.launch_ts[chosen]
    phase = np.where(called != NULL, activity.phases.at(called), 0).astype(np.int64)
    total = np.zeros((len(PHASE_NAMES), len(times)), np.int64)
    np.add.at(total, (phase, step), length)
    return total[[PHASE_NAMES.index(name) for name in _PHASES]]


@dataclass(frozen=True)
class StepClasses:
    """``steps`` are (rank, step number or None) columns; every list of values has one entry a column."""

    steps: list[tuple[int, int | None]]
    compute: list[dict[str, Any]]
    phases: list[dict[str, Any]]
    collectives: list[dict[str, Any]]
    reason: str = ""

    def findings(self) -> list[Finding]:
        """Nothing: one run says nothing about another."""
        return []

    def sections(self) -> list[Section]:
        """Nothing: the tables of kernels, operators and collectives show the same work."""
        return []

    def json(self) -> dict[str, Any]:
        """``step_classes``."""
        if not self.steps:
            return {"step_classes": None, "not_measured": {"step_classes": self.reason}}
        steps = [{"rank": rank, "step": step} for rank, step in self.steps]
        return {"step_classes": {"steps": steps, "compute": self.compute, "phases": self.phases, "collectives": self.collectives}}


@dataclass(frozen=True)
class _Column:
    """One rank and step of one window."""

    window: int
    place: int  # of the step in its window
    rank: int
    number: int


def _columns(job: Job) -> tuple[list[_Column], dict[int, StepWork]]:
    """Every rank and step once (the first recording of it), and what was reduced of each window."""
    columns: list[_Column] = []
    work: dict[int, StepWork] = {}
    seen: set[tuple[int, int]] = set()
    for rank, index, reduced in job.reduced("step_classes"):
        window = job.windows[index]
        if reduced is None or not whole(window):
            continue
        work[index] = reduced
        for place, number in enumerate(step_times(window.steps, window.span).number.tolist()):
            if (rank, number) not in seen:
                seen.add((rank, number))
                columns.append(_Column(index, place, rank, number))
    return columns, work


def analyze(job: Job) -> StepClasses:
    """Join the classes of all ranks."""
    columns, work = _columns(job)
    if not columns:
        return StepClasses([], [], [], [], "no rank recorded a whole step of work")
    steps = [(column.rank, None if column.number == NULL else column.number) for column in columns]
    return StepClasses(steps, _compute(columns, work), _phase_rows(columns, work), _collectives(job, columns))


def _compute(columns: Sequence[_Column], work: dict[int, StepWork]) -> list[dict[str, Any]]:
    place: dict[ClassKey, int] = {}
    kernels: dict[ClassKey, set[str]] = {}
    for reduced in work.values():
        for key, names in zip(reduced.keys, reduced.kernels, strict=True):
            place.setdefault(key, len(place))
            kernels.setdefault(key, set()).update(names)
    calls, time = np.zeros((len(place), len(columns)), np.int64), np.zeros((len(place), len(columns)), np.int64)
    of_window: dict[int, list[tuple[int, int]]] = {index: [] for index in work}
    for number, column in enumerate(columns):
        of_window.setdefault(column.window, []).append((number, column.place))
    for index, reduced in work.items():
        rows = np.array([place[key] for key in reduced.keys], np.int64)
        own = of_window[index]
        here, there = (np.array([pair[i] for pair in own], np.int64) for i in range(2))
        calls[np.ix_(rows, here)] = reduced.calls[:, there]
        time[np.ix_(rows, here)] = reduced.time[:, there]
    order = sorted(place, key=lambda key: -int(time[place[key]].sum()))
    return [
        {
            "operator": operator,
            "shapes": shapes,
            "work": kind,
            "kernels": sorted(kernels[operator, shapes, kind])[:MOST_KERNELS],
            "calls": calls[place[operator, shapes, kind]].tolist(),
            "time_us": _us(time[place[operator, shapes, kind]]),
        }
        for operator, shapes, kind in order
    ]


def _phase_rows(columns: Sequence[_Column], work: dict[int, StepWork]) -> list[dict[str, Any]]:
    """Time a phase; None for ranks whose trace marks no phase."""
    values = [
        [float(work[c.window].phases[p, c.place]) / NS_PER_US if work[c.window].has_phases else None for c in columns]
        for p in range(len(_PHASES))
    ]
    return [{"phase": name, "time_us": row} for name, row in zip(_PHASES, values, strict=True) if any(row)]


def _collectives(job: Job, columns: Sequence[_Column]) -> list[dict[str, Any]]:
    """Classes of communication, by the step that called it where the call is known."""
    operations = job.operations
    column = _column_of(job, columns)
    if not len(operations) or not (column >= 0).any():
        return []
    rows = np.flatnonzero(column >= 0)
    axis, axis_names = axes(job)
    kind, purpose, dtype = (codes(operations[name]) for name in ("kind", "purpose", "dtype"))
    full = operations["full_bytes"].to_numpy()
    frame = pd.DataFrame({"a": axis[rows], "k": kind[0][rows], "p": purpose[0][rows], "d": dtype[0][rows], "f": full[rows]})
    key = frame.groupby(list(frame.columns), sort=False).ngroup().to_numpy().astype(np.int64)
    first = rows[np.unique(key, return_index=True)[1]]
    length = (operations["end_ns"] - operations["start_ns"]).to_numpy()[rows]
    sums = {"calls": np.ones(len(rows), np.int64), "duration_us": length, **_parted(job, rows, length)}
    table = {name: _grid(key, column[rows], values, len(first), len(columns)) for name, values in sums.items()}
    found = []
    for place, row in enumerate(first.tolist()):
        size = int(full[row])
        names = (axis_names[axis[row]] or UNKNOWN_AXIS, kind[1][kind[0][row]], purpose[1][purpose[0][row]], dtype[1][dtype[0][row]])
        entry: dict[str, Any] = dict(zip(("axis", "kind", "purpose", "dtype"), names, strict=True))
        entry |= {"dtype": entry["dtype"] or None, "full_bytes": None if size == NULL else size}
        entry |= {name: values[place].tolist() if name == "calls" else _us(values[place]) for name, values in table.items()}
        found.append(entry)
    return sorted(found, key=lambda entry: -sum(entry["duration_us"]))


def _column_of(job: Job, columns: Sequence[_Column]) -> Int64Array:
    """Column of each operation; -1 where its window or step has none."""
    operations = job.operations
    called = operations["launch_step_number"].to_numpy()
    number = np.where(called != NULL, called, operations["step_number"].to_numpy())
    place = {(column.window, column.number): index for index, column in enumerate(columns)}
    window = operations["window"].to_numpy()
    marked = np.array([len(w.steps) > 0 for w in job.windows], np.bool_)
    number = np.where(marked[window] if len(window) else False, number, NULL) if len(job.windows) else number
    pairs, inverse = distinct_rows(window, number)
    columns_of = np.array([place.get((w, n), -1) for w, n in np.stack(pairs, axis=1).tolist()], np.int64)
    return columns_of[inverse]


def _parted(job: Job, rows: Int64Array, length: Int64Array) -> dict[str, Int64Array]:
    """A call's time as waiting for the last rank and the transfer behind it; all transfer where it is matched with nobody."""
    wait = job.operations["wait_ns"].to_numpy()[rows]
    waited = np.where(wait == NULL, 0, np.minimum(np.maximum(wait, 0), length))
    return {"transfer_us": length - waited, "wait_us": waited}


def _grid(key: Int64Array, column: Int64Array, values: Int64Array, count: int, width: int) -> Int64Array:
    total = np.zeros((count, width), np.int64)
    np.add.at(total, (key, column), values)
    return total


def _us(ns: Iterable[int] | Int64Array) -> list[float]:
    return [float(value) / NS_PER_US for value in np.asarray(ns).tolist()]
