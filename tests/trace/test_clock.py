import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tracekit.trace.clock import align


def operations(*rows):
    """(rank, match, start, end) rows as arrays."""
    rank, match, start, end = np.array(rows, np.int64).T
    return rank.astype(np.int32), match.astype(np.int32), start, end


def test_one_host_needs_no_offset():
    clock = align({0: "a", 1: "a"}, *operations((0, 0, 100, 300), (1, 0, 200, 301)))
    assert clock.aligned
    assert clock.offset_ns == {0: 0, 1: 0}
    assert clock.residual_ns == 0
    assert clock.note == ""


def test_a_second_host_is_812_us_ahead():
    ahead = 812_000
    clock = align(
        {0: "a", 1: "a", 2: "b"},
        *operations(
            (0, 0, 0, 900), (1, 0, 500, 901), (2, 0, 600 + ahead, 900 + ahead), (0, 1, 2000, 2500), (2, 1, 2100 + ahead, 2502 + ahead)
        ),
    )
    assert clock.aligned
    assert abs(clock.offset_ns[2] - ahead) <= 2
    assert clock.offset_ns[1] == 0
    assert clock.residual_ns == 0
    assert "clock" in clock.note
    assert "+812 us" in clock.note


def test_a_host_without_a_common_collective_stands_apart():
    clock = align({0: "a", 1: "b"}, *operations((0, 0, 0, 10)))
    assert not clock.aligned
    assert "b could not be compared" in clock.note


def test_unknown_hosts_share_a_clock_until_a_collective_contradicts_it():
    one = align({0: "", 1: ""}, *operations((0, 0, 0, 50), (1, 0, 40, 50)))
    assert one.aligned
    assert one.offset_ns == {0: 0, 1: 0}
    two = align({0: "", 1: ""}, *operations((0, 0, 0, 50), (1, 0, 1040, 1050)))
    assert two.offset_ns == {0: 0, 1: 1000}
    assert two.residual_ns == 0


def test_nothing_to_compare():
    empty = np.empty(0, np.int64)
    clock = align({0: "a"}, empty.astype(np.int32), empty.astype(np.int32), empty, empty)
    assert clock.aligned
    assert clock.residual_ns is None


def test_a_contradiction_inside_one_host_is_said():
    clock = align({0: "a", 1: "a"}, *operations((0, 0, 0, 5_000), (1, 0, 9_000, 12_000)))
    assert clock.residual_ns == 4_000
    assert "contradict" in clock.note


@given(st.lists(st.integers(-(10**9), 10**9), min_size=2, max_size=5), st.integers(1, 6), st.randoms(use_true_random=False))
def test_offsets_of_any_hosts_come_back(ahead, rounds, random):
    """Every host takes part in every collective and leaves it at the same true time: the offsets are found exactly."""
    rows = []
    for i in range(rounds):
        arrivals = [random.randrange(0, 1000) for _ in ahead]
        end = i * 5000 + max(arrivals) + 100
        rows += [(h, i, i * 5000 + a + o, end + o) for h, (a, o) in enumerate(zip(arrivals, ahead, strict=True))]
    clock = align({h: f"host{h}" for h in range(len(ahead))}, *operations(*rows))
    assert clock.offset_ns == {h: o - ahead[0] for h, o in enumerate(ahead)}
    assert clock.residual_ns == 0
