"""Owners from the recorder's manifest: a registration owns the block that is live at its address at its time.

Registrations are made right after a tensor is; the clock of the trace and the clock of Python may differ by some microseconds, so one that
meets no live block takes the nearest at its address within NEAR_NS. One that meets none at all is of memory that the log does not show,
mostly older than it: it makes a block of its own. What autograd saved (activations) is often a parameter or an input: it owns only blocks
that nobody else claims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tracekit.manifest import FREED, Owners
from tracekit.memory.blocks import MOST_BYTES, Blocks, Log, pair
from tracekit.memory.ownership import ACTIVATIONS, CODE, GRADIENTS, UNKNOWN, Changes, Texts
from tracekit.trace.events import BoolArray, Int8Array, Int32Array, Int64Array
from tracekit.units import NULL

NEAR_NS = 200_000


@dataclass(frozen=True)
class Registrations:
    """The manifest's columns in order of time; ``name`` and ``unit`` are codes of ``words``."""

    time: Int64Array
    address: Int64Array
    bytes: Int64Array
    category: Int8Array
    name: Int32Array
    unit: Int32Array

    def __len__(self) -> int:
        return len(self.time)

    def where(self, chosen: BoolArray | Int64Array) -> Registrations:
        """Only the chosen ones."""
        return Registrations(*(column[chosen] for column in vars(self).values()))


def registrations(owners: Owners, words: Texts) -> Registrations:
    """The columns of a manifest as arrays."""
    categories = np.array([CODE.get(text, UNKNOWN) for text in owners.strings] or [UNKNOWN], np.int8)
    codes = words.codes(owners.strings) if owners.strings else np.zeros(1, np.int32)
    time = _column(owners.time_ns)
    found = Registrations(
        time,
        _column(owners.address),
        _column(owners.bytes),
        categories[np.array(owners.category, np.int64)],
        codes[np.array(owners.name, np.int64)],
        codes[np.array(owners.unit, np.int64)],
    )
    order = np.argsort(time, kind="stable")
    return found.where(order[(found.bytes[order] < MOST_BYTES) & (found.bytes[order] >= FREED) & (time[order] != NULL)])


def _column(values: list[int]) -> Int64Array:
    """Numbers as an array; NULL in place of those that no int64 holds."""
    try:
        return np.array(values, np.int64)
    except OverflowError:
        return np.array([value if -(2**63) <= value < 2**63 else NULL for value in values], np.int64)


def meets(log: Log, registered: Registrations) -> BoolArray:
    """Which registrations meet a block of a log."""
    found: BoolArray = _live_at(log, pair(log), registered, np.searchsorted(log.time, registered.time, side="right") - 1) >= 0
    return found


def claim(log: Log, blocks: Blocks, registered: Registrations, others: Sequence[Log] | None) -> tuple[Blocks, Changes]:
    """Blocks, and their owners. ``others``: logs of the other devices; registrations that meet no block of any make blocks of this one.

    None: they make none, because another device is theirs.
    """
    freed = registered.where(registered.bytes == FREED)
    registered = registered.where(registered.bytes != FREED)
    position = np.searchsorted(log.time, registered.time, side="right") - 1
    block = _live_at(log, blocks, registered, position)
    if others is not None:
        elsewhere = np.any([meets(other, registered) for other in others], axis=0) if others else np.zeros(len(registered), np.bool_)
        unseen = np.flatnonzero((block < 0) & (registered.bytes > 0) & ~elsewhere)
        made, of = _unseen(log, blocks, registered.where(unseen), position[unseen])
        block[unseen] = np.where(of >= 0, of + len(blocks), -1)
        blocks = blocks.joined(made)
    mine = np.flatnonzero(block >= 0)
    mine = mine[np.lexsort((mine, block[mine]))]
    changes = _claims(Changes(block[mine], position[mine], registered.category[mine], registered.name[mine], registered.unit[mine]))
    return blocks if others is None else _replaced_gradients(_given_back(log, blocks, freed), changes, len(log)), changes


def _live_at(log: Log, blocks: Blocks, registered: Registrations, position: Int64Array) -> Int64Array:
    """The block of each registration; -1 for none."""
    if not len(blocks) or not len(registered):
        return np.full(len(registered), -1, np.int64)
    order, keys, key = _keys(blocks, registered.address, position, len(log))
    at = np.searchsorted(keys, key, side="right") - 1
    before, after = order[np.maximum(at, 0)], order[np.minimum(at + 1, len(order) - 1)]
    same_before = (at >= 0) & (blocks.address[before] == registered.address)
    same_after = (at + 1 < len(order)) & (blocks.address[after] == registered.address)
    live = same_before & (blocks.death[before] > position)
    death, birth = blocks.death[before], blocks.birth[after]
    ended = log.time[np.clip(death, 0, len(log) - 1)]
    begins = log.time[np.clip(birth, 0, len(log) - 1)]
    soon = same_after & ~live & (begins - registered.time <= NEAR_NS)
    just = same_before & ~live & ~soon & (registered.time - ended <= NEAR_NS)
    return np.where(live | just, before, np.where(soon, after, -1)).astype(np.int64)


def _keys(blocks: Blocks, address: Int64Array, position: Int64Array, length: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """(blocks in order of address and birth, their sorting keys, the keys of the places asked for)."""
    known = np.unique(blocks.address)
    scale = length + 3
    order = np.lexsort((blocks.birth, blocks.address))
    keys = np.searchsorted(known, blocks.address[order]) * scale + blocks.birth[order] + 1
    place = np.searchsorted(known, address)
    exact = known[np.minimum(place, len(known) - 1)] == address
    return order, keys, np.where(exact, place * scale + position + 1, -1)


def _unseen(log: Log, blocks: Blocks, registered: Registrations, position: Int64Array) -> tuple[Blocks, Int64Array]:
    """Blocks for registrations that met none, one an address (until the log shows another one there), and the block of each."""
    count = len(registered)
    if not count:
        return blocks.where(np.empty(0, np.int64)), np.empty(0, np.int64)
    following = np.full(count, len(log), np.int64)
    seen = np.zeros(count, np.bool_)
    if len(blocks):
        order, keys, key = _keys(blocks, registered.address, position, len(log))
        at = np.searchsorted(keys, key, side="right")
        after = order[np.minimum(at, len(order) - 1)]
        follows = (at < len(order)) & (blocks.address[after] == registered.address)
        following = np.where(follows, blocks.birth[after], following)
        before = order[np.maximum(at - 1, 0)]
        seen = (at > 0) & (blocks.address[before] == registered.address)
    # A storage without an address is known by its name.
    tag = np.where(registered.address == 0, -1 - registered.name.astype(np.int64), following)
    _, first, of = np.unique(np.stack([registered.address, tag]), axis=1, return_index=True, return_inverse=True)
    nowhere = np.full(len(first), -1, np.int64)
    born = np.where(seen[first], position[first], -1)
    death = np.where(registered.address[first] == 0, len(log), following[first])
    lost = death < len(log)
    return Blocks(registered.address[first], registered.bytes[first], born, death, nowhere, nowhere, lost), np.asarray(
        of, np.int64
    ).reshape(-1)


def _claims(changes: Changes) -> Changes:
    """Without what was registered twice, and without activations of blocks that anybody else claims."""
    stronger = changes.category != ACTIVATIONS
    claimed = np.zeros(int(changes.block.max(initial=-1)) + 1, np.bool_)
    claimed[changes.block[stronger]] = True
    keep = stronger | ~claimed[changes.block] if len(changes) else stronger
    kept = Changes(*(column[keep] for column in vars(changes).values()))
    columns = (kept.block, kept.category, kept.name, kept.unit)
    again = np.append(False, np.all([column[1:] == column[:-1] for column in columns], axis=0))[: len(kept)]
    return Changes(*(column[~again] for column in vars(kept).values()))


def _given_back(log: Log, blocks: Blocks, freed: Registrations) -> Blocks:
    """Blocks older than the log whose free is not in it end where the manifest says that they were given back."""
    position = np.searchsorted(log.time, freed.time, side="right") - 1
    block = _live_at(log, blocks, freed, position)
    place = np.flatnonzero(block >= 0)
    block = block[place]
    ends = np.maximum(position[place] + 1, blocks.birth[block] + 1)
    invisible = (blocks.birth_row[block] < 0) & (blocks.death_row[block] < 0) & (blocks.death[block] > ends)
    death, lost = blocks.death.copy(), blocks.lost.copy()
    death[block[invisible]] = ends[invisible]
    lost[block[invisible]] = True
    return replace(blocks, death=death, lost=lost)


def _replaced_gradients(blocks: Blocks, changes: Changes, length: int) -> Blocks:
    """A gradient from before the log whose free is not in it ends, at the latest, where the next gradient of its parameter begins."""
    gradients = np.flatnonzero((changes.category == GRADIENTS) & (changes.name > 0))
    order = gradients[np.lexsort((blocks.birth[changes.block[gradients]], changes.name[gradients]))]
    block = changes.block[order]
    following = (
        np.append(changes.name[order][1:] == changes.name[order][:-1], False)[: len(order)]
        & (np.append(block[1:] != block[:-1], False)[: len(order)])
    )
    invisible = (blocks.death[block] >= length) & (blocks.birth_row[block] < 0)
    ends = np.flatnonzero(following & invisible)
    death, lost = blocks.death.copy(), blocks.lost.copy()
    death[block[ends]] = blocks.birth[block[ends + 1]]
    lost[block[ends]] = True
    return replace(blocks, death=np.maximum(death, blocks.birth + 1), lost=lost)
