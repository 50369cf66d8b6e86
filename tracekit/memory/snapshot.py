"""A CUDA memory snapshot as columns, and the timeline of each of its devices.

A snapshot is the allocator's state at its end (segments and their blocks) and a history of what led there. The history is played backwards
from the end: what is live at the end without an allocation in the history, and what is freed without one, is older than the recording.
Allocated memory falls when a free is requested, active memory when it is completed (other streams may still use the block in between).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tracekit.memory.blocks import Blocks, Log, live_bytes, pair, standing
from tracekit.memory.timeline import Timeline
from tracekit.trace.events import BoolArray, Int8Array, Int32Array, Int64Array
from tracekit.units import NULL, format_bytes

#: Actions of the history; what is not here is OTHER.
OTHER, ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM, SNAPSHOT = range(10)
ACTIONS = {
    "alloc": ALLOC,
    "free_requested": FREE_REQUESTED,
    "free_completed": FREE_COMPLETED,
    "free": FREE_REQUESTED,
    "segment_alloc": SEGMENT_ALLOC,
    "segment_map": SEGMENT_MAP,
    "segment_free": SEGMENT_FREE,
    "segment_unmap": SEGMENT_UNMAP,
    "oom": OOM,
    "snapshot": SNAPSHOT,
}
#: The allocator hands out multiples of this.
ROUNDING = 512
#: The pool of everything that asked for no pool of its own.
DEFAULT_POOL = (0, 0)


@dataclass(frozen=True)
class Entries:
    """The history of one device in its order; ``time`` [ns]. ``address`` is NULL and ``free`` [bytes] known for out-of-memory entries.

    ``stack`` is a node of the snapshot's stacks, ``note`` a string code of what the user attached, ``pool`` a code; -1 where not recorded.
    """

    action: Int8Array
    address: Int64Array
    size: Int64Array
    free: Int64Array
    time: Int64Array
    stack: Int32Array
    note: Int32Array
    pool: Int32Array

    def __len__(self) -> int:
        return len(self.action)


@dataclass(frozen=True)
class Segments:
    """Segments at the end. ``claimed`` [bytes]: what the segment itself says to be allocated, NULL where it says nothing."""

    address: Int64Array
    size: Int64Array
    pool: Int32Array
    claimed: Int64Array


@dataclass(frozen=True)
class State:
    """Blocks at the end. ``allocated``: in use; ``active``: in use, or freed but not yet completed."""

    address: Int64Array
    size: Int64Array
    requested: Int64Array
    allocated: BoolArray
    active: BoolArray
    stack: Int32Array


@dataclass(frozen=True)
class Stacks:
    """Distinct stacks one behind the other: stack i is ``frame[start[i]:start[i + 1]]``, innermost first. Stack 0 is the empty one.

    ``frames[j]`` = (file, line, function), file and function codes into ``strings``.
    """

    start: Int64Array
    frame: Int32Array
    frames: Int32Array
    strings: Sequence[str]

    def first(self, wanted: BoolArray) -> Int32Array:
        """Of each stack the innermost frame that is wanted (one entry a frame of ``frames``); -1 where there is none."""
        found = np.full(len(self.start) - 1, -1, np.int32)
        places = np.flatnonzero(wanted[self.frame])[::-1]
        found[np.searchsorted(self.start, places, side="right") - 1] = self.frame[places]  # of one stack the last one written is innermost
        return found

    def innermost(self, stacks: Int32Array) -> Int32Array:
        """The frame in which each stack stands; -1 for an empty or unknown one."""
        frame = self.first(np.ones(len(self.frames), np.bool_))
        return np.where(stacks > 0, frame[np.maximum(stacks, 0)], np.int32(-1))

    def describe(self, frame: int) -> str:
        """``adamw.py:140 step``; '' for -1."""
        if frame < 0:
            return ""
        file, line, name = (int(part) for part in self.frames[frame])
        return f"{self.strings[file].replace(chr(92), '/').rsplit('/', 1)[-1]}:{line} {self.strings[name]}".strip()


@dataclass(frozen=True)
class Ranges:
    """Annotations recorded beside the history: [start, end) in ns, ``name`` a string code, in order of start."""

    start: Int64Array
    end: Int64Array
    name: Int32Array


@dataclass(frozen=True)
class DeviceHistory:
    """Everything a snapshot holds of one device."""

    index: int
    entries: Entries
    segments: Segments
    state: State

    @property
    def end_allocated(self) -> int:
        """Allocated at the end, by the blocks."""
        return int(self.state.size[self.state.allocated].sum())

    @property
    def end_reserved(self) -> int:
        """Reserved at the end, by the segments."""
        return int(self.segments.size.sum())


@dataclass(frozen=True)
class Snapshot:
    """One snapshot file. ``pools`` are pairs of numbers by code. ``devices`` have a history, or memory at the end.

    ``timed``: its entries have times; otherwise (torch before 2.3) entry n of a device stands at n us.
    """

    name: str
    devices: list[DeviceHistory]
    stacks: Stacks
    ranges: Ranges
    pools: list[tuple[int, int]]
    problems: list[str] = field(default_factory=list)
    timed: bool = True


def timeline(device: DeviceHistory) -> Timeline:
    """The timeline of a device that has a history."""
    entries = device.entries
    log = Log(f"cuda:{device.index}", entries.time, entries.address, _changes(entries), np.arange(len(entries), dtype=np.int64))
    blocks = pair(log)
    blocks, notes = _anchored(blocks, log, device)
    allocated = live_bytes(blocks, len(log))
    freed = np.where(entries.action == FREE_COMPLETED, -entries.size, np.where(entries.action == ALLOC, entries.size, 0))
    active = np.maximum(_backwards(freed, int(device.state.size[device.state.active].sum())), allocated)
    if not (entries.action == FREE_COMPLETED).any():
        active = allocated
    reserved, problem = _reserved(device, active)
    older = int(allocated[0])
    if older:
        size = format_bytes(older) + (f" ({older / 2**20:,.0f} MiB)" if older >= 2**20 else "")
        notes.append(f"{size} were allocated before recording began")
    return Timeline(log, blocks, allocated, np.zeros_like(allocated), reserved, active, False, NULL, [*notes, *problem])


def _changes(entries: Entries) -> Int64Array:
    """Bytes that each entry adds to allocated memory. The completion of a free that was requested before changes nothing any more."""
    change = np.where(entries.action == ALLOC, entries.size, 0)
    frees = (entries.action == FREE_REQUESTED) | (entries.action == FREE_COMPLETED)
    change = np.where(frees, -entries.size, change)
    change[entries.address == NULL] = 0
    events = np.flatnonzero(change != 0)
    order = events[np.argsort(entries.address[events], kind="stable")]
    requested = entries.action[order[:-1]] == FREE_REQUESTED
    same = entries.address[order[1:]] == entries.address[order[:-1]]
    change[order[1:][requested & same & (entries.action[order[1:]] == FREE_COMPLETED)]] = 0
    return np.asarray(change, np.int64)


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
    blocks = _rounded(blocks, open_[found], used[at[found]], state)
    unseen = np.setdiff1d(used, used[at[found]])
    older = standing(state.address[unseen], state.size[unseen], len(log))
    older = replace(older, birth=_last_seen(blocks, older.address, len(log)))
    return blocks.joined(older), notes


def _rounded(blocks: Blocks, mine: Int64Array, theirs: Int64Array, state: State) -> Blocks:
    """The history tells what was asked for, or what was given. Where the end shows the former, sizes are what the allocator gives."""
    asked, given = blocks.bytes[mine], state.size[theirs]
    if not len(mine) or (asked == given).all():
        return blocks
    size = -(-blocks.bytes // ROUNDING) * ROUNDING
    size[mine] = given
    return replace(blocks, bytes=size)


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
