"""Who owns a block, from when to when: a block whose owner changes has several rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracekit.memory.blocks import Blocks
from tracekit.trace.events import BoolArray, Int8Array, Int32Array, Int64Array
from tracekit.vocabulary import CATEGORIES

CODE: dict[str, int] = {name: code for code, name in enumerate(CATEGORIES)}
(
    PARAMETERS,
    GRADIENTS,
    OPTIMIZER_STATE,
    MODULE_BUFFERS,
    GATHERED,
    UNSHARDED,
    BUFFERS,
    ACTIVATIONS,
    INPUTS,
    TEMPORARIES,
    OLDER,
    UNKNOWN,
) = range(len(CATEGORIES))


class Texts:
    """Distinct strings by code; code 0 is ''."""

    def __init__(self) -> None:
        self._codes = {"": 0}

    def code(self, text: str) -> int:
        """Code of a string, new or known."""
        return self._codes.setdefault(text, len(self._codes))

    def codes(self, texts: Sequence[str]) -> Int32Array:
        """Codes of several."""
        return np.array([self.code(text) for text in texts], np.int32)

    @property
    def texts(self) -> list[str]:
        """Strings by code."""
        return list(self._codes)


@dataclass(frozen=True)
class Owner:
    """What each block is by the rules: one entry a block. ``name`` and ``unit`` are codes of one ``Texts``."""

    category: Int8Array
    name: Int32Array
    unit: Int32Array


@dataclass(frozen=True)
class Changes:
    """Owners that were registered behind event ``position``: ``block`` belongs to them from the next event on. Sorted by (block, position).

    The first one of a block counts from its birth on: what is registered right after a tensor was made is true of it from the beginning.
    """

    block: Int64Array
    position: Int64Array
    category: Int8Array
    name: Int32Array
    unit: Int32Array

    def __len__(self) -> int:
        return len(self.block)


@dataclass(frozen=True)
class Ownership:
    """One row for each stretch of one owner: ``block`` is owned from behind event ``start`` until ``end`` (see ``Blocks``)."""

    block: Int64Array
    start: Int64Array
    end: Int64Array
    bytes: Int64Array
    category: Int8Array
    name: Int32Array
    unit: Int32Array

    def live(self, position: int) -> BoolArray:
        """Which rows are live behind an event."""
        alive: BoolArray = (self.start <= position) & (self.end > position)
        return alive


def cut(blocks: Blocks, owner: Owner, changes: Changes) -> Ownership:
    """Who owns all blocks: as registered where something was, by the rules elsewhere."""
    registered = np.zeros(len(blocks), np.bool_)
    registered[changes.block] = True
    rest = np.flatnonzero(~registered)
    first = np.append(True, changes.block[1:] != changes.block[:-1])[: len(changes)]
    start = np.where(first, blocks.birth[changes.block], np.maximum(changes.position + 1, blocks.birth[changes.block]))
    last = np.append(first[1:], True)[: len(changes)]
    end = np.where(last, blocks.death[changes.block], np.append(start[1:], 0)[: len(changes)])
    end = np.minimum(end, blocks.death[changes.block])
    block = np.concatenate([rest, changes.block])
    ownership = Ownership(
        block,
        np.concatenate([blocks.birth[rest], start]),
        np.concatenate([blocks.death[rest], end]),
        blocks.bytes[block],
        np.concatenate([owner.category[rest], changes.category]),
        np.concatenate([owner.name[rest], changes.name]),
        np.concatenate([owner.unit[rest], changes.unit]),
    )
    real = ownership.end > ownership.start
    return Ownership(*(column[real] for column in vars(ownership).values()))
