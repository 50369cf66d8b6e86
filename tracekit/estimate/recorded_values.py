"""Figures out of the free parts of a manifest (``options``, ``model``, ``pipeline``), whose types nobody has checked.

Every function returns a value of the type it names, or raises a ``UsageError`` that says which key is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tracekit.errors import UsageError

#: No size of a job is larger; products of some of them still fit into a floating-point number.
MOST = 10**9
_REMEDY = "record the job again"


def whole(values: Mapping[str, Any], key: str, default: int | None = None, most: int = MOST, least: int = 0) -> int:
    """A whole number; without ``default`` the key has to be there."""
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UsageError(f"the manifest's {key} is no whole number from {least} to {most}", _REMEDY)
    return value


def number(values: Mapping[str, Any], key: str, default: float) -> float:
    """A finite number."""
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST or math.isnan(value):
        raise UsageError(f"the manifest's {key} is no number up to {MOST}", _REMEDY)
    return float(value)


def flag(values: Mapping[str, Any], key: str, default: bool) -> bool:
    """True or false."""
    value = values.get(key, default)
    if not isinstance(value, bool):
        raise UsageError(f"the manifest's {key} is neither true nor false", _REMEDY)
    return value


def word(values: Mapping[str, Any], key: str, default: str) -> str:
    """A short text."""
    value = values.get(key, default)
    if not isinstance(value, str) or len(value) > 64:
        raise UsageError(f"the manifest's {key} is no word", _REMEDY)
    return value
