"""Columns of the tables that cross a room's border, each told once: name, dtype, unit, meaning, heading, JSON key, why it may be empty.

A missing integer is ``units.NULL`` inside tracekit, ``null`` in JSON. Columns of kind ``str`` may be pandas categoricals. Nanoseconds
leave the house as microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from tracekit.units import NS_PER_US, NULL, known, microseconds


@dataclass(frozen=True)
class Column:
    """One column of a table.

    ``dtype`` is a numpy name, ``str``, or ``object`` for a list or mapping a row; ``unit`` is empty for a plain count or identifier;
    ``unix_ns`` is a time of day, which leaves as it is.
    ``heading`` is what a reader sees above it, without the unit; a column without one is in no table for readers. ``key`` is its key in a
    row of the JSON (``duration_us.p50``: within an object); a column without one is not in the JSON. ``missing`` says why a cell may be
    empty, and makes an empty text a missing one; ``instead`` is the text that a reader sees there.
    """

    name: str
    dtype: str
    unit: str
    meaning: str
    heading: str = ""
    key: str = ""
    missing: str = ""
    instead: str = ""

    @property
    def title(self) -> str:
        """The heading with the unit of what stands below it (``Compute [us]``)."""
        unit = _shown_unit(self.unit)
        return f"{self.heading} [{unit}]" if unit else self.heading

    def shown(self, values: pd.Series[Any]) -> Any:
        """Cells for a reader: microseconds (NaN where missing), everything else as it is."""
        if self.dtype == "str" and self.missing:
            return [value or self.instead or None for value in values.tolist()]
        if self.unit != "ns":
            return values
        numbers = values.to_numpy()
        return np.where(numbers == NULL, np.nan, numbers / NS_PER_US)

    def plain(self, values: pd.Series[Any]) -> list[Any]:
        """Cells for JSON: microseconds, None where missing."""
        if self.unit == "ns":
            return [microseconds(value) for value in values.tolist()]
        if self.dtype == "str":
            return [value or None for value in values.tolist()] if self.missing else values.tolist()
        return [known(value) for value in values.tolist()]


@dataclass(frozen=True)
class Schema:
    """A named table."""

    name: str
    columns: tuple[Column, ...]

    @property
    def names(self) -> list[str]:
        """Column names in order."""
        return [column.name for column in self.columns]

    def empty(self) -> pd.DataFrame:
        """A table of no rows with the right columns and dtypes: the caller's own."""
        return self._empty.copy()

    @cached_property
    def _empty(self) -> pd.DataFrame:
        """Built once: most tables of a small job are empty, and copying one costs pandas far less than making its columns."""
        return pd.DataFrame({column.name: pd.Series([], dtype=_dtype(column.dtype)) for column in self.columns})

    def frame(self, data: dict[str, object]) -> pd.DataFrame:
        """A table in schema order. Missing columns are allowed only when ``data`` is empty."""
        if data and set(data) != set(self.names):
            odd = sorted(set(data) ^ set(self.names))
            raise ValueError(f"table {self.name}: columns {odd} are missing or not in the schema")
        if not data:
            return self.empty()
        return pd.DataFrame({column.name: _typed(data[column.name], column.dtype) for column in self.columns})

    def check(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The frame itself when its columns are the schema's, else ValueError."""
        if list(frame.columns) != self.names:
            raise ValueError(f"table {self.name}: columns {list(frame.columns)}, expected {self.names}")
        return frame

    def column(self, name: str) -> Column:
        """One column. KeyError where the table has none of that name."""
        return {column.name: column for column in self.columns}[name]

    def records(self, frame: pd.DataFrame, columns: Iterable[str] = ()) -> list[dict[str, Any]]:
        """Rows for JSON: every column that has a key, in order of the schema or of ``columns``."""
        chosen = [self.column(name) for name in columns] or [column for column in self.columns if column.key]
        cells = [column.plain(frame[column.name]) for column in chosen]
        rows = [dict(zip((column.key for column in chosen), row, strict=True)) for row in zip(*cells, strict=True)]
        return [_nested(row) for row in rows] if any("." in column.key for column in chosen) else rows

    def documented(self) -> list[str]:
        """Lines of a Markdown table that names the keys of ``records``, their units and what they mean."""
        lines = ["| key | unit | meaning |", "|-|-|-|"]
        for column in self.columns:
            if column.key:
                empty = f"; `null`: {column.missing}" if column.missing else ""
                lines.append(f"| `{column.key}` | {_shown_unit(column.unit)} | {column.meaning}{empty} |")
        return lines


def _shown_unit(unit: str) -> str:
    return {"ns": "us", "unix_ns": "ns"}.get(unit, unit)


def _nested(row: dict[str, Any]) -> dict[str, Any]:
    """``{"a.b": 1}`` as ``{"a": {"b": 1}}``; an object of which nothing is known is None."""
    result: dict[str, Any] = {}
    for key, value in row.items():
        outer, _, inner = key.partition(".")
        if inner:
            result.setdefault(outer, {})[inner] = value
        else:
            result[key] = value
    inner_objects = {key.partition(".")[0] for key in row if "." in key}
    return {k: None if k in inner_objects and all(v is None for v in value.values()) else value for k, value in result.items()}


def _dtype(name: str) -> str | type:
    return name if name in ("str", "object") else np.dtype(name).name


def _typed(values: object, dtype: str) -> object:
    if dtype in ("str", "object") or isinstance(values, pd.Categorical):
        return values
    return np.asarray(values, dtype=dtype)


def table(name: str, *columns: tuple[str, str, str, str] | Column) -> Schema:
    """A schema from columns; (name, dtype, unit, meaning) is one that stays inside tracekit."""
    return Schema(name, tuple(column if isinstance(column, Column) else Column(*column) for column in columns))


#: Communication operations of ONE window of one rank, in order of start: one row is one collective or one point-to-point
#: (batch of) transfer as this rank ran it: a device kernel, or on CPU the backend's work. Times are absolute (Unix) on the rank's clock.
LOCAL_OPERATIONS = table(
    "local_operations",
    ("start_ns", "int64", "ns", "start on the device (CPU jobs: on the backend's thread)"),
    ("end_ns", "int64", "ns", "end on the device"),
    ("launch_ns", "int64", "ns", "start of the host call that launched it; NULL where the launch is not in the trace"),
    ("step", "int32", "", "index into the window's steps, by start on the device; -1 outside every step"),
    ("launch_step", "int32", "", "index into the window's steps, by launch; -1 where unknown or outside"),
    ("kind", "str", "", "collectives.kinds vocabulary"),
    ("implementation", "str", "", "nccl, rccl, nccl_symmetric, symmetric_memory, custom, gloo, ... who moves the bytes"),
    ("group", "int32", "", "index into the window's groups; -1 where the group was not recorded"),
    ("seq", "int64", "", "sequence number in the group; NULL where not recorded"),
    ("dtype", "str", "", "torch name of the element type (float32); as written where unknown to tracekit; '' not recorded"),
    ("in_elements", "int64", "", "elements this rank puts in"),
    ("out_elements", "int64", "", "elements this rank gets out"),
    ("in_split", "str", "", "elements for each member, as recorded ('[4, 8]'); '' when even or not recorded"),
    ("out_split", "str", "", "elements from each member, as recorded"),
    ("source_rank", "int64", "", "point-to-point or rooted: global rank that sends; NULL otherwise"),
    ("destination_rank", "int64", "", "point-to-point or rooted: global rank that receives; NULL otherwise"),
    ("stream", "int32", "", "device stream; on CPU the backend's thread as a small number"),
    ("phase", "str", "", "forward, backward, optimizer or '' by the launch"),
    ("context", "str", "", "innermost named annotation around the launch ('FSDP::all_gather (layers.0)'); '' none"),
    ("operator", "str", "", "innermost operator around the launch ('c10d::allreduce_'); '' none"),
    ("kernel", "str", "", "name of the kernel or of the backend's annotation"),
    ("evidence", "str", "", "what decided the kind: metadata, operator, annotation, kernel_name"),
    ("tensors", "int32", "", "tensors in one coalesced call; 1 otherwise"),
    ("kernels", "int32", "", "kernels and copies that carried the call out"),
    ("waiting_ns", "int64", "ns", "time of those kernels that only wait for other ranks or exchange counts"),
    ("named_axis", "str", "", "axis that the user named for the kernel (--communication); '' none"),
)

#: Communication operations of the whole job: LOCAL_OPERATIONS joined with groups, mesh, bytes and matches.
#: Times are on the job's aligned clock.
OPERATIONS = table(
    "operations",
    ("rank", "int32", "", "global rank"),
    ("window", "int32", "", "index into job.windows"),
    ("local", "int32", "", "row in that window's local operations"),
    ("step_number", "int64", "", "number of the step (ProfilerStep#N) by start on the device; NULL outside every step"),
    ("launch_step_number", "int64", "", "number of the step in which the host called it; NULL where not known or outside every step"),
    ("start_ns", "int64", "ns", "start, aligned"),
    ("end_ns", "int64", "ns", "end, aligned"),
    ("kind", "str", "", "collectives.kinds vocabulary"),
    ("purpose", "str", "", "collectives.purpose vocabulary"),
    ("group", "int32", "", "index into job.groups; -1 unknown"),
    ("axis", "str", "", "mesh axis of the group; '' unknown"),
    ("seq", "int64", "", "sequence number; NULL"),
    ("dtype", "str", "", "element type; '' unknown"),
    ("full_bytes", "int64", "bytes", "the full tensor of the collective; NULL where not recorded"),
    ("sent_bytes", "int64", "bytes", "sent by this rank under the ring algorithm; NULL where not recorded"),
    ("match", "int32", "", "index into job.matches; -1 when no other rank's operation was found"),
    ("wait_ns", "int64", "ns", "last arrival - own start, 0 where the call had ended by then; NULL when not matched"),
    ("stream", "int32", "", "device stream"),
    ("phase", "str", "", "forward, backward, optimizer or ''"),
    ("context", "str", "", "innermost named annotation"),
    ("implementation", "str", "", "who moves the bytes"),
)

#: One collective (or one send with its recv) seen on several ranks.
MATCHES = table(
    "matches",
    ("group", "int32", "", "index into job.groups; -1 unknown"),
    ("kind", "str", "", "collectives.kinds vocabulary; a matched send/recv pair is 'send'"),
    ("seq", "int64", "", "sequence number; NULL when matched by order"),
    ("step_number", "int64", "", "step of the first arrival; NULL"),
    ("ranks", "int32", "", "how many ranks were seen"),
    ("expected", "int32", "", "how many ranks the group has; 0 unknown"),
    ("complete", "bool", "", "all members were seen"),
    ("first_start_ns", "int64", "ns", "first arrival"),
    ("last_start_ns", "int64", "ns", "last arrival"),
    ("end_ns", "int64", "ns", "latest end"),
    ("last_rank", "int32", "", "rank that arrived last"),
    ("transfer_ns", "int64", "ns", "end - last arrival, never below 0; NULL when fewer than two ranks were in the call by then"),
    ("matched_by", "str", "", "seq or order"),
    ("full_bytes", "int64", "bytes", "full tensor; NULL"),
)


def categorical(codes: npt.NDArray[np.integer[Any]], words: Sequence[str]) -> pd.Categorical:
    """A text column: ``codes[i]`` is the place of its word in ``words`` (which are distinct)."""
    found = tuple(words)
    dtype = _kept_words(found) if len(found) <= _FEW_WORDS else _words(found)
    return pd.Categorical.from_codes(np.asarray(codes, np.int64), dtype=dtype)


def sorted_categorical(texts: npt.NDArray[np.object_]) -> pd.Categorical:
    """A text column of these strings, its words in order."""
    codes, words = pd.factorize(texts)
    order = sorted(range(len(words)), key=words.__getitem__)
    place = np.empty(len(words), np.int64)
    place[order] = np.arange(len(words))
    return categorical(place[codes], [str(words[i]) for i in order])


#: The ranks of a job have the same words in most columns: what pandas makes of so few is kept, as making it costs more than the column.
_FEW_WORDS = 64


def _words(words: tuple[str, ...]) -> pd.CategoricalDtype:
    return pd.CategoricalDtype(pd.Index(words, dtype="str"))


@lru_cache(maxsize=256)
def _kept_words(words: tuple[str, ...]) -> pd.CategoricalDtype:
    return _words(words)
