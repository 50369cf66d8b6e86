"""``tracekit baseline``: keep what a run measured, for ``tracekit check`` to hold later runs against."""

from __future__ import annotations

from typing import Any

import click

from tracekit.cli.common import OutputFile, Stopwatch, job_options, load_options, voice_options

_EXAMPLES = """\b
Examples:
  tracekit baseline traces/ -o baseline.json
  tracekit baseline run1/ run2/ run3/ run4/ run5/ -o baseline.json   five recordings: smaller changes are found
  tracekit baseline traces/ --thresholds gate.toml -o baseline.json

\b
Exit codes: 0 written; 2 nothing could be read, or an option is wrong."""


@click.command("baseline", epilog=_EXAMPLES)
@click.argument("paths", metavar="RUN...", nargs=-1, required=True)
@click.option("-o", "--output", type=OutputFile(), required=True, help="The baseline to write.")
@click.option("--thresholds", metavar="FILE", type=click.Path(), help="TOML whose thresholds are kept in the baseline.")
@job_options
@voice_options
def command(paths: tuple[str, ...], output: str, thresholds: str | None, quiet: bool, verbose: int, **given: Any) -> None:
    """Write the figures of one or several recordings of a run; each RUN is a folder of traces or a file that analyze --json wrote.

    Thresholds that an older baseline of this name holds are kept.
    """
    from tracekit.checks.baseline import baseline_of, encode
    from tracekit.cli.outputs import write_bytes
    from tracekit.cli.recordings import read_side
    from tracekit.report.text import visible

    clock = Stopwatch(verbose > 0)
    kept = _thresholds(thresholds, output)
    runs = read_side(paths, load_options(given), quiet)
    clock.lap("read")
    write_bytes(output, encode(baseline_of(runs, kept)))
    if not quiet:
        count = len({quantity.key for run in runs for quantity in run.quantities})
        click.echo(f"{len(runs)} recording{'s' if len(runs) > 1 else ''}, {count} quantities: {visible(output)}")


def _thresholds(file: str | None, output: str) -> dict[str, Any]:
    """Thresholds of the TOML, else those of the baseline that is replaced."""
    from pathlib import Path

    from tracekit.checks.baseline import read_baseline
    from tracekit.checks.thresholds import read_thresholds
    from tracekit.errors import InputError

    if file is not None:
        read = read_thresholds(file)
        return {t.pattern: {"limit": "ignore" if t.limit is None else t.limit, "direction": t.direction} for t in read}
    try:
        return dict(read_baseline(output).thresholds) if Path(output).is_file() else {}
    except InputError:
        return {}
