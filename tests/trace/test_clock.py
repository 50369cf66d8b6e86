import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.notes import sentence
from tracekit.trace.clock import Clock, Messages, align


def operations(*rows):
    """(rank, match, start, end) rows as arrays."""
    rank, match, start, end = np.array(rows, np.int64).T
    return rank.astype(np.int32), match.astype(np.int32), start, end


def test_one_host_needs_no_offset():
    clock = align({0: "a", 1: "a"}, *operations((0, 0, 100, 300), (1, 0, 200, 301)))
    assert clock.aligned
    assert clock.offset_ns == {0: 0, 1: 0}
    assert clock.residual_ns == 0
    assert clock.note is None


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
    assert "clock" in sentence(clock.note)
    assert "+812 us" in sentence(clock.note)


def test_a_host_without_a_common_collective_stands_apart():
    clock = align({0: "a", 1: "b"}, *operations((0, 0, 0, 10)))
    assert not clock.aligned
    assert "b could not be compared" in sentence(clock.note)


def test_unknown_hosts_share_a_clock_until_a_collective_contradicts_it():
    one = align({0: "", 1: ""}, *operations((0, 0, 0, 50), (1, 0, 40, 50)))
    assert one.aligned
    assert one.offset_ns == {0: 0, 1: 0}
    two = align({0: "", 1: ""}, *operations((0, 0, 0, 50), (1, 0, 1040, 1050)))
    assert two.offset_ns == {0: 0, 1: 1000}
    assert two.residual_ns == 0


def test_ranks_of_unknown_host_beside_known_hosts_have_their_own_clock():
    ahead = {0: 0, 1: 5_000_000, 2: -70_000, 3: 5_000_000}
    rows = [(r, m, 10_000 * m + 7 * r + o, 10_000 * m + 4000 + o) for m in range(3) for r, o in ahead.items()]
    clock = align({0: "a", 1: "b", 2: "", 3: "b"}, *operations(*rows))
    assert clock.aligned
    assert clock.offset_ns == ahead
    assert "rank 2 by -70 us" in sentence(clock.note)


def test_one_known_host_and_no_contradiction_is_one_clock():
    clock = align({0: "a", 1: ""}, *operations((0, 0, 0, 50), (1, 0, 40, 60)))
    assert (clock.aligned, clock.offset_ns, clock.note) == (True, {0: 0, 1: 0}, None)


def test_hosts_that_share_nothing_with_the_first_still_share_a_clock():
    rows = [(0, 0, 0, 10), (1, 0, 5, 10), (2, 1, 0, 100), (3, 1, 7000, 7100)]
    clock = align({0: "a", 1: "a", 2: "b", 3: "c"}, *operations(*rows))
    assert not clock.aligned
    assert clock.offset_ns == {0: 0, 1: 0, 2: 0, 3: 7000}
    assert clock.residual_ns == 0
    assert "host b, host c could not be compared with host a" in sentence(clock.note)


def test_a_rank_of_no_known_host_is_not_an_error():
    clock = align({0: "a"}, *operations((0, 0, 0, 10), (5, 0, 1000, 1010)))
    assert clock.offset_ns == {0: 0, 5: 1000}


def test_the_median_outvotes_one_wrong_match_and_the_contradiction_is_said():
    ahead = 3_000_000
    rows = [(0, m, 10_000 * m, 10_000 * m + 4000) for m in range(12)]
    rows += [(1, m, 10_000 * m + ahead, 10_000 * m + 4000 + ahead) for m in range(11)]
    rows += [(1, 11, 900_000_000 + ahead, 900_004_000 + ahead)]
    clock = align({0: "a", 1: "b"}, *operations(*rows))
    assert clock.offset_ns[1] == ahead
    assert clock.residual_ns == 900_000_000 - 10_000 * 11 - 4000
    assert clock.aligned
    assert "still contradict" in sentence(clock.note) and not clock.drift


def test_collectives_that_contradict_each_other_align_nothing():
    """Matches by order that are not one collective: no offset brings them together."""
    rows = [(0, m, 10**9 * m, 10**9 * m + 4000) for m in range(4)]
    rows += [(1, m, 10**9 * m + m * m * 10**8, 10**9 * m + m * m * 10**8 + 4000) for m in range(4)]
    clock = align({0: "a", 1: "b"}, *operations(*rows))
    assert not clock.aligned
    assert clock.residual_ns > 10**8
    assert "contradict" in sentence(clock.note)


def test_times_of_today_are_exact():
    now = 1_775_078_550_123_456_789
    rows = [(0, m, now + 1000 * m, now + 1000 * m + 100) for m in range(2)]
    rows += [(1, m, now + 1000 * m + 33, now + 1000 * m + 101) for m in range(2)]
    far = [(r, m, s + (7 * 10**17 + 1) * r, e + (7 * 10**17 + 1) * r) for r, m, s, e in rows]
    assert align({0: "a", 1: "b"}, *operations(*far)).offset_ns[1] == 7 * 10**17 + 2


def test_nothing_to_compare():
    empty = np.empty(0, np.int64)
    clock = align({0: "a"}, empty.astype(np.int32), empty.astype(np.int32), empty, empty)
    assert clock.aligned
    assert clock.residual_ns is None


def test_a_contradiction_inside_one_host_is_said():
    clock = align({0: "a", 1: "a"}, *operations((0, 0, 0, 5_000), (1, 0, 9_000, 12_000)))
    assert clock.residual_ns == 4_000
    assert "contradict" in sentence(clock.note)


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


def drifting(faster: float, rounds: int = 20, scatter: int = 0) -> Clock:
    """Host b is 2 ms ahead and runs so much faster; a collective each 100 ms, left together but for ``scatter`` [ns]."""
    rows = []
    for i in range(rounds):
        start, end = i * 100_000_000, i * 100_000_000 + 400_000 + (scatter if i % 2 else 0)
        rows += [(0, i, start, i * 100_000_000 + 400_000)]
        rows += [(1, i, round((start + 100_000) * (1 + faster)) + 2_000_000, round(end * (1 + faster)) + 2_000_000)]
    return align({0: "a", 1: "b"}, *operations(*rows))


@pytest.mark.parametrize("faster", [2e-5, -1e-4])
def test_a_clock_that_drifts_is_fitted(faster: float) -> None:
    clock = drifting(faster)
    assert clock.aligned and clock.drift[1] == pytest.approx(faster, rel=0.01)
    for true in (0, 500_000_000, 1_900_000_000):
        own = np.array([round(true * (1 + faster)) + 2_000_000])
        assert abs(int(clock.of(1, own)[0]) - true) < 1000
    assert "ppm is taken out" in sentence(clock.note)


def test_scatter_and_too_few_collectives_are_no_drift() -> None:
    assert not drifting(0.0, scatter=50_000).drift
    assert not drifting(2e-5, rounds=5).drift


def messages(*rows):
    """(sender, receiver, sent, received) rows."""
    return Messages(*np.array(rows, np.int64).T)


def test_messages_in_both_directions_bound_the_offset() -> None:
    ahead, nothing = 5_000_000, operations((0, 0, 0, 10))
    there, back = (0, 1, 1000, 1000 + 60_000 + ahead), (1, 0, 900_000 + ahead, 900_000 + 80_000)
    clock = align({0: "a", 1: "b"}, *nothing, messages(there, back, (0, 1, 2_000_000, 2_500_000 + ahead)))
    assert clock.aligned and abs(clock.offset_ns[1] - ahead) <= 10_000
    one_way = align({0: "a", 1: "b"}, *nothing, messages(there))
    assert not one_way.aligned and one_way.apart[0] != one_way.apart[1]
    slow = align({0: "a", 1: "b"}, *nothing, messages((0, 1, 0, 3_000_000 + ahead), (1, 0, ahead, 3_000_000)))
    assert not slow.aligned and slow.offset_ns[1] == ahead  # a rough offset is kept, and no figure is built on it
