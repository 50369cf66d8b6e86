"""Where in the page the evidence of a finding stands: a row of a table, else a table or chart, else the chapter; each has an address.

    #pipeline                 a chapter
    #pipeline-3               the third table or chart of it
    #pipeline-3.2             a row of that table, by what names it: stage 2
    #steps-2.3.10             rank 3, step 10; of rows that are named alike the second has .~2 at the end
    #timeline?step=4&rank=7   the timeline, opened at a step, with these ranks

The columns that name a row are those in front: texts, ranks, steps, stages, until the first that measures something. An address is the same
for every report in which the table stands at that place of its chapter, whatever the row's place in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from tracekit.findings import Chart, Result, Section, Table
from tracekit.report.cells import TableData, naming, slug
from tracekit.report.tables import table_data
from tracekit.units import listed

#: Findings whose id does not begin with the analysis that shows them; groups are in the tables of collectives, by their ids.
_ANALYSIS = {"links": "stragglers"}
_ALSO = {"links": "collectives"}
#: Findings of what was read, and the table that shows them.
_OF_FILES = {"coverage.problem": "Files", "coverage.note": None, "coverage.missing_ranks": None}
_UNIT = re.compile(r"\s*[\[(][^\[\]()]+[\])]\s*$")


@dataclass(frozen=True)
class Chapter:
    """A section of the report with its address; ``blocks`` are the addresses of its charts and tables."""

    analysis: str
    id: str
    section: Section

    @property
    def blocks(self) -> Iterator[tuple[str, Chart]]:
        """(address, chart) in order."""
        return ((f"{self.id}-{number}", chart) for number, chart in enumerate(self.section.charts, 1))


def chapters_of(results: Mapping[str, Result]) -> list[Chapter]:
    """Every section of every result with an address of its own."""
    found: list[Chapter] = []
    taken: set[str] = set()
    sections = [(analysis, section) for analysis, result in results.items() for section in result.sections()]
    for number, (analysis, section) in enumerate(sections, 1):
        name = section.name or f"chapter-{number}"
        name = f"{name}-{number}" if name in taken else name
        taken.add(name)
        found.append(Chapter(analysis, name, section))
    return found


def analysis_of(finding: Mapping[str, Any]) -> str:
    """The analysis that shows a finding."""
    subject = str(finding["id"]).partition(".")[0]
    return _ANALYSIS.get(subject, subject)


class Places:
    """Where findings stand in the chapters of one report."""

    def __init__(self, chapters: Sequence[Chapter]) -> None:
        self._chapters = chapters
        self._data: dict[str, TableData] = {}

    def of(self, finding: Mapping[str, Any]) -> dict[str, Any] | None:
        """``anchor`` (without #), ``section`` and ``chart`` (titles; None), ``row``: column and value of what names it (None: a chart).

        None for what is shown nowhere.
        """
        subject = analysis_of(finding)
        own = [chapter for chapter in self._chapters if subject in (chapter.analysis, chapter.id)]
        also = _ALSO.get(str(finding["id"]).partition(".")[0])
        wide = [*own, *(chapter for chapter in self._chapters if also == chapter.analysis)]
        for wanted in _wanted(finding):
            for chapter in wide:
                for key, chart in chapter.blocks:
                    named = self._row(key, chart, wanted) if isinstance(chart, Table) else None
                    if named is not None:
                        row, anchor = named
                        return {"section": chapter.section.title, "chart": chart.title, "row": row, "anchor": f"{key}.{anchor}"}
        if str(finding["id"]) in _OF_FILES:  # the last chapter of every report, which is no analysis'
            files = _OF_FILES[finding["id"]]
            return {"section": "Coverage", "chart": files, "row": None, "anchor": "t-files" if files else "coverage"}
        if not own:
            return None
        title = own[0].section.title
        blocks = list(own[0].blocks)
        if not blocks:
            return {"section": title, "chart": None, "row": None, "anchor": own[0].id}
        return {"section": title, "chart": blocks[0][1].title, "row": None, "anchor": blocks[0][0]}

    def _row(self, key: str, table: Table, wanted: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str] | None:
        """(what names it, address) of the first row that has all wanted values; None where there is none in the page."""
        index = _index_of(table, wanted)
        if index is None:
            return None
        if key not in self._data:
            self._data[key] = table_data(table)
        data = self._data[key]
        if index >= data.rows:
            return None
        columns = [data.columns[i] for i in naming(data.columns)]
        return [{"column": column.title, "value": column.values[index]} for column in columns], slug(columns, index)


def _wanted(finding: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Headings and values of the row that shows a finding: what it says itself, else what its subject is."""
    if finding.get("row"):
        yield finding["row"]
    subject = finding.get("subject") or {}
    ranks: Sequence[int] = subject.get("ranks") or ()
    if subject.get("stage") is not None:
        yield {"Stage": subject["stage"]}
    if len(ranks) == 1:
        yield {"Rank": ranks[0]}
    elif ranks:
        yield {"Ranks": listed(list(ranks))}
    if subject.get("group"):
        yield {"Group": subject["group"]}
    if subject.get("axis"):
        yield {"Axis": subject["axis"]}


def _index_of(table: Table, wanted: Mapping[str, Any]) -> int | None:
    columns = {_UNIT.sub("", heading): name for name, heading in table.columns.items()}
    if not set(wanted) <= set(columns) or not len(table.frame):
        return None
    found = np.ones(len(table.frame), np.bool_)
    for heading, value in wanted.items():
        found &= _equal(table.frame[columns[heading]], value)
    return int(found.argmax()) if found.any() else None


def _equal(column: pd.Series[Any], value: Any) -> npt.NDArray[np.bool_]:
    if isinstance(value, str):
        return np.array([each == value for each in column.tolist()], np.bool_)
    numbers: npt.NDArray[Any] = pd.to_numeric(column, errors="coerce").to_numpy()
    same: npt.NDArray[np.bool_] = numbers == value
    return same
