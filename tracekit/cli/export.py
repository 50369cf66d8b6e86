"""``tracekit export``: one merged trace for Perfetto, tables as files, or a folder for Holistic Trace Analysis."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tracekit.cli.common import OutputFile, Stopwatch, job_options, load_options, voice_options
from tracekit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracekit.findings import Result
    from tracekit.job.load import LoadOptions
    from tracekit.job.model import Job

_EXAMPLES = """\b
Examples:
  tracekit export traces/ -o job.json.gz
  tracekit export traces/ --list
  tracekit export traces/ --table operations -o operations.parquet
  tracekit export traces/ --table breakdown_per_step --table findings -o job.xlsx
  tracekit export traces/ --hta for-hta

\b
Exit codes: 0 written; 2 nothing could be read, or an option is wrong."""


@click.command("export", epilog=_EXAMPLES)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("-o", "--output", type=OutputFile(), help="The file to write: a trace (.json, .json.gz) or tables (.csv, .parquet, .xlsx).")
@click.option("--table", "names", metavar="NAME", multiple=True, help="A table to write; several, or all, for .xlsx.")
@click.option("--hta", "folder", metavar="DIR", type=click.Path(file_okay=False), help="Write a folder for Holistic Trace Analysis.")
@click.option("--list", "listing", is_flag=True, help="Name the tables, with what they hold.")
@job_options
@voice_options
def command(
    paths: tuple[str, ...], output: str | None, names: tuple[str, ...], folder: str | None, listing: bool, quiet: bool, verbose: int,
    **given: Any,
) -> None:  # fmt: skip
    """Write what was read of a job for other tools.

    Without --table: one trace of all ranks on one clock, for ui.perfetto.dev. Every rank is a process named by its coordinate; streams are
    split by mesh axis; arrows lead from launch to kernel and from rank to rank of a collective; memory by owner is a counter, findings are
    markers. With --table: one table as CSV or Parquet, several as sheets of an Excel file. With --hta: a trace a rank, repaired and on one
    clock, for TraceAnalysis(trace_dir=DIR).
    """
    clock = Stopwatch(verbose > 0)
    if folder is not None and (output is not None or names or listing):
        raise click.UsageError("--hta writes a folder of its own; -o, --table and --list belong to another call")
    if output is None and not listing and folder is None:
        raise click.UsageError("say where to: -o FILE, or --hta DIR")
    if given["scheduler"] is not None or given["executor"] == "dask":
        raise click.UsageError("export reads on this machine: its scratch files have to be seen by all readers")
    tables = bool(names) or listing
    if output is not None:
        _suffix(output, tables)
    if folder is not None:
        _for_hta(folder, paths, load_options(given), quiet)
        return
    with tempfile.TemporaryDirectory(prefix="tracekit-export-") as scratch:
        job, results = _read(paths, load_options(given), None if tables else scratch, quiet)
        clock.lap("read")
        if listing:
            _print_tables(job, results)
        if output is None:
            return
        told = _write_tables(output, names, job, results) if tables else _write_trace(output, job, results)
        clock.lap("written")
    if not quiet:
        click.echo(f"{output}: {told}", err=True)


def _for_hta(folder: str, paths: tuple[str, ...], options: LoadOptions, quiet: bool) -> None:
    from tracekit.cli.progress import reading
    from tracekit.export import hta_files
    from tracekit.job.load import load_job

    if not Path(folder).parent.is_dir():
        raise UsageError(f"the folder {Path(folder).parent} does not exist", "create it first")
    with tempfile.TemporaryDirectory(prefix="tracekit-export-") as scratch:
        with reading(quiet) as progress:
            job = load_job(paths, options, {hta_files.REDUCER: hta_files.Spool(scratch)}, progress)
        events = hta_files.write(folder, job)
    if not quiet:
        told = f"{len(events)} rank{'s' if len(events) != 1 else ''}, {sum(events.values()):,} events"
        click.echo(f"{folder}: {told}. In Python: hta.trace_analysis.TraceAnalysis(trace_dir={folder!r})", err=True)


def _suffix(output: str, tables: bool) -> None:
    known, other = (".csv", ".parquet", ".xlsx"), (".json", ".json.gz")
    if not tables and output.endswith(known):
        raise UsageError(f"{output} is the name of a table, and none is named", "--table NAME; --list names them")
    if not output.endswith(known if tables else other):
        what = "a table" if tables else "a trace (--table NAME writes a table)"
        raise UsageError(f"{output} does not say how {what} is to be written", f"end the name with {', '.join(known if tables else other)}")


def _read(paths: tuple[str, ...], options: LoadOptions, scratch: str | None, quiet: bool) -> tuple[Job, Mapping[str, Result]]:
    from tracekit import analyses
    from tracekit.cli.progress import reading
    from tracekit.export.perfetto import REDUCER
    from tracekit.export.spool import Spool
    from tracekit.job.load import load_job

    reducers = analyses.reducers() | ({REDUCER: Spool(scratch)} if scratch is not None else {})
    with reading(quiet) as progress:
        job = load_job(paths, options, reducers, progress)
    return job, analyses.run(job)


def _write_trace(output: str, job: Job, results: Mapping[str, Result]) -> str:
    from tracekit.export import perfetto

    counts = perfetto.write(output, job, results)
    lost = f"; {counts['left_out']:,} slices that overlap others too often are left out" if counts["left_out"] else ""
    parts = (
        f"{counts['slices']:,} slices of {len(job.ranks)} rank{'s' if len(job.ranks) != 1 else ''}",
        f"{counts['launches']:,} launches",
        f"{counts['flows']:,} collectives and transfers between ranks",
        f"{counts['counters']:,} values of memory",
        f"{counts['findings']:,} findings",
    )
    return ", ".join(parts) + f"{lost}. Open it at https://ui.perfetto.dev"


def _print_tables(job: Job, results: Mapping[str, Result]) -> None:
    from tracekit.export.tables import job_tables

    found = job_tables(job, results)
    width = max(map(len, found))
    for name, table in found.items():
        click.echo(f"{name.ljust(width)}  {len(table.frame):>8,} rows  {table.about}")


def _write_tables(output: str, names: tuple[str, ...], job: Job, results: Mapping[str, Result]) -> str:
    from tracekit.export.tables import job_tables, select, write

    chosen = select(job_tables(job, results), names)
    write(output, chosen)
    return ", ".join(f"{table.name} ({len(table.frame):,} rows)" for table in chosen)
