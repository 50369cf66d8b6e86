"""tracekit in Python: ``tracekit.load(path)`` reads a job; its tables are DataFrames, its analyses functions, its charts plotly figures.

    import tracekit
    job = tracekit.load("traces/")
    job                                  # a summary in a notebook
    job.operations                       # a DataFrame; job.columns("operations") says what every column means
    job.breakdown().tables["breakdown_per_step"]
    job.overlap().figures()[0].show()
    job.sql("SELECT axis, sum(sent_bytes) FROM operations GROUP BY axis")

Integers that are not known are ``<NA>``, never 0. Times end in ``_ns``; moments are Unix nanoseconds on the job's clock.
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pandas as pd

from tracekit import analyses
from tracekit.errors import UsageError
from tracekit.export.tables import FINDINGS, JobTable, findings_frame, job_tables, public
from tracekit.findings import Held, Result, Table, Timeline, of_job, ranked
from tracekit.job import model
from tracekit.job.load import LoadOptions, load_job

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from tracekit.mesh.mesh import Mesh

__all__ = ["Analysis", "Job", "load"]


def load(
    path: str | os.PathLike[str],
    *more: str | os.PathLike[str],
    mesh: str | None = None,
    ranks: Iterable[int] | None = None,
    steps: tuple[int | None, int | None] | None = None,
    gpus_per_node: int | None = None,
    jobs: int | None = None,
    cache: str | os.PathLike[str] | bool = True,
    hta: bool = False,
) -> Job:
    """Read the traces and snapshots of every rank under the paths (files, folders, globs, URLs).

    ``mesh``: axes, outermost first ("pp=2,tp=4"), where the traces do not say; ``ranks``: only these; ``steps``: a half-open range of step
    numbers; ``jobs``: files read at one time; ``cache``: where read traces are kept, True for the user's folder, False for nowhere;
    ``hta``: keep what ``Job.hta`` needs (a frame a rank).
    Raises ``tracekit.errors.InputError`` when nothing could be read; what was odd about single files is in ``Job.files``.
    """
    from tracekit.readers.cache_folder import default_directory

    folder = str(default_directory()) if cache is True else None if cache is False else os.fspath(cache)
    options = LoadOptions(
        mesh=mesh,
        ranks=None if ranks is None else frozenset(ranks),
        steps=steps,
        gpus_per_node=gpus_per_node,
        jobs=jobs,
        cache=folder,
    )
    reducers = analyses.reducers()
    if hta:
        from tracekit.export import hta as frames

        reducers[frames.REDUCER] = frames.reduce
    return Job(load_job([os.fspath(one) for one in (path, *more)], options, reducers))


class Job:
    """A job that was read. Tables are made when they are asked for, analyses run once."""

    def __init__(self, read: model.Job) -> None:
        self._read = read

    @cached_property
    def _results(self) -> dict[str, Result]:
        return analyses.run(self._read)

    @cached_property
    def _tables(self) -> dict[str, JobTable]:
        return job_tables(self._read, self._results)

    @property
    def tables(self) -> dict[str, str]:
        """Every table by its name, with what a row of it is."""
        return {name: table.about for name, table in self._tables.items()}

    def table(self, name: str) -> pd.DataFrame:
        """A copy of one table. UsageError for a name that is none."""
        return self._table(name).frame.copy()

    def columns(self, name: str) -> pd.DataFrame:
        """What the columns of a table are: name, type, unit, meaning."""
        table = self._table(name)
        rows = [(one.name, str(table.frame[one.name].dtype), one.unit, one.meaning) for one in table.columns]
        return pd.DataFrame(rows, columns=["column", "type", "unit", "meaning"])

    def _table(self, name: str) -> JobTable:
        if name not in self._tables:
            raise UsageError(f"there is no table {name!r}", f"there are {', '.join(self._tables)}")
        return self._tables[name]

    @property
    def ranks(self) -> list[int]:
        """Global ranks that were read."""
        return list(self._read.ranks)

    @property
    def world_size(self) -> int | None:
        """Ranks of the whole job; None where nothing says so."""
        return self._read.world_size

    @property
    def mesh(self) -> Mesh:
        """Axes and every rank's coordinate."""
        return self._read.mesh

    @property
    def operations(self) -> pd.DataFrame:
        """One row a collective or transfer of one rank."""
        return self.table("operations")

    @property
    def matches(self) -> pd.DataFrame:
        """One row a collective as all its ranks saw it."""
        return self.table("matches")

    @property
    def steps(self) -> pd.DataFrame:
        """One row a step of one rank."""
        return self.table("steps")

    @property
    def findings(self) -> pd.DataFrame:
        """One row a sentence about the job, the most severe first."""
        return self.table("findings")

    @property
    def files(self) -> pd.DataFrame:
        """One row a file that was found, with what was odd about it."""
        return self.table("files")

    def analysis(self, name: str) -> Analysis:
        """One analysis by its name. UsageError for a name that is none; ``tracekit.api.names()`` lists them."""
        if name not in self._results:
            raise UsageError(f"there is no analysis called {name!r}", f"there are {', '.join(self._results)}")
        own = {key: table.frame for key, table in self._tables.items() if key == name or key.startswith(f"{name}_")}
        return Analysis(name, self._results[name], own)

    def breakdown(self) -> Analysis:
        """Where the time of a step goes: compute, exposed communication and copies, idle."""
        return self.analysis("breakdown")

    def overlap(self) -> Analysis:
        """Communication that compute hides, and whose it is where it does not."""
        return self.analysis("overlap")

    def idle(self) -> Analysis:
        """Why a device had nothing to do."""
        return self.analysis("idle")

    def collectives(self) -> Analysis:
        """Every collective summed by group, kind, purpose and size, with its bandwidth."""
        return self.analysis("collectives")

    def stragglers(self) -> Analysis:
        """Which rank makes the others wait."""
        return self.analysis("stragglers")

    def pipeline(self) -> Analysis:
        """What each stage does when, and the bubble beside the ideal one."""
        return self.analysis("pipeline")

    def experts(self) -> Analysis:
        """Tokens of every expert, balance and drops."""
        return self.analysis("experts")

    def memory(self) -> Analysis:
        """The peak of every rank, and who owns it."""
        return self.analysis("memory")

    def kernels(self) -> Analysis:
        """Kernels and copies by name."""
        return self.analysis("kernels")

    def operators(self) -> Analysis:
        """Operators by name, with the device time that they launched."""
        return self.analysis("operators")

    def comparison(self) -> Analysis:
        """The analytical model beside what was measured."""
        return self.analysis("comparison")

    def sql(self, statement: str) -> pd.DataFrame:
        """The answer of one SELECT over all tables (needs duckdb). It can read the tables and nothing else."""
        from tracekit.export.query import Database

        with Database(self._tables) as database:
            return database.ask(statement)

    def hta(self) -> Any:
        """``TraceAnalysis`` of Holistic Trace Analysis on what was read; the job was loaded with ``hta=True``."""
        from tracekit.export.hta import analysis

        return analysis(self._read)

    def json(self) -> dict[str, Any]:
        """The document that ``tracekit analyze --json`` writes (docs/json.md)."""
        from tracekit.report.document import document

        return document(self._read, self._results)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the HTML report."""
        from tracekit.report import html as page

        page.write(path, self._results, self.json())

    def __repr__(self) -> str:
        steps = f"steps {self._read.steps[0]} to {self._read.steps[-1]}" if self._read.steps else "no steps"
        of = f" of {self.world_size}" if self.world_size is not None else ""
        axes = ", ".join(f"{axis.name}={axis.size}" for axis in self.mesh.axes) or "no mesh known"
        return f"<tracekit job: {len(self.ranks)}{of} ranks, {axes}, {steps}, {len(self._tables['findings'].frame)} findings>"

    def _repr_html_(self) -> str:
        """The first findings and the tables, for a notebook. Names are escaped: they come from the traces."""
        found = of_job(self._results)[:8]
        rows = "".join(
            f"<tr><td>{html.escape(one.severity)}</td><td style='text-align:left'>{html.escape(one.text)}</td></tr>" for one in found
        )
        names = ", ".join(f"<code>{html.escape(name)}</code> ({len(table.frame):,})" for name, table in self._tables.items())
        return f"<p><b>{html.escape(repr(self)[1:-1])}</b></p><table>{rows}</table><p>Tables: {names}</p>"


@dataclass(frozen=True)
class Analysis:
    """What one analysis found: ``tables`` by name, its findings, JSON and figures."""

    name: str
    _result: Result
    tables: Mapping[str, pd.DataFrame]

    @property
    def result(self) -> Any:
        """The analysis' own result, as tracekit's parts hand it on; its fields may change."""
        return self._result.result if isinstance(self._result, Held) else self._result

    @property
    def findings(self) -> pd.DataFrame:
        """Its sentences, the most severe first."""
        return public(findings_frame(ranked(self._result.findings())), FINDINGS.columns)

    @property
    def json(self) -> dict[str, Any]:
        """Its keys of the JSON document."""
        return dict(self._result.json())

    def figures(self) -> list[Figure]:
        """Its charts as plotly figures, titled, in the order of the report; plotly is imported now."""
        from plotly.graph_objects import Figure

        from tracekit.report.figures import figure

        found = []
        for chart in (chart for section in self._result.sections() for chart in section.charts):
            drawn = None if isinstance(chart, Table | Timeline) else figure(chart)
            if drawn is not None:
                found.append(
                    Figure(drawn["data"], drawn["layout"]).update_layout(title={"text": html.escape(chart.title)}, margin={"t": 90})
                )
        return found

    def shown(self) -> dict[str, pd.DataFrame]:
        """Its tables as the report shows them: by title, with headings and units for a reader."""
        charts = [chart for section in self._result.sections() for chart in section.charts if isinstance(chart, Table)]
        return {chart.title: chart.frame[list(chart.columns)].rename(columns=dict(chart.columns)) for chart in charts}

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self.tables)} tables, {len(self._result.findings())} findings>"

    def _repr_html_(self) -> str:
        """Findings, then the tables."""
        sentences = "".join(f"<li>{html.escape(one.text)}</li>" for one in ranked(self._result.findings()))
        parts = [f"<p><b>{html.escape(self.name)}</b></p><ul>{sentences}</ul>"]
        parts += [f"<p>{html.escape(title)}</p>{frame.to_html(max_rows=12, escape=True)}" for title, frame in self.shown().items()]
        return "".join(parts)


def names() -> list[str]:
    """Every analysis, in reading order."""
    return list(analyses.modules())
