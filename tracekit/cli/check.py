"""``tracekit check``: hold a run against a baseline; the exit code says whether anything got worse."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from tracekit.cli.common import OutputFile, Stopwatch, job_options, load_options, voice_options

if TYPE_CHECKING:
    from tracekit.checks.check import Checked

_EXAMPLES = """\b
Examples:
  tracekit check traces/ --baseline baseline.json
  tracekit check run1/ run2/ run3/ --baseline baseline.json --thresholds gate.toml --junit check.xml
  tracekit check traces/ --baseline baseline.json --markdown "$GITHUB_STEP_SUMMARY" --history history.jsonl

\b
Exit codes: 0 within all thresholds; 1 something got worse;
2 nothing could be compared, or not everything that the baseline asks for."""


@click.command("check", epilog=_EXAMPLES)
@click.argument("paths", metavar="RUN...", nargs=-1, required=True)
@click.option("--baseline", "baseline_file", metavar="FILE", type=click.Path(), required=True, help="What tracekit baseline wrote.")
@click.option("--thresholds", metavar="FILE", type=click.Path(), help="TOML with limits by quantity; they come behind the baseline's own.")
@click.option("--json", "json_file", type=OutputFile(dash=True), help="Write the outcome as JSON; - is standard output.")
@click.option("--junit", type=OutputFile(), help="Write the outcome as JUnit XML.")
@click.option("--markdown", type=OutputFile(), help="Append the outcome as Markdown, for a pull request.")
@click.option("--annotations/--no-annotations", default=None, help="Annotations of GitHub Actions; by default where it runs.")
@click.option("--history", type=OutputFile(), help="Append what was measured: lines of JSON, or Parquet where the name ends in .parquet.")
@click.option("-o", "--output", type=OutputFile(), help="Write the HTML page of the comparison.")
@job_options
@voice_options
def command(
    paths: tuple[str, ...],
    baseline_file: str,
    thresholds: str | None,
    output: str | None,
    quiet: bool,
    verbose: int,
    **given: Any,
) -> None:
    """Check one or several recordings of a run against a baseline.

    By default counts, bytes and persistent memory may not grow at all, the peak not by more than 2%, times not by more than 5% and noise.
    """
    from tracekit.checks.baseline import read_baseline
    from tracekit.checks.check import check
    from tracekit.checks.thresholds import read_thresholds, thresholds_of
    from tracekit.cli.recordings import read_side

    clock = Stopwatch(verbose > 0)
    baseline = read_baseline(baseline_file)
    limits = thresholds_of(baseline.thresholds, baseline_file)
    limits += read_thresholds(thresholds) if thresholds is not None else []
    new = read_side(paths, load_options(given), quiet)
    clock.lap("read")
    checked = check(baseline.runs, new, limits)
    clock.lap("compared")
    _write(checked, new[0].name, output, quiet, given)
    if checked.problem:
        raise_not_compared(checked, baseline_file)
    sys.exit(checked.exit_code)


def raise_not_compared(checked: Checked, baseline_file: str) -> None:
    """Raises InputError with what could not be compared."""
    from tracekit.errors import InputError

    raise InputError(f"{baseline_file}: {checked.problem}", 'record it again, renew the baseline, or set its threshold to "ignore"')


def _write(checked: Checked, name: str, page: str | None, quiet: bool, given: dict[str, Any]) -> None:
    from tracekit.cli.outputs import write_bytes, write_json
    from tracekit.report import check as forms
    from tracekit.report.document import clean

    document = clean(checked.json())
    if page is not None:
        from tracekit.report.compare import write

        write(page, checked.comparison, checked.causes)
    if given["junit"] is not None:
        write_bytes(given["junit"], forms.junit(document))
    if given["markdown"] is not None:
        with open(given["markdown"], "a", encoding="utf-8") as stream:  # noqa: PTH123 - a pipe or a summary that others write to, too
            stream.write(forms.markdown(document))
    if given["json_file"] is not None:
        write_json(given["json_file"], document)
    told = sys.stderr if given["json_file"] == "-" else sys.stdout
    if not quiet:
        from tracekit.cli.compare_text import print_check

        print_check(checked, told)
    annotate = given["annotations"]
    if annotate if annotate is not None else os.environ.get("GITHUB_ACTIONS") == "true":
        for line in forms.workflow_commands(document):
            print(line, file=told)
    if given["history"] is not None:
        _append(given["history"], checked, name)


def _append(path: str, checked: Checked, name: str) -> None:
    from tracekit.checks import history
    from tracekit.cli.outputs import write_bytes

    outcome = ("passed", "fell", "not_compared")[checked.exit_code]
    commit = os.environ.get("GITHUB_SHA") or os.environ.get("CI_COMMIT_SHA") or ""
    added = history.entry(checked.comparison.changes, time=time.time(), name=name, commit=commit, outcome=outcome)
    write_bytes(path, history.encode(path, added))
