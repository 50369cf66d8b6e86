"""``tracekit analyze``: traces in; a summary, one HTML report and JSON out."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tracekit.cli.common import OutputFile, Stopwatch, job_options, load_options, voice_options
from tracekit.errors import PartialInputError, UsageError

if TYPE_CHECKING:
    from tracekit.findings import Result
    from tracekit.job.model import Job
    from tracekit.job.options import LoadOptions
    from tracekit.readers.sources import Found
    from tracekit.report.answers import Answer

DEFAULT_REPORT = "tracekit-report.html"
_EXAMPLES = """\b
Examples:
  tracekit analyze traces/
  tracekit analyze 'traces/*.json.gz' -o run1.html --json run1.json
  tracekit analyze traces/ --what-if bandwidth:dp_shard=2 --what-if no_straggler
  tracekit analyze s3://bucket/run1 --mesh pp=2,dp_shard=4,tp=2 --steps 2:5
  tracekit analyze traces/ --no-report --json - | jq .findings
  tracekit analyze traces/ --markdown ticket.md --open

\b
Exit codes: 0 analyzed; 2 nothing could be read, or an option is wrong;
3 with --strict, when a file or rank is missing or could not be read whole."""


@click.command("analyze", epilog=_EXAMPLES)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("-o", "--output", type=OutputFile(), help=f"Write the HTML report here instead of {DEFAULT_REPORT} in the current folder.")
@click.option("--no-report", is_flag=True, help="Write no HTML report.")
@click.option("--json", "json_file", type=OutputFile(dash=True), help="Write all figures as JSON; - is standard output.")
@click.option("--markdown", "markdown_file", type=OutputFile(dash=True), help="Write the answer as Markdown, for a ticket.")
@click.option("--open", "open_report", is_flag=True, help="Open the report in the browser when it is written.")
@click.option("--anonymize", is_flag=True, help="Leave hosts, paths and the program's own names out of everything that is written.")
@click.option("--operations", is_flag=True, help="Put every matched operation into the JSON.")
@click.option(
    "--what-if",
    "what_if",
    multiple=True,
    metavar="SCENARIO",
    help="Replay the job with something otherwise: bandwidth:AXIS=2, microbatches=N, perfect_overlap, no_straggler, equal_stages, no_host. "
    "Can be given several times.",
)
@click.option("--strict", is_flag=True, help="Exit with 3 when anything of the job is missing or could not be read whole.")
@job_options
@voice_options
def command(
    paths: tuple[str, ...],
    output: str | None,
    no_report: bool,
    json_file: str | None,
    markdown_file: str | None,
    open_report: bool,
    anonymize: bool,
    operations: bool,
    what_if: tuple[str, ...],
    strict: bool,
    quiet: bool,
    verbose: int,
    **given: Any,
) -> None:
    """Read the traces of every rank under PATH (files, folders, globs, URLs), say where the time of a step goes, and write a report.

    A trace is what torch.profiler exports: JSON, plain or compressed, one or several files a rank.
    """
    clock = Stopwatch(verbose > 0)
    if no_report and output is not None:
        raise click.UsageError("--output and --no-report exclude each other")
    if operations and json_file is None:
        raise click.UsageError("--operations adds to the JSON; say where it goes with --json FILE")
    options = load_options(given)
    report = None if no_report else output or OutputFile().convert(DEFAULT_REPORT, None, None)
    _refuse_one_place(report, json_file, markdown_file)
    if open_report and report is None:
        raise click.UsageError("--open opens the report, and --no-report writes none")
    outputs = (report, json_file, markdown_file)
    answer = _answered(paths, options, _Asked(what_if, operations, anonymize, report is not None), outputs, quiet, clock)
    replaced = report is not None and Path(report).is_file()
    _write(answer, *outputs)
    clock.lap("written")
    if not quiet:
        from tracekit.cli.summary import print_summary

        stream = sys.stderr if "-" in (json_file, markdown_file) else sys.stdout
        print_summary(answer.document, answer.previews, report, stream, replaced=replaced)
    if open_report and report is not None:
        click.launch(report)
    if strict:
        _refuse_partial(answer.document)


def _refuse_one_place(*outputs: str | None) -> None:
    """Two outputs in one file would leave one of them."""
    places = [output if output == "-" else os.path.realpath(output) for output in outputs if output is not None]
    twice = next((place for place in places if places.count(place) > 1), None)
    if twice is not None:
        where = "standard output" if twice == "-" else repr(next(o for o in outputs if o is not None and os.path.realpath(o) == twice))
        raise click.UsageError(f"two outputs cannot both be written to {where}")


@dataclass(frozen=True)
class _Asked:
    """What the answer holds, beside what it is about."""

    what_if: tuple[str, ...]
    operations: bool
    anonymize: bool
    page: bool


def _answered(
    paths: Sequence[str], options: LoadOptions, asked: _Asked, outputs: Sequence[str | None], quiet: bool, clock: Stopwatch
) -> Answer:
    """The answer as it was kept, or found now and kept for the next time."""
    from tracekit.readers.archives import is_archive
    from tracekit.readers.sources import find_sources
    from tracekit.report import answers

    found = place = None
    if options.cache is not None and not any(map(is_archive, paths)):
        found = find_sources(paths)
        _refuse_to_replace([source.url for source in found.sources], *outputs)
        place = answers.place(found, options, [asked.what_if, asked.operations, asked.anonymize])
        kept = None if place is None else answers.load(place, asked.page)
        if kept is not None:
            clock.lap("taken from the cache")
            return kept
    answer, settled = _found_out(paths, options, asked, outputs, quiet, clock, found)
    if place is not None and settled:
        answers.store(place, answer)
    if options.cache is not None:
        from tracekit.readers.cache_folder import prune

        prune(options.cache)
    return answer


def _found_out(
    paths: Sequence[str],
    options: LoadOptions,
    asked: _Asked,
    outputs: Sequence[str | None],
    quiet: bool,
    clock: Stopwatch,
    found: Found | None,
) -> tuple[Answer, bool]:
    """(the answer, whether the same question will always have it)."""
    from tracekit import analyses
    from tracekit.cli.progress import reading
    from tracekit.graph.scenarios import check
    from tracekit.job.load import load_job
    from tracekit.report.document import document

    what_if = tuple(check(name) for name in asked.what_if)
    reducers = analyses.reducers()
    clock.lap("started")
    with reading(quiet) as progress:
        job = load_job(paths, options, reducers, progress, found)
    clock.lap("read")
    _refuse_to_replace([entry.file for entry in job.coverage], *outputs)
    job.what_if = what_if
    results = analyses.run(job)
    clock.lap("analyzed")
    told = document(job, results, operations=asked.operations)
    return _as_answer(job, told, results, asked), job.settled


def _as_answer(job: Job, told: dict[str, Any], results: Mapping[str, Result], asked: _Asked) -> Answer:
    from tracekit.report import html
    from tracekit.report.answers import Answer
    from tracekit.report.tables import previews

    if asked.anonymize:
        told, results = _anonymous(job, told, results)
    return Answer(told, html.parts(results, told) if asked.page else None, previews(results))


def _refuse_to_replace(files: Sequence[str], *outputs: str | None) -> None:
    """A trace is never overwritten by what is said about it."""
    inputs = {os.path.realpath(file) for file in files}
    for output in outputs:
        if output is not None and output != "-" and os.path.realpath(output) in inputs:
            raise UsageError(f"{output} is one of the traces", "write the result somewhere else")


def _anonymous(job: Job, found: dict[str, Any], results: Mapping[str, Result]) -> tuple[dict[str, Any], Mapping[str, Result]]:
    from tracekit.report.anonymous import Anonymous

    aliases = Anonymous(job)
    aliases.learn(results)
    hidden: dict[str, Any] = aliases.plain(found)
    return hidden, {name: aliases.result(result) for name, result in results.items()}


def _write(answer: Answer, report: str | None, json_file: str | None, markdown_file: str | None) -> None:
    from tracekit.cli.outputs import write_bytes, write_json
    from tracekit.files import write_atomically

    with contextlib.ExitStack() as both:  # a report that cannot be written does not keep the JSON from being written
        if json_file is not None:
            both.callback(write_json, json_file, answer.document)
        if markdown_file is not None:
            from tracekit.report.markdown import summary

            both.callback(write_bytes, markdown_file, summary(answer.document).encode())
        if report is not None and answer.page is not None:
            write_atomically(report, answer.page)


def _refuse_partial(document: Mapping[str, Any]) -> None:
    from tracekit.report.coverage import incomplete

    if not incomplete(document):
        return
    bad = [entry for entry in document["coverage"] if entry["status"] != "complete"]
    missing = document["job"]["missing_ranks"]
    parts = [f"{len(bad)} of {len(document['coverage'])} files were not read whole (first: {Path(bad[0]['file']).name})"] if bad else []
    parts += [f"{len(missing)} of {document['job']['world_size']} ranks are missing"] if missing else []
    raise PartialInputError("--strict: " + " and ".join(parts), "what could be read was analyzed; coverage says what was not")
