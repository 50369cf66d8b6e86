"""Where the compiled reader of snapshot pickles keeps what it builds: flat arrays, no Python object a value.

A value is one int64 word: its kind in the low four bits, the rest a number, a string's code or a container's number. Containers that make
up nearly all of a snapshot are packed as soon as they are known: an entry or a block is a row of two small tables, a frame a code, a list
of frames a node of a tree in which stacks share what they have in common, two numbers a code. All else is kept as it is, in runs of words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tracekit.trace.events import Int8Array, Int32Array, Int64Array, UInt8Array
from tracekit.units import NULL

#: Kinds of a word.
NONE, BOOL, INT, TEXT, CONTAINER, BYTES, FLOAT, HUGE = range(8)
#: Kinds of a container. RECORD: ``first`` is a row; FRAME: a frame; STACK: a node; PAIR: a code; the others: their first and last run.
LIST, DICT, TUPLE, SET, RECORD, FRAME, STACK, PAIR = range(8)

#: Strings whose codes the compiled reader knows: their place in this list.
WORDS = (
    "",
    "action",
    "addr",
    "address",
    "size",
    "time_us",
    "requested_size",
    "frames",
    "user_metadata",
    "pool_id",
    "device_free",
    "state",
    "history",
    "filename",
    "line",
    "name",
)
(
    W_EMPTY,
    W_ACTION,
    W_ADDR,
    W_ADDRESS,
    W_SIZE,
    W_TIME,
    W_REQUESTED,
    W_FRAMES,
    W_METADATA,
    W_POOL,
    W_DEVICE_FREE,
    W_STATE,
    W_HISTORY,
    W_FILENAME,
    W_LINE,
    W_NAME,
) = range(len(WORDS))

#: Columns of ``numbers`` and ``codes`` of a record. PLACE is the address, of an out-of-memory entry the device's free bytes; WHEN the time
#: [us] of an entry, the requested size of a block.
PLACE, AMOUNT, WHEN = range(3)
WORD, STACK_OF, METADATA, POOL = range(4)

#: Places in ``count``.
(
    C_POSITION,
    C_DEPTH,
    C_MARKS,
    C_MEMO,
    C_CONTAINERS,
    C_RUNS,
    C_WORDS,
    C_STRINGS,
    C_CHARACTERS,
    C_RECORDS,
    C_FRAMES,
    C_NODES,
    C_PAIRS,
    C_SHORT,
    C_OPERAND,
    C_TAKEN,
) = range(16)


class Store(NamedTuple):
    """Growing arrays; how much of each is used stands in ``count``."""

    count: Int64Array
    stack: Int64Array
    marks: Int64Array
    memo: Int64Array
    kind: UInt8Array
    first: Int32Array
    last: Int32Array
    run_start: Int64Array
    run_length: Int32Array
    run_next: Int32Array
    words: Int64Array
    string_end: Int64Array
    characters: UInt8Array
    string_table: Int32Array
    numbers: Int64Array
    codes: Int32Array
    frames: Int32Array  # filename, line, name
    frame_table: Int32Array
    nodes: Int32Array  # parent, frame
    node_table: Int32Array
    pairs: Int64Array


#: Which arrays belong to each place in ``count``, and how much of them is made at first.
PARTS: dict[int, tuple[tuple[str, ...], int]] = {
    C_DEPTH: (("stack",), 1 << 12),
    C_MARKS: (("marks",), 1 << 8),
    C_MEMO: (("memo",), 1 << 12),
    C_CONTAINERS: (("kind", "first", "last"), 1 << 12),
    C_RUNS: (("run_start", "run_length", "run_next"), 1 << 12),
    C_WORDS: (("words",), 1 << 14),
    C_STRINGS: (("string_end",), 1 << 10),
    C_CHARACTERS: (("characters",), 1 << 16),
    C_RECORDS: (("numbers", "codes"), 1 << 12),
    C_FRAMES: (("frames",), 1 << 10),
    C_NODES: (("nodes",), 1 << 12),
    C_PAIRS: (("pairs",), 1 << 10),
}
#: Hash tables by the place in ``count`` of what they hold; they are kept at most half full.
TABLES = {C_STRINGS: "string_table", C_FRAMES: "frame_table", C_NODES: "node_table"}
_GROWTH = 1.25


def new_store() -> Store:
    """An empty store: no string, no frame; node 0 is the empty stack."""
    size = {name: most for names, most in PARTS.values() for name in names}
    i64, i32, u8 = np.int64, np.int32, np.uint8
    count = np.zeros(16, i64)
    count[C_NODES] = 1
    return Store(
        count,
        *(np.empty(size[name], i64) for name in ("stack", "marks", "memo")),
        np.empty(size["kind"], u8),
        np.empty(size["first"], i32),
        np.empty(size["last"], i32),
        np.empty(size["run_start"], i64),
        np.empty(size["run_length"], i32),
        np.empty(size["run_next"], i32),
        np.empty(size["words"], i64),
        np.empty(size["string_end"], i64),
        np.empty(size["characters"], u8),
        np.full(4 * size["string_end"], -1, i32),
        np.empty((size["numbers"], 3), i64),
        np.empty((size["codes"], 4), i32),
        np.empty((size["frames"], 3), i32),
        np.full(4 * size["frames"], -1, i32),
        np.full((size["nodes"], 2), -1, i32),
        np.full(4 * size["nodes"], -1, i32),
        np.empty((size["pairs"], 2), i64),
    )


def grow(store: Store, part: int, room: int) -> Store:
    """Make room for ``room`` more elements of one part; large arrays grow by moving their pages instead of being copied."""
    wanted = int(store.count[part]) + room
    names = PARTS[part][0]
    size = len(getattr(store, names[0]))
    if wanted > size:
        size = max(wanted, int(size * _GROWTH))
        for name in names:
            array = getattr(store, name)
            array.resize((size, *array.shape[1:]), refcheck=False)
    if part in TABLES and 2 * size > len(getattr(store, TABLES[part])):
        store = store._replace(**{TABLES[part]: np.full(1 << (4 * size - 1).bit_length(), -1, np.int32)})
    return store


def used_bytes(store: Store) -> int:
    """Memory of all arrays."""
    return sum(array.nbytes for array in store)


class Reading:
    """What a pickle held, for whoever looks into it: values by word, records and stacks as columns."""

    def __init__(self, store: Store, root: int) -> None:
        self.store = store
        self.root = root
        ends = store.string_end[: store.count[C_STRINGS]].tolist()
        data = store.characters[: store.count[C_CHARACTERS]].tobytes()
        self.strings: Sequence[str] = [
            data[start:end].decode("utf-8", "replace") for start, end in zip([0, *ends[:-1]], ends, strict=True)
        ]

    def kind(self, word: int) -> int:
        """Kind of the container a word stands for; -1 for any other word."""
        return int(self.store.kind[word >> 4]) if word & 15 == CONTAINER else -1

    def items(self, word: int) -> Int64Array:
        """The words in a list, tuple or set; of a dict its keys and values by turns. Empty for everything else."""
        store = self.store
        if self.kind(word) == PAIR:
            return store.pairs[store.first[word >> 4]] << 4 | INT
        if self.kind(word) not in (LIST, DICT, TUPLE, SET):
            return np.empty(0, np.int64)
        parts = []
        run = int(store.first[word >> 4])
        while run >= 0:
            start = int(store.run_start[run])
            parts.append(store.words[start : start + int(store.run_length[run])])
            run = int(store.run_next[run])
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def entries(self, word: int) -> dict[str, int]:
        """Text key -> word of a dict; the last one of equal keys."""
        if self.kind(word) != DICT:
            return {}
        words = self.items(word).tolist()
        return {self.strings[key >> 4]: value for key, value in zip(words[::2], words[1::2], strict=True) if key & 15 == TEXT}

    def number(self, word: int | None, missing: int = NULL) -> int:
        """An integer; ``missing`` for anything else."""
        return missing if word is None or word & 15 not in (INT, FLOAT, BOOL) else word >> 4

    def text(self, word: int | None) -> str:
        """A string; '' for anything else."""
        return "" if word is None or word & 15 != TEXT else self.strings[word >> 4]

    def records(self, word: int) -> Int64Array:
        """Rows of the records in a list, in its order; what else is in it is passed over."""
        words = self.items(word)
        places = words[(words & 15) == CONTAINER] >> 4
        places = places[self.store.kind[places] == RECORD]
        rows: Int64Array = self.store.first[places].astype(np.int64)
        return rows


__all__ = ["Int8Array", "Reading", "Store", "grow", "new_store", "used_bytes"]
