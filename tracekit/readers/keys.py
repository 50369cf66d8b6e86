"""Which keys of an event are read, and where their values go: data for the compiled pass, so a new argument needs no new code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numba import njit

from tracekit.compiled import COMPILED
from tracekit.readers.lex import PAD, load64, load_int64
from tracekit.readers.pool import same_bytes
from tracekit.trace.events import CATEGORY_NAMES, SIDE_COLUMNS, Category
from tracekit.units import NULL

#: Rows of the int64 output, of the int32 output, and of the counters.
TS, DUR, CORRELATION, EXTERNAL_ID = 0, 1, 2, 3
NAME, LANE, STREAM, DEVICE, KIND = 0, 1, 2, 3, 4  # KIND: category + 256 * phase + FLAG_DUPLICATE
ROW, ARROWS, COMMAS, DUPLICATES, BAD_NUMBERS, LANES = 0, 1, 2, 3, 4, 5
COUNTERS = 6
FLAG_DUPLICATE = 1 << 16

#: What to do with the value of a key: not an argument, dense int64, dense int32, or a column of a side table.
TOP, WIDE, NARROW, INTEGER, MICRO, STRING, JSON = range(7)
PH, CAT, NAME_KEY, PID, TID, TS_KEY, DUR_KEY, ARGS = range(8)
_TOP_KEYS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")
_SIDE_KINDS = {"int": INTEGER, "micro": MICRO, "str": STRING, "json": JSON}
#: The names of threads and processes, in metadata events; kept apart from the side tables that go on to the user.
NAMES_TABLE = "names"

#: Strings with fixed codes (from 1): categories, then names that decide a category.
KNOWN = (*CATEGORY_NAMES, "[memory]")
MEMORY_NAME = len(KNOWN)
_CATEGORY_OF_CODE = np.array([int(Category.OTHER), *(int(c) for c in CATEGORY_NAMES.values()), int(Category.OTHER)], np.int32)
NO_LANE_KEY = NULL
STRING_KEY = 1 << 62


class Spec:
    """Keys and where their values go, as arrays for the compiled pass.

    ``target[0, k]`` what to do, ``target[1, k]`` side table (or -1), ``target[2, k]`` output row, for key number k.
    """

    def __init__(self) -> None:
        rows: list[tuple[str, int, int, int]] = [
            ("correlation", WIDE, -1, CORRELATION),
            ("External id", WIDE, -1, EXTERNAL_ID),
            ("external id", WIDE, -1, EXTERNAL_ID),
            ("stream", NARROW, -1, STREAM),
            ("device", NARROW, -1, DEVICE),
        ]
        self.side_tables = [*SIDE_COLUMNS, NAMES_TABLE]
        self.side_first: list[int] = []
        columns = 0
        for number_, table in enumerate(self.side_tables):
            self.side_first.append(columns)
            for key, kind in SIDE_COLUMNS.get(table, {"name": "str"}).items():
                rows.append((key, _SIDE_KINDS[kind], number_, columns))
                columns += 1
        self.side_columns = columns
        self.side_width = [b - a for a, b in zip(self.side_first, [*self.side_first[1:], columns], strict=True)]
        self.first = np.array(self.side_first, np.int64)
        self.width = np.array(self.side_width, np.int64)
        self.top = _key_table(_TOP_KEYS)
        self.arguments = _key_table(key for key, *_ in rows)
        self.target = np.array([row[1:] for row in rows], np.int64).T.copy()


def _key_table(keys: Iterable[str]) -> Any:
    """A hash table of 512 slots, each the number of a key or -1; then per key its length and the offset of its padded bytes."""
    texts = [key.encode() for key in keys]
    head = 512 + 2 * len(texts)
    size = 8 * head + sum(len(t) + PAD for t in texts) + PAD
    memory = np.zeros(size + 8, np.uint8)
    numbers = memory[: 8 * head].view(np.int64)
    numbers[:512] = -1
    at = 8 * head
    for key, raw in enumerate(texts):
        memory[at : at + len(raw)] = np.frombuffer(raw, np.uint8)
        numbers[512 + 2 * key : 514 + 2 * key] = len(raw), at
        place = int(key_hash(memory.ctypes.data, at, len(raw)))
        while numbers[place] >= 0:
            place = (place + 1) & 511
        numbers[place] = key
        at += len(raw) + PAD
    return memory


@njit(**COMPILED)
def key_hash(text, start, length):  # type: ignore[no-untyped-def]
    """Slot of a key by its first and last eight bytes and its length (keys are few and short; equality is checked on all bytes)."""
    head = load64(text, start)
    tail = head
    if length < 8:
        head &= (np.uint64(1) << np.uint64(8 * length)) - np.uint64(1)
        tail = head
    else:
        tail = load64(text, start + length - 8)
    mixed = head * np.uint64(0x9E3779B97F4A7C15) ^ tail * np.uint64(0xC2B2AE3D27D4EB4F) ^ np.uint64(length) << np.uint64(55)
    return np.int64((mixed ^ (mixed >> np.uint64(31))) & np.uint64(511))


@njit(**COMPILED)
def key_number(text, start, length, keys):  # type: ignore[no-untyped-def]
    """Number of a key in the table at address ``keys``; -1 for one that is not wanted."""
    place = key_hash(text, start, length)
    while True:
        key = load_int64(keys, 8 * place)
        if key < 0:
            return np.int64(-1)
        entry = 8 * (512 + 2 * key)
        if load_int64(keys, entry) == length and same_bytes(text, start, keys, load_int64(keys, entry + 8), length):
            return key
        place = (place + 1) & 511


def category_table() -> Any:
    """Category of each fixed string code."""
    return _CATEGORY_OF_CODE
