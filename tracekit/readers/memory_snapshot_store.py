"""Where the compiled reader of snapshot pickles keeps what it builds: flat arrays, no Python object a value.

A value is one int64 word: its kind in the low four bits, the rest a number, a string's code or a container's number. Containers that make
up nearly all of a snapshot are packed as soon as they are known: an entry or a block is a row of two small tables, a frame a code, a list
of frames a node of a tree in which stacks share what they have in common, two numbers a code. All else is kept as it is, in runs of words.

Compiled code gets the address of ``control``: how much of each part is used, how much there is room for, and where the arrays are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.trace.events import Int64Array
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

#: Columns of the tables NUMBERS (int64) and CODES (int32) of records. PLACE is the address, of an out-of-memory entry the device's free
#: bytes; WHEN the time [us] of an entry, the requested size of a block.
PLACE, AMOUNT, WHEN, NUMBER_COLUMNS = range(4)
WORD, STACK_OF, METADATA, POOL, CODE_COLUMNS = range(5)
#: Columns of FRAMES (file, line, function) and NODES (parent, frame) and PAIRS.
FRAME_COLUMNS, NODE_COLUMNS, PAIR_COLUMNS = 3, 2, 2

#: Parts: word n of the control block says how much of part n is used, word ROOM + n how much it can hold.
(
    DEPTH,
    OPEN_MARKS,
    MEMOS,
    CONTAINERS,
    RUNS,
    ALL_WORDS,
    STRINGS,
    CHARACTERS_,
    RECORDS,
    FRAMES_,
    NODES_,
    PAIRS_,
) = range(12)
ROOM = 12
#: Where the pass stands in its text, and what it lacks when it stops: the part, and how many elements more.
POSITION, SHORT, SHORT_BY = 24, 25, 26
#: Words with the addresses of arrays, in the order of ARRAYS.
(
    STACK_,
    MARKS,
    MEMO,
    KIND,
    FIRST,
    LAST,
    RUN_START,
    RUN_LENGTH,
    RUN_NEXT,
    KEPT,
    STRING_END,
    CHARACTERS,
    NUMBERS,
    CODES,
    FRAMES,
    NODES,
    PAIRS,
    STRING_TABLE,
    FRAME_TABLE,
    NODE_TABLE,
) = range(32, 52)
#: Words with the size of each hash table less one.
STRING_MASK, FRAME_MASK, NODE_MASK = 56, 57, 58
_CONTROL = 64

#: Address word -> (dtype, columns) of each array.
ARRAYS: dict[int, tuple[Any, int]] = {
    STACK_: (np.int64, 1),
    MARKS: (np.int64, 1),
    MEMO: (np.int64, 1),
    KIND: (np.uint8, 1),
    FIRST: (np.int32, 1),
    LAST: (np.int32, 1),
    RUN_START: (np.int64, 1),
    RUN_LENGTH: (np.int32, 1),
    RUN_NEXT: (np.int32, 1),
    KEPT: (np.int64, 1),
    STRING_END: (np.int64, 1),
    CHARACTERS: (np.uint8, 1),
    NUMBERS: (np.int64, NUMBER_COLUMNS),
    CODES: (np.int32, CODE_COLUMNS),
    FRAMES: (np.int32, FRAME_COLUMNS),
    NODES: (np.int32, NODE_COLUMNS),
    PAIRS: (np.int64, PAIR_COLUMNS),
}
#: Part -> its arrays, and how much of them is made at first.
PARTS: dict[int, tuple[tuple[int, ...], int]] = {
    DEPTH: ((STACK_,), 1 << 12),
    OPEN_MARKS: ((MARKS,), 1 << 8),
    MEMOS: ((MEMO,), 1 << 12),
    CONTAINERS: ((KIND, FIRST, LAST), 1 << 12),
    RUNS: ((RUN_START, RUN_LENGTH, RUN_NEXT), 1 << 12),
    ALL_WORDS: ((KEPT,), 1 << 14),
    STRINGS: ((STRING_END,), 1 << 10),
    CHARACTERS_: ((CHARACTERS,), 1 << 16),
    RECORDS: ((NUMBERS, CODES), 1 << 12),
    FRAMES_: ((FRAMES,), 1 << 10),
    NODES_: ((NODES,), 1 << 12),
    PAIRS_: ((PAIRS,), 1 << 10),
}
#: Part -> (hash table, its mask); tables are at most half full.
TABLES = {STRINGS: (STRING_TABLE, STRING_MASK), FRAMES_: (FRAME_TABLE, FRAME_MASK), NODES_: (NODE_TABLE, NODE_MASK)}
_GROWTH = 1.25


class Store:
    """Growing arrays, empty at first: no string, no frame; node 0 is the empty stack."""

    def __init__(self) -> None:
        self.control = np.zeros(_CONTROL, np.int64)
        self._arrays: dict[int, npt.NDArray[Any]] = {}
        for part, (arrays, size) in PARTS.items():
            for array in arrays:
                dtype, columns = ARRAYS[array]
                self._arrays[array] = np.empty((size, columns) if columns > 1 else size, dtype)
            if part in TABLES:
                self._arrays[TABLES[part][0]] = np.full(4 * size, -1, np.int32)
        self._arrays[NODES][0] = -1
        self.control[NODES_] = 1
        self._tell()

    @property
    def address(self) -> int:
        """Of the control block."""
        return int(self.control.ctypes.data)

    def grow(self, part: int, by: int) -> bool:
        """Make room for ``by`` more elements of a part; whether its hash table is a new, empty one.

        Large arrays grow by moving their pages instead of being copied, where the system can.
        """
        arrays = PARTS[part][0]
        wanted, size = int(self.control[part]) + by, len(self._arrays[arrays[0]])
        if wanted > size:
            size = max(wanted, int(size * _GROWTH))
            for array in arrays:
                kept = self._arrays[array]
                kept.resize((size, *kept.shape[1:]), refcheck=False)
        emptied = part in TABLES and 2 * size > len(self._arrays[TABLES[part][0]])
        if emptied:
            self._arrays[TABLES[part][0]] = np.full(1 << (4 * size - 1).bit_length(), -1, np.int32)
        self._tell()
        return emptied

    def _tell(self) -> None:
        for word, array in self._arrays.items():
            self.control[word] = array.ctypes.data
        for part, (arrays, _) in PARTS.items():
            self.control[ROOM + part] = len(self._arrays[arrays[0]])
        for table, mask in TABLES.values():
            self.control[mask] = len(self._arrays[table]) - 1

    def array(self, name: int, part: int) -> npt.NDArray[Any]:
        """What is used of an array of a part."""
        return self._arrays[name][: self.control[part]]

    @property
    def bytes(self) -> int:
        """Memory of all arrays."""
        return sum(array.nbytes for array in self._arrays.values())


class Reading:
    """What a pickle held, for whoever looks into it: values by word, records and stacks as columns."""

    def __init__(self, store: Store, root: int) -> None:
        self.root = root
        self.strings = _strings(store)
        self.numbers, self.codes = store.array(NUMBERS, RECORDS), store.array(CODES, RECORDS)
        self.frames, self.nodes = store.array(FRAMES, FRAMES_), store.array(NODES, NODES_)
        self.pairs = store.array(PAIRS, PAIRS_)
        self._kind, self._first = store.array(KIND, CONTAINERS), store.array(FIRST, CONTAINERS)
        self._start, self._length = store.array(RUN_START, RUNS), store.array(RUN_LENGTH, RUNS)
        self._next, self._words = store.array(RUN_NEXT, RUNS), store.array(KEPT, ALL_WORDS)

    def kind(self, word: int) -> int:
        """Kind of the container a word stands for; -1 for any other word."""
        return int(self._kind[word >> 4]) if word & 15 == CONTAINER else -1

    def items(self, word: int) -> Int64Array:
        """The words in a list, tuple or set; of a dict its keys and values by turns. Empty for everything else."""
        if self.kind(word) == PAIR:
            return np.asarray(self.pairs[self.pair(word)] << 4 | INT, np.int64)
        if self.kind(word) not in (LIST, DICT, TUPLE, SET):
            return np.empty(0, np.int64)
        parts = []
        run = int(self._first[word >> 4])
        while run >= 0:
            start = int(self._start[run])
            parts.append(self._words[start : start + int(self._length[run])])
            run = int(self._next[run])
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def pair(self, word: int) -> int:
        """Code of a pair; -1 for anything else."""
        return int(self._first[word >> 4]) if self.kind(word) == PAIR else -1

    def entries(self, word: int) -> dict[str, int]:
        """Text key -> word of a dict; the last one of equal keys."""
        if self.kind(word) != DICT:
            return {}
        words = self.items(word).tolist()
        return {self.strings[key >> 4]: value for key, value in zip(words[::2], words[1::2], strict=True) if key & 15 == TEXT}

    def number(self, word: int | None, missing: int = NULL) -> int:
        """An integer; ``missing`` for anything else."""
        return missing if word is None or word & 15 not in (INT, BOOL) else word >> 4

    def text(self, word: int | None) -> str:
        """A string; '' for anything else."""
        return "" if word is None or word & 15 != TEXT else self.strings[word >> 4]

    def records(self, word: int) -> Int64Array:
        """Rows of the records in a list, in its order; what else is in it is passed over."""
        words = self.items(word)
        places = words[(words & 15) == CONTAINER] >> 4
        places = places[self._kind[places] == RECORD]
        rows: Int64Array = self._first[places].astype(np.int64)
        return rows


def _strings(store: Store) -> Sequence[str]:
    ends = store.array(STRING_END, STRINGS).tolist()
    data = store.array(CHARACTERS, CHARACTERS_).tobytes()
    return [data[start:end].decode("utf-8", "replace") for start, end in zip([0, *ends[:-1]], ends, strict=True)]
