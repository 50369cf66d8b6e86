"""One pool of distinct strings, keyed by their raw bytes: a name that occurs a million times is stored, hashed and decoded once.

Compiled code puts strings in and gets codes; Python takes them out. ``control`` tells compiled code where the arrays are and how large.
Python grows the arrays when compiled code says that they are full, so compiled code never writes beyond them: before it adds a string it
checks the number of entries and the room left in the arena (length + PAD, because strings are copied eight bytes at a time). The hash table
has two slots for each entry there may be, so looking for a free one ends, and a power of two of them, so a masked hash is a place in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tracekit.compiled import Native, jit
from tracekit.readers.lex import COMPILED, INLINE, PAD, load64, load_int64, store64, store_int64

#: Kinds of entries: text without escapes, text with escapes, the raw text of a value that is not a string.
PLAIN, ESCAPED, RAW = 0, 1, 2

#: Words of a pool's control block. TABLE holds slots of four words (hash, code, offset, mark), ENTRIES two words a code (offset, mark);
#: the mark of a string is 4 * length + kind.
TABLE, MASK, ENTRIES, CAPACITY, ARENA, ROOM, COUNT, USED = range(8)
_WORD, _SLOT, _ENTRY = 8, 32, 16

_M1, _M2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


@jit(**INLINE)
def first_bytes(word: Native, count: Native) -> Native:
    """The word with all but its first ``count`` (0 to 7) bytes cleared."""
    return word & ((np.uint64(1) << np.uint64(8 * count)) - np.uint64(1))


@jit(**INLINE)
def _mixed(h: Native, word: Native) -> Native:
    h = (h ^ word) * _M1
    return h ^ (h >> np.uint64(32))


@jit(**COMPILED)
def hash_bytes(text: Native, i: Native, length: Native, mark: Native) -> Native:
    """64-bit hash of ``length`` bytes and the mark; reads whole words, so up to 7 bytes behind them (inside the padding)."""
    h = np.uint64(mark) * _M2
    while length >= 8:
        h = _mixed(h, load64(text, i))
        i += 8
        length -= 8
    if length > 0:
        h = _mixed(h, first_bytes(load64(text, i), length))
    h = h * _M2
    return h ^ (h >> np.uint64(29))


@jit(**COMPILED)
def same_bytes(one: Native, i: Native, other: Native, j: Native, length: Native) -> Native:
    """Whether two runs of bytes are equal; reads as ``hash_bytes`` does."""
    while length >= 8:
        if load64(one, i) != load64(other, j):
            return False
        i += 8
        j += 8
        length -= 8
    return length == 0 or first_bytes(load64(one, i) ^ load64(other, j), length) == np.uint64(0)


@jit(**COMPILED)
def intern(text: Native, start: Native, length: Native, kind: Native, pool: Native) -> Native:
    """Code of a string, new or known; -1 when the pool must grow first. ``pool``: address of its control block."""
    mark = 4 * length + kind
    h = hash_bytes(text, start, length, mark)
    table = load_int64(pool, _WORD * TABLE)
    arena = load_int64(pool, _WORD * ARENA)
    mask = load_int64(pool, _WORD * MASK)
    position = np.int64(h) & mask
    while True:
        slot = table + _SLOT * position
        code = load_int64(slot, _WORD)
        if code < 0:
            return _added(text, start, length, mark, h, slot, pool)
        known = load64(slot, 0) == h and load_int64(slot, 3 * _WORD) == mark
        if known and same_bytes(text, start, arena, load_int64(slot, 2 * _WORD), length):
            return code
        position = (position + 1) & mask


@jit(**COMPILED)
def _added(text: Native, start: Native, length: Native, mark: Native, h: Native, slot: Native, pool: Native) -> Native:
    """Code of a string that is put into a free slot; -1 when there is no room."""
    code = load_int64(pool, _WORD * COUNT)
    offset = load_int64(pool, _WORD * USED)
    if code >= load_int64(pool, _WORD * CAPACITY) or offset + length + PAD > load_int64(pool, _WORD * ROOM):
        return np.int64(-1)
    arena = load_int64(pool, _WORD * ARENA)
    for k in range(0, length, 8):
        store64(arena, offset + k, load64(text, start + k))
    entry = load_int64(pool, _WORD * ENTRIES) + _ENTRY * code
    store_int64(entry, 0, offset)
    store_int64(entry, _WORD, mark)
    _fill(slot, h, code, offset, mark)
    store_int64(pool, _WORD * COUNT, code + 1)
    store_int64(pool, _WORD * USED, offset + length)
    return code


@jit(**COMPILED)
def _fill(slot: Native, h: Native, code: Native, offset: Native, mark: Native) -> Native:
    store64(slot, 0, h)
    store_int64(slot, _WORD, code)
    store_int64(slot, 2 * _WORD, offset)
    store_int64(slot, 3 * _WORD, mark)


@jit(**COMPILED)
def rehash(pool: Native) -> Native:
    """Enter all strings of a pool into its new, empty table."""
    mask = load_int64(pool, _WORD * MASK)
    for code in range(load_int64(pool, _WORD * COUNT)):
        entry = load_int64(pool, _WORD * ENTRIES) + _ENTRY * code
        offset = load_int64(entry, 0)
        mark = load_int64(entry, _WORD)
        h = hash_bytes(load_int64(pool, _WORD * ARENA), offset, mark >> 2, mark)
        position = np.int64(h) & mask
        while load_int64(load_int64(pool, _WORD * TABLE), _SLOT * position + _WORD) >= 0:
            position = (position + 1) & mask
        _fill(load_int64(pool, _WORD * TABLE) + _SLOT * position, h, code, offset, mark)


class Pool:
    """A growing pool. Code 0 is the missing string; ``known`` strings get the codes 1, 2, ... .

    It begins with room for ``entries`` strings (a power of two) of ``arena`` bytes; both must do for ``known``.
    ``enter(text, start, length, kind, pool)`` and ``reenter(pool)`` are the compiled ``intern`` and ``rehash``, as entry points.
    """

    def __init__(self, known: tuple[str, ...], enter: Any, reenter: Any, entries: int, arena: int) -> None:
        self.control = np.zeros(8, np.int64)
        self._reenter = reenter
        self._allocate(entries, arena)
        for text in ("", *known):
            raw = np.frombuffer(text.encode() + bytes(PAD), np.uint8)
            enter(raw.ctypes.data, 0, len(raw) - PAD, PLAIN, self.address)

    @property
    def address(self) -> int:
        """Of the control block, for compiled code; valid while the pool lives."""
        return int(self.control.ctypes.data)

    def __len__(self) -> int:
        return int(self.control[COUNT])

    def _allocate(self, entries: int, arena: int) -> None:
        """New, empty arrays. They are assigned at last: another thread may be reading the old ones (``between``)."""
        table = np.zeros((2 * entries, _SLOT // _WORD), np.int64)
        table[:, 1] = -1
        self._table, self._entries, self._arena = table, np.zeros((entries, 2), np.int64), np.zeros(arena, np.uint8)
        addresses = (self._table.ctypes.data, len(table) - 1, self._entries.ctypes.data, entries, self._arena.ctypes.data, arena)
        self.control[:COUNT] = addresses

    def grow(self, room: int) -> None:
        """Twice the entries when half of them are taken, and an arena with ``room`` more bytes to spare."""
        entries, arena, count, used = self._entries, self._arena, len(self), int(self.control[USED])
        size = len(arena)
        while size < used + room + PAD:
            size *= 2
        self._allocate(2 * len(entries) if 2 * count >= len(entries) else len(entries), size)
        self._entries[:count] = entries[:count]
        self._arena[:used] = arena[:used]
        self._reenter(self.address)

    def since(self, code: int) -> Iterator[tuple[int, bytes]]:
        """(kind, raw bytes) of every entry from ``code`` on."""
        raw = memoryview(self._arena.data)
        for offset, mark in self._entries[code : len(self)].tolist():
            yield mark & 3, bytes(raw[offset : offset + (mark >> 2)])
