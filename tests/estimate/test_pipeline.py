"""Closed forms of pipeline schedules: published figures, and identities between them."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.errors import UsageError
from tracekit.estimate import pipeline

times = st.fractions(0, 10)


def test_four_stages_and_eight_micro_batches():
    assert pipeline.bubble_ratio("1f1b", 4, 8, 1, 1, 1) == Fraction(3, 8)  # 0.375
    assert pipeline.wall_bubble_share(4, 8) == Fraction(3, 11)  # 0.2727
    assert pipeline.bubble_ratio("interleaved_1f1b", 4, 8, 1, 1, 1, 2) == Fraction(3, 16)
    assert pipeline.in_flight("1f1b", 4, 8) == (4, 3, 2, 1)
    assert pipeline.in_flight("gpipe", 4, 8) == (8, 8, 8, 8)
    assert pipeline.in_flight("interleaved_1f1b", 4, 8, 2)[0] == 2 * 3 + 1 * 4 + 1
    assert pipeline.in_flight_until_weight("zb_h1", 4, 8) == (4, 4, 4, 4)
    assert pipeline.in_flight_until_weight("zb_h2", 4, 8) == (7, 7, 7, 7)


@pytest.mark.parametrize(
    ("schedule", "v", "bubble"),
    [("gpipe", 1, 18), ("1f1b", 1, 18), ("interleaved_1f1b", 2, 9), ("zb_h1", 1, 12), ("zb_h2", 1, 9)],
)
def test_bubble_of_four_stages_with_f_2_b_3_w_1(schedule, v, bubble):
    # zb_h2: (p-1)(f+b-2w) = 9
    assert pipeline.bubble_time(schedule, 4, 8, 2, 3, 1, v) == bubble
    assert pipeline.wall_time(schedule, 4, 8, 2, 3, 1, v) == 8 * 6 + bubble


def test_zero_bubble_leaves_only_the_first_fill():
    assert pipeline.span_bubble_time("zb_h2", 4, 8, 1, 1, 1) == 0
    assert pipeline.bubble_time("zb_h2", 4, 8, 1, 1, 1) == 3  # the last stage waits for three forwards
    assert pipeline.span_bubble_time("zb_h1", 4, 8, 1, 1, 1) == 3
    assert pipeline.span_bubble_time("zb_h1", 4, 8, 1, 1, 2) is None


@given(p=st.integers(1, 12), m=st.integers(1, 40), f=times, b=times, w=times)
def test_ratio_and_share_of_1f1b_do_not_depend_on_the_times(p, m, f, b, w):
    if f + b + w == 0:
        assert pipeline.bubble_share("1f1b", p, m, f, b, w) == 0
        return
    ratio = pipeline.bubble_ratio("1f1b", p, m, f, b, w)
    assert ratio == Fraction(p - 1, m)
    assert pipeline.bubble_share("1f1b", p, m, f, b, w) == pipeline.wall_bubble_share(p, m) == ratio / (1 + ratio)


@given(p=st.integers(1, 12), more=st.integers(0, 30), f=times, b=times, w=times)
def test_zero_bubble_never_waits_longer_than_1f1b(p, more, f, b, w):
    m = 2 * p - 1 + more
    h1 = pipeline.bubble_time("zb_h1", p, m, f, b, w)
    assert pipeline.bubble_time("zb_h2", p, m, f, b, w) <= h1 <= pipeline.bubble_time("1f1b", p, m, f, b, w)
    if w <= min(f, b):
        assert h1 == (p - 1) * (f + b - w)  # as published


def test_messages_and_their_bytes():
    assert pipeline.messages_sent("1f1b", 4, 8) == (8, 16, 16, 8)
    assert pipeline.messages_sent("interleaved_1f1b", 4, 8, 2) == (24, 32, 32, 24)  # 2 m (p v - 1) = 112
    assert pipeline.messages_sent("gpipe", 1, 8) == (0,)
    assert pipeline.boundary_bytes(s=2048, b=1, h=4096, element_bytes=2) == 16_777_216
    assert pipeline.boundary_bytes(s=2048, b=1, h=4096, element_bytes=2, t=8) == 2_097_152


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("interleaved_1f1b", 4, 6, 2), "no multiple of 4"),
        (("zb_h2", 4, 6, 1), "7 micro-batches"),
        (("1f1b", 4, 8, 2), "one chunk a rank"),
        (("1f1b", 0, 8, 1), "0 stages"),
        (("1f1b", 10**9, 8, 1), "1000000000 stages"),
        (("dualpipe", 4, 8, 1), "no schedule"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(arguments, reason):
    with pytest.raises(UsageError, match=reason):
        pipeline.in_flight(*arguments)


@pytest.mark.parametrize("time", [-1, float("nan"), float("inf")])
def test_what_is_no_time_is_refused(time):
    with pytest.raises(UsageError, match="a piece of work that takes"):
        pipeline.bubble_time("1f1b", 4, 8, time, 1, 1)
    with pytest.raises(UsageError, match="a piece of work that takes"):
        pipeline.ideal_time(8, 1, 1, time)
