"""A CUDA memory snapshot as columns: the allocator's state at its end (segments and their blocks) and a history of what led there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tracekit.trace.events import BoolArray, Int8Array, Int32Array, Int64Array

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

    def last(self, wanted: BoolArray) -> Int32Array:
        """Of each stack the outermost frame that is wanted; -1 where there is none."""
        found = np.full(len(self.start) - 1, -1, np.int32)
        places = np.flatnonzero(wanted[self.frame])
        found[np.searchsorted(self.start, places, side="right") - 1] = self.frame[places]
        return found

    def function(self, frame: int) -> str:
        """The function of a frame; '' for -1."""
        return self.strings[int(self.frames[frame, 2])] if frame >= 0 else ""

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

    ``timed``: its entries have times; otherwise (torch before 2.3) entry n of a device stands at n us. ``settings``: the allocator's.
    ``overflowed``: older entries of the history were overwritten.
    """

    name: str
    devices: list[DeviceHistory]
    stacks: Stacks
    ranges: Ranges
    pools: list[tuple[int, int]]
    problems: list[str] = field(default_factory=list)
    timed: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    overflowed: bool = False
