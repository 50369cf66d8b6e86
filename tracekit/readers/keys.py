"""Which keys of an event are read, and where their values go: data, so a new argument needs no new code.

Compiled code finds the number of a key in a hash table of KEY_SLOTS slots of four words: the key's length, its first and its last eight
bytes, and its number. Up to 16 bytes these are the whole key; of longer ones the middle is compared too, in the text at ``_MIDDLE``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tracekit.compiled import Native, jit
from tracekit.readers.lex import COMPILED, INLINE, PAD, load64, load_int64
from tracekit.readers.pool import first_bytes, same_bytes
from tracekit.trace.events import SIDE_COLUMNS

#: Keys of an event: their number is also the word of the record (scan.py) that gets the value.
TOP_KEYS = ("ts", "dur", "name", "cat", "ph", "pid", "tid", "args")
TS, DUR, NAME, CAT, PH, PID, TID, ARGS = range(8)
#: Words of the record that arguments go to.
CORRELATION, EXTERNAL_ID, STREAM, DEVICE = range(8, 12)

#: How the value of an argument is read.
INTEGER, MICRO, STRING, JSON = range(4)
_KINDS = {"int": INTEGER, "micro": MICRO, "str": STRING, "json": JSON}
#: Side table -1: the value goes to the record.
RECORD = -1
#: The names of threads and processes, in metadata events: a side table of its own, which does not go on to the user.
NAMES_TABLE = "names"
SIDE_TABLES: dict[str, dict[str, Any]] = {**SIDE_COLUMNS, NAMES_TABLE: {"name": "str"}}

_ARGUMENTS = {
    "correlation": CORRELATION,
    "External id": EXTERNAL_ID,
    "external id": EXTERNAL_ID,  # torch 1.8
    "stream": STREAM,
    "device": DEVICE,
}

KEY_SLOTS = 256
_MIDDLE = 32 * KEY_SLOTS  # then PAD + the longest key, for each key
_LONGEST = 64

_M1, _M2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


@jit(**INLINE)
def _slot_of(head: Native, tail: Native, length: Native) -> Native:
    mixed = head * _M1 ^ tail * _M2 ^ np.uint64(length) << np.uint64(55)
    return np.int64((mixed ^ mixed >> np.uint64(31)) & np.uint64(KEY_SLOTS - 1))


@jit(**COMPILED)
def find_key(text: Native, start: Native, length: Native, table: Native) -> Native:
    """Number of the key ``text[start:start + length]`` in the table at an address; -1 for one that is not wanted."""
    head = load64(text, start)
    if length < 8:
        head = first_bytes(head, length)
        tail = head
    else:
        tail = load64(text, start + length - 8)
    position = _slot_of(head, tail, length)
    while True:
        slot = table + 32 * position
        size = load_int64(slot, 0)
        if size < 0:
            return np.int64(-1)
        if size == length and load64(slot, 8) == head and load64(slot, 16) == tail:
            key = load_int64(slot, 24)
            if length <= 16 or same_bytes(text, start, table, _MIDDLE + (PAD + _LONGEST) * key, length):
                return key
        position = (position + 1) & (KEY_SLOTS - 1)


def key_table(keys: Iterable[str]) -> Any:
    """The hash table of these keys (fewer than KEY_SLOTS / 2, each at most 64 bytes) as an array of bytes."""
    texts = [key.encode() for key in keys]
    if len(texts) > KEY_SLOTS // 2 or max(map(len, texts)) > _LONGEST:
        raise ValueError("too many keys, or one that is too long")
    memory = np.zeros(_MIDDLE + (PAD + _LONGEST) * len(texts) + PAD, np.uint8)
    slots = memory[:_MIDDLE].view(np.uint64).reshape(KEY_SLOTS, 4)
    slots[:, 0] = np.uint64(2**64 - 1)
    mask = 2**64 - 1
    for key, raw in enumerate(texts):
        at = _MIDDLE + (PAD + _LONGEST) * key
        memory[at : at + len(raw)] = np.frombuffer(raw, np.uint8)
        head = int.from_bytes(raw[:8], "little")
        tail = int.from_bytes(raw[-8:], "little")
        mixed = (head * int(_M1) ^ tail * int(_M2) ^ len(raw) << 55) & mask
        position = (mixed ^ mixed >> 31) & (KEY_SLOTS - 1)
        while slots[position, 0] != mask:
            position = (position + 1) & (KEY_SLOTS - 1)
        slots[position] = len(raw), head, tail, key
    return memory


class Spec:
    """The wanted keys. ``targets`` has four words for each argument: how to read it, side table or RECORD, word or column, 0.

    Columns of all side tables are numbered through: table number n has the columns ``first[n]`` to ``first[n] + width[n]``.
    """

    def __init__(self) -> None:
        targets = [(INTEGER, RECORD, word, 0) for word in _ARGUMENTS.values()]
        keys = list(_ARGUMENTS)
        self.first: list[int] = []
        self.width: list[int] = []
        for table, columns in enumerate(SIDE_TABLES.values()):
            self.first.append(sum(self.width))
            self.width.append(len(columns))
            targets += [(_KINDS[kind], table, self.first[-1] + k, 0) for k, kind in enumerate(columns.values())]
            keys += columns
        self.columns = sum(self.width)
        self.targets = np.array(targets, np.int64)
        self.top = key_table(TOP_KEYS)
        self.arguments = key_table(keys)
