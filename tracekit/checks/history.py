"""What was measured, run after run: a line of JSON or a row of Parquet a quantity and check."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tracekit.compare.changes import Change
from tracekit.errors import InputError

LARGEST_FILE = 1 << 30


class Entry(msgspec.Struct, frozen=True):
    """One check: when, of what, with which outcome, and the value of each quantity."""

    time_unix_s: float
    name: str
    commit: str
    outcome: str
    values: dict[str, float]
    units: dict[str, str]


def entry(changes: Sequence[Change], *, time: float, name: str, commit: str, outcome: str) -> Entry:
    """What the new side of a check measured; details (operators, units) are left out."""
    kept = [change for change in changes if change.new is not None and change.rank is None and not change.key.startswith(_DETAILS)]
    values = {change.key: float(change.new) for change in kept if change.new is not None}
    return Entry(time, name, commit, outcome, values, {change.key: change.unit for change in kept})


_DETAILS = ("operator.", "memory.unit.")


def encode(path: str, added: Entry) -> bytes:
    """The whole file with one entry more: Parquet where its name ends so, lines of JSON otherwise. Raises InputError."""
    if path.endswith(".parquet"):
        return _parquet([*read(path), added] if Path(path).exists() else [added])
    before = Path(path).read_bytes() if Path(path).exists() else b""
    if before:
        read(path)
    return before + (b"" if not before or before.endswith(b"\n") else b"\n") + msgspec.json.encode(added) + b"\n"


def read(path: str) -> list[Entry]:
    """Every entry, the oldest first. Raises InputError."""
    try:
        if Path(path).stat().st_size > LARGEST_FILE:
            raise InputError(f"{path} is too large for a history", "start a new file")
        if path.endswith(".parquet"):
            return _of_parquet(path)
        lines = [line for line in Path(path).read_bytes().splitlines() if line.strip()]
        return [msgspec.json.decode(line, type=Entry) for line in lines]
    except (OSError, ValueError, msgspec.DecodeError, RecursionError) as error:
        raise InputError(
            f"{path} is no history of tracekit: {str(error)[:200]}", "write one with: tracekit check --history FILE"
        ) from error


_COLUMNS = ("check", "time_unix_s", "name", "commit", "outcome", "quantity", "unit", "value")


def _parquet(entries: Sequence[Entry]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: dict[str, list[Any]] = {column: [] for column in _COLUMNS}
    for number, one in enumerate(entries):
        for key, value in one.values.items():
            given = (number, one.time_unix_s, one.name, one.commit, one.outcome, key, one.units.get(key, ""), value)
            for column, cell in zip(_COLUMNS, given, strict=True):
                rows[column].append(cell)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(rows), sink)
    return bytes(sink.getvalue())


def _of_parquet(path: str) -> list[Entry]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path, columns=list(_COLUMNS)).to_pydict()
    except (pa.ArrowException, KeyError) as error:
        raise ValueError(str(error)) from error
    found: dict[int, Entry] = {}
    for row in zip(*(rows[column] for column in _COLUMNS), strict=True):
        one = found.setdefault(row[0], Entry(float(row[1]), str(row[2]), str(row[3]), str(row[4]), {}, {}))
        one.values[str(row[5])] = float(row[7])
        one.units[str(row[5])] = str(row[6])
    return [found[number] for number in sorted(found)]
