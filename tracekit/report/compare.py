"""Two sides beside each other: the JSON of ``tracekit compare``, and one HTML file that opens from disk."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from tracekit import __version__
from tracekit.compare.align import Side
from tracekit.compare.causes import Cause
from tracekit.compare.changes import Change, Comparison
from tracekit.compare.held import OwnerMoved
from tracekit.compare.statistics import ALPHA, ENOUGH_RUNS
from tracekit.compare.words import amount, headline, phrase, sizes
from tracekit.files import write_atomically
from tracekit.findings import StackedBars, Table
from tracekit.report import figures
from tracekit.report.document import clean
from tracekit.report.pages import drawn_page, figure_block, table_block
from tracekit.units import format_bytes

SCHEMA_VERSION = 1
_SCRIPTS = ("unpack.js", "page.js", "tables.js", "charts.js")
#: Consequences that are listed under a cause in the page; the tables have all.
MOST_CONSEQUENCES = 12
#: Chapters of changes: title, first words of keys.
_CHAPTERS = (
    ("Step, phases and axes", ("step", "phase", "exposed", "pipeline", "mfu", "coverage")),
    ("Collectives", ("collectives",)),
    ("Kernels and operators", ("kernels", "operator")),
    ("Memory", ("memory",)),
)


def document(comparison: Comparison, found: Sequence[Cause]) -> dict[str, Any]:
    """The comparison as plain values (docs/json.md)."""
    return {
        "schema_version": SCHEMA_VERSION,
        "tracekit_version": __version__,
        "headline": headline(comparison, list(found)),
        "base": _side(comparison.base),
        "new": _side(comparison.new),
        "notes": clean(comparison.alignment.notes),
        "causes": [
            {
                "text": clean(phrase(cause)),
                "quantity": clean(cause.root.key),
                "gated": gated(cause),
                "consequences": [clean(change.key) for change in cause.consequences],
            }
            for cause in found
        ],
        "changes": [clean(_change(change)) for change in comparison.changes],
        "owners": [clean(_owner(moved)) for moved in comparison.owners],
    }


def _owner(moved: OwnerMoved) -> dict[str, Any]:
    change = moved.change
    return {
        "rank": moved.rank,
        "device": moved.device or None,
        "kind": change.kind,
        "category": change.category,
        "unit": change.unit or None,
        "name": change.name or None,
        "base_bytes": change.before,
        "new_bytes": change.after,
    }


def _side(runs: Side) -> dict[str, Any]:
    mesh = runs[0].axes
    return {
        "recordings": [clean(run.name) for run in runs],
        "world_size": runs[0].world_size,
        "device": clean(runs[0].device) or None,
        "mesh": {clean(name): size for name, size in mesh},
        "not_measured": clean(runs[0].not_measured),
    }


def _change(change: Change) -> dict[str, Any]:
    return {
        "quantity": change.key,
        "label": change.label,
        "unit": change.unit,
        "outcome": change.outcome,
        "base": change.base,
        "new": change.new,
        "difference": None if change.base is None or change.new is None else change.difference,
        "relative": change.relative,
        "noise": change.noise,
        "p": change.p,
        "spread": change.spread,
        "ranks": list(change.ranks),
        "rank": change.rank,
        "why": change.why or None,
        "at_least": list(change.at_least),
    }


def gated(cause: Cause) -> bool:
    """Whether a check would look at the cause or at anything that followed from it."""
    return any(change.rule != "detail" for change in (cause.root, *cause.consequences))


def write(path: str | os.PathLike[str], comparison: Comparison, found: Sequence[Cause], plotly_js: str = "inline") -> None:
    """Write the page; an existing file is replaced only when the new one is whole. Raises OSError."""
    write_atomically(path, drawn_page("compare.html", content(comparison, found), _SCRIPTS, plotly_js))


def content(comparison: Comparison, found: Sequence[Cause]) -> dict[str, Any]:
    """What the template shows."""
    counted = [cause for cause in found if gated(cause)]
    charts = [chart for chart in _charts(comparison) if chart.series]
    return {
        "version": __version__,
        "headline": headline(comparison, list(found)),
        "sides": [("BASE", _side_facts(comparison.base)), ("NEW", _side_facts(comparison.new))],
        "notes": comparison.alignment.notes,
        "causes": [_cause(cause) for cause in counted],
        "others": [phrase(cause) for cause in found if cause not in counted],
        "blocks": [figure_block(chart, f"c{place}", figures.figure(chart)) for place, chart in enumerate(charts)],
        "tables": [table_block(table, f"t{place}") for place, table in enumerate(_tables(comparison))],
        "statistics": _statistics(comparison),
    }


def _side_facts(runs: Side) -> list[tuple[str, str]]:
    first = runs[0]
    names = ", ".join(run.name for run in runs[:4]) + (f" and {len(runs) - 4} more" if len(runs) > 4 else "")
    mesh = ", ".join(f"{name}={size}" for name, size in first.axes) or "not known"
    steps = len({step for _, step in first.steps})
    return [
        ("recordings", f"{len(runs)}: {names}"),
        ("ranks", f"{len(first.ranks)} of {first.world_size or '?'}"),
        ("mesh", mesh),
        ("steps", str(steps)),
        ("device", first.device or "CPU"),
    ]


def _cause(cause: Cause) -> dict[str, Any]:
    shown = cause.consequences[:MOST_CONSEQUENCES]
    better = cause.root.outcome == "better" and not any(c.outcome == "worse" and c.rule != "detail" for c in cause.consequences)
    return {
        "text": phrase(cause),
        "severity": "info" if better else "warning",
        "mark": "better" if better else cause.root.outcome if cause.root.outcome != "better" else "changed",
        "consequences": [(change.label, sizes(change), change.outcome) for change in shown],
        "more": len(cause.consequences) - len(shown),
        "how": _how(cause.root),
    }


def _how(change: Change) -> str:
    """How sure the change is."""
    if change.p is None:
        where = f" on ranks {', '.join(map(str, change.ranks[:8]))}{', ...' if len(change.ranks) > 8 else ''}" if change.ranks else ""
        return f"exact: equal in every step of the base, different in the new one{where}"
    return (
        f"p = {change.p:.2g} (rank test), spread over ranks and steps {change.spread or 0:.1%}, drift allowed for {change.noise or 0:.1%}"
    )


def _statistics(comparison: Comparison) -> str:
    runs = min(len(comparison.base), len(comparison.new))
    what = "one value a recording" if runs >= ENOUGH_RUNS else "one value a rank and step, and the drift between recordings as a margin"
    return (
        f"Times count as changed where a one-sided rank test (Mann-Whitney) gives p <= {ALPHA} on {what}. "
        f"{len(comparison.base)} against {len(comparison.new)} recordings; from {ENOUGH_RUNS} a side on the margin is no longer needed. "
        "Counts and bytes are compared value by value."
    )


def _charts(comparison: Comparison) -> list[StackedBars]:
    by_key = comparison.by_key()
    parts = {
        "step.compute": "compute",
        "step.exposed_comm": "exposed communication",
        "step.exposed_copy": "exposed copies",
        "step.idle": "idle",
    }
    known = {name: by_key[key] for key, name in parts.items() if key in by_key}
    return [
        _bars("Where a step goes", known, "us", "Mean over ranks of the typical step."),
        _bars("Exposed communication by axis", _starting(by_key, r"exposed."), "us"),
        _bars("Compute by phase", {k.removesuffix(".compute"): c for k, c in _starting(by_key, "phase.").items() if "@" not in k}, "us"),
        _bars("Kernels by family", _ending(by_key, "kernels.", ".time"), "us", "Kernels that overlap count each for itself."),
        _bars("Memory at the peak", _categories(by_key), "bytes", "Mean over ranks, or the rank that changed most where it changed."),
    ]


def _starting(by_key: Mapping[str, Change], start: str) -> dict[str, Change]:
    return {key.removeprefix(start): change for key, change in by_key.items() if key.startswith(start)}


def _ending(by_key: Mapping[str, Change], start: str, end: str) -> dict[str, Change]:
    return {key.removesuffix(end): change for key, change in _starting(by_key, start).items() if key.endswith(end)}


def _categories(by_key: Mapping[str, Change]) -> dict[str, Change]:
    skipped = ("peak", "reserved")
    return {
        key.replace("_", " "): c for key, c in _starting(by_key, "memory.").items() if key not in skipped and not key.startswith("unit.")
    }


def _bars(title: str, changes: Mapping[str, Change], unit: str, note: str = "") -> StackedBars:
    series = {name: [change.base or 0.0, change.new or 0.0] for name, change in changes.items() if change.base or change.new}
    return StackedBars(title, ["BASE", "NEW"], series, unit, note)


def _tables(comparison: Comparison) -> list[Table]:
    tables = [_table(comparison, title, words) for title, words in _CHAPTERS]
    return [*tables, _owners_table(comparison.owners)] if comparison.owners else tables


def _owners_table(owners: Sequence[OwnerMoved]) -> Table:
    rows = {
        "rank": [moved.rank for moved in owners],
        "device": [moved.device for moved in owners],
        "kind": [moved.change.kind for moved in owners],
        "owner": [moved.owner for moved in owners],
        "before": [format_bytes(moved.change.before) for moved in owners],
        "after": [format_bytes(moved.change.after) for moved in owners],
        "difference": [moved.change.after - moved.change.before for moved in owners],
    }
    headings = {"rank": "Rank", "device": "Device", "kind": "", "owner": "Owner", "before": "BASE", "after": "NEW"}
    return Table("Owners of memory at the end of the snapshots", pd.DataFrame(rows), headings | {"difference": "Change [bytes]"})


def _side_amount(change: Change, side: str) -> str:
    value = change.base if side == "BASE" else change.new
    return "–" if value is None else ("at least " if side in change.at_least else "") + amount(value, change.unit)


def _table(comparison: Comparison, title: str, words: Sequence[str]) -> Table:
    rows = [change for change in comparison.changes if change.key.partition(".")[0] in words]
    order = ("worse", "better", "changed", "not_measured", "noise", "same")
    rows.sort(key=lambda change: order.index(change.outcome))
    frame = pd.DataFrame(
        {
            "label": [change.label for change in rows],
            "outcome": [change.outcome.replace("_", " ") for change in rows],
            "base": [_side_amount(change, "BASE") for change in rows],
            "new": [_side_amount(change, "NEW") for change in rows],
            "relative": [float("nan") if change.relative is None else change.relative for change in rows],
            "noise": [float("nan") if change.noise is None or change.p is None else change.noise for change in rows],
            "p": [float("nan") if change.p is None else change.p for change in rows],
        }
    )
    headings = {
        "label": "Quantity",
        "outcome": "Outcome",
        "base": "BASE",
        "new": "NEW",
        "relative": "Change [share]",
        "noise": "Drift allowed for [share]",
        "p": "p",
    }
    exact = "exact, or not measured on both sides"
    return Table(title, frame, headings, missing={"relative": "nothing in BASE", "noise": exact, "p": exact})
