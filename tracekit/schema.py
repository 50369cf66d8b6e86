"""Columns of the tables that cross a room's border: name, dtype, unit and meaning, once.

A missing integer is ``units.NULL`` inside tracekit, ``null`` in JSON. Columns of kind ``str`` may be pandas categoricals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd


@dataclass(frozen=True)
class Column:
    """One column: ``dtype`` is a numpy name or ``str``; ``unit`` is empty for a plain count or identifier."""

    name: str
    dtype: str
    unit: str
    meaning: str


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
        """A table of no rows with the right columns and dtypes."""
        return self.frame({})

    def frame(self, data: dict[str, object]) -> pd.DataFrame:
        """A table in schema order. Missing columns are allowed only when ``data`` is empty."""
        if data and set(data) != set(self.names):
            odd = sorted(set(data) ^ set(self.names))
            raise ValueError(f"table {self.name}: columns {odd} are missing or not in the schema")
        series = {c.name: _typed(data[c.name], c.dtype) if data else pd.Series([], dtype=_dtype(c.dtype)) for c in self.columns}
        return pd.DataFrame(series)

    def check(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The frame itself when its columns are the schema's, else ValueError."""
        if list(frame.columns) != self.names:
            raise ValueError(f"table {self.name}: columns {list(frame.columns)}, expected {self.names}")
        return frame


def _dtype(name: str) -> str | type:
    return "str" if name == "str" else np.dtype(name).name


def _typed(values: object, dtype: str) -> object:
    if dtype == "str" or isinstance(values, pd.Categorical):
        return values
    return np.asarray(values, dtype=dtype)


def table(name: str, *columns: tuple[str, str, str, str]) -> Schema:
    """A schema from (column, dtype, unit, meaning)."""
    return Schema(name, tuple(Column(*column) for column in columns))


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
    ("wait_ns", "int64", "ns", "last arrival - own start; NULL when not matched"),
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
    ("transfer_ns", "int64", "ns", "end - last arrival, never below 0; NULL when fewer than two ranks were seen"),
    ("matched_by", "str", "", "seq or order"),
    ("full_bytes", "int64", "bytes", "full tensor; NULL"),
)


def categorical(codes: npt.NDArray[np.integer[Any]], words: Sequence[str]) -> pd.Categorical:
    """A text column: ``codes[i]`` is the place of its word in ``words`` (which are distinct)."""
    return pd.Categorical.from_codes(np.asarray(codes, np.int64), categories=pd.Index(list(words), dtype="str"))
