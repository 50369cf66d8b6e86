"""``tracekit query``: SQL over the tables of a job."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tracekit.cli.common import OutputFile, job_options, load_options, voice_options
from tracekit.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("table", "csv", "json", "parquet")
#: Rows that a terminal shows.
MOST_ROWS = 100
#: A statement longer than this is no question of a person.
LONGEST_SQL = 100_000
_EXAMPLES = """\b
Examples:
  tracekit query traces/ "SELECT axis, sum(sent_bytes) FROM operations GROUP BY axis"
  tracekit query traces/ --schema
  tracekit query traces/ "FROM events WHERE category = 'kernel' AND dur_ns > 1e6"
  tracekit query traces/ "SELECT * FROM matches WHERE NOT complete" --format csv
  tracekit query traces/ "FROM kernels ORDER BY total_ns DESC LIMIT 20" -o kernels.parquet

\b
Exit codes: 0 answered; 2 nothing could be read, or the statement is wrong."""


@click.command("query", epilog=_EXAMPLES)
@click.argument("given_inputs", metavar="PATH... SQL", nargs=-1, required=True)
@click.option("--schema", is_flag=True, help="Name every table and column, with unit and meaning; no SQL is asked for.")
@click.option("--format", "form", type=click.Choice(FORMATS), help="How the answer is written; by the name of -o otherwise.")
@click.option("-o", "--output", type=OutputFile(dash=True), help="Write the answer here; - is standard output.")
@job_options
@voice_options
def command(
    given_inputs: tuple[str, ...], schema: bool, form: str | None, output: str | None, quiet: bool, verbose: int, **given: Any
) -> None:
    """Ask SQL of the tables of a job (DuckDB). The statement stands last; - reads it from standard input.

    Tables can only be read, and a statement can reach nothing else: no file, no network. The table events has every event of every trace;
    it is written to a scratch file first, only when the statement names it.
    """
    del verbose
    if not schema and len(given_inputs) < 2:
        raise click.UsageError("give the traces, then the statement: tracekit query traces/ 'SELECT ...'")
    paths, sql = (given_inputs, "") if schema else (given_inputs[:-1], _statement(given_inputs[-1]))
    form = form or {".csv": "csv", ".json": "json", ".parquet": "parquet"}.get(Path(output or "").suffix, "table")
    if form == "parquet" and output in (None, "-"):
        raise click.UsageError("Parquet is written to a file: -o FILE")
    if form == "table" and output is not None:
        raise click.UsageError("a table is for the terminal; say --format csv or json, or end the file's name so")
    frame = _answer(paths, sql, schema, given, quiet)
    if form == "table":
        print_frame(frame)
    else:
        write_frame(frame, form, output or "-")


def _statement(text: str) -> str:
    sql = sys.stdin.read(LONGEST_SQL + 1) if text == "-" else text
    if len(sql) > LONGEST_SQL:
        raise UsageError("the statement is longer than 100,000 characters", "ask a shorter question")
    if Path(text).is_file() or (text and Path(text).is_dir()):
        raise UsageError(
            f"{text} is a {'folder' if Path(text).is_dir() else 'file'}, and the last argument is the statement",
            "tracekit query PATH... 'SELECT ...'",
        )
    return sql


def _answer(paths: tuple[str, ...], sql: str, schema: bool, given: dict[str, Any], quiet: bool) -> pd.DataFrame:
    from tracekit import analyses
    from tracekit.cli.progress import reading
    from tracekit.export import events, query
    from tracekit.export.tables import job_tables
    from tracekit.job.load import load_job

    wanted = not schema and events.mentioned(sql)
    if wanted and (given["scheduler"] is not None or given["executor"] == "dask"):
        raise click.UsageError("the table events is read on this machine: its scratch files have to be seen by all readers")
    options = load_options(given)
    with tempfile.TemporaryDirectory(prefix="tracekit-query-") as scratch:
        reducers = analyses.reducers() | ({events.REDUCER: events.EventSpool(scratch)} if wanted else {})
        with reading(quiet) as progress:
            job = load_job(paths, options, reducers, progress)
        tables = job_tables(job, analyses.run(job))
        if schema:
            return query.schema(tables | {"events": events.documented()})
        with query.Database(tables, options.memory_limit) as database:
            if wanted:
                database.add("events", events.gathered(job, scratch))
            return database.ask(sql)


def print_frame(frame: pd.DataFrame) -> None:
    """A frame in a terminal, its first rows, with every cell whole."""
    from tracekit.cli.terminal import console, fitted, text

    out = console(sys.stdout)
    shown = frame.head(MOST_ROWS)
    numeric = [
        frame[name].dtype.kind in "iuf" or str(frame[name].dtype) in ("Int64", "Int32", "Int16", "Float64") for name in frame.columns
    ]
    rows = [[text(_cell(value)) for value in row] for row in shown.itertuples(index=False)]
    out.print(fitted(out, [str(name) for name in frame.columns], [not number for number in numeric], rows))
    more = f" (the first {MOST_ROWS} are shown; --format csv writes all)" if len(frame) > MOST_ROWS else ""
    out.print(text(f"{len(frame):,} row{'s' if len(frame) != 1 else ''}{more}", "dim"))


def _cell(value: Any) -> str:
    import pandas as pd

    if value is None or value is pd.NA or value is pd.NaT or (isinstance(value, float) and value != value):
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def write_frame(frame: pd.DataFrame, form: str, output: str) -> None:
    """A frame as csv, json or parquet to a file, or to standard output for ``-``."""
    from tracekit.export import query
    from tracekit.files import write_atomically, write_by

    if form == "parquet":
        write_by(Path(output), lambda name: frame.to_parquet(name, index=False))
        return
    data = query.as_csv(frame) if form == "csv" else query.as_json(frame)
    if output == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:
        write_atomically(output, [data])
