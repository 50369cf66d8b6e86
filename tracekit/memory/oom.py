"""Requests for memory that failed, or only fitted after cached memory was given back: what was asked for, what stood in the way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekit.memory.fragmentation import of_history
from tracekit.memory.snapshot import ALLOC, OOM, SEGMENT_ALLOC, SEGMENT_FREE, DeviceHistory, Snapshot
from tracekit.memory.timeline import Timeline
from tracekit.memory.user_frames import labels
from tracekit.trace.events import Int64Array
from tracekit.units import NULL, format_bytes, plural

#: An allocation loop that fails over and over says the same every time.
MOST = 20


@dataclass(frozen=True)
class OutOfMemory:
    """One request that did not fit. Bytes are NULL where not known; ``free`` is what the device itself had left, ``frame`` who asked.

    ``unused`` was reserved, not in use and not in a private pool, in ``pieces`` free ranges, the largest of them ``largest``; ``private``
    was free in private pools. ``given_back``: it fitted in the end, when the allocator had given so much back (in ``segments`` segments).
    """

    time_ns: int
    requested: int
    free: int
    allocated: int
    reserved: int
    largest: int
    frame: str
    unused: int = NULL
    pieces: int = NULL
    private: int = NULL
    given_back: int = 0
    segments: int = 0

    @property
    def is_fragmentation(self) -> bool:
        """Whether what was unused would have been enough in one piece."""
        return self.largest != NULL and self.unused >= self.requested > self.largest

    def reason(self) -> str:
        """What was asked for and what stood in the way, for a reader."""
        parts = [f"{format_bytes(self.requested)} were asked for" + (f" ({self.frame})" if self.frame else "")]
        if not self.given_back:
            known = self.free != NULL
            parts.append(f"the device had {format_bytes(self.free)} free" if known else "what the device had free is not recorded")
        if self.reserved == NULL:
            return "; ".join([*parts, f"{format_bytes(self.allocated)} were allocated"])
        parts.append(f"of {format_bytes(self.reserved)} reserved, {format_bytes(self.allocated)} were allocated")
        if self.largest != NULL and self.unused > 0:
            pieces = f"{format_bytes(self.unused)} were reserved but unused, in {plural(self.pieces, 'piece')}"
            parts.append(f"{pieces}, the largest free piece was {format_bytes(self.largest)}")
        if self.is_fragmentation:
            parts.append("the rest is enough, but not in one piece: fragmentation")
        return "; ".join(parts)

    def remedy(self) -> str:
        """What would have let it fit."""
        if self.is_fragmentation:
            return "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True would have let it fit: free pieces are then one range."
        free = max(self.free, 0)
        if self.largest != NULL and self.unused + free >= self.requested:
            return "Giving cached memory back first (torch.cuda.empty_cache()) or expandable_segments:True would have let it fit."
        if self.private > 0 and max(self.unused, 0) + free + self.private >= self.requested:
            return f"{format_bytes(self.private)} are free in pools of CUDA graphs or of the user, which other requests cannot use."
        if self.free == NULL:
            return "Lower what the peak consists of: smaller batches, recomputation, sharding, offloading."
        missing = format_bytes(self.requested - free - max(self.unused, 0))
        return f"{missing} more would have been needed: lower what the peak consists of (smaller batches, recomputation, sharding)."


def out_of_memory(snapshot: Snapshot, device: DeviceHistory, timeline: Timeline) -> list[OutOfMemory]:
    """The failed requests of a device, in order of time; of more than MOST the last ones."""
    places = np.flatnonzero(device.entries.action == OOM)[-MOST:]
    return _requests(snapshot, device, timeline, places, places)


def retries(snapshot: Snapshot, device: DeviceHistory, timeline: Timeline) -> list[OutOfMemory]:
    """Requests that fitted only when the allocator had given segments back, which stops the device; of more than MOST the last ones.

    Segments given back one after the other, then a new one for the request, all from one line of code: ``empty_cache()`` has its own.
    """
    entries = device.entries
    freed = entries.action == SEGMENT_FREE
    first = np.flatnonzero(freed & ~np.append(False, freed[:-1])[: len(freed)])
    last = np.flatnonzero(freed & ~np.append(freed[1:], False)[: len(freed)])
    fits = last + 2 < len(entries)
    first, last = first[fits], last[fits]
    asked = (entries.action[last + 1] == SEGMENT_ALLOC) & (entries.action[last + 2] == ALLOC)
    asked &= (entries.stack[last] == entries.stack[last + 2]) & (entries.stack[last] > 0)
    first, last = first[asked][-MOST:], last[asked][-MOST:]
    found = _requests(snapshot, device, timeline, last + 2, first - 1)
    sizes = np.concatenate([[0], np.cumsum(entries.size, dtype=np.int64)])
    given = sizes[last + 1] - sizes[first]
    return [
        OutOfMemory(**{**vars(one), "given_back": amount, "segments": count})
        for one, amount, count in zip(found, given.tolist(), (last - first + 1).tolist(), strict=True)
    ]


def _requests(snapshot: Snapshot, device: DeviceHistory, timeline: Timeline, places: Int64Array, before: Int64Array) -> list[OutOfMemory]:
    """The requests of the entries at ``places``, with what stood behind the entries ``before``."""
    if not len(places):
        return []
    entries, names = device.entries, labels(snapshot.stacks)
    found = []
    for place, moment in zip(places.tolist(), before.tolist(), strict=True):
        fragments = of_history(device, timeline, snapshot.pools, moment)
        found.append(
            OutOfMemory(
                time_ns=int(entries.time[place]),
                requested=int(entries.size[place]),
                free=int(entries.free[place]),
                allocated=int(timeline.allocated[moment + 1]),
                reserved=int(timeline.reserved[moment + 1]),
                largest=NULL if fragments is None else fragments.largest,
                frame=names[max(int(entries.stack[place]), 0)],
                unused=NULL if fragments is None else fragments.unused,
                pieces=NULL if fragments is None else fragments.pieces,
                private=NULL if fragments is None else fragments.private,
            )
        )
    return found
