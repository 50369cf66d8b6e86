"""Every collective of the job, summed by what it is: one row for each (group, kind, purpose, element type, full size).

    count      distinct collectives: a matched one counts once, however many ranks ran it. An unmatched operation with a sequence number,
               and a point-to-point one, counts for itself; of others, which could be one collective seen on several ranks, the most that
               any one rank ran
    duration   end - start of each operation, over all ranks; it contains waiting [ns]
    transfer   latest end - last arrival of each match [ns]
    wait       last arrival - own start, summed per rank [ns]
    algbw      full bytes / median transfer [GB/s, 10^9 bytes]
    busbw      algbw x factor (collectives.cost)

Transfers come from collectives that were seen on all their ranks; where there is none (a rank is missing), from incomplete ones, whose
last arrival may be one that nobody recorded: then transfer is an upper bound and the bandwidths are lower bounds (``complete`` false).
Where a group's calls have more than 64 different sizes (all-to-all with uneven splits), one row stands for all of them: full_bytes is NULL,
and the bandwidth is all bytes over all transfer time. Operations whose group is not known are told apart by their stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from tracekit.analyses import _thresholds as thresholds
from tracekit.analyses._groups import Spread, spread
from tracekit.analyses.collectives import rows as gather
from tracekit.analyses.collectives.slow import slow_groups
from tracekit.findings import Finding, Section, Table
from tracekit.job.model import Job
from tracekit.mesh.process_groups import ProcessGroup
from tracekit.trace.events import Int64Array
from tracekit.units import NS_PER_US, NULL, format_bytes, format_ns, format_rate, microseconds

ORDER = 40


@dataclass(frozen=True)
class Summed:
    """``rows`` has schema COLLECTIVES (rows.py), longest total first; the rest has an entry a row, ``waits`` rank -> ns."""

    rows: pd.DataFrame
    groups: Int64Array  # how many
    duration: Spread
    transfer: Spread
    waits: list[dict[int, int]]

    def reported(self, groups: list[ProcessGroup]) -> pd.DataFrame:
        """Schemas REPORTED and BY_AXIS (rows.py)."""
        rows = self.rows
        known_groups = [groups[group].id if group >= 0 else "" for group in rows["group"].tolist()]
        labels = [group or f"unknown (stream {stream})" for group, stream in zip(known_groups, rows["stream"].tolist(), strict=True)]
        columns: dict[str, Any] = {
            "label": labels,
            "groups": self.groups,
            "size": [groups[group].size or NULL if group >= 0 else NULL for group in rows["group"].tolist()],
            "group": known_groups,
            "least_ns": self.duration.least,
            "duration_ns": self.duration.median,
            "longest_ns": self.duration.most,
            "transfer_least_ns": self.transfer.least,
            "transfer_longest_ns": self.transfer.most,
            "waits": [{str(rank): microseconds(ns) for rank, ns in waits.items()} for waits in self.waits],
            "wait_ns": [sum(waits.values()) / len(waits) if waits else np.nan for waits in self.waits],
            "not_measured": [_reason(row) for row in rows.to_dict("records")],
        }
        return rows.assign(**columns)


@dataclass(frozen=True)
class Collectives:
    """``by_group`` and ``by_axis``: the same collectives, a row a group, and for all groups of an axis together; ``slow``: findings."""

    by_group: Summed
    by_axis: Summed
    groups: list[ProcessGroup]
    slow: Sequence[Finding] = ()

    @property
    def rows(self) -> pd.DataFrame:
        """Schema COLLECTIVES, by group."""
        return self.by_group.rows

    def findings(self) -> list[Finding]:
        """The costliest collective, and groups that are slower than their siblings."""
        return [*self._costliest(), *self.slow]

    def sections(self) -> list[Section]:
        """All collectives, by axis and by group."""
        if not len(self.rows):
            return []
        lead = (
            "One row a kind, purpose, element type and size, of all groups of an axis and of each group. Duration is what a rank spent in "
            "the call, waiting for others included; transfer begins when the last rank has arrived. Bandwidths are in GB/s (10^9 bytes)."
        )
        return [Section("Collectives", lead, tuple(self._tables()), name="collectives")]

    def json(self) -> dict[str, Any]:
        """``collectives``: one entry a row by group; ``collectives_by_axis``."""
        frame = self._reported
        without = frame["not_measured"].dropna()
        by_axis = gather.BY_AXIS.records(self._axes)
        result: dict[str, Any] = {"collectives": gather.REPORTED.records(frame), "collectives_by_axis": by_axis}
        if len(without):
            reasons = sorted(without.value_counts(sort=False).items())
            listed_reasons = "; ".join(f"{count} of {len(frame)} rows: {reason}" for reason, count in reasons)
            result["not_measured"] = {"collectives bandwidth": listed_reasons}
        return result

    @cached_property
    def _reported(self) -> pd.DataFrame:
        """Schema REPORTED."""
        return self.by_group.reported(self.groups)

    @cached_property
    def _axes(self) -> pd.DataFrame:
        """Schema BY_AXIS."""
        return self.by_axis.reported(self.groups)

    def _tables(self) -> list[Table]:
        by_axis = Table.of(
            "Collectives by axis", gather.BY_AXIS, self._axes, gather.AXIS_SHOWN, note=_partial(self.by_axis.rows), preview=8
        )
        by_group = Table.of("Collectives by process group", gather.REPORTED, self._reported, gather.SHOWN, note=_partial(self.rows))
        return [by_axis, by_group] if len(self._axes) < len(self.rows) else [replace(by_group, preview=8)]

    def _costliest(self) -> list[Finding]:
        rows = self.rows[self.rows["transfer_total_ns"] > 0]
        if not len(rows):
            return []
        row = rows.iloc[int(rows["transfer_total_ns"].argmax())]
        size = f" of {format_bytes(row['full_bytes'])}" if row["full_bytes"] != NULL else ""
        speed = f" at {format_rate(row['busbw_gb_s'])} bus bandwidth" if row["busbw_gb_s"] == row["busbw_gb_s"] else ""
        speed += f" (more than any device reaches: {_WRONG})" if row["busbw_gb_s"] > thresholds.IMPOSSIBLE_GB_S else ""
        where = f"along {row['axis']}" if row["axis"] else "on an unknown axis"
        purpose = f" ({row['purpose']})" if row["purpose"] != "unknown" else ""
        text = f"Most transfer time goes to the {row['kind']}{size} {where}{purpose}: {row['count']:,} of them, "
        most = "" if row["complete"] else "at most "
        speed = speed if row["complete"] else speed.replace(" at ", " at least at ", 1)
        text += f"{most}{format_ns(row['transfer_ns'])} each{speed}."
        return [Finding("collectives.costliest", "info", text, row["transfer_ns"] / NS_PER_US, "us", self._evidence(row), row=_place(row))]

    def _evidence(self, row: pd.Series[Any]) -> str:
        return f"group {self.groups[row['group']].id} in the collective table" if row["group"] >= 0 else "the collective table"


def _place(row: pd.Series[Any]) -> dict[str, int | str]:
    """The row of the collective table by axis, or of that by group where both are the same."""
    said = {"Axis": row["axis"], "Kind": row["kind"], "Purpose": row["purpose"]}
    return {**said, "Full size": int(row["full_bytes"])} if row["full_bytes"] != NULL else said


_WRONG = "sizes or times in the traces are wrong there"


def _partial(rows: pd.DataFrame) -> str:
    partial = int((~rows["complete"] & (rows["matched"] > 0)).sum())
    beyond = int((rows["busbw_gb_s"] > thresholds.IMPOSSIBLE_GB_S).sum())
    told = [f"{partial} rows lack a rank: their transfer is an upper bound, their bandwidths lower bounds."] if partial else []
    told += [f"{beyond} rows have a bandwidth that no device reaches: {_WRONG}."] if beyond else []
    return " ".join(told)


def _reason(row: dict[Any, Any]) -> str | None:
    """Why a row has no bus bandwidth; None where it has one."""
    if not np.isnan(row["busbw_gb_s"]):
        return None
    if row["matched_by"] == "none":
        return "not matched with another rank, so there is no transfer time"
    if not row["transfer_total_ns"]:
        return "no time passed between the last arrival and the end"
    if row["full_bytes"] == NULL and np.isnan(row["algbw_gb_s"]):
        return "its size is not recorded"
    return "no bandwidth factor is defined for this kind or group size"


def analyze(job: Job) -> Collectives:
    """Sum up the collectives of the job."""
    span = max((window.span[1] - window.span[0] for window in job.windows), default=0)
    keyed = gather.keys(job)
    return Collectives(_summed(job, keyed), _summed(job, gather.by_axis(job, keyed)), list(job.groups.groups), slow_groups(job, span))


def _summed(job: Job, keyed: gather.Keyed) -> Summed:
    """The rows, the longest total first."""
    count = len(keyed.first)
    length = job.operations["end_ns"].to_numpy() - job.operations["start_ns"].to_numpy()
    order = np.argsort(-spread(keyed.key, length, count).total, kind="stable")
    index = np.empty(count, np.int64)
    index[order] = np.arange(count)
    key = index[keyed.key]
    keyed = gather.Keyed(key, keyed.first[order], keyed.full, keyed.folded[order], keyed.sizes[order])
    transfer, complete, moved = gather.transfers(job, keyed, count)
    duration = spread(key, length, count)
    rows = gather.rows(job, keyed, duration, transfer, complete, moved)
    members = pd.DataFrame({"key": key, "group": job.operations["group"].to_numpy()})
    groups = members[members["group"] >= 0].groupby("key")["group"].nunique().reindex(range(count), fill_value=0)
    return Summed(rows, groups.to_numpy().astype(np.int64), duration, transfer, gather.waits(job, key, count))
