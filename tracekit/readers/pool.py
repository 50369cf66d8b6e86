"""One pool of distinct strings, keyed by their raw bytes: a name that occurs a million times is stored, hashed and decoded once.

Compiled code puts strings in and gets codes; Python takes them out. Arrays are grown by Python when compiled code says that they
are full, so compiled code never writes beyond them: before it adds a string it checks the number of entries, the load of the hash
table and the room left in the arena (length + PAD: strings are copied eight bytes at a time). A code is below the number of entries
and a place below the size of the table, so the loads stay inside too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import njit

from tracekit.compiled import COMPILED
from tracekit.readers.lex import PAD, load32, load64, load_int64, store32, store64, store_int64

#: Kinds of entries: text without escapes, text with escapes, the raw text of a value that is not a string.
PLAIN, ESCAPED, RAW = 0, 1, 2
#: Rows of ``entries``.
OFFSET, LENGTH, KIND = 0, 1, 2

_M1, _M2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


@njit(inline="always", **COMPILED)
def _first_bytes(word, count):  # type: ignore[no-untyped-def]
    """The word with all but its first ``count`` (1 to 7) bytes cleared."""
    return word & ((np.uint64(1) << np.uint64(8 * count)) - np.uint64(1))


@njit(inline="always", **COMPILED)
def _mixed(h, word):  # type: ignore[no-untyped-def]
    h = (h ^ word) * _M1
    return h ^ (h >> np.uint64(32))


@njit(**COMPILED)
def hash_bytes(text, start, length, kind):  # type: ignore[no-untyped-def]
    """64-bit hash of ``length`` bytes; reads whole words, so up to 7 bytes behind them (inside the padding)."""
    h = np.uint64(length * 4 + kind) * _M2
    i = start
    left = length
    while left >= 8:
        h = _mixed(h, load64(text, i))
        i += 8
        left -= 8
    if left > 0:
        h = _mixed(h, _first_bytes(load64(text, i), left))
    h = h * _M2
    return h ^ (h >> np.uint64(29))


@njit(**COMPILED)
def same_bytes(one, i, other, j, length):  # type: ignore[no-untyped-def]
    """Whether two runs of bytes are equal."""
    while length >= 8:
        if load64(one, i) != load64(other, j):
            return False
        i += 8
        j += 8
        length -= 8
    return length == 0 or _first_bytes(load64(one, i) ^ load64(other, j), length) == np.uint64(0)


@njit(inline="always", **COMPILED)
def addresses(table, hashes, entries, arena, used):  # type: ignore[no-untyped-def]
    """What ``intern`` needs of a pool, as plain integers (see lex.py on arrays as arguments)."""
    return (
        table.ctypes.data,
        table.size,
        hashes.ctypes.data,
        entries.ctypes.data,
        entries.shape[1],
        arena.ctypes.data,
        arena.size,
        used.ctypes.data,
    )


@njit(**COMPILED)
def intern(text, start, length, kind, pool):  # type: ignore[no-untyped-def]
    """Code of a string, new or known; -1 when the pool must grow first. ``pool``: see ``addresses``."""
    table, slots, hashes, entries, capacity, arena, room, used = pool
    mask = np.uint64(slots - 1)
    h = hash_bytes(text, start, length, kind)
    place = np.int64(h & mask)
    while True:
        code = np.int64(load32(table, 4 * place))
        if code < 0:
            break
        if load64(hashes, 8 * place) == h:
            offset = load_int64(entries, 8 * code)
            known = load_int64(entries, 8 * (capacity + code)) == length and load_int64(entries, 8 * (2 * capacity + code)) == kind
            if known and same_bytes(text, start, arena, offset, length):
                return code
        place = np.int64((np.uint64(place) + np.uint64(1)) & mask)
    code = load_int64(used, 0)
    offset = load_int64(used, 8)
    if code * 2 >= slots or code >= capacity or offset + length + PAD > room:
        return np.int64(-1)
    for k in range(0, length, 8):
        store64(arena, offset + k, load64(text, start + k))
    store_int64(entries, 8 * code, offset)
    store_int64(entries, 8 * (capacity + code), length)
    store_int64(entries, 8 * (2 * capacity + code), kind)
    store32(table, 4 * place, np.int32(code))
    store64(hashes, 8 * place, h)
    store_int64(used, 0, code + 1)
    store_int64(used, 8, offset + length)
    return code


@njit(**COMPILED)
def intern_one(text, length, table, hashes, entries, arena, used):  # type: ignore[no-untyped-def]
    """``intern`` of a plain string, for Python."""
    return intern(text, 0, length, PLAIN, addresses(table, hashes, entries, arena, used))


@njit(**COMPILED)
def _rehash(table, hashes, entries, arena, count):  # type: ignore[no-untyped-def]
    mask = np.uint64(table.size - 1)
    for code in range(count):
        h = hash_bytes(arena.ctypes.data, entries[OFFSET, code], entries[LENGTH, code], entries[KIND, code])
        place = h & mask
        while table[place] >= 0:
            place = (place + np.uint64(1)) & mask
        table[place] = code
        hashes[place] = h


class Pool:
    """A growing pool. Code 0 is the missing string; ``known`` strings get the codes 1, 2, ... ."""

    def __init__(self, known: tuple[str, ...], entries: int = 1 << 13, arena: int = 1 << 20) -> None:
        self.used = np.zeros(2, np.int64)
        self._allocate(entries, arena)
        for text in ("", *known):
            self.add(text.encode())

    def _allocate(self, entries: int, arena: int) -> None:
        self.table = np.full(4 * entries, -1, np.int32)
        self.hashes = np.zeros(4 * entries, np.uint64)
        self.entries = np.zeros((3, entries), np.int64)
        self.arena = np.zeros(arena, np.uint8)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """Arguments of ``addresses``."""
        return self.table, self.hashes, self.entries, self.arena, self.used

    def add(self, raw: bytes) -> int:
        """Code of a plain string."""
        buffer = np.zeros(len(raw) + PAD, np.uint8)
        buffer[: len(raw)] = np.frombuffer(raw, np.uint8)
        return int(intern_one(buffer.ctypes.data, len(raw), *self.arrays))

    def grow(self, room: int) -> None:
        """Twice the entries, and an arena with ``room`` more bytes to spare."""
        entries, arena = self.entries, self.arena
        size = arena.size
        while size < int(self.used[1]) + room + PAD:
            size *= 2
        self._allocate(entries.shape[1] * 2, size)
        self.entries[:, : entries.shape[1]] = entries
        self.arena[: arena.size] = arena
        _rehash(self.table, self.hashes, self.entries, self.arena, int(self.used[0]))

    def since(self, code: int) -> Iterator[tuple[int, bytes]]:
        """(kind, raw bytes) of every entry from ``code`` on."""
        count = int(self.used[0])
        raw = memoryview(self.arena.data)
        offsets, lengths, kinds = (self.entries[row, code:count].tolist() for row in (OFFSET, LENGTH, KIND))
        for offset, length, kind in zip(offsets, lengths, kinds, strict=True):
            yield kind, bytes(raw[offset : offset + length])
