"""A progress bar on standard error for reads that take a while; nothing where that is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Less than this [bytes] is read before a bar could be looked at.
WORTH_A_BAR = 50_000_000


@contextmanager
def reading(quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A callback for (bytes read, bytes in all) while the block runs; None when nobody would see a bar."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("Reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=total >= WORTH_A_BAR)
