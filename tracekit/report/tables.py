"""A ``Table`` as columns for the page's sorting and filtering, and its first rows as text for readers without scripts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd

from tracekit.findings import Table
from tracekit.report.quantity import decimals
from tracekit.report.text import encodable
from tracekit.units import NULL, NULL32, format_bytes

#: Rows of a table that are in the page; rows shown before the reader asks for more.
MAX_ROWS, FIRST_ROWS = 2000, 25
_EXACT_IN_A_BROWSER = 2**53
#: Characters of a name that is kept on one line.
_SHORT = 28
_UNIT = re.compile(r"\s*[\[(]([^\[\]()]+)[\])]\s*$")

Kind = Literal["text", "number", "bytes", "share"]


@dataclass(frozen=True)
class ColumnData:
    """One column. ``values`` are raw (None: missing, because of ``missing``).

    ``digits`` stand after the point of a number, ``grouped`` ones have their thousands set apart, ``long`` texts may be broken into lines.
    """

    title: str
    kind: Kind
    values: list[Any]
    digits: int = 0
    grouped: bool = False
    missing: str = ""
    long: bool = False
    meaning: str = ""

    def shown(self, row: int) -> str:
        """The cell as a reader sees it."""
        value = self.values[row]
        if value is None:
            return "–"
        if self.kind == "bytes":
            return format_bytes(value)
        if self.kind == "share":
            return f"{value * 100:.1f}%"
        if self.kind == "number":
            return f"{value:,.{self.digits}f}" if self.grouped else f"{value:.{self.digits}f}"
        return str(value)

    def payload(self) -> dict[str, Any]:
        """What the page's script gets."""
        return {
            "title": self.title,
            "kind": self.kind,
            "digits": self.digits,
            "grouped": self.grouped,
            "missing": self.missing,
            "long": self.long,
            "values": self.values,
        }


@dataclass(frozen=True)
class TableData:
    """A table ready for the page. ``total`` rows exist, ``rows`` of them are here."""

    columns: Sequence[ColumnData]
    rows: int
    total: int

    def first(self) -> list[list[tuple[ColumnData, str]]]:
        """The rows that are shown at once, cell by cell."""
        return [[(column, column.shown(row)) for column in self.columns] for row in range(min(self.rows, FIRST_ROWS))]

    def payload(self) -> dict[str, Any]:
        """What the page's script gets."""
        return {
            "first": FIRST_ROWS,
            "columns": [column.payload() for column in self.columns],
        }


def table_data(table: Table, max_rows: int = MAX_ROWS) -> TableData:
    """The first ``max_rows`` rows of the columns that the table names."""
    frame = table.frame
    kept = frame.iloc[:max_rows]
    columns = [
        replace(_column(kept[name], heading, table.missing.get(name, "")), meaning=table.meanings.get(name, ""))
        for name, heading in table.columns.items()
    ]
    return TableData(columns, len(kept), len(frame))


def _column(series: pd.Series[Any], heading: str, missing: str) -> ColumnData:
    values = _plain(series)
    present = [value for value in values if value is not None]
    missing = encodable(missing) or "not measured"
    found = _UNIT.search(heading)
    numeric = bool(present or found) and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in present)
    if not numeric or any(isinstance(value, int) and abs(value) > _EXACT_IN_A_BROWSER for value in present):
        words = [None if value is None else _words(value) for value in values]
        long = max((len(word) for word in words if word), default=0) > _SHORT
        return ColumnData(encodable(heading), "text", words, missing=missing, long=long)
    unit = found[1] if found else ""
    bare = heading[: found.start()] if found else heading
    if unit in ("bytes", "B"):
        return ColumnData(bare, "bytes", values, missing=missing)
    if unit == "share":
        return ColumnData(bare, "share", values, missing=missing)
    digits = decimals(present)
    grouped = max((abs(value) for value in present), default=0) >= 10_000
    return ColumnData(encodable(heading), "number", values, digits, grouped, missing)


def _plain(series: pd.Series[Any]) -> list[Any]:
    """Python values with None for everything that was not recorded."""
    if series.dtype.kind in "iu":
        return [None if value in (NULL, NULL32) else value for value in series.tolist()]
    if series.dtype.kind == "f":
        return [value if math.isfinite(value) else None for value in series.tolist()]
    return [_scalar(value) for value in series.tolist()]


def _scalar(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or value is pd.NA or value is pd.NaT:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return None if isinstance(value, int) and value == NULL else value


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(_words(item) for item in value)
    return encodable(str(value))
