"""The life of sharded units for a reader: one step as spans, and a table of every unit."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tracekit.analyses.memory.rows import RankMemory
from tracekit.findings import Section, Table, Timeline
from tracekit.memory.lifecycle import UnitSpan
from tracekit.schema import Column, table
from tracekit.units import NS_PER_US, NULL, format_bytes, plural

UNITS = table(
    "sharded_units",
    Column("unit", "str", "", "name of the unit", "Unit"),
    Column("state", "str", "", "full parameters or full gradient", "State"),
    Column("phase", "str", "", "phase in which it began", "Began in", "", "outside of every phase"),
    Column("times", "int64", "", "how often", "Times"),
    Column("bytes", "int64", "bytes", "most bytes", "Size"),
    Column("length_ns", "float64", "ns", "mean length", "Mean length", "", "the recording ends before it"),
)


def lifecycle_sections(row: RankMemory) -> list[Section]:
    """Units of one rank: the step with the peak (else the first one) as spans, all steps as a table; nothing without units."""
    found = row.memory.lifecycle
    if found is None or not found.spans:
        return []
    lead = (
        f"When each sharded unit of {row.label} held full parameters and full gradients. Most at one time: "
        f"{plural(found.most_units, 'unit')}, {format_bytes(found.most_bytes)} of full parameters."
    )
    wanted = row.memory.peak_step if row.memory.peak_step is not None else found.spans[0].step
    step = [span for span in found.spans if span.step == wanted] or found.spans
    title = "Sharded units" if wanted is None else f"Sharded units in step {wanted}"
    return [Section("Life of the sharded units", lead, (_spans(title, step), _table(found.spans)), name="units")]


def _spans(title: str, spans: list[UnitSpan]) -> Timeline:
    zero, last = min(span.start_ns for span in spans), max(max(span.end_ns, span.start_ns) for span in spans)
    end = np.array([last if span.end_ns == NULL else span.end_ns for span in spans], np.int64)
    frame = pd.DataFrame(
        {
            "lane": [span.unit for span in spans],
            "start_us": (np.array([span.start_ns for span in spans], np.int64) - zero) / NS_PER_US,
            "end_us": (end - zero) / NS_PER_US,
            "name": [f"{span.state}, {format_bytes(span.bytes)}" for span in spans],
            "category": [span.state for span in spans],
        }
    )
    return Timeline(title, frame, "A span that the recording cuts ends with the last one.")


def _table(spans: list[UnitSpan]) -> Table:
    """Mean over the steps of each unit, state and phase."""
    frame = pd.DataFrame(
        {
            "unit": [span.unit for span in spans],
            "state": [span.state for span in spans],
            "phase": [span.phase for span in spans],
            "bytes": [span.bytes for span in spans],
            "length_ns": [np.nan if span.end_ns == NULL else span.end_ns - span.start_ns for span in spans],
        }
    )
    grouped = frame.groupby(["unit", "state", "phase"], sort=False)
    means = grouped.agg(times=("bytes", "size"), bytes=("bytes", "max"), length_ns=("length_ns", "mean")).reset_index()
    return Table.of("Every unit", UNITS, means)
