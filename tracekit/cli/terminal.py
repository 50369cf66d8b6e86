"""Tables and lines of a terminal, the same for every command: text that cannot act, grids in the width of the line, a title above each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from tracekit.report.text import visible

if TYPE_CHECKING:
    from rich.console import OverflowMethod

_GAP, _LONGEST_WORD = 2, 24


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # handled where all errors are; rich would exit with 1, which means "regression found"


def console(stream: IO[str]) -> Console:
    """A console for a terminal of any width, or for a pipe, where lines are left long."""
    width = None if stream.isatty() or "COLUMNS" in os.environ else 200
    return _Console(file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)


def text(words: str, style: str = "") -> Text:
    """Words as they are written: no markup, no character that acts."""
    return Text(visible(words), style=style)


def grid(names: Sequence[str], left: int | Sequence[bool] = 1, *, cut: bool = False) -> Grid:
    """An empty table without lines. ``left``: how many columns, or which, are words. A long cell is ``cut``, or goes on below."""
    table = Grid(box=None, padding=(0, _GAP, 0, 0), header_style="dim", pad_edge=False)
    overflow: OverflowMethod = "ellipsis" if cut else "fold"
    for place, name in enumerate(names):
        is_text = place < left if isinstance(left, int) else left[place]
        heading = Text("\n".join(map(visible, name.split("\n"))))
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=cut, overflow=overflow, vertical="bottom")
    return table


def fitted(out: Console, names: Sequence[str], left: Sequence[bool], rows: Sequence[Sequence[Text]]) -> Grid:
    """A table in the width of the terminal, with every cell whole: what is too long goes on in the next line."""
    columns = [[name, *(row[place].plain for row in rows)] for place, name in enumerate(names)]
    table = Grid(box=None, padding=(0, _GAP, 0, 0), header_style="dim", pad_edge=False)
    room = out.width - 2 - _GAP * len(names)
    for name, is_text, width in zip(names, left, _widths(columns, room), strict=True):
        table.add_column(text(name), justify="left" if is_text else "right", overflow="fold", vertical="top", width=width)
    for row in rows:
        table.add_row(*row)
    return table


def print_grid(out: Console, title: str, table: Grid, note: str = "") -> None:
    """A table below its title, and a note between them."""
    out.print()
    out.print(text(title, "bold"))
    if note:
        out.print(text(note, "dim"))
    out.print(Padding(table, (0, 0, 0, 2), expand=False))


def _widths(columns: Sequence[Sequence[str]], room: int) -> list[int]:
    """Characters of each column (a heading, then cells) in ``room``: its longest word first, then its cells, at last its heading."""
    words = [max((cell_len(word) for cell in texts for word in cell.split()), default=1) for texts in columns]
    longest = next((most for most in range(_LONGEST_WORD, 1, -1) if sum(min(most, word) for word in words) <= room), 1)
    widths = [max(1, min(longest, word)) for word in words]
    for part in (slice(1, None), slice(None)):
        short = [max((cell_len(cell) for cell in texts[part]), default=1) - width for texts, width in zip(columns, widths, strict=True)]
        waiting = sorted((place for place in range(len(columns)) if short[place] > 0), key=lambda place: short[place])
        for done, place in enumerate(waiting):
            widths[place] += max(0, min(short[place], (room - sum(widths)) // (len(waiting) - done)))
    return widths
