"""The parts of each step of one window, on each device that its process works on (formulas: ``breakdown``)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from tracekit.analyses import _suspects
from tracekit.job.activity import Activity, Work
from tracekit.notes import note
from tracekit.trace import intervals
from tracekit.trace.events import BoolArray, Int64Array
from tracekit.trace.steps import StepTimes, step_times
from tracekit.units import NULL

_TOTALS = ("device_ns", "outside_ns", "suspects", "copies")
#: What a copy's name tells of it: from where, to where, and whether the host's side is pinned.
COPY_KINDS = ("in_pinned", "in", "out", "within", "other")
_COPY_NAMES = ((re.compile(r"HtoD.*pinned|pinned.*HtoD", re.I), 0), (re.compile(r"HtoD|HostToDevice", re.I), 1),
               (re.compile(r"DtoH|DeviceToHost", re.I), 2), (re.compile(r"DtoD|DeviceToDevice", re.I), 3))  # fmt: skip
#: A device with a smaller share of the busiest one's time saw a stray copy or two, and no work of the step.
_STRAY = 0.01


@dataclass(frozen=True)
class StepParts:
    """One entry a step for each column of BREAKDOWN behind STEP_COLUMNS, the steps of each device one after the other; device time [ns] in
    all and outside every marked step.
    """

    device: Int64Array
    compute_ns: Int64Array
    exposed_comm_ns: Int64Array
    hidden_comm_ns: Int64Array
    exposed_copy_ns: Int64Array
    hidden_copy_ns: Int64Array
    idle_ns: Int64Array
    unknown_ns: Int64Array
    launched_compute_ns: Int64Array
    launched_comm_ns: Int64Array
    device_ns: int
    outside_ns: int
    suspects: _suspects.Suspects = ()  # kernels that may be communication, with their time [ns]
    copies: Mapping[str, int] = field(default_factory=dict)  # exposed copies inside steps by what kind they are [ns]


def reduce(activity: Activity) -> StepParts | None:
    """The parts of each step of one window on each device; None where there was no work at all."""
    device, times = activity.device, step_times(activity.steps, activity.window)
    if not len(device):
        return None if activity.lost.device else _nothing_recorded(times)
    numbers = _devices(activity)
    if len(numbers) < 2:
        return _suspecting(activity, times, _parts(activity, times, -1))
    each = [_parts(_of_device(activity, number), times, number) for number in numbers]
    columns: dict[str, Any] = {
        f.name: np.concatenate([getattr(part, f.name) for part in each]) for f in fields(StepParts) if f.name not in _TOTALS
    }
    columns |= {name: sum(getattr(part, name) for part in each) for name in ("device_ns", "outside_ns")}
    columns["copies"] = dict(sum((Counter(part.copies) for part in each), Counter()))
    return _suspecting(activity, times, StepParts(**columns))


def _suspecting(activity: Activity, times: StepTimes, parts: StepParts) -> StepParts:
    """The parts with the kernels that may be communication."""
    comm = int((parts.exposed_comm_ns + parts.hidden_comm_ns).sum())
    return replace(parts, suspects=_suspects.suspects(activity, times, comm))


def _devices(activity: Activity) -> list[int]:
    """Devices that the process works on: those that are busy for more than a moment beside the busiest one."""
    device = activity.device
    number, inverse = np.unique(device.device, return_inverse=True)
    busy = np.bincount(inverse, (device.end - device.start).astype(np.float64))
    kept = number[busy >= _STRAY * busy.max()]
    if len(kept) < len(number) and not activity.on_cpu:
        activity.coverage.note(note("stray_device_work", len(number) - len(kept)))
    return [] if activity.on_cpu else [int(n) for n in kept]


def _of_device(activity: Activity, number: int) -> Activity:
    return replace(activity, device=activity.device.where(activity.device.device == number))


def _nothing_recorded(times: StepTimes) -> StepParts:
    """Of a rank whose device was not recorded: nothing is known."""
    unknown = np.full(len(times), NULL, np.int64)
    columns: dict[str, Any] = {f.name: unknown for f in fields(StepParts) if f.name not in _TOTALS}
    columns["unknown_ns"], columns["device"] = times.end - times.start, np.full(len(times), NULL, np.int64)
    return StepParts(**columns, device_ns=0, outside_ns=0)


def _parts(activity: Activity, times: StepTimes, number: int) -> StepParts:
    """The parts of each step of one device (-1: the only one)."""
    device = activity.device
    sets = [intervals.union(*device.of(work)) for work in (Work.COMPUTE, Work.COMMUNICATION, Work.COPY)]
    k, c, m = (intervals.covered(times.start, times.end, part) for part in sets)
    kc = intervals.union(*(np.concatenate(pair) for pair in zip(sets[0], sets[1], strict=True)))
    kcm = intervals.union(*(np.concatenate(pair) for pair in zip(kc, sets[2], strict=True)))
    in_kc, in_all = (intervals.covered(times.start, times.end, part) for part in (kc, kcm))
    unknown = intervals.covered(times.start, times.end, intervals.subtract(activity.lost.unknown, kcm))
    length = device.end - device.start
    marked = len(activity.steps) > 0
    return StepParts(
        device=np.full(len(times), NULL if number < 0 else number, np.int64),
        compute_ns=k,
        exposed_comm_ns=in_kc - k,
        hidden_comm_ns=c - (in_kc - k),
        exposed_copy_ns=in_all - in_kc,
        hidden_copy_ns=m - (in_all - in_kc),
        idle_ns=(times.end - times.start) - in_all - unknown,
        unknown_ns=unknown,
        launched_compute_ns=_launched(activity, Work.COMPUTE, times, k),
        launched_comm_ns=_launched(activity, Work.COMMUNICATION, times, c),
        device_ns=int(length.sum()),
        outside_ns=int(length[device.step < 0].sum()) if marked else 0,
        copies=_copies(activity, times, kc),
    )


def _copies(activity: Activity, times: StepTimes, busy: intervals.IntervalSet) -> dict[str, int]:
    """Copies inside steps beside which nothing of ``busy`` runs, by kind [ns]; copies of several kinds at once count for each."""
    device = activity.device
    rows = np.flatnonzero(device.work == Work.COPY)
    if not len(rows):
        return {}
    kind = activity.tables.each_text(
        device.name[rows], lambda name: next((kind for words, kind in _COPY_NAMES if words.search(name)), len(COPY_KINDS) - 1), np.int64
    )
    exposed = {}
    for code in np.unique(kind).tolist():
        own = rows[kind == code]
        alone = intervals.subtract(intervals.union(device.start[own], device.end[own]), busy)
        exposed[COPY_KINDS[code]] = int(intervals.covered(times.start, times.end, alone).sum())
    return {name: ns for name, ns in exposed.items() if ns}


def _launched(activity: Activity, work: Work, times: StepTimes, by_window: Int64Array) -> Int64Array:
    """Union [ns] of what was launched in each step. Work of CPU jobs, and of a window without steps, is launched where it runs."""
    device = activity.device
    if activity.on_cpu or not len(activity.steps):
        return by_window
    chosen: BoolArray = (device.work == work) & (device.launch_step >= 0)
    step, start, end = device.launch_step[chosen].astype(np.int64), device.start[chosen], device.end[chosen]
    if not len(start):
        return np.zeros(len(times), np.int64)
    # Each step gets a time line of its own, one behind the other, so that one union serves all.
    first = np.full(len(times), np.iinfo(np.int64).max)
    last = np.full(len(times), np.iinfo(np.int64).min)
    np.minimum.at(first, step, start)
    np.maximum.at(last, step, end)
    width = np.where(last > first, last - first, 0)
    if float(width.sum(dtype=np.float64)) > 2**62:
        return np.full(len(times), NULL, np.int64)  # beyond int64: only in a trace made to be so
    line = np.concatenate([[0], np.cumsum(width)[:-1]]).astype(np.int64)
    order = np.argsort(step, kind="stable")
    shift = (line - first)[step][order]
    busy = intervals.union(start[order] + shift, end[order] + shift)
    return intervals.covered(line, line + width, busy)
