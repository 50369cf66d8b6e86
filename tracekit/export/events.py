"""The events of every rank as one table for SQL: columns on disk, never all of them in memory.

Where a file is read, its events are put aside in a scratch file on the window's own clock (``EventSpool``). When the job is joined and
every clock is known, ``gathered`` writes them batch by batch into one Parquet file, which the engine scans column by column.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet

from tracekit.export.tables import JobTable, public
from tracekit.job.activity import Activity
from tracekit.job.model import Job
from tracekit.schema import table
from tracekit.trace.events import Category, Int64Array
from tracekit.units import NULL, NULL32

#: The reducer's name among those of the analyses.
REDUCER = "event_spool"
#: Events that are in memory at once while the file is written, and rows of a group of the file.
BATCH = 1 << 17
EVENTS = table(
    "events",
    ("rank", "int32", "", "global rank"),
    ("window", "int32", "", "index of the recording"),
    ("event", "int64", "", "its place among the events of its file"),
    ("name", "str", "", "name as recorded"),
    ("category", "str", "", "operator, user_annotation, runtime, kernel, memcpy, memset, gpu_annotation, python, memory, sync, ..."),
    ("start_ns", "int64", "unix_ns", "start, aligned; missing where the file has no readable one"),
    ("dur_ns", "int64", "ns", "duration as recorded; missing for events without one"),
    ("process", "str", "", "process, as the file names it"),
    ("thread", "str", "", "thread or stream, as the file names it"),
    ("device", "int32", "", "device index; missing on the host"),
    ("stream", "int32", "", "device stream; missing on the host"),
    ("correlation", "int64", "", "number that a host call shares with what it launched on the same rank; missing where not recorded"),
    ("step", "int64", "", "number of the step (ProfilerStep#N) that its start lies in; missing outside every step"),
    ("operation", "int32", "", "operations.local of the communication (of the same window) that it carries out; missing for other events"),
)
_ABOUT = "one event of one trace file, as recorded; read from the files anew when a statement names the table"
_MENTIONED = re.compile(r"\bevents\b", re.IGNORECASE)
_WORDS = [Category(number).name.lower() for number in range(len(Category))]


@dataclass(frozen=True)
class EventSpool:
    """A reducer that writes a window's events into ``folder``, which outlives the reading; its answer is the file's path."""

    folder: str
    scratch: ClassVar[bool] = True

    def __call__(self, activity: Activity) -> str:
        """Put the window's events aside: all but metadata, and of chosen steps only those inside them."""
        tables = activity.tables
        step = activity.steps.index_at(tables.ts)
        kept = (tables.category != Category.METADATA) & (tables.phase != ord("M"))
        if activity.chosen:
            kept &= step >= 0
        rows = np.flatnonzero(kept)
        at = step[rows]
        number = activity.steps.number[np.maximum(at, 0)] if len(activity.steps) else np.zeros(len(rows), np.int64)
        operation = np.full(len(tables), -1, np.int32)
        operation[activity.device.row] = activity.device.operation
        lanes = tables.lanes
        columns = {
            "event": pa.array(rows.astype(np.int64)),
            "name": _texts(tables.name[rows], tables.text),
            "category": _texts(tables.category[rows], lambda code: _WORDS[code]),
            "start_ns": _known(tables.ts[rows], NULL),
            "dur_ns": _known(tables.dur[rows], NULL),
            "process": _texts(tables.lane[rows], lambda code: lanes[code].process_name.strip() or str(lanes[code].pid)),
            "thread": _texts(tables.lane[rows], lambda code: lanes[code].thread_name.strip() or str(lanes[code].tid)),
            "device": _known(tables.device[rows], NULL32),
            "stream": _known(tables.stream[rows], NULL32),
            "correlation": _known(tables.correlation[rows], NULL),
            "step": pa.array(number, mask=(at < 0) | (number == NULL)),
            "operation": _known(operation[rows], -1),
        }
        return _write(self.folder, pa.table(columns))


def _known(values: npt.NDArray[Any], missing: int) -> pa.Array:
    return pa.array(values, mask=values == missing)


def _texts(codes: npt.NDArray[Any], text: Any) -> pa.Array:
    """A column of texts, each distinct one once."""
    used, place = np.unique(codes, return_inverse=True)
    words = pa.array([text(int(code)) for code in used], pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(place.reshape(-1).astype(np.int32)), words)


def _write(folder: str, columns: pa.Table) -> str:
    handle, path = tempfile.mkstemp(".arrow", "events-", folder)
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with os.fdopen(handle, "wb") as stream, pa.ipc.new_file(stream, columns.schema, options=options) as file:
        file.write_table(columns, max_chunksize=BATCH)
    return path


def mentioned(sql: str) -> bool:
    """Whether a statement may read the table; only then it is worth its time."""
    return _MENTIONED.search(sql) is not None


def documented() -> JobTable:
    """The table's columns, without a row."""
    return JobTable(EVENTS.name, _ABOUT, public(EVENTS.empty(), EVENTS.columns), EVENTS.columns)


def gathered(job: Job, folder: str) -> pa.dataset.Dataset:
    """The events of a job that was read with the reducer ``REDUCER``, on its clock; the file lies in ``folder``."""
    path = Path(folder) / "events.parquet"
    kinds = {"str": pa.string(), "int32": pa.int32(), "int64": pa.int64()}
    form = pa.schema([(column.name, kinds[column.dtype]) for column in EVENTS.columns])
    with pa.parquet.ParquetWriter(path, form, compression="lz4") as writer:
        for rank, index, spooled in job.reduced(REDUCER):
            with pa.memory_map(spooled) as source:
                file = pa.ipc.open_file(source)
                for number in range(file.num_record_batches):
                    writer.write_table(_aligned(job, rank, index, file.get_batch(number)).select(form.names).cast(form))
            Path(spooled).unlink()
    return pa.dataset.dataset(path, format="parquet")


def _aligned(job: Job, rank: int, window: int, batch: pa.RecordBatch) -> pa.Table:
    """One batch with its rank and window, on the job's clock."""
    found = pa.Table.from_batches([batch])
    start = found["start_ns"].combine_chunks()
    missing: npt.NDArray[np.bool_] = start.is_null().to_numpy(zero_copy_only=False)
    times: Int64Array = start.fill_null(0).to_numpy(zero_copy_only=False)
    on_job = np.asarray(job.aligned(window, times), np.int64)
    found = found.set_column(found.column_names.index("start_ns"), "start_ns", pa.array(on_job, mask=missing))
    for name, value in (("rank", rank), ("window", window)):
        found = found.append_column(name, pa.array(np.full(len(batch), value, np.int32)))
    return found
