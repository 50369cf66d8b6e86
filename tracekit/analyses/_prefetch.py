"""Gathers of parameters that begin only when the compute before them has ended: nothing prefetches, so nothing hides them.

For each gather of a rank, with the compute of the stream that computes most:

    before = latest end of compute that began before the gather    [ns]
    late   : before <= start, and that compute belongs to the same step

The first gather of a step has no compute to hide behind and does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.analyses._exposed import WindowExposure, windows
from tracekit.graph.blocks import on_main_stream
from tracekit.job.activity import Activity, Work
from tracekit.job.model import Job
from tracekit.job.packed import unpacked
from tracekit.trace import intervals
from tracekit.trace.events import Int64Array
from tracekit.units import NS_PER_US, NULL

#: Timers of two streams differ by no more; so many of the gathers that could hide are late where nothing prefetches.
TIMER_NS, MOST = 2 * NS_PER_US, 0.8


@dataclass(frozen=True)
class Unprefetched:
    """``late`` of ``gathers``, in all ranks and steps; ``called_late``: those whose call came behind that compute as well.

    ``exposed_ns``: what of them no compute hides, mean of a rank's steps.
    """

    gathers: int
    late: int
    called_late: int
    exposed_ns: float


def compute_before(activity: Activity) -> Int64Array:
    """For each operation the latest end of the compute that began before it; NULL where none did, and on CPUs."""
    count, device = len(activity.operations), activity.device
    if activity.on_cpu or not count:
        return np.full(count, NULL, np.int64)
    started = np.full(count, np.iinfo(np.int64).max)
    rows = np.flatnonzero((device.work == Work.COMMUNICATION) & (device.operation >= 0))
    np.minimum.at(started, device.operation[rows], device.start[rows])
    chosen = (device.work == Work.COMPUTE) & on_main_stream(device)
    start, latest = device.start[chosen], np.maximum.accumulate(device.end[chosen])
    at = np.searchsorted(start, started, side="left") - 1
    return np.where(at >= 0, np.append(latest, NULL)[at], NULL)


def unprefetched(job: Job) -> Unprefetched | None:
    """What is late, where most gathers are."""
    purpose = (job.operations["purpose"] == "parameter_gather").to_numpy()
    gathers = late = called_late = steps = 0
    exposed = 0
    for seen in windows(job):
        before: Int64Array = unpacked(job.windows[seen.index].reduced["overlap"]).before
        own = purpose[seen.rows] & (before != NULL) & (_step_begin(seen) <= before)
        slow = own & (before <= seen.busy.start + TIMER_NS)
        called = job.windows[seen.index].operations["launch_ns"].to_numpy(np.int64)
        gathers, late = gathers + int(own.sum()), late + int(slow.sum())
        called_late += int((slow & (called != NULL) & (called >= before - TIMER_NS)).sum())
        exposed += intervals.measure(*seen.exposed.where(slow).union())
        steps += len(seen.times)
    if not steps or gathers < 2 or late < MOST * gathers:
        return None
    return Unprefetched(gathers, late, called_late, exposed / steps)


def _step_begin(seen: WindowExposure) -> npt.NDArray[np.int64]:
    """When the step of each operation begins; the latest time there is for what belongs to none."""
    at = np.searchsorted(seen.times.start, seen.busy.start, side="right") - 1
    inside = (at >= 0) & (seen.busy.start < seen.times.end[np.maximum(at, 0)])
    return np.where(inside, seen.times.start[np.maximum(at, 0)], np.iinfo(np.int64).max)
