"""The report: one HTML file that opens from disk, fetches nothing, and shows every name as it is written in the trace.

Text goes through jinja's autoescape, data through JSON in ``<script type="application/json">`` with everything escaped that could end the
element; the page's scripts put it in place with ``textContent`` only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tracekit.files import write_atomically
from tracekit.findings import Chart, Result, Table, Timeline
from tracekit.report import coverage, figures, overview
from tracekit.report.pages import drawn_page, embedded, figure_block, table_block
from tracekit.report.places import Chapter, Places, chapters_of
from tracekit.report.text import visible
from tracekit.report.timeline import by_name, timeline_data
from tracekit.units import NULL

_SCRIPTS = ("unpack.js", "page.js", "tables.js", "charts.js", "timeline.js", "rank.js")


def render(results: Mapping[str, Result], document: Mapping[str, Any], plotly_js: str = "inline") -> str:
    """The whole page. ``plotly_js`` is 'inline', or a relative path that several reports of one folder share."""
    return b"".join(parts(results, document, plotly_js)).decode()


def write(path: str | os.PathLike[str], results: Mapping[str, Result], document: Mapping[str, Any], plotly_js: str = "inline") -> None:
    """Write the page; an existing file is replaced only when the new one is whole. Raises OSError."""
    write_atomically(path, parts(results, document, plotly_js))


def parts(results: Mapping[str, Result], document: Mapping[str, Any], plotly_js: str = "inline") -> list[bytes]:
    """The page in pieces; one of them is what ``plotly_code.plotly_element`` gives."""
    found = chapters_of(results)
    chapters = [_chapter(chapter, document["findings"]) for chapter in found]
    seen = {number: at for chapter in chapters for block in chapter["blocks"] for number, at in block.get("findings", {}).items()}
    places = Places(found)
    content = {
        **_head(document, places),
        "seen": seen,
        "chapter_ids": {"coverage", *(chapter["id"] for chapter in chapters)},
        "sections": chapters,
        "coverage": _coverage(document),
    }
    return drawn_page("report.html", content, _SCRIPTS, plotly_js)


def _head(document: Mapping[str, Any], places: Places) -> dict[str, Any]:
    folder = coverage.common_folder([entry["file"] for entry in document["coverage"]])
    return {
        "name": visible(folder.rstrip("/").rpartition("/")[2])[:120],
        "version": document["tracekit_version"],
        "ranks": document["job"]["ranks"],
        "answer": overview.answer(document),
        "facts": overview.facts(document),
        "folder": visible(folder),
        "first": overview.first_step(document),
        "findings": [_evidence(finding, places) for finding in document["findings"]],
    }


def _evidence(finding: Mapping[str, Any], places: Places) -> dict[str, Any]:
    """A finding with the place in the page that shows it, and the one rank that it is about."""
    ranks = (finding.get("subject") or {}).get("ranks") or []
    named = (finding.get("evidence_at") or {}).get("row") or []
    place = places.of({**finding, "row": {one["column"]: one["value"] for one in named if one["value"] is not None}})
    shown = {
        "consequences": list(dict.fromkeys(finding.get("consequences") or [])),
        "place": place["anchor"] if place is not None else "",
        "rank": ranks[0] if len(ranks) == 1 else None,
    }
    return {**finding, **shown, "gain_us": overview.gain_of(finding)}


def _coverage(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "blocks": [table_block(coverage.files_table(document), "t-files")],
        "notes": document["notes"],
        "not_measured": sorted(document["not_measured"].items()),
        "incomplete": coverage.incomplete(document),
    }


def _chapter(chapter: Chapter, findings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    blocks = [_block(chart, key, findings) for key, chart in chapter.blocks]
    return {"id": chapter.id, "title": chapter.section.title, "lead": chapter.section.lead, "blocks": blocks}


def _block(chart: Chart, key: str, findings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if isinstance(chart, Table):
        return table_block(chart, key)
    if isinstance(chart, Timeline):
        data = timeline_data(chart, findings)
        return {
            "kind": "timeline",
            "id": key,
            "title": chart.title,
            "note": chart.note,
            "spans": data.spans,
            "steps": len(data.steps),
            "findings": {number: _address(data.steps[step].number, rank) for number, step, *_, rank in reversed(data.findings)},
            "left_out": data.left_out,
            "data": embedded(data.payload()),
            "table": table_block(by_name(chart), f"{key}-names"),
        }
    return figure_block(chart, key, figures.figure(chart))


def _address(step: int, rank: int) -> str:
    """What a link to the timeline says of a step and a rank."""
    parts = ([] if step == NULL else [f"step={step}"]) + ([] if rank < 0 else [f"rank={rank}"])
    return "&".join(parts)
