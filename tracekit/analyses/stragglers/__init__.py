"""Who makes whom wait.

In a matched collective every rank waits from its own start until the last rank has arrived:

    wait(rank)   = last arrival - own start                                               [ns]
    caused(rank) = sum of the waits of the others, over the collectives where it came last   [ns]
    share(rank)  = caused(rank) / sum of caused over all ranks

so the straggler is the rank with the SHORTEST communication kernels. Sends and receives are left out of ``caused``: a stage that waits for
the one before it is part of a pipeline's schedule, not a slow rank; those waits are given apart (``pipeline_wait``). Only matched
operations count. Figures "a step" are means over the steps that at least two ranks recorded, of collectives that began inside one.

Who waits is not who is to blame: ranks inherit lateness from each other. Findings come from a replay (``graph.culprits``); the waits are
their evidence, and the only hint where a job cannot be replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from tracekit.analyses import _thresholds as thresholds
from tracekit.analyses._common import UNKNOWN_AXIS, a_step, axes, codes, rank_labels
from tracekit.analyses.stragglers import culprits
from tracekit.collectives.kinds import POINT_TO_POINT
from tracekit.findings import Chart, Finding, Heatmap, Section, Subject, Table
from tracekit.graph.culprits import CHANCE, tail
from tracekit.graph.study import Study, study_of
from tracekit.job.model import Job
from tracekit.schema import Column, categorical, table
from tracekit.trace.steps import step_times
from tracekit.units import NS_PER_US, NULL, format_ns, plural

ORDER = 50

CAUSED = table(
    "caused_waits",
    ("rank", "int64", "", "rank that came last"),
    ("axis", "str", "", "mesh axis of the collectives, or 'unknown'"),
    ("kind", "str", "", "kind of the collectives"),
    ("caused_ns", "int64", "ns", "waits of the others"),
    ("caused_in_steps_ns", "int64", "ns", "of them in collectives that began inside a step (all, where no step is marked)"),
    ("others", "int64", "", "ranks that waited"),
    ("last_in", "int64", "", "collectives in which it came last and was waited for"),
)
WAITS = table(
    "waits",
    ("rank", "int64", "", "rank that waited"),
    ("axis", "str", "", "mesh axis, or 'unknown'"),
    ("pipeline", "bool", "", "sends and receives"),
    ("wait_ns", "int64", "ns", "sum of its waits"),
    ("wait_in_steps_ns", "int64", "ns", "of them in operations that began inside a step"),
    ("busy_ns", "int64", "ns", "duration of the same operations"),
    ("operations", "int64", "", "matched operations"),
)
STRAGGLERS = table(
    "stragglers",
    Column("rank", "int64", "", "global rank", "Rank", "rank"),
    Column(
        "caused_ns", "int64", "ns", "waits of the others for it", "Caused wait", "caused_wait_us", "only sends and receives are matched"
    ),
    Column("share", "float64", "share", "of all caused waits", "Of all wait", "share", "nobody waited"),
    Column("axis", "str", "", "mesh axis along which it caused most", "Most along axis", "axis", "caused no wait"),
    Column("last_in", "int64", "", "collectives in which it came last and was waited for", "Came last", "last_in"),
    Column("collectives", "int64", "", "its matched collectives", "Collectives", "collectives"),
    Column("wait_ns", "int64", "ns", "its own waits in them", "Own wait", "wait_us"),
    Column("pipeline_wait_ns", "int64", "ns", "its own waits in sends and receives", "Own wait in send, recv", "pipeline_wait_us"),
)


_LATE = (
    "Compare this rank's compute and idle time with the others' in the step breakdown: uneven work, a slow or throttled device, "
    "host work (data loading, logging, checkpoints) that only it does."
)


@dataclass(frozen=True)
class Stragglers:
    """``caused`` has schema CAUSED, ``waits`` schema WAITS. A rank has ``steps`` of ``step_ns`` on average, called ``span``."""

    caused: pd.DataFrame
    waits: pd.DataFrame
    ranks: list[int]
    steps: int
    step_ns: float
    span: str
    unmatched: int
    operations: int
    study: Study | None = None
    reason: str = ""
    aligned: bool = True

    def caused_by_rank(self) -> dict[int, int]:
        """Wait that each rank caused [ns], all ranks with matched collectives."""
        total = dict.fromkeys(sorted(self.waits["rank"][~self.waits["pipeline"]].unique().tolist()), 0)
        for rank, ns in zip(self.caused["rank"].tolist(), self.caused["caused_ns"].tolist(), strict=True):
            total[rank] = total.get(rank, 0) + ns
        return total

    def findings(self) -> list[Finding]:
        """Who makes a step longer, by replay. Without one (``reason``): who comes last in collectives, as a hint."""
        if self.study is not None:
            return culprits.findings_of(self.study, self.waits, self.span, self.steps)
        return [*self._late_ranks(), *self._wait_share()] if self.aligned else []

    def sections(self) -> list[Section]:
        """Waits by rank and axis, and who caused them."""
        if not len(self.waits):
            return []
        charts: list[Chart] = [self._heatmap(), self._table()]
        lead = (
            "A rank that reaches a collective early waits for the last one. Dark cells wait; whom they wait for is the rank with "
            "much caused wait and light cells of its own."
        )
        return [Section("Waiting and stragglers", lead, charts, name="waiting")]

    def json(self) -> dict[str, Any]:
        """``stragglers``: one entry a rank with matched operations."""
        if not len(self.waits):
            reason = "no communication was found" if not self.operations else "no collective could be matched with another rank's"
            return {"stragglers": [], "not_measured": {"stragglers": reason}}
        return {"stragglers": STRAGGLERS.records(self._ranks)}

    @cached_property
    def _ranks(self) -> pd.DataFrame:
        """Table STRAGGLERS: one row a rank with matched operations."""
        caused = self.caused_by_rank()
        total = sum(caused.values())
        waits = self.waits.groupby(["rank", "pipeline"])[["wait_ns", "operations"]].sum().to_dict("index")
        by_axis = self.caused.groupby(["rank", "axis"], observed=True, as_index=False)[["caused_ns", "last_in"]].sum()
        by_axis = by_axis.sort_values("caused_ns", ascending=False, kind="stable")
        worst = by_axis.drop_duplicates("rank").set_index("rank")["axis"].to_dict()
        last_in = by_axis.groupby("rank")["last_in"].sum().to_dict()
        nothing = {"wait_ns": 0, "operations": 0}
        ranks = sorted(set(self.waits["rank"].tolist()))
        own, pipeline = ([waits.get((rank, apart), nothing) for rank in ranks] for apart in (False, True))
        return STRAGGLERS.frame(
            {
                "rank": ranks,
                "caused_ns": [caused.get(rank, NULL) for rank in ranks],
                "share": [caused[rank] / total if total and rank in caused else np.nan for rank in ranks],
                "axis": [worst.get(rank, "") for rank in ranks],
                "last_in": [last_in.get(rank, 0) for rank in ranks],
                "collectives": [row["operations"] for row in own],
                "wait_ns": [row["wait_ns"] for row in own],
                "pipeline_wait_ns": [row["wait_ns"] for row in pipeline],
            }
        )

    def _late_ranks(self) -> list[Finding]:
        """The rank that others wait for most, where it is last more often than chance makes it."""
        if self.step_ns <= 0:
            return []
        collectives = self.waits[~self.waits["pipeline"]]
        counts = collectives.groupby(["rank", "axis"], observed=True, as_index=False)["operations"].sum()
        taken = dict(zip(zip(counts["rank"].tolist(), counts["axis"].tolist(), strict=True), counts["operations"].tolist(), strict=True))
        found = []
        for _, part in self.caused.groupby(["rank", "axis"], observed=True, sort=False):
            rank, axis = int(part["rank"].iloc[0]), str(part["axis"].iloc[0])
            others, last_in = int(part["others"].max()), int(part["last_in"].sum())
            each = int(part["caused_in_steps_ns"].sum()) / others / self.steps
            likely = (others + 1) * tail(last_in, taken[rank, axis], 1 / (others + 1)) < CHANCE
            if likely and thresholds.STRAGGLER.of(each / self.step_ns) is not None:
                found.append(self._late(rank, axis, each, others, taken[rank, axis], last_in))
        return sorted(found, key=lambda finding: -finding.weight_ns)[:1]

    def _late(self, rank: int, axis: str, each: float, others: int, taken: int, last_in: int) -> Finding:
        where = f"the {axis} collectives" if axis != UNKNOWN_AXIS else "collectives (axis not known)"
        whom = f"{others} other ranks wait {format_ns(each)} each" if others > 1 else f"another rank wait {format_ns(each)}"
        text = f"Rank {rank} possibly makes {whom} {self.span} at {where}: it comes last in {last_in:,} of {taken:,}; "
        return Finding(
            "stragglers.rank",
            "warning",
            f"{text}what a step would win is not known ({self.reason}).",
            value=each / NS_PER_US,
            unit="us",
            evidence=f"caused waits of rank {rank}: {plural(last_in, 'collective')} along {axis}",
            advice=_LATE,
            weight_ns=int(each),
            subject=Subject((rank,), axis if axis != UNKNOWN_AXIS else None),
        )

    def _wait_share(self) -> list[Finding]:
        rows = self.waits[~self.waits["pipeline"]]
        busy, wait = int(rows["busy_ns"].sum()), int(rows["wait_ns"].sum())
        severity = thresholds.WAIT_SHARE.of(wait / busy) if busy else None
        if severity is None:
            return []
        text = f"{wait / busy:.0%} of the time inside matched collectives is waiting for the last rank, not transfer."
        advice = "A faster network would not win this time; even work between the ranks would."
        evidence = f"waits of {plural(int(rows['operations'].sum()), 'operation')}"
        return [Finding("stragglers.wait_share", severity, text, wait / busy, "share", evidence, advice)]

    def _heatmap(self) -> Heatmap:
        p2p = zip(self.waits["axis"].tolist(), self.waits["pipeline"].tolist(), strict=True)
        label = [f"{axis} (send, recv)" if pipeline else axis for axis, pipeline in p2p]
        frame = pd.DataFrame({"rank": self.waits["rank"], "label": label, "wait": self.waits["wait_in_steps_ns"] / self.steps / NS_PER_US})
        cells = frame.pivot_table(index="rank", columns="label", values="wait", aggfunc="sum")
        values = [[None if value != value else float(value) for value in row] for row in cells.to_numpy().tolist()]
        note = f"Mean {self.span}."
        if self.unmatched:
            note += f" {self.unmatched:,} of {self.operations:,} communication operations are not matched and not in here."
        names = [str(name) for name in cells.columns]
        return Heatmap("Wait of each rank by axis", names, rank_labels(cells.index), values, "us", x_title="mesh axis", note=note)

    def _table(self) -> Table:
        worst_first = self._ranks.sort_values("caused_ns", ascending=False, kind="stable")
        return Table.of("Caused and own waits, whole trace", STRAGGLERS, worst_first, preview=4)


def analyze(job: Job) -> Stragglers:
    """Sum up who waited, and for whom."""
    shared, step_ns = _steps(job)
    # Between clocks that are not aligned nobody is known to wait.
    matched = job.operations[(job.operations["match"] >= 0) & (job.operations["wait_ns"] != NULL)]
    study = study_of(job)
    unmatched = len(job.operations) - len(matched)
    rows = _matched_rows(job, matched, shared)
    return Stragglers(
        caused=_caused(rows),
        waits=_waits(rows),
        ranks=list(job.ranks),
        steps=max(1, len(shared)),
        step_ns=step_ns,
        span=a_step(pd.DataFrame({"step": np.array(sorted(shared), np.int64)})),
        unmatched=unmatched,
        operations=len(job.operations),
        study=study if isinstance(study, Study) else None,
        reason="" if isinstance(study, Study) else study.reason,
        aligned=job.clock.aligned,
    )


def _steps(job: Job) -> tuple[set[int], float]:
    """(numbers of the steps that two ranks or more recorded, mean length of all steps [ns]); NULL is the number of an unmarked window."""
    ranks: dict[int, set[int | None]] = {}
    length: list[int] = []
    for window in job.traced:
        times = step_times(window.steps, window.span)
        length += (times.end - times.start).tolist()
        for number in times.number.tolist():
            ranks.setdefault(number, set()).add(window.rank)
    return {number for number, who in ranks.items() if len(who) > 1}, sum(length) / len(length) if length else 0.0


def _matched_rows(job: Job, matched: pd.DataFrame, shared: set[int]) -> pd.DataFrame:
    """One row a matched operation with what its match says; ``counts``: the match began in one of the ``shared`` steps."""
    axis_code, names = axes(job)
    chosen = ((job.operations["match"] >= 0) & (job.operations["wait_ns"] != NULL)).to_numpy()
    kind, kinds = codes(matched["kind"])
    match = matched["match"].to_numpy()
    in_step = job.matches["step_number"].isin(shared - {NULL}).to_numpy()[match] if len(match) else np.empty(0, np.bool_)
    any_steps = any(len(window.steps) for window in job.windows)
    return pd.DataFrame(
        {
            "rank": matched["rank"].to_numpy().astype(np.int64),
            "axis": categorical(axis_code[chosen], names),
            "kind": categorical(kind, kinds),
            "pipeline": np.isin(kind, [i for i, text in enumerate(kinds) if text in POINT_TO_POINT]),
            "match": match,
            "wait": matched["wait_ns"].to_numpy(),
            "busy": matched["end_ns"].to_numpy() - matched["start_ns"].to_numpy(),
            "last_rank": job.matches["last_rank"].to_numpy()[match].astype(np.int64) if len(match) else np.empty(0, np.int64),
            "counts": in_step | (not any_steps),
        }
    )


def _waits(rows: pd.DataFrame) -> pd.DataFrame:
    if not len(rows):
        return WAITS.empty()
    rows = rows.assign(wait_in=rows["wait"].where(rows["counts"], 0))
    keys = ["rank", "axis", "pipeline"]
    sums = rows.groupby(keys, observed=True, as_index=False).agg(
        wait_ns=("wait", "sum"), wait_in_steps_ns=("wait_in", "sum"), busy_ns=("busy", "sum"), operations=("match", "size")
    )
    return WAITS.check(sums[WAITS.names])


def _caused(rows: pd.DataFrame) -> pd.DataFrame:
    blamed = rows[~rows["pipeline"] & (rows["wait"] > 0) & (rows["rank"] != rows["last_rank"])]
    if not len(blamed):
        return CAUSED.empty()
    blamed = blamed.assign(wait_in=blamed["wait"].where(blamed["counts"], 0))
    keys = ["last_rank", "axis", "kind"]
    sums = blamed.groupby(keys, observed=True, as_index=False).agg(
        caused_ns=("wait", "sum"), caused_in_steps_ns=("wait_in", "sum"), others=("rank", "nunique"), last_in=("match", "nunique")
    )
    return CAUSED.check(sums.rename(columns={"last_rank": "rank"})[CAUSED.names])
