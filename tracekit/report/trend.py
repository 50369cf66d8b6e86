"""A quantity over the runs that checks have appended to a history: one figure a quantity, in one HTML file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

from tracekit import __version__
from tracekit.files import write_atomically
from tracekit.findings import StackedArea
from tracekit.report.pages import drawn_page, figure_block
from tracekit.report.palette import COLORS
from tracekit.report.quantity import axis_unit, quantity
from tracekit.report.text import plotly_text

#: What is drawn where no pattern is given, and the most figures of one page.
DEFAULT_PATTERNS, MOST_FIGURES = ("step.time", "step.exposed_comm", "memory.peak", "mfu"), 40
_SCRIPTS = ("unpack.js", "page.js", "charts.js")


@dataclass(frozen=True)
class Point:
    """One check of the history."""

    time_unix_s: float
    name: str
    commit: str
    outcome: str
    values: Mapping[str, float]
    units: Mapping[str, str]


@dataclass(frozen=True)
class Trend:
    """One quantity over all checks; None where a check did not measure it."""

    key: str
    unit: str
    values: list[float | None]
    points: Sequence[Point]


def chosen(points: Sequence[Point], patterns: Sequence[str]) -> list[Trend]:
    """Quantities whose key fits a pattern, in the order of their keys."""
    keys = sorted({key for point in points for key in point.values})
    wanted = [key for key in keys if any(fnmatchcase(key, pattern) for pattern in patterns or DEFAULT_PATTERNS)]
    return [
        Trend(key, next(point.units.get(key, "") for point in points if key in point.values), [p.values.get(key) for p in points], points)
        for key in wanted[:MOST_FIGURES]
    ]


def line(trend: Trend) -> str:
    """``step.time: 12.1 ms -> 12.6 ms over 14 checks (lowest 12 ms, highest 12.9 ms)``."""
    known = [value for value in trend.values if value is not None]
    first, last, low, high = (quantity(value, trend.unit) for value in (known[0], known[-1], min(known), max(known)))
    return f"{trend.key}: {first} -> {last} over {len(known)} checks (lowest {low}, highest {high})"


def trend_info(trend: Trend) -> tuple[list[float | None], str, list[str]]:
    """(values in one readable unit, that unit, what a reader sees at each)."""
    unit, divisor = axis_unit(trend.values, trend.unit)
    hovers = [
        f"{datetime.fromtimestamp(point.time_unix_s, UTC):%Y-%m-%d %H:%M} · {point.name}"
        f"{' · ' + point.commit[:12] if point.commit else ''} · {point.outcome.replace('_', ' ')}: {quantity(value, trend.unit)}"
        for point, value in zip(trend.points, trend.values, strict=True)
    ]
    return [None if value is None else value / divisor for value in trend.values], unit, hovers


def trend_figure(trend: Trend) -> dict[str, Any]:
    """Points joined by a line; those of a check that fell stand out."""
    values, unit, hovers = trend_info(trend)
    fell = [point.outcome == "fell" for point in trend.points]
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": list(range(1, len(values) + 1)),
        "y": values,
        "hovertext": [plotly_text(text) for text in hovers],
        "hoverinfo": "text",
        "line": {"width": 1.5, "color": COLORS["compute"][0]},
        "marker": {
            "size": [11 if bad else 7 for bad in fell],
            "symbol": ["x" if bad else "circle" for bad in fell],
            "color": COLORS["compute"][0],
        },
        "meta": {"role": "compute"},
    }
    layout = {
        "height": 300,
        "showlegend": False,
        "xaxis": {"title": {"text": "check"}, "dtick": max(1, len(values) // 12)},
        "yaxis": {"title": {"text": plotly_text(unit)}, "rangemode": "tozero"},
    }
    return {"data": [trace], "layout": layout}


def write(path: str | os.PathLike[str], history: str, trends: Sequence[Trend], checks: int) -> None:
    """Write the page; an existing file is replaced only when the new one is whole. Raises OSError."""
    blocks = [
        figure_block(StackedArea(t.key, [], {}, t.unit, note=line(t)), f"c{place}", trend_figure(t)) for place, t in enumerate(trends)
    ]
    content = {
        "version": __version__,
        "title": history,
        "sentence": f"{len(trends)} {'quantity' if len(trends) == 1 else 'quantities'} over {checks} checks",
        "blocks": blocks,
    }
    write_atomically(path, drawn_page("trend.html", content, _SCRIPTS, "inline"))
