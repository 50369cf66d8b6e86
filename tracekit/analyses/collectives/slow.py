"""Groups, and pairs of ranks, whose transfers are slower than those of their siblings: the others of the axis that do the same.

A call is held against what its siblings need for as many bytes; where they move none of that size, against their rate with smaller
messages, which only gets better with size. Only what a rank sends counts, and only messages that are large enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from tracekit.analyses import _thresholds as thresholds
from tracekit.analyses.collectives.links import LARGE_BYTES
from tracekit.analyses.collectives.moved import moved
from tracekit.collectives.cost import busbw_factor
from tracekit.findings import Finding, Subject
from tracekit.job.model import Job
from tracekit.mesh.process_groups import ProcessGroup
from tracekit.units import format_bytes, format_rate, listed

_MOST = 5
_ADVICE = "Look at the links between these ranks: placement, a degraded network card or cable, traffic of another job."


def slow_groups(job: Job, span_ns: int) -> list[Finding]:
    """One finding a slow group or pair, the one that loses most first."""
    rows = moved(job)
    rows = rows[(rows["sent"] >= LARGE_BYTES) & (rows["axis"] != "")] if len(rows) else rows
    if not len(rows):
        return []
    columns = zip(rows["kind"], rows["group"].tolist(), rows["low"].tolist(), rows["high"].tolist(), strict=True)
    who = [f"{group} {low} {high}" if kind == "send" else str(group) for kind, group, low, high in columns]
    rows = rows.assign(
        who=np.unique(who, return_inverse=True)[1], rate=rows["sent"] / rows["transfer_ns"], leaves=[str(each) for each in rows["crosses"]]
    )
    found = []
    for _, part in rows.groupby(["axis", "kind", "size", "leaves"], sort=False):
        if part["who"].nunique() > 1:
            found += _of_family(job, part, span_ns)
    return sorted(found, key=lambda finding: -finding.weight_ns)[:_MOST]


def _of_family(job: Job, rows: pd.DataFrame, span_ns: int) -> list[Finding]:
    """Rows of calls of one kind along one axis, each with ``who`` made it."""
    rates = rows.groupby(["who", "sent"])["rate"].median().reset_index()
    found = []
    for who, own in rates.groupby("who"):
        others = rates[rates["who"] != who]
        reference = [_reference(others, sent) for sent in own["sent"].tolist()]
        part = (
            rows[rows["who"] == who].merge(own.assign(reference=reference)[["sent", "reference"]], on="sent").dropna(subset=["reference"])
        )
        if not len(part):
            continue
        usual = part["sent"] / part["reference"]  # what its siblings would need for each [ns]
        share = float((usual / part["transfer_ns"]).median())  # by the middle call: one that is held up makes no slow link
        lost = float(part["transfer_ns"].sum()) * (1 - share)
        if share < thresholds.SLOW_GROUP and lost > thresholds.SLOW_GROUP_COST * span_ns:
            found.append(_finding(job, part, share, others["who"].nunique(), int(lost)))
    return found


def _reference(others: pd.DataFrame, sent: float) -> float:
    """Median rate [GB/s] of the siblings at this size, else with their largest smaller messages; NaN where theirs are all larger."""
    smaller = others[others["sent"] <= sent]
    nearest = smaller.sort_values("sent").groupby("who").tail(1)
    return float(nearest["rate"].median()) if len(nearest) else float("nan")


def _finding(job: Job, part: pd.DataFrame, share: float, siblings: int, lost: int) -> Finding:
    row = part.iloc[int(part["transfer_ns"].argmax())]
    group = job.groups[int(row["group"])]
    kind, factor = str(row["kind"]), busbw_factor(str(row["kind"]), int(row["size"])) or 1.0
    bandwidth = float((part["sent"] / part["transfer_ns"]).median())
    size = format_bytes(int(row["full_bytes"] if factor else row["sent"]))
    usual = float(part["reference"].median())
    members: Sequence[int] = (int(row["low"]), int(row["high"])) if kind == "send" else _members(group)
    who = f"Messages between ranks {members[0]} and {members[1]} (axis {group.axis}) go at {format_rate(bandwidth)}, {size} each"
    if kind != "send":
        lead = f"Group {group.id} of axis {group.axis} (ranks {listed(members, 8)})"
        who = f"{lead} runs its {kind} of {size} at {format_rate(bandwidth)}"
    crosses = " It crosses nodes." if row["crosses"] is True and kind != "send" else ""
    others = f"{siblings} other {'pairs of ranks' if kind == 'send' else 'groups'} of axis {group.axis}"
    return Finding(
        "collectives.slow_group",
        "warning",
        f"{who}, {'its siblings' if kind != 'send' else 'those of other pairs'} at {format_rate(usual)}.{crosses}",
        value=share,
        unit="share",
        evidence=f"group {group.id} in the collective table, beside {others}",
        advice=_ADVICE,
        weight_ns=lost,
        subject=Subject(tuple(members), group.axis or None, group=group.id),
    )


def _members(group: ProcessGroup) -> Sequence[int]:
    return tuple(group.ranks if group.ranks is not None else group.known)
