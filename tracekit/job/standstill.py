"""Whether the traces of all ranks show a job that stood still when they ended, as what a flight recorder would have dumped then.

A collective of a rank is open where it is the last of its group there and

    lasts until the rank's trace ends (but for a tenth of it), or was called and never seen to run.

L is how long, from its start or call to the end. That is no hang yet: windows end anywhere, kernels get lost. A group stands still where

    a member whose trace goes on has not made the call       L >= T0 = max(5 usual durations, a fifth of a step)
    a member whose trace ended before, or is not there,
    has not made it; or the other side of a message          L >= T1 = max(20 usual durations, 3 steps)
    all members are in it                                    L >= T1 and a second

and no member has left it. The usual duration is the median of the group's operations, a step the median of those that ended before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from tracekit.job.model import Job
from tracekit.job.trace_calls import calls_of, dumps_of
from tracekit.readers.hang_files import Dump, Stacks
from tracekit.trace.events import Int64Array
from tracekit.units import NS_PER_S, NULL

#: Kinds that some members leave before others have come.
_ONE_SIDED = ("broadcast", "reduce", "gather", "scatter")
#: Of T0 and T1: times the usual duration, times a step, and without either times the longest trace.
_SOON, _LATE = (5.0, 0.2, 0.2), (20.0, 3.0, 0.5)
_OPEN_END = 0.1
#: Ranks of a job whose traces are searched.
MOST_RANKS = 1 << 16


@dataclass(frozen=True)
class Standstill:
    """``dumps`` and ``stacks`` as a flight recorder and Python would have left them; ``since_ns``: the first wait, on the job's clock.

    ``step``: the first that did not end, None where no steps are marked.
    """

    dumps: list[Dump]
    stacks: list[Stacks]
    since_ns: int
    waited_ns: int
    step: int | None


def standstill(job: Job) -> Standstill | None:
    """What all traces together show; None where nothing stands still."""
    ends = _ends(job)
    if not ends or len(ends) > MOST_RANKS or not _some_open(job, ends):
        return None
    calls = calls_of(job, {rank: window for rank, (window, _) in ends.items()})
    if calls is None or not len(calls):
        return None
    end = np.array([ends[rank][1] for rank in calls["rank"].tolist()], np.int64)
    length = np.where(calls["ran"], calls["end"], end) - calls["start"].to_numpy()
    reaches = (end - calls["end"].to_numpy() <= _OPEN_END * length) | ~calls["ran"].to_numpy()
    calls["length"] = np.maximum(length, 0)
    calls["open"] = reaches & (length > 0) & _nothing_behind(calls)
    if not calls["open"].any():
        return None
    hung = [rows for rows in _standing(job, calls, {rank: end for rank, (_, end) in ends.items()}) if len(rows)]
    if not hung:
        return None
    rows = np.concatenate(hung)
    since, waited = int(calls["start"].to_numpy()[rows].min()), int(calls["length"].to_numpy()[rows].max())
    dumps, stacks = dumps_of(job, calls, rows, ends)
    return Standstill(dumps, stacks, since, waited, _step(job, ends, since))


def _ends(job: Job) -> dict[int, tuple[int, int]]:
    """Rank -> its last window, and when that ended on the job's clock."""
    found: dict[int, tuple[int, int]] = {}
    for number, window in enumerate(job.windows):
        if window.has_events and window.rank is not None and window.ending is not None:
            end = int(job.aligned(number, window.span[1]))
            if window.rank not in found or end > found[window.rank][1]:
                found[window.rank] = number, end
    return found


def _some_open(job: Job, ends: Mapping[int, tuple[int, int]]) -> bool:
    """Whether any call could be open: one never ran, or one lasts until its rank's trace ends. Most jobs are done with here."""
    last = np.full(len(job.windows), NULL, np.int64)
    for number, end in ends.values():
        ending = job.windows[number].ending
        if ending is not None and ((ending.calls and ending.on_device) or ending.ends):
            return True
        last[number] = end
    window = job.operations["window"].to_numpy()
    ended = job.operations["end_ns"].to_numpy()
    length = ended - job.operations["start_ns"].to_numpy()
    return bool(((last[window] != NULL) & (length > 0) & (last[window] - ended <= _OPEN_END * length)).any())


def _nothing_behind(calls: pd.DataFrame) -> pd.Series[bool]:
    """Whether nothing of the rank's group ran after a call: of several that did not run, the first is the one."""
    keys = [calls["rank"], calls["group"], calls["p2p"]]
    last_ran = calls["number"].where(calls["ran"]).groupby(keys).transform("max").fillna(NULL)
    first_not = calls["number"].where(~calls["ran"]).groupby(keys).transform("min")
    last = calls["number"].where(calls["ran"], first_not) == first_not.fillna(last_ran)
    return last & ((calls["number"] >= last_ran) | ~calls["ran"])


def _standing(job: Job, calls: pd.DataFrame, ends: Mapping[int, int]) -> Iterator[Int64Array]:
    """Rows of open calls, group by group, where the group stands still."""
    for _, part in calls.groupby(["group", "p2p"]):
        open_calls = part[part["open"]]
        if len(open_calls):
            soon, late = _limits(job, calls, part)
            waited = open_calls[(open_calls["match"] < 0) & (open_calls["length"] >= late)]
            chosen = waited if part["p2p"].iloc[0] else _collective(job, part, open_calls, (soon, late), ends)
            yield chosen.index.to_numpy().astype(np.int64)


def _collective(
    job: Job, part: pd.DataFrame, open_calls: pd.DataFrame, limits: tuple[float, float], ends: Mapping[int, int]
) -> pd.DataFrame:
    """The open calls of a group's collective; none where that is no standstill. ``part``: all calls of the group."""
    group = int(part["group"].iloc[0])
    if not part["kind"].isin(_ONE_SIDED).all():
        # What another member is through with hangs for nobody: a kernel that was lost, a file that is cut.
        open_calls = open_calls[~open_calls["number"].isin(part.loc[~part["open"], "number"])]
    if not len(open_calls):
        return open_calls
    number = int(open_calls["number"].min())
    waiting = open_calls[open_calls["number"] == number]
    last = part.groupby("rank")["number"].max()
    members = job.groups[group].ranks if group >= 0 else None
    behind = [
        rank for rank in ends if (members is None or rank in members) and last.get(rank, -1) < number and (group >= 0 or rank in last)
    ]
    absent = [rank for rank in members or () if rank not in ends]
    length, begin = float(waiting["length"].max()), int(waiting["start"].min())
    goes_on = any(ends[rank] - begin >= limits[0] and not _cut(job, rank) for rank in behind)
    if behind or absent:
        enough = length >= (limits[0] if goes_on else limits[1])
    else:
        enough = len(waiting) > 1 and bool(waiting["ran"].any()) and length >= max(limits[1], NS_PER_S)
        enough = enough and members is not None and len(waiting) == len(members)
    return waiting if enough else part[:0]


def _cut(job: Job, rank: int) -> bool:
    return any(window.rank == rank and window.coverage.status == "truncated" for window in job.windows)


def _limits(job: Job, calls: pd.DataFrame, part: pd.DataFrame) -> tuple[float, float]:
    """T0 and T1 of a group [ns]; without anything to compare with, a share of the longest trace."""
    since = int(part.loc[part["open"], "start"].min())
    usual = next((float(of["length"].median()) for of in (_over(part), _over(calls)) if len(of)), None)
    steps = [
        (window.steps.end - window.steps.start)[job.aligned(number, window.steps.end) <= since] for number, window in enumerate(job.windows)
    ]
    lengths = np.concatenate(steps)
    step = float(np.median(lengths)) if len(lengths) else None
    longest = max(window.span[1] - window.span[0] for window in job.traced)
    if usual is None and step is None:
        return _SOON[2] * longest, _LATE[2] * longest
    soon, late = (max(times * (usual or 0.0), steps_ * (step or 0.0)) for times, steps_, _ in (_SOON, _LATE))
    return soon, late


def _over(calls: pd.DataFrame) -> pd.DataFrame:
    return calls[calls["ran"] & ~calls["open"]]


def _step(job: Job, ends: Mapping[int, tuple[int, int]], since: int) -> int | None:
    """Number of the first step that did not end before the first wait."""
    first: list[int] = []
    for number, _ in ends.values():
        steps = job.windows[number].steps
        if len(steps):
            later = job.aligned(number, steps.end) > since
            first.append(int(steps.number[later].min()) if later.any() else int(steps.number.max()) + 1)
    return min(first, default=None)
