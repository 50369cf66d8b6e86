"""Sizes: the full tensor of a collective and what a rank of the ring sends, by hand and against a ring played out."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.collectives.cost import busbw_factor
from tracekit.collectives.semantics import full_elements, kept_elements, sent_bytes
from tracekit.units import NULL
from tracekit.vocabulary import KINDS

U = NULL  # not recorded


def full(kind: str, ingoing: int, outgoing: int, size: int) -> int:
    return int(full_elements(pd.Series([kind]), np.array([ingoing]), np.array([outgoing]), np.array([size]))[0])


def sent(kind: str, full_bytes: int, size: int, own: int | None = None) -> int:
    kept = None if own is None else np.array([own])
    return int(sent_bytes(pd.Series([kind]), np.array([full_bytes]), np.array([size]), kept)[0])


@pytest.mark.parametrize(
    ("kind", "ingoing", "outgoing", "size", "expected"),
    [
        ("all_gather", 1000, 4000, 4, 4000),
        ("all_gather", 1000, 4000, 2, 4000),  # uneven: this rank holds a quarter, the other three
        ("all_gather", 3000, 4000, 2, 4000),
        ("all_gather", 1000, U, 4, 4000),
        ("all_gather", 1000, U, 0, U),
        ("reduce_scatter", 4000, 1000, 4, 4000),
        ("reduce_scatter", U, 1000, 4, 4000),
        ("reduce_scatter", U, 1000, 0, U),
        ("all_reduce", 512, 512, 8, 512),
        ("all_reduce", U, 512, 0, 512),
        ("broadcast", 512, 512, 8, 512),
        ("reduce", 512, U, 8, 512),
        ("all_to_all", 600, 900, 4, 600),
        ("all_to_all", U, 900, 4, U),  # what comes in says nothing of what goes out
        ("scatter", 400, 100, 4, 400),
        ("scatter", 0, 100, 4, 400),  # not the root
        ("gather", 100, 0, 4, 400),
        ("send", 64, 64, 2, 64),
        ("recv", 0, 64, 2, 64),
        ("recv", U, 64, 2, 64),
        ("barrier", U, U, 8, 0),
        ("send_recv", 64, 64, 8, U),
        ("unknown", 64, 64, 8, U),
        ("all_reduce", 0, 0, 8, 0),
        ("all_reduce", -5, -5, 8, U),  # nonsense in the file
        ("all_gather", 2**50, U, 2**40, U),  # would not fit 64 bits
    ],
)
def test_the_full_tensor(kind: str, ingoing: int, outgoing: int, size: int, expected: int) -> None:
    assert full(kind, ingoing, outgoing, size) == expected


@pytest.mark.parametrize(
    ("kind", "full_bytes", "size", "expected"),
    [
        ("all_gather", 1600, 4, 1200),
        ("reduce_scatter", 1600, 4, 1200),
        ("all_to_all", 1600, 4, 1200),
        ("scatter", 1600, 4, 1200),
        ("all_reduce", 1600, 4, 2400),
        ("broadcast", 1600, 4, 1600),
        ("reduce", 1600, 4, 1600),
        ("gather", 1600, 4, 400),
        ("send", 1600, 4, 1600),
        ("send", 1600, 0, 1600),
        ("recv", 1600, 4, 0),
        ("barrier", 0, 4, 0),
        ("all_gather", 10, 4, 8),  # shares of 2 or 3: a rank sends at most 8
        ("all_reduce", 67_108_864, 4, 100_663_296),
        ("all_reduce", 3 * 2**53, 3, 2**55),
        ("all_reduce", U, 4, U),
        ("all_reduce", 1600, 0, U),
        ("send_recv", 1600, 4, U),
        ("unknown", 1600, 1, U),
        ("all_gather", 1600, 1, 0),
        ("all_reduce", U, 1, 0),  # nobody to send to, whatever the size
    ],
)
def test_what_a_rank_sends(kind: str, full_bytes: int, size: int, expected: int) -> None:
    assert sent(kind, full_bytes, size) == expected


def test_an_all_to_all_with_splits_sends_everything_but_its_own_piece() -> None:
    splits = pd.Series(["[4, 8, 4]", "[4, 8, 4]", "[4, 8, ...]", "", "[0, 0, 0]", "[4, 8]", "[1, 1, 1]"])
    elements = np.array([160, 160, 160, 160, 0, 120, 160])  # rows of ten elements
    kept = kept_elements(splits, elements, np.full(7, 3), np.array([1, -1, 1, 1, 1, 1, 0]))
    # known / position unknown / list cut / even / nothing sent / a list of another size / rows that do not divide the buffer
    assert kept.tolist() == [80, U, U, U, U, U, U]
    assert sent("all_to_all", 160, 3, own=80) == 80
    assert sent("all_to_all", 160, 3, own=U) == 160 - 160 // 3


@pytest.mark.parametrize("text", ["[1.5, 2]", "[-1, 2]", "nonsense", "[" * 50, "[99999999999999999999, 1]", "[²]", "None"])
def test_splits_that_make_no_sense_tell_nothing(text: str) -> None:
    assert kept_elements(pd.Series([text]), np.array([300]), np.array([2]), np.array([0])).tolist() == [U]


@given(size=st.integers(1, 12), chunk=st.integers(0, 1000))
def test_a_ring_played_out_sends_what_the_formula_says(size: int, chunk: int) -> None:
    """All-gather: in each of x-1 rounds a rank hands on one chunk. All-reduce: a reduce-scatter's rounds, then an all-gather's."""
    rounds = [chunk for _ in range(size - 1)]
    assert sent("all_gather", size * chunk, size) == sum(rounds)
    assert sent("reduce_scatter", size * chunk, size) == sum(rounds)
    assert sent("all_reduce", size * chunk, size) == 2 * sum(rounds)


@given(size=st.integers(1, 9), pieces=st.lists(st.integers(0, 50), min_size=9, max_size=9), row=st.integers(1, 7), data=st.data())
def test_pieces_of_an_exchange_add_up(size: int, pieces: list[int], row: int, data: st.DataObject) -> None:
    own = data.draw(st.integers(0, size - 1))
    used = pieces[:size]
    kept = kept_elements(pd.Series([str(used)]), np.array([sum(used) * row]), np.array([size]), np.array([own]))[0]
    assert kept == (used[own] * row if sum(used) else U)


@given(st.lists(st.tuples(st.sampled_from(KINDS), *[st.integers(-(2**63), 2**63 - 1)] * 2, st.integers(0, 2**20)), min_size=1, max_size=20))
def test_hostile_sizes_give_a_size_or_nothing_and_never_wrap(rows: list[tuple[str, int, int, int]]) -> None:
    kind, ingoing, outgoing, size = (list(column) for column in zip(*rows, strict=True))
    elements = full_elements(pd.Series(kind), np.array(ingoing), np.array(outgoing), np.array(size))
    assert all(e == U or 0 <= e <= 2**55 for e in elements.tolist())
    figures = sent_bytes(pd.Series(kind), np.array(ingoing), np.array(size)).tolist()
    assert all(f == U or 0 <= f <= 2 * max(0, i) for f, i in zip(figures, ingoing, strict=True))


def test_a_table_of_operations_is_taken_at_once() -> None:
    kind = pd.Categorical(["all_gather", "all_reduce", "barrier"])
    assert full_elements(kind, np.array([1, 2, U]), np.array([8, 2, U]), np.array([8, 8, 8])).tolist() == [8, 2, 0]
    assert sent_bytes(kind, np.array([32, 8, 0]), np.array([8, 8, 8])).tolist() == [28, 14, 0]
    assert full_elements(pd.Categorical([]), np.array([], int), np.array([], int), np.array([], int)).tolist() == []


def test_bus_bandwidth_factors() -> None:
    assert busbw_factor("all_reduce", 4) == pytest.approx(1.5)
    assert busbw_factor("all_gather", 4) == busbw_factor("reduce_scatter", 4) == busbw_factor("all_to_all", 4) == pytest.approx(0.75)
    assert busbw_factor("gather", 8) == busbw_factor("scatter", 8) == pytest.approx(0.875)
    assert busbw_factor("broadcast", 8) == busbw_factor("reduce", 8) == busbw_factor("send", 2) == busbw_factor("recv", 2) == 1
    assert busbw_factor("all_reduce", 1) == 0
    for kind in ("barrier", "send_recv", "unknown", "nonsense"):
        assert busbw_factor(kind, 4) is None
    assert busbw_factor("all_reduce", 0) is None


def test_64_mib_over_four_ranks_in_250_us() -> None:
    """algbw 268.4 GB/s, busbw 402.7 GB/s."""
    factor = busbw_factor("all_reduce", 4)
    assert factor is not None
    assert 67_108_864 / 250_000 * factor == pytest.approx(402.653184)
