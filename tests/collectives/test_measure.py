"""Waiting and transfer of matched collectives, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from tests.collectives.made import US, groups, operation, table
from tracekit import schema
from tracekit.collectives.matching import match, measure
from tracekit.mesh.process_groups import ProcessGroups
from tracekit.units import NULL


def measured(*rows: dict[str, Any], of: ProcessGroups) -> tuple[list[dict[str, Any]], list[int | None]]:
    """(matches in us, wait of each operation in us)."""
    frame = table(*rows)
    matches, wait = measure(frame, match(frame, of), of)
    assert list(matches.columns) == schema.MATCHES.names
    times = [name for name in matches if name.endswith("_ns")]
    matches[times] = matches[times] // US
    return matches.to_dict("records"), [None if w == NULL else w // US for w in wait.tolist()]


def test_three_ranks_wait_for_the_fourth() -> None:
    """The last arrival, not the longest kernel, is the straggler; bytes move only once everybody is there."""
    starts = (100, 300, 600, 750)
    rows = [operation(rank, "all_reduce", start, 1000, seq=3, full_bytes=67_108_864) for rank, start in enumerate(starts)]
    (found,), wait = measured(*rows, of=groups((0, 1, 2, 3)))
    assert wait == [650, 450, 150, 0]
    assert found == {
        "group": 0,
        "kind": "all_reduce",
        "seq": 3,
        "step_number": 1,
        "ranks": 4,
        "expected": 4,
        "complete": True,
        "first_start_ns": 100,
        "last_start_ns": 750,
        "end_ns": 1000,
        "last_rank": 3,
        "transfer_ns": 250,
        "matched_by": "seq",
        "full_bytes": 67_108_864,
    }


def test_a_coalesced_and_an_uneven_gather() -> None:
    """Both are gathers, whatever kernels ran them; of the uneven one rank 0 comes last."""
    rows = [
        operation(0, "all_gather", 100, 150, seq=8, full_bytes=12_000),
        operation(1, "all_gather", 109, 150, seq=8, full_bytes=12_000),
        operation(0, "all_gather", 206, 276, seq=9, full_bytes=16_000),
        operation(1, "all_gather", 200, 276, seq=9, full_bytes=16_000),
    ]
    matches, wait = measured(*rows, of=groups((0, 1)))
    assert [(m["seq"], m["full_bytes"], m["last_rank"]) for m in matches] == [(8, 12_000, 1), (9, 16_000, 0)]
    assert wait == [9, 0, 0, 6]


def test_members_of_an_uneven_gather_that_each_say_their_shard_times_the_ranks() -> None:
    """torch's list version writes 2 x 4000 and 2 x 12000 bytes for a gather of 16000."""
    rows = [operation(rank, "all_gather", 0, 9, seq=1, full_bytes=2 * share) for rank, share in enumerate((4_000, 12_000))]
    (found,), _ = measured(*rows, of=groups((0, 1)))
    assert found["full_bytes"] == 16_000
    (found,), _ = measured(*rows, of=groups((0, 1, 2)))  # a member is missing: the sum is not known
    assert found["full_bytes"] == 24_000


def test_a_pipeline_edge() -> None:
    """The receiver is early twice by 40 us; a pair is complete without the rest of its group."""
    of = groups((1, 3, 5))
    rows = [
        row
        for t in (0, 500)
        for row in (
            operation(1, "send", t + 40, t + 100, source_rank=1, destination_rank=3, full_bytes=8_388_608),
            operation(3, "recv", t, t + 100, source_rank=1, destination_rank=3, full_bytes=8_388_608),
        )
    ]
    matches, wait = measured(*rows, of=of)
    for found in matches:
        assert (found["kind"], found["expected"], found["complete"], found["last_rank"]) == ("send", 2, True, 1)
        assert found["matched_by"] == "order"
    assert wait == [0, 40, 0, 40]
    assert sum(m["full_bytes"] for m in matches) == 16_777_216


def test_a_message_has_arrived_when_its_receive_is_over() -> None:
    """gloo keeps the range of a send open until the program waits for it, here 900 us after everything had arrived."""
    rows = [
        operation(0, "send", 0, 1000, source_rank=0, destination_rank=1, full_bytes=64),
        operation(1, "recv", 20, 100, source_rank=0, destination_rank=1, full_bytes=64),
    ]
    (found,), wait = measured(*rows, of=groups((0, 1)))
    assert (found["end_ns"], found["transfer_ns"]) == (100, 80)
    assert wait == [20, 0]


def test_a_missing_member_makes_it_incomplete_and_a_group_that_is_not_known_never_complete() -> None:
    rows = [operation(rank, "barrier", 0, 10, seq=1) for rank in (0, 1)]
    (found,), _ = measured(*rows, of=groups((0, 1, 2)))
    assert (found["ranks"], found["expected"], found["complete"]) == (2, 3, False)
    (found,), _ = measured(*[row | {"group": -1} for row in rows], of=groups((0, 1)))
    assert (found["ranks"], found["expected"], found["complete"], found["seq"]) == (2, 0, False, NULL)
    (found,), _ = measured(*rows, of=groups((0, 1), size=2))  # the list was cut, its size is known
    assert found["complete"] is True


def test_what_is_not_matched_has_no_wait() -> None:
    matches, wait = measured(operation(0, "all_reduce", 0, 10, seq=1), operation(1, "all_reduce", 0, 10, seq=2), of=groups((0, 1)))
    assert (matches, wait) == ([], [None, None])


def test_the_step_is_that_of_the_first_arrival_and_the_kind_that_of_who_knows_it() -> None:
    rows = [
        operation(0, "unknown", 50, 90, seq=1, step_number=8),
        operation(1, "all_reduce", 10, 90, seq=1, step_number=7),
    ]
    (found,), _ = measured(*rows, of=groups((0, 1)))
    assert (found["step_number"], found["kind"]) == (7, "all_reduce")


def test_an_end_before_its_start_makes_no_negative_transfer() -> None:
    (found,), wait = measured(operation(0, "all_reduce", 0, 10, seq=1), operation(1, "all_reduce", 30, 20, seq=1), of=groups((0, 1)))
    assert found["transfer_ns"] < 0  # nobody was in it when the last one came
    assert wait == [0, 0]


def test_nobody_waits_in_a_call_that_has_ended() -> None:
    """The root of a broadcast, or a send that waits in a buffer, is gone before the last one comes."""
    rows = [operation(0, "broadcast", 0, 15, seq=1), operation(1, "broadcast", 90, 130, seq=1), operation(2, "broadcast", 100, 125, seq=1)]
    (found,), wait = measured(*rows, of=groups((0, 1, 2)))
    assert (wait, found["transfer_ns"]) == ([0, 10, 0], 30)
    (alone,), wait = measured(*rows[:2], of=groups((0, 1)))
    assert wait == [0, 0]
    assert alone["transfer_ns"] < 0


SPANS = st.lists(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=2, max_size=5), min_size=1, max_size=6)


@given(SPANS)
def test_waits_and_transfers_obey_their_definitions(collectives: list[list[tuple[int, int]]]) -> None:
    of = groups((0, 1, 2, 3, 4))
    rows = [
        operation(rank, "all_gather", start, start + length, seq=seq)
        for seq, spans in enumerate(collectives)
        for rank, (start, length) in enumerate(spans)
    ]
    frame = table(*rows)
    matched = match(frame, of)
    matches, wait = measure(frame, matched, of)
    assert len(matches) == len(collectives)
    frame = frame.assign(match=matched.match, wait=wait)
    for number, part in frame.groupby("match"):
        row = matches.iloc[number]
        assert part["wait"].min() == 0
        there = part["end_ns"] >= row["last_start_ns"]
        assert (part["wait"][~there] == 0).all()
        assert (part["wait"] + part["start_ns"])[there].eq(row["last_start_ns"]).all()
        assert (part["wait"] <= part["end_ns"] - part["start_ns"]).all()
        assert row["end_ns"] == part["end_ns"].max()
        assert row["transfer_ns"] == (row["end_ns"] - row["last_start_ns"] if there.sum() > 1 else NULL)
        assert part.loc[part["rank"] == row["last_rank"], "wait"].item() == 0


def test_nothing_to_measure_gives_an_empty_table() -> None:
    empty = table(operation(0, "barrier", 0, 1)).iloc[:0]
    matches, wait = measure(empty, match(empty, groups()), groups())
    assert isinstance(matches, pd.DataFrame)
    assert (list(matches.columns), len(matches), wait.dtype) == (schema.MATCHES.names, 0, np.int64)
