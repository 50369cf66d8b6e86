"""A progress bar on standard error for reads that take a while; nothing where that is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

#: Less than this [bytes] is read before a bar could be looked at.
WORTH_A_BAR = 50_000_000


@contextmanager
def reading(quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A callback for (bytes read, bytes in all) while the block runs; None when nobody would see a bar."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    bar = _Bar()
    try:
        yield bar.update
    finally:
        bar.stop()


@contextmanager
def searching(quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A callback for (done, of) while the block runs; None when nobody would see a bar."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    with Progress(TextColumn("Searching"), BarColumn(), MofNCompleteColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("searching")
        yield lambda done, of: bar.update(task, completed=done, total=of)


class _Bar:
    """Appears with the first news of a long read."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def update(self, done: int, total: int) -> None:
        if total < WORTH_A_BAR:
            return
        if self._progress is None:
            self._progress = _progress()
            self._task = self._progress.add_task("reading", total=total)
            self._progress.start()
        assert self._task is not None
        self._progress.update(self._task, completed=done)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("Reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(compact=True))
    return Progress(*columns, console=Console(stderr=True), transient=True)
