"""``tracekit cache``: what is kept of traces that were read, and how to be rid of it."""

from __future__ import annotations

import time
from pathlib import Path

import click

from tracekit.cli.help import Group
from tracekit.errors import InputError
from tracekit.readers.cache_folder import LIMIT_BYTES, clear, default_directory, distrust, usage
from tracekit.units import format_bytes, plural

_FOLDER = click.option(
    "--cache",
    "folder",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    default=default_directory,
    help="The folder; otherwise $TRACEKIT_CACHE, or tracekit in your cache folder.",
)


_EXAMPLES = """\b
Examples:
  tracekit cache info
  tracekit cache clear --cache /scratch/tracekit

\b
Exit codes: 0 done; 2 the folder cannot be used."""


@click.group("cache", cls=Group, epilog=_EXAMPLES)
def command() -> None:
    """Show or clear the cache, which makes a second look at the same traces quick."""


@command.command("info", short_help="Say where it is and what it holds.", epilog="Example: tracekit cache info --cache /scratch/tracekit")
@_FOLDER
def info(folder: Path) -> None:
    """Say where the cache is, how many entries it has and how large they are."""
    reason = distrust(folder)
    if reason is not None:
        raise InputError(f"the cache {folder} {reason} and is not used", "choose another folder with --cache or $TRACEKIT_CACHE")
    found = usage(folder)
    since = "" if found.oldest is None else f", the oldest of {time.strftime('%Y-%m-%d', time.localtime(found.oldest))}"
    click.echo(f"{folder}: {plural(found.entries, 'entry', 'entries')}, {format_bytes(found.size)} of {format_bytes(LIMIT_BYTES)}{since}")


@command.command("clear", short_help="Remove every entry.", epilog="Example: tracekit cache clear")
@_FOLDER
def clear_all(folder: Path) -> None:
    """Remove every entry of the cache; other files in its folder stay."""
    removed = clear(folder)
    click.echo(f"{folder}: {plural(removed.entries, 'entry', 'entries')} removed, {format_bytes(removed.size)}")
