"""Where in the steps the causes of a long step can be seen: waits for a late rank, transfers, exposed communication, idle devices.

All times are on the job's clock, from the zero of their step. A stretch is only a place to look at: figures come from the analyses.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from tracekit.analyses.timeline.spans import Spans
from tracekit.collectives.kinds import POINT_TO_POINT
from tracekit.graph.critical import KINDS, critical_path
from tracekit.graph.study import Study, study_of
from tracekit.job.model import Job
from tracekit.trace.events import Int64Array
from tracekit.trace.intervals import IntervalSet, segments_outside, subtract, union
from tracekit.units import NS_PER_US

#: Kinds of stretches: a collective, or a send and its recv, from the first to the last arrival (``rank`` came last), a transfer along an
#: axis, communication of a rank that nothing hides, a rank whose device does nothing.
LATE, MESSAGE, TRANSFER, EXPOSED, IDLE = "late", "message", "transfer", "exposed", "idle"
COLUMNS = ("step", "kind", "rank", "axis", "group", "start_us", "end_us")
#: Stretches of one kind and step that are kept: of each rank, axis or group, and of all together.
EACH, TOGETHER = 3, 5000
#: Longest waits of a rank and step that are drawn, and waits of the whole job.
WAITS, ALL_WAITS = 60, 40_000
#: Pieces of the critical path of one step.
PATH = 3000
_NOT_WORK = ("phase", "annotation")


def critical(job: Job, zeros: Mapping[int, int]) -> pd.DataFrame:
    """The critical path of each step: step, start_us, end_us, name, category. Empty for a job of one rank, or one without a graph."""
    study = study_of(job)
    if not isinstance(study, Study) or len(study.places.ranks) < 2:
        return pd.DataFrame()
    graph, path = study.graph, critical_path(study.graph)
    ranks, names, number = graph.rank[path.node], graph.name[path.node], graph.numbers[graph.step[path.node]]
    found = []
    for step, zero in zeros.items():
        own = np.flatnonzero((number == step) & (path.end > zero))[-PATH:]
        found.append(
            pd.DataFrame(
                {
                    "step": step,
                    "start_us": np.maximum(path.start[own] - zero, 0) / NS_PER_US,
                    "end_us": (path.end[own] - zero) / NS_PER_US,
                    "name": [
                        f"rank {rank}: {graph.names[code]}" for rank, code in zip(ranks[own].tolist(), names[own].tolist(), strict=True)
                    ],
                    "category": [KINDS[kind] for kind in path.kind[own].tolist()],
                }
            )
        )
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame()


def waits(job: Job, zeros: Mapping[int, int]) -> pd.DataFrame:
    """The longest waits in matched collectives: step, rank, start_us, end_us, name."""
    frame = _matched(job, zeros)
    frame = frame[(frame["wait_ns"] > 0) & (frame["rank"] != frame["last_rank"])]
    frame = frame.nlargest(ALL_WAITS, "wait_ns", keep="first").groupby(["step", "rank"], sort=False).head(WAITS)
    names = [
        f"waits for rank {last}: {kind}" + (f" ({axis})" if axis else "")
        for last, kind, axis in zip(frame["last_rank"].tolist(), frame["kind"].tolist(), frame["axis"].tolist(), strict=True)
    ]
    start = (frame["start_ns"] - frame["zero"]) / NS_PER_US
    return pd.DataFrame(
        {"step": frame["step"], "rank": frame["rank"], "start_us": start, "end_us": start + frame["wait_ns"] / NS_PER_US, "name": names}
    )


def stretches(
    job: Job, zeros: Mapping[int, int], drawn: Mapping[int, Mapping[int, Spans]], shift: Mapping[tuple[int, int], int]
) -> pd.DataFrame:
    """Columns COLUMNS. ``drawn[step][rank]`` are spans of ranks to look at, ``shift`` [ns] brings each to the zero of its step."""
    found = [*_of_matches(job, zeros)]
    operations = _operations(job, zeros)
    for step, ranks in drawn.items():
        own = operations[operations["step"] == step]
        for rank, spans in ranks.items():
            found += _of_rank(step, rank, spans, shift[step, rank], own[own["rank"] == rank])
    frame = pd.concat(found, ignore_index=True) if found else pd.DataFrame({name: [] for name in COLUMNS})
    frame["length"] = frame["end_us"] - frame["start_us"]
    frame = frame[frame["length"] > 0].sort_values("length", ascending=False, kind="stable")
    return frame.groupby(["step", "kind"], sort=False).head(TOGETHER)[list(COLUMNS)].reset_index(drop=True)


def _operations(job: Job, zeros: Mapping[int, int]) -> pd.DataFrame:
    """Operations of the steps that are drawn, with the zero of their step."""
    frame = job.operations
    frame = frame[frame["step_number"].isin(list(zeros))]
    return frame.assign(
        step=frame["step_number"], zero=frame["step_number"].map(dict(zeros)).astype(np.int64), axis=frame["axis"].astype(str)
    )


def _matched(job: Job, zeros: Mapping[int, int]) -> pd.DataFrame:
    frame = _operations(job, zeros)
    frame = frame[frame["match"] >= 0]
    match = frame["match"].to_numpy()
    joined = {name: job.matches[name].to_numpy()[match] for name in ("last_rank", "first_start_ns", "last_start_ns", "transfer_ns")}
    return frame.assign(**joined)


def _of_matches(job: Job, zeros: Mapping[int, int]) -> list[pd.DataFrame]:
    """Collectives that a rank came late to, and their transfers."""
    frame = _matched(job, zeros).drop_duplicates("match")
    group = frame["group"].to_numpy()
    ids = np.array([*(each.id for each in job.groups.groups), ""], dtype=object)
    parts = []
    for kind, start, length, by in (
        (LATE, frame["first_start_ns"], frame["last_start_ns"] - frame["first_start_ns"], "rank"),
        (TRANSFER, frame["last_start_ns"], frame["transfer_ns"], "group"),
    ):
        begin = (start - frame["zero"]) / NS_PER_US
        rank = frame["last_rank"] if kind == LATE else -1
        told = np.where(frame["kind"].isin(POINT_TO_POINT), MESSAGE, LATE) if kind == LATE else kind
        part = pd.DataFrame(
            {"step": frame["step"], "kind": told, "rank": rank, "axis": frame["axis"], "group": ids[group], "start_us": begin,
             "end_us": begin + length / NS_PER_US, "length": length}
        )  # fmt: skip
        part = part.sort_values("length", ascending=False, kind="stable").groupby(["step", "kind", by], sort=False).head(EACH)
        parts.append(part.drop(columns="length"))
    return parts


def _of_rank(step: int, rank: int, spans: Spans, shift: int, operations: pd.DataFrame) -> list[pd.DataFrame]:
    """What one rank's device leaves open: communication beside no compute, by axis, and time of no work."""
    codes = {name: code for code, name in enumerate(spans.categories)}
    work = ~np.isin(spans.category, [codes[name] for name in _NOT_WORK if name in codes])
    computes = spans.category == codes["compute"]
    compute, any_work = (union(spans.start[kept] + shift, spans.end[kept] + shift) for kept in (computes, work))
    step_is: IntervalSet = union(np.array([max(0, spans.low + shift)], np.int64), np.array([spans.high + shift], np.int64))
    idle = subtract(step_is, any_work)
    found = [_rows(step, IDLE, rank, "", *idle)]
    for axis, part in operations.groupby("axis", sort=False):
        start, end = (part[name].to_numpy() - part["zero"].to_numpy() for name in ("start_ns", "end_ns"))
        _, low, high = segments_outside(start, end, compute)
        found.append(_rows(step, EXPOSED, rank, str(axis), low, high))
    return found


def _rows(step: int, kind: str, rank: int, axis: str, start: Int64Array, end: Int64Array) -> pd.DataFrame:
    """The EACH longest."""
    longest = np.argsort(start - end, kind="stable")[:EACH]
    return pd.DataFrame(
        {"step": step, "kind": kind, "rank": rank, "axis": axis, "group": "", "start_us": start[longest] / NS_PER_US,
         "end_us": end[longest] / NS_PER_US}
    )  # fmt: skip
