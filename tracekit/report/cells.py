"""A table as plain values: what a page's script gets, and what a reader without scripts, or at a terminal, sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tracekit.units import format_bytes

#: Rows shown before the reader asks for more.
FIRST_ROWS = 25

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


@dataclass(frozen=True)
class Preview:
    """The head of a table that a terminal shows."""

    title: str
    table: TableData
