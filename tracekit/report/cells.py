"""A table as plain values: what a page's script gets, and what a reader without scripts, or at a terminal, sees."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tracekit.units import format_bytes

#: Rows shown before the reader asks for more.
FIRST_ROWS = 25

#: Numbers that name a row; so many columns do at most, by so many characters each.
_NAMING = ("Rank", "Step", "Stage", "Layer", "Group", "Expert")
_NAMED_BY, _LONGEST = 4, 60
_OTHER = re.compile(r"[^a-z0-9_]+")

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


def naming(columns: Sequence[ColumnData]) -> list[int]:
    """The columns that name a row: texts, ranks, steps, stages in front, until the first that measures something. At least the first."""
    count = next((i for i, column in enumerate(columns) if not (column.kind == "text" or column.title in _NAMING)), len(columns))
    return list(range(max(1, min(count, _NAMED_BY)))) if columns else []


def slug(columns: Sequence[ColumnData], row: int) -> str:
    """What names a row as a part of an address; the n-th of several that are named alike ends in ``.~n``. ``tables.js`` makes the same."""
    own = _words(columns, row)
    alike = sum(_words(columns, above) == own for above in range(row))
    return f"{own}.~{alike + 1}" if alike else own


def _words(columns: Sequence[ColumnData], row: int) -> str:
    values = (column.values[row] for column in columns)
    return ".".join("" if value is None else _OTHER.sub("-", str(value).lower())[:_LONGEST].strip("-") for value in values)


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
            "naming": naming(self.columns),
            "columns": [column.payload() for column in self.columns],
        }


@dataclass(frozen=True)
class Preview:
    """The head of a table that a terminal shows."""

    title: str
    table: TableData
