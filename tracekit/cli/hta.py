"""``tracekit hta``: four analyses of Holistic Trace Analysis on what tracekit has read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from tracekit.cli.common import OutputFile, job_options, load_options, voice_options
from tracekit.cli.help import Group
from tracekit.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

    from tracekit.job.model import Job

_EXAMPLES = """\b
Examples:
  tracekit hta queue-length traces/
  tracekit hta kernel-sequences traces/ --operator aten::linear --rank 0
  tracekit hta critical-path traces/ --rank 0 --annotation ProfilerStep
  tracekit hta cupti-counters traces/ --format csv

\b
Exit codes: 0 done; 2 nothing could be read, an option is wrong, or the
extra hta is not installed."""


@click.group("hta", cls=Group, epilog=_EXAMPLES)
def command() -> None:
    """Run analyses of Holistic Trace Analysis (the package traceinsight) on tracekit's reading: exact times, no second parse."""


def _options(function: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--format", "form", type=click.Choice(["table", "csv", "json"]), default="table", help="How the answer is written."),
        click.option("-o", "--output", type=OutputFile(), help="Write the answer to a file, as CSV or JSON."),
        job_options,
        voice_options,
    ):  # fmt: skip
        function = option(function)
    return click.argument("paths", metavar="PATH...", nargs=-1, required=True)(function)


def _read(paths: tuple[str, ...], given: dict[str, Any]) -> Job:
    from tracekit.cli.progress import reading
    from tracekit.export import hta
    from tracekit.job.load import load_job

    if given["scheduler"] is not None or given["executor"] == "dask":
        raise click.UsageError("hta reads on this machine")
    with reading(given.pop("quiet")) as progress:
        return load_job(paths, load_options(given), {hta.REDUCER: hta.reduce}, progress)


def _chosen(job: Job, rank: int) -> int:
    if rank not in job.ranks:
        raise UsageError(f"rank {rank} was not read", f"there are {', '.join(map(str, job.ranks[:16]))}")
    return rank


def _put(frame: pd.DataFrame, form: str, output: str | None) -> None:
    from tracekit.cli.query import print_frame, write_frame

    if form == "table" and output is None:
        print_frame(frame)
    else:
        write_frame(frame, "json" if form == "json" or (output or "").endswith(".json") else "csv", output or "-")


@command.command("queue-length")
@_options
def queue_length(paths: tuple[str, ...], form: str, output: str | None, verbose: int, **given: Any) -> None:
    """How many launched operations wait on each stream: a full queue blocks the host, an empty one the device."""
    del verbose
    from tracekit.export import hta

    job = _read(paths, given)
    _put(hta.queue_length(job, job.ranks), form, output)


@command.command("kernel-sequences")
@click.option("--operator", default="aten::linear", show_default=True, help="The operator that launches them.")
@click.option("--rank", default=0, show_default=True, help="The rank that is looked at.")
@click.option("--least", type=click.IntRange(1, 1000), default=3, show_default=True, help="Kernels of a sequence, at least.")
@click.option("--most", type=click.IntRange(1, 1000), default=5, show_default=True, help="Sequences that are named.")
@_options
def kernel_sequences(
    paths: tuple[str, ...], operator: str, rank: int, least: int, most: int, form: str, output: str | None, verbose: int, **given: Any
) -> None:
    """Sequences of kernels that an operator launches again and again: what could be fused."""
    del verbose
    from tracekit.export import hta

    job = _read(paths, given)
    _put(hta.kernel_sequences(job, _chosen(job, rank), operator, least, most), form, output)


@command.command("critical-path")
@click.option("--rank", default=0, show_default=True, help="The rank that is looked at.")
@click.option("--annotation", default="ProfilerStep", show_default=True, help="The range that is looked through.")
@click.option("--instance", type=click.IntRange(0), default=1, show_default=True, help="Which of them, from 0.")
@_options
def critical_path(
    paths: tuple[str, ...], rank: int, annotation: str, instance: int, form: str, output: str | None, verbose: int, **given: Any
) -> None:
    """What bounds the critical path of one rank through one step: kernels, launches, the host, communication."""
    del verbose
    from tracekit.export import hta

    job = _read(paths, given)
    _put(hta.critical_path(job, _chosen(job, rank), annotation, instance), form, output)


@command.command("cupti-counters")
@_options
def cupti_counters(paths: tuple[str, ...], form: str, output: str | None, verbose: int, **given: Any) -> None:
    """Counters of CUPTI's range profiler by kernel and operator. HTA reads the file itself: tracekit's tables do not hold them."""
    del verbose
    from tracekit.export import hta

    job = _read(paths, given)
    files = {window.rank: window.coverage.file for window in reversed(job.traced) if window.rank is not None}
    _put(hta.cupti_counters(files, job.ranks), form, output)
