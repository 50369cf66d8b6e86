"""Communication hidden behind compute, per rank and step, and whose it is when it is not hidden.

Over all streams of one rank and step, let C be the union of communication intervals and K that of compute intervals, both clipped to the
step:

    hidden  = |C ∩ K|         [ns]
    exposed = |C| - |C ∩ K|   [ns]
    overlap = hidden / |C|

Per mesh axis a, with C_a the union of the communication of the groups along a:

    busy_a    = |C_a|         [ns]
    exposed_a = |C_a \\ K|     [ns]

Where two axes communicate at the same time both count that time, so the axes may add up to more than the whole. Communication whose
group, or whose group's axis, is not known goes to the axis ``unknown``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tracekit.analyses import _exposed
from tracekit.analyses import _thresholds as thresholds
from tracekit.analyses._common import (
    CUT,
    STEP_COLUMNS,
    UNKNOWN_AXIS,
    a_step,
    axes,
    mean_by_rank,
    measured,
    rank_labels,
    step_frame,
    typical,
    whole,
)
from tracekit.analyses._prefetch import Unprefetched, compute_before, unprefetched
from tracekit.analyses._ring import ring_findings, ring_hops
from tracekit.collectives.purpose import role_of_axis
from tracekit.findings import Chart, Finding, Heatmap, Section, StackedBars, Subject, Table
from tracekit.job.activity import Activity, Work
from tracekit.job.model import Job
from tracekit.schema import Column, categorical, table
from tracekit.trace import intervals
from tracekit.trace.events import Int64Array
from tracekit.trace.steps import step_times
from tracekit.units import NS_PER_US, NULL, format_ns, plural

ORDER = 20

OVERLAP = table(
    "overlap",
    *STEP_COLUMNS,
    Column("comm_ns", "int64", "ns", "communication, hidden and exposed", "", "comm_us", CUT),
    Column("hidden_ns", "int64", "ns", "communication beside compute", "", "hidden_us", CUT),
    Column("exposed_ns", "int64", "ns", "communication without compute", "", "exposed_us", CUT),
)
#: The same in the JSON.
OVERLAP_SHARE = table("overlap", *OVERLAP.columns, Column("overlap", "float64", "share", "hidden / all", "", "overlap", "no communication"))
BY_AXIS = table(
    "exposed_by_axis",
    *STEP_COLUMNS,
    Column("axis", "str", "", "mesh axis, or `unknown`", "", "axis"),
    Column("exposed_ns", "int64", "ns", "communication along this axis without compute", "", "exposed_us", CUT),
    Column("busy_ns", "int64", "ns", "all communication along this axis", "", "busy_us", CUT),
)
RANK_AXES = table(
    "rank_axes",
    STEP_COLUMNS[0],
    Column("axis", "str", "", "mesh axis, or `unknown`", "Axis"),
    Column("busy_ns", "float64", "ns", "communication along this axis, mean step", "Busy"),
    Column("exposed_ns", "float64", "ns", "of it without compute", "Exposed"),
    Column("hidden", "float64", "share", "1 - exposed / busy", "Hidden", "", "no communication in any step"),
)


@dataclass(frozen=True)
class Exposure:
    """``comm_ns``, ``hidden_ns``, ``exposed_ns``: one entry a step. ``pieces`` are cut from all operations of the window.

    ``before``: of each operation, what ``_prefetch.compute_before`` gives.
    """

    comm_ns: Int64Array
    hidden_ns: Int64Array
    exposed_ns: Int64Array
    pieces: _exposed.Exposed
    before: Int64Array


def reduce(activity: Activity) -> Exposure | None:
    """Communication of each step of one window; None where there was no work at all."""
    device, times = activity.device, step_times(activity.steps, activity.window)
    if not len(device):
        return None
    compute = intervals.union(*device.of(Work.COMPUTE))
    pieces = _exposed.exposed_intervals(activity, compute)
    comm = intervals.covered(times.start, times.end, intervals.union(*device.of(Work.COMMUNICATION)))
    exposed = intervals.covered(times.start, times.end, pieces.union())
    return Exposure(comm, comm - exposed, exposed, pieces, compute_before(activity))


_ADVICE = (
    (("dp", "fsdp", "shard", "replicate", "data", "world", "zero"),
     "Reduce gradients beside backward: the last bucket has no compute left to hide it, so let it be small (bucket_cap_mb), or accumulate "
     "over more micro-batches."),
    (("tp", "tensor", "sp"), "Keep this axis inside a node, try asynchronous tensor parallelism, or a smaller degree with larger shards."),
    (("pp", "pipeline"), "More micro-batches or an interleaved schedule; balance the stages."),
    (("cp", "context", "ring"), "Overlap the exchange of keys and values with attention, or shard the context over fewer ranks."),
    (("ep", "expert"), "Overlap dispatch and combine with shared experts, balance the router, or keep a token's experts inside a node."),
)  # fmt: skip
_PREFETCH = (
    "Gather the next unit beside the compute of this one: FSDP2 set_modules_to_forward_prefetch and set_modules_to_backward_prefetch "
    "(without them it needs a host that runs ahead of the device), FSDP1 forward_prefetch=True and backward_prefetch=BACKWARD_PRE, "
    "DeepSpeed stage3_prefetch_bucket_size."
)
#: Exposed communication of which more than this share is a pipeline's is told with its bubble.
_MOSTLY = 0.7
_GENERAL_ADVICE = "Start communication earlier and on a stream of its own, or give it less to move: larger buckets, a smaller element type."


#: Along the same axes where parameters are gathered.
_GATHERING = (
    "Prefetch the next unit's parameters, use larger buckets, reduce gradients during backward, or accumulate over more micro-batches."
)


def _advice(axis: str, gathers: bool) -> str:
    parts = set(axis.lower().split("_"))
    place = next((i for i, (words, _) in enumerate(_ADVICE) if parts & set(words)), None)
    if place is None:
        return _GENERAL_ADVICE
    return _GATHERING if gathers and place == 0 else _ADVICE[place][1]


@dataclass(frozen=True)
class Overlap:
    """``per_step`` has schema OVERLAP, ``by_axis`` schema BY_AXIS (one row a rank, step and axis that the rank communicates on).

    ``gathers``: some rank gathers parameters; ``late``: where those gathers begin too late, how.
    """

    per_step: pd.DataFrame
    by_axis: pd.DataFrame
    gathers: bool
    late: Unprefetched | None
    rings: dict[str, tuple[float, float | None]]

    def findings(self) -> list[Finding]:
        """How much of a step is exposed communication, and along which axes."""
        rows = typical(measured(self.per_step, "comm_ns"))
        if not len(rows) or not rows["comm_ns"].sum() or not rows["step_ns"].sum():
            return []
        step = float(rows["step_ns"].mean())
        rings = ring_findings(self.rings, self._mean_by_axis(), a_step(rows))
        return [*self._not_prefetched(rows, step), self._total(rows, step), *self._axes(step, a_step(rows)), *rings]

    def sections(self) -> list[Section]:
        """Hidden and exposed communication of each rank, and of each axis."""
        means = mean_by_rank(self.per_step, ["comm_ns", "hidden_ns", "exposed_ns"])
        if not len(means) or not means["comm_ns"].sum():
            return []
        bars = StackedBars(
            "Communication of the mean step",
            rank_labels(means.index),
            {
                "hidden communication": (means["hidden_ns"] / NS_PER_US).tolist(),
                "exposed communication": (means["exposed_ns"] / NS_PER_US).tolist(),
            },
            "us",
        )
        lead = (
            "Communication that runs beside compute costs a step nothing; exposed communication is the rest. "
            "Where two axes communicate at once, both count the time."
        )
        charts: list[Chart] = [bars]
        if self.by_axis["axis"].nunique() > 1:
            charts.append(self._heatmap())
        return [Section("Communication and compute", lead, (*charts, self._table()), name="communication")]

    def json(self) -> dict[str, Any]:
        """``exposed_by_axis``, and ``overlap``: hidden and exposed a rank and step."""
        comm, hidden = (self.per_step[name].where(self.per_step[name] > 0) for name in ("comm_ns", "hidden_ns"))
        rows = self.per_step.assign(overlap=hidden.fillna(0) / comm)
        return {"exposed_by_axis": BY_AXIS.records(self.by_axis), "overlap": OVERLAP_SHARE.records(rows)}

    def _not_prefetched(self, rows: pd.DataFrame, step: float) -> list[Finding]:
        late = self.late
        exposed = float(rows["exposed_ns"].mean())
        severity = thresholds.EXPOSED.of(exposed / step) if late is not None and late.exposed_ns > thresholds.EXPOSED.info * step else None
        if late is None or severity is None:
            return []
        share, span = late.exposed_ns / step, a_step(rows)
        of = span if span == "a step" else f"of {span}"
        text = f"Parameters are gathered without prefetch: {late.late} of {late.gathers} gathers start only after the compute before them"
        text += " ended"
        text += " (they are called no earlier)" if late.called_late > late.late / 2 else ", though they were called earlier"
        text += f". {format_ns(late.exposed_ns)} {of} ({share:.0%}) is exposed that compute could hide."
        evidence = "start of each parameter gather beside the compute before it, first of a step left out"
        most = late.exposed_ns > exposed / 2
        absorbs, weight = (("overlap.exposed", "overlap.exposed_axis"), exposed) if most else ((), late.exposed_ns)
        return [Finding("overlap.no_prefetch", severity, text, share, "ratio of step", evidence, _PREFETCH, int(weight), absorbs=absorbs)]

    def _total(self, rows: pd.DataFrame, step: float) -> Finding:
        exposed, comm = float(rows["exposed_ns"].mean()), float(rows["comm_ns"].mean())
        share, hidden = exposed / step, 1 - exposed / comm
        severity = thresholds.EXPOSED.of(share)
        span = a_step(rows)
        evidence = f"mean over {plural(rows['rank'].nunique(), 'rank')}; communication busy for {format_ns(comm)} of {span}"
        if severity is None:
            text = f"{hidden:.0%} of the communication is hidden behind compute; {share:.1%} of {span} is exposed."
            return Finding("overlap.hidden", "info", text, value=hidden, unit="share", evidence=evidence)
        axes = self._mean_by_axis()
        worst = str(axes["exposed_ns"].idxmax()) if len(axes) else ""
        most = f", most of it along {worst}" if len(axes) > 1 and worst != UNKNOWN_AXIS else ""
        of = span if span == "a step" else f"of {span}"
        text = f"Exposed communication: {format_ns(exposed)} {of} ({share:.0%}){most}; {hidden:.0%} of all is overlapped."
        advice = _advice(worst, self.gathers) if worst else _GENERAL_ADVICE
        subject = Subject(axis=worst if worst and worst != UNKNOWN_AXIS else None)
        absorbs, under = ("overlap.exposed_axis",), ("pipeline.bubble",) if self._of_pipeline(worst, axes, exposed) else ()
        return Finding(
            "overlap.exposed",
            severity,
            text,
            share,
            "ratio of step",
            evidence,
            advice,
            int(exposed),
            subject=subject,
            absorbs=absorbs,
            under=under,
        )

    @staticmethod
    def _of_pipeline(worst: str, axes: pd.DataFrame, exposed: float) -> bool:
        """Whether what is exposed is the waiting of a pipeline's stages for each other: its bubble."""
        return role_of_axis(worst) == "pipeline" and float(axes["exposed_ns"][worst]) > _MOSTLY * exposed

    def _axes(self, step: float, span: str) -> list[Finding]:
        means = self._mean_by_axis()
        found = []
        if len(means) < 2:
            return []
        for axis, row in means.sort_values("exposed_ns", ascending=False).head(4).iterrows():
            share = float(row["exposed_ns"]) / step
            severity = thresholds.EXPOSED_AXIS.of(share)
            if severity is not None:
                exposed = float(row["exposed_ns"])
                hidden = 1 - exposed / float(row["busy_ns"])
                where = "Communication of unknown axis" if axis == UNKNOWN_AXIS else f"Communication along {axis}"
                text = f"{where} is exposed for {share:.0%} of {span} ({format_ns(exposed)}); {hidden:.0%} of it is hidden."
                evidence = f"exposed_by_axis, mean over the ranks and steps that communicate along {axis}"
                advice = _advice(str(axis), self.gathers)
                found.append(Finding("overlap.exposed_axis", severity, text, share, "ratio of step", evidence, advice, int(exposed)))
        return found

    def _mean_by_axis(self) -> pd.DataFrame:
        return typical(measured(self.by_axis, "busy_ns")).groupby("axis", observed=True)[["busy_ns", "exposed_ns"]].mean()

    def _heatmap(self) -> Heatmap:
        means = measured(self.by_axis, "busy_ns").pivot_table(index="rank", columns="axis", values="exposed_ns", observed=True)
        values = [[None if value != value else value / NS_PER_US for value in row] for row in means.to_numpy().tolist()]
        return Heatmap(
            "Exposed communication by axis, mean step",
            [str(axis) for axis in means.columns],
            rank_labels(means.index),
            values,
            "us",
            x_title="mesh axis",
        )

    def _table(self) -> Table:
        columns = ["busy_ns", "exposed_ns"]
        means = measured(self.by_axis, "busy_ns").groupby(["rank", "axis"], observed=True)[columns].mean().reset_index()
        busy, exposed = means["busy_ns"].to_numpy(np.float64), means["exposed_ns"].to_numpy(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            hidden = np.where(busy > 0, 1 - exposed / busy, np.nan)
        return Table.of("Each rank and axis, mean step", RANK_AXES, means.assign(hidden=hidden))


def analyze(job: Job) -> Overlap:
    """Measure how much communication compute hides."""
    per_step = step_frame(OVERLAP, job, "overlap", ("comm_ns", "hidden_ns", "exposed_ns"))
    return Overlap(
        per_step, _by_axis(job), bool((job.operations["purpose"] == "parameter_gather").any()), unprefetched(job), ring_hops(job)
    )


def _by_axis(job: Job) -> pd.DataFrame:
    axis_code, names = axes(job)
    data: dict[str, list[Any]] = {name: [] for name in BY_AXIS.names}
    for seen in _exposed.windows(job):
        axis = axis_code[seen.rows]
        for code in np.unique(axis):
            size = len(seen.times)
            sums = [pieces.where(axis == code).union() for pieces in (seen.busy, seen.exposed)]
            busy, exposed = (intervals.covered(seen.times.start, seen.times.end, part) for part in sums)
            unknown = np.full(size, NULL, np.int64)
            data["rank"].append(np.full(size, seen.window.rank, np.int32))
            data["window"].append(np.full(size, seen.index, np.int32))
            data["step"].append(seen.times.number)
            data["step_ns"].append(seen.times.end - seen.times.start)
            data["axis"].append(np.full(size, code))
            data["busy_ns"].append(busy if whole(seen.window) else unknown)
            data["exposed_ns"].append(exposed if whole(seen.window) else unknown)
    if not data["rank"]:
        return BY_AXIS.empty()
    columns: dict[str, Any] = {name: np.concatenate(parts) for name, parts in data.items()}
    columns["axis"] = categorical(columns["axis"], names)
    return BY_AXIS.frame(columns)
