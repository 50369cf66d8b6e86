"""Charts as plotly's JSON: first the numbers (``..._info``, what a test looks at), then the drawing (``..._figure``).

plotly itself is not imported: it would cost more start-up than the rest of the report. Labels stand at numbered positions, so two
equal names stay two bars and a name like ``1e5`` stays a name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tracekit.findings import Graph, Heatmap, StackedArea, StackedBars, Treemap
from tracekit.report.areas import area_figure, area_info, tree_figure, tree_info
from tracekit.report.graph import graph_figure, graph_info
from tracekit.report.palette import COLORS, HEAT, PLAIN, roles
from tracekit.report.quantity import axis_unit, quantity
from tracekit.report.text import plotly_text

_MAX_HEIGHT = 920
_TICK_SPACE = 15
_LABEL_LENGTH = 44


class BarsInfo(NamedTuple):
    """``values[series][label]`` in ``unit``; ``roles`` are the series' colours."""

    labels: list[str]
    names: list[str]
    roles: list[str]
    values: list[list[float | None]]
    hovers: list[list[str]]
    unit: str


class HeatInfo(NamedTuple):
    """``values[y][x]`` in ``unit``; ``hovers`` and ``cells`` are what a reader sees there (``cells`` only where they fit).

    ``numbered``: the values have no unit and are whole: numbers of things, which get a colour each instead of a scale.
    """

    x_labels: list[str]
    y_labels: list[str]
    values: list[list[float | None]]
    hovers: list[list[str]]
    cells: list[list[str]] | None
    unit: str
    numbered: bool


def bars_info(chart: StackedBars) -> BarsInfo:
    """Numbers of a stacked bar chart, brought to one readable unit."""
    labels = [str(label) for label in chart.labels]
    raw = {str(name): [_finite(value) for value in values] for name, values in chart.series.items()}
    totals = [sum(value or 0.0 for value in column) for column in zip(*raw.values(), strict=True)]
    unit, divisor = axis_unit(totals, chart.unit)
    hovers = [
        [f"{label}: {name} {quantity(value, chart.unit)}" for label, value in zip(labels, values, strict=True)]
        for name, values in raw.items()
    ]
    scaled = [[None if value is None else value / divisor for value in values] for values in raw.values()]
    return BarsInfo(labels, list(raw), roles(raw), scaled, hovers, unit)


def bars_figure(info: BarsInfo) -> dict[str, Any]:
    """Horizontal stacked bars, first label on top."""
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": plotly_text(name),
            "y": list(range(len(info.labels))),
            "x": values,
            "hovertext": [plotly_text(text) for text in hovers],
            "hoverinfo": "text",
            "textposition": "none",
            "marker": {"color": COLORS[role][0]},
            "meta": {"role": role},
        }
        for name, role, values, hovers in zip(info.names, info.roles, info.values, info.hovers, strict=True)
    ]
    height, ticks = _rows(info.labels, 30, 112)
    layout = {
        "barmode": "stack",
        "bargap": 0.28 if len(info.labels) * 8 < height else 0,
        "height": height,
        "xaxis": {"title": {"text": plotly_text(info.unit)}, "rangemode": "tozero"},
        "yaxis": {**ticks, "autorange": "reversed"},
        "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "xanchor": "left", "traceorder": "normal"},
    }
    return {"data": traces, "layout": layout}


def heat_info(chart: Heatmap) -> HeatInfo:
    """Numbers of a heat map, brought to one readable unit, with what is said about each cell."""
    x_labels, y_labels = [str(x) for x in chart.x_labels], [str(y) for y in chart.y_labels]
    values = [[_finite(value) for value in row] for row in chart.values]
    small = len(x_labels) <= 16 and len(y_labels) <= 40
    cells = [[quantity(value, chart.unit) if value is not None else "" for value in row] for row in values] if small else None
    hovers = []
    for y, row in enumerate(values):
        texts = chart.texts[y] if chart.texts is not None else [quantity(value, chart.unit) for value in row]
        hovers.append([f"{y_labels[y]} · {x_labels[x]}: {texts[x]}" for x in range(len(row))])
    unit, divisor = axis_unit([value for row in values for value in row], chart.unit)
    scaled = [[None if value is None else value / divisor for value in row] for row in values]
    numbered = not chart.unit and all(value.is_integer() for row in values for value in row if value is not None)
    return HeatInfo(x_labels, y_labels, scaled, hovers, cells, unit, numbered)


def heat_figure(info: HeatInfo, x_title: str = "", y_title: str = "") -> dict[str, Any]:
    """A heat map from nothing to the maximum; empty cells stay empty."""
    trace: dict[str, Any] = {
        "type": "heatmap",
        "x": list(range(len(info.x_labels))),
        "y": list(range(len(info.y_labels))),
        "hovertext": [[plotly_text(text) for text in row] for row in info.hovers],
        "hoverinfo": "text",
        "hoverongaps": False,
        "xgap": 2 if info.cells is not None else 0,
        "ygap": 2 if info.cells is not None else 0,
        **(_numbered(info) if info.numbered else _scaled(info)),
    }
    if info.cells is not None:
        trace |= {"text": [[plotly_text(text) for text in row] for row in info.cells], "texttemplate": "%{text}"}
    height, ticks = _rows(info.y_labels, 34, 120)
    layout = {
        "height": height,
        "xaxis": {**_ticks(info.x_labels, max(1, math.ceil(len(info.x_labels) / 40))), "title": {"text": plotly_text(x_title)}},
        "yaxis": {**ticks, "autorange": "reversed", "title": {"text": plotly_text(y_title)}},
    }
    return {"data": [trace], "layout": layout}


def _scaled(info: HeatInfo) -> dict[str, Any]:
    present = [value for row in info.values for value in row if value is not None]
    return {
        "z": info.values,
        "zmin": min([0.0, *present]),
        "zmax": max([0.0, *present]) or 1.0,
        "colorscale": [[step / (len(HEAT[0]) - 1), color] for step, color in enumerate(HEAT[0])],
        "colorbar": {"title": {"text": plotly_text(info.unit)}, "thickness": 10, "outlinewidth": 0, "len": 1, "y": 0.5},
        "meta": {"role": "heat"},
    }


def _numbered(info: HeatInfo) -> dict[str, Any]:
    """Number n gets colour n of the palette, which begins again behind its last one."""
    count = len(PLAIN)
    steps = [[(place + side) / count, COLORS[role][0]] for place, role in enumerate(PLAIN) for side in (0, 1)]
    return {
        "z": [[None if value is None else (value - 1) % count for value in row] for row in info.values],
        "zmin": -0.5,
        "zmax": count - 0.5,
        "colorscale": steps,
        "showscale": False,
        "meta": {"role": "numbered"},
    }


def figure(chart: Graph | StackedBars | Heatmap | StackedArea | Treemap) -> dict[str, Any] | None:
    """The plotly figure of a chart; None when there is nothing to draw."""
    if isinstance(chart, Graph):
        return graph_figure(graph_info(chart)) if chart.nodes else None
    if isinstance(chart, StackedArea):
        return area_figure(area_info(chart)) if len(chart.x) and chart.series else None
    if isinstance(chart, Treemap):
        return tree_figure(tree_info(chart)) if any(value > 0 for value in chart.values) else None
    if isinstance(chart, StackedBars):
        bars = bars_info(chart)
        return bars_figure(bars) if bars.labels and any(v is not None for values in bars.values for v in values) else None
    heat = heat_info(chart)
    return heat_figure(heat, chart.x_title, chart.y_title) if any(v is not None for row in heat.values for v in row) else None


def _rows(labels: Sequence[str], row: int, margins: int) -> tuple[int, Mapping[str, Any]]:
    """Height [px] of a chart with one row a label, and the ticks that fit beside it."""
    height = min(_MAX_HEIGHT, max(1, len(labels)) * row + margins)
    fitting = max(1, (height - margins) // _TICK_SPACE)
    return height, _ticks(labels, max(1, math.ceil(len(labels) / fitting)))


def _ticks(labels: Sequence[str], every: int) -> dict[str, Any]:
    positions = list(range(0, len(labels), every))
    return {"tickmode": "array", "tickvals": positions, "ticktext": [plotly_text(_short(labels[i])) for i in positions]}


def _short(label: str) -> str:
    return label if len(label) <= _LABEL_LENGTH else label[: _LABEL_LENGTH - 1] + "…"


def _finite(value: Any) -> float | None:
    """A number, or None for what is missing (None, NaN, infinite, the integers' sentinel)."""
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) and number > -9e18 else None
