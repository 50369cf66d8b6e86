"""A graph as plotly's JSON: nodes in columns, each left of what its arrows point at; the marked node stands out."""

from __future__ import annotations

import textwrap
from typing import Any, NamedTuple

from tracekit.findings import Graph
from tracekit.report.palette import COLORS
from tracekit.report.text import plotly_text

_ROW, _MOST_HEIGHT, _WIDTH = 76, 900, 34


class GraphInfo(NamedTuple):
    """``x`` and ``y`` of each node (a column, a row), ``labels`` in the same order; ``arrows`` are (from, to, label) by place."""

    x: list[float]
    y: list[float]
    labels: list[str]
    marked: list[bool]
    arrows: list[tuple[int, int, str]]


def graph_info(chart: Graph) -> GraphInfo:
    """Where every node stands: as many columns left of the end as arrows lie between, nodes of a circle by their first way to it."""
    names = list(chart.nodes)
    following: dict[str, list[str]] = {name: [] for name in names}
    for edge in chart.edges:
        following[edge.source].append(edge.target)
    depth: dict[str, int] = {}
    if chart.marked:
        depth[chart.marked] = 0
    changed = True
    while changed:
        changed = False
        for name in names:
            known = [depth[target] for target in following[name] if target in depth]
            if name not in depth and (known or not following[name]):
                depth[name] = (min(known) + 1) if known else 0
                changed = True
    most = max(depth.values(), default=0)
    rows: dict[int, int] = {}
    x, y = [], []
    for name in names:
        column = most - depth.get(name, most)
        x.append(float(column))
        y.append(float(rows.get(column, 0)))
        rows[column] = rows.get(column, 0) + 1
    y = [row - (rows[int(column)] - 1) / 2 for column, row in zip(x, y, strict=True)]
    place = {name: number for number, name in enumerate(names)}
    arrows = [(place[edge.source], place[edge.target], edge.label) for edge in chart.edges]
    return GraphInfo(x, y, [chart.nodes[name] for name in names], [name == chart.marked for name in names], arrows)


def graph_figure(info: GraphInfo) -> dict[str, Any]:
    """Boxes of text, arrows between them with their label on hover and beside the middle."""
    notes: list[dict[str, Any]] = []
    for source, target, label in info.arrows:
        a, b = (info.x[source], info.y[source]), (info.x[target], info.y[target])
        arrow = {"x": b[0], "y": b[1], "ax": a[0], "ay": a[1], "xref": "x", "yref": "y", "axref": "x", "ayref": "y", "text": ""}
        gaps = {"standoff": 100, "startstandoff": 60}  # [px] of the boxes' text
        notes.append({**arrow, **gaps, "showarrow": True, "arrowhead": 2, "arrowsize": 1.2, "arrowwidth": 1.4})
        middle = {"x": a[0] + 0.5 * (b[0] - a[0]), "y": a[1] + 0.5 * (b[1] - a[1]), "yshift": 26, "showarrow": False}
        notes.append({**middle, "text": _wrapped(label, 26), "font": {"size": 10}})
    for x, y, label, marked in zip(info.x, info.y, info.labels, info.marked, strict=True):
        color = COLORS["exposed" if marked else "compute"][0]
        box = {"bordercolor": color, "borderwidth": 2 if marked else 1, "borderpad": 6, "bgcolor": "rgba(127,127,127,0.10)"}
        notes.append({"x": x, "y": y, "showarrow": False, "text": _wrapped(label, _WIDTH), "align": "left", **box})
    height = min(_MOST_HEIGHT, 150 + _ROW * (1 + int(max(info.y, default=0) - min(info.y, default=0))))
    hidden = {"visible": False, "showgrid": False, "zeroline": False}
    points = {"type": "scatter", "mode": "markers", "x": info.x, "y": info.y, "marker": {"opacity": 0}, "hoverinfo": "skip"}
    span = [min(info.x, default=0) - 0.5, max(info.x, default=0) + 0.5]
    layout = {
        "height": height,
        "showlegend": False,
        "annotations": notes,
        "xaxis": {**hidden, "range": span},
        "yaxis": {**hidden, "autorange": "reversed"},
    }
    return {"data": [points], "layout": layout}


def _wrapped(text: str, width: int) -> str:
    lines = textwrap.wrap(text, width, max_lines=5, placeholder=" …") or [""]
    return "<br>".join(plotly_text(line) for line in lines)
