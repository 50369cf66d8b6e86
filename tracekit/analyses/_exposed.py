"""Communication that compute does not cover: the piece of every operation, kept per operation until its group and axis are known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.analyses._common import WindowOperations, by_step
from tracekit.job.activity import Activity, Window, Work
from tracekit.job.model import Job
from tracekit.trace import intervals
from tracekit.trace.events import Int64Array
from tracekit.trace.steps import StepTimes


@dataclass(frozen=True)
class Exposed:
    """Intervals on the window's own clock, each a piece of one operation: ``operation`` is the row of the window's operations."""

    operation: Int64Array
    start: Int64Array
    end: Int64Array

    def where(self, chosen: npt.NDArray[np.bool_]) -> Exposed:
        """The pieces of the operations for which ``chosen`` (one entry an operation) is true."""
        keep = chosen[self.operation]
        return Exposed(self.operation[keep], self.start[keep], self.end[keep])

    def union(self) -> intervals.IntervalSet:
        """What any of the pieces covers."""
        return intervals.union(self.start, self.end)


def exposed_intervals(activity: Activity, compute: intervals.IntervalSet) -> Exposed:
    """The pieces of each communication operation that no compute covers."""
    device = activity.device
    chosen = device.work == Work.COMMUNICATION
    operation = device.operation[chosen].astype(np.int64)
    index, start, end = intervals.segments_outside(device.start[chosen], device.end[chosen], compute)
    return Exposed(operation[index], start, end)


@dataclass(frozen=True)
class WindowExposure:
    """One window: ``rows`` of job.operations, its operations as whole intervals, and their exposed pieces."""

    index: int
    window: Window
    times: StepTimes
    rows: Int64Array
    busy: Exposed
    exposed: Exposed


def windows(job: Job) -> Iterator[WindowExposure]:
    """Every window in which the overlap analysis ran."""
    operations = WindowOperations(job)
    for index, window, times, reduced in by_step(job, "overlap"):
        local = window.operations
        number = np.arange(len(local), dtype=np.int64)
        busy = Exposed(number, local["start_ns"].to_numpy(), local["end_ns"].to_numpy())
        yield WindowExposure(index, window, times, operations.rows(index), busy, reduced.pieces)
