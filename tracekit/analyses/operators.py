"""Operators by name: the device time they launched, and the time the host spent in them.

Per rank and name, over the whole trace (not only its steps):

    calls     operator calls on the host
    self      host duration of each call less that of the calls nested directly in it, summed [ns]
    launches  kernels and copies whose launch has this operator as the innermost one around it
    device    sum of their durations [ns]; NULL on CPU jobs, where the operator itself is the work

A rank keeps the names with the largest device and self times and adds up the rest under ``other``, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tracekit.analyses._common import text_of
from tracekit.findings import Finding, Section, Table
from tracekit.job.activity import Activity
from tracekit.job.model import Job
from tracekit.schema import Column, table
from tracekit.trace import correlate
from tracekit.trace.events import Category, Int64Array, RankTables
from tracekit.units import NULL

ORDER = 70

#: Names that one rank keeps by each of the two times; names in the JSON.
KEPT, IN_JSON = 300, 100
OTHER = "other"

OPERATORS = table(
    "operators",
    Column("name", "str", "", "name of the operator; `other`: names beyond the largest of a rank", "Operator", "name"),
    Column("calls", "int64", "", "over all ranks", "Calls", "calls"),
    Column("self_ns", "int64", "ns", "on the host, without nested operators", "Host, self", "host_self_us"),
    Column("launches", "int64", "", "kernels and copies launched", "Kernels", "launches"),
    Column("device_ns", "int64", "ns", "their durations", "Device", "device_us", "the job ran on the CPU"),
    Column("ranks", "int64", "", "ranks that call it", "Ranks", "ranks"),
)
_SUMS = ("calls", "self_ns", "launches", "device_ns")


@dataclass(frozen=True)
class OperatorSums:
    """One entry a name: sums of one window, then ``other``."""

    name: list[str]
    calls: Int64Array
    self_ns: Int64Array
    launches: Int64Array
    device_ns: Int64Array


def reduce(activity: Activity) -> OperatorSums | None:
    """Sums of one window by name; None where it holds no operator."""
    tables, device = activity.tables, activity.device
    rows = tables.rows(Category.OPERATOR)
    rows = rows[(tables.dur[rows] >= 0) & (tables.ts[rows] != NULL)]
    if not len(rows):
        return None
    size = int(tables.name[rows].max()) + 1
    own = self_times(tables, rows)
    columns = np.zeros((4, size), np.int64)
    columns[0] = np.bincount(tables.name[rows], minlength=size)
    np.add.at(columns[1], tables.name[rows], own)
    if not activity.on_cpu:
        launched = device.operator_row >= 0
        name = tables.name[device.operator_row[launched]]
        columns[2] = np.bincount(name, minlength=size)
        np.add.at(columns[3], name, (device.end - device.start)[launched])
    used = np.flatnonzero(columns[0])
    keep = np.zeros(len(used), np.bool_)
    for times in (columns[1][used], columns[3][used]):
        keep[np.argsort(-times, kind="stable")[:KEPT]] = True
    kept, rest = used[keep], used[~keep]
    names = [text_of(tables, int(code)) for code in kept]
    values = columns[:, kept]
    if len(rest):
        names.append(OTHER)
        values = np.concatenate([values, columns[:, rest].sum(axis=1, keepdims=True)], axis=1)
    return OperatorSums(names, *values)


def self_times(tables: RankTables, rows: Int64Array) -> Int64Array:
    """Duration [ns] of each operator row less its direct children on the same thread; a child that outlasts it counts up to its end."""
    start, duration = tables.ts[rows], tables.dur[rows]
    parent = correlate.enclosing(tables, rows, rows)
    nested = np.flatnonzero(parent >= 0)
    outer = parent[nested]
    place = np.empty(len(tables), np.int64)
    place[rows] = np.arange(len(rows))
    inside = np.minimum(start[nested] + duration[nested], tables.ts[outer] + tables.dur[outer]) - start[nested]
    covered = np.zeros(len(rows), np.int64)
    np.add.at(covered, place[outer], inside)
    own: Int64Array = np.maximum(duration - covered, 0)  # siblings that overlap may cover more than there is
    return own


@dataclass(frozen=True)
class Operators:
    """``rows`` has schema OPERATORS, the largest device time (CPU jobs: self time) first."""

    rows: pd.DataFrame
    on_cpu: bool

    def findings(self) -> list[Finding]:
        """Nothing: the table speaks for itself."""
        return []

    def sections(self) -> list[Section]:
        """The table of operators."""
        if not len(self.rows):
            return []
        lead = "Operators by the device time of the kernels they launched themselves, over all ranks and the whole trace."
        if self.on_cpu:
            lead = "Operators by the time spent in them, nested operators left out, over all ranks and the whole trace."
        shown = ("name", "device_ns", "launches", "self_ns", "calls", "ranks")
        return [Section("Operators", lead, (Table.of("Operators by time", OPERATORS, self.rows, shown),), name="operators")]

    def json(self) -> dict[str, Any]:
        """``operators``: the names with the largest times, then ``other`` for the rest."""
        if not len(self.rows):
            return {"operators": None, "not_measured": {"operators": "the traces hold no operator"}}
        rows, rest = OPERATORS.records(self.rows.head(IN_JSON)), self.rows.iloc[IN_JSON:]
        if len(rest):
            sums = {column: [rest[column].sum()] for column in _SUMS} | ({"device_ns": [NULL]} if self.on_cpu else {})
            rows += [row | {"names": len(rest)} for row in OPERATORS.records(pd.DataFrame({"name": [OTHER], **sums}), ("name", *_SUMS))]
        return {"operators": rows}


def analyze(job: Job) -> Operators:
    """Sum up the operators of all ranks by name."""
    parts = [(rank, sums) for rank, _, sums in job.reduced("operators") if sums is not None]
    on_cpu = bool(job.traced) and all(window.on_cpu for window in job.traced)
    if not parts:
        return Operators(OPERATORS.empty(), on_cpu)
    frame = pd.DataFrame(
        {
            "rank": np.repeat([rank for rank, _ in parts], [len(sums.name) for _, sums in parts]),
            "name": pd.Categorical([name for _, sums in parts for name in sums.name]),
            **{column: np.concatenate([getattr(sums, column) for _, sums in parts]) for column in _SUMS},
        }
    )
    grouped = frame.groupby("name", observed=True)
    sums = grouped[list(_SUMS)].sum()
    order = "self_ns" if on_cpu else "device_ns"
    columns: dict[str, object] = {column: sums[column].to_numpy() for column in _SUMS}
    if on_cpu:
        columns["device_ns"] = np.full(len(sums), NULL)
    rows = OPERATORS.frame({"name": sums.index.astype("str"), **columns, "ranks": grouped["rank"].nunique().to_numpy()})
    return Operators(rows.sort_values([order, "self_ns"], ascending=False, kind="stable", ignore_index=True), on_cpu)
