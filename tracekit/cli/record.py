"""``tracekit record WORKLOAD``: run a reference workload under the recorder and say what it left."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import click

from tracekit.errors import UsageError, choose
from tracekit.report.text import visible

EPILOG = """\b
Examples:
  tracekit record ddp --nproc 2 -o traces/ddp
  tracekit record fsdp2 --backend fake --mesh pp=2,dp_shard=4,tp=2 --rank 5 -o traces/rank5
  tracekit record ddp --help          what the workload does, and all its options
  tracekit record --list              the workloads, a line each

\b
Exit codes: 0 recorded; 1 a rank failed; 2 an option is wrong, or torch is missing
"""


def _completed(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    return [name for name in _workloads() if name.startswith(begun)]


@click.command(
    epilog=EPILOG,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument(
    "workload",
    required=False,
    metavar="WORKLOAD",
    shell_complete=lambda _context, _parameter, begun: [n for n in _workloads() if n.startswith(begun)],
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS]")
@click.pass_context
def command(context: click.Context, workload: str | None, arguments: tuple[str, ...]) -> None:
    """Run a reference workload of workloads/ on this machine and record it.

    Leaves a trace and a manifest of every rank in the folder given by -o. Every workload has the options --nproc N, --mesh AXIS=SIZE,...,
    --backend gloo|nccl|fake, --precision, --batch, --verify and more; see --help behind its name.
    """
    if workload == "--list":
        click.echo("\n".join(f"{name:<28} {text}" for name, text in _workloads().items()))
        return
    if workload in (None, "--help", "-h"):
        click.echo(context.get_help() if workload else context.get_usage())
        click.echo(_listing(context))
        context.exit(0 if workload else 2)
    name = str(workload).replace("-", "_")
    if name not in _workloads():
        raise UsageError(f"there is no workload {str(workload)[:80]!r}", choose(name, _workloads()))
    _need_torch()
    launch = importlib.import_module("tracekit.workloads.common.launch")
    output = _output(arguments)
    launch.launch(f"tracekit.workloads.{name}", arguments if output else (*arguments, "-o", f"traces/{name}"))
    _tell(Path(output or f"traces/{name}"))


def _workloads() -> dict[str, str]:
    if importlib.util.find_spec("tracekit.workloads") is None:
        raise UsageError("the workloads are not installed with this tracekit", "install it from its repository or a wheel")
    found: dict[str, str] = importlib.import_module("tracekit.workloads.common.settings").available()
    return found


def _listing(context: click.Context) -> str:
    formatter = context.make_formatter()
    with formatter.section("\nWorkloads"):
        formatter.write_dl([(name, text.replace("``", "")) for name, text in _workloads().items()])
    return formatter.getvalue().rstrip("\n")


def _need_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise UsageError("recording needs torch, which is not installed", "pip install 'tracekit[record]', or the torch of your cluster")


def _output(arguments: Sequence[str]) -> str:
    """The folder among the workload's arguments; '' where it is not given."""
    for i, word in enumerate(arguments):
        if word in ("-o", "--output") and i + 1 < len(arguments):
            return arguments[i + 1]
        if word.startswith("--output="):
            return word.partition("=")[2]
        if word.startswith("-o") and len(word) > 2 and not word.startswith("--"):
            return word[2:]
    return ""


def _tell(folder: Path) -> None:
    """What was recorded, and the process groups of the lowest rank."""
    from tracekit.manifest import SUFFIX, decode

    paths = sorted(folder.glob(f"rank_*{SUFFIX}"))
    if not paths:
        click.echo(f"nothing was recorded in {visible(str(folder))}")
        return
    manifest = decode(paths[0].read_bytes(), paths[0].name)
    steps = f"steps {manifest.steps[0]} to {manifest.steps[-1]}" if manifest.steps else "no whole step"
    click.echo(visible(f"{len(paths)} of {manifest.world_size} ranks, {steps}, {manifest.backend}: {folder}"))
    place = ", ".join(f"{name}={at}" for name, at in manifest.coordinate.items())
    click.echo(visible(f"rank {manifest.rank} is at {place}; its process groups:"))
    for group in manifest.groups:
        axis = group.axis or ("all ranks" if len(group.ranks) == manifest.world_size else "no axis")
        ranks = str(group.ranks) if len(group.ranks) <= 16 else f"[{', '.join(map(str, group.ranks[:16]))}, ...] ({len(group.ranks)})"
        click.echo(visible(f"  {axis:<16} {ranks}"))
    for note in manifest.notes:
        click.echo(visible(note))
    click.echo(f"read it with: tracekit analyze {visible(str(folder))}")
