"""``tracekit``: one command a file, loaded when it is used, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import click
from click.shell_completion import CompletionItem

from tracekit import __version__
from tracekit.cli.help import Context, Group
from tracekit.errors import TracekitError
from tracekit.report.text import visible

#: Command -> what it does. Its module is ``tracekit.cli.<command>``, which holds a click command called ``command``.
COMMANDS = {
    "analyze": "Read the traces of a whole job and explain where its time went.",
    "report": "Make a report of what analyze --json has saved.",
    "doctor": "Say what a recording cannot answer, and how to record it.",
    "cache": "Show or clear what is kept of traces that were read.",
    "compare": "Say what changed between two runs, by how much, and why.",
    "baseline": "Keep what a run measured.",
    "check": "Hold a run against a baseline; fails when something got worse.",
    "export": "Write one merged trace for Perfetto, or tables as CSV, Parquet or Excel.",
    "hta": "Run analyses of Holistic Trace Analysis on what tracekit has read.",
    "query": "Ask SQL of the tables of a job.",
    "estimate": "Say what a model on a mesh would need and send, without running it.",
    "record": "Run a reference workload under the recorder.",
    "run": "Record some steps of a training program that stays as it is.",
    "completion": "Print what makes a shell complete commands and options.",
    "simulate": "Show what every rank of a strategy holds and sends, on virtual ranks.",
}

BAD_INPUT, INTERRUPTED = 2, 130
LONGEST_LINE = 2000


class Tracekit(Group):
    """Finds commands in COMMANDS, so that ``--help`` imports none of them, and maps errors to exit codes."""

    context_class = Context

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names in the order of COMMANDS."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command, imported now; None for a name that is none."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"tracekit.cli.{cmd_name.replace('-', '_')}").command
        command.context_class = Context
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands with what they do, none of them loaded."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The commands with one line each, without loading them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """``--debug`` may stand anywhere."""
        if "--debug" in args:
            args = ["--debug", *(arg for arg in args if arg != "--debug")]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; what goes wrong ends in one line and an exit code."""
        return guarded(lambda: super(Tracekit, self).invoke(ctx), debug=bool(ctx.params.get("debug")))


def guarded(run: Callable[[], object], *, debug: bool) -> object:
    """``run()``; an error becomes one line on standard error, behind its traceback when ``debug``, and click's Exit with its code."""
    try:
        return run()
    except (click.ClickException, click.exceptions.Exit):
        raise
    except BrokenPipeError:  # the reader of our output has seen enough (| head)
        silence_standard_output()
        raise click.exceptions.Exit(0) from None
    except (KeyboardInterrupt, click.Abort):
        fail("interrupted", INTERRUPTED, debug)
    except TracekitError as error:
        fail(str(error), error.exit_code, debug)
    except MemoryError:
        fail("out of memory; --jobs 1 reads one file at a time, --ranks reads fewer", BAD_INPUT, debug)
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        fail(f"{where}{error.strerror or error}", BAD_INPUT, debug)
    except Exception as error:  # noqa: BLE001 - the outermost frame: a user gets one line instead of a traceback
        what = f"internal error, {type(error).__name__}: {error}"
        fail(f"{what}; please report it with the traceback that tracekit --debug shows", BAD_INPUT, debug)


def fail(message: str, code: int, debug: bool = False) -> NoReturn:
    """One line on standard error, then the exit code."""
    if debug:
        traceback.print_exc()
    line = visible(message)
    click.echo(f"tracekit: {line if len(line) <= LONGEST_LINE else line[:LONGEST_LINE] + ' ...'}", err=True)
    raise click.exceptions.Exit(code)


def silence_standard_output() -> None:
    """Point standard output to nothing, so that flushing it at exit cannot fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.command(
    cls=Tracekit,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example: tracekit analyze traces/",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(__version__, message="tracekit %(version)s")
def cli(debug: bool) -> None:
    """Explain where time and bytes of a distributed PyTorch job go, from its profiler traces."""


def main() -> NoReturn:
    """Entry point of the ``tracekit`` command.

    The process ends without the interpreter's clean-up: taking down numba and pandas object by object would cost more than a small job.
    """
    gc.set_threshold(200_000, 50, 50)  # what imports and tables make stays: looking through it every 700 objects finds nothing
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115 - closed by the shell: >&-
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character gets a question mark, not an error
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        code = cli.main(prog_name="tracekit", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        code = BAD_INPUT
    except click.Abort:
        code = INTERRUPTED
    except BrokenPipeError:
        silence_standard_output()
        code = 0
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
