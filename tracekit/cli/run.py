"""``tracekit run``: record a few steps of a training program that stays as it is."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

import click

from tracekit.cli.afterwards import look_on, remedy
from tracekit.errors import UsageError
from tracekit.recorder import marks
from tracekit.recorder.folder import empty_folder
from tracekit.recorder.request import parse_steps
from tracekit.report.text import visible

EPILOG = """\b
Examples:
  tracekit run -o traces -- torchrun --nproc-per-node 8 train.py
  tracekit run -o traces --steps 100:103 -- accelerate launch train.py
  tracekit run -o traces --steps none -- python train.py    # then: touch traces/record, or kill -USR2 PID
  srun --nodes 2 ... tracekit run -o /shared/traces -- python train.py

\b
Exit codes: the command's; 2 where it could not be started
"""


@click.command(epilog=EPILOG, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
@click.option(
    "-o", "--output", "folder", type=click.Path(path_type=Path), default=Path("traces"), show_default=True, help="Where all ranks write."
)
@click.option(
    "--steps", default="10:13", show_default=True, metavar="FIRST:STOP", help="Steps of the optimizer, from 0; 'none': only on demand."
)
@click.option("--stacks", is_flag=True, help="Keep Python stacks.")
@click.option("--memory/--no-memory", default=True, show_default=True, help="Keep allocations, and who owns them.")
@click.option("--saved-tensors", is_flag=True, help="Register every tensor that autograd saves.")
@click.option("--replace", is_flag=True, help="Replace the recording that the folder holds.")
def command(words: tuple[str, ...], folder: Path, steps: str, stacks: bool, memory: bool, saved_tensors: bool, replace: bool) -> None:
    """Run COMMAND as it is, and record some of its training steps on every rank.

    The program needs no change: steps, model and optimizer are found while it runs. Later steps are recorded when SIGUSR2 comes or a file
    named record appears in the folder, on all ranks at the same step, into a folder of their own.
    """
    if not words:
        raise UsageError("there is no command to run", "write it behind --: tracekit run -o traces -- torchrun train.py")
    parse_steps(steps)
    program = shutil.which(words[0])
    if program is None:
        raise UsageError(f"{words[0]}: no such command", "give what you would type without tracekit run")
    empty_folder(folder, replace=replace)
    marks.prepare(folder)
    options = [name for name, on in (("stacks", stacks), ("no-memory", not memory), ("saved-tensors", saved_tensors)) if on]
    told = environment(folder, steps, options)
    if marks.without_hook(list(words)):
        click.echo(f"tracekit: nothing will be recorded where the start-up hook does not come in; {visible(remedy(words))}", err=True)
    called_off = look_on(folder.resolve(), told["TRACEKIT_RUN"], words, steps)
    try:
        os.execvpe(program, list(words), told)
    except OSError as error:
        if called_off is not None:
            os.write(called_off, b".")
        marks.taken(folder, told["TRACEKIT_RUN"])
        raise UsageError(f"{words[0]}: {error.strerror}", "give what you would type without tracekit run") from error


def environment(folder: Path, steps: str, options: list[str]) -> dict[str, str]:
    """The command's environment: the start-up hook first on PYTHONPATH, and what it is to do."""
    startup = Path(__file__).resolve().parent.parent / "recorder" / "startup"
    path = os.pathsep.join(filter(None, [str(startup), os.environ.get("PYTHONPATH", "")]))
    told = {"TRACEKIT_RECORD": str(folder.resolve()), "TRACEKIT_STEPS": steps, "TRACEKIT_OPTIONS": ",".join(options)}
    return {**os.environ, "PYTHONPATH": path, "TRACEKIT_RUN": secrets.token_hex(8), **told}
