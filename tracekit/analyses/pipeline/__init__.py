"""Pipeline schedules: what each stage does when, the bubble beside the ideal one, and how many micro-batches are in flight.

Work is known by ranges named ``PP:0F3`` (see ``pipeline.ranges``). In one run of the schedule, on the ranks of one pipeline,

    bubble share = 1 - |union of a rank's pieces of work| / (last end - first start over all ranks)

measured a rank and run, then as the mean. The ideal share is that of equal stages and messages that take no time, in closed form
(``tracekit.estimate.pipeline``: (p-1)/(v m + p-1) for gpipe, 1f1b and interleaved 1f1b), else from a replay of the recorded order.
What a rank does between its pieces of work (optimizer, gradient synchronization) counts as bubble only inside a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from tracekit.analyses._common import once
from tracekit.analyses.pipeline.figures import sections
from tracekit.analyses.pipeline.findings import findings
from tracekit.analyses.pipeline.ranges import Pieces, find
from tracekit.analyses.pipeline.rows import RUNS, STAGES, gaps_of, in_flight, pieces_of, runs_of
from tracekit.analyses.pipeline.summary import Summary, mean_durations, summary_of
from tracekit.findings import Finding, Section
from tracekit.graph.stages import axis_of, stages_of
from tracekit.job.activity import Activity
from tracekit.job.model import Job
from tracekit.units import NULL, known, listed, microseconds, plural

ORDER = 45

_DURATIONS = {"forward_ns": "F", "backward_ns": "B", "input_ns": "I", "weight_ns": "W"}


def reduce(activity: Activity) -> Pieces | None:
    """Pieces of pipeline work of one window; None where no range marks any."""
    return find(activity)


@dataclass(frozen=True)
class Pipeline:
    """``pieces`` has schema PIECES, ``gaps`` is what ``gaps_of`` makes of it, ``runs`` has schema RUNS. ``summary`` None: ``reason``."""

    summary: Summary | None
    reason: str
    pieces: pd.DataFrame
    gaps: pd.DataFrame
    runs: pd.DataFrame

    def findings(self) -> list[Finding]:
        """The bubble, what makes it larger than it has to be, stages that take longer than others."""
        return [] if self.summary is None else findings(self.summary, self.gaps, self.runs)

    def sections(self) -> list[Section]:
        """One run of one pipeline as a Gantt chart, where the time of its ranks goes, and every stage in figures."""
        return [] if self.summary is None else sections(self.summary, self.gaps, self.runs, self.stages)

    def json(self) -> dict[str, Any]:
        """``pipeline``; null, with the reason, where there is none."""
        if self.summary is None:
            return {"not_measured": {"pipeline": self.reason}}
        s, stages = self.summary, STAGES.records(self.stages)
        share = {
            "measured": s.measured,
            "ideal": s.ideal,
            "ideal_from": s.ideal_from or None,
            "ideal_with_twice_the_microbatches": s.ideal_twice,
            "replayed_equal_stages": s.equal,
            "replayed": s.replayed,
        }
        return {
            "pipeline": {
                "schedule": s.schedule,
                "schedule_from": s.source,
                "axis": s.axis or None,
                "stages": s.stages,
                "ranks_per_pipeline": s.ranks,
                "stages_per_rank": s.virtual,
                "microbatches": s.micro_batches,
                "pipelines": s.replicas,
                "runs": s.runs,
                "times_from": "device" if s.on_device else "host",
                "bubble_share": share,
                "in_flight_peak": _by_number(stages, "in_flight_peak"),
                "in_flight_until_input_peak": _by_number(stages, "in_flight_until_input_peak"),
                "by_stage": stages,
                "by_rank": self._by_rank(),
                "notes": list(s.notes),
            }
        }

    @cached_property
    def stages(self) -> pd.DataFrame:
        """Table STAGES; empty where no piece is known by its stage."""
        if self.summary is None or not self.summary.numbered:
            return STAGES.empty()
        means, trains = mean_durations(self.pieces), self.summary.schedule != "forward_only"
        late, early = (in_flight(self.pieces, "stage", until) for until in (True, False))
        share = (self.runs["bubble_ns"] / self.runs["run_ns"]).where(self.runs["run_ns"] > 0)
        by_rank = share.groupby(self.runs["rank"]).mean()
        held = {int(str(stage)): sorted(ranks.tolist()) for stage, ranks in self.pieces.groupby("stage")["rank"].unique().items()}
        return STAGES.frame(
            {
                "stage": list(held),
                "ranks": list(held.values()),
                "members": [listed(ranks) for ranks in held.values()],
                **{name: [means.get((stage, kind), np.nan) for stage in held] for name, kind in _DURATIONS.items()},
                "in_flight_peak": [late[stage] if trains else NULL for stage in held],
                "in_flight_until_input_peak": [early[stage] if trains else NULL for stage in held],
                "bubble_share": [by_rank.reindex(ranks).mean() for ranks in held.values()],
            }
        )

    def _by_rank(self) -> list[dict[str, Any]]:
        rows = RUNS.records(self.runs)
        keys = ["rank", "step", "turn", "for_stage"]
        waited = self.gaps[self.gaps["waited"] > 0].groupby(keys, as_index=False)["waited"].sum()
        for row in rows:
            row["waiting_for_stage_us"] = None if row["waiting_us"] is None else {}
        place = {(row["rank"], row["step"], row["turn"]): row["waiting_for_stage_us"] for row in rows}
        for rank, step, turn, stage, ns in zip(*(waited[name].tolist() for name in [*keys, "waited"]), strict=True):
            row = place[rank, known(step), turn]
            if row is not None:
                row[stage] = microseconds(ns)
        return rows


def _by_number(stages: list[dict[str, Any]], key: str) -> dict[int, int] | None:
    counts = {row["stage"]: row[key] for row in stages}
    return None if not counts or None in counts.values() else counts


@once
def analyze(job: Job) -> Pipeline:
    """Join the pieces of pipeline work of all ranks."""
    axis = axis_of(job)
    pieces, left_out, on_device = pieces_of(job, "pipeline", axis)
    gaps = gaps_of(pieces)
    runs = runs_of(gaps, job.clock.aligned)
    if not len(gaps):
        return Pipeline(None, _reason(job, left_out), pieces, gaps, runs)
    return Pipeline(summary_of(job, axis, pieces, runs, left_out, on_device), "", pieces, gaps, runs)


def _reason(job: Job, left_out: int) -> str:
    if left_out:
        return f"no run of the schedule was recorded whole on all ranks of a pipeline ({plural(left_out, 'part')} of one on a rank)"
    if any(found is not None for _, _, found in job.reduced("pipeline")):
        return "ranges mark forward and backward of micro-batches, but nothing says which stage each rank holds (--mesh pp=... would)"
    if (job.operations["purpose"] == "pipeline").any():
        return f"stages exchange messages, but no range such as PP:0F3 (stage, forward, micro-batch) marks their work{_unnumbered(job)}"
    return "nothing in the traces is a pipeline: no range of a stage, no message between stages"


def _unnumbered(job: Job) -> str:
    """Why messages do not show it either."""
    found = stages_of(job)
    why = found.reason or ("" if found.parts else "nothing that was recorded tells forward from backward (operators do)")
    return f", and messages alone do not tell it: {why}. Record with tracekit" if why else ": record with tracekit"
