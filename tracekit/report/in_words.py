"""What a chart shows, for who cannot see it: its size and its largest figure; the tables of the chapter have the rest."""

from __future__ import annotations

from tracekit.findings import Chart, Heatmap, StackedArea, StackedBars
from tracekit.report.quantity import quantity


def in_words(chart: Chart) -> str:
    """One phrase; empty for a chart whose title says it all."""
    if isinstance(chart, StackedBars):
        return _bars(chart)
    if isinstance(chart, Heatmap):
        return _heatmap(chart)
    return f"areas of {', '.join(map(str, chart.series))} over time" if isinstance(chart, StackedArea) else ""


def _bars(chart: StackedBars) -> str:
    totals = [sum(value or 0.0 for value in column) for column in zip(*chart.series.values(), strict=True)]
    if not totals:
        return ""
    most = max(range(len(totals)), key=totals.__getitem__)
    parts = ", ".join(map(str, chart.series))
    return f"{len(totals)} bars of {parts}; the longest is {chart.labels[most]} with {quantity(totals[most], chart.unit)}"


def _heatmap(chart: Heatmap) -> str:
    size = f"{len(chart.y_labels)} rows, {len(chart.x_labels)} columns"
    best: tuple[float, str] | None = None
    for label, row in zip(chart.y_labels, chart.values, strict=True):
        for name, value in zip(chart.x_labels, row, strict=True):
            if value is not None and (best is None or value > best[0]):
                best = (value, f"{label}, {name}")
    return f"{size}; most is {quantity(best[0], chart.unit)} at {best[1]}" if best and chart.unit.strip() else size
