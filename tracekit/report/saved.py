"""A report of a saved JSON document: the same first screen, findings and coverage; every list of it as a table.

Charts need what the traces hold beside the document (spans, curves): a saved one has none, and says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from tracekit.errors import InputError
from tracekit.findings import Chart, Finding, Section, StackedBars, Table
from tracekit.report.document import ANALYSIS_KEYS, SCHEMA_VERSION
from tracekit.report.overview import PARTS

#: A document of a large job is some ten MB; what is larger than this is none.
MOST_BYTES = 2 * 2**30
_UNITS = (("_us", "us"), ("_bytes", "bytes"), ("_gb_s", "GB/s"), ("share", "share"))
_NEEDED = ("schema_version", "tracekit_version", "job", "coverage", "notes", "not_measured", "findings")
_LEAD = "From a saved document: charts that need the traces are left out."
_APART = {*_NEEDED, "operations"}


def load(path: str) -> dict[str, Any]:
    """What ``tracekit analyze --json`` wrote. Raises InputError for anything else, OSError where it cannot be read."""
    file = Path(path)
    if file.stat().st_size > MOST_BYTES:
        raise InputError(f"{path} is larger than any JSON of tracekit analyze", "name the file that --json wrote")
    try:
        document = msgspec.json.decode(file.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no JSON ({error})", "name the file that tracekit analyze --json wrote") from None
    if not isinstance(document, dict) or not all(key in document for key in _NEEDED):
        raise InputError(f"{path} is not what tracekit analyze --json writes", "analyze the traces with --json first")
    if document["schema_version"] != SCHEMA_VERSION:
        raise InputError(f"{path} has schema version {document['schema_version']}, this tracekit writes {SCHEMA_VERSION}", "analyze anew")
    missing: dict[str, Any] = dict.fromkeys(key for key in ANALYSIS_KEYS if key not in document)
    return {**missing, **document}


class Saved:
    """A saved document as the one result of a report."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def findings(self) -> list[Finding]:
        """None of its own: the document's stand in it."""
        return []

    def json(self) -> dict[str, Any]:
        """Nothing to add."""
        return {}

    def sections(self) -> list[Section]:
        """The mean step of each rank as bars, then every list of the document as a table."""
        found = []
        for key, rows in self._document.items():
            if key in _APART or not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
                continue
            title = key.replace("_", " ").capitalize()
            charts: list[Chart] = [*_bars(key, rows), _table(title, rows)]
            found.append(Section(title, _LEAD, charts, name=key.replace("_", "-")))
        return found


def _bars(key: str, rows: Sequence[Mapping[str, Any]]) -> list[StackedBars]:
    ranks = [row for row in rows if row.get("rank") is not None and row.get("compute_us") is not None]
    if key != "mean_step" or not ranks:
        return []
    series = {name: [float(row[part] or 0.0) for row in ranks] for part, name, _ in PARTS}
    return [StackedBars("Mean step of each rank", [f"rank {row['rank']}" for row in ranks], series, "us")]


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Single values and short lists; what is an object or a long list stays in the JSON."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    shown = [key for key in keys if all(_simple(row.get(key)) for row in rows)]
    frame = pd.DataFrame({key: pd.Series([_cell(row.get(key)) for row in rows], dtype=object) for key in shown})
    left = [key for key in keys if key not in shown]
    note = f"In the JSON only: {', '.join(left)}." if left else ""
    return Table(title, frame, {key: _heading(key) for key in shown}, note=note)


def _simple(value: Any) -> bool:
    return not isinstance(value, (dict, list)) or (isinstance(value, list) and not any(isinstance(item, (dict, list)) for item in value))


def _cell(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def _heading(key: str) -> str:
    for suffix, unit in _UNITS:
        if key.endswith(suffix):
            words = key if suffix == "share" else key.removesuffix(suffix)
            return f"{_words(words)} [{unit}]"
    return _words(key)


def _words(key: str) -> str:
    return re.sub(r"_+", " ", key).strip().capitalize()
