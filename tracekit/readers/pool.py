"""One pool of distinct strings, keyed by their raw bytes: a name that occurs a million times is stored, hashed and decoded once.

Compiled code puts strings in and gets codes; Python takes them out. Arrays are grown by Python when compiled code says that they
are full, so compiled code never writes beyond them: before it adds a string it checks the number of entries, the load of the hash
table and the room left in the arena (length + PAD).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import njit

from tracekit.readers.lex import COMPILED, PAD, load8, load64

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


@njit(**COMPILED)
def intern(text, start, length, kind, table, hashes, entries, arena, used):  # type: ignore[no-untyped-def]
    """Code of a string, new or known; -1 when the pool must grow first. ``used``: [entries, arena bytes]."""
    mask = np.uint64(table.size - 1)
    h = hash_bytes(text, start, length, kind)
    place = h & mask
    while True:
        code = table[place]
        if code < 0:
            break
        known = hashes[place] == h and entries[LENGTH, code] == length and entries[KIND, code] == kind
        if known and same_bytes(text, start, arena.ctypes.data, entries[OFFSET, code], length):
            return np.int64(code)
        place = (place + np.uint64(1)) & mask
    code = used[0]
    offset = used[1]
    if code * 2 >= table.size or code >= entries.shape[1] or offset + length + PAD > arena.size:
        return np.int64(-1)
    for k in range(length):
        arena[offset + k] = load8(text, start + k)
    entries[OFFSET, code] = offset
    entries[LENGTH, code] = length
    entries[KIND, code] = kind
    table[place] = code
    hashes[place] = h
    used[0] = code + 1
    used[1] = offset + length
    return np.int64(code)


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
        """Arguments of ``intern`` after the string."""
        return self.table, self.hashes, self.entries, self.arena, self.used

    def add(self, raw: bytes) -> int:
        """Code of a plain string."""
        buffer = np.zeros(len(raw) + PAD, np.uint8)
        buffer[: len(raw)] = np.frombuffer(raw, np.uint8)
        return int(intern(buffer.ctypes.data, 0, len(raw), PLAIN, *self.arrays))

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
