"""What all pages share: templates, style sheets and scripts of this folder, figures and tables as blocks, names from a trace in HTML."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from tracekit.findings import Chart, Table
from tracekit.report import overview
from tracekit.report.document import encode
from tracekit.report.tables import table_data
from tracekit.report.text import pieces, script_json, visible

_TEMPLATES = Path(__file__).parent / "templates"


@cache
def template(name: str) -> jinja2.Template:
    """A template by its file name. Filters: ``named`` for names from a trace, ``visible`` for them in attributes, figures of a report."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["named"] = named
    environment.filters["visible"] = visible
    environment.filters["quantity"] = overview.format_us
    environment.filters["percent"] = overview.percent
    return environment.get_template(name)


def asset(name: str) -> Markup:
    """A style sheet or script, to stand in the page itself."""
    return Markup((_TEMPLATES / name).read_text(encoding="utf-8"))


def named(text: str) -> Markup:
    """Text of the trace as HTML: escaped, with characters that would act shown by their code (see ``.ctl`` in the style sheet)."""
    parts = pieces(text)
    if len(parts) == 1 and not parts[0][1]:
        return escape(text)
    return Markup("").join(
        Markup('<span class="ctl" data-code="{}">{}</span>').format(code, part) if code else escape(part) for part, code in parts
    )


def figure_block(chart: Chart, key: str, drawn: dict[str, Any] | None) -> dict[str, Any]:
    """A figure for the macro ``plot``; ``drawn`` as ``figures.figure`` gives it, None where there is nothing to draw."""
    return {
        "kind": "figure",
        "id": key,
        "title": chart.title,
        "note": chart.note,
        "height": drawn["layout"]["height"] if drawn else 0,
        "data": embedded(drawn) if drawn else None,
    }


def table_block(table: Table, key: str, **more: str) -> dict[str, Any]:
    """A table for the macro ``table``. ``elsewhere`` among ``more``: where rows are that the page leaves out."""
    data = table_data(table)
    shown = {"title": table.title, "note": table.note, **more}
    return {"kind": "table", "id": key, **shown, "table": data, "data": embedded(data.payload())}


def embedded(value: Any) -> Markup:
    """A value as JSON that can stand in a script element."""
    return Markup(script_json(encode(value)).decode())
