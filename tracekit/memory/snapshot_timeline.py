"""The timeline of each device of a snapshot, as the allocator counts.

The history tells what was asked for; the allocator gives multiples of 512 bytes (or what ``roundup_power2_divisions`` makes of it), and a
whole block where what would be left is too small. So every size is rounded as the allocator does, and blocks that stand at the end have the
size that the segments give them. The history is played backwards from the end: what is live at the end without an allocation in the
history, and what is freed without one, is older than the recording. Allocated memory falls when a free is requested, active memory when it
is completed (other streams may still use the block in between).

Source: ``round_size`` and ``roundup_power2_next_division`` of torch's c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tracekit.memory.blocks import Blocks, Log, live_bytes, pair, standing
from tracekit.memory.snapshot import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    DeviceHistory,
    Entries,
)
from tracekit.memory.timeline import Timeline
from tracekit.trace.events import Int64Array
from tracekit.units import NULL, format_bytes

#: The allocator hands out multiples of this.
ROUNDING = 512
#: Sizes from which the entries of roundup_power2_divisions count: 1 MiB, 2 MiB, ...
_FIRST_INTERVAL = 20


def timeline(device: DeviceHistory, settings: Mapping[str, Any] | None = None) -> Timeline:
    """The timeline of a device that has a history. ``settings``: the snapshot's allocator settings."""
    entries = device.entries
    size = rounded(entries.size, settings or {}) if _aligned(entries) else entries.size
    change, requested, completed = _changes(entries, size)
    log = Log(f"cuda:{device.index}", entries.time, entries.address, change, np.arange(len(entries), dtype=np.int64))
    blocks, notes = _anchored(pair(log), log, device)
    allocated = live_bytes(blocks, len(log))
    active = allocated + _pending(blocks, requested, completed, device, len(log))
    reserved, problem = _reserved(device, active)
    older = int(allocated[0])
    if older:
        text = format_bytes(older) + (f" ({older / 2**20:,.0f} MiB)" if older >= 2**20 else "")
        notes.append(f"{text} were allocated before recording began")
    return Timeline(log, blocks, allocated, np.zeros_like(allocated), reserved, active, False, NULL, [*notes, *problem])


def _aligned(entries: Entries) -> bool:
    """Whether blocks begin where torch's allocator lets them begin; where not, sizes are taken as they are."""
    return not (entries.address[entries.action == ALLOC] % ROUNDING).any()


def rounded(size: Int64Array, settings: Mapping[str, Any]) -> Int64Array:
    """Bytes that the allocator gives for requests of ``size``."""
    given = np.maximum(-(-size // ROUNDING), 1) * ROUNDING
    divisions = _divisions(settings)
    if divisions is None:
        return np.asarray(np.where(size > 0, given, 0), np.int64)
    power = np.int64(1) << np.floor(np.log2(np.maximum(size, 1).astype(np.float64))).astype(np.int64)
    power = np.where(power > size, power >> 1, power)  # float64 rounds sizes just below a power of two up
    interval = np.clip(np.log2(np.maximum(power, 1)).astype(np.int64) - _FIRST_INTERVAL, 0, len(divisions) - 1)
    count = divisions[interval]
    step = np.maximum(power // np.maximum(count, 1), 1)
    chosen = (count > 1) & (size > ROUNDING * count)
    given = np.where(chosen, -(-size // step) * step, given)
    return np.asarray(np.where(size > 0, given, 0), np.int64)


def _divisions(settings: Mapping[str, Any]) -> Int64Array | None:
    """Divisions of each interval of sizes; None where requests are only rounded to 512."""
    found = settings.get("roundup_power2_divisions")
    if not isinstance(found, Mapping):
        return None
    counts = [value if isinstance(value, int) and 0 <= value <= 64 else 0 for _, value in sorted(found.items(), key=_interval)]
    return np.array(counts, np.int64) if any(count > 1 for count in counts) else None


def _interval(item: tuple[str, Any]) -> int:
    return int(item[0]) if item[0].isdigit() else 1 << 60


def _changes(entries: Entries, size: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """(bytes that each entry adds to allocated memory, requests of frees that are completed later, these completions).

    The completion of a free that was requested before changes nothing any more.
    """
    frees = (entries.action == FREE_REQUESTED) | (entries.action == FREE_COMPLETED)
    change = np.where(entries.action == ALLOC, size, np.where(frees, -size, 0))
    change[entries.address == NULL] = 0
    events = np.flatnonzero(change != 0)
    order = events[np.argsort(entries.address[events], kind="stable")]
    before, after = order[:-1], order[1:]
    same = entries.address[after] == entries.address[before]
    pairs = same & (entries.action[before] == FREE_REQUESTED) & (entries.action[after] == FREE_COMPLETED)
    change[after[pairs]] = 0
    return np.asarray(change, np.int64), before[pairs], after[pairs]


def _pending(blocks: Blocks, requested: Int64Array, completed: Int64Array, device: DeviceHistory, length: int) -> Int64Array:
    """Bytes whose free is requested and not completed, behind each entry; entry 0 is before the first one."""
    if not (device.entries.action == FREE_COMPLETED).any():
        return np.zeros(length + 1, np.int64)
    freed = np.zeros(length + 1, np.int64)
    freed[np.minimum(blocks.death, length)] = blocks.bytes
    waiting = np.setdiff1d(np.flatnonzero(device.entries.action == FREE_REQUESTED), requested)
    waits = device.state.address[device.state.active & ~device.state.allocated]
    waiting = waiting[np.isin(device.entries.address[waiting], waits)]
    change = np.zeros(length + 1, np.int64)
    np.add.at(change, np.concatenate([requested, waiting]) + 1, freed[np.concatenate([requested, waiting])])
    np.subtract.at(change, completed + 1, freed[requested])
    return np.cumsum(change, dtype=np.int64)


def _anchored(blocks: Blocks, log: Log, device: DeviceHistory) -> tuple[Blocks, list[str]]:
    """Blocks of the history brought together with those at the end."""
    state, notes = device.state, []
    used = np.flatnonzero(state.allocated)
    used = used[np.argsort(state.address[used], kind="stable")]
    open_ = np.flatnonzero(blocks.death >= len(log))
    at = np.minimum(np.searchsorted(state.address[used], blocks.address[open_]), max(len(used) - 1, 0))
    found = state.address[used][at] == blocks.address[open_] if len(used) else np.zeros(len(open_), np.bool_)
    gone = int((~found).sum())
    if gone:
        amount = format_bytes(int(blocks.bytes[open_[~found]].sum()))
        notes.append(f"{gone} blocks ({amount}) are never freed in the history, but not in the segments at the end: it contradicts itself")
    size = blocks.bytes.copy()
    size[open_[found]] = state.size[used[at[found]]]
    blocks = replace(blocks, bytes=size)
    unseen = np.setdiff1d(used, used[at[found]])
    older = standing(state.address[unseen], state.size[unseen], len(log))
    older = replace(older, birth=_last_seen(blocks, older.address, len(log)))
    return blocks.joined(older), notes


def _last_seen(blocks: Blocks, address: Int64Array, length: int) -> Int64Array:
    """Where a block that is live at the end can have begun: behind the last one at its address; -1 for an address never seen."""
    closed = blocks.death < length
    order = np.lexsort((blocks.death[closed], blocks.address[closed]))
    places, ends = blocks.address[closed][order], blocks.death[closed][order]
    at = np.searchsorted(places, address, side="right") - 1
    if not len(places):
        return np.full(len(address), -1, np.int64)
    return np.where((at >= 0) & (places[at] == address), ends[at], -1)


def _backwards(change: Int64Array, end: int) -> Int64Array:
    """A curve from its changes and its end, one entry more than there are changes."""
    total = np.concatenate([[0], np.cumsum(change, dtype=np.int64)])
    return np.asarray(total + (end - int(total[-1])), np.int64)


def segment_changes(entries: Entries) -> Int64Array:
    """Bytes that each entry adds to reserved memory."""
    grown = np.where(np.isin(entries.action, (SEGMENT_ALLOC, SEGMENT_MAP)), entries.size, 0)
    return np.asarray(np.where(np.isin(entries.action, (SEGMENT_FREE, SEGMENT_UNMAP)), -entries.size, grown), np.int64)


def _reserved(device: DeviceHistory, active: Int64Array) -> tuple[Int64Array, list[str]]:
    change = segment_changes(device.entries)
    reserved = _backwards(change, device.end_reserved)
    if not device.end_reserved and not change.any():
        return np.full_like(reserved, NULL), ["the snapshot holds no segments: reserved memory is unknown"]
    if (reserved < active).any():
        why = "it contradicts itself: more is allocated than its segments hold"
        return np.full_like(reserved, NULL), [f"{why}; reserved memory and fragmentation are not given"]
    return reserved, []
