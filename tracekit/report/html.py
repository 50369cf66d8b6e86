"""The report: one HTML file that opens from disk, fetches nothing, and shows every name as it is written in the trace.

Text goes through jinja's autoescape, data through JSON in ``<script type="application/json">`` with everything escaped that could end the
element; the page's scripts put it in place with ``textContent`` only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tracekit.errors import TracekitError
from tracekit.findings import Chart, Result, Section, Table, Timeline
from tracekit.report import coverage, figures, overview, palette
from tracekit.report.document import write_atomically
from tracekit.report.pages import asset, embedded, figure_block, table_block, template
from tracekit.report.text import visible
from tracekit.report.timeline import by_name, timeline_data

_SCRIPTS = ("page.js", "tables.js", "charts.js", "timeline.js")
_PLOTLY_MARK = b"<!--plotly-->"


def render(results: Mapping[str, Result], document: Mapping[str, Any], plotly_js: str = "inline") -> str:
    """The whole page. ``plotly_js`` is 'inline', or a relative path that several reports of one folder share."""
    return b"".join(_parts(results, document, plotly_js)).decode()


def write(path: str | os.PathLike[str], results: Mapping[str, Result], document: Mapping[str, Any], plotly_js: str = "inline") -> None:
    """Write the page; an existing file is replaced only when the new one is whole. Raises OSError."""
    write_atomically(path, _parts(results, document, plotly_js))


@cache
def plotly_source() -> bytes:
    """plotly.js as the installed plotly package ships it, read without importing that package."""
    spec = find_spec("plotly")
    if spec is None or spec.origin is None:
        raise TracekitError("the package plotly is not installed", "pip install plotly")
    return (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_bytes()


def _parts(results: Mapping[str, Result], document: Mapping[str, Any], plotly_js: str) -> Iterable[bytes]:
    sections = [section for result in results.values() for section in result.sections()]
    page = template("report.html").render(
        **_head(document),
        sections=_chapters(sections),
        coverage=_coverage(document),
        plotly_js=None if plotly_js == "inline" else plotly_js,
        css=asset("style.css"),
        palette=Markup(palette.css()),
        scripts=[asset(name) for name in _SCRIPTS],
    )
    before, _, after = page.encode("utf-8", "replace").partition(_PLOTLY_MARK)
    if plotly_js == "inline":
        return [before, b"<script>", plotly_source(), b"</script>", after]
    return [before, after]


def _head(document: Mapping[str, Any]) -> dict[str, Any]:
    folder = coverage.common_folder([entry["file"] for entry in document["coverage"]])
    return {
        "name": visible(folder.rstrip("/").rpartition("/")[2])[:120],
        "version": document["tracekit_version"],
        "answer": overview.answer(document),
        "facts": overview.facts(document),
        "findings": document["findings"],
    }


def _coverage(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "blocks": [table_block(coverage.files_table(document), "t-files")],
        "notes": document["notes"],
        "not_measured": sorted(document["not_measured"].items()),
        "incomplete": coverage.incomplete(document),
    }


def _chapters(sections: Sequence[Section]) -> list[dict[str, Any]]:
    return [
        {
            "id": f"s{number}",
            "title": section.title,
            "lead": section.lead,
            "blocks": [_block(chart, f"c{number}-{index}") for index, chart in enumerate(section.charts)],
        }
        for number, section in enumerate(sections)
    ]


def _block(chart: Chart, key: str) -> dict[str, Any]:
    if isinstance(chart, Table):
        return table_block(chart, key)
    if isinstance(chart, Timeline):
        data = timeline_data(chart)
        return {
            "kind": "timeline",
            "id": key,
            "title": chart.title,
            "note": chart.note,
            "spans": len(data.start),
            "left_out": data.left_out,
            "data": embedded(data.payload()),
            "table": table_block(by_name(chart), f"{key}-names"),
        }
    return figure_block(chart, key, figures.figure(chart))
