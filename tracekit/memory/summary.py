"""Everything about one device's memory that leaves the worker that read the file: small, picklable, whatever the length of the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tracekit.manifest import Owners
from tracekit.memory.attribution import Attributed, attribute_snapshot, attribute_trace
from tracekit.memory.downsample import downsample
from tracekit.memory.fragmentation import Fragmentation, of_counters, of_history, pool_reserved
from tracekit.memory.lifecycle import Lifecycle, lifecycle
from tracekit.memory.moments import unit_of
from tracekit.memory.oom import OutOfMemory, out_of_memory
from tracekit.memory.peak import Holding, category_curves, composition, holdings
from tracekit.memory.snapshot import DeviceHistory, Ranges, Snapshot
from tracekit.memory.timeline import Timeline, logs_of
from tracekit.trace.events import Category, Int64Array, RankTables
from tracekit.trace.steps import PHASE_NAMES, Phases, Steps
from tracekit.units import NULL

#: Buckets of a down-sampled curve; up to four points each.
BUCKETS = 300


@dataclass(frozen=True)
class Curve:
    """A down-sampled timeline: ``time`` [ns], bytes at each; ``categories`` add up to ``allocated``. ``reserved`` NULL where not known."""

    time: Int64Array
    allocated: Int64Array
    reserved: Int64Array
    categories: dict[str, Int64Array]


@dataclass(frozen=True)
class StepPeak:
    """The most that was allocated during one step."""

    step: int
    bytes: int
    time_ns: int


@dataclass(frozen=True)
class DeviceMemory:
    """One device of one rank. Bytes; None where not known, with the reason in ``notes``.

    ``source`` is manifest+events, manifest+snapshot, snapshot, events or timeline: how owners were found. ``peak_step`` is the step's
    number, ``peak_phase`` forward, backward, optimizer or '', ``peak_unit`` the unit at work then. ``least``: amounts are lower bounds.
    ``recorded_peak``: the highest value of the device's own counter. ``timed``: times are times, not numbers of entries.
    """

    device: str
    source: str
    peak: int | None
    peak_ns: int | None = None
    peak_step: int | None = None
    peak_phase: str = ""
    peak_unit: str = ""
    reserved_peak: int | None = None
    start: int | None = None
    end: int | None = None
    reserved_end: int | None = None
    recorded_peak: int | None = None
    least: bool = False
    categories: dict[str, int] = field(default_factory=dict)
    holdings: list[Holding] = field(default_factory=list)
    curve: Curve | None = None
    steps: list[StepPeak] = field(default_factory=list)
    fragmentation: Fragmentation | None = None
    pools: dict[str, int] = field(default_factory=dict)
    failures: list[OutOfMemory] = field(default_factory=list)
    lifecycle: Lifecycle | None = None
    timed: bool = True
    notes: list[str] = field(default_factory=list)


def of_trace(
    tables: RankTables, phases: Phases, steps: Steps, owners: Owners | None, span: tuple[int, int] | None = None
) -> list[DeviceMemory]:
    """Every device that the trace's ``[memory]`` events speak of. ``span`` [ns, half open]: the time whose peak is wanted; None all."""
    logs = logs_of(tables)
    unseen = max([log for log, counters in logs if not counters.of_host] or [log for log, _ in logs], key=len, default=None)
    found = []
    for log, counters in logs:
        others = [other for other, _ in logs if other is not log] if log is unseen else None
        attributed = attribute_trace(tables, log, counters, phases, steps, owners, others)
        source = "manifest+events" if attributed.from_manifest else "events"
        peak = attributed.timeline.peak(span)
        moment = attributed.timeline.time_of(peak)
        fragments = of_counters(attributed.timeline, peak)
        unit = _unit_in_trace(tables, moment) if moment is not None else ""
        found.append(summarize(attributed, phases, steps, source, unit, fragments, peak))
    return found


def of_snapshot(snapshot: Snapshot, owners: Owners | None = None) -> list[DeviceMemory]:
    """Every device of a snapshot; only its state at the end where it has no history."""
    return [_of_history(snapshot, device, owners) for device in snapshot.devices]


def _of_history(snapshot: Snapshot, device: DeviceHistory, owners: Owners | None) -> DeviceMemory:
    pools = pool_reserved(device, snapshot.pools)
    if not len(device.entries):
        why = f"nothing is recorded of device {device.index} but its memory at the end: its peak is not known"
        return DeviceMemory(
            f"cuda:{device.index}",
            "snapshot",
            None,
            end=device.end_allocated,
            reserved_end=device.end_reserved,
            pools=pools,
            notes=[*snapshot.problems, why],
        )
    attributed, phases, steps = attribute_snapshot(snapshot, device, owners)
    timeline = attributed.timeline
    peak = timeline.peak()
    fragments = of_history(device, timeline, snapshot.pools, peak)
    unit = _latest_unit(snapshot.ranges, snapshot.stacks.strings, int(timeline.log.time[max(peak, 0)]))
    source = "manifest+snapshot" if attributed.from_manifest else "snapshot"
    failures = out_of_memory(snapshot, device, timeline)
    summary = summarize(attributed, phases, steps, source, unit, fragments, peak)
    moment = summary.peak_ns if snapshot.timed else None
    notes = [*snapshot.problems, *summary.notes]
    return replace(summary, pools=pools, failures=failures, notes=notes, timed=snapshot.timed, peak_ns=moment)


def summarize(
    found: Attributed, phases: Phases, steps: Steps, source: str, unit: str, fragments: Fragmentation | None, position: int
) -> DeviceMemory:
    """The compact form of a timeline with its owners; ``position`` is the event of the peak."""
    timeline = found.timeline
    moment = timeline.time_of(position)
    at = np.array([moment if moment is not None else NULL], np.int64)
    step = int(steps.index_at(at)[0]) if moment is not None else -1
    known = timeline.reserved != NULL
    return DeviceMemory(
        device=timeline.log.device,
        source=source,
        peak=int(timeline.allocated[position + 1]),
        peak_ns=moment,
        peak_step=int(steps.number[step]) if step >= 0 else None,
        peak_phase=PHASE_NAMES[int(phases.at(at)[0])] if moment is not None else "",
        peak_unit=unit,
        reserved_peak=int(timeline.reserved.max()) if known.all() else None,
        start=timeline.start_bytes,
        end=timeline.end_bytes,
        reserved_end=int(timeline.reserved[-1]) if known.all() else None,
        recorded_peak=None if timeline.recorded == NULL else timeline.recorded,
        least=timeline.least,
        categories=composition(found, position),
        holdings=holdings(found, position),
        curve=_curve(found),
        steps=_step_peaks(timeline, steps),
        fragmentation=fragments,
        lifecycle=lifecycle(found, phases, steps),
        notes=timeline.notes,
    )


def _curve(found: Attributed) -> Curve:
    timeline = found.timeline
    places = downsample(timeline.allocated, BUCKETS)
    time = timeline.log.time[np.maximum(places - 1, 0)] if len(timeline.log) else np.zeros(len(places), np.int64)
    return Curve(time, timeline.allocated[places], timeline.reserved[places], category_curves(found, places))


def _step_peaks(timeline: Timeline, steps: Steps) -> list[StepPeak]:
    """The highest point of every step, what stood at its beginning included."""
    found = []
    time = timeline.log.time
    low, high = np.searchsorted(time, steps.start, side="left"), np.searchsorted(time, steps.end, side="left")
    for number, start, first, last in zip(steps.number.tolist(), steps.start.tolist(), low.tolist(), high.tolist(), strict=True):
        place = first + int(timeline.allocated[first : last + 1].argmax())
        moment = max(int(time[place - 1]), start) if place > 0 else start
        found.append(StepPeak(number, int(timeline.allocated[place]), moment))
    return found


def _unit_in_trace(tables: RankTables, moment: int) -> str:
    """The unit whose range began last before a moment, on any host thread."""
    rows = tables.rows(Category.USER_ANNOTATION)
    rows = rows[tables.each_text(tables.name[rows], lambda text: bool(unit_of(text))) & (tables.ts[rows] <= moment)]
    return unit_of(tables.text(int(tables.name[rows[tables.ts[rows].argmax()]]))) if len(rows) else ""


def _latest_unit(ranges: Ranges, texts: Sequence[str], moment: int) -> str:
    begun = np.flatnonzero(ranges.start <= moment)
    named = [unit_of(texts[code]) for code in ranges.name[begun].tolist()]
    return next((unit for unit in reversed(named) if unit), "")
