"""``tracekit doctor PATH``: what a recording cannot answer, and how to record it."""

from __future__ import annotations

import sys
from typing import Any

import click

from tracekit.cli.common import OutputFile, job_options, load_options, voice_options

_EPILOG = """\b
Examples:
  tracekit doctor traces/
  tracekit doctor traces/ --json - | jq '.[] | select(.state != "yes")'

\b
Exit codes: 0 looked at, whatever was found; 2 nothing could be read, or an option is wrong."""
_STYLES = {"yes": "green", "partly": "yellow", "no": "bold red"}


@click.command("doctor", epilog=_EPILOG)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--json", "json_file", type=OutputFile(dash=True), help="Write the answers as JSON; - is standard output.")
@job_options
@voice_options
def command(paths: tuple[str, ...], json_file: str | None, quiet: bool, verbose: int, **given: Any) -> None:  # noqa: ARG001
    """Say which questions the recording under PATH can answer, which it cannot, and how to record what is missing."""
    from dataclasses import asdict

    from rich.text import Text

    from tracekit import analyses
    from tracekit.cli.outputs import write_json
    from tracekit.cli.progress import reading
    from tracekit.cli.terminal import console, fitted, print_grid, text
    from tracekit.job.load import load_job
    from tracekit.report.doctor import answers
    from tracekit.report.document import document

    with reading(quiet) as progress:
        job = load_job(paths, load_options(given), analyses.reducers(), progress)
    found = answers(document(job, analyses.run(job)))
    if json_file is not None:
        write_json(json_file, [asdict(answer) for answer in found])
    if quiet or json_file == "-":
        return
    out = console(sys.stdout)
    rows = [[text(each.question), Text(each.state, _STYLES[each.state]), text(each.why), text(each.how)] for each in found]
    good = sum(each.state == "yes" for each in found)
    print_grid(
        out, f"{good} of {len(found)} questions can be answered", fitted(out, ["", "", "why not", "how to record it"], [True] * 4, rows)
    )
