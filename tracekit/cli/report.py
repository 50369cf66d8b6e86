"""``tracekit report FILE``: a report, or Markdown, of what ``analyze --json`` has saved."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tracekit.cli.common import OutputFile

_EPILOG = """\b
Examples:
  tracekit report run1.json -o run1.html
  tracekit report run1.json --markdown -

\b
Exit codes: 0 written; 2 the file is not what analyze --json writes."""
DEFAULT = "tracekit-report.html"


@click.command("report", epilog=_EPILOG)
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("-o", "--output", type=OutputFile(), help=f"Where the HTML goes; {DEFAULT} otherwise.")
@click.option("--markdown", "markdown_file", type=OutputFile(dash=True), help="Write Markdown, and no HTML unless -o asks for it.")
@click.option("--open", "open_report", is_flag=True, help="Open the report in the browser.")
def command(file: str, output: str | None, markdown_file: str | None, open_report: bool) -> None:
    """Make a report of FILE, which tracekit analyze --json has written: the traces are not needed.

    Charts that need the traces (timelines, curves of memory) are left out; every table is there.
    """
    from tracekit.cli.outputs import write_bytes
    from tracekit.report import html
    from tracekit.report.markdown import summary
    from tracekit.report.saved import Saved, load

    document = load(file)
    if markdown_file is not None:
        write_bytes(markdown_file, summary(document).encode())
    page = output or (None if markdown_file is not None else DEFAULT)
    if page is None:
        return
    replaced = " (the one there was is replaced)" if Path(page).is_file() else ""
    html.write(page, {"saved": Saved(document)}, document)
    click.echo(f"Report: {page}{replaced}", file=sys.stderr if markdown_file == "-" else sys.stdout)
    if open_report:
        click.launch(page)
