"""Everything about one device's memory that leaves the worker that read the file: small, picklable, whatever the length of the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from tracekit.manifest import Owners
from tracekit.memory.attribution import Attributed, attribute_snapshot, attribute_trace
from tracekit.memory.blocks import MOST_BYTES
from tracekit.memory.downsample import downsample
from tracekit.memory.extremes import Extreme, extremes
from tracekit.memory.fragmentation import Fragmentation, of_counters, of_history, pool_reserved
from tracekit.memory.growth import Growing, growth
from tracekit.memory.lifecycle import Lifecycle, lifecycle
from tracekit.memory.moments import unit_of
from tracekit.memory.oom import OutOfMemory, out_of_memory, retries
from tracekit.memory.ownership import OLDER, PARAMETERS
from tracekit.memory.peak import Holding, category_curves, composition, holdings, shortened
from tracekit.memory.pins import unused_at
from tracekit.memory.snapshot import DeviceHistory, Ranges, Snapshot
from tracekit.memory.timeline import Counters, Timeline, logs_of
from tracekit.memory.user_frames import is_own, labels
from tracekit.trace.correlate import enclosing
from tracekit.trace.events import Category, Int64Array, RankTables
from tracekit.trace.steps import PHASE_NAMES, Phases, Steps
from tracekit.units import NULL
from tracekit.vocabulary import CATEGORIES

#: Buckets of a down-sampled curve; up to four points each.
BUCKETS = 300
#: Lines of a stack that are kept.
MOST_FRAMES = 10
_BEGAN_LATE = "the trace began after the job: what was allocated before it is not in it, so every amount is at least so much"


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
    ``recorded_peak``: the highest value of the device's own counter. ``timed``: times are times, not numbers of entries. ``growing``: what
    grows from step to step, None with too few of them. ``end_owners`` add up to ``end``. ``total``: what the device has. ``file``: the
    snapshot that told it.
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
    retries: list[OutOfMemory] = field(default_factory=list)
    most_reserved: Extreme | None = None
    most_unused: Extreme | None = None
    growing: list[Growing] | None = None
    end_owners: list[Holding] = field(default_factory=list)
    total: int | None = None
    file: str = ""
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
        summary = summarize(attributed, phases, steps, source, unit, fragments, peak)
        reserved, unused = extremes(attributed, phases, steps, partial(of_counters, attributed.timeline))
        growing = growth(attributed, steps, phases, partial(_python_stack, tables))
        least, total = _began_late(attributed, counters), _total(tables, log.device)
        notes = [*summary.notes, _BEGAN_LATE] if least else summary.notes
        found.append(
            replace(
                summary,
                most_reserved=reserved,
                most_unused=unused,
                growing=growing,
                least=summary.least or least,
                total=total,
                notes=notes,
            )
        )
    return found


def _began_late(found: Attributed, counters: Counters) -> bool:
    """Whether a host's trace misses what was allocated before it: the profiler keeps the host's counter, from its own beginning on.

    A trace in which parameters are born began with the job; a manifest registers what stood before.
    """
    return counters.of_host and not found.from_manifest and not (found.ownership.category == PARAMETERS).any()


def _total(tables: RankTables, device: str) -> int | None:
    """What a device has, by the trace's deviceProperties."""
    listed = tables.metadata.get("deviceProperties")
    for entry in listed if isinstance(listed, list) else []:
        if isinstance(entry, dict) and device.endswith(f":{entry.get('id')}"):
            size = entry.get("totalGlobalMem")
            return size if isinstance(size, int) and 0 < size < MOST_BYTES else None
    return None


def _python_stack(tables: RankTables, row: int) -> list[str]:
    """The innermost Python function of the user's own code around an event, where the profiler recorded stacks (with_stack)."""
    python = tables.rows(Category.PYTHON)
    own = python[tables.each_text(tables.name[python], lambda text: is_own(text.partition("(")[0]))]
    around = int(enclosing(tables, np.array([row], np.int64), own)[0]) if len(own) else -1
    return [tables.text(int(tables.name[around]))] if around >= 0 else []


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
            end_owners=_standing(snapshot, device),
            pools=pools,
            notes=[*snapshot.problems, why],
        )
    attributed, phases, steps = attribute_snapshot(snapshot, device, owners)
    timeline = attributed.timeline
    peak = timeline.peak()
    fragments = of_history(device, timeline, snapshot.pools, peak)
    unit = _latest_unit(snapshot.ranges, snapshot.stacks.strings, int(timeline.log.time[max(peak, 0)]))
    source = "manifest+snapshot" if attributed.from_manifest else "snapshot"
    summary = summarize(attributed, phases, steps, source, unit, fragments, peak)
    moment = summary.peak_ns if snapshot.timed else None
    notes = [*snapshot.problems, *summary.notes]
    reserved, unused = extremes(
        attributed,
        phases,
        steps,
        partial(of_history, device, timeline, snapshot.pools),
        partial(unused_at, attributed, device, snapshot.pools),
    )
    return replace(
        summary,
        pools=pools,
        failures=out_of_memory(snapshot, device, timeline),
        retries=retries(snapshot, device, timeline),
        most_reserved=reserved,
        most_unused=unused,
        notes=notes,
        timed=snapshot.timed,
        peak_ns=moment,
        growing=growth(attributed, steps, phases, partial(_stack, snapshot, device)),
        end_owners=holdings(attributed, len(timeline.log) - 1),
        least=snapshot.overflowed,
    )


def _stack(snapshot: Snapshot, device: DeviceHistory, row: int) -> list[str]:
    """Lines of own code of the stack of an entry, innermost first."""
    stacks, stack = snapshot.stacks, int(device.entries.stack[row])
    frames = stacks.frame[stacks.start[max(stack, 0)] : stacks.start[max(stack, 0) + 1]].tolist()
    own = [frame for frame in frames if is_own(stacks.strings[int(stacks.frames[frame, 0])].replace("\\", "/"))]
    return [stacks.describe(frame) for frame in own[:MOST_FRAMES]]


def _standing(snapshot: Snapshot, device: DeviceHistory) -> list[Holding]:
    """Owners at the end of a snapshot without a history: their stacks, where the blocks have any."""
    names, state = labels(snapshot.stacks), device.state
    amounts: dict[str, list[int]] = {}
    for stack, size in zip(state.stack[state.allocated].tolist(), state.size[state.allocated].tolist(), strict=True):
        amounts.setdefault(names[max(stack, 0)], []).append(size)
    rows = [Holding(CATEGORIES[OLDER], "", name, sum(sizes), len(sizes)) for name, sizes in amounts.items()]
    return shortened(sorted(rows, key=lambda row: -row.bytes))


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
