"""Numbers for a reader: one unit a chart or column, digits that fit its size."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tracekit.units import NS_PER_US, format_bytes, format_ns

_TIME = (("s", 1e6), ("ms", 1e3), ("us", 1.0))
_SIZE = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def quantity(value: float | None, unit: str) -> str:
    """One value with its unit (``1.25 ms``, ``67.1 MB``, ``61%``); ``–`` where there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0 and unit in ("us", "bytes"):
        return "0"
    if unit == "us":
        return format_ns(value * NS_PER_US)
    if unit == "bytes":
        return format_bytes(value)
    if unit in ("share", "ratio of step"):
        return f"{value:.1%}"
    text = f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.4g}"
    return f"{text} {unit}".rstrip()


def axis_unit(values: Iterable[float | None], unit: str) -> tuple[str, float]:
    """(unit, divisor) in which the largest of ``values`` has one to four digits: ``('ms', 1000.0)`` for up to 80,000 us."""
    scales = {"us": _TIME, "bytes": _SIZE}.get(unit)
    if scales is None:
        return unit, 1.0
    largest = max((abs(value) for value in values if value is not None and math.isfinite(value)), default=0.0)
    for name, scale in scales:
        if largest >= 2 * scale:
            return name, scale
    return scales[-1]


def decimals(values: Iterable[float]) -> int:
    """Digits after the point that show four significant digits of a typical value, 0 to 4; fewer beside large ones, none for whole ones."""
    sizes = sorted(abs(value) for value in values if value)
    if not sizes or all(float(size).is_integer() for size in sizes):
        return 0
    typical, largest = math.floor(math.log10(sizes[len(sizes) // 2])), math.floor(math.log10(sizes[-1]))
    return max(0, min(4, 3 - typical, 5 - largest))
