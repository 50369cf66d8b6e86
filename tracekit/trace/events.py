"""The events of one trace file as columns.

Every reader ends here and every analysis begins here. One row is one event of the file, in file order (NOT sorted by time). Arrow events
(``ph`` s, t, f) are left out and counted in ``Coverage``: launch and kernel are linked by correlation instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from tracekit.notes import Note, sentences
from tracekit.units import NULL, NULL32

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
Int8Array = npt.NDArray[np.int8]
UInt8Array = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]
_T = TypeVar("_T")


class Category(IntEnum):
    """What an event is, whatever the age of the trace that spells it."""

    OTHER = 0
    OPERATOR = 1  # cpu_op, Operator
    USER_ANNOTATION = 2  # user_annotation: record_function on the host
    RUNTIME = 3  # cuda_runtime, cuda_driver, Runtime, hip_*, xpu_*, privateuse1_runtime
    KERNEL = 4  # kernel, Kernel
    MEMCPY = 5  # gpu_memcpy, Memcpy
    MEMSET = 6  # gpu_memset, Memset
    GPU_ANNOTATION = 7  # gpu_user_annotation: the device-side copy of an annotation; never summed with kernels
    PYTHON = 8  # python_function
    MEMORY = 9  # the [memory] instants (cat cpu_instant_event, or none)
    SYNC = 10  # cuda_sync
    METADATA = 11  # ph M
    TRACE = 12  # the profiler's own span (cat Trace)
    OVERHEAD = 13  # profiler overhead
    COUNTER = 14  # ph C


#: What runs on a device.
DEVICE_WORK = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)

#: How traces of all ages spell each category (the value of ``cat``). What is not here is OTHER.
CATEGORY_NAMES: dict[str, Category] = {
    "cpu_op": Category.OPERATOR,
    "Operator": Category.OPERATOR,
    "operator": Category.OPERATOR,
    "user_annotation": Category.USER_ANNOTATION,
    "cuda_runtime": Category.RUNTIME,
    "cuda_driver": Category.RUNTIME,
    "Runtime": Category.RUNTIME,
    "runtime": Category.RUNTIME,
    "hip_runtime": Category.RUNTIME,
    "xpu_runtime": Category.RUNTIME,
    "xpu_driver": Category.RUNTIME,
    "mtia_runtime": Category.RUNTIME,
    "privateuse1_runtime": Category.RUNTIME,
    "privateuse1_driver": Category.RUNTIME,
    "kernel": Category.KERNEL,
    "Kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "Memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    "Memset": Category.MEMSET,
    "gpu_user_annotation": Category.GPU_ANNOTATION,
    "python_function": Category.PYTHON,
    "cpu_instant_event": Category.MEMORY,
    "mtia_ccp_events": Category.KERNEL,  # the waits and marks among them: readers/oddities.py
    "cuda_sync": Category.SYNC,
    "Trace": Category.TRACE,
    "overhead": Category.OVERHEAD,
}

#: Side tables: sparse arguments, keyed by row. ``int`` columns are int64 with NULL; ``str`` columns are string codes (int32, 0 missing);
#: ``json`` columns are string codes of the argument's raw JSON text. Adding an argument here is all it takes to have it read.
SIDE_COLUMNS: dict[str, dict[str, Literal["int", "str", "json", "micro"]]] = {
    "communication": {
        "Collective name": "str",
        "In msg nelems": "int",
        "Out msg nelems": "int",
        "dtype": "str",
        "Group size": "int",
        "Process Group Name": "str",
        "Process Group ID": "int",
        "Process Group Description": "str",
        "Process Group Ranks": "str",
        "Global rank start": "int",
        "Global rank stride": "int",
        "In split size": "str",
        "Out split size": "str",
        "Seq": "int",
        "Src Rank": "int",
        "Dst Rank": "int",
        "Rank": "int",
        "Is asynchronized op": "str",
        "Comms Id": "str",
    },
    "memory": {
        "Bytes": "int",
        "Addr": "int",
        "Total Allocated": "int",
        "Total Reserved": "int",
        "Device Id": "int",
        "Device Type": "int",
    },
    "copy": {"bytes": "int", "memory bandwidth (GB/s)": "micro"},  # micro: decimal value times 10^6
    "shapes": {"Input Dims": "json", "Input type": "json", "Concrete Inputs": "json"},
    "autograd": {"Sequence number": "int", "Fwd thread id": "int"},
    "python": {"Python id": "int", "Python parent id": "int", "Python module id": "int"},
    "sync": {"wait_on_stream": "int", "wait_on_cuda_event_record_corr_id": "int", "wait_on_cuda_event_id": "int"},
    "graph": {"graph id": "int", "graph node id": "int"},
}


#: Of tables up to this size what several analyses ask for (rows of categories, the host's window) is held.
HELD_ROWS = 1 << 20


@dataclass(frozen=True)
class SideTable:
    """Arguments that only some events carry: ``rows`` (ascending rows of the events table) and one array a column, same length."""

    rows: Int64Array
    columns: Mapping[str, npt.NDArray[Any]]

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, rows: Int64Array) -> Int64Array:
        """Index into this table for each event row; -1 where the event has no entry."""
        if not len(self.rows):
            return np.full(len(rows), -1, np.int64)
        position = np.searchsorted(self.rows, rows)
        found = self.rows[np.minimum(position, len(self.rows) - 1)] == rows
        return np.where(found, position, -1).astype(np.int64)


@dataclass(frozen=True)
class Lane:
    """A row of the trace viewer: process and thread (or device and stream), as the file names them."""

    pid: int | str
    tid: int | str
    process_name: str = ""
    thread_name: str = ""


#: complete: read to the end. truncated: the file ends in the middle. repaired: read to the end with repairs or skipped events.
#: skipped: nothing could be used. duplicate: another file already stands for this rank and time.
Status = Literal["complete", "truncated", "repaired", "skipped", "duplicate"]


@dataclass
class Coverage:
    """What was and was not read of one file."""

    file: str  # path or URL
    rank: int | None = None  # global rank; None: not known
    status: Status = "complete"
    events: int = 0  # events read
    arrows: int = 0  # arrow events, which are counted only
    notes: list[Note] = field(default_factory=list)  # what was odd, lost or repaired
    passing: bool = False  # another try may read it: memory did not suffice, a worker was killed

    @property
    def problems(self) -> list[str]:
        """The notes as sentences for the user, without the file's name."""
        return sentences(self.notes)

    def note(self, found: Note, status: Status | None = None) -> None:
        """Add a note; a worse status replaces a better one."""
        order = ("complete", "repaired", "truncated", "duplicate", "skipped")
        if found not in self.notes:
            self.notes.append(found)
        if status is not None and order.index(status) > order.index(self.status):
            self.status = status


@dataclass
class RankTables:
    """Everything read from one trace file.

    Columns have one entry an event. ``ts`` is Unix nanoseconds: the file's ``baseTimeNanoseconds`` is already added
    (traces without a base carry absolute or process-relative times as they are); NULL where the event has no readable
    ``ts``. ``dur`` is NULL where the event has none, and may be negative or absurd: the reader repairs text, not facts.
    ``name``, and the ``str`` columns of side tables, are codes into ``strings`` (code 0: missing, string ''). ``lane``
    indexes ``lanes``. ``stream`` and ``device`` are NULL32 where absent, ``correlation`` and ``external_id`` NULL.
    ``metadata`` holds the top-level keys of the file other than ``traceEvents``.
    """

    ts: Int64Array
    dur: Int64Array
    name: Int32Array
    category: Int8Array
    phase: UInt8Array
    lane: Int32Array
    correlation: Int64Array
    external_id: Int64Array
    stream: Int32Array
    device: Int32Array
    side: dict[str, SideTable]
    strings: Sequence[str]
    lanes: Sequence[Lane]
    metadata: dict[str, Any]
    coverage: Coverage
    kept_until: int | None = None  # a limit of memory was in effect: events that begin at this time [ns] or later are left out
    _held: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.ts)

    def rows(self, *categories: Category) -> Int64Array:
        """Rows of these categories that are complete events (``ph`` X), in file order. Not to be written to."""
        return self.held(frozenset(categories), lambda: self._rows(categories))

    def _rows(self, categories: Sequence[Category]) -> Int64Array:
        wanted = np.zeros(256, np.bool_)  # a category is a byte
        wanted[[int(c) for c in categories]] = True
        found = np.flatnonzero(wanted[self.category] & (self.phase == ord("X"))).astype(np.int64)
        found.flags.writeable = False
        return found

    def held(self, key: Any, find: Callable[[], _T]) -> _T:
        """What ``find`` gives, worked out once for all who ask under this key; of tables beyond HELD_ROWS each time (it takes memory)."""
        if len(self) > HELD_ROWS:
            return find()
        if key not in self._held:
            self._held[key] = find()
        found: _T = self._held[key]
        return found

    def forget(self) -> None:
        """Drop what is held: columns have changed."""
        self._held.clear()

    def text(self, code: int) -> str:
        """The string of a code; '' for a missing one."""
        return self.strings[code] if code > 0 else ""

    def each_text(self, codes: npt.NDArray[Any], ask: Callable[[str], Any], dtype: npt.DTypeLike = np.bool_) -> npt.NDArray[Any]:
        """``ask`` of the string of each code, called once a distinct string ('' for a missing one); results as ``dtype``."""
        used = np.flatnonzero(np.bincount(codes, minlength=1))
        answers = np.zeros(int(used[-1]) + 1 if len(used) else 1, dtype)
        answers[used] = [ask(self.text(code)) for code in used.tolist()]
        found: npt.NDArray[Any] = answers[codes]
        return found


def no_side_tables() -> dict[str, SideTable]:
    """Every side table, empty."""
    return {name: empty_side_table(name) for name in SIDE_COLUMNS}


def empty_side_table(name: str) -> SideTable:
    """A side table of no rows, with the right columns and dtypes."""
    return SideTable(np.empty(0, np.int64), {column: np.empty(0, side_dtype(kind)) for column, kind in SIDE_COLUMNS[name].items()})


def side_dtype(kind: str) -> npt.DTypeLike:
    """dtype of a side column: codes are int32, numbers int64."""
    return np.int32 if kind in ("str", "json") else np.int64


__all__ = [
    "CATEGORY_NAMES",
    "NULL",
    "NULL32",
    "SIDE_COLUMNS",
    "Category",
    "Coverage",
    "Lane",
    "RankTables",
    "SideTable",
    "Status",
    "empty_side_table",
    "no_side_tables",
    "side_dtype",
]
