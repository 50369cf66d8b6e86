"""The configuration file: ``tracekit.toml`` in the current folder, or what ``--config`` names. One table a subject.

[communication]
'my_exchange.*' = "all_to_all:ep"    # kernels that count as communication: pattern = kind, and the axis where no group tells it
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracekit.errors import InputError

if TYPE_CHECKING:
    from tracekit.collectives.named import Named

FILE = "tracekit.toml"
TABLES = ("communication", "analyze", "check")
_MOST_BYTES = 1 << 20


def configuration(path: str | None) -> dict[str, Any]:
    """The tables of the file; of ``tracekit.toml`` in the current folder where ``path`` is None, {} where that is not there.

    Raises InputError, one line, for a file that cannot be read, is no TOML, or has a table of another name.
    """
    file = Path(FILE if path is None else path)
    if path is None and not file.is_file():
        return {}
    if not file.is_file():
        raise InputError(f"there is no configuration file {str(file)!r}", "check --config")
    try:
        with file.open("rb") as opened:
            data = opened.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise InputError(f"{file} is larger than a configuration can be ({_MOST_BYTES >> 20} MB)", "give another one with --config")
        tables = tomllib.loads(data.decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{file} cannot be read as TOML: {str(error)[:200]}", "correct it, or give another one with --config") from error
    odd = [name for name in tables if name not in TABLES]
    if odd:
        raise InputError(f"{file}: there is no table {odd[0][:60]!r}", f"tables are {', '.join(TABLES)}")
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise InputError(f"{file}: {name} is no table", f"write [{name}] on a line of its own")
    return tables


def communication(given: Sequence[str], path: str | None) -> Named:
    """The rules of ``--communication``, then those of the configuration file."""
    tables = configuration(path)
    if not given and "communication" not in tables:
        return ()
    from tracekit.collectives.named import from_table, merged, parse_communication

    return merged([parse_communication(text) for text in given], from_table(tables.get("communication", {})))
