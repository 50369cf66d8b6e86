"""Interval sets against the obvious model: sets of integers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tracekit.trace import intervals

pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12)


def arrays(items):
    start = np.array([s for s, _ in items], np.int64)
    return start, start + np.array([d for _, d in items], np.int64)


def points(start, end):
    return {t for s, e in zip(start.tolist(), end.tolist(), strict=True) for t in range(s, e)}


def test_union_joins_what_overlaps_or_touches():
    start, end = intervals.union(np.array([50, 0, 10, 30]), np.array([60, 10, 20, 30]))
    assert start.tolist() == [0, 50]
    assert end.tolist() == [20, 60]


@given(pairs)
def test_union_covers_the_same_points_and_is_a_set(items):
    start, end = arrays(items)
    u = intervals.union(start, end)
    assert points(*u) == points(start, end)
    assert intervals.measure(*u) == len(points(start, end))
    assert (u[0][1:] > u[1][:-1]).all()
    again = intervals.union(*u)
    assert again[0].tolist() == u[0].tolist()


@given(pairs, pairs)
def test_what_is_in_both_and_what_is_left_add_up(a_items, b_items):
    a, b = intervals.union(*arrays(a_items)), intervals.union(*arrays(b_items))
    both, left = intervals.intersect(a, b), intervals.subtract(a, b)
    assert points(*both) == points(*a) & points(*b)
    assert points(*left) == points(*a) - points(*b)
    assert intervals.measure(*a) == intervals.measure(*both) + intervals.measure(*left)


@given(pairs, pairs)
def test_single_intervals_are_covered_and_cut(items, cover_items):
    start, end = arrays(items)
    cover = intervals.union(*arrays(cover_items))
    inside = intervals.covered(start, end, cover)
    index, s, e = intervals.segments_outside(start, end, cover)
    for i in range(len(items)):
        own = set(range(start[i], end[i]))
        assert inside[i] == len(own & points(*cover))
        assert points(s[index == i], e[index == i]) == own - points(*cover)


@given(pairs, st.integers(0, 50), st.integers(0, 50))
def test_clip(items, low, high):
    u = intervals.union(*arrays(items))
    inside = intervals.clip(*u, low, high)
    assert points(*inside) == {t for t in points(*u) if low <= t < high}
    assert intervals.measure(*inside) == len(points(*inside))


def test_a_million_nested_intervals_are_one():
    start = np.arange(1_000_000)
    assert [part.tolist() for part in intervals.union(start[::-1], 3_000_000 - start[::-1])] == [[0], [3_000_000]]


def test_negative_and_absent_lengths_cover_nothing():
    s, e = intervals.union(np.array([5, 9]), np.array([2, 9]))
    assert len(s) == len(e) == 0
    assert intervals.covered(np.array([3, 8]), np.array([8, 3]), (np.array([0]), np.array([5]))).tolist() == [2, 0]
    assert [len(part) for part in intervals.segments_outside(np.array([8]), np.array([3]), intervals.empty())] == [0, 0, 0]
