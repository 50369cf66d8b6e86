"""``baseline.json``: the figures of one or several recordings, kept beside the code that was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from tracekit import __version__
from tracekit.compare.figures import Run
from tracekit.errors import InputError

FORMAT = "tracekit baseline"
#: Raised when a key of a quantity, its unit or its meaning changes: baselines of before are then refused.
SCHEMA_VERSION = 1
LARGEST_FILE = 512 << 20
_REMEDY = "write it anew with: tracekit baseline TRACES... -o FILE"


class Baseline(msgspec.Struct, frozen=True):
    """What ``tracekit baseline`` writes. ``thresholds`` as in checks/thresholds.py; a team edits them in place."""

    format: str
    schema_version: int
    tracekit_version: str
    runs: list[Run]
    thresholds: dict[str, Any] = {}


class _Head(msgspec.Struct):
    format: Any = None
    schema_version: Any = None
    tracekit_version: Any = None


def baseline_of(runs: Sequence[Run], thresholds: dict[str, Any] | None = None) -> Baseline:
    """A baseline of these recordings."""
    return Baseline(FORMAT, SCHEMA_VERSION, __version__, list(runs), thresholds or {})


def encode(baseline: Baseline) -> bytes:
    """The file: a line a quantity, so that a change of it can be read in review."""
    data = msgspec.to_builtins(baseline)
    runs = data.pop("runs")
    lines = ["{", *(f" {_json(key)}: {_json(value)}," for key, value in data.items()), ' "runs": [']
    for place, run in enumerate(runs):
        quantities = run.pop("quantities")
        lines += ["  {", *(f"   {_json(key)}: {_json(value)}," for key, value in run.items()), '   "quantities": [']
        lines += [f"    {_json(quantity)}{',' if last else ''}" for quantity, last in _but_last(quantities)]
        lines += ["   ]", "  }" + ("," if place < len(runs) - 1 else "")]
    return "\n".join([*lines, " ]", "}", ""]).encode()


def _but_last(items: Sequence[Any]) -> list[tuple[Any, bool]]:
    return [(item, place < len(items) - 1) for place, item in enumerate(items)]


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def is_baseline(head: bytes) -> bool:
    """Whether the first bytes of a file are a baseline's."""
    return FORMAT.encode() in head


def read_baseline(path: str) -> Baseline:
    """Read a file. Raises InputError where it is none, of another schema version, or contradicts itself."""
    try:
        size = Path(path).stat().st_size
        if size > LARGEST_FILE:
            raise InputError(f"{path}: {size:,} bytes are more than a baseline has", _REMEDY)
        return decode(Path(path).read_bytes(), path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}", _REMEDY) from error


def decode(data: bytes, name: str) -> Baseline:
    """The baseline in ``data``. Raises InputError."""
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.format != FORMAT:
            raise InputError(f"{name} is no baseline of tracekit", _REMEDY)
        if head.schema_version != SCHEMA_VERSION:
            made = f"{str(head.schema_version)[:20]} (tracekit {str(head.tracekit_version)[:20]})"
            raise InputError(f"{name} has schema version {made}, this tracekit reads {SCHEMA_VERSION}", _REMEDY)
        baseline = msgspec.json.decode(data, type=Baseline)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{name} cannot be read as a baseline: {str(error)[:200]}", _REMEDY) from error
    if not baseline.runs:
        raise InputError(f"{name} holds no recording", _REMEDY)
    for run in baseline.runs:
        _check(run, name)
    return baseline


def _check(run: Run, name: str) -> None:
    for quantity in run.quantities:
        places = len(run.places(quantity.scope))
        if len(quantity.values) != places:
            raise InputError(f"{name}: {quantity.key[:80]!r} has {len(quantity.values)} values for {places} places", _REMEDY)
        if any(value is not None and not (isfinite(value) and abs(value) < 2**63) for value in quantity.values):
            raise InputError(f"{name}: {quantity.key[:80]!r} holds a value that cannot be", _REMEDY)
    if len(run.by_key()) != len(run.quantities):
        raise InputError(f"{name}: a quantity stands twice in one recording", _REMEDY)
