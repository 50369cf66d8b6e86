"""Why a device had nothing to do, per rank and step.

An idle gap [g0, g1) is a time in which no kernel, communication or copy runs on any stream. Let w be the work that starts at g1 and R the
moment the host's call that launched it returned (no later than g1). Let B be the time in which a host thread is inside a barrier. A gap is

    host_bound                R > g0: when the device ran dry, the host had not yet launched what comes next. Until R; and behind it, where
                              w starts within LAUNCH_NS of R. Also a gap that no work ends: nothing more was launched.
    waiting_for_collective    the part of such a gap that lies in B before R (the host itself waited for other ranks); and a gap with
                              R <= g0 (w was queued already) where the last communication to end before the gap ran on another stream
                              than w and ended at most EVENT_WAIT_NS before g1: w waited for its event
    other                     the rest: w was queued already (the queue, dependencies between streams: ``queued``), or its launch is not in
                              the trace

so that host_bound + waiting_for_collective + other = idle of the breakdown, exactly. A rank that waits INSIDE a collective is not idle: see
the waits of stragglers. ``after_sync`` is the part of host_bound in gaps that began while a host thread was inside a call that waits for
the device (``cudaStreamSynchronize``, ``hipFree``, ...): the host had stopped launching. ``profiler`` is the part of idle in which the
profiler itself was at work. What else the host did in its gaps: ``idle_causes``, by the calls that hold it up and by its ranges.

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
from tracekit.analyses._common import (
    CUT,
    STEP_COLUMNS,
    a_step,
    mean_by_rank,
    measured,
    rank_labels,
    step_frame,
    text_of,
    typical,
    worst_first,
)
from tracekit.collectives.kinds import kind_of_annotation, kind_of_operator
from tracekit.findings import Chart, Finding, Section, StackedBars, Table
from tracekit.graph.host import doing_words
from tracekit.job.activity import Activity, DeviceWork, Work
from tracekit.job.model import Job
from tracekit.schema import Column, table
from tracekit.trace import intervals
from tracekit.trace.events import BoolArray, Category, Int64Array, RankTables
from tracekit.trace.steps import step_times
from tracekit.units import NS_PER_US, NULL, format_ns, plural, shortened

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
    Column("queued_ns", "int64", "ns", "part of `other_us` in which the next work had been launched", "of other: launched already",
           "queued_us", CUT),
    Column("profiler_ns", "int64", "ns", "part of `idle_us` in which the profiler was at work", "Profiler", "profiler_us", CUT),
    Column("launches", "int64", "", "kernels and copies launched during the step", "Launches", "launches", "the job ran on the CPU"),
    Column("queue_ns", "int64", "ns", "mean time from their launch to their start", "Launch to start, mean", "launch_to_start_us",
           "nothing was launched"),
)  # fmt: skip
_SHOWN = ("rank", "step", "idle_ns", "host_bound_ns", "after_sync_ns", "waiting_ns", "other_ns", "queued_ns", "queue_ns", "launches")
IDLE_CAUSES = table(
    "idle_causes",
    Column("rank", "int64", "", "global rank", "Rank", "rank"),
    Column("name", "str", "", "call or range of the host", "The host was in", "name"),
    Column("blocks", "bool", "", "the call holds the host up (allocation, synchronous copy, synchronization, a long launch)", "", "blocks"),
    Column("time_ns", "int64", "ns", "host-bound time inside it, whole trace", "Host-bound time", "time_us"),
)
#: Ranges of the host that are listed.
_MOST_NAMES = 12
#: Work that starts so soon after its launch returned did not wait for anything else; a call of so long is more than what its name says.
LAUNCH_NS, LONG_CALL_NS = 100_000, 1_000_000
_CAUSES = {"host_bound_ns": "host-bound", "waiting_ns": "waiting for a collective", "other_ns": "other idle"}
#: Calls that return only when the device has done what it was given, and those that take long beside it.
_SYNCHRONIZE = re.compile(
    r"^(?:cuda|hip|cu|hsa_|musa|xpu|ze)\w*[Ss]ynchronize\w*$|^(?:cuda|hip)Memcpy(?:WithStream)?$|^(?:cuda|hip)(?:Host)?Free(?:Host)?$|^cuMemFree\w*$"
)
_BLOCKS = re.compile(r"^(?:cuda|hip|cu)\w*(?:Malloc|MemAlloc|MemCreate|MemMap|MemUnmap|HostAlloc|HostRegister|ModuleLoad|LibraryLoad)\w*$")
#: Calls that do next to nothing: where one takes long, it is the first of its process and creates the device's context.
_TRIVIAL = re.compile(
    r"^(?:cuda|hip|cu)(?:DeviceGet\w*|GetDevice\w*|SetDevice|Init|CtxCreate\w*|DevicePrimaryCtx\w*|StreamCreate\w*|EventCreate\w*)$"
)
_GRAPHS = re.compile(r"^(?:cuda|hip|cu)GraphLaunch")


@dataclass(frozen=True)
class IdleCauses:
    """One entry a step for each column of IDLE behind STEP_COLUMNS."""

    idle_ns: Int64Array
    host_bound_ns: Int64Array
    waiting_ns: Int64Array
    other_ns: Int64Array
    after_sync_ns: Int64Array
    queued_ns: Int64Array
    profiler_ns: Int64Array
    launches: Int64Array
    queue_ns: Int64Array
    causes: list[tuple[str, bool, int]]  # name, blocks, ns
    uses_graphs: bool
    api: str = ""  # cuda or hip, by the calls of the host; "" for any other device


def reduce(activity: Activity) -> IdleCauses | None:
    """Idle time of each step of one window by cause; None where there was no work at all."""
    device, times = activity.device, step_times(activity.steps, activity.window)
    if not len(device):
        return None
    gaps = _gaps(device, int(min(activity.window[0], *times.start)), int(max(activity.window[1], *times.end)))
    host, waiting, queued = (*_on_cpu(activity, gaps), intervals.empty()) if activity.on_cpu else _on_device(activity, gaps)
    dry = intervals.empty() if activity.on_cpu else _after_sync(activity.tables, gaps)
    profiler = _ranges(activity.tables, _is_profiler, Category.OVERHEAD, Category.OTHER)

    def each(part: intervals.IntervalSet) -> Int64Array:
        return intervals.covered(times.start, times.end, part)

    idle, host_ns, waiting_ns = each(gaps), each(host), each(waiting)
    launches, queue = _launches(activity, len(times))
    inside = intervals.intersect(host, intervals.union(times.start, times.end))
    return IdleCauses(
        idle_ns=idle,
        host_bound_ns=host_ns,
        waiting_ns=waiting_ns,
        other_ns=idle - host_ns - waiting_ns,
        after_sync_ns=each(intervals.intersect(host, dry)),
        queued_ns=each(queued),
        profiler_ns=each(intervals.intersect(gaps, profiler)),
        launches=launches,
        queue_ns=queue,
        causes=_causes(activity.tables, inside),
        uses_graphs=bool(activity.tables.each_text(activity.tables.name, lambda name: _GRAPHS.match(name) is not None).any()),
        api=_api(activity.tables),
    )


def _api(tables: RankTables) -> str:
    """The vendor's interface that the host calls."""
    calls = tables.rows(Category.RUNTIME)
    names = {tables.text(int(code))[:4] for code in np.unique(tables.name[calls])[:1000]}
    if any(name.startswith("hip") for name in names):
        return "hip"
    return "cuda" if any(name == "cuda" or name.startswith("cu") for name in names) else ""


def _causes(tables: RankTables, host: intervals.IntervalSet) -> list[tuple[str, bool, int]]:
    """(name, whether it is a call that holds the host up, host-bound time inside it) of the largest; calls first, ranges for the rest."""
    found: list[tuple[str, bool, int]] = []
    calls = tables.rows(Category.RUNTIME)
    calls = calls[(tables.dur[calls] > 0) & (tables.ts[calls] != NULL)]
    blocking = tables.each_text(tables.name[calls], lambda name: (_SYNCHRONIZE.match(name) or _BLOCKS.match(name)) is not None)
    blocking |= tables.dur[calls] >= LONG_CALL_NS
    blocking |= tables.each_text(tables.name[calls], lambda name: "Async" not in name and name.startswith(("cudaMemcpy", "hipMemcpy")))
    overhead = tables.rows(Category.OVERHEAD, Category.OTHER)
    left = _named_parts(tables, overhead[tables.each_text(tables.name[overhead], _is_profiler)], host, False, found)
    left = _named_parts(tables, calls[blocking], left, True, found)
    ranges = tables.rows(Category.USER_ANNOTATION, Category.PYTHON, Category.OPERATOR)
    ranges = ranges[(tables.dur[ranges] > 0) & tables.each_text(tables.name[ranges], lambda name: doing_words(name) != "")]
    _named_parts(tables, ranges, left, False, found)
    return sorted(found, key=lambda cause: -cause[2])[:_MOST_NAMES]


def _named_parts(
    tables: RankTables, rows: Int64Array, part: intervals.IntervalSet, blocks: bool, found: list[tuple[str, bool, int]]
) -> intervals.IntervalSet:
    """Adds the time of ``part`` inside the ranges of each name, the names that cover most first; returns what no name covers."""
    rows = rows[(tables.dur[rows] > 0) & (tables.ts[rows] != NULL)]
    names, length = np.unique(tables.name[rows], return_inverse=True)[0], tables.dur[rows]
    totals = [int(length[tables.name[rows] == code].sum()) for code in names.tolist()]
    for code in names[np.argsort(-np.array(totals, np.int64), kind="stable")][: 4 * _MOST_NAMES].tolist():
        own = rows[tables.name[rows] == code]
        inside = intervals.intersect(part, intervals.union(tables.ts[own], tables.ts[own] + tables.dur[own]))
        if len(inside[0]):
            found.append((text_of(tables, code), blocks, intervals.measure(*inside)))
            part = intervals.subtract(part, inside)
    return part


def _gaps(device: DeviceWork, low: int, high: int) -> intervals.IntervalSet:
    window = np.array([low], np.int64), np.array([high], np.int64)
    return intervals.subtract(window, intervals.union(device.start, device.end))


def _on_device(
    activity: Activity, gaps: intervals.IntervalSet
) -> tuple[intervals.IntervalSet, intervals.IntervalSet, intervals.IntervalSet]:
    """(host-bound, waiting, queued) as sets."""
    device, (start, end) = activity.device, gaps
    ending = np.searchsorted(device.start, end, side="left")
    ended = ending < len(device)
    at = np.minimum(ending, len(device) - 1)
    call = device.launch_row[at]
    back = activity.tables.ts[np.maximum(call, 0)] + np.maximum(activity.tables.dur[np.maximum(call, 0)], 0)
    returned = np.where(ended, np.where(call >= 0, np.minimum(back, end), NULL), end)
    host = (returned != NULL) & (returned > start)
    queued = ended & (returned != NULL) & ~host
    until = np.where(end - returned <= LAUNCH_NS, end, returned)
    event = _event_waits(device, start, end, device.stream[at].astype(np.int64))
    waited = queued & event
    barrier = _ranges(activity.tables, _is_barrier, Category.OPERATOR, Category.USER_ANNOTATION)
    blocked = intervals.intersect((start[host], np.minimum(returned, end)[host]), barrier)
    host_bound = intervals.subtract((start[host], until[host]), blocked)
    rest = queued & ~event
    behind = host & (until < end)
    return (
        host_bound,
        intervals.union(np.concatenate([start[waited], blocked[0]]), np.concatenate([end[waited], blocked[1]])),
        intervals.union(np.concatenate([start[rest], until[behind]]), np.concatenate([end[rest], end[behind]])),
    )


def _event_waits(device: DeviceWork, start: Int64Array, end: Int64Array, stream: Int64Array) -> BoolArray:
    """Gaps whose next work may have waited for the communication that ended last before them, on another stream."""
    kind = device.work == Work.COMMUNICATION
    if not kind.any():
        return np.zeros(len(start), np.bool_)
    order = np.argsort(device.end[kind], kind="stable")
    comm_end, comm_stream = device.end[kind][order], device.stream[kind][order]
    before = np.searchsorted(comm_end, start, side="right") - 1
    last = np.maximum(before, 0)
    event: BoolArray = (before >= 0) & (end - comm_end[last] <= thresholds.EVENT_WAIT_NS) & (comm_stream[last] != stream)
    return event


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


def _is_profiler(name: str) -> bool:
    return doing_words(name) == "the profiler"


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
    """``per_step`` has schema IDLE, ``causes`` IDLE_CAUSES. ``on_cpu``: the job has no device; ``graphs``: it replays CUDA graphs; ``api``:
    what its device is called by (cuda, hip, '').
    """

    per_step: pd.DataFrame
    causes: pd.DataFrame
    on_cpu: bool
    graphs: bool
    api: str = "cuda"

    def findings(self) -> list[Finding]:
        """Devices that wait for their host, and for a collective."""
        rows = typical(measured(self.per_step, "idle_ns"))
        step = float(rows["step_ns"].mean()) if len(rows) else 0.0
        if step <= 0:
            return []
        found = [
            self._host_bound(rows, step),
            self._queued(rows, step),
            self._waiting(rows, step),
            self._profiler(measured(self.per_step, "idle_ns")),
        ]
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
        charts: list[Chart] = [bars]
        if len(self.causes):
            charts.append(Table.of("What the host was in while the device waited for it", IDLE_CAUSES, self.causes))
        return [
            Section(
                "Idle time",
                lead,
                (*charts, Table.of("Every rank and step", IDLE, worst_first(self.per_step, "idle_ns"), _SHOWN)),
                name="idle",
            )
        ]

    def json(self) -> dict[str, Any]:
        """``idle``: one entry a rank and step; ``idle_causes``."""
        return {"idle": IDLE.records(self.per_step), "idle_causes": IDLE_CAUSES.records(self.causes)}

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
            text += f"; {sync:.0%} of that follows a call that waits for the device" if sync >= 0.2 else ""
            text += f"{self._named(rows)}."
            advice = self._advice(rows, sync)
        evidence = f"idle time by cause, mean over {plural(rows['rank'].nunique(), 'rank')}"
        return Finding("idle.host_bound", severity, text, host / step, "ratio of step", evidence, advice, int(host))

    def _largest(self, rows: pd.DataFrame) -> tuple[str, float, bool]:
        """(name that most of the host-bound time is inside of, its share, whether it holds the host up)."""
        whole = float(rows["host_bound_ns"].sum())
        if not len(self.causes) or whole <= 0:
            return "", 0.0, False
        sums = self.causes.groupby(["name", "blocks"], as_index=False)["time_ns"].sum()
        worst = sums.loc[sums["time_ns"].idxmax()]
        return str(worst["name"]), min(1.0, float(worst["time_ns"]) / whole), bool(worst["blocks"])

    def _named(self, rows: pd.DataFrame) -> str:
        name, share, blocks = self._largest(rows)
        if share < 0.1:
            return ""
        words = doing_words(name) or (_long_call(name) if blocks else "")
        return f"; {share:.1%} of it the host is in {shortened(name)}" + (f" ({words})" if words else "")

    def _advice(self, rows: pd.DataFrame, sync: float) -> str:
        """What fits the call that holds the host up; the general ways of keeping it ahead that the job does not use already."""
        name, share, blocks = self._largest(rows)
        words = (
            (doing_words(name) or ("loading kernels" if "aunch" in name else _long_call(name) if blocks else "")) if share >= 0.1 else ""
        )
        if words == "allocating or freeing device memory":
            return (
                "Keep the allocator from returning memory and asking for it anew: expandable segments, fewer distinct sizes, a lower peak, "
                "no empty_cache() in the loop."
            )
        if words == "loading data":
            return "Load data in worker processes (num_workers, prefetch_factor, pinned memory), ahead of the step."
        if words == "collecting garbage":
            return "Collect garbage at chosen steps, on all ranks together (gc.disable(), gc.collect()), or freeze what lives long."
        if words == "loading kernels":
            eagerly = {"cuda": " (CUDA_MODULE_LOADING=EAGER)", "hip": " (HIP_ENABLE_DEFERRED_LOADING=0)"}.get(self.api, "")
            return f"Kernels are loaded at their first launch: leave the first steps out, or load them eagerly{eagerly}."
        if words == "creating the device's context":
            return "The process starts up here: let the profiler wait a few steps before it records (schedule(wait=..., warmup=...))."
        ways = [] if self.graphs or not self.api else ["CUDA graphs" if self.api == "cuda" else "HIP graphs (torch.cuda.graph)"]
        ways += ["larger batches", "fused operators"] if self.graphs else ["torch.compile", "larger batches"]
        advice = f"Keep the host ahead: {', '.join([*ways, 'data loading in workers'])}."
        if sync >= 0.2:
            advice = "Remove what stops the host (.item(), .cpu(), printing a loss, synchronize()). " + advice
        return advice

    def _queued(self, rows: pd.DataFrame, step: float) -> Finding | None:
        queued = float(rows["queued_ns"].mean())
        severity = thresholds.HOST_BOUND.of(queued / step)
        if severity is None or self.on_cpu:
            return None
        text = (
            f"For {queued / step:.0%} of {a_step(rows)} ({format_ns(queued)}) the device is idle although its next work had been launched: "
        )
        text += "it waits for a dependency (an event of another stream, a copy, another process) or for the queue."
        advice = "Record stream waits (enable_cuda_sync_events=True) to see which; faster launching does not help."
        evidence = f"idle time by cause, mean over {plural(rows['rank'].nunique(), 'rank')}"
        return Finding("idle.queued", severity, text, queued / step, "ratio of step", evidence, advice, int(queued))

    def _profiler(self, rows: pd.DataFrame) -> Finding | None:
        """The profiler's own work is no part of the program: the step that holds most of it is named."""
        part = rows["profiler_ns"] / rows["step_ns"].clip(lower=1)
        if not len(rows) or part.max() < thresholds.HOST_BOUND.info:
            return None
        worst = rows.sort_values("profiler_ns", kind="stable").iloc[-1]
        where = f"step {int(worst['step'])}" if int(worst["step"]) != NULL else "the recorded window"
        ns = int(worst["profiler_ns"])
        text = f"{format_ns(ns)} of idle in {where} of rank {int(worst['rank'])} are the profiler requesting or flushing its buffers: "
        text += "they are not the program's."
        return Finding("idle.profiler", "warning", text, ns / NS_PER_US, "us", "idle time by cause", "Leave that step out (--steps).", ns)

    def _waiting(self, rows: pd.DataFrame, step: float) -> Finding | None:
        waiting = float(rows["waiting_ns"].mean())
        severity = thresholds.IDLE_WAITING.of(waiting / step)
        if severity is None:
            return None
        text = f"For {waiting / step:.0%} of {a_step(rows)} ({format_ns(waiting)}) ranks are idle waiting for a collective."
        advice = "Look at the stragglers, and remove barriers that nothing needs."
        evidence = f"idle time by cause, mean over {plural(rows['rank'].nunique(), 'rank')}"
        return Finding("idle.waiting", severity, text, waiting / step, "ratio of step", evidence, advice, int(waiting))


def _long_call(name: str) -> str:
    """What a call of this name does when it takes long; '' where that is not known."""
    if "aunch" in name:
        return "a launch that takes this long loads its module"
    return "creating the device's context" if _TRIVIAL.match(name) else ""


def analyze(job: Job) -> Idle:
    """Say why devices were idle."""
    columns = IDLE.names[len(STEP_COLUMNS) :]
    on_cpu = bool(job.traced) and all(window.on_cpu for window in job.traced)
    found = [(rank, reduced) for rank, _, reduced in job.reduced("idle") if reduced is not None]
    causes = [(rank, *cause) for rank, reduced in found for cause in reduced.causes]
    names = ("rank", "name", "blocks", "time_ns")
    frame = IDLE_CAUSES.frame({name: [row[i] for row in causes] for i, name in enumerate(names)}) if causes else IDLE_CAUSES.empty()
    api = next((reduced.api for _, reduced in found if reduced.api), "")
    return Idle(step_frame(IDLE, job, "idle", columns), frame, on_cpu, any(reduced.uses_graphs for _, reduced in found), api)
