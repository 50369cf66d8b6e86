"""What an analysis hands on: findings (sentences), charts (data to draw) and tables; nothing here draws or opens a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import pandas as pd

from tracekit.schema import Schema

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")


@dataclass(frozen=True)
class Subject:
    """What a finding is about; ``group`` is the id of a process group."""

    ranks: tuple[int, ...] = ()
    axis: str | None = None
    stage: int | None = None
    expert: int | None = None
    group: str | None = None


@dataclass(frozen=True)
class Finding:
    """One ranked sentence about the job.

    ``id`` is stable (``overlap.exposed``), ``text`` holds the figure, ``value``/``unit`` repeat it for machines, ``evidence``
    says where it can be seen, ``advice`` what to try. ``weight_ns`` is the time that the sentence is about, 0 where no time can be named;
    ``gain_ns`` what a step would win if the cause went away, by replay (None where nothing can be said). ``subject`` is the cause, not
    who suffers from it; ``consequences`` are sentences about what follows from it. ``row`` (heading -> value) names the row
    of a table in its chapter that shows it, where the subject does not.
    """

    id: str
    severity: Severity
    text: str
    value: float | None = None
    unit: str = ""
    evidence: str = ""
    advice: str = ""
    weight_ns: int = 0
    gain_ns: int | None = None
    subject: Subject = Subject()
    consequences: tuple[str, ...] = ()
    absorbs: tuple[str, ...] = ()  # ids of findings that only tell of its consequences: their sentences stand under it
    row: Mapping[str, int | str] = field(default_factory=dict)
    under: tuple[str, ...] = ()  # ids of findings, if there are any, of which this one only tells a consequence


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """One finding a cause: what a finding absorbs becomes its consequence. Of several that absorb one id the first does."""
    left = _placed_under(list(findings))
    result: list[Finding] = []
    taken: set[str] = set()
    for finding in left:
        wanted = set(finding.absorbs) - taken
        told = tuple(other.text for other in left if other.id in wanted and other is not finding)
        taken |= wanted
        result.append(replace(finding, consequences=(*finding.consequences, *told)) if told else finding)
    return [finding for finding in result if finding.id not in taken]


def _placed_under(findings: list[Finding]) -> list[Finding]:
    """Findings that say themselves of which they are a consequence are absorbed by it."""
    ids = {finding.id for finding in findings}
    homes = {finding.id: next((home for home in finding.under if home in ids), "") for finding in findings if finding.under}
    return [replace(f, absorbs=(*f.absorbs, *(own for own, home in homes.items() if home == f.id))) for f in findings]


#: How findings begin that stand before all others: a job that failed, then data that cannot be trusted.
_FAILED = ("hang.", "memory.out_of_memory")
_UNTRUSTED = ("coverage.problem", "coverage.unmatched")


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """A failed job first, then data that cannot be trusted, then by the gain of a step, then by severity and the time concerned.

    What concerns no more than information stands behind every warning. Equal findings keep their order.
    """

    def place(finding: Finding) -> tuple[int, int, int, int]:
        if finding.severity != "info" and finding.id.startswith(_FAILED):
            sort = 0
        elif finding.severity != "info" and finding.id.startswith(_UNTRUSTED):
            sort = 1
        else:
            sort = 2 if finding.gain_ns and finding.severity != "info" else 3
        return sort, -(finding.gain_ns or 0) if sort == 2 else 0, SEVERITIES.index(finding.severity), -finding.weight_ns

    return sorted(findings, key=place)


@dataclass(frozen=True)
class StackedBars:
    """One horizontal bar a label, split into named parts. ``series[name][i]`` belongs to ``labels[i]``."""

    title: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[float]]
    unit: str
    note: str = ""


@dataclass(frozen=True)
class Heatmap:
    """A matrix ``values[y][x]``; ``None`` where there is nothing to show. ``texts`` are shown on hover when given."""

    title: str
    x_labels: Sequence[str]
    y_labels: Sequence[str]
    values: Sequence[Sequence[float | None]]
    unit: str
    texts: Sequence[Sequence[str]] | None = None
    x_title: str = ""
    y_title: str = ""
    note: str = ""


@dataclass(frozen=True)
class Timeline:
    """Spans on lanes. ``spans`` columns: lane (str), start_us, end_us (float, from one common zero), name (str), category (str).

    Of several steps, a column ``step`` (int, NULL: no step), each with its own zero; ``merged`` counts the pieces in a span. ``first`` is
    the step to show first, ``shown`` the ranks whose lanes are (all, where empty). ``stretches`` are places where findings can be seen:
    step, kind, rank, axis, group, start_us, end_us, the longest first.
    """

    title: str
    spans: pd.DataFrame
    note: str = ""
    first: int | None = None
    shown: Sequence[int] = ()
    stretches: pd.DataFrame | None = None


@dataclass(frozen=True)
class StackedArea:
    """Amounts over time, one on top of the other: ``series[name][i]`` holds from ``x[i]`` until ``x[i + 1]``.

    ``lines`` are amounts drawn over them, ``marks`` moments with a word each: (x, label).
    """

    title: str
    x: Sequence[float]
    series: Mapping[str, Sequence[float]]
    unit: str
    lines: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    marks: Sequence[tuple[float, str]] = ()
    note: str = ""
    x_unit: str = "us"


@dataclass(frozen=True)
class Treemap:
    """Areas within areas: ``paths[i]`` are the names from the outermost area to the one of size ``values[i]``; paths are distinct."""

    title: str
    paths: Sequence[Sequence[str]]
    values: Sequence[float]
    unit: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table for a reader: sortable and filterable in the report. ``columns`` maps a column of ``frame`` to its heading, unit included.

    ``preview`` rows are printed in the terminal (0: the table is left to the report). ``missing`` maps a column to the reason why cells of
    it may be empty, ``meanings`` to what it is.
    """

    title: str
    frame: pd.DataFrame
    columns: Mapping[str, str]
    note: str = ""
    preview: int = 0
    missing: Mapping[str, str] = field(default_factory=dict)
    meanings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, title: str, schema: Schema, frame: pd.DataFrame, columns: Iterable[str] = (), *, note: str = "", preview: int = 0) -> Table:
        """A table of the columns of ``schema`` that have a heading, in its order or in that of ``columns``."""
        chosen = [schema.column(name) for name in columns] or [column for column in schema.columns if column.heading]
        shown = pd.DataFrame({column.name: column.shown(frame[column.name]) for column in chosen})
        missing = {column.name: column.missing for column in chosen if column.missing}
        meanings = {column.name: column.meaning.replace("`", "") for column in chosen}
        return cls(title, shown, {column.name: column.title for column in chosen}, note, preview, missing, meanings)


@dataclass(frozen=True)
class GraphEdge:
    """An arrow from one node to another, with a word beside it."""

    source: str
    target: str
    label: str


@dataclass(frozen=True)
class Graph:
    """Nodes (id -> what is written on it) and arrows between them; ``marked`` is the node that the reader shall see first."""

    title: str
    nodes: Mapping[str, str]
    edges: Sequence[GraphEdge]
    marked: str = ""
    note: str = ""


Chart = Graph | StackedBars | Heatmap | StackedArea | Treemap | Timeline | Table


@dataclass(frozen=True)
class Section:
    """A chapter of the report: a title, one sentence that says how to read it, and its charts. ``name`` is its address (``#waiting``)."""

    title: str
    lead: str
    charts: Sequence[Chart] = field(default_factory=tuple)
    name: str = ""


@runtime_checkable
class Result(Protocol):
    """What every ``analyze(job)`` returns."""

    def findings(self) -> list[Finding]:
        """Sentences worth a reader's attention; empty when there is nothing to say."""

    def sections(self) -> list[Section]:
        """Chapters of the report, in reading order; empty when there is nothing to draw."""

    def json(self) -> dict[str, Any]:
        """Top-level keys that this analysis adds to the JSON of ``tracekit analyze`` (docs: the contract in docs/json.md)."""


def of_job(results: Mapping[str, Result]) -> list[Finding]:
    """The findings of all analyses as a reader gets them: one a cause, in the order of ``ranked``."""
    return ranked(merged(finding for result in results.values() for finding in result.findings()))


class Held:
    """A result whose findings, chapters and JSON are worked out once, when they are first asked for; ``result`` is the analysis' own."""

    def __init__(self, result: Result) -> None:
        self.result = result

    def findings(self) -> list[Finding]:
        """See Result."""
        return self._findings

    def sections(self) -> list[Section]:
        """See Result."""
        return self._sections

    def json(self) -> dict[str, Any]:
        """See Result."""
        return self._json

    @cached_property
    def _findings(self) -> list[Finding]:
        return self.result.findings()

    @cached_property
    def _sections(self) -> list[Section]:
        return self.result.sections()

    @cached_property
    def _json(self) -> dict[str, Any]:
        return self.result.json()
