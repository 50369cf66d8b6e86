"""``tracekit simulate``: the numeric experiments, each a subcommand whose options are the fields of its ``Arguments``."""

from __future__ import annotations

import dataclasses
import os
import sys
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from tracekit.cli.common import OutputFile, ParamType, Stopwatch
from tracekit.cli.help import Context, Group
from tracekit.simulate.registry import EXPERIMENTS, ExperimentModule, load

if TYPE_CHECKING:
    from tracekit.simulate.experiment import Experiment

FAILED_CHECK = 1
#: More items than any list of an experiment needs.
MOST_ITEMS = 10_000
_EXAMPLES = """\b
Examples:
  tracekit simulate collectives --kind all_reduce --ranks 4 -o ring.html
  tracekit simulate fsdp --example tutorial
  tracekit simulate mesh --mesh pp=2,dp_shard=4,tp=2 --rank 5
  tracekit simulate pipeline --schedule 1f1b --json -

\b
Exit codes: 0 done and every figure as it has to be; 1 a figure is not;
2 an option is wrong."""


class Simulate(Group):
    """Finds experiments in the registry, so that ``--help`` imports none of them."""

    noun = "experiment"

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names in the order of the registry."""
        return list(EXPERIMENTS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The experiment's command, built now; None for a name that is none."""
        if cmd_name not in EXPERIMENTS:
            return None
        command = experiment_command(cmd_name)
        command.context_class = Context
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The experiments with one line each, without loading them."""
        with formatter.section("Experiments"):
            formatter.write_dl(list(EXPERIMENTS.items()))


@click.group("simulate", cls=Simulate, epilog=_EXAMPLES)
def command() -> None:
    """Show what every rank of a strategy holds and sends, computed on virtual ranks in this process: no GPU, no PyTorch.

    Every result is compared with the computation that is not cut over ranks, every count with its closed form.
    """


class Items(ParamType):
    """``1,2,3``: a list of numbers or words of one type."""

    def __init__(self, item: type) -> None:
        self.item = item
        self.name = "LIST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        """The items as a tuple; empty for an empty text."""
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",")] if str(value).strip() else []
        if len(words) > MOST_ITEMS:
            self.fail(f"{len(words)} items are more than {MOST_ITEMS}", param, ctx)
        try:
            return tuple(_parsed(self.item, word) for word in words)
        except ValueError:
            what = {int: "whole numbers", float: "numbers"}.get(self.item, "words")
            self.fail(f"{str(value)[:80]!r} is no list of {what}; write it as 1,2,3", param, ctx)


def _parsed(item: type, word: str) -> Any:
    if not word or len(word) > 64:
        raise ValueError(word)
    return item(word)


def experiment_command(name: str) -> click.Command:
    """The click command of an experiment, made from its ``Arguments``."""
    module = load(name)
    options = [_option(field, kind) for field, kind in _fields(module)]
    common = [
        click.Option(["-o", "--output"], type=OutputFile(), help="Write a page that shows every step as a picture."),
        click.Option(["--json", "json_file"], type=OutputFile(dash=True), help="Write everything as JSON; - is standard output."),
        click.Option(
            ["--moments"],
            type=click.Choice(["auto", "all", "none"]),
            default="auto",
            show_default=True,
            help="Print what every rank holds at each moment; auto: where that is not too long.",
        ),
        click.Option(["-q", "--quiet"], is_flag=True, help="Print errors and failed checks only."),
        click.Option(["-v", "--verbose"], count=True, help="Also print how long each part took."),
    ]

    def callback(output: str | None, json_file: str | None, moments: str, quiet: bool, verbose: int, **given: Any) -> None:
        clock = Stopwatch(verbose > 0)
        experiment = _experiment(module, given, output, json_file)
        clock.lap("computed")
        _write(experiment, output, json_file)
        clock.lap("written")
        if not quiet:
            from tracekit.cli.experiment import print_experiment

            print_experiment(experiment, output, sys.stderr if json_file == "-" else sys.stdout, moments)
        _judge(experiment)

    doc = f"{module.TITLE}.\n\n{EXPERIMENTS[name]}"
    epilog = f"\b\nExample:\n  {module.EXAMPLE}"
    parameters: list[click.Parameter] = [*options, *common]
    return click.Command(name, params=parameters, callback=callback, help=doc, epilog=epilog, short_help=EXPERIMENTS[name])


def _fields(module: ExperimentModule) -> list[tuple[dataclasses.Field[Any], Any]]:
    """Fields of the arguments with their types."""
    types = typing.get_type_hints(module.Arguments)
    return [(field, types[field.name]) for field in dataclasses.fields(module.Arguments)]


def _option(field: dataclasses.Field[Any], kind: Any) -> click.Option:
    """One field as an option: ``micro_batches: int`` becomes ``--micro-batches INTEGER``."""
    name = f"--{field.name.replace('_', '-')}"
    words = field.metadata.get("help", "")
    if kind is bool:
        return click.Option([f"{name}/--no-{name[2:]}", field.name], default=field.default, show_default=True, help=words)
    if field.metadata.get("choices"):
        choices = [str(choice) for choice in field.metadata["choices"]]
        return click.Option([name, field.name], type=click.Choice(choices), default=str(field.default), show_default=True, help=words)
    if typing.get_origin(kind) is tuple:
        default: Any = field.default
        shown = ",".join(map(str, default)) or False
        item = Items(typing.get_args(kind)[0])
        return click.Option([name, field.name], type=item, default=default, show_default=shown, help=words)
    return click.Option([name, field.name], type=kind, default=field.default, show_default=field.default != "", help=words)


def _experiment(module: ExperimentModule, given: dict[str, Any], output: str | None, json_file: str | None) -> Experiment:
    if output is not None and json_file is not None and os.path.realpath(output) == os.path.realpath(json_file):
        raise click.UsageError(f"the page and the JSON cannot both be written to {output!r}")
    types = {field.name: type(field.default) for field, _ in _fields(module)}
    return module.run(module.Arguments(**{name: _typed(value, types[name]) for name, value in given.items()}))


def _typed(value: Any, kind: type) -> Any:
    """A chosen word as the number that it stands for, where the choices are numbers."""
    return kind(value) if kind in (int, float) and isinstance(value, str) else value


def _write(experiment: Experiment, output: str | None, json_file: str | None) -> None:
    from tracekit.files import write_atomically
    from tracekit.report import experiment as report
    from tracekit.report.encoding import encode

    document = report.experiment_document(experiment)
    if output is not None:
        report.write(output, experiment, document)
    if json_file is not None:
        data = encode(document, indent=1) + b"\n"
        if json_file == "-":
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        else:
            write_atomically(json_file, [data])


def _judge(experiment: Experiment) -> None:
    """Exit with 1, loudly, where a figure is not what it has to be."""
    wrong: Sequence[str] = [
        f"{check.quantity}: counted {check.counted}, has to be {check.expected} {check.unit}"
        for check in experiment.checks
        if not check.holds
    ]
    if wrong:
        for line in wrong[:20]:
            click.echo(f"tracekit: CHECK FAILED: {line}", err=True)
        more = f" (the first {20} are above)" if len(wrong) > 20 else ""
        click.echo(f"tracekit: {len(wrong)} of {len(experiment.checks)} checks failed{more}", err=True)
        raise click.exceptions.Exit(FAILED_CHECK)
