"""A comparison and a check in a terminal: the answer, the causes with what followed, then the figures that moved or fell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from tracekit.checks.check import Checked, Row
from tracekit.cli.terminal import console, fitted, text
from tracekit.compare.causes import Cause
from tracekit.compare.changes import Comparison
from tracekit.compare.held import OwnerMoved
from tracekit.compare.words import headline, phrase, sizes
from tracekit.report.check import limit_text
from tracekit.report.compare import gated

MOST_CAUSES, MOST_CONSEQUENCES, MOST_PASSED, MOST_OWNERS = 12, 6, 12, 10
_HEADINGS = ("", "quantity", "base -> new", "limit", "because")


def print_comparison(comparison: Comparison, found: Sequence[Cause], page: str | None, stream: IO[str]) -> None:
    """Print the whole comparison; ``page`` is where the HTML was written."""
    out = console(stream)
    out.print(text(headline(comparison, list(found)), "bold"))
    for note in comparison.alignment.notes:
        out.print(text(f"- {note}", "dim"))
    shown = [cause for cause in found if gated(cause)]
    for cause in shown[:MOST_CAUSES]:
        out.print(text(f"  {phrase(cause)}"))
        moved = cause.consequences[:MOST_CONSEQUENCES]
        for change in moved:
            out.print(text(f"      {change.label}: {sizes(change)}", "dim"))
        if len(cause.consequences) > len(moved):
            out.print(text(f"      and {len(cause.consequences) - len(moved)} more figures", "dim"))
    rest = len(shown) - MOST_CAUSES
    if rest > 0:
        out.print(text(f"  and {rest} more", "dim"))
    _print_owners(comparison.owners, out)
    if page is not None:
        out.print(text(f"Page: {page}", "bold"), soft_wrap=True)


def _print_owners(owners: Sequence[OwnerMoved], out: Console) -> None:
    """What is new, gone, larger and smaller at the ends of the snapshots."""
    if not owners:
        return
    out.print(text("Owners of memory at the end of the snapshots, the largest changes first:", "bold"))
    rows = [[text(cell) for cell in (f"rank {o.rank}", o.device, o.change.kind, o.owner, o.sizes)] for o in owners[:MOST_OWNERS]]
    table = fitted(out, ("rank", "device", "", "owner", "base -> new"), [True] * 5, rows)
    out.print(Padding(table, (0, 0, 0, 2), expand=False))
    if len(owners) > MOST_OWNERS:
        out.print(text(f"  and {len(owners) - MOST_OWNERS} more (--json and the page hold them)", "dim"))


def print_check(checked: Checked, stream: IO[str]) -> None:
    """Print what fell and why, what was not measured, and what passed."""
    out = console(stream)
    word = {0: "passed", 1: "FELL", 2: "NOT COMPARED"}[checked.exit_code]
    out.print(text(f"{word}: {headline(checked.comparison, checked.causes)}", "bold"))
    for note in checked.comparison.alignment.notes:
        out.print(text(f"- {note}", "dim"))
    passed = checked.of("passed")
    for rows in (checked.of("fell"), checked.of("not_measured"), passed[:MOST_PASSED]):
        if rows:
            table = fitted(out, _HEADINGS, [True] * len(_HEADINGS), [_cells(row) for row in rows])
            out.print(Padding(table, (1, 0, 0, 2), expand=False))
    if len(passed) > MOST_PASSED:
        out.print(text(f"  and {len(passed) - MOST_PASSED} more that passed", "dim"))


def _cells(row: Row) -> list[Text]:
    change = row.change
    because = row.cause or change.why or _noise(row)
    return [text(cell) for cell in (row.status.replace("_", " "), change.label, sizes(change), limit_text(row.limit), because)]


def _noise(row: Row) -> str:
    """Why a larger difference passed."""
    change = row.change
    return f"noise (drift up to {change.noise:.0%})" if change.outcome == "noise" and change.noise is not None else ""
