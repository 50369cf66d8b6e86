"""Requests for memory that failed: what was asked for, and what stood in the way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekit.memory.fragmentation import of_history
from tracekit.memory.snapshot import OOM, DeviceHistory, Snapshot
from tracekit.memory.timeline import Timeline
from tracekit.units import NULL, format_bytes

#: An allocation loop that fails over and over says the same every time.
MOST = 20


@dataclass(frozen=True)
class OutOfMemory:
    """One request that failed. Bytes are NULL where not known; ``free`` is what the device itself had left, ``frame`` who asked.

    ``largest``: the largest free range among what was reserved.
    """

    time_ns: int
    requested: int
    free: int
    allocated: int
    reserved: int
    largest: int
    frame: str

    def reason(self) -> str:
        """What stood in the way, for a reader."""
        asked = f"{format_bytes(self.requested)} were asked for"
        if self.frame:
            asked += f" ({self.frame})"
        left = f"the device had {format_bytes(self.free)} free" if self.free != NULL else "what the device had free is not recorded"
        if self.reserved == NULL:
            return f"{asked}; {left}; {format_bytes(self.allocated)} were allocated"
        unused = self.reserved - self.allocated
        held = f"of {format_bytes(self.reserved)} reserved, {format_bytes(self.allocated)} were allocated"
        if self.largest != NULL and unused >= self.requested > self.largest:
            return f"{asked}; {left}; {held}: the rest is enough, but in pieces of at most {format_bytes(self.largest)} (fragmentation)"
        if self.largest != NULL:
            return f"{asked}; {left}; {held}, the largest free piece was {format_bytes(self.largest)}"
        return f"{asked}; {left}; {held}"


def out_of_memory(snapshot: Snapshot, device: DeviceHistory, timeline: Timeline) -> list[OutOfMemory]:
    """The failed requests of a device, in order of time; of more than MOST the last ones."""
    places = np.flatnonzero(device.entries.action == OOM)[-MOST:]
    frames = snapshot.stacks.innermost(device.entries.stack[places])
    found = []
    for place, frame in zip(places.tolist(), frames.tolist(), strict=True):
        fragments = of_history(device, timeline, snapshot.pools, place)
        found.append(
            OutOfMemory(
                time_ns=int(device.entries.time[place]),
                requested=int(device.entries.size[place]),
                free=int(device.entries.free[place]),
                allocated=int(timeline.allocated[place + 1]),
                reserved=int(timeline.reserved[place + 1]),
                largest=fragments.largest if fragments is not None else NULL,
                frame=snapshot.stacks.describe(frame),
            )
        )
    return found
