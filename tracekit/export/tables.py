"""The tables of a job under one name each, with what every column means: for files, SQL and notebooks.

Integers that are not known are missing (``<NA>``), never 0 or a sentinel. Times end in ``_ns``: durations in nanoseconds, moments as Unix
nanoseconds on the job's clock.
"""

from __future__ import annotations

import csv
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tracekit.analyses.memory.rows import rows_of
from tracekit.errors import UsageError, choose
from tracekit.files import write_by
from tracekit.findings import Finding, Held, Result, of_job
from tracekit.job.model import Job
from tracekit.schema import MATCHES, OPERATIONS, Column, Schema, table
from tracekit.units import NULL, NULL32

RANKS = table(
    "ranks",
    ("rank", "int32", "", "global rank"),
    ("coordinate", "str", "", "index on every mesh axis, as 'pp 1, tp 0'; '' where the mesh is not known"),
    ("host", "str", "", "host name; '' not recorded"),
    ("device", "str", "", "name of its device; '' not recorded"),
    ("windows", "int32", "", "recordings of this rank"),
    ("clock_ahead_ns", "int64", "ns", "what its clock is ahead of the first rank's"),
)
STEPS = table(
    "steps",
    ("rank", "int32", "", "global rank"),
    ("window", "int32", "", "index of the recording"),
    ("step", "int64", "", "number of the step (ProfilerStep#N)"),
    ("start_ns", "int64", "unix_ns", "start, aligned"),
    ("end_ns", "int64", "unix_ns", "end, aligned"),
)
GROUPS = table(
    "groups",
    ("group", "int32", "", "index; operations.group refers to it"),
    ("name", "str", "", "name as recorded"),
    ("description", "str", "", "description as recorded"),
    ("axis", "str", "", "mesh axis; '' unknown"),
    ("size", "int32", "", "ranks in it"),
    ("ranks", "str", "", "its ranks, separated by blanks; '' not recorded"),
    ("spans_nodes", "object", "", "whether its ranks lie on several nodes; missing where not known"),
)
MEMORY_PEAKS = table(
    "memory_peaks",
    ("rank", "int32", "", "global rank"),
    ("device", "str", "", "device"),
    ("source", "str", "", "how owners were found: manifest+events, manifest+snapshot, snapshot, events or timeline"),
    ("category", "str", "", "owner: parameters, gradients, optimizer, activations, ..."),
    ("bytes", "int64", "bytes", "bytes of this owner at the peak"),
    ("peak_bytes", "int64", "bytes", "the peak, the sum over owners"),
)
MEMORY_TIMELINE = table(
    "memory_timeline",
    ("rank", "int32", "", "global rank"),
    ("device", "str", "", "device"),
    ("time_ns", "int64", "unix_ns", "from here on, aligned (a number of the entry where a history has no times)"),
    ("category", "str", "", "owner; 'allocated' where owners are not known"),
    ("bytes", "int64", "bytes", "bytes of this owner"),
)
FINDINGS = table(
    "findings",
    ("id", "str", "", "stable name"),
    ("severity", "str", "", "critical, warning or info"),
    ("text", "str", "", "the sentence"),
    ("value", "float64", "", "its figure; missing where it has none"),
    ("unit", "str", "", "unit of the figure"),
    ("evidence", "str", "", "where it is seen"),
    ("advice", "str", "", "what to try"),
    ("weight_ns", "int64", "ns", "time that the sentence is about; 0 where none can be named"),
    ("gain_ns", "int64", "ns", "what a step would win if the cause went away; missing where nothing can be said"),
    ("consequences", "str", "", "sentences about what follows from it"),
)
FILES = table(
    "files",
    ("file", "str", "", "path or URL"),
    ("rank", "object", "", "global rank; missing where not known"),
    ("status", "str", "", "complete, truncated, repaired, skipped or duplicate"),
    ("events", "int64", "", "events that were read"),
    ("problems", "str", "", "what was odd, lost or repaired"),
)
#: ``operations.match`` refers to it.
MATCH_ROWS = Schema("matches", (Column("match", "int64", "", "index; operations.match refers to it"), *MATCHES.columns))
_ABOUT = {
    "operations": "one collective or transfer of one rank",
    "matches": "one collective as all its ranks saw it",
    "ranks": "one rank",
    "steps": "one step of one rank",
    "groups": "one process group",
    "memory_peaks": "what one owner has at the peak of one device",
    "memory_timeline": "bytes of one owner from one moment on",
    "findings": "one sentence about the job, the most severe first",
    "files": "one file that was found",
}
#: What a spreadsheet would take for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
#: Rows of one sheet of Excel, its heading aside.
MOST_SHEET_ROWS = 2**20 - 1


@dataclass(frozen=True)
class JobTable:
    """One table: ``about`` says what a row is; ``columns`` in order, each with its unit and meaning."""

    name: str
    about: str
    frame: pd.DataFrame
    columns: Sequence[Column]


def job_tables(job: Job, results: Mapping[str, Result]) -> dict[str, JobTable]:
    """Every table by its name: those of the job, then one for each frame of each analysis (``overlap_by_axis``)."""
    found = {schema.name: _table(schema, frame) for schema, frame in _own(job, results)}
    for name, result in results.items():
        module = importlib.import_module(f"tracekit.analyses.{name}")
        for key, frame in _frames(result):
            title = name if key in ("rows", "use", "known") else f"{name}_{key}"
            schema = _schema_of(module, frame)
            columns = schema.columns if schema is not None else tuple(Column(c, str(frame[c].dtype), "", "") for c in frame.columns)
            found[title] = JobTable(title, _first_line(module), public(frame, columns), columns)
    peaks = found["memory_peaks"]
    found["memory"] = JobTable("memory", peaks.about, peaks.frame, peaks.columns)  # the short name that people try first
    return found


def _own(job: Job, results: Mapping[str, Result]) -> Iterator[tuple[Schema, pd.DataFrame]]:
    from tracekit.export.perfetto import rank_name

    yield OPERATIONS, job.operations
    yield MATCH_ROWS, job.matches.assign(match=np.arange(len(job.matches)))[MATCH_ROWS.names]
    places = {rank: rank_name(job, rank).partition("(")[2].partition(")")[0] for rank in job.ranks}
    of_rank = {rank: [window for window in job.windows if window.rank == rank] for rank in job.ranks}
    first = [of_rank[rank][0].identity if of_rank[rank] else None for rank in job.ranks]
    data: dict[str, object] = {
        "rank": job.ranks,
        "coordinate": [places[rank] for rank in job.ranks],
        "host": ["" if one is None else one.host for one in first],
        "device": ["" if one is None else one.device_name for one in first],
        "windows": [len(of_rank[rank]) for rank in job.ranks],
        "clock_ahead_ns": [job.clock.offset_ns.get(rank, 0) for rank in job.ranks],
    }
    yield RANKS, RANKS.frame(data)
    yield STEPS, _steps(job)
    groups = job.groups.groups
    yield GROUPS, GROUPS.frame({
        "group": range(len(groups)),
        "name": [group.name for group in groups],
        "description": [group.description for group in groups],
        "axis": [group.axis for group in groups],
        "size": [group.size for group in groups],
        "ranks": [" ".join(map(str, group.ranks or ())) for group in groups],
        "spans_nodes": pd.array([group.spans_nodes for group in groups], dtype="boolean"),
    })  # fmt: skip
    yield from _memory(job)
    yield FINDINGS, findings_frame(of_job(results))
    yield FILES, FILES.frame({
        "file": [entry.file for entry in job.coverage],
        "rank": pd.array([entry.rank for entry in job.coverage], dtype="Int64"),
        "status": [entry.status for entry in job.coverage],
        "events": [entry.events for entry in job.coverage],
        "problems": ["; ".join(entry.problems) for entry in job.coverage],
    })  # fmt: skip


def findings_frame(found: Sequence[Finding]) -> pd.DataFrame:
    """Sentences as rows, in their order."""
    told = {name: [getattr(one, name) for one in found] for name in FINDINGS.names if name not in ("gain_ns", "consequences")}
    told["gain_ns"] = [NULL if one.gain_ns is None else one.gain_ns for one in found]
    told["consequences"] = ["; ".join(one.consequences) for one in found]
    return FINDINGS.frame(dict(told))


def _steps(job: Job) -> pd.DataFrame:
    windows = [(index, window) for index, window in enumerate(job.windows) if window.rank is not None and len(window.steps)]
    if not windows:
        return STEPS.empty()
    return STEPS.frame({
        "rank": np.concatenate([np.full(len(w.steps), w.rank) for _, w in windows]),
        "window": np.concatenate([np.full(len(w.steps), index) for index, w in windows]),
        "step": np.concatenate([w.steps.number for _, w in windows]),
        "start_ns": np.concatenate([job.aligned(index, w.steps.start) for index, w in windows]),
        "end_ns": np.concatenate([job.aligned(index, w.steps.end) for index, w in windows]),
    })  # fmt: skip


def _memory(job: Job) -> Iterator[tuple[Schema, pd.DataFrame]]:
    rows = rows_of(job, "memory")
    peaks = [
        (row.rank, row.memory.device, row.memory.source, category, size, NULL if row.memory.peak is None else row.memory.peak)
        for row in rows
        for category, size in row.memory.categories.items()
    ]
    yield MEMORY_PEAKS, MEMORY_PEAKS.frame({name: [row[at] for row in peaks] for at, name in enumerate(MEMORY_PEAKS.names)})
    curves = [(row, row.memory.curve) for row in rows if row.memory.curve is not None]
    parts = [
        (row.rank, row.memory.device, curve.time, category, amounts)
        for row, curve in curves
        for category, amounts in (curve.categories or {"allocated": curve.allocated}).items()
    ]
    if not parts:
        yield MEMORY_TIMELINE, MEMORY_TIMELINE.empty()
        return
    yield MEMORY_TIMELINE, MEMORY_TIMELINE.frame({
        "rank": np.concatenate([np.full(len(time), rank) for rank, _, time, _, _ in parts]),
        "device": np.concatenate([np.full(len(time), device) for _, device, time, _, _ in parts]),
        "time_ns": np.concatenate([time for _, _, time, _, _ in parts]),
        "category": np.concatenate([np.full(len(time), category) for _, _, time, category, _ in parts]),
        "bytes": np.concatenate([amounts for *_, amounts in parts]),
    })  # fmt: skip


def _table(schema: Schema, frame: pd.DataFrame) -> JobTable:
    return JobTable(schema.name, _ABOUT[schema.name], public(frame, schema.columns), schema.columns)


def _frames(result: Result) -> list[tuple[str, pd.DataFrame]]:
    """The frames among the fields of a result, and its ``rows`` where they are put together."""
    inner: Any = result.result if isinstance(result, Held) else result
    names = [each.name for each in fields(inner)]
    names += ["rows"] if "rows" not in names and isinstance(getattr(type(inner), "rows", None), property) else []
    found = [(name, getattr(inner, name)) for name in names]
    return [(name, value) for name, value in found if isinstance(value, pd.DataFrame)]


def _schema_of(module: Any, frame: pd.DataFrame) -> Schema | None:
    """The schema among a module's names that has the frame's columns; parts of a package are looked through as well."""
    parts = [module, *(part for part in vars(module).values() if getattr(part, "__name__", "").startswith(f"{module.__name__}."))]
    known = [schema for part in parts for schema in vars(part).values() if isinstance(schema, Schema)]
    return next((schema for schema in known if schema.names == list(frame.columns)), None)


def _first_line(module: Any) -> str:
    return (module.__doc__ or "").strip().partition("\n")[0].partition(":")[0].rstrip(".")


def public(frame: pd.DataFrame, columns: Sequence[Column]) -> pd.DataFrame:
    """A copy in which what is not known is missing, and texts are texts."""
    empty = {column.name for column in columns if column.dtype == "str" and column.missing}
    found = {}
    for name in frame.columns:
        values = frame[name]
        if isinstance(values.dtype, pd.CategoricalDtype):
            values = values.astype("str")
        if values.dtype.kind == "i":
            unknown = values.isin([NULL, NULL32])
            values = values.astype("Int64").mask(unknown) if unknown.any() else values
        elif name in empty:
            values = values.where(values != "", None)
        found[str(name)] = values.reset_index(drop=True)
    return pd.DataFrame(found)


def select(tables: Mapping[str, JobTable], names: Sequence[str]) -> list[JobTable]:
    """Tables by name, ``all`` for every one. UsageError for a name that is none."""
    if "all" in names:
        return list(tables.values())
    unknown = [name for name in names if name not in tables]
    if unknown:
        if unknown[0] == "events":
            raise UsageError("events are not exported as a table", "tracekit query PATH 'FROM events' -o events.parquet")
        raise UsageError(f"there is no table {unknown[0][:80]!r}", choose(unknown[0], tables))
    return [tables[name] for name in names]


def write(path: str, tables: Sequence[JobTable]) -> None:
    """Write tables as the file's name says: one as .csv or .parquet, several as sheets of .xlsx. UsageError where that does not fit."""
    if not path.endswith(".xlsx") and len(tables) != 1:
        raise UsageError(f"{Path(path).suffix} holds one table, not {len(tables)}", "name one --table, or write .xlsx")
    if path.endswith(".csv"):
        write_by(Path(path), lambda name: _defused(tables[0].frame).to_csv(name, index=False, quoting=csv.QUOTE_MINIMAL))
    elif path.endswith(".parquet"):
        write_by(Path(path), lambda name: tables[0].frame.to_parquet(name, index=False))
    else:
        _write_sheets(path, tables)


def _defused(frame: pd.DataFrame) -> pd.DataFrame:
    """Names come from strangers: a text that a spreadsheet would run as a formula gets a quote in front."""
    found = frame.copy()
    for name in found.columns:
        if found[name].dtype == object or pd.api.types.is_string_dtype(found[name].dtype):
            found[name] = [f"'{text}" if isinstance(text, str) and text.startswith(_FORMULA) else text for text in found[name]]
    return found


def _write_sheets(path: str, tables: Sequence[JobTable]) -> None:
    try:
        import xlsxwriter  # noqa: F401
    except ImportError:
        raise UsageError("writing .xlsx needs the package xlsxwriter", "pip install xlsxwriter, or write .csv or .parquet") from None
    large = [table.name for table in tables if len(table.frame) > MOST_SHEET_ROWS]
    if large:
        raise UsageError(f"{large[0]} has more rows than a sheet of Excel holds", "write it as .parquet")
    options = {"options": {"strings_to_formulas": False, "strings_to_urls": False, "nan_inf_to_errors": True}}

    def write_to(name: str) -> None:
        with pd.ExcelWriter(name, engine="xlsxwriter", engine_kwargs=options) as book:
            for table in tables:
                _exact(table.frame).to_excel(book, sheet_name=table.name[:31], index=False)

    write_by(Path(path), write_to, ".xlsx")


def _exact(frame: pd.DataFrame) -> pd.DataFrame:
    """Excel keeps 15 digits: moments, which have 19, are written as text."""
    found = frame.copy()
    for name in found.columns:
        if pd.api.types.is_integer_dtype(found[name].dtype) and (found[name].abs() >= 10**15).any():
            found[name] = found[name].astype("string")
    return found
