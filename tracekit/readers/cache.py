"""A second open without parsing: the tables of one trace as one Arrow IPC file.

An entry holds one row; each column of the tables is one list in it, because columns of different tables differ in length. Before the
Arrow data stands a checksum, so a damaged entry is noticed and simply not used. An entry is good for one file (url, size, time of last
change) and one schema of the tables; entries are written aside and moved into place, so a reader never sees half of one.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

import tracekit
from tracekit.notes import restored
from tracekit.readers.cache_folder import SCRATCH, distrust, used
from tracekit.readers.recognise import reason
from tracekit.readers.sources import Source, shown
from tracekit.trace.events import CATEGORY_NAMES, SIDE_COLUMNS, Category, Coverage, Lane, RankTables, SideTable, side_dtype

if TYPE_CHECKING:
    import pyarrow as pa

#: Raise when a reader gives other tables for the same file than before.
FORMAT = 1
#: By measurement on tables of 250 MB of JSON: zstd opens in 6 to 14 ms, lz4 in 7 to 9 ms with entries of 2.5 to 4 times the size, no
#: codec in 2 ms with 8 to 15 times the size.
CODEC = "zstd"

_ENDING = ".arrow"
_HEADER = struct.Struct("<8sIQ44x")  # magic, CRC-32 and length [bytes] of the Arrow data; 64 bytes, so that the data stay aligned
_MAGIC = b"TRKTABLE"
_COLUMNS: dict[str, npt.DTypeLike] = {
    "ts": np.int64,
    "dur": np.int64,
    "name": np.int32,
    "category": np.int8,
    "phase": np.uint8,
    "lane": np.int32,
    "correlation": np.int64,
    "external_id": np.int64,
    "stream": np.int32,
    "device": np.int32,
}


class ArrowStrings(Sequence[str]):
    """The strings of a trace, decoded when asked for: of a hundred thousand names an analysis looks at few."""

    def __init__(self, values: pa.Array) -> None:
        self._values = values
        self._decoded: list[str] | None = None

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if self._decoded is not None:
            return self._decoded[index]
        if isinstance(index, slice):
            return self._all()[index]
        return str(self._values[index].as_py())

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and not isinstance(other, str) and self._all() == list(other)

    __hash__ = None  # type: ignore[assignment]

    def _all(self) -> list[str]:
        if self._decoded is None:
            self._decoded = self._values.to_pylist()
        return self._decoded


def load(source: Source, directory: str | Path) -> RankTables | None:
    """The tables of a source as they were stored; None where there is no good entry for this very file. Arrays are read-only."""
    if source.mtime == 0 or distrust(directory):
        return None
    import pyarrow as pa

    path = _entry(source, directory)
    try:
        with pa.memory_map(str(path)) as file:
            data = _checked(file.read_buffer())
        if data is not None:
            used(path)
        batch = None if data is None else pa.ipc.open_file(pa.BufferReader(data)).get_batch(0)
        return None if batch is None else _tables(batch, source)
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError, IndexError, AttributeError, MemoryError):
        return None


def store(source: Source, tables: RankTables, directory: str | Path) -> str | None:
    """Keep the tables of a source, as its reader gave them, for the next time. Returns a sentence where that was not possible."""
    if source.mtime == 0:
        return None
    untrusted = distrust(directory)
    if untrusted:
        return f"the cache {shown(str(directory))} {untrusted} and is not used"
    import pyarrow as pa

    temporary = ""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True, mode=0o700)
        batch = _batch(tables, source)
        handle, temporary = tempfile.mkstemp(suffix=".tmp", prefix=SCRATCH, dir=directory)
        with os.fdopen(handle, "wb") as file:
            _write(batch, file)
        Path(temporary).replace(_entry(source, directory))
    except (OSError, pa.ArrowException, ValueError) as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        return f"the cache {shown(str(directory))} could not be written ({reason(error)}); the next run reads the traces again"
    return None


# Keys ----------------------------------------------------------------------------------------------------------------


def _schema_version() -> str:
    """Changes with the tables' columns and categories, and with tracekit's version."""
    facts = (FORMAT, tracekit.__version__, SIDE_COLUMNS, CATEGORY_NAMES, [(category.name, int(category)) for category in Category])
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _key(source: Source) -> str:
    return json.dumps([source.url, source.size, source.mtime, _schema_version()])


def _entry(source: Source, directory: str | Path) -> Path:
    return Path(directory) / (hashlib.sha256(_key(source).encode()).hexdigest()[:40] + _ENDING)


# Tables <-> Arrow ----------------------------------------------------------------------------------------------------


def _batch(tables: RankTables, source: Source) -> pa.RecordBatch:
    import pyarrow as pa

    columns: dict[str, pa.Array] = {name: pa.array(np.ascontiguousarray(getattr(tables, name))) for name in _COLUMNS}
    for name, side in tables.side.items():
        columns[f"{name}/"] = pa.array(np.ascontiguousarray(side.rows))
        columns |= {f"{name}/{column}": pa.array(np.ascontiguousarray(values)) for column, values in side.columns.items()}
    columns["strings"] = _string_array(tables.strings)
    arrays = [pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), values) for values in columns.values()]
    coverage = tables.coverage
    rest = {
        "key": _key(source),
        "lanes": [[lane.pid, lane.tid, lane.process_name, lane.thread_name] for lane in tables.lanes],
        "metadata": tables.metadata,
        "coverage": [coverage.rank, coverage.status, coverage.events, coverage.arrows, [astuple(found) for found in coverage.notes]],
    }
    fields = [pa.field(name, array.type) for name, array in zip(columns, arrays, strict=True)]
    schema = pa.schema(fields, metadata={"rest": json.dumps(rest)})
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _string_array(strings: Sequence[str]) -> pa.Array:
    import pyarrow as pa

    try:
        return pa.array(strings if isinstance(strings, list) else list(strings), pa.large_string())
    except UnicodeEncodeError:
        return pa.array([text.encode(errors="replace").decode() for text in strings], pa.large_string())


def _tables(batch: pa.RecordBatch, source: Source) -> RankTables | None:
    rest = json.loads(batch.schema.metadata[b"rest"])
    if rest["key"] != _key(source):
        return None
    lists = {name: batch.column(index).values for index, name in enumerate(batch.schema.names)}
    strings = lists.pop("strings")
    strings.validate(full=True)
    arrays: dict[str, Any] = {name: _numpy(values) for name, values in lists.items()}
    rank, status, events, arrows, notes = rest["coverage"]
    tables = RankTables(
        **{name: arrays[name] for name in _COLUMNS},
        side={
            name: SideTable(arrays[f"{name}/"], {column: arrays[f"{name}/{column}"] for column in columns})
            for name, columns in SIDE_COLUMNS.items()
        },
        strings=ArrowStrings(strings),
        lanes=[Lane(*lane) for lane in rest["lanes"]],
        metadata=rest["metadata"],
        coverage=Coverage(source.url, rank, status, events, arrows, [restored(found) for found in notes]),
    )
    return tables if _sound(tables) else None


def _numpy(values: pa.Array) -> npt.NDArray[Any]:
    """A column without a copy. Not by ``to_numpy``, which imports pandas."""
    dtype = np.dtype(str(values.type))
    data = values.buffers()[1]
    return np.frombuffer(data if data is not None else b"", dtype, len(values), values.offset * dtype.itemsize)


def _sound(tables: RankTables) -> bool:
    """Whether every column has its type and its table's length, and every code stands for something: a foreign entry's do not."""
    rows, texts = len(tables.ts), len(tables.strings)
    dense = all((values := getattr(tables, name)).dtype == dtype and len(values) == rows for name, dtype in _COLUMNS.items())
    if not dense or not all(_sound_side(tables.side[name], columns, rows, texts) for name, columns in SIDE_COLUMNS.items()):
        return False
    codes = ((tables.name, texts), (tables.lane, len(tables.lanes)), (tables.category, len(Category)))
    return all(_within(values, most) for values, most in codes)


def _sound_side(side: SideTable, columns: Mapping[str, str], rows: int, texts: int) -> bool:
    shaped = all(len(side.columns[c]) == len(side.rows) and side.columns[c].dtype == side_dtype(kind) for c, kind in columns.items())
    if side.rows.dtype != np.int64 or not shaped or not _within(side.rows, rows) or not (np.diff(side.rows) > 0).all():
        return False
    return all(_within(side.columns[c], texts) for c, kind in columns.items() if kind in ("str", "json"))


def _within(codes: npt.NDArray[Any], most: int) -> bool:
    return not len(codes) or bool(codes.min() >= 0 and codes.max() < most)


def _write(batch: pa.RecordBatch, file: Any) -> None:
    """Header and Arrow data."""
    import pyarrow as pa
    from isal import isal_zlib

    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=CODEC)
    with pa.ipc.new_file(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    data = sink.getvalue()
    file.write(_HEADER.pack(_MAGIC, isal_zlib.crc32(data), data.size))
    file.write(data)


def _checked(data: pa.Buffer) -> pa.Buffer | None:
    """The Arrow data of an entry; None where its length or checksum is wrong."""
    from isal import isal_zlib

    if data.size < _HEADER.size:
        return None
    magic, checksum, length = _HEADER.unpack(memoryview(data)[: _HEADER.size])
    body = data.slice(_HEADER.size)
    return body if magic == _MAGIC and length == body.size and isal_zlib.crc32(body) == checksum else None
