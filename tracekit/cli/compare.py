"""``tracekit compare``: what changed between two runs, by how much, and why; or a quantity over many runs."""

from __future__ import annotations

import sys
from typing import Any

import click

from tracekit.cli.common import OutputFile, Stopwatch, job_options, load_options, voice_options

DEFAULT_PAGE = "tracekit-compare.html"
_EXAMPLES = """\b
Examples:
  tracekit compare before/ after/
  tracekit compare --base b1/ --base b2/ --new n1/ --new n2/ -o change.html
  tracekit compare baseline.json traces/ --no-report --json - | jq .causes
  tracekit compare --history history.jsonl --quantity 'step.*' -o trend.html

\b
Exit codes: 0 compared; 2 nothing could be compared, or an option is wrong."""


@click.command("compare", epilog=_EXAMPLES)
@click.argument("paths", metavar="[BASE NEW]", nargs=-1)
@click.option("--base", "bases", metavar="PATH", multiple=True, help="One more recording of the base; several narrow the noise.")
@click.option("--new", "news", metavar="PATH", multiple=True, help="One more recording of the new side.")
@click.option("--history", metavar="FILE", type=click.Path(), help="Draw what checks appended to this file instead.")
@click.option("--quantity", "patterns", metavar="PATTERN", multiple=True, help="With --history: only quantities whose key fits (step.*).")
@click.option("-o", "--output", type=OutputFile(), help=f"Write the HTML page here instead of {DEFAULT_PAGE} in the current folder.")
@click.option("--no-report", is_flag=True, help="Write no HTML page.")
@click.option("--json", "json_file", type=OutputFile(dash=True), help="Write the comparison as JSON; - is standard output.")
@job_options
@voice_options
def command(
    paths: tuple[str, ...],
    bases: tuple[str, ...],
    news: tuple[str, ...],
    history: str | None,
    patterns: tuple[str, ...],
    output: str | None,
    no_report: bool,
    json_file: str | None,
    quiet: bool,
    verbose: int,
    **given: Any,
) -> None:
    """Compare two runs. BASE and NEW are folders of traces, files that analyze --json wrote, or baselines.

    Counts and bytes are compared exactly, times against the runs' own noise: more recordings of a side find smaller changes.
    """
    if no_report and output is not None:
        raise click.UsageError("--output and --no-report exclude each other")
    page = None if no_report else output or OutputFile().convert(DEFAULT_PAGE, None, None)
    if history is not None:
        if paths or bases or news:
            raise click.UsageError("--history draws a file of earlier checks; it takes no BASE and NEW")
        _trend(history, patterns, page, quiet)
        return
    if patterns:
        raise click.UsageError("--quantity chooses among the quantities of --history")
    base, new = _sides(paths, bases, news)
    _compare(base, new, page, json_file, quiet, Stopwatch(verbose > 0), given)


def _sides(paths: tuple[str, ...], bases: tuple[str, ...], news: tuple[str, ...]) -> tuple[list[str], list[str]]:
    if len(paths) == 2:
        return [paths[0], *bases], [paths[1], *news]
    if len(paths) == 1 and bases and not news:
        return list(bases), [paths[0]]
    if not paths and bases and news:
        return list(bases), list(news)
    raise click.UsageError("name two runs: tracekit compare BASE NEW, or --base PATH and --new PATH as often as there are recordings")


def _compare(
    base: list[str], new: list[str], page: str | None, json_file: str | None, quiet: bool, clock: Stopwatch, given: dict[str, Any]
) -> None:
    from tracekit.cli.outputs import write_json
    from tracekit.cli.recordings import read_side
    from tracekit.compare.causes import causes
    from tracekit.compare.changes import compare
    from tracekit.report.compare import document, write

    options = load_options(given)
    sides = read_side(base, options, quiet), read_side(new, options, quiet)
    clock.lap("read")
    comparison = compare(*sides)
    found = causes(comparison.changes)
    clock.lap("compared")
    if page is not None:
        write(page, comparison, found)
    if json_file is not None:
        write_json(json_file, document(comparison, found))
    clock.lap("written")
    if not quiet:
        from tracekit.cli.compare_text import print_comparison

        print_comparison(comparison, found, page, sys.stderr if json_file == "-" else sys.stdout)


def _trend(history: str, patterns: tuple[str, ...], page: str | None, quiet: bool) -> None:
    from tracekit.checks.history import read
    from tracekit.errors import InputError
    from tracekit.report import trend
    from tracekit.report.text import visible

    entries = read(history)
    drawn = trend.chosen([trend.Point(e.time_unix_s, e.name, e.commit, e.outcome, e.values, e.units) for e in entries], patterns)
    if not drawn:
        raise InputError(
            f"{history}: no quantity fits {' '.join(patterns) or 'step.*'}", "leave --quantity out, or write a pattern like 'memory.*'"
        )
    if page is not None:
        trend.write(page, history, drawn, len(entries))
    if not quiet:
        for quantity in drawn:
            click.echo(visible(trend.line(quantity)))
        if page is not None:
            click.echo(f"Page: {visible(page)}")
