"""An experiment as JSON, and as one HTML page that opens from disk: a picture of every moment, Gantt charts, tables and checks.

Text goes through jinja's autoescape, data through JSON in ``<script type="application/json">``, put in place with ``textContent`` only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pandas as pd
from markupsafe import Markup

from tracekit import __version__
from tracekit.files import write_atomically
from tracekit.findings import Table
from tracekit.report import palette
from tracekit.report.document import clean
from tracekit.report.pages import asset, embedded, table_block, template
from tracekit.simulate.experiment import CELL_KINDS, Bar, Check, Experiment, Gantt, Moment
from tracekit.units import format_bytes

SCHEMA_VERSION = 1
#: Cells and messages that the page's picture holds at most; what is beyond stands in the JSON.
MOST_CELLS = 60_000
MOST_BARS = 20_000
#: A number below this would be shown as 0 among others with a few digits behind the point.
_TINY = 5e-5
#: Colour of each kind of cell: what belongs to parameters is blue, gradients are warm, activations green.
CELL_ROLES = {
    "parameter": "compute",
    "gathered_parameter": "p4",
    "gradient": "c1",
    "optimizer_state": "p7",
    "activation": "p1",
    "input": "p6",
    "chunk": "p0",
    "partial_sum": "c5",
    "buffer": "p5",
    "padding": "idle",
}


def experiment_document(experiment: Experiment) -> dict[str, Any]:
    """The JSON: plain, finite values. Fractions become floats, with their exact text beside them (``..._exact``)."""
    return {
        "schema_version": SCHEMA_VERSION,
        "tracekit_version": __version__,
        "experiment": experiment.name,
        "title": clean(experiment.title),
        "about": clean(experiment.about),
        "arguments": {name: _plain(value) for name, value in experiment.arguments},
        "verdict": clean(experiment.verdict),
        "holds": experiment.holds,
        "tables": [_table_json(table) for table in experiment.tables],
        "moments": [_moment_json(moment) for moment in experiment.moments],
        "charts": [_chart_json(chart) for chart in experiment.charts],
        "checks": [_check_json(check) for check in experiment.checks],
        "calls": [clean(vars(call)) for call in experiment.calls],
        "notes": clean(experiment.notes),
    }


def exact(value: object) -> str | None:
    """The exact text of a whole number or fraction (``3/11``); None for a float, which is rounded already."""
    if isinstance(value, Fraction):
        return str(value)
    return None if isinstance(value, float) or not hasattr(value, "__index__") else str(int(value.__index__()))


def number_text(value: object) -> str:
    """A number for a reader: whole ones whole, others with up to six digits."""
    if isinstance(value, float) or (isinstance(value, Fraction) and value.denominator != 1):
        number = float(value)
        return f"{number:.6g}" if math.isfinite(number) else str(number)
    text = exact(value)
    if text is not None:
        return f"{int(text):,}" if abs(int(text)) >= 10_000 else text
    return f"{float(value):.6g}" if isinstance(value, (int, float)) or hasattr(value, "__float__") else str(value)


def legible(table: Table) -> Table:
    """The table with fractions exact (``0.375 = 3/8``), and columns of very small numbers (errors) in powers of ten."""
    frame = table.frame.copy()
    for name, heading in table.columns.items():
        values = frame[name].tolist()
        if any(isinstance(value, Fraction) for value in values):
            frame[name] = pd.Series([_figure(v) if isinstance(v, Fraction) else v for v in values], index=frame.index, dtype=object)
        elif frame[name].dtype.kind == "f" and not heading.endswith("[share]") and any(0 < abs(value) < _TINY for value in values):
            texts = [None if math.isnan(v) else "0" if v == 0 else f"{v:.2e}" if abs(v) < 1e-3 else f"{v:.4g}" for v in values]
            frame[name] = pd.Series(texts, index=frame.index, dtype=object)
    return replace(table, frame=frame)


def _plain(value: object) -> Any:
    if isinstance(value, Fraction):
        return float(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return clean(value)


def _table_json(table: Table) -> dict[str, Any]:
    columns = {name: table.frame[name].tolist() for name in table.columns}
    for name, values in list(columns.items()):
        if any(isinstance(value, Fraction) for value in values):
            columns[f"{name}_exact"] = [exact(value) for value in values]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*([_plain(v) for v in values] for values in columns.values()), strict=True)]
    headings = [{"name": str(name), "title": clean(heading)} for name, heading in table.columns.items()]
    return {"title": clean(table.title), "note": clean(table.note), "columns": headings, "rows": clean(rows)}


def _moment_json(moment: Moment) -> dict[str, Any]:
    ranks = [
        {"rank": rank, "live_bytes": moment.live_bytes(rank), "cells": [vars(cell) for cell in cells]}
        for rank, cells in enumerate(moment.holds)
    ]
    found: dict[str, Any] = clean({"title": moment.title, "text": moment.text, "logical_step": moment.logical_step, "ranks": ranks})
    return found | {"messages": [clean(vars(message)) for message in moment.messages]}


def _chart_json(chart: Gantt) -> dict[str, Any]:
    bars = [vars(bar) | {"start": float(bar.start), "end": float(bar.end)} for bar in chart.bars]
    return dict(clean({"title": chart.title, "unit": chart.unit, "note": chart.note, "lanes": chart.lanes, "bars": bars}))


def _check_json(check: Check) -> dict[str, Any]:
    return {
        "quantity": clean(check.quantity),
        "counted": _plain(check.counted),
        "counted_exact": exact(check.counted),
        "expected": _plain(check.expected),
        "expected_exact": exact(check.expected),
        "unit": clean(check.unit),
        "formula": clean(check.formula),
        "tolerance": check.tolerance,
        "holds": bool(check.holds),
    }


def render(experiment: Experiment, document: Mapping[str, Any] | None = None) -> str:
    """The whole page. ``document`` is that of ``experiment_document``, made when it is not given."""
    found = experiment_document(experiment) if document is None else document
    picture, left_out = _picture(found["moments"])
    return template("experiment.html").render(
        experiment=experiment,
        version=__version__,
        arguments=[(_argument_name(name), _argument(value)) for name, value in found["arguments"].items()],
        picture=picture,
        moments=len(found["moments"]),
        left_out=left_out,
        legend=[(kind, kind.replace("_", " "), CELL_ROLES[kind]) for kind in _kinds(experiment.moments)],
        charts=[_gantt(chart, f"g{number}") for number, chart in enumerate(experiment.charts)],
        tables=[_table(table, f"t{number}") for number, table in enumerate(experiment.tables)],
        calls=[vars(call) | {"size": format_bytes(call.full_bytes)} for call in experiment.calls],
        checks=[_check(check) for check in experiment.checks],
        css=asset("style.css") + asset("experiment.css"),
        palette=Markup(palette.css()),
        scripts=[asset(name) for name in ("unpack.js", "page.js", "tables.js", "experiment.js")],
    )


def write(path: str | os.PathLike[str], experiment: Experiment, document: Mapping[str, Any] | None = None) -> None:
    """Write the page; an existing file is replaced only when the new one is whole. Raises OSError."""
    write_atomically(path, [render(experiment, document).encode("utf-8", "replace")])


#: Units at the end of a field's name.
_UNITS = {"_us": " [us]", "_ms": " [ms]", "_gb_s": " [GB/s]"}


def _argument_name(name: str) -> str:
    """``bandwidth_gb_s`` as it is read: ``bandwidth [GB/s]``."""
    end = next((end for end in _UNITS if name.endswith(end)), "")
    return name.removesuffix(end).replace("_", " ") + _UNITS.get(end, "")


def _argument(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.10g}"
    return (", ".join(map(str, value)) if isinstance(value, list) else str(value)) or "–"


def _picture(moments: Sequence[Mapping[str, Any]]) -> tuple[Markup | None, int]:
    """The data of the step-by-step picture, and how many moments it has no room for."""
    kept: list[Mapping[str, Any]] = []
    cells = 0
    for moment in moments:
        cells += len(moment["messages"]) + sum(1 + len(rank["cells"]) for rank in moment["ranks"])
        if kept and cells > MOST_CELLS:
            break
        kept.append(moment)
    data = {"roles": CELL_ROLES, "moments": kept}
    return (embedded(data) if kept else None), len(moments) - len(kept)


def _kinds(moments: Iterable[Moment]) -> list[str]:
    """Kinds of cells that occur, in the order of the legend. ValueError for one that is none: a mistake in the experiment."""
    seen = {cell.kind for moment in moments for cells in moment.holds for cell in cells}
    if seen - set(CELL_KINDS):
        raise ValueError(f"{min(seen - set(CELL_KINDS))!r} is no kind of cell")
    return [kind for kind in CELL_KINDS if kind in seen]


def _table(table: Table, key: str) -> dict[str, Any]:
    return table_block(legible(table), key)


def _check(check: Check) -> dict[str, Any]:
    return vars(check) | {"holds": check.holds, "counted": _figure(check.counted), "expected": _figure(check.expected)}


def _figure(value: object) -> str:
    text = exact(value)
    return f"{number_text(value)} = {text}" if text is not None and "/" in text else number_text(value)


def _gantt(chart: Gantt, key: str) -> dict[str, Any]:
    """Bars in shares of the whole time, a row a lane."""
    end = max((float(bar.end) for bar in chart.bars), default=0.0)
    kinds = list(dict.fromkeys(bar.kind for bar in chart.bars))
    role = dict(zip(kinds, _bar_roles(kinds), strict=True))
    place = {lane: number for number, lane in enumerate(chart.lanes)}
    rows: list[list[dict[str, Any]]] = [[] for _ in chart.lanes]
    for bar in list(chart.bars)[:MOST_BARS]:
        rows[place[bar.lane]].append(_bar(bar, end, role[bar.kind], chart.unit))
    return {
        "id": key,
        "title": chart.title,
        "note": chart.note,
        "lanes": list(zip(chart.lanes, rows, strict=True)),
        "legend": [(kind.replace("_", " "), role[kind]) for kind in kinds],
        "ticks": _ticks(end),
        "unit": chart.unit,
        "least": _least_width(chart, end),
        "left_out": max(0, len(chart.bars) - MOST_BARS),
    }


def _ticks(end: float) -> list[tuple[str, str]]:
    """(place [%], number) of about eight round numbers from 0 on."""
    if end <= 0:
        return [("0", "0")]
    power = 10.0 ** math.floor(math.log10(end / 8))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= end / 8 * (1 - 1e-9))
    return [(f"{100 * number * step / end:.4f}", f"{number * step:.6g}") for number in range(math.floor(end / step * (1 + 1e-9)) + 1)]


def _least_width(chart: Gantt, end: float) -> int:
    """Width of the chart [rem] in which every label fits its bar, within reason."""
    spans = [(len(bar.label), float(bar.end) - float(bar.start)) for bar in chart.bars]
    wanted = max((end * (0.46 * letters + 0.3) / length for letters, length in spans if length > 0), default=0.0)
    return round(min(max(wanted, 40.0), 160.0))


_BAR_ROLES = {"forward": "compute", "backward": "c1", "backward_input": "c1", "backward_weight": "c5", "weight": "c5", "idle": "idle"}


def _bar_roles(kinds: Sequence[str]) -> list[str]:
    given = [_BAR_ROLES.get(kind) for kind in kinds]
    free = iter([role for role in palette.PLAIN * (1 + len(kinds)) if role not in given])
    return [role if role is not None else next(free) for role in given]


def _bar(bar: Bar, end: float, role: str, unit: str) -> dict[str, Any]:
    start, length = float(bar.start), float(bar.end) - float(bar.start)
    whole = end or 1.0
    return {
        "left": f"{100 * start / whole:.4f}",
        "width": f"{100 * length / whole:.4f}",
        "role": role,
        "label": bar.label,
        "hint": f"{bar.label} ({bar.kind.replace('_', ' ')}): {start:g} to {start + length:g} {unit}",
    }
