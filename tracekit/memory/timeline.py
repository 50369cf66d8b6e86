"""Allocated and reserved memory of one device over time.

From a profiler's ``[memory]`` events the sum of the live blocks explains the device's own counter, Total Allocated, up to memory that the
log does not show: what is older than it, and what threads without the profiler did. With L(i) the live blocks behind event i and T(i) the
counter,

    unexplained(i) = max(T(i) - L(i), 0)        allocated(i) = L(i) + unexplained(i)

A device allocator's counter knows every free, even one whose event is lost. The host's counter is kept by the profiler itself: a free that
it did not see stays in it for good, so T is lowered where a new allocation shows that the block at its address was gone.
Without a counter, unexplained is the least that keeps the sum of all changes from falling below zero: a lower bound, and ``least`` says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from tracekit.memory.blocks import MOST_BYTES, Blocks, Log, live_bytes, pair
from tracekit.notes import note
from tracekit.trace.events import Int64Array, RankTables
from tracekit.units import NULL, format_bytes

#: c10::DeviceType as torch spells it in a device's name. HIP calls itself cuda everywhere in Python.
DEVICE_TYPES = {0: "cpu", 1: "cuda", 6: "cuda", 9: "xla", 12: "xpu", 13: "mps", 15: "hpu", 19: "mtia", 20: "privateuseone"}
_HOST = 0


@dataclass(frozen=True)
class Timeline:
    """One device's memory. Curves have one entry more than the log: entry 0 is before its first event, entry i + 1 behind event i.

    ``reserved`` and ``active`` are NULL where not known. ``least``: amounts are lower bounds. ``recorded`` is the highest value of the
    device's own counter, NULL without one.
    """

    log: Log
    blocks: Blocks
    allocated: Int64Array
    unexplained: Int64Array
    reserved: Int64Array
    active: Int64Array
    least: bool = False
    recorded: int = NULL
    notes: list[str] = field(default_factory=list)

    @property
    def start_bytes(self) -> int:
        """Allocated before the first event."""
        return int(self.allocated[0])

    @property
    def end_bytes(self) -> int:
        """Allocated behind the last event."""
        return int(self.allocated[-1])

    def peak(self, span: tuple[int, int] | None = None) -> int:
        """Position of the event behind which most is allocated, the first of several; -1 when that is before all of them.

        ``span`` [ns, half open]: only within it, what stands when it begins included.
        """
        low, high = (0, len(self.log)) if span is None else (int(place) for place in np.searchsorted(self.log.time, span, side="left"))
        return low + int(self.allocated[low : high + 1].argmax()) - 1

    def time_of(self, position: int) -> int | None:
        """Time of an event [ns]; before the first event its time; None for an empty log."""
        return int(self.log.time[max(position, 0)]) if len(self.log) else None


@dataclass(frozen=True)
class Counters:
    """The device's own counters behind each event of a log, NULL where not recorded. ``of_host``: kept by the profiler, see above."""

    allocated: Int64Array
    reserved: Int64Array
    of_host: bool


def logs_of(tables: RankTables) -> list[tuple[Log, Counters]]:
    """The ``[memory]`` events of each device, in order of time; devices in order of type and number."""
    side = tables.side["memory"]
    column = side.columns
    good = (np.abs(column["Bytes"]) < MOST_BYTES) & (column["Bytes"] != NULL) & (tables.ts[side.rows] != NULL)
    if not good.all():
        tables.coverage.note(note("memory_events_left_out", (~good).sum()))
    kind = np.where(column["Device Type"] == NULL, _HOST, column["Device Type"])
    index = np.where(kind == _HOST, -1, column["Device Id"])
    found = []
    for device_type, device_index in sorted({*zip(kind[good].tolist(), index[good].tolist(), strict=True)}):
        places = np.flatnonzero(good & (kind == device_type) & (index == device_index))
        places = places[np.argsort(tables.ts[side.rows[places]], kind="stable")]
        rows = side.rows[places]
        log = Log(device_name(device_type, device_index), tables.ts[rows], column["Addr"][places], column["Bytes"][places], rows)
        total, reserved = (_counter(column[name][places]) for name in ("Total Allocated", "Total Reserved"))
        if device_type == _HOST:
            reserved = np.full(len(places), NULL, np.int64)
        found.append((log, Counters(total, reserved, device_type == _HOST)))
    return found


def _counter(values: Int64Array) -> Int64Array:
    """NULL in place of what no counter can show."""
    return np.where((values >= 0) & (values < MOST_BYTES), values, NULL)


def device_name(device_type: int, index: int) -> str:
    """``cpu``, ``cuda:3``."""
    name = DEVICE_TYPES.get(device_type, f"device type {device_type}")
    return name if device_type == _HOST or index in (NULL, -1) else f"{name}:{index}"


def replay(log: Log, counters: Counters, blocks: Blocks | None = None, complete: bool = False) -> Timeline:
    """The timeline of a profiler's log. ``blocks``: those of the log and what else is known to have been; by default ``pair(log)``.

    ``complete``: all that stood before the log is among them. What a host's counter begins with beyond them was counted in an earlier
    recording of the process and freed unseen since.
    """
    given = blocks is not None
    blocks = pair(log) if blocks is None else blocks
    notes = _lost_note(blocks.where(blocks.lost & (blocks.birth_row >= 0)))
    lost = _cumulated(log, blocks.death[blocks.lost], blocks.bytes[blocks.lost])
    live = live_bytes(blocks, len(log))
    known = len(log) > 0 and not (counters.allocated == NULL).any()
    if known:
        total = _behind(counters.allocated, log.change)
        recorded = int(total.max())
        unexplained = np.maximum((total - lost if counters.of_host else total) - live, 0)
        if complete:
            unexplained = np.maximum(unexplained - unexplained[0], 0)
    else:
        recorded = NULL
        unexplained = _least(log, blocks, lost, live)
        notes.append("the profiler did not record Total Allocated: memory older than the trace is unknown, amounts are the least possible")
    reserved = np.full(len(log) + 1, NULL, np.int64)
    if len(log) and not (counters.reserved == NULL).any() and counters.reserved.any():
        reserved = np.concatenate([counters.reserved[:1], counters.reserved])
    timeline = Timeline(log, blocks, live + unexplained, unexplained, reserved, np.full_like(reserved, NULL), not known, recorded, notes)
    highest = int(timeline.allocated.max())
    if known and not given and highest != recorded:
        difference = f"{format_bytes(abs(highest - recorded))} {'more' if highest > recorded else 'less'}"
        return replace(timeline, notes=[*notes, f"the peak of the blocks is {difference} than the highest Total Allocated"])
    return timeline


def _behind(total: Int64Array, change: Int64Array) -> Int64Array:
    """The counter with its value before the first event in front."""
    return np.concatenate([[max(int(total[0] - change[0]), 0)], total]).astype(np.int64)


def _cumulated(log: Log, positions: Int64Array, amounts: Int64Array) -> Int64Array:
    """Running sum of amounts that come with these events, one entry more than the log."""
    change = np.zeros(len(log) + 1, np.int64)
    np.add.at(change, positions + 1, amounts)
    return np.cumsum(change, dtype=np.int64)


def _least(log: Log, blocks: Blocks, lost: Int64Array, live: Int64Array) -> Int64Array:
    """Unexplained without a counter: what the changes add up to beyond the blocks, lifted so that it never is below zero."""
    older = int(blocks.bytes[blocks.born_before].sum())
    gap = older + np.concatenate([[0], np.cumsum(log.change, dtype=np.int64)]) - lost - live
    return np.asarray(gap - min(int(gap.min()), 0), np.int64)


def _lost_note(blocks: Blocks) -> list[str]:
    count, amount = int(blocks.lost.sum()), int(blocks.bytes[blocks.lost].sum())
    if not count:
        return []
    frees = "free is" if count == 1 else "frees are"
    return [f"{count} {frees} not in the trace ({format_bytes(amount)}): these blocks end where something else shows that they are gone"]
