"""Stacked areas over time and treemaps as plotly's JSON: first the numbers (``..._info``), then the drawing (``..._figure``)."""

from __future__ import annotations

from typing import Any, NamedTuple

from tracekit.findings import StackedArea, Treemap
from tracekit.report.palette import COLORS, roles
from tracekit.report.quantity import axis_unit, quantity
from tracekit.report.text import plotly_text

_HEIGHT = 380


class AreaInfo(NamedTuple):
    """``values[series][i]`` and ``lines[line][i]`` in ``unit`` at ``x[i]`` in ``x_unit``."""

    x: list[float]
    x_unit: str
    names: list[str]
    roles: list[str]
    values: list[list[float]]
    line_names: list[str]
    lines: list[list[float | None]]
    marks: list[tuple[float, str]]
    unit: str


class TreeInfo(NamedTuple):
    """One row an area, the outer ones too: ``parents[i]`` is the id of the area around it, '' for none. ``values`` are as given."""

    ids: list[str]
    labels: list[str]
    parents: list[str]
    values: list[float]
    roles: list[str]
    hovers: list[str]


def area_info(chart: StackedArea) -> AreaInfo:
    """Numbers of a stacked area, brought to one readable unit for each axis."""
    names = [str(name) for name in chart.series]
    totals = [sum(column) for column in zip(*chart.series.values(), strict=True)]
    unit, divisor = axis_unit([*totals, *(value for line in chart.lines.values() for value in line)], chart.unit)
    x_unit, x_divisor = axis_unit(chart.x, chart.x_unit)
    return AreaInfo(
        [x / x_divisor for x in chart.x],
        x_unit,
        names,
        roles(names),
        [[value / divisor for value in values] for values in chart.series.values()],
        [str(name) for name in chart.lines],
        [[None if value is None else value / divisor for value in line] for line in chart.lines.values()],
        [(x / x_divisor, label) for x, label in chart.marks],
        unit,
    )


def area_figure(info: AreaInfo) -> dict[str, Any]:
    """Areas on top of each other, each value held until the next one; lines over them; a dashed upright at every mark."""
    # The page fills names in as text; the template itself holds nothing from a trace.
    hover = "%{fullData.name} %{y:.4~g} " + plotly_text(info.unit) + "<extra></extra>"
    areas = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "one",
            "name": plotly_text(name),
            "x": info.x,
            "y": values,
            "hovertemplate": hover,
            "line": {"shape": "hv", "width": 0, "color": COLORS[role][0]},
            "fillcolor": COLORS[role][0],
            "meta": {"role": role},
        }
        for name, role, values in zip(info.names, info.roles, info.values, strict=True)
    ]
    lines = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": plotly_text(name),
            "x": info.x,
            "y": values,
            "hoverinfo": "skip",
            "line": {"shape": "hv", "width": 1.5, "dash": "dot", "color": COLORS[role][0]},
            "meta": {"role": role},
        }
        for name, role, values in zip(info.line_names, roles(info.line_names), info.lines, strict=True)
    ]
    dashed = {"width": 1, "dash": "dash"}
    uprights = [{"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": dashed} for x, _ in info.marks]
    words = [
        {"x": x, "yref": "paper", "y": 1, "yanchor": "bottom", "showarrow": False, "text": plotly_text(label)} for x, label in info.marks
    ]
    layout = {
        "height": _HEIGHT,
        "hovermode": "x",
        "xaxis": {"title": {"text": plotly_text(info.x_unit)}},
        "yaxis": {"title": {"text": plotly_text(info.unit)}, "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": -0.18, "yanchor": "top", "x": 0, "xanchor": "left", "traceorder": "normal"},
        "shapes": uprights,
        "annotations": words,
    }
    return {"data": [*areas, *lines], "layout": layout}


def tree_info(chart: Treemap) -> TreeInfo:
    """Every area and those around it; areas of one outermost name share its colour."""
    sizes: dict[tuple[str, ...], float] = {}
    for path, value in zip(chart.paths, chart.values, strict=True):
        for depth in range(1, len(path) + 1):
            place = tuple(str(part) for part in path[:depth])
            sizes[place] = sizes.get(place, 0.0) + max(float(value), 0.0)
    outer = list(dict.fromkeys(place[0] for place in sizes))
    role_of = dict(zip(outer, roles(outer), strict=True))
    total = sum(size for place, size in sizes.items() if len(place) == 1)
    order = sorted(sizes)
    number = {place: str(i) for i, place in enumerate(order)}
    return TreeInfo(
        [number[place] for place in order],
        [place[-1] for place in order],
        [number[place[:-1]] if len(place) > 1 else "" for place in order],
        [sizes[place] for place in order],
        [role_of[place[0]] for place in order],
        [f"{' · '.join(place)}: {quantity(sizes[place], chart.unit)}, {sizes[place] / total:.1%}" for place in order] if total else [],
    )


def tree_figure(info: TreeInfo) -> dict[str, Any]:
    """Nested areas; a click goes into one."""
    trace = {
        "type": "treemap",
        "ids": info.ids,
        "labels": [plotly_text(label) for label in info.labels],
        "parents": info.parents,
        "values": info.values,
        "branchvalues": "total",
        "hovertext": [plotly_text(text) for text in info.hovers],
        "hoverinfo": "text",
        "textinfo": "label+percent root",
        "tiling": {"pad": 1},
        "marker": {"colors": [COLORS[role][0] for role in info.roles]},
        "meta": {"roles": info.roles},
    }
    return {"data": [trace], "layout": {"height": _HEIGHT + 60, "xaxis": {"visible": False}, "yaxis": {"visible": False}}}
