"""Why a device had nothing to do, per rank and step.

An idle gap [g0, g1) is a time in which no kernel, communication or copy runs on any stream. Let w be the work that starts at g1 and L the
moment its launch began on the host. Let B be the time in which a host thread is inside a barrier. A gap is

    host_bound                L > g0: when the device ran dry, the host had not yet launched what comes next. Also a gap that no work
                              ends: nothing more was launched.
    waiting_for_collective    the part of such a gap that lies in B before L (the host itself waited for other ranks); and a gap with
                              L <= g0 (w was queued already) where the last communication to end before the gap ran on another stream
                              than w and ended at most EVENT_WAIT_NS before g1: w waited for its event
    other                     the rest: w was queued already (launch latency, dependencies between streams), or its launch is not in
                              the trace

so that host_bound + waiting_for_collective + other = idle of the breakdown, exactly. A rank that waits INSIDE a collective is not idle: see
the waits of stragglers. ``after_sync`` is the part of host_bound in gaps that began while a host thread was inside a synchronizing call
(``cudaStreamSynchronize``, ...): the host had stopped launching to wait for the device.

CPU jobs have no launches: time inside a collective call, but outside the backend's own communication, is waiting_for_collective; time
outside every operator is host_bound (Python, data loading); other is 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tracekit.analyses import _thresholds as thresholds
from tracekit.analyses._common import CUT, STEP_COLUMNS, a_step, mean_by_rank, measured, rank_labels, step_frame
from tracekit.collectives.kinds import kind_of_annotation, kind_of_operator
from tracekit.findings import Finding, Section, StackedBars, Table
from tracekit.job.activity import Activity, DeviceWork, Work
from tracekit.job.model import Job
from tracekit.schema import Column, table
from tracekit.trace import intervals
from tracekit.trace.events import Category, Int64Array, RankTables
from tracekit.trace.steps import step_times
from tracekit.units import NS_PER_US, NULL, format_ns, plural

ORDER = 25

IDLE = table(
    "idle",
    *STEP_COLUMNS,
    Column("idle_ns", "int64", "ns", "nothing on the device", "Idle", "idle_us", CUT),
    Column("host_bound_ns", "int64", "ns", "the host had not launched what comes next", "Host-bound", "host_bound_us", CUT),
    Column("waiting_ns", "int64", "ns", "for a collective", "Waiting", "waiting_for_collective_us", CUT),
    Column("other_ns", "int64", "ns", "queued already, or the launch is not known", "Other", "other_us", CUT),
    Column("after_sync_ns", "int64", "ns", "part of `host_bound_us` that began while the host waited for the device",
           "of it after a sync", "after_sync_us", CUT),
    Column("launches", "int64", "", "kernels and copies launched during the step", "Launches", "launches", "the job ran on the CPU"),
    Column("queue_ns", "int64", "ns", "mean time from their launch to their start", "Launch to start, mean", "launch_to_start_us",
           "nothing was launched"),
)  # fmt: skip
_SHOWN = ("rank", "step", "idle_ns", "host_bound_ns", "after_sync_ns", "waiting_ns", "other_ns", "queue_ns", "launches")
_CAUSES = {"host_bound_ns": "host-bound", "waiting_ns": "waiting for a collective", "other_ns": "other idle"}
_SYNCHRONIZE = re.compile(r"^(?:cuda|hip|cu|hsa_|musa|xpu|ze)\w*(?:Synchronize|synchronize)\b|^(?:cuda|hip)Memcpy$")


@dataclass(frozen=True)
class IdleCauses:
    """One entry a step for each column of IDLE behind STEP_COLUMNS."""

    idle_ns: Int64Array
    host_bound_ns: Int64Array
    waiting_ns: Int64Array
    other_ns: Int64Array
    after_sync_ns: Int64Array
    launches: Int64Array
    queue_ns: Int64Array


def reduce(activity: Activity) -> IdleCauses | None:
    """Idle time of each step of one window by cause; None where there was no work at all."""
    device, times = activity.device, step_times(activity.steps, activity.window)
    if not len(device):
        return None
    gaps = _gaps(device, int(min(activity.window[0], *times.start)), int(max(activity.window[1], *times.end)))
    host, waiting = _on_cpu(activity, gaps) if activity.on_cpu else _on_device(activity, gaps)
    dry = intervals.empty() if activity.on_cpu else _after_sync(activity.tables, gaps)

    def each(part: intervals.IntervalSet) -> Int64Array:
        return intervals.covered(times.start, times.end, part)

    idle, host_ns, waiting_ns = each(gaps), each(host), each(waiting)
    launches, queue = _launches(activity, len(times))
    return IdleCauses(idle, host_ns, waiting_ns, idle - host_ns - waiting_ns, each(intervals.intersect(host, dry)), launches, queue)


def _gaps(device: DeviceWork, low: int, high: int) -> intervals.IntervalSet:
    window = np.array([low], np.int64), np.array([high], np.int64)
    return intervals.subtract(window, intervals.union(device.start, device.end))


def _on_device(activity: Activity, gaps: intervals.IntervalSet) -> tuple[intervals.IntervalSet, intervals.IntervalSet]:
    """(host-bound, waiting) as sets."""
    device, (start, end) = activity.device, gaps
    ending = np.searchsorted(device.start, end, side="left")
    ended = ending < len(device)
    at = np.minimum(ending, len(device) - 1)
    launch = np.where(ended, device.launch_ts[at], end)
    host = (launch != NULL) & (launch > start)
    queued = ended & (launch != NULL) & ~host
    kind = device.work == Work.COMMUNICATION
    order = np.argsort(device.end[kind], kind="stable")
    comm_end, comm_stream = device.end[kind][order], device.stream[kind][order]
    if len(comm_end):
        before = np.searchsorted(comm_end, start, side="right") - 1
        last = np.maximum(before, 0)
        event = (before >= 0) & (end - comm_end[last] <= thresholds.EVENT_WAIT_NS) & (comm_stream[last] != device.stream[at])
    else:
        event = np.zeros(len(start), np.bool_)
    waited = queued & event
    barrier = _ranges(activity.tables, _is_barrier, Category.OPERATOR, Category.USER_ANNOTATION)
    blocked = intervals.intersect((start[host], np.minimum(launch, end)[host]), barrier)
    host_bound = intervals.subtract((start[host], end[host]), blocked)
    return host_bound, intervals.union(np.concatenate([start[waited], blocked[0]]), np.concatenate([end[waited], blocked[1]]))


def _on_cpu(activity: Activity, gaps: intervals.IntervalSet) -> tuple[intervals.IntervalSet, intervals.IntervalSet]:
    calls = _ranges(activity.tables, _is_call, Category.OPERATOR, Category.USER_ANNOTATION)
    waiting = intervals.intersect(gaps, calls)
    return intervals.subtract(gaps, waiting), waiting


def _after_sync(tables: RankTables, gaps: intervals.IntervalSet) -> intervals.IntervalSet:
    """The gaps that began while a host thread was inside a synchronizing call."""
    waits = _ranges(tables, lambda name: _SYNCHRONIZE.match(name) is not None, Category.RUNTIME)
    at = np.searchsorted(waits[0], gaps[0], side="right") - 1
    inside = (at >= 0) & (waits[1][np.maximum(at, 0)] > gaps[0]) if len(waits[0]) else np.zeros(len(gaps[0]), np.bool_)
    return gaps[0][inside], gaps[1][inside]


def _is_call(name: str) -> bool:
    return kind_of_operator(name) is not None or kind_of_annotation(name) is not None


def _is_barrier(name: str) -> bool:
    return kind_of_operator(name) == "barrier" or kind_of_annotation(name) == "barrier"


def _ranges(tables: RankTables, wanted: Callable[[str], bool], *categories: Category) -> intervals.IntervalSet:
    """Union of the host ranges whose name is wanted."""
    rows = tables.rows(*categories)
    rows = rows[tables.each_text(tables.name[rows], wanted) & (tables.dur[rows] > 0) & (tables.ts[rows] != NULL)]
    return intervals.union(tables.ts[rows], tables.ts[rows] + tables.dur[rows])


def _launches(activity: Activity, steps: int) -> tuple[Int64Array, Int64Array]:
    """(work launched in each step, its mean delay [ns]). A launch whose work seems to start before it counts with no delay."""
    if activity.on_cpu:
        return np.full(steps, NULL, np.int64), np.full(steps, NULL, np.int64)
    device = activity.device
    step = device.launch_step if len(activity.steps) else np.where(device.launch_row >= 0, 0, -1)
    chosen = (step >= 0) & (device.launch_ts != NULL)
    count = np.bincount(step[chosen], minlength=steps).astype(np.int64)
    delay = np.zeros(steps, np.int64)
    np.add.at(delay, step[chosen], np.maximum(device.start[chosen] - device.launch_ts[chosen], 0))
    return count, np.where(count > 0, delay // np.maximum(count, 1), NULL)


@dataclass(frozen=True)
class Idle:
    """``per_step`` has schema IDLE. ``on_cpu``: the job has no device."""

    per_step: pd.DataFrame
    on_cpu: bool

    def findings(self) -> list[Finding]:
        """Devices that wait for their host, and for a collective."""
        rows = measured(self.per_step, "idle_ns")
        step = float(rows["step_ns"].mean()) if len(rows) else 0.0
        if step <= 0:
            return []
        found = [self._host_bound(rows, step), self._waiting(rows, step)]
        return [finding for finding in found if finding is not None]

    def sections(self) -> list[Section]:
        """Idle time of each rank by cause."""
        means = mean_by_rank(self.per_step, ["idle_ns", *_CAUSES])
        if not len(means) or not means["idle_ns"].sum():
            return []
        bars = StackedBars(
            "Idle time of the mean step by cause",
            rank_labels(means.index),
            {name: (means[column] / NS_PER_US).tolist() for column, name in _CAUSES.items()},
            "us",
        )
        lead = (
            "Host-bound: the device ran dry because the next work had not been launched. Waiting: a collective had to be waited for "
            "outside the collective itself. Other: the next work was queued already, or its launch is not in the trace."
        )
        if self.on_cpu:
            lead = "Host-bound: no operator ran (Python, data loading). Waiting: inside a collective call that did not communicate itself."
        return [Section("Idle time", lead, (bars, Table.of("Every rank and step", IDLE, self.per_step, _SHOWN)), name="idle")]

    def json(self) -> dict[str, Any]:
        """``idle``: one entry a rank and step."""
        return {"idle": IDLE.records(self.per_step)}

    def _host_bound(self, rows: pd.DataFrame, step: float) -> Finding | None:
        host = float(rows["host_bound_ns"].mean())
        severity = thresholds.HOST_BOUND.of(host / step)
        if severity is None:
            return None
        span, sync = a_step(rows), float(rows["after_sync_ns"].sum()) / float(rows["host_bound_ns"].sum())
        if self.on_cpu:
            text = f"For {host / step:.0%} of {span} ({format_ns(host)}) no operator runs: the time goes to Python or data loading."
            advice = "Load data in worker processes, and compile or fuse small operators."
        else:
            text = f"For {host / step:.0%} of {span} ({format_ns(host)}) the device is idle because the host has not launched its work yet"
            text += f"; {sync:.0%} of that follows a synchronization." if sync >= 0.2 else "."
            advice = "Keep the host ahead: CUDA graphs, torch.compile, larger batches, data loading in workers."
            if sync >= 0.2:
                advice = "Remove what stops the host (.item(), .cpu(), printing a loss, torch.cuda.synchronize()). " + advice
        evidence = f"idle time by cause, mean over {plural(rows['rank'].nunique(), 'rank')}"
        return Finding("idle.host_bound", severity, text, host / step, "ratio of step", evidence, advice, int(host))

    def _waiting(self, rows: pd.DataFrame, step: float) -> Finding | None:
        waiting = float(rows["waiting_ns"].mean())
        severity = thresholds.IDLE_WAITING.of(waiting / step)
        if severity is None:
            return None
        text = f"For {waiting / step:.0%} of {a_step(rows)} ({format_ns(waiting)}) ranks are idle waiting for a collective."
        advice = "Look at the stragglers, and remove barriers that nothing needs."
        evidence = f"idle time by cause, mean over {plural(rows['rank'].nunique(), 'rank')}"
        return Finding("idle.waiting", severity, text, waiting / step, "ratio of step", evidence, advice, int(waiting))


def analyze(job: Job) -> Idle:
    """Say why devices were idle."""
    columns = IDLE.names[len(STEP_COLUMNS) :]
    on_cpu = bool(job.traced) and all(window.on_cpu for window in job.traced)
    return Idle(step_frame(IDLE, job, "idle", columns), on_cpu)
