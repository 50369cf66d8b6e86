"""The tables of the comparison, as JSON and reader get them: figure by figure, and link by link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from tracekit.analyses.collectives.links import Link
from tracekit.analyses.comparison.lines import DIFFERS, MATCH, NOT_MEASURED, Line
from tracekit.estimate.hardware import Hardware
from tracekit.findings import Table
from tracekit.schema import Column, table

_ONE_MISSING = "one of the two is missing"
LINES = table(
    "comparison",
    Column("quantity", "str", "", "its name, see below", "Quantity", "quantity"),
    Column("rank", "object", "", "global rank; `null`: of the whole job", "", "rank"),
    Column("whose", "str", "", "the rank, or all", "Rank"),
    Column("predicted", "object", "", "by the model, in `unit`; `null`: it has no figure", "", "predicted"),
    Column("measured", "object", "", "in the job, in `unit`; `null`: not measured", "", "measured"),
    Column("shown_predicted", "float64", "", "predicted, shares in percent", "Predicted", "", "the model has no figure"),
    Column("shown_measured", "float64", "", "measured, shares in percent", "Measured", "", "not measured"),
    Column("unit", "str", "", "`bytes`, `calls`, `us`, `share`; empty for a rank without a prediction", "", "unit"),
    Column("shown_unit", "str", "", "unit of the shown figures", "Unit"),
    Column("ratio", "float64", "", "measured / predicted, where something was predicted", "Measured / predicted", "ratio", _ONE_MISSING),
    Column("verdict", "str", "", "`match`: equal, or within `tolerance` (and 64 bytes); `differs`; `not_measured`", "", "verdict"),
    Column("shown_verdict", "str", "", "the verdict in words", "Verdict"),
    Column("why", "str", "", "what differs: the likely cause. Not measured: the reason. Empty for a match", "Why", "why"),
    Column("tolerance", "float64", "share", "largest difference that is a match; 0: they have to be equal", "", "tolerance"),
)
_FEW = "too few collectives, or all of one size"
_NO_LATENCY = f"{_FEW}, or time is proportional to size"
LINKS = table(
    "links",
    Column("axis", "str", "", "mesh axis", "Axis", "axis"),
    Column("operations", "int64", "", "matched collectives that were looked at", "Collectives", "operations"),
    Column("latency", "float64", "us", "of one logical step (alpha)", "Latency of a step", "latency_us", _NO_LATENCY),
    Column("gb_s", "float64", "GB/s", "1 / beta", "Bandwidth", "gb_s", "too few collectives, or time does not grow with size"),
    Column("residual", "float64", "share", "median of abs(predicted - measured) / measured", "Residual", "residual", _FEW),
    Column("best_gb_s", "float64", "GB/s", "highest bus bandwidth of one collective", "Best seen", "best_gb_s"),
    Column("peak_gb_s", "object", "GB/s", "of the device's link within a node; `null` for a device that is no preset", "", "peak_gb_s"),
    Column("problem", "str", "", "what the fit does not tell, and why; empty where it tells all", "", "problem"),
    Column("crosses", "object", "", "calls that leave a node were looked at for the best; `null`: not known", "", "crosses_nodes"),
)
#: Headings where the figure beside the measured one is what other traffic of the job implies.
_IMPLIED = {"shown_predicted": "Implied", "ratio": "Measured / implied"}
_ORDER = {DIFFERS: 0, NOT_MEASURED: 1, MATCH: 2}


def lines_frame(lines: Sequence[Line]) -> pd.DataFrame:
    """Table LINES."""
    return LINES.frame(
        {
            "quantity": [each.quantity for each in lines],
            "rank": pd.Series([each.rank for each in lines], dtype=object),
            "whose": ["all" if each.rank is None else str(each.rank) for each in lines],
            "predicted": pd.Series([each.predicted for each in lines], dtype=object),
            "measured": pd.Series([each.measured for each in lines], dtype=object),
            "shown_predicted": [_percent(each.predicted, each.unit) for each in lines],
            "shown_measured": [_percent(each.measured, each.unit) for each in lines],
            "unit": [each.unit for each in lines],
            "shown_unit": ["%" if each.unit == "share" else each.unit for each in lines],
            "ratio": [each.ratio for each in lines],
            "verdict": [each.verdict for each in lines],
            "shown_verdict": [each.verdict.replace("_", " ") for each in lines],
            "why": [each.why for each in lines],
            "tolerance": [each.tolerance for each in lines],
        }
    )


def lines_table(lines: Sequence[Line], modelled: bool = True) -> Table | None:
    """The figures, those that differ first; without a model under headings that predict nothing."""
    if not lines:
        return None
    shown = sorted(lines, key=lambda each: _ORDER[each.verdict])
    found = Table.of("Predicted and measured", LINES, lines_frame(shown), note="What differs comes first.", preview=6)
    return found if modelled else replace(found, title="Traffic beside itself", columns={**found.columns, **_IMPLIED})


def _percent(value: float | None, unit: str) -> float | None:
    return None if value is None else float(value) * (100 if unit == "share" else 1)


def links_frame(links: Sequence[Link], hardware: Hardware | None) -> pd.DataFrame:
    """Table LINKS."""
    return LINKS.frame(
        {
            "axis": [link.axis for link in links],
            "operations": [link.operations for link in links],
            "latency": [link.latency_us for link in links],
            "gb_s": [link.gb_s for link in links],
            "residual": [link.residual for link in links],
            "best_gb_s": [link.best_gb_s for link in links],
            "peak_gb_s": pd.Series([hardware.inside.gb_s if hardware is not None else None] * len(links), dtype=object),
            "problem": [link.problem for link in links],
            "crosses": pd.Series([link.crosses for link in links], dtype=object),
        }
    )


def links_table(links: Sequence[Link], hardware: Hardware | None) -> Table | None:
    """The fitted lines."""
    if not links:
        return None
    note = "transfer = latency x logical steps + bytes sent / bandwidth, fitted to the job's own collectives."
    if hardware is not None:
        note += f" {hardware.name}: {hardware.inside.gb_s:g} GB/s within a node, {hardware.outside.gb_s:g} GB/s between nodes."
    return Table.of("Links", LINKS, links_frame(links, hardware), note=note, preview=6)
