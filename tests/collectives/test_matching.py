"""Matching: which operations of different ranks are one collective, and what is left alone rather than matched wrongly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.collectives.made import groups, operation, table
from tracekit.collectives.matching import Matched, match
from tracekit.mesh.process_groups import ProcessGroups
from tracekit.notes import sentences
from tracekit.units import NULL

PAIR = groups((0, 1))
WORLD = groups((0, 1, 2, 3))


def partition(frame: pd.DataFrame, matched: Matched, *names: str) -> list[list[Any]]:
    """The matches, each as the sorted (rank, ...) of its members."""
    columns = ["rank", *(names or ("start_ns",))]
    found = frame.assign(match=matched.match)
    found = found[found["match"] >= 0]
    return sorted(sorted(tuple(row) for row in part[columns].to_numpy(dtype=object).tolist()) for _, part in found.groupby("match"))


def seqs(frame: pd.DataFrame, matched: Matched) -> dict[int, list[int]]:
    """seq -> ranks of each match."""
    return {m[0][1]: [rank for rank, _ in m] for m in partition(frame, matched, "seq")}


def run(*rows: dict[str, Any], of: ProcessGroups = PAIR, hosts: dict[int, str] | None = None) -> tuple[pd.DataFrame, Matched]:
    frame = table(*rows)
    return frame, match(frame, of, hosts)


# ---- by sequence number ---------------------------------------------------------------------------------------------


def test_shifted_windows_match_what_both_saw_and_name_the_rest() -> None:
    """Rank 1 began one collective later: 100 and 103 have no partner, however well the counts agree."""
    frame, matched = run(
        *[operation(0, "all_reduce", t, t + 50, seq=s) for s, t in ((100, 0), (101, 100), (102, 200))],
        *[operation(1, "all_reduce", t, t + 50, seq=s) for s, t in ((101, 110), (102, 190), (103, 300))],
    )
    assert seqs(frame, matched) == {101: [0, 1], 102: [0, 1]}
    assert matched.by == ["seq", "seq"]
    assert [note for note in sentences(matched.notes) if "100 of rank 0" in note]
    assert [note for note in sentences(matched.notes) if "103 of rank 1" in note]


def test_one_name_with_other_members_is_another_group() -> None:
    of = groups((0, 1), (2, 3))
    rows = [operation(rank, "all_reduce", 10 * rank, 100, seq=21, group=rank // 2) for rank in range(4)]
    frame, matched = run(*rows, of=of)
    assert partition(frame, matched, "group") == [[(0, 0), (1, 0)], [(2, 1), (3, 1)]]


def test_a_call_that_ran_as_two_kernels_is_matched_one_by_one() -> None:
    frame, matched = run(
        operation(0, "all_gather", 0, 10, seq=8),
        operation(0, "all_gather", 20, 30, seq=8),
        operation(1, "all_gather", 1, 11, seq=8),
        operation(1, "all_gather", 21, 31, seq=8),
    )
    assert partition(frame, matched) == [[(0, 0), (1, 1_000)], [(0, 20_000), (1, 21_000)]]
    assert "n-th with n-th" in sentences(matched.notes)[0]


def test_a_call_whose_kernels_differ_in_number_is_not_guessed_at() -> None:
    _, matched = run(
        operation(0, "all_gather", 0, 10, seq=8),
        operation(0, "all_gather", 20, 30, seq=8),
        operation(1, "all_gather", 21, 31, seq=8),
    )
    assert matched.match.tolist() == [-1, -1, -1]
    assert "not equally often" in sentences(matched.notes)[0]


def test_ranks_out_of_step_are_named_and_not_matched() -> None:
    _, matched = run(
        operation(0, "all_reduce", 0, 10, seq=5),
        operation(1, "all_gather", 0, 10, seq=5),
        operation(0, "all_reduce", 20, 30, seq=6),
        operation(1, "all_reduce", 20, 30, seq=6),
    )
    assert matched.match.tolist() == [-1, -1, 0, 0]
    assert sentences(matched.notes) == [
        "group 0 seq 5: the ranks call different collectives (rank 0 all_reduce, rank 1 all_gather): they are out of step"
    ]


def test_an_unknown_kind_speaks_against_nothing() -> None:
    """RCCL's generic kernel on one rank beside the named one on the other."""
    frame, matched = run(operation(0, "unknown", 0, 10, seq=5), operation(1, "all_reduce", 0, 10, seq=5))
    assert seqs(frame, matched) == {5: [0, 1]}


def test_sizes_may_differ_between_ranks() -> None:
    """An uneven all_gather: one rank puts in a quarter, the other three."""
    frame, matched = run(
        operation(0, "all_gather", 6, 76, seq=9, full_bytes=16_000), operation(1, "all_gather", 0, 76, seq=9, full_bytes=16_000)
    )
    assert seqs(frame, matched) == {9: [0, 1]}


def test_members_whose_traces_are_missing_leave_an_incomplete_match() -> None:
    frame, matched = run(*[operation(rank, "barrier", 0, 10, seq=1) for rank in (0, 2, 3)], of=WORLD)
    assert seqs(frame, matched) == {1: [0, 2, 3]}
    assert sentences(matched.notes) == []


def test_one_rank_alone_has_no_match() -> None:
    _, matched = run(operation(0, "all_reduce", 0, 10, seq=1), operation(0, "all_reduce", 20, 30, seq=2))
    assert matched.match.tolist() == [-1, -1]
    assert matched.by == []


def test_no_operations() -> None:
    empty = table(operation(0, "barrier", 0, 1)).iloc[:0]
    matched = match(empty, PAIR)
    assert (matched.match.tolist(), matched.by, sentences(matched.notes)) == ([], [], [])


# ---- point to point -------------------------------------------------------------------------------------------------


def edge(rank: int, kind: str, start: int, end: int, source: int = 0, destination: int = 1, **more: Any) -> dict[str, Any]:
    return operation(rank, kind, start, end, source_rank=source, destination_rank=destination, **more)


def test_sends_meet_receives_in_order_whatever_their_numbers_say() -> None:
    """Each rank counts its own transfers: the numbers of a send and of its receive need not agree."""
    frame, matched = run(
        edge(0, "send", 40, 100, seq=7),
        edge(0, "send", 140, 200, seq=9),
        edge(1, "recv", 0, 100, seq=3),
        edge(1, "recv", 100, 200, seq=4),
    )
    assert partition(frame, matched) == [[(0, 40_000), (1, 0)], [(0, 140_000), (1, 100_000)]]
    assert matched.by == ["order", "order"]


def test_a_send_counts_from_its_call_as_a_backend_opens_its_range_later() -> None:
    """gloo hands the message over inside the call and opens its range behind it: the receive may be over by then."""
    rows = [edge(0, "send", 6000, 9000, launch_ns=100_000), edge(1, "recv", 50, 400)]
    frame, matched = run(*rows)
    assert partition(frame, matched) == [[(0, 6_000_000), (1, 50_000)]]
    rows[0]["launch_ns"] = 5_999_000  # called after the receive was over: not the same message
    assert run(*rows)[1].match.tolist() == [-1, -1]


def test_both_directions_and_other_pairs_are_kept_apart() -> None:
    of = groups((0, 1, 2))
    frame, matched = run(
        edge(0, "send", 0, 10, 0, 1),
        edge(1, "recv", 0, 10, 0, 1),
        edge(1, "send", 0, 11, 1, 0),
        edge(0, "recv", 0, 11, 1, 0),
        edge(1, "send", 0, 12, 1, 2),
        edge(2, "recv", 0, 12, 1, 2),
        of=of,
    )
    assert partition(frame, matched, "kind", "end_ns") == [
        [(0, "recv", 11_000), (1, "send", 11_000)],
        [(0, "send", 10_000), (1, "recv", 10_000)],
        [(1, "send", 12_000), (2, "recv", 12_000)],
    ]


def test_transfers_of_another_step_never_meet() -> None:
    """Rank 0 recorded steps 1 and 2, rank 1 only 2 and 3: two each, but only step 2 is common."""
    frame, matched = run(
        edge(0, "send", 0, 10, step_number=1),
        edge(0, "send", 100, 110, step_number=2),
        edge(1, "recv", 100, 110, step_number=2),
        edge(1, "recv", 200, 210, step_number=3),
    )
    assert partition(frame, matched, "step_number") == [[(0, 2), (1, 2)]]


def test_unequal_counts_on_an_edge_are_left_alone() -> None:
    _, matched = run(edge(0, "send", 0, 10), edge(0, "send", 20, 30), edge(1, "recv", 20, 30))
    assert matched.match.tolist() == [-1, -1, -1]
    assert "do not show equally many" in sentences(matched.notes)[0]


def test_a_peer_that_is_not_recorded_is_said() -> None:
    _, matched = run(edge(0, "send", 0, 10, destination=NULL), edge(1, "recv", 0, 10))
    assert matched.match.tolist() == [-1, -1]
    assert any("rank of the peer is not recorded" in note for note in sentences(matched.notes))


def test_a_peer_without_a_trace_costs_no_note() -> None:
    _, matched = run(edge(0, "send", 0, 10, destination=5), of=groups((0, 5)))
    assert (matched.match.tolist(), sentences(matched.notes)) == ([-1], [])


def test_a_receive_that_ends_before_its_send_begins_is_no_pair() -> None:
    _, matched = run(edge(0, "send", 9000, 9010), edge(1, "recv", 0, 10))
    assert matched.match.tolist() == [-1, -1]
    assert "contradict the clocks" in sentences(matched.notes)[0]


def test_a_buffered_send_may_end_before_its_receive_begins() -> None:
    frame, matched = run(edge(0, "send", 0, 10), edge(1, "recv", 9000, 9010))
    assert len(partition(frame, matched)) == 1


# ---- by order -------------------------------------------------------------------------------------------------------


def test_without_numbers_equal_counts_in_a_step_are_matched_in_order() -> None:
    frame, matched = run(
        operation(0, "all_reduce", 0, 10),
        operation(0, "all_gather", 12, 20),
        operation(0, "all_reduce", 22, 30),
        operation(1, "all_reduce", 1, 10),
        operation(1, "all_gather", 13, 20),
        operation(1, "all_reduce", 23, 30),
    )
    assert partition(frame, matched) == [[(0, 0), (1, 1_000)], [(0, 12_000), (1, 13_000)], [(0, 22_000), (1, 23_000)]]
    assert set(matched.by) == {"order"}


def test_a_member_that_recorded_the_step_but_shows_fewer_spoils_it() -> None:
    rows = [operation(rank, "all_reduce", rank, 10) for rank in range(3)]
    odd = operation(3, "broadcast", 0, 10, seq=4)  # rank 3 was there, without an all_reduce
    _, matched = run(*rows, odd, of=WORLD)
    assert matched.match.tolist() == [-1, -1, -1, -1]
    assert any("do not show equally many" in note for note in sentences(matched.notes))


def test_the_order_is_that_of_the_calls_and_steps_are_those_of_the_calls() -> None:
    """The device of rank 1 lags: its first all_reduce runs in the next step. Its call tells where it belongs."""
    frame, matched = run(
        operation(0, "all_reduce", 0, 200, launch_ns=10, launch_step_number=1, step_number=1),
        operation(0, "all_reduce", 210, 300, launch_ns=150_000, launch_step_number=2, step_number=2),
        operation(1, "all_reduce", 120, 200, launch_ns=12, launch_step_number=1, step_number=2),
        operation(1, "all_reduce", 220, 300, launch_ns=150_002, launch_step_number=2, step_number=2),
    )
    assert partition(frame, matched) == [[(0, 0), (1, 120_000)], [(0, 210_000), (1, 220_000)]]


def test_outside_every_step_nothing_is_matched_when_ranks_recorded_other_steps() -> None:
    _, matched = run(
        operation(0, "all_reduce", 0, 10, step_number=NULL),
        operation(0, "all_reduce", 20, 30, step_number=2),
        operation(1, "all_reduce", 0, 10, step_number=NULL),
        operation(1, "all_reduce", 40, 50, step_number=3),
    )
    assert matched.match.tolist() == [-1, -1, -1, -1]


def test_without_any_steps_counts_over_the_window_decide() -> None:
    rows = [operation(rank, "all_reduce", t + rank, t + 9, step_number=NULL) for rank in (0, 1) for t in (0, 10)]
    frame, matched = run(*rows)
    assert len(partition(frame, matched)) == 2
    _, matched = run(*rows[:3])
    assert matched.match.tolist() == [-1, -1, -1]


def test_batches_of_transfers_are_matched_only_between_two() -> None:
    """Of a batch it is not known who is sent to: n-th with n-th over four pipeline stages would be invented."""
    frame, matched = run(operation(0, "send_recv", 0, 10), operation(1, "send_recv", 0, 10))
    assert len(partition(frame, matched)) == 1
    _, matched = run(*[operation(rank, "send_recv", 0, 10) for rank in range(4)], of=WORLD)
    assert matched.match.tolist() == [-1] * 4


# ---- groups that are not recorded -----------------------------------------------------------------------------------


def replay(rank: int, start: int, kinds: tuple[str, ...], **more: Any) -> list[dict[str, Any]]:
    return [operation(rank, kind, start + 20 * i + rank, start + 20 * i + 15, group=-1, **more) for i, kind in enumerate(kinds)]


def test_ranks_with_one_sequence_of_kinds_are_matched() -> None:
    kinds = ("all_to_all", "all_to_all", "all_reduce")
    rows = [row for rank in range(8) for row in replay(rank, 0, kinds)]
    frame, matched = run(*rows, of=groups())
    assert [[rank for rank, _ in m] for m in partition(frame, matched)] == [list(range(8))] * 3
    assert set(matched.by) == {"order"}


def test_a_rank_with_another_sequence_is_left_out_and_counted() -> None:
    rows = [*replay(0, 0, ("all_reduce", "all_gather")), *replay(1, 0, ("all_reduce", "all_gather")), *replay(2, 0, ("all_gather",))]
    frame, matched = run(*rows, of=groups())
    assert partition(frame, matched, "kind") == [[(0, "all_gather"), (1, "all_gather")], [(0, "all_reduce"), (1, "all_reduce")]]
    assert sentences(matched.notes)[0].startswith("1 operations whose process group is not recorded are not matched")


def test_replayed_graphs_are_compared_stream_by_stream() -> None:
    """All kernels of a replay share one launch, and two streams interleave as they like. Stream numbers differ between ranks."""
    first = [
        *replay(0, 0, ("all_reduce", "all_reduce"), stream=20, launch_ns=5),
        *replay(0, 7, ("all_gather", "all_gather"), stream=24, launch_ns=5),
    ]
    second = [
        *replay(1, 0, ("all_reduce", "all_reduce"), stream=28, launch_ns=5),
        *replay(1, -7, ("all_gather", "all_gather"), stream=31, launch_ns=5),
    ]
    frame, matched = run(*first, *second, of=groups())
    assert partition(frame, matched, "kind", "stream") == [
        [(0, "all_gather", 24), (1, "all_gather", 31)],
        [(0, "all_gather", 24), (1, "all_gather", 31)],
        [(0, "all_reduce", 20), (1, "all_reduce", 28)],
        [(0, "all_reduce", 20), (1, "all_reduce", 28)],
    ]


def test_each_step_is_matched_for_itself() -> None:
    rows = [row for rank in (0, 1) for step in (40, 41) for row in replay(rank, 1000 * step, ("all_reduce",) * 2, step_number=step)]
    frame, matched = run(*rows, of=groups())
    assert [{step for _, step in m} for m in partition(frame, matched, "step_number")] == [{40}, {40}, {41}, {41}]


# ---- what the clocks say --------------------------------------------------------------------------------------------


def test_sampled_events_are_not_matched_by_order() -> None:
    """Two profilers that each kept every other call show equal counts of different calls."""
    starts = {0: (0, 5000, 10_000, 15_000), 1: (2500, 7500, 12_500, 17_500)}
    rows = [operation(rank, "all_reduce", start, start + 50, group=-1) for rank in starts for start in starts[rank]]
    _, matched = run(*rows, of=groups())
    assert matched.match.tolist() == [-1] * 8
    assert "4 of 4 matches by order contradict the clocks" in sentences(matched.notes)[0]


def test_a_single_contradiction_is_taken_back_alone() -> None:
    steps = range(20)
    rows = [operation(rank, "all_reduce", 9000 * s + rank, 9000 * s + 50, step_number=s) for rank in (0, 1) for s in steps]
    rows[3] |= {"start_ns": rows[3]["start_ns"] + 5_000_000, "end_ns": rows[3]["end_ns"] + 5_000_000}
    frame, matched = run(*rows)
    assert len(partition(frame, matched)) == 19
    assert "1 of 20 matches by order contradict the clocks (by up to 5.0 ms), so these are taken back" in sentences(matched.notes)[0]


def test_clocks_of_two_hosts_may_be_far_apart() -> None:
    rows = [operation(rank, "all_reduce", 100 * i + 50_000 * rank, 100 * i + 40 + 50_000 * rank) for rank in (0, 1) for i in range(5)]
    frame, matched = run(*rows, hosts={0: "a", 1: "b"})
    assert len(partition(frame, matched)) == 5
    _, matched = run(*rows, hosts={0: "a", 1: "a"})
    assert matched.match.tolist() == [-1] * 10


def test_a_broadcast_s_root_may_leave_early() -> None:
    frame, matched = run(operation(0, "broadcast", 0, 10), operation(1, "broadcast", 9000, 9010))
    assert len(partition(frame, matched)) == 1


# ---- laws -----------------------------------------------------------------------------------------------------------

CALLS = st.lists(st.sampled_from(["all_reduce", "all_gather", "broadcast"]), min_size=1, max_size=12)


@given(calls=CALLS, cuts=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 12)), min_size=2, max_size=5), data=st.data())
def test_any_windows_of_one_program_match_by_number_alone(calls: list[str], cuts: list[tuple[int, int]], data: st.DataObject) -> None:
    """Each rank records a part of the same calls: exactly the calls that two ranks recorded are matched, in any order of the rows."""
    rows = [
        operation(rank, kind, 100 * i + rank, 100 * i + 50, seq=i, step_number=NULL)
        for rank, (begin, end) in enumerate(cuts)
        for i, kind in enumerate(calls)
        if begin <= i < end
    ]
    if not rows:
        return
    frame, matched = run(*data.draw(st.permutations(rows)), of=groups(tuple(range(len(cuts)))))
    seen = {i: [rank for rank, (begin, end) in enumerate(cuts) if begin <= i < end] for i in range(len(calls))}
    assert seqs(frame, matched) == {i: ranks for i, ranks in seen.items() if len(ranks) > 1}


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),  # rank
            st.sampled_from(["all_reduce", "all_gather", "send", "recv", "send_recv", "unknown", "barrier"]),
            st.integers(-1, 1),  # group
            st.sampled_from([NULL, 1, 2]),  # seq
            st.sampled_from([NULL, 0, 1, 2]),  # source
            st.sampled_from([NULL, 0, 1, 2]),  # destination
            st.sampled_from([NULL, 7, 8]),  # step
            st.sampled_from([NULL, 5, 6]),  # launch
        ),
        max_size=30,
    )
)
def test_whatever_the_table_holds_a_match_is_two_ranks_of_one_group_and_kind(rows: list[tuple[Any, ...]]) -> None:
    made = [
        operation(r, kind, i, i + 5, group=g, seq=s, source_rank=a, destination_rank=b, step_number=step, launch_ns=launch)
        for i, (r, kind, g, s, a, b, step, launch) in enumerate(rows)
    ]
    if not made:
        return
    frame, matched = run(*made, of=groups((0, 1, 2, 3), (0, 1)))
    found = frame.assign(match=matched.match)[matched.match >= 0]
    assert sorted(found["match"].unique()) == list(range(len(matched.by)))
    for _, part in found.groupby("match"):
        assert len(part) == part["rank"].nunique() >= 2
        assert part["group"].nunique() == 1
        kinds = set(part["kind"].astype(str)) - {"unknown", "send_recv"}
        assert len(kinds) <= 1 or kinds == {"send", "recv"}


def test_a_large_table_is_matched_exactly() -> None:
    """64 ranks of 2000 calls each, by number and by order."""
    ranks, calls = 64, 2000
    call = np.tile(np.arange(calls, dtype=np.int64), ranks)
    rank = np.repeat(np.arange(ranks, dtype=np.int32), calls)
    frame = pd.DataFrame(
        {
            "rank": rank,
            "kind": pd.Categorical(np.where(call % 2, "all_reduce", "all_gather")),
            "group": np.zeros(len(call), np.int32),
            "seq": call,
            "source_rank": np.full(len(call), NULL),
            "destination_rank": np.full(len(call), NULL),
            "start_ns": call * 1000 + rank,
            "end_ns": call * 1000 + 900,
            "step_number": call // 100,
            "stream": np.full(len(call), 20, np.int32),
        }
    )
    for seq in (call, np.full(len(call), NULL)):
        matched = match(frame.assign(seq=seq), groups(tuple(range(ranks))))
        assert len(matched.by) == calls
        assert (np.bincount(matched.match) == ranks).all()
        assert (pd.Series(call).groupby(matched.match).nunique() == 1).all()


@pytest.mark.parametrize("kind", ["all_reduce", "nonsense"])
def test_a_kind_outside_the_vocabulary_is_unknown(kind: str) -> None:
    frame, matched = run(operation(0, kind, 0, 10, seq=1), operation(1, kind, 0, 10, seq=1))
    assert len(partition(frame, matched)) == 1
