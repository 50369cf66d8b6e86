"""What several commands share: options, how their text is read, and the stopwatch of ``-v``. Nothing heavy is imported here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from tracekit.job.options import LoadOptions

    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # not generic in older versions of click

Function = TypeVar("Function", bound=Callable[..., Any])

#: More ranks than any job has: a longer range is a typing error, not a request for memory.
MOST_RANKS = 1_000_000


class Steps(ParamType):
    """``2:5`` is steps 2, 3 and 4; ``2:`` and ``:5`` are open, ``3`` is one step."""

    name = "FROM:TO"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int | None, int | None]:
        """(first, behind the last), None where open."""
        if isinstance(value, tuple):
            return value
        first, colon, last = value.partition(":")
        try:
            start = int(first) if first.strip() else None
            end = (int(last) if last.strip() else None) if colon else int(first) + 1
        except ValueError:
            self.fail(f"{value!r} is no range of steps; write it as 2:5 for steps 2, 3 and 4", param, ctx)
        if start is not None and end is not None and end <= start:
            self.fail(f"{value!r} holds no step; the end is not part of it, 2:5 is steps 2, 3 and 4", param, ctx)
        return start, end


class Ranks(ParamType):
    """``0,8-15``."""

    name = "LIST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> frozenset[int]:
        """The ranks as a set."""
        if isinstance(value, frozenset):
            return value
        ranks: set[int] = set()
        for part in value.split(","):
            first, dash, last = part.strip().partition("-")
            try:
                low, high = int(first), int(last if dash else first)
            except ValueError:
                self.fail(f"{value!r} is no list of ranks; write it as 0,8-15", param, ctx)
            if low > high:
                self.fail(f"{part.strip()!r} runs backwards", param, ctx)
            if high - low >= MOST_RANKS:
                self.fail(f"{part.strip()!r} is more than {MOST_RANKS:,} ranks", param, ctx)
            ranks.update(range(low, high + 1))
        return frozenset(ranks)


class OutputFile(ParamType):
    """A file that can be written, checked before the long work begins; with ``dash``, ``-`` is standard output."""

    name = "FILE"

    def __init__(self, dash: bool = False) -> None:
        self.dash = dash

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The path as given."""
        path = str(value)
        if path == "-" and self.dash:
            return path
        if path == "-":
            self.fail("a report cannot go to standard output; name a file", param, ctx)
        place = Path(os.path.realpath(path))  # where a link leads
        if Path(path).is_symlink() and (place.is_symlink() or not place.parent.is_dir()):
            where = "to itself" if place.is_symlink() else f"to {str(place)!r}, in a folder that does not exist"
            self.fail(f"{path!r} is a link {where}; name another file", param, ctx)
        folder = Path(path).parent
        if not path or Path(path).is_dir():
            self.fail(f"{path!r} is a folder; name a file", param, ctx)
        if not folder.is_dir():
            self.fail(f"the folder {str(folder)!r} does not exist; create it first", param, ctx)
        if not os.access(path if Path(path).exists() else folder, os.W_OK):
            self.fail(f"{path!r} cannot be written; choose another place", param, ctx)
        return path


_JOB_OPTIONS = (
    click.option("--mesh", metavar="AXES", help="The device mesh, outermost axis first: pp=2,tp=4. Read from the traces otherwise."),
    click.option("--gpus-per-node", metavar="N", type=click.IntRange(min=1), help="Ranks of one node, where the traces name no hosts."),
    click.option("--steps", type=Steps(), help="Only these steps; 2:5 is steps 2, 3 and 4."),
    click.option("--ranks", type=Ranks(), help="Only these ranks: 0,8-15."),
    click.option("--run", metavar="NAME", help="Only this run, where several are found; their names are listed then."),
    click.option(
        "--communication",
        metavar="PATTERN=KIND[:AXIS]",
        multiple=True,
        help="Kernels whose name matches are communication: 'my_exchange.*=all_to_all:ep'. May be given several times.",
    ),
    click.option("--config", metavar="FILE", help="Settings in TOML; tracekit.toml of the current folder otherwise."),
    click.option("--jobs", metavar="N", type=click.IntRange(min=1), help="Files read at one time. Chosen by cores and size otherwise."),
    click.option(
        "--executor",
        type=click.Choice(["threads", "processes", "dask"]),
        help="Where files are read: threads or processes here (chosen by size otherwise), or Dask (here without --scheduler).",
    ),
    click.option("--scheduler", metavar="ADDRESS", help="Read the files on the workers of this Dask scheduler."),
    click.option("--memory-limit", metavar="SIZE", help="Memory that reading may take, all processes together: 8GB."),
    click.option(
        "--cache",
        metavar="DIR",
        type=click.Path(file_okay=False),
        help="Where read traces are kept for the next time; otherwise $TRACEKIT_CACHE, or tracekit in your cache folder.",
    ),
    click.option("--no-cache", is_flag=True, help="Read the traces afresh and keep nothing."),
)
_VOICE_OPTIONS = (
    click.option("-q", "--quiet", is_flag=True, help="Print errors only."),
    click.option("-v", "--verbose", count=True, help="Also print how long each part took."),
)


def job_options(function: Function) -> Function:
    """Options that say which job is read, and how."""
    return _with(_JOB_OPTIONS, function)


def voice_options(function: Function) -> Function:
    """``-q`` and ``-v``."""
    return _with(_VOICE_OPTIONS, function)


def _with(options: Sequence[Callable[[Function], Function]], function: Function) -> Function:
    for option in reversed(options):
        function = option(function)
    return function


def load_options(given: dict[str, Any]) -> LoadOptions:
    """The values of ``job_options`` as the loader wants them. Raises TracekitError for a mesh that is none, before anything is read."""
    from tracekit.job.options import LoadOptions
    from tracekit.mesh.mesh import parse_mesh
    from tracekit.readers.cache_folder import default_directory

    if given["mesh"] is not None:
        parse_mesh(given["mesh"])
    if given["no_cache"] and given["cache"] is not None:
        raise click.UsageError("--cache and --no-cache exclude each other")
    if given["scheduler"] is not None and given["executor"] not in (None, "dask"):
        raise click.UsageError(f"--scheduler is for Dask, --executor {given['executor']} reads on this machine")
    from tracekit.cli.config import communication

    named = communication(given["communication"], given["config"])
    names = ("mesh", "gpus_per_node", "ranks", "steps", "jobs", "scheduler", "executor", "run")
    folder = None if given["no_cache"] else given["cache"] or str(default_directory())
    return LoadOptions(**{name: given[name] for name in names}, cache=folder, named=named, memory_limit=_limited(given["memory_limit"]))


def _limited(size: str | None) -> int | None:
    """Sets the limit of this process; its bytes."""
    if size is None:
        return None
    from tracekit.executors.memory import limit_memory, parse_size

    limit = parse_size(size)
    limit_memory(limit)
    return limit


class Stopwatch:
    """Prints how long each part took, with ``-v``."""

    def __init__(self, on: bool) -> None:
        self._on = on
        self._last = time.perf_counter()

    def lap(self, what: str) -> None:
        """``what`` is done: say how long it took since the lap before."""
        now = time.perf_counter()
        if self._on:
            click.echo(f"{what} in {now - self._last:.2f} s", err=True)
        self._last = now
