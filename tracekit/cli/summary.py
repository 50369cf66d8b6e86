"""The answer in a terminal: which job, what could not be read, where the time of a step goes, and what to do about it.

Everything comes from the JSON document. Names of the trace are text (never markup), and no control character of theirs reaches the
terminal.
"""

from __future__ import annotations

import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from tracekit.cli.terminal import console, grid, print_grid, text
from tracekit.report import coverage, overview
from tracekit.report.cells import Preview
from tracekit.report.quantity import quantity
from tracekit.report.text import visible

MOST_PROBLEMS, MOST_FINDINGS, MOST_RANKS, WORST_RANKS = 10, 7, 16, 3
_NARROW, _LONGEST_NAME = 90, 48
_COLUMNS = (
    ("step_us", "step", True),
    ("compute_us", "compute", True),
    ("exposed_comm_us", "exposed comm", True),
    ("hidden_comm_us", "hidden comm", False),
    ("memory_copy_us", "exposed copies", False),
    ("idle_us", "idle", True),
)
_STYLES = {"critical": "bold red", "warning": "yellow", "info": "dim"}


def print_summary(
    document: Mapping[str, Any], previews: Sequence[Preview], report: str | None, stream: IO[str] | None = None, *, replaced: bool = False
) -> None:
    """Print everything; ``report`` is where the HTML was written, ``replaced``: in place of an older one."""
    out = console(sys.stdout if stream is None else stream)
    _headline(out, document)
    _problems(out, problems(document))
    _steps(out, document.get("mean_step") or [], culprits(document["findings"]))
    _axes(out, by_axis(document))
    for preview in previews:
        _preview(out, preview)
    _findings(out, [finding for finding in document["findings"] if not _said_above(finding["id"])])
    if report is not None:
        out.print(text(f"Report: {report}" + (" (the one there was is replaced)" if replaced else ""), "bold"), soft_wrap=True)


def _headline(out: Console, document: Mapping[str, Any]) -> None:
    facts = {fact.label: fact for fact in overview.facts(document)}
    parts = [f"{facts['Ranks'].value} ranks" if facts["Ranks"].value != "1" else "1 rank"]
    parts += [f"mesh {facts['Mesh'].value}"] if document["job"]["mesh"]["axes"] else []
    parts += [facts[label].value for label in ("Device", "Backend") if label in facts]
    parts.append(f"steps {facts['Steps'].value}")
    if facts["Clocks"].value != overview.ONE_TIME_LINE:
        parts.append(f"clocks {facts['Clocks'].value}")
    out.print(text(" · ".join(parts)))
    out.print(text(overview.answer(document).sentence, "bold"))


def problems(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(which file, what is wrong with it), unreadable files first; one sentence that many files share is one line.

    Sentences about the whole job come with an empty name.
    """
    shared: dict[str, list[str]] = {}
    single: list[tuple[str, str]] = []
    for name, entry in zip(coverage.short_names(document), document["coverage"], strict=True):
        joined = "; ".join(entry["problems"])
        if entry["status"] in ("skipped", "truncated", "duplicate"):
            single.append((name, joined if entry["status"] in joined else f"{entry['status']}: {joined}" if joined else entry["status"]))
        else:
            for problem in entry["problems"]:
                shared.setdefault(problem, []).append(name)
    grouped = [(_some(names), problem) for problem, names in shared.items()]
    return [("", note) for note in document["notes"]] + single + grouped


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _problems(out: Console, lines: Sequence[tuple[str, str]]) -> None:
    for name, problem in lines[:MOST_PROBLEMS]:
        out.print(Text("! ", style="yellow") + text(f"{name}: {problem}" if name else problem))
    if len(lines) > MOST_PROBLEMS:
        out.print(text(f"... and {len(lines) - MOST_PROBLEMS} more, see the report", "dim"))


def culprits(findings: Sequence[Mapping[str, Any]]) -> list[int]:
    """Ranks that single findings are about, the most costly first."""
    named = [finding["subject"]["ranks"] for finding in findings if finding.get("subject")]
    return list(dict.fromkeys(rank for ranks in named if len(ranks) == 1 for rank in ranks))[:WORST_RANKS]


def step_rows(mean_step: Sequence[Mapping[str, Any]], named: Sequence[int] = ()) -> list[tuple[str, Mapping[str, Any]]]:
    """(label, mean step) for the table: every rank; of many the spread, those ``named`` by findings, and who computes longest and least."""
    means = [mean for mean in mean_step if mean["rank"] is not None]
    if len(means) <= MOST_RANKS:
        return [(f"rank {mean['rank']}", mean) for mean in means]
    spread: list[tuple[str, Mapping[str, Any]]] = []
    for label, pick in (("least", min), ("median", statistics.median), ("most", max)):
        row = {}
        for key, _, _ in _COLUMNS:
            values = [mean[key] for mean in means if mean[key] is not None]
            row[key] = pick(values) if values else None
        spread.append((label, row))
    known = [mean for mean in means if mean["step_us"] and mean["compute_us"] is not None]
    order = sorted(known, key=lambda mean: mean["compute_us"])
    chosen: dict[int, tuple[str, Mapping[str, Any]]] = {}
    for mean in known:
        if mean["rank"] in named:
            chosen[mean["rank"]] = (f"rank {mean['rank']} (see findings)", mean)
    for some, why in ((order[-1:], "longest compute"), (order[:1], "least compute")):
        for each in some:
            chosen.setdefault(each["rank"], (f"rank {each['rank']} ({why})", each))
    return [*spread, *chosen.values()]


def _steps(out: Console, mean_step: Sequence[Mapping[str, Any]], named: Sequence[int]) -> None:
    if len(mean_step) < 2:
        return
    many = len(mean_step) - 1 > MOST_RANKS
    title = "Mean step: spread over ranks, and the ranks that matter" if many else "Mean step of each rank"
    columns = [(key, name) for key, name, always in _COLUMNS if always or out.width >= _NARROW]
    table = grid(["", *(name for _, name in columns)], cut=True)
    for label, mean in step_rows(mean_step, named):
        table.add_row(label, *(_part(mean, key) for key, _ in columns))
    print_grid(out, title, table)


def _part(mean: Mapping[str, Any], key: str) -> Text:
    value, step = mean[key], mean["step_us"]
    if value is None:
        return Text("–", style="dim")
    if key == "step_us" or not step:
        return Text(overview.format_us(value))
    return Text(f"{overview.format_us(value)} {overview.percent(value / step):>4}")


def by_axis(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One entry a mesh axis, the most exposed first: means over ranks and steps of what ``exposed_by_axis`` holds, and the bandwidth of
    its largest collective."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in document["exposed_by_axis"] or []:
        rows.setdefault(row["axis"], []).append(row)
    steps = max(1, len({(row["rank"], row.get("step")) for row in document["breakdown"] or []}))
    result = []
    for axis, entries in rows.items():
        groups = [group for group in document["process_groups"] or [] if (group["axis"] or "unknown") == axis]
        largest = max(
            (c for c in document["collectives"] or [] if (c["axis"] or "unknown") == axis and c.get("busbw_gb_s") is not None),
            key=lambda c: c["full_bytes"] or 0,
            default=None,
        )
        sizes = sorted({group["size"] for group in groups if group["size"]})
        result.append(
            {
                "axis": axis,
                "sizes": sizes,
                "operations": _per_step(groups, "step_operations", steps),
                "sent_bytes": _per_step(groups, "step_sent_bytes", steps),
                "busy_us": _mean_over(entries, "busy_us"),
                "exposed_us": _mean_over(entries, "exposed_us"),
                "busbw_gb_s": largest["busbw_gb_s"] if largest else None,
            }
        )
    return sorted(result, key=lambda entry: -(entry["exposed_us"] or 0.0))


def _per_step(groups: Sequence[Mapping[str, Any]], key: str, steps: int) -> float | None:
    values = [group[key] for group in groups if group.get(key) is not None]
    return sum(values) / steps if values else None


def _mean_over(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return statistics.fmean(values) if values else None


def _axes(out: Console, axes: Sequence[Mapping[str, Any]]) -> None:
    if not axes:
        return
    wide = out.width >= _NARROW
    names = ["axis", "size", "exposed", "busy", *(("ops", "sent", "busbw") if wide else ())]
    table = grid(names, cut=True)
    for entry in axes:
        cells = [
            text(entry["axis"]),
            Text(" or ".join(map(str, entry["sizes"][:3])) or "–"),
            Text(overview.format_us(entry["exposed_us"])),
            Text(overview.format_us(entry["busy_us"])),
        ]
        if wide:
            cells += [
                Text(quantity(entry["operations"], "")),
                Text(quantity(entry["sent_bytes"], "bytes")),
                Text(quantity(entry["busbw_gb_s"], "GB/s")),
            ]
        table.add_row(*cells)
    print_grid(out, "Communication by mesh axis, a rank and step", table)


def _preview(out: Console, preview: Preview) -> None:
    """The first rows of a table, with as many of its columns as the line holds."""
    data = preview.table
    longest = max(12, min(_LONGEST_NAME, out.width // 3))
    texts = [[text(_cut(cell, longest)) for _, cell in row] for row in data.first()]
    headings: list[str] = []
    room = out.width - 2
    for index, column in enumerate(data.columns):
        width = max(row[index].cell_len for row in texts)
        heading = textwrap.fill(visible(column.title), max(width, 12), break_long_words=False)
        room -= max(width, *(len(line) for line in heading.splitlines() or [""])) + 2
        if room < 0:
            break
        headings.append(heading)
    shown = grid(headings, [column.kind == "text" for column in data.columns], cut=True)
    for row in texts:
        shown.add_row(*row[: len(headings)])
    left_out = [f"{data.rows} of {data.total} rows"] if data.total > data.rows else []
    left_out += [f"{len(headings)} of {len(data.columns)} columns"] if len(headings) < len(data.columns) else []
    print_grid(out, f"{preview.title} ({', '.join(left_out)})" if left_out else preview.title, shown)


def _cut(cell: str, length: int) -> str:
    return cell if len(cell) <= length else cell[: length - 1] + "…"


def _said_above(identifier: str) -> bool:
    """True for findings that repeat what the lines about files and the job have said."""
    return identifier.startswith("coverage.") and identifier != "coverage.unmatched"


def _findings(out: Console, findings: Sequence[Mapping[str, Any]]) -> None:
    if not findings:
        return
    out.print()
    advised: set[str] = set()
    for finding in findings[:MOST_FINDINGS]:
        grid = Grid.grid(padding=(0, 1))
        grid.add_column(width=8, no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(Text(finding["severity"], style=_STYLES[finding["severity"]]), text(finding["text"]))
        for told in finding["consequences"][:2]:
            grid.add_row("", text(told))
        if finding["advice"] and finding["advice"] not in advised:
            advised.add(finding["advice"])
            grid.add_row("", text(finding["advice"], "dim"))
        out.print(grid)
    if len(findings) > MOST_FINDINGS:
        out.print(text(f"... and {len(findings) - MOST_FINDINGS} more findings, see the report", "dim"))
    out.print()
