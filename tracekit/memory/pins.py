"""Who keeps half-empty segments: a segment can only be given back, or used for something larger, when its last block is gone."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tracekit.memory.attribution import Attributed
from tracekit.memory.fragmentation import segments_at
from tracekit.memory.snapshot import DeviceHistory
from tracekit.trace.events import Int64Array
from tracekit.units import NULL
from tracekit.vocabulary import CATEGORIES, MemoryCategory

#: A segment of which at least this share is free counts as half-empty.
HALF = 0.5
MOST_PINS = 10


@dataclass(frozen=True)
class Pin:
    """Blocks of one owner that keep half-empty segments. ``free``: what is free in the segments in which they are the largest owner."""

    category: MemoryCategory
    name: str
    segments: int
    bytes: int
    free: int


@dataclass(frozen=True)
class Unused:
    """Where free memory lies: in ``empty_segments`` without any block (together ``empty_bytes``), and beside the blocks of ``pins``."""

    pins: list[Pin] = field(default_factory=list)
    empty_segments: int = 0
    empty_bytes: int = 0


def unused_at(found: Attributed, device: DeviceHistory, pools: list[tuple[int, int]], position: int) -> Unused:
    """Of the default pool behind an event: owners of the blocks in half-empty segments, by the free bytes that they keep."""
    start, end, private = segments_at(device, pools, position)
    start, end = start[~private], end[~private]
    owned = found.ownership
    live = np.flatnonzero(owned.live(position) & (found.timeline.blocks.address[owned.block] != NULL))
    address = found.timeline.blocks.address[owned.block[live]]
    segment = np.searchsorted(start, address, side="right") - 1
    inside = (segment >= 0) & (address < end[np.maximum(segment, 0)]) if len(start) else np.zeros(len(live), np.bool_)
    live, segment = live[inside], segment[inside]
    used = np.zeros(len(start), np.int64)
    np.add.at(used, segment, owned.bytes[live])
    free = end - start - used
    held = (free >= HALF * (end - start)) & (used > 0)
    live, segment = live[held[segment]], segment[held[segment]]
    empty = used == 0
    return Unused(_by_owner(found, live, segment, free), int(empty.sum()), int(free[empty].sum()))


def _by_owner(found: Attributed, live: Int64Array, segment: Int64Array, free: Int64Array) -> list[Pin]:
    owned = found.ownership
    keys = np.stack([owned.category[live].astype(np.int64), owned.name[live].astype(np.int64)])
    owners, owner = np.unique(keys, axis=1, return_inverse=True)
    owner = owner.reshape(-1)
    pairs, pair_of = np.unique(np.stack([segment, owner]), axis=1, return_inverse=True)
    amount = np.zeros(pairs.shape[1], np.int64)
    np.add.at(amount, pair_of.reshape(-1), owned.bytes[live])
    order = np.lexsort((-amount, pairs[0]))
    largest = order[np.append(True, np.diff(pairs[0][order]) != 0)[: len(order)]]
    kept = np.zeros(owners.shape[1], np.int64)
    np.add.at(kept, pairs[1][largest], free[pairs[0][largest]])
    held = np.zeros(owners.shape[1], np.int64)
    np.add.at(held, pairs[1], amount)
    segments = np.bincount(pairs[1], minlength=owners.shape[1])
    rows = [
        Pin(CATEGORIES[category], found.texts[name], count, size, spare)
        for (category, name), count, size, spare in zip(owners.T.tolist(), segments.tolist(), held.tolist(), kept.tolist(), strict=True)
    ]
    return sorted(rows, key=lambda pin: (-pin.free, -pin.bytes))[:MOST_PINS]
