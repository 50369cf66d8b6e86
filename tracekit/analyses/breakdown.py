"""Where the time of a step goes, per rank and step.

Over all streams of one rank let K, C and M be the unions of the intervals of compute kernels, communication and copies, each clipped to
the step [start, end) on the host's clock ("by window"). In integer nanoseconds:

    compute       = |K|
    exposed comm  = |C \\ K|          hidden comm = |C ∩ K|
    exposed copy  = |M \\ (K ∪ C)|    hidden copy = |M| - exposed copy
    unknown       = |U \\ (K ∪ C ∪ M)|   U: time in which work may have run that the trace lost (``job/lost.py``)
    idle          = step - |K ∪ C ∪ M| - unknown

so that compute + exposed comm + exposed copy + idle + unknown = step, exactly. A step with unknown time is in no mean. Devices that one
process works on are apart: each has rows of its own. A device that runs behind its host works outside the step that
launched it: ``launched_compute`` and ``launched_comm`` are the unions of what the host launched during the step, wherever it ran.
A trace without step marks counts as one step over its whole window. On CPU jobs top-level operators compute and there are no copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from tracekit.analyses import _suspects
from tracekit.analyses import _thresholds as thresholds
from tracekit.analyses._common import CUT, STEP_COLUMNS, a_step, by_step, mean_by_rank, measured, once, rank_labels, whole, worst_first
from tracekit.analyses._step_parts import reduce as reduce
from tracekit.findings import Finding, Section, StackedBars, Table
from tracekit.job.model import Job
from tracekit.schema import Column, table
from tracekit.units import NS_PER_US, NULL, format_ns, listed, plural

ORDER = 10

BREAKDOWN = table(
    "breakdown",
    *STEP_COLUMNS[:-1],
    replace(STEP_COLUMNS[-1], heading="Step", key="step_us"),
    Column("device", "int64", "", "number of the device", "Device", "device", "the rank works on one device"),
    Column("compute_ns", "int64", "ns", "compute", "Compute", "compute_us", CUT),
    Column("exposed_comm_ns", "int64", "ns", "communication without compute", "Exposed communication", "exposed_comm_us", CUT),
    Column("hidden_comm_ns", "int64", "ns", "communication beside compute", "Hidden communication", "hidden_comm_us", CUT),
    Column("exposed_copy_ns", "int64", "ns", "copies without compute or communication", "Exposed copies", "memory_copy_us", CUT),
    Column("hidden_copy_ns", "int64", "ns", "copies beside compute or communication", "Hidden copies", "hidden_copy_us", CUT),
    Column("idle_ns", "int64", "ns", "nothing on the device", "Idle", "idle_us", CUT),
    Column("unknown_ns", "int64", "ns", "what the device did is lost or not read", "Unknown", "unknown_us", CUT),
    Column("launched_compute_ns", "int64", "ns", "compute launched during the step, wherever it ran", "", "launched_compute_us", CUT),
    Column("launched_comm_ns", "int64", "ns", "communication launched during the step, wherever it ran", "", "launched_comm_us", CUT),
)
MEAN_STEP = table(
    "mean_step",
    Column("rank", "int64", "", "global rank", "", "rank", "the mean of all ranks and steps"),
    Column("steps", "int64", "", "how many steps, counted on each rank, the parts are the mean of", "", "steps"),
    *(replace(column, dtype="float64") for column in BREAKDOWN.columns if column.unit == "ns"),
)
_PARTS = tuple(BREAKDOWN.names[len(STEP_COLUMNS) + 1 :])
#: The finding that says of which ranks nothing is known.
NOT_RECORDED = "breakdown.device_not_recorded"
#: The parts that make up the step, as a reader sees them.
_SHOWN = {
    "compute_ns": "compute",
    "exposed_comm_ns": "exposed communication",
    "exposed_copy_ns": "exposed copies",
    "idle_ns": "idle",
}

#: Copies by kind (``_step_parts``): what they are, and what to do about them.
_COPIES = {
    "in_pinned": ("from pinned memory to the device", "Inputs are pinned already: copy them a step ahead, on a stream of their own."),
    "in": ("from the host to the device",
           "Copy inputs from pinned memory with non_blocking=True, a step ahead, and make no tensors on the host inside the step."),
    "out": ("from the device to the host", "Avoid .item(), .cpu() and printing inside the step, or do them every few steps."),
    "within": ("inside the device", "Avoid needless clone(), contiguous(), cat() and copy_() of large tensors, or fuse them."),
}  # fmt: skip


def complete(per_step: pd.DataFrame) -> pd.DataFrame:
    """The steps of which every part is known: only these are in means."""
    known = measured(per_step, "compute_ns")
    return known[known["unknown_ns"] == 0]


@dataclass(frozen=True)
class Breakdown:
    """``per_step`` has schema BREAKDOWN; ``outside_share`` of the device time starts outside every step."""

    per_step: pd.DataFrame
    outside_share: float
    suspicion: Finding | None = None  # communication that may hide among compute
    copies: Mapping[str, int] = field(default_factory=dict)  # exposed copies by kind [ns], all ranks and steps
    on_cpu: bool = False

    @cached_property
    def mean_step(self) -> pd.DataFrame:
        """Table MEAN_STEP, the mean step wherever one is meant: of all ranks and steps first, then of each rank.

        Only steps whose parts are known count; a rank that has none of them has a length alone.
        """
        known = complete(self.per_step)
        lengths = self.per_step.groupby("rank")[["step_ns"]].mean()
        by_rank = known.groupby("rank")[["step_ns", *_PARTS]].mean().reindex(lengths.index).fillna(lengths)
        steps = known.groupby("rank").size().reindex(lengths.index, fill_value=0)
        every = known[["step_ns", *_PARTS]].mean().to_frame().T
        parts = pd.concat([every, by_rank], ignore_index=True)
        ranks, counts = np.array([NULL, *lengths.index], np.int64), np.array([len(known), *steps], np.int64)
        return MEAN_STEP.frame({"rank": ranks, "steps": counts, **{str(name): parts[name] for name in parts}})

    def findings(self) -> list[Finding]:
        """Ranks that compute longer than others, steps longer than others, copies that hold up the device."""
        found = [self.suspicion, self._not_recorded(), self._lost(), self._imbalance(), self._variation(), self._copies(), self._outside()]
        return [finding for finding in found if finding is not None]

    def sections(self) -> list[Section]:
        """Bars of the mean step of each rank, and every step in numbers."""
        if not len(self.per_step):
            return []
        means = self.mean_step[self.mean_step["steps"] > 0].iloc[1:]
        bars = StackedBars(
            "Mean step of each rank",
            rank_labels(means["rank"].tolist()),
            {name: (means[column] / NS_PER_US).tolist() for column, name in _SHOWN.items()},
            "us",
            note=self._note(),
        )
        lead = (
            "Each bar is one rank's mean step: what its device computed, the communication and copies that nothing else ran beside, "
            "and the time in which it had nothing to do."
        )
        return [
            Section(
                "Step breakdown",
                lead,
                (bars, Table.of("Every rank and step", BREAKDOWN, worst_first(self.per_step, "compute_ns"))),
                name="steps",
            )
        ]

    def json(self) -> dict[str, Any]:
        """``breakdown``: one entry a rank and step; ``mean_step``: their mean, of the job and of each rank."""
        result: dict[str, Any] = {"breakdown": BREAKDOWN.records(self.per_step), "mean_step": MEAN_STEP.records(self.mean_step)}
        cut = sorted({int(rank) for rank in self.per_step["rank"][self.per_step["compute_ns"] == NULL]})
        if cut:
            ranks = ", ".join(str(rank) for rank in cut)
            result["not_measured"] = {"breakdown parts": f"the trace of rank {ranks} is truncated: what its steps lack is not known"}
        return result

    def _note(self) -> str:
        parts = []
        if self.outside_share >= thresholds.OUTSIDE_STEPS.info:
            parts.append(f"{self.outside_share:.0%} of the device time starts outside every marked step and is in no bar.")
        if (self.per_step["compute_ns"] == NULL).any():
            parts.append("Ranks whose trace is truncated are left out.")
        return " ".join(parts)

    def _not_recorded(self) -> Finding | None:
        """Ranks of whose device nothing is known at all."""
        rows = self.per_step[(self.per_step["compute_ns"] == NULL) & (self.per_step["unknown_ns"] != NULL)]
        ranks = sorted({int(rank) for rank in rows["rank"]})
        if not ranks:
            return None
        whose = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks)}"
        return Finding(
            NOT_RECORDED,
            "critical",
            f"What the device of {whose} did was not recorded or could not be read: its time is not known, and it is in no mean.",
            float(len(ranks)),
            "ranks",
            "unknown time in the step breakdown; coverage says what is there instead",
            "Record again with the device's activities, over fewer steps if buffers were lost.",
        )

    def _lost(self) -> Finding | None:
        """Steps of which a part is not known."""
        rows = measured(self.per_step, "compute_ns")
        rows = rows[rows["unknown_ns"] > 0]
        if not len(rows):
            return None
        share = float(rows["unknown_ns"].sum() / rows["step_ns"].sum())
        ranks = sorted(set(rows["rank"].tolist()))
        whose, few = f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}", len(rows) == 1
        return Finding(
            "breakdown.lost",
            "warning",
            f"{plural(len(rows), 'step')} of {whose} cannot be told whole: "
            f"for {share:.0%} of {'its' if few else 'their'} time it is not known what the device did. {'It is' if few else 'They are'} "
            "in no mean.",
            float(len(rows)),
            "steps",
            "unknown time in the step breakdown",
            "Record fewer steps at a time; lost buffers and a profiler that stops within a step take work with them.",
        )

    def _imbalance(self) -> Finding | None:
        means = mean_by_rank(complete(self.per_step), ["compute_ns", "step_ns"])
        if len(means) < 2:
            return None
        compute = means["compute_ns"]
        median, longest = float(compute.median()), float(compute.max())
        severity = thresholds.COMPUTE_IMBALANCE.of((longest - median) / median) if median > 0 else None
        if severity is None:
            return None
        rank, more = compute.idxmax(), longest - median
        return Finding(
            "breakdown.compute_imbalance",
            severity,
            f"Rank {rank} computes {more / median:.0%} longer than the median rank ({format_ns(longest)} against {format_ns(median)}).",
            value=more / median,
            unit="share",
            evidence=f"compute of rank {rank} in the step breakdown, mean over its steps; {len(means)} ranks",
            advice="Look for uneven work: pipeline stages, experts or sequences of unequal size, a throttled device. "
            "The kernel table shows which kernels differ between ranks.",
            weight_ns=int(more),
            row={"Rank": int(str(rank))},
        )

    def _variation(self) -> Finding | None:
        rows = complete(self.per_step)
        steps = rows[rows["step"] != NULL].groupby("step")["step_ns"].mean()
        if len(steps) < 3:
            return None
        median, longest = float(steps.median()), float(steps.max())
        severity = thresholds.STEP_VARIATION.of((longest - median) / median)
        if severity is None:
            return None
        return Finding(
            "breakdown.step_variation",
            severity,
            f"Step {steps.idxmax()} takes {format_ns(longest)}, {longest / median - 1:.0%} more than the median of {format_ns(median)}.",
            value=longest / median - 1,
            unit="share",
            evidence="step lengths in the step breakdown, mean over ranks",
            advice="Profile steps after warm-up, and look at what differs in this one: data loading, a checkpoint, a recompilation.",
            row={"Step": int(str(steps.idxmax()))},
        )

    def _copies(self) -> Finding | None:
        rows = complete(self.per_step)
        step = float(rows["step_ns"].mean()) if len(rows) else 0.0
        if step <= 0:
            return None
        copy = float(rows["exposed_copy_ns"].mean())
        severity = thresholds.EXPOSED_COPY.of(copy / step)
        if severity is None:
            return None
        kind, most = max(self.copies.items(), key=lambda item: item[1], default=("other", 0))
        known = most > 0.5 * sum(self.copies.values()) and kind in _COPIES
        of_kind = f", most of it {_COPIES[kind][0]}" if known else ""
        return Finding(
            "breakdown.copies",
            severity,
            f"Memory copies hold up the device for {copy / step:.1%} of {a_step(rows)} ({format_ns(copy)}){of_kind}.",
            value=copy / step,
            unit="ratio of step",
            evidence="exposed copies in the step breakdown, mean over ranks and steps",
            advice=_COPIES[kind][1] if known else " ".join(advice for _, advice in _COPIES.values()),
            weight_ns=int(copy),
        )

    def _outside(self) -> Finding | None:
        severity = thresholds.OUTSIDE_STEPS.of(self.outside_share)
        if severity is None:
            return None
        what, why = "device time", "the device runs behind the host, or the trace holds more than its steps"
        advice = "Read the figures by launch, or synchronize at the end of each profiled step."
        if self.on_cpu:
            what, why = "recorded work", "the trace holds more than its marked steps, or work that runs on behind them"
            advice = "Call profiler.step() after every step: what no step holds is in no figure of a step."
        return Finding(
            "breakdown.outside_steps",
            severity,
            f"{self.outside_share:.0%} of the {what} starts outside every marked step: {why}.",
            value=self.outside_share,
            unit="share",
            evidence="work by window against work by launch: launched_compute_us in the JSON follows the launch",
            advice=advice,
        )


@once
def analyze(job: Job) -> Breakdown:
    """Divide every step of every rank into compute, exposed communication, exposed copies and idle."""
    per_step = _per_step(job)
    parts = [reduced for *_, reduced in by_step(job, "breakdown")]
    total = sum(part.device_ns for part in parts)
    outside = sum(part.outside_ns for part in parts)
    known = complete(per_step)
    comm, length = int((known["exposed_comm_ns"] + known["hidden_comm_ns"]).sum()), int(known["step_ns"].sum())
    suspicion = _suspects.finding([part.suspects for part in parts], job.world_size, comm, length)
    copies = sum((Counter(part.copies) for part in parts), Counter[str]())
    on_cpu = bool(job.traced) and all(window.on_cpu for window in job.traced)
    return Breakdown(per_step, outside / total if total else 0.0, suspicion, dict(copies), on_cpu)


def _per_step(job: Job) -> pd.DataFrame:
    """The table BREAKDOWN; parts of truncated windows are NULL."""
    frames = []
    for index, window, times, reduced in by_step(job, "breakdown"):
        count = len(reduced.device)
        repeats = count // max(len(times), 1)
        known = whole(window)
        data = {name: getattr(reduced, name) if known else np.full(count, NULL, np.int64) for name in _PARTS}
        data |= {"rank": np.full(count, window.rank), "window": np.full(count, index), "device": reduced.device}
        data |= {"step": np.tile(times.number, repeats), "step_ns": np.tile(times.end - times.start, repeats)}
        frames.append(BREAKDOWN.frame(data))
    return pd.concat(frames, ignore_index=True) if frames else BREAKDOWN.empty()
