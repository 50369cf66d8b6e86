"""The chain of work over all ranks that sets the length of the recorded steps (``graph.critical``): its pieces, and what they are.

The pieces follow each other without a gap, so their durations add up to the time from the begin of the first step to the last end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tracekit.findings import Finding, Section, StackedBars, Table
from tracekit.graph.critical import KINDS
from tracekit.graph.study import Study, study_of
from tracekit.job.model import Job
from tracekit.schema import Column, table
from tracekit.units import NS_PER_US, NULL

ORDER = 53
#: More pieces than this are not listed one by one in the JSON: those of the last step are.
MOST_PIECES = 20_000

CRITICAL_PATH = table(
    "critical_path",
    Column("step", "int64", "", "number of the step", "Step", "step", "the trace marks no steps"),
    Column("rank", "int64", "", "global rank", "Rank", "rank"),
    Column("kind", "str", "", "compute, communication, copy, host (a launch came late) or idle (nothing explains it)", "Kind", "kind"),
    Column("axis", "str", "", "mesh axis of a communication", "Axis", "axis", "no communication, or its axis is not known", "-"),
    Column("name", "str", "", "what ran; of host and idle what was waited for", "Work", "name"),
    Column("start_ns", "int64", "ns", "start, from the begin of the first step", "Start", "start_us"),
    Column("duration_ns", "int64", "ns", "how long it is on the path", "On the path", "duration_us"),
)


@dataclass(frozen=True)
class CriticalWork:
    """``pieces`` has schema CRITICAL_PATH; ``reason`` where there is none."""

    pieces: pd.DataFrame
    reason: str = ""

    def findings(self) -> list[Finding]:
        """Nothing of its own: what is on the path is not by itself what could be saved."""
        return []

    def sections(self) -> list[Section]:
        """What the path is made of, by step, and its longest pieces."""
        if not len(self.pieces):
            return []
        share = self.pieces.groupby(["step", "kind"])["duration_ns"].sum().unstack(fill_value=0)
        series = {kind: (share[kind] / NS_PER_US).tolist() for kind in KINDS if kind in share}
        labels = ["recorded window" if step == NULL else f"step {step}" for step in share.index.tolist()]
        keys = ["kind", "axis", "rank"]
        by = (
            self.pieces.groupby(keys, as_index=False)["duration_ns"].agg(["sum", "size"]).sort_values("sum", ascending=False, kind="stable")
        )
        frame = pd.DataFrame({**{key: by[key] for key in keys}, "us": by["sum"] / NS_PER_US, "pieces": by["size"]}).reset_index(drop=True)
        headings = {"kind": "Kind", "axis": "Axis", "rank": "Rank", "us": "On the path [us]", "pieces": "Pieces"}
        lead = "The chain of work that sets the length of a step: only what is on it can shorten one. Idle is what nothing explains."
        parts = Table("Critical path by kind, axis and rank", frame, headings, missing={"axis": "no communication"})
        return [
            Section("Critical path", lead, (StackedBars("What the critical path is made of", labels, series, "us"), parts), "critical-path")
        ]

    def json(self) -> dict[str, Any]:
        """``critical_path``: its pieces in order of time."""
        if self.reason:
            return {"not_measured": {"critical_path": self.reason}}
        shown = self.pieces
        if len(shown) > MOST_PIECES:
            shown = shown[shown["step"] == shown["step"].iloc[-1]]
        return {"critical_path": CRITICAL_PATH.records(shown)}


def analyze(job: Job) -> CriticalWork:
    """Follow the chain back from the last end."""
    study = study_of(job)
    if not isinstance(study, Study):
        return CriticalWork(CRITICAL_PATH.empty(), study.reason)
    graph = study.graph
    path = study.path
    node = path.node
    operation = graph.operation[node]
    axes = job.operations["axis"].astype("str").to_numpy() if len(job.operations) else np.array([""], dtype=object)
    communicates = path.kind == KINDS.index("communication")
    return CriticalWork(
        CRITICAL_PATH.frame(
            {
                "step": graph.numbers[graph.step[node]],
                "rank": graph.rank[node],
                "kind": np.array(KINDS, dtype=object)[path.kind],
                "axis": np.where(communicates & (operation >= 0), axes[np.maximum(operation, 0)], ""),
                "name": [graph.names[code] for code in graph.name[node].tolist()],
                "start_ns": path.start - graph.begin,
                "duration_ns": path.end - path.start,
            }
        )
    )
