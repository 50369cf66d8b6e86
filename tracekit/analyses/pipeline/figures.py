"""The report's chapter on a pipeline."""

from __future__ import annotations

import pandas as pd

from tracekit.analyses.pipeline.ranges import KINDS
from tracekit.analyses.pipeline.rows import RUN, STAGES
from tracekit.analyses.pipeline.summary import Summary
from tracekit.findings import Chart, Section, StackedBars, Table, Timeline
from tracekit.units import NS_PER_US, NULL, listed

_CATEGORIES = dict(zip(KINDS, ("forward", "backward", "backward for the input", "backward for the weights"), strict=True))
_PARTS = {
    "busy_ns": "compute of stages",
    "fill_ns": "before its first piece",
    "waiting_ns": "waiting for another stage",
    "other_ns": "messages and the host",
    "drain_ns": "idle behind its last piece",
}


def sections(summary: Summary, gaps: pd.DataFrame, runs: pd.DataFrame, stages: pd.DataFrame) -> list[Section]:
    """One section: a run as a Gantt chart, the time of its ranks, every stage in figures."""
    replica = _worst(runs)
    lead = f"{summary.schedule}: {summary.stages} stages on {summary.ranks} ranks, {summary.micro_batches} micro-batches. "
    if summary.measured is not None and summary.ideal is not None:
        lead += f"The bubble is {summary.measured:.1%} of a run; equal stages and free messages would leave {summary.ideal:.1%}. "
    elif summary.measured is not None:
        lead += f"The bubble is {summary.measured:.1%} of a run. "
    lead += "In flight: micro-batches whose activations a stage holds at once." if summary.numbered else f"{summary.notes[0]}."
    charts: list[Chart] = [gantt(summary, gaps, replica)]
    own = runs[(runs["replica"] == replica) & (runs["run_ns"] != NULL)]
    if len(own):
        charts.append(_bars(own))
    headed = [column for column in STAGES.columns if column.heading]
    told = [column.name for column in headed if any(cell is not None for cell in column.plain(stages[column.name]))]
    if len(stages):
        charts.append(Table.of("Stages", STAGES, stages, told))
    return [Section("Pipeline", lead, tuple(charts), name="pipeline")]


def _worst(runs: pd.DataFrame) -> int:
    """The replica with the largest mean bubble; the first where none is measured."""
    known = runs[(runs["run_ns"] != NULL) & (runs["run_ns"] > 0)]
    if not len(known):
        return int(runs["replica"].min())
    return int(str((known["bubble_ns"] / known["run_ns"]).groupby(known["replica"]).mean().idxmax()))


def gantt(summary: Summary, gaps: pd.DataFrame, replica: int) -> Timeline:
    """The last run of one replica: a lane a rank, the earliest stage on top, a bar a piece of work."""
    last = gaps[gaps["replica"] == replica][RUN].drop_duplicates().iloc[-1]
    chosen = gaps[(gaps[RUN] == last).all(axis=1)]
    held = {int(str(rank)): sorted(own.tolist()) for rank, own in chosen.groupby("rank")["stage"].unique().items()}
    chosen = chosen.assign(first=chosen["rank"].map({rank: own[0] for rank, own in held.items()}))
    chosen = chosen.sort_values(["first", "rank", "start_ns"], kind="stable")
    kinds = [KINDS[kind] for kind in chosen["kind"]]
    several = summary.virtual > 1
    spans = pd.DataFrame(
        {
            "lane": [f"rank {rank}" + _stages(held[rank], summary.numbered) for rank in chosen["rank"]],
            "start_us": (chosen["start_ns"] - gaps["start_ns"].min()) / NS_PER_US,
            "end_us": (chosen["end_ns"] - gaps["start_ns"].min()) / NS_PER_US,
            "name": [
                f"{stage if several else ''}{kind}{batch}" if summary.numbered else kind
                for stage, kind, batch in zip(chosen["stage"], kinds, chosen["micro_batch"], strict=True)
            ],
            "category": [_CATEGORIES[kind] for kind in kinds],
        }
    )
    note = "A bar is the work of one stage for one micro-batch: F forward, B backward (I for the input, W for the weights)"
    if summary.numbered:
        note += ", its stage in front and its micro-batch behind." if several else ", and its micro-batch."
    else:
        note = "A bar is work of a rank between two messages: F forward, B backward."
    if summary.replicas > 1:
        note += f" This is the pipeline with the largest bubble of {summary.replicas}."
    step = "" if last["step"] == NULL else f", step {last['step']}"
    return Timeline(f"One run of the schedule{step}", spans.reset_index(drop=True), note)


def _stages(held: list[int], numbered: bool) -> str:
    return f" · stage{'s' if len(held) > 1 else ''} {listed(held)}" if numbered else ""


def _bars(own: pd.DataFrame) -> StackedBars:
    parts = _PARTS
    if (own["waiting_ns"] == NULL).any():
        own = own.assign(between_ns=own["bubble_ns"] - own["fill_ns"] - own["drain_ns"])
        parts = {name: _PARTS[name] for name in ("busy_ns", "fill_ns", "drain_ns")} | {"between_ns": "between its pieces"}
    means = own.groupby("rank")[list(parts)].mean()
    series = {label: (means[column] / NS_PER_US).tolist() for column, label in parts.items()}
    note = "Parts add up to the run from the first to the last piece of work of the whole pipeline."
    return StackedBars("Where a mean run goes", [f"rank {rank}" for rank in means.index], series, "us", note)
