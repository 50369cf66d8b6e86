"""Blocks of memory out of a log of allocations and frees: one row a block, from its birth to its death.

A log is lossy. Its rules, for each address in the order of time:

    allocation, free           one block
    allocation, allocation     the free between them was lost: the first block ends where the second begins
    free at the beginning      a block older than the log
    free, free                 the allocation between them was lost: the block begins where the first one ends
    allocation at the end      a block that is still live
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from tracekit.trace.events import BoolArray, Int64Array
from tracekit.units import NULL

#: No block, and no device, is larger than this (256 TiB): a number beyond it is not a size.
MOST_BYTES = 1 << 48


@dataclass(frozen=True)
class Log:
    """What happened to the memory of one device, in order of time. All arrays have one entry an event.

    ``change`` [bytes]: above 0 an allocation, below 0 a free, 0 something else that is only a moment in time. ``address`` is NULL where it
    was not recorded. ``row`` is where the event stands in its source (events table, entries of a snapshot).
    """

    device: str
    time: Int64Array
    address: Int64Array
    change: Int64Array
    row: Int64Array

    def __len__(self) -> int:
        return len(self.time)


@dataclass(frozen=True)
class Blocks:
    """One row a block. ``birth`` and ``death`` are positions in the log: a block is live behind event i when birth <= i < death.

    ``birth`` is -1 for a block older than the log, ``death`` the length of the log for a block that outlives it. ``birth_row`` and
    ``death_row`` are the rows of these events in their source; -1 where there is none. ``lost`` tells that the free is not in the log.
    """

    address: Int64Array
    bytes: Int64Array
    birth: Int64Array
    death: Int64Array
    birth_row: Int64Array
    death_row: Int64Array
    lost: BoolArray

    def __len__(self) -> int:
        return len(self.address)

    @property
    def born_before(self) -> BoolArray:
        """Which blocks are older than the log."""
        older: BoolArray = self.birth < 0
        return older

    def live(self, position: int) -> BoolArray:
        """Which blocks are live behind event ``position`` (-1: before the first event)."""
        alive: BoolArray = (self.birth <= position) & (self.death > position)
        return alive

    def born_ns(self, log: Log) -> Int64Array:
        """Time of birth [ns]; NULL for blocks older than the log."""
        return _at(log.time, self.birth, self.birth < 0)

    def freed_ns(self, log: Log) -> Int64Array:
        """Time of death [ns]; NULL for blocks that outlive the log."""
        return _at(log.time, self.death, self.death >= len(log))

    def where(self, chosen: BoolArray | Int64Array) -> Blocks:
        """Only the chosen blocks."""
        return Blocks(**{part.name: getattr(self, part.name)[chosen] for part in fields(self)})

    def joined(self, other: Blocks) -> Blocks:
        """These blocks, then those."""
        return Blocks(**{part.name: np.concatenate([getattr(self, part.name), getattr(other, part.name)]) for part in fields(self)})


def standing(address: Int64Array, size: Int64Array, length: int) -> Blocks:
    """Blocks that were there before a log of ``length`` events and outlive it."""
    count = len(address)
    nowhere = np.full(count, -1, np.int64)
    return Blocks(address, size, nowhere, np.full(count, length, np.int64), nowhere, nowhere, np.zeros(count, np.bool_))


def pair(log: Log) -> Blocks:
    """Blocks of a log by the rules above, in order of birth. Events without address or change make none."""
    events = np.flatnonzero((log.change != 0) & (log.address != NULL))
    order = events[np.argsort(log.address[events], kind="stable")]
    address, change = log.address[order], log.change[order]
    count = len(order)
    allocates = change > 0
    again = np.zeros(count, np.bool_)  # the event before is of the same address
    again[1:] = address[1:] == address[:-1]
    followed = np.append(again[1:], False)[:count]
    following = np.minimum(np.arange(count) + 1, max(count - 1, 0))
    after_free = again & ~np.append(False, allocates[:-1])[:count]
    born = np.flatnonzero(allocates)
    orphans = np.flatnonzero(~allocates & (~again | after_free))
    next_event = order[following[born]]
    ends = followed[born]
    freed = ends & ~allocates[following[born]]
    previous = order[np.maximum(orphans - 1, 0)]
    blocks = Blocks(
        address=np.concatenate([address[born], address[orphans]]),
        bytes=np.concatenate([change[born], -change[orphans]]),
        birth=np.concatenate([order[born], np.where(again[orphans], previous, -1)]),
        death=np.concatenate([np.where(ends, next_event, len(log)), order[orphans]]),
        birth_row=np.concatenate([log.row[order[born]], np.full(len(orphans), -1, np.int64)]),
        death_row=np.concatenate([np.where(freed, log.row[next_event], -1), log.row[order[orphans]]]),
        lost=np.concatenate([ends & ~freed, np.zeros(len(orphans), np.bool_)]),
    )
    return blocks.where(np.argsort(blocks.birth, kind="stable"))


def live_bytes(blocks: Blocks, length: int) -> Int64Array:
    """Sum of the live blocks behind each of ``length`` events; entry 0 is before the first one, so there are length + 1."""
    change = np.zeros(length + 2, np.int64)
    np.add.at(change, blocks.birth + 1, blocks.bytes)
    np.subtract.at(change, blocks.death + 1, blocks.bytes)
    return np.cumsum(change[: length + 1], dtype=np.int64)


def _at(time: Int64Array, position: Int64Array, nowhere: BoolArray) -> Int64Array:
    if not len(time):
        return np.full(len(position), NULL, np.int64)
    return np.where(nowhere, NULL, time[np.clip(position, 0, len(time) - 1)])
