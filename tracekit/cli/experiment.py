"""A finished experiment in a terminal: what every rank holds, schedules as text, tables, and counted beside expected figures.

Nothing is cut here as in the summary of a trace: a cell that is too long goes on in the next line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import IO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from tracekit.cli.summary import console
from tracekit.findings import Table
from tracekit.report.experiment import exact, number_text
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
    out.print(_text(experiment.title, "bold"))
    out.print(_text(experiment.about, "dim"))
    out.print(_text("  ".join(f"{name}={_argument(value)}" for name, value in experiment.arguments), "dim"))
    _moments(out, experiment, moments)
    for chart in experiment.charts:
        _gantt(out, chart)
    shown = [table for table in experiment.tables if table.preview > 0] or experiment.tables
    for table in shown:
        _table(out, table)
    _calls(out, experiment.calls)
    _checks(out, experiment.checks)
    for note in experiment.notes:
        out.print(Text("- ") + _text(note))
    out.print()
    out.print(_text(experiment.verdict, "bold" if experiment.holds else "bold red"))
    if page is not None:
        out.print(_text(f"Page: {page}", "bold"), soft_wrap=True)


def _text(words: str, style: str = "") -> Text:
    return Text(visible(words), style=style)


def _argument(value: object) -> str:
    return ",".join(map(str, value)) or "-" if isinstance(value, tuple) else str(value) if value != "" else "-"


def _moments(out: Console, experiment: Experiment, wish: str) -> None:
    lines = sum(3 + len(moment.holds) + len(moment.messages) for moment in experiment.moments)
    if wish == "none" or not lines:
        return
    if wish == "auto" and lines > MOST_MOMENT_LINES:
        text = f"{len(experiment.moments)} moments are not printed here: --moments all prints them, -o FILE shows them as a picture"
        out.print()
        out.print(_text(text, "dim"))
        return
    for moment in experiment.moments:
        _moment(out, moment)


def _moment(out: Console, moment: Moment) -> None:
    grid = _grid(("", "holds", "live"), (True, True, False))
    for rank, cells in enumerate(moment.holds):
        words = "; ".join(f"{cell.label} {cell.detail}".strip() for cell in cells) or "nothing"
        grid.add_row(Text(f"rank {rank}"), _text(words), Text(format_bytes(moment.live_bytes(rank))))
    out.print()
    out.print(_text(moment.title, "bold"))
    if moment.text:
        out.print(_text(moment.text, "dim"))
    for message in moment.messages:
        out.print(_text(f"  {message.source} -> {message.target}  {message.label}  {format_bytes(message.bytes)}", "cyan"))
    out.print(Padding(grid, (0, 0, 0, 2), expand=False))


def _gantt(out: Console, chart: Gantt) -> None:
    """A line of characters a lane; a bar shows its label as far as there is room."""
    end = max((bar.end for bar in chart.bars), default=0.0)
    names = max((len(lane) for lane in chart.lanes), default=0)
    room = min(out.width, _WIDEST_CHART) - names - 3
    out.print()
    out.print(_text(chart.title, "bold"))
    if chart.note:
        out.print(_text(chart.note, "dim"))
    if end <= 0 or room < 10:
        return
    per_unit = _columns_per_unit(chart, end, room)
    for lane in chart.lanes:
        line = [" "] * (round(end * per_unit) + 1)
        for bar in sorted((bar for bar in chart.bars if bar.lane == lane), key=lambda bar: bar.start):
            first, last = round(bar.start * per_unit), round(bar.end * per_unit)
            cells = visible(bar.label)[: max(last - first, 0)].ljust(max(last - first, 0), "·")
            line[first:last] = cells
        out.print(_text(f"  {lane.ljust(names)} {''.join(line).rstrip()}"), no_wrap=True, overflow="crop")
    out.print(_text(f"  {' ' * names} 0 to {end:g} {chart.unit}; a character is {1 / per_unit:g} {chart.unit}", "dim"))


def _columns_per_unit(chart: Gantt, end: float, room: int) -> float:
    """Enough for the longest label on the shortest bar, as far as the line has room; whole where it can be."""
    shortest = min(bar.end - bar.start for bar in chart.bars)
    wanted = max(len(bar.label) for bar in chart.bars) / shortest if shortest > 0 else room / end
    fitting = min(wanted, room / end)
    return float(int(fitting)) if fitting >= 1 else fitting


def _table(out: Console, table: Table) -> None:
    data = table_data(table, table.preview or MOST_ROWS)
    grid = _grid([column.title for column in data.columns], [column.kind == "text" for column in data.columns])
    for row in range(data.rows):
        grid.add_row(*(_text(column.shown(row)) for column in data.columns))
    more = f" ({data.rows} of {data.total} rows; -o and --json have all)" if data.total > data.rows else ""
    _print(out, table.title + more, grid, table.note)


def _calls(out: Console, calls: Sequence[Call]) -> None:
    if not calls:
        return
    grid = _grid(("", "collective", "axis", "purpose", "phase", "full tensor", "what"), (False, True, True, True, True, False, True))
    for number, call in enumerate(calls[:MOST_CALLS], 1):
        words = (call.kind, call.axis, call.purpose, call.phase, format_bytes(call.full_bytes), call.label)
        grid.add_row(str(number), *map(_text, words))
    more = f" (the first {MOST_CALLS} of {len(calls)})" if len(calls) > MOST_CALLS else ""
    _print(out, f"Collectives of one rank, in order{more}", grid)


def _checks(out: Console, checks: Sequence[Check]) -> None:
    wrong = [check for check in checks if not check.holds]
    listed = checks if len(checks) <= MOST_CHECKS else wrong
    title = f"Checks: {len(checks) - len(wrong)} of {len(checks)} hold"
    if not listed:
        if checks:
            out.print()
            out.print(_text(title, "bold"))
        return
    grid = _grid(("", "quantity", "counted", "has to be", "", "formula"), (True, True, False, False, True, True))
    for check in listed:
        mark = Text("✓", style="green") if check.holds else Text("✗ FAILS", style="bold red")
        bound = f" ± {number_text(check.tolerance)}" if check.tolerance else ""
        grid.add_row(
            mark,
            _text(check.quantity, "" if check.holds else "bold red"),
            Text(_value(check.counted)),
            Text(_value(check.expected) + bound),
            _text(check.unit),
            _text(check.formula, "dim"),
        )
    _print(out, title, grid)


def _value(value: object) -> str:
    text = exact(value)
    return f"{number_text(value)} ({text})" if text is not None and "/" in text else number_text(value)


def _grid(names: Sequence[str], left: Sequence[bool]) -> Grid:
    grid = Grid(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name, is_text in zip(names, left, strict=True):
        grid.add_column(_text(name), justify="left" if is_text else "right", overflow="fold", vertical="top")
    return grid


def _print(out: Console, title: str, grid: Grid, note: str = "") -> None:
    out.print()
    out.print(_text(title, "bold"))
    if note:
        out.print(_text(note, "dim"))
    out.print(Padding(grid, (0, 0, 0, 2), expand=False))
