"""Sets of time intervals, in integers.

A set is a pair of arrays ``(start, end)``, sorted, disjoint and not touching; an interval is half open,
``[start, end)``. Everything here is a few sorted-array operations: no loop over intervals.
"""

from __future__ import annotations

import numpy as np

from tracekit.trace.events import Int64Array

IntervalSet = tuple[Int64Array, Int64Array]


def empty() -> IntervalSet:
    """The set that covers nothing."""
    return np.empty(0, np.int64), np.empty(0, np.int64)


def union(start: Int64Array, end: Int64Array) -> IntervalSet:
    """The set covered by any of the intervals, given in any order. Intervals of no or negative length cover nothing."""
    real = end > start
    if not real.all():
        start, end = start[real], end[real]
    if not len(start):
        return empty()
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    opens = np.empty(len(start), np.bool_)
    opens[0] = True
    np.greater(start[1:], reach[:-1], out=opens[1:])
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(start)) - 1
    return start[first], reach[last]


def measure(start: Int64Array, end: Int64Array) -> int:
    """Total length [ns] of a set."""
    return int((end - start).sum())


def intersect(a: IntervalSet, b: IntervalSet) -> IntervalSet:
    """What both sets cover."""
    if not len(a[0]) or not len(b[0]):
        return empty()
    # An interval of b meets the intervals of a from the first that ends after its start to the last that starts before its end.
    first = np.searchsorted(a[1], b[0], side="right")
    last = np.searchsorted(a[0], b[1], side="left")
    count = np.maximum(last - first, 0)
    of_b = np.repeat(np.arange(len(b[0])), count)
    of_a = _ranges(first, count)
    return np.maximum(a[0][of_a], b[0][of_b]), np.minimum(a[1][of_a], b[1][of_b])


def subtract(a: IntervalSet, b: IntervalSet) -> IntervalSet:
    """What ``a`` covers and ``b`` does not."""
    if not len(a[0]) or not len(b[0]):
        return a
    return intersect(a, _complement(b, int(min(a[0][0], b[0][0])), int(max(a[1][-1], b[1][-1]))))


def clip(start: Int64Array, end: Int64Array, low: int, high: int) -> IntervalSet:
    """The part of a set inside ``[low, high)``: nothing when that is empty."""
    first = int(np.searchsorted(end, low, side="right"))
    last = int(np.searchsorted(start, high, side="left"))
    if last <= first or high <= low:
        return empty()
    return np.maximum(start[first:last], low), np.minimum(end[first:last], high)


def covered(start: Int64Array, end: Int64Array, cover: IntervalSet) -> Int64Array:
    """For each single interval (any order, may overlap) how much of it [ns] the set covers."""
    if not len(cover[0]):
        return np.zeros(len(start), np.int64)
    inside: Int64Array = np.maximum(_covered_before(end, cover) - _covered_before(start, cover), 0)
    return inside


def segments_outside(start: Int64Array, end: Int64Array, cover: IntervalSet) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The pieces of each single interval that the set does not cover: (index of the interval, piece start, piece end)."""
    real = np.flatnonzero(end > start)
    if not len(real):
        nothing = np.empty(0, np.int64)
        return nothing, nothing, nothing
    low, high = int(start[real].min()), int(end[real].max())
    gaps = _complement(clip(*cover, low, high), low, high)
    first = np.searchsorted(gaps[1], start[real], side="right")
    last = np.searchsorted(gaps[0], end[real], side="left")
    count = np.maximum(last - first, 0)
    index = np.repeat(real, count)
    of_gap = _ranges(first, count)
    return index.astype(np.int64), np.maximum(gaps[0][of_gap], start[index]), np.minimum(gaps[1][of_gap], end[index])


def _ranges(first: Int64Array, count: Int64Array) -> Int64Array:
    """``first[i], first[i] + 1, ...`` of length ``count[i]``, one after the other."""
    total = int(count.sum())
    offset = np.repeat(first - np.concatenate([[0], np.cumsum(count)[:-1]]), count)
    numbers: Int64Array = np.arange(total, dtype=np.int64) + offset
    return numbers


def _complement(cover: IntervalSet, low: int, high: int) -> IntervalSet:
    """What a set inside ``[low, high)`` leaves free of it."""
    start = np.concatenate([[low], cover[1]]).astype(np.int64)
    end = np.concatenate([cover[0], [high]]).astype(np.int64)
    free = end > start
    return start[free], end[free]


def _covered_before(times: Int64Array, cover: IntervalSet) -> Int64Array:
    """How much of the set lies before each time."""
    start, end = cover
    total = np.concatenate([[0], np.cumsum(end - start)])
    index = np.searchsorted(start, times, side="right")
    inside = np.where(index > 0, np.maximum(end[np.maximum(index - 1, 0)] - times, 0), 0)
    before: Int64Array = total[index] - inside
    return before
