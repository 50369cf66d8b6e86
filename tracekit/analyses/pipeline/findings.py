"""Sentences about a pipeline's bubble: how large it is, what makes it larger than its schedule demands, what would shrink it."""

from __future__ import annotations

import pandas as pd

from tracekit.analyses import _thresholds as thresholds
from tracekit.analyses.pipeline.rows import RUN
from tracekit.analyses.pipeline.summary import Summary
from tracekit.findings import Finding
from tracekit.units import NULL, format_ns, listed, plural


def findings(summary: Summary, gaps: pd.DataFrame, runs: pd.DataFrame) -> list[Finding]:
    """The bubble, what stands above its ideal, and stages that take longer than others."""
    known = runs[(runs["run_ns"] != NULL) & (runs["run_ns"] > 0)]
    unequal = _unequal(summary, gaps)
    if not len(known) or summary.measured is None:
        return unequal
    return [*_bubble(summary, known), *_above(summary, known), *unequal]


def _name(summary: Summary) -> str:
    stages = plural(summary.stages, "stage") + (f" on {summary.ranks} ranks" if summary.virtual > 1 else "")
    return f"{summary.schedule}, {stages}, {plural(summary.micro_batches, 'micro-batch', 'micro-batches')}"


def _evidence(known: pd.DataFrame) -> str:
    ranks, runs = known["rank"].nunique(), len(known[RUN[1:]].drop_duplicates())
    return f"pipeline, mean over {plural(ranks, 'rank')} and {plural(runs, 'run')} of the schedule"


def _bubble(summary: Summary, known: pd.DataFrame) -> list[Finding]:
    measured, run, busy = summary.measured or 0.0, float(known["run_ns"].mean()), float(known["busy_ns"].mean())
    severity = thresholds.BUBBLE.of(measured)
    if severity is None:
        return []
    bubble, at_best = format_ns(float(known["bubble_ns"].mean())), ""
    if summary.ideal is not None:
        batches = plural(summary.micro_batches, "micro-batch", "micro-batches")
        at_best = f", where {summary.schedule} with {batches} leaves {summary.ideal:.0%} at best"
    text = (
        f"Pipeline bubble: ranks have no pipeline work for {measured:.0%} of a run of the schedule ({bubble} of {format_ns(run)}){at_best}."
    )
    advice, won = "More micro-batches, or a schedule with a smaller bubble.", 0.0
    if summary.ideal is not None and summary.ideal_twice is not None:
        won = max(0.0, busy / (1 - summary.ideal) - busy / (1 - summary.ideal_twice))
        advice = f"{2 * summary.micro_batches} micro-batches leave {summary.ideal_twice:.0%} at best"
        single = summary.virtual == 1 < summary.ranks
        advice += "; two stages a rank (interleaved) halve it, zero-bubble schedules fill it." if single else "."
    absorbs = ("pipeline.above_ideal",)
    return [Finding("pipeline.bubble", severity, text, measured, "share of run", _evidence(known), advice, round(won), absorbs=absorbs)]


def _above(summary: Summary, known: pd.DataFrame) -> list[Finding]:
    if summary.ideal is None or summary.measured is None:
        return []
    above = summary.measured - summary.ideal
    severity = thresholds.BUBBLE_ABOVE_IDEAL.of(above)
    if severity is None:
        return []
    text = f"The pipeline bubble is {summary.measured:.0%} of a run where {summary.schedule} needs {summary.ideal:.0%}"
    causes = []
    if summary.replayed is not None and summary.equal is not None:
        stages = max(0.0, summary.replayed - summary.equal)
        causes.append(f"unequal stages explain {stages * 100:.0f} of these {above * 100:.0f} points")
    parts = {name: float((known[f"{name}_ns"] / known["run_ns"]).mean()) for name in ("fill", "waiting", "other", "drain")}
    causes.append(f"{parts['other']:.0%} of a run is gaps in which the next piece could already have begun (messages, the host)")
    advice = "Balance the layers of the stages." if parts["other"] < above / 2 else (
        "Send messages asynchronously on a stream of their own, keep the host ahead of the device, and balance the stages."
    )  # fmt: skip
    run, busy = float(known["run_ns"].mean()), float(known["busy_ns"].mean())
    won = max(0.0, run - busy / (1 - summary.ideal)) if summary.ideal < 1 else 0.0
    text += ": " + "; ".join(causes) + "."
    return [Finding("pipeline.above_ideal", severity, text, above, "share of run", _evidence(known), advice, round(won))]


def _unequal(summary: Summary, gaps: pd.DataFrame) -> list[Finding]:
    """Ranks of one pipeline whose work for a micro-batch differs."""
    work = rank_work(gaps, summary.micro_batches)
    if len(work) < 2 or work["work_ns"].mean() <= 0:
        return []
    mean, most = float(work["work_ns"].mean()), float(work["work_ns"].max())
    above = most / mean - 1
    severity = thresholds.UNEQUAL_STAGES.of(above)
    if severity is None:
        return []
    stages: tuple[int, ...] = work["stages"][int(work["work_ns"].argmax())]
    name = f"Stage {stages[0]} takes" if len(stages) == 1 else f"Stages {listed(stages)} of one rank take"
    text = f"{name} {format_ns(most)} for one micro-batch, forward and backward, {above:.0%} more than the mean rank"
    text += f" ({format_ns(mean)}): every other rank waits for it once the pipeline is full."
    advice = "Give it fewer layers; embedding and head count as layers, and a large vocabulary makes the last stage the slowest."
    excess = round((most - mean) * summary.micro_batches)
    evidence = "pipeline, mean duration of the pieces of every stage"
    return [
        Finding("pipeline.unequal_stages", severity, text, above, "share above mean", evidence, advice, excess, row={"Stage": stages[0]})
    ]


def rank_work(gaps: pd.DataFrame, batches: int) -> pd.DataFrame:
    """``stages`` (those that one rank holds) and ``work_ns``, its mean work for one micro-batch; one row a place in the pipeline."""
    held = {rank: tuple(sorted(own.tolist())) for rank, own in gaps.groupby("rank")["stage"].unique().items()}
    work = gaps.assign(length=gaps["end_ns"] - gaps["start_ns"], stages=gaps["rank"].map(held))
    total = work.groupby(["rank", *RUN])["length"].sum().groupby("rank").mean() / batches
    frame = pd.DataFrame({"stages": [held[rank] for rank in total.index], "work_ns": total.to_numpy()})
    return frame.groupby("stages")["work_ns"].mean().reset_index()
