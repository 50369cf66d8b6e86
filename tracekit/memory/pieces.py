"""Who owns a block, from when to when: a block whose owner changes is cut into pieces."""

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
    GATHERED,
    UNSHARDED,
    BUFFERS,
    ACTIVATIONS,
    INPUTS,
    TEMPORARIES,
    OLDER,
    UNKNOWN,
) = range(len(CATEGORIES))


class Words:
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
    """What each block is by the rules: one entry a block. ``name`` and ``unit`` are codes of one ``Words``."""

    category: Int8Array
    name: Int32Array
    unit: Int32Array


@dataclass(frozen=True)
class Changes:
    """Owners that were told behind event ``position``: ``block`` belongs to them from the next event on. Sorted by (block, position).

    The first one of a block counts from the block's birth on: what is told right after a tensor was made is true of it from the beginning.
    """

    block: Int64Array
    position: Int64Array
    category: Int8Array
    name: Int32Array
    unit: Int32Array

    def __len__(self) -> int:
        return len(self.block)


@dataclass(frozen=True)
class Pieces:
    """One row a piece: ``block`` is owned from behind event ``start`` until event ``end`` (see ``Blocks.birth`` and ``death``)."""

    block: Int64Array
    start: Int64Array
    end: Int64Array
    bytes: Int64Array
    category: Int8Array
    name: Int32Array
    unit: Int32Array

    def live(self, position: int) -> BoolArray:
        """Which pieces are live behind an event."""
        alive: BoolArray = (self.start <= position) & (self.end > position)
        return alive


def cut(blocks: Blocks, owner: Owner, changes: Changes) -> Pieces:
    """The pieces of all blocks: as told where something was told, by the rules elsewhere."""
    told = np.zeros(len(blocks), np.bool_)
    told[changes.block] = True
    rest = np.flatnonzero(~told)
    first = np.append(True, changes.block[1:] != changes.block[:-1])[: len(changes)]
    start = np.where(first, blocks.birth[changes.block], np.maximum(changes.position + 1, blocks.birth[changes.block]))
    last = np.append(first[1:], True)[: len(changes)]
    end = np.where(last, blocks.death[changes.block], np.append(start[1:], 0)[: len(changes)])
    end = np.minimum(end, blocks.death[changes.block])
    block = np.concatenate([rest, changes.block])
    pieces = Pieces(
        block,
        np.concatenate([blocks.birth[rest], start]),
        np.concatenate([blocks.death[rest], end]),
        blocks.bytes[block],
        np.concatenate([owner.category[rest], changes.category]),
        np.concatenate([owner.name[rest], changes.name]),
        np.concatenate([owner.unit[rest], changes.unit]),
    )
    real = pieces.end > pieces.start
    return Pieces(*(column[real] for column in vars(pieces).values()))
