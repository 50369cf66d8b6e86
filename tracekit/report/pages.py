"""What all pages share: templates, style sheets and scripts of this folder, figures and tables as blocks, names from a trace in HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from tracekit.findings import Chart, Table
from tracekit.report import overview, palette
from tracekit.report.encoding import encode
from tracekit.report.glossary import explained
from tracekit.report.in_words import in_words
from tracekit.report.named import named
from tracekit.report.packing import packed
from tracekit.report.plotly_code import plotly_element
from tracekit.report.tables import table_data
from tracekit.report.text import script_json, visible

_TEMPLATES = Path(__file__).parent / "templates"
_PLOTLY_MARK = b"<!--plotly-->"
#: JSON of so many bytes is packed.
_PACKED = 20_000


@cache
def template(name: str) -> jinja2.Template:
    """A template by its file name. Filters: ``named`` for names from a trace, ``visible`` for them in attributes, figures of a report."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["named"] = named
    environment.filters["explained"] = explained
    environment.filters["visible"] = visible
    environment.filters["quantity"] = overview.format_us
    environment.filters["percent"] = overview.percent
    return environment.get_template(name)


def asset(name: str) -> Markup:
    """A style sheet or script, to stand in the page itself."""
    return Markup((_TEMPLATES / name).read_text(encoding="utf-8"))


def drawn_page(name: str, content: Mapping[str, Any], scripts: Iterable[str], plotly_js: str) -> list[bytes]:
    """A page with figures, in pieces: template ``name`` with its ``content``. ``plotly_js`` is 'inline', or a path that pages share."""
    page = template(name).render(
        **content,
        plotly_js=None if plotly_js == "inline" else plotly_js,
        css=asset("style.css"),
        palette=Markup(palette.css()),
        scripts=[asset(script) for script in scripts],
    )
    before, _, after = page.encode("utf-8", "replace").partition(_PLOTLY_MARK)
    if plotly_js == "inline":
        return [before, plotly_element(), after]
    return [before, after]


def figure_block(chart: Chart, key: str, drawn: dict[str, Any] | None) -> dict[str, Any]:
    """A figure for the macro ``plot``; ``drawn`` as ``figures.figure`` gives it, None where there is nothing to draw."""
    return {
        "kind": "figure",
        "id": key,
        "title": chart.title,
        "note": chart.note,
        "said": in_words(chart),
        "height": drawn["layout"]["height"] if drawn else 0,
        "data": embedded(drawn) if drawn else None,
    }


def table_block(table: Table, key: str, **more: str) -> dict[str, Any]:
    """A table for the macro ``table``. ``elsewhere`` among ``more``: where rows are that the page leaves out."""
    data = table_data(table)
    shown = {"title": table.title, "note": table.note, **more}
    return {"kind": "table", "id": key, **shown, "table": data, "data": embedded(data.payload())}


def embedded(value: Any) -> Markup:
    """A script element that holds a value as JSON, packed where it is long."""
    text = script_json(encode(value))
    if len(text) < _PACKED:
        return Markup('<script type="application/json">' + text.decode() + "</script>")
    return Markup(f'<script type="application/json" data-size="{len(text)}">{packed(text)}</script>')
