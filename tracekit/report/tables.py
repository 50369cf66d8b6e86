"""A ``Table`` as columns for the page's sorting and filtering, and its first rows as text for readers without scripts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from tracekit.findings import Result, Table
from tracekit.report.cells import ColumnData, Preview, TableData
from tracekit.report.quantity import decimals
from tracekit.report.text import encodable
from tracekit.units import NULL, NULL32

#: Rows of a table that are in the page.
MAX_ROWS = 5000
_EXACT_IN_A_BROWSER = 2**53
#: Characters of a name that is kept on one line.
_SHORT = 28
_UNIT = re.compile(r"\s*[\[(]([^\[\]()]+)[\])]\s*$")


def table_data(table: Table, max_rows: int = MAX_ROWS) -> TableData:
    """The first ``max_rows`` rows of the columns that the table names."""
    frame = table.frame
    kept = frame.iloc[:max_rows]
    columns = [
        replace(_column(kept[name], heading, table.missing.get(name, "")), meaning=table.meanings.get(name, ""))
        for name, heading in table.columns.items()
    ]
    return TableData(columns, len(kept), len(frame))


def previews(results: Mapping[str, Result]) -> list[Preview]:
    """The heads of the tables that are shown in a terminal, too."""
    sections = [section for result in results.values() for section in result.sections()]
    charts = [chart for section in sections for chart in section.charts]
    tables = [chart for chart in charts if isinstance(chart, Table) and chart.preview > 0 and len(chart.frame)]
    return [Preview(table.title, table_data(table, table.preview)) for table in tables]


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
