"""How much each quantity may get worse: a pattern of its key (``fnmatch``) and a limit; of several that fit the last counts.

In TOML, or under ``thresholds`` of a baseline::

    [thresholds]
    "step.time" = 0.03                                 # at most 3% slower, beyond noise
    "memory.activations" = "2%"
    "collectives.dp_shard.*.bytes" = "exact"           # the same as 0
    "exposed.*" = "ignore"
    "memory.peak" = { limit = "2%", direction = "both" }   # falls when it gets better, too: the baseline is to be renewed
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from tracekit.compare.figures import Rule
from tracekit.errors import InputError

Direction = Literal["worse", "both"]

#: What holds where no threshold says otherwise, by the rule of the quantity. None: it is shown, not gated.
DEFAULT_LIMITS: Mapping[Rule, float | None] = {"exact": 0.0, "peak": 0.02, "time": 0.05, "detail": None}
#: Least change of a time that can fail a check, as a share of the base's step: a tenth more of nearly nothing is nearly nothing.
SMALLEST_SHARE_OF_STEP = 0.005
#: Counts and bytes that differ from step to step in the base itself (tokens by expert) may leave its range by this share.
VARYING_LIMIT = 0.05
_LARGEST_FILE = 1 << 20


@dataclass(frozen=True)
class Threshold:
    """``limit`` is a share of the base's value, 0 exact; None: the quantity is not gated."""

    pattern: str
    limit: float | None
    direction: Direction = "worse"


def read_thresholds(path: str) -> list[Threshold]:
    """The thresholds of a TOML file. Raises InputError."""
    file = Path(path)
    try:
        if file.stat().st_size > _LARGEST_FILE:
            raise InputError(
                f"{path}: {file.stat().st_size:,} bytes are no file of thresholds", "name a TOML file with a table [thresholds]"
            )
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{path}: {error}", 'write a table [thresholds] with lines like "step.time" = 0.03') from error
    table = found.get("thresholds")
    if not isinstance(table, dict):
        raise InputError(f"{path}: there is no table [thresholds]", 'write lines like "step.time" = 0.03 below [thresholds]')
    return thresholds_of(table, path)


def thresholds_of(table: Mapping[str, Any], where: str) -> list[Threshold]:
    """Thresholds as they stand in TOML or in a baseline. Raises InputError for a value that is none."""
    return [_threshold(pattern, value, where) for pattern, value in table.items()]


def _threshold(pattern: str, value: Any, where: str) -> Threshold:
    direction: Any = "worse"
    if isinstance(value, dict):
        direction, value = value.get("direction", "worse"), value.get("limit")
        if direction not in ("worse", "both"):
            raise InputError(f"{where}: the direction of {pattern!r} is {direction!r}", 'it can be "worse" or "both"')
    return Threshold(pattern, _limit(pattern, value, where), direction)


def _limit(pattern: str, value: Any, where: str) -> float | None:
    if value == "ignore":
        return None
    if value == "exact":
        return 0.0
    try:
        share = float(value.removesuffix("%")) / 100 if isinstance(value, str) and value.endswith("%") else float(value)
    except (TypeError, ValueError):
        share = -1.0
    if isinstance(value, bool) or not 0 <= share < float("inf"):
        raise InputError(f"{where}: the limit of {pattern!r} is {value!r}", 'it can be a share (0.03 or "3%"), "exact" or "ignore"')
    return share


def threshold_for(key: str, rule: Rule, thresholds: list[Threshold]) -> Threshold:
    """The last threshold that fits the key (of one rank's figure: also that of all ranks), else the rule's default."""
    whole = key.partition("@")[0]
    for threshold in reversed(thresholds):
        if fnmatchcase(key, threshold.pattern) or fnmatchcase(whole, threshold.pattern):
            return threshold
    return Threshold("", DEFAULT_LIMITS[rule])
