"""A finished experiment in a terminal: what every rank holds, schedules as text, tables, and counted beside expected figures.

Nothing is cut here as in the summary of a trace: a cell that is too long goes on in the next line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import IO

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from tracekit.cli.terminal import console, fitted, print_grid, text
from tracekit.findings import Table
from tracekit.report.experiment import exact, legible, number_text
from tracekit.report.tables import table_data
from tracekit.report.text import visible
from tracekit.simulate.experiment import Call, Check, Experiment, Gantt, Moment
from tracekit.units import format_bytes

#: Lines of moments that ``auto`` prints at most; rows of a table that names no number; calls; checks that are listed one by one.
MOST_MOMENT_LINES, MOST_ROWS, MOST_CALLS, MOST_CHECKS = 300, 25, 40, 16
_WIDEST_CHART = 160


def print_experiment(experiment: Experiment, page: str | None, stream: IO[str] | None = None, moments: str = "auto") -> None:
    """Print everything. ``page``: where the HTML was written; ``moments``: auto, all or none."""
    out = console(sys.stdout if stream is None else stream)
    out.print(text(experiment.title, "bold"))
    out.print(text(experiment.about, "dim"))
    out.print(text("  ".join(f"{name}={_argument(value)}" for name, value in experiment.arguments), "dim"))
    _moments(out, experiment, moments)
    for chart in experiment.charts:
        _gantt(out, chart)
    shown = [table for table in experiment.tables if table.preview > 0] or experiment.tables
    for table in shown:
        _table(out, table)
    _calls(out, experiment.calls)
    _checks(out, experiment.checks)
    for note in experiment.notes:
        out.print(Text("- ") + text(note))
    out.print()
    out.print(text(experiment.verdict, "bold" if experiment.holds else "bold red"))
    if page is not None:
        out.print(text(f"Page: {page}", "bold"), soft_wrap=True)


def _argument(value: object) -> str:
    return ",".join(map(str, value)) or "-" if isinstance(value, tuple) else str(value) if value != "" else "-"


def _moments(out: Console, experiment: Experiment, wish: str) -> None:
    lines = sum(3 + len(moment.holds) + len(moment.messages) for moment in experiment.moments)
    if wish == "none" or not lines:
        return
    if wish == "auto" and lines > MOST_MOMENT_LINES:
        count = len(experiment.moments)
        out.print()
        out.print(text(f"{count} moments are not printed here: --moments all prints them, -o FILE shows them as a picture", "dim"))
        return
    for moment in experiment.moments:
        _moment(out, moment)


def _moment(out: Console, moment: Moment) -> None:
    rows = []
    for rank, cells in enumerate(moment.holds):
        words = "; ".join(f"{cell.label} {cell.detail}".strip() for cell in cells) or "nothing"
        rows.append([Text(f"rank {rank}"), text(words), Text(format_bytes(moment.live_bytes(rank)))])
    grid = fitted(out, ("", "holds", "live"), (True, True, False), rows)
    out.print()
    out.print(text(moment.title, "bold"))
    if moment.text:
        out.print(text(moment.text, "dim"))
    for message in moment.messages:
        out.print(text(f"  {message.source} -> {message.target}  {message.label}  {format_bytes(message.bytes)}", "cyan"))
    out.print(Padding(grid, (0, 0, 0, 2), expand=False))


def _gantt(out: Console, chart: Gantt) -> None:
    """A line of characters a lane; a bar shows its label as far as there is room."""
    end = max((bar.end for bar in chart.bars), default=0.0)
    names = max((len(lane) for lane in chart.lanes), default=0)
    room = min(out.width, _WIDEST_CHART) - names - 3
    out.print()
    out.print(text(chart.title, "bold"))
    if chart.note:
        out.print(text(chart.note, "dim"))
    if end <= 0 or room < 10:
        return
    per_unit = _columns_per_unit(chart, end, room)
    for lane in chart.lanes:
        line = [" "] * (round(end * per_unit) + 1)
        for bar in sorted((bar for bar in chart.bars if bar.lane == lane), key=lambda bar: bar.start):
            first, last = round(bar.start * per_unit), round(bar.end * per_unit)
            line[first:last] = _fitted(visible(bar.label), max(last - first, 0))
        out.print(text(f"  {lane.ljust(names)} {''.join(line).rstrip()}"), no_wrap=True, overflow="crop")
    out.print(text(f"  {' ' * names} 0 to {end:g} {chart.unit}; a character is {1 / per_unit:g} {chart.unit}", "dim"))


def _fitted(label: str, width: int) -> str:
    """A label in so many characters; one that is too long loses whole words first."""
    while len(label) > width and " " in label:
        label = label.rpartition(" ")[0]
    return label[:width].ljust(width, "·")


def _columns_per_unit(chart: Gantt, end: float, room: int) -> float:
    """Enough for the longest label on the shortest bar, as far as the line has room; whole where it can be."""
    shortest = min(bar.end - bar.start for bar in chart.bars)
    wanted = max(len(bar.label) for bar in chart.bars) / shortest if shortest > 0 else room / end
    fitting = min(wanted, room / end)
    return float(int(fitting)) if fitting >= 1 else fitting


def _table(out: Console, table: Table) -> None:
    data = table_data(legible(table), table.preview or MOST_ROWS)
    rows = [[text(column.shown(row)) for column in data.columns] for row in range(data.rows)]
    more = f" ({data.rows} of {data.total} rows; -o and --json have all)" if data.total > data.rows else ""
    left = [column.kind == "text" for column in data.columns]
    print_grid(out, table.title + more, fitted(out, [column.title for column in data.columns], left, rows), table.note)


def _calls(out: Console, calls: Sequence[Call]) -> None:
    if not calls:
        return
    rows = [
        [Text(str(number)), *map(text, (call.kind, call.axis, call.purpose, call.phase, format_bytes(call.full_bytes), call.label))]
        for number, call in enumerate(calls[:MOST_CALLS], 1)
    ]
    names, left = ("", "collective", "axis", "purpose", "phase", "full tensor", "what"), (False, True, True, True, True, False, True)
    more = f" (the first {MOST_CALLS} of {len(calls)})" if len(calls) > MOST_CALLS else ""
    print_grid(out, f"Collectives of one rank, in order{more}", fitted(out, names, left, rows))


def _checks(out: Console, checks: Sequence[Check]) -> None:
    wrong = [check for check in checks if not check.holds]
    listed = checks if len(checks) <= MOST_CHECKS else wrong
    title = f"Checks: {len(checks) - len(wrong)} of {len(checks)} hold"
    if not listed:
        if checks:
            out.print()
            out.print(text(title, "bold"))
        return
    rows = [_check(check) for check in listed]
    names, left = ("", "quantity", "counted", "has to be", "", "formula"), (True, True, False, False, True, True)
    print_grid(out, title, fitted(out, names, left, rows))


def _check(check: Check) -> list[Text]:
    bound = f" ± {check.tolerance:.2g}" if check.tolerance else ""
    return [
        Text("✓", style="green") if check.holds else Text("✗ FAILS", style="bold red"),
        text(check.quantity, "" if check.holds else "bold red"),
        Text(_value(check.counted)),
        Text(_value(check.expected) + bound),
        text(check.unit),
        text(check.formula, "dim"),
    ]


def _value(value: object) -> str:
    text = exact(value)
    return f"{number_text(value)} ({text})" if text is not None and "/" in text else number_text(value)
