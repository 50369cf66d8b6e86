"""Where in the steps the causes of a long step can be seen: waits for a late rank, transfers, exposed communication, idle devices.

All times are on the job's clock, from the zero of their step. A stretch is only a place to look at: figures come from the analyses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from tracekit.analyses.timeline.spans import Spans
from tracekit.collectives.kinds import POINT_TO_POINT
from tracekit.graph.critical import KINDS
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
#: Code of an axis, starts and ends of a rank's communication along it [ns].
_Axis = tuple[int, Int64Array, Int64Array]


class _Open(NamedTuple):
    """Intervals [ns] of one rank and step: communication along ``axis`` that nothing hides, or, -1, no work."""

    step: int
    rank: int
    axis: int
    start: Int64Array
    end: Int64Array


def critical(job: Job, zeros: Mapping[int, int]) -> pd.DataFrame:
    """The critical path of each step: step, start_us, end_us, name, category. Empty for a job of one rank, or one without a graph."""
    study = study_of(job)
    if not isinstance(study, Study) or len(study.places.ranks) < 2:
        return pd.DataFrame()
    graph, path = study.graph, study.path
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
    by_rank, axes = _by_rank(_operations(job, zeros))
    rows: list[_Open] = []
    for step, ranks in drawn.items():
        for rank, spans in ranks.items():
            rows += _of_rank(step, rank, spans, shift[step, rank], by_rank.get((step, rank), []))
    frame = pd.concat([*_of_matches(job, zeros), _frame(rows, axes)], ignore_index=True)
    frame["length"] = frame["end_us"] - frame["start_us"]
    frame = frame[frame["length"] > 0].sort_values("length", ascending=False, kind="stable")
    return frame.groupby(["step", "kind"], sort=False).head(TOGETHER)[list(COLUMNS)].reset_index(drop=True)


def _by_rank(operations: pd.DataFrame) -> tuple[dict[tuple[int, int], list[_Axis]], list[str]]:
    """For each (step, rank) its communication along each axis: (code of the axis, starts, ends) from the zero of the step; the axes."""
    axis, axes = pd.factorize(operations["axis"], sort=True)
    step, rank, zero = (operations[name].to_numpy(np.int64) for name in ("step", "rank", "zero"))
    order = np.lexsort((axis, rank, step))
    keys = np.stack([step[order], rank[order], axis[order].astype(np.int64)])
    bounds = np.flatnonzero(np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0))) if len(order) else np.zeros(0, np.int64)
    start, end = ((operations[name].to_numpy(np.int64) - zero)[order] for name in ("start_ns", "end_ns"))
    found: dict[tuple[int, int], list[_Axis]] = {}
    for low, high in zip(bounds.tolist(), [*bounds[1:].tolist(), len(order)], strict=False):
        found.setdefault((int(keys[0, low]), int(keys[1, low])), []).append((int(keys[2, low]), start[low:high], end[low:high]))
    return found, [str(name) for name in axes]


def _frame(rows: Sequence[_Open], axes: Sequence[str]) -> pd.DataFrame:
    """Columns COLUMNS of what ranks leave open: the EACH longest of every entry."""
    longest = [np.argsort(row.start - row.end, kind="stable")[:EACH] for row in rows]
    counts = [len(kept) for kept in longest]
    start, end = (
        np.concatenate([np.zeros(0), *(getattr(row, name)[kept] / NS_PER_US for row, kept in zip(rows, longest, strict=True))])
        for name in ("start", "end")
    )
    names = np.array([*axes, ""], dtype=object)
    return pd.DataFrame(
        {
            "step": np.repeat(np.array([row.step for row in rows], np.int64), counts),
            "kind": np.repeat(np.array([IDLE if row.axis < 0 else EXPOSED for row in rows], dtype=object), counts),
            "rank": np.repeat(np.array([row.rank for row in rows], np.int64), counts),
            "axis": names[np.repeat(np.array([row.axis for row in rows], np.int64), counts)],
            "group": "",
            "start_us": start,
            "end_us": end,
        }
    )


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


def _of_rank(step: int, rank: int, spans: Spans, shift: int, communication: Sequence[_Axis]) -> list[_Open]:
    """What one rank's device leaves open: communication beside no compute, by axis, and time of no work."""
    codes = {name: code for code, name in enumerate(spans.categories)}
    work = ~np.isin(spans.category, [codes[name] for name in _NOT_WORK if name in codes])
    computes = spans.category == codes["compute"]
    compute, any_work = (union(spans.start[kept] + shift, spans.end[kept] + shift) for kept in (computes, work))
    step_is: IntervalSet = union(np.array([max(0, spans.low + shift)], np.int64), np.array([spans.high + shift], np.int64))
    found = [_Open(step, rank, -1, *subtract(step_is, any_work))]
    for axis, start, end in communication:
        _, low, high = segments_outside(start, end, compute)
        found.append(_Open(step, rank, axis, low, high))
    return found
