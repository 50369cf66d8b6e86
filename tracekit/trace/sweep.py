"""The one sequential pass of this room, compiled: which interval encloses each moment, innermost first."""

from __future__ import annotations

import numpy as np

from tracekit.compiled import late
from tracekit.trace.events import Int64Array


@late
def innermost(
    outer_lane: Int64Array,
    outer_start: Int64Array,
    outer_end: Int64Array,
    lane: Int64Array,
    time: Int64Array,
    own: Int64Array,
) -> Int64Array:
    """Position of the innermost outer interval around each time; -1 for none.

    Outer intervals are sorted by (lane, start, longest first), times by (lane, time, own). ``own`` is the position of the outer interval
    that the time itself stands for (it does not enclose itself), or the number of outer intervals.
    A stack holds the intervals that have started; those that have ended are dropped as soon as they come to its top, so the top is the
    latest started one that is still open, whether intervals nest or merely overlap. Each is pushed and dropped once.
    """
    result = np.full(len(time), -1, np.int64)
    stack = np.empty(len(outer_start) + 1, np.int64)
    depth = 0
    following = 0
    for i in range(len(time)):
        while following < len(outer_start) and outer_lane[following] < lane[i]:
            following += 1
            depth = 0
        while (
            following < len(outer_start) and outer_lane[following] == lane[i] and outer_start[following] <= time[i] and following < own[i]
        ):
            while depth > 0 and outer_end[stack[depth - 1]] <= outer_start[following]:
                depth -= 1
            stack[depth] = following
            depth += 1
            following += 1
        while depth > 0 and (outer_end[stack[depth - 1]] <= time[i] or outer_lane[stack[depth - 1]] != lane[i]):
            depth -= 1
        if depth > 0:
            result[i] = stack[depth - 1]
    return result
