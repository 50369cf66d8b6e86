"""SQL over a job's tables, by DuckDB, in memory: it reads the tables and nothing else.

The statement comes from a user and the names in the tables from strangers, so the engine may do nothing but answer: no file, no network, no
extension, no change of its settings; one statement that selects.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from tracekit.errors import UsageError
from tracekit.export.tables import JobTable

if TYPE_CHECKING:
    import duckdb

#: Before any table is there, and then locked.
_SETTINGS = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",
    "temp_directory": "",
}
_READING = ("SELECT", "EXPLAIN", "EXPLAIN_ANALYZE")


class Database:
    """The tables of one job, ready to be asked. Use as a context manager."""

    def __init__(self, tables: Mapping[str, JobTable], memory_limit: int | None = None) -> None:
        """``memory_limit`` [bytes]: what a statement may take; None leaves it to DuckDB. UsageError where DuckDB is not installed."""
        try:
            import duckdb
        except ImportError:
            raise UsageError("SQL needs the package duckdb", "pip install duckdb, or install tracekit with the extra query") from None
        self._engine: Any = duckdb
        self._connection: duckdb.DuckDBPyConnection = duckdb.connect(":memory:", config=dict(_SETTINGS))
        if memory_limit is not None:
            self._connection.execute(f"SET memory_limit = '{int(memory_limit)}B'")
        for name, table in tables.items():
            self._connection.register(name, _plain(table.frame))
        self._connection.execute("SET lock_configuration = true")

    def add(self, name: str, table: Any) -> None:
        """One more table: a dataset of Arrow, which is read piece by piece when a statement asks for it."""
        self._connection.register(name, table)

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def ask(self, sql: str) -> pd.DataFrame:
        """The answer of one statement that selects. UsageError for anything else, and for what DuckDB does not understand."""
        try:
            statements = self._connection.extract_statements(sql)
            if len(statements) != 1:
                raise UsageError(f"{len(statements)} statements", "ask one question at a time")
            kind = statements[0].type.name
            if kind not in _READING:
                raise UsageError(f"a statement of the kind {kind} does not read", "tables can only be read: SELECT ... FROM ...")
            return _frame(self._connection.sql(statements[0].query).to_arrow_table())
        except self._engine.Error as error:
            raise UsageError(_reason(str(error)), "--schema names the tables and their columns") from None


def _frame(answer: Any) -> pd.DataFrame:
    """Whole numbers stay whole: sums of 64-bit integers have 128 bits in DuckDB, and what may be missing is a nullable column."""
    import pyarrow as pa

    for at, field in enumerate(answer.schema):
        if pa.types.is_decimal(field.type) and field.type.scale == 0:
            try:
                answer = answer.set_column(at, field.name, answer.column(at).cast(pa.int64()))
            except pa.ArrowInvalid:
                continue  # beyond 64 bits: stays a decimal
    nullable = {pa.int64(): pd.Int64Dtype(), pa.int32(): pd.Int32Dtype(), pa.int16(): pd.Int16Dtype(), pa.bool_(): pd.BooleanDtype()}
    found: pd.DataFrame = answer.to_pandas(types_mapper=nullable.get)
    return found


def _plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Lists and mappings in cells become their JSON: a column of objects has one type in SQL."""
    found = frame.copy(deep=False)
    for name in found.columns:
        if found[name].dtype == object and any(isinstance(value, (list, tuple, dict)) for value in found[name]):
            found[name] = [value if value is None else json.dumps(value, default=str) for value in found[name]]
    return found


def _reason(text: str) -> str:
    """What DuckDB says is wrong, with the names that it offers instead; none of its own tables, which nobody means."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    offered = [line for line in lines[1:] if line.startswith(("Did you mean", "Candidate bindings")) and "duckdb_" not in line]
    return " ".join(lines[:1] + offered[:1]) or "DuckDB refused the statement"


def schema(tables: Mapping[str, JobTable]) -> pd.DataFrame:
    """One row a column of every table: table, column, type, unit, meaning."""
    rows = [
        (table.name, column.name, str(table.frame[column.name].dtype), column.unit, column.meaning)
        for table in tables.values()
        for column in table.columns
    ]
    return pd.DataFrame(rows, columns=["table", "column", "type", "unit", "meaning"])


def as_json(frame: pd.DataFrame) -> bytes:
    """A list of objects, one a row; what is missing is null, and nothing is NaN."""
    return frame.to_json(orient="records", date_format="iso", indent=1).encode() + b"\n"


def as_csv(frame: pd.DataFrame) -> bytes:
    """Comma-separated, with a heading."""
    out = io.StringIO()
    frame.to_csv(out, index=False)
    return out.getvalue().encode()
