"""Memory that the allocator holds and nobody uses: how much at a moment, in which pools, and the largest piece in one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekit.memory.snapshot import DEFAULT_POOL, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, DeviceHistory
from tracekit.memory.snapshot_timeline import segment_changes
from tracekit.memory.timeline import Timeline
from tracekit.trace import intervals
from tracekit.trace.events import BoolArray, Int64Array
from tracekit.units import NULL


@dataclass(frozen=True)
class Fragmentation:
    """At one moment, in bytes; NULL where not known.

    ``free`` = reserved - active. ``private`` is the part of it in pools that other allocations cannot use (CUDA graphs, user pools): not
    fragmentation. ``largest``: the largest free range within one segment of the default pool, ``pieces``: how many such ranges there are.
    """

    reserved: int
    active: int
    free: int
    private: int = NULL
    largest: int = NULL
    pieces: int = NULL

    @property
    def unused(self) -> int:
        """Reserved, not in use, and not in a private pool."""
        return self.free - max(self.private, 0)

    @property
    def share(self) -> float:
        """Reusable free memory, of what is reserved."""
        return self.unused / self.reserved if self.reserved > 0 else 0.0


def of_counters(timeline: Timeline, position: int) -> Fragmentation | None:
    """From a profiler's counters: it knows what is reserved, not where. None where reserved memory is not recorded."""
    reserved = int(timeline.reserved[position + 1])
    if reserved == NULL:
        return None
    allocated = int(timeline.allocated[position + 1])
    return Fragmentation(reserved, allocated, reserved - allocated)


def of_history(device: DeviceHistory, timeline: Timeline, pools: list[tuple[int, int]], position: int) -> Fragmentation | None:
    """From a snapshot: what lies between the live blocks of every segment of that moment."""
    reserved, active = int(timeline.reserved[position + 1]), int(timeline.active[position + 1])
    if reserved == NULL:
        return None
    start, end, private = segments_at(device, pools, position)
    live = timeline.blocks.where(timeline.blocks.live(position) & (timeline.blocks.address != NULL))
    used = intervals.union(live.address, live.address + live.bytes)
    open_ = intervals.subtract((start[~private], end[~private]), used)
    closed = intervals.subtract((start[private], end[private]), used)
    largest = int((open_[1] - open_[0]).max()) if len(open_[0]) else 0
    return Fragmentation(reserved, active, reserved - active, intervals.measure(*closed), largest, len(open_[0]))


def pool_reserved(device: DeviceHistory, pools: list[tuple[int, int]]) -> dict[str, int]:
    """Reserved at the end by pool, ``(0, 0)`` the default one; segments whose pool is not recorded count there."""
    amounts: dict[str, int] = {}
    for code, size in zip(device.segments.pool.tolist(), device.segments.size.tolist(), strict=True):
        name = str(pools[code] if code >= 0 else DEFAULT_POOL)
        amounts[name] = amounts.get(name, 0) + size
    return amounts


def segments_at(device: DeviceHistory, pools: list[tuple[int, int]], position: int) -> tuple[Int64Array, Int64Array, BoolArray]:
    """Segments behind an event as (start, end, is in a private pool), by address: the end's, with what came later undone.

    Parts of an expandable segment that are mapped one by one are one segment.
    """
    entries, segments = device.entries, device.segments
    is_private = np.array([pair != DEFAULT_POOL for pair in pools] + [False], np.bool_)
    later = np.flatnonzero(segment_changes(entries) != 0)
    later = later[later > position]
    start = np.concatenate([segments.address, entries.address[later]])
    end = start + np.concatenate([segments.size, entries.size[later]])
    private = is_private[np.concatenate([segments.pool, entries.pool[later]])]
    there = np.concatenate([np.ones(len(segments.address), np.bool_), np.isin(entries.action[later], (SEGMENT_FREE, SEGMENT_UNMAP))])
    begins = np.concatenate([np.ones(len(segments.address), np.bool_), ~np.isin(entries.action[later], (SEGMENT_MAP, SEGMENT_UNMAP))])
    edges = np.unique(np.concatenate([start, end]))
    low, high = np.searchsorted(edges, start), np.searchsorted(edges, end)
    held, closed = np.zeros(len(edges), np.bool_), np.zeros(len(edges), np.bool_)
    ends_first = [*range(len(segments.address)), *range(len(start) - 1, len(segments.address) - 1, -1)]
    for i in ends_first:  # ranges overlap in part, so one after the other, the latest first
        held[low[i] : high[i]] = there[i]
        closed[low[i] : high[i]] = private[i]
    splits = np.zeros(len(edges), np.bool_)
    splits[low[begins & there]] = True
    opens = held & (splits | ~np.append(False, held[:-1])[: len(edges)] | (closed != np.append(False, closed[:-1])[: len(edges)]))
    first = np.flatnonzero(opens)
    ended = np.flatnonzero(held & np.append(opens[1:] | ~held[1:], True)[: len(edges)])
    return edges[first], edges[ended + 1] if len(ended) else edges[ended], closed[first]
