"""``simulate collectives``: the picture of a ring, counts beside formulas, and what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.collectives.cost import ALGORITHMS
from tracekit.errors import UsageError
from tracekit.simulate.collectives import KINDS, Arguments, run
from tracekit.simulate.experiment import Message


def _cells(moment):
    return [[f"{cell.label} {cell.detail}" for cell in cells] for cells in moment.holds]


def test_a_ring_reduce_scatter_of_three_ranks_step_by_step():
    experiment = run(Arguments(kind="reduce_scatter", ranks=3, elements=4))
    before, first, second = experiment.moments
    assert _cells(before) == [
        ["c0 = r0 [0, 1]", "c1 = r0 [2]", "c2 = r0 [3]"],
        ["c0 = r1 [100, 101]", "c1 = r1 [102]", "c2 = r1 [103]"],
        ["c0 = r2 [200, 201]", "c1 = r2 [202]", "c2 = r2 [203]"],
    ]
    assert first.messages == (Message(0, 1, "c2 = r0", 4), Message(1, 2, "c0 = r1", 8), Message(2, 0, "c1 = r2", 4))
    assert _cells(first) == [
        ["c0 = r0 [0, 1]", "c1 = r0+r2 [204]"],
        ["c1 = r1 [102]", "c2 = r0+r1 [106]"],
        ["c0 = r1+r2 [300, 302]", "c2 = r2 [203]"],
    ]
    assert second.messages == (Message(0, 1, "c1 = r0+r2", 4), Message(1, 2, "c2 = r0+r1", 4), Message(2, 0, "c0 = r1+r2", 8))
    assert _cells(second) == [["c0 = r0+r1+r2 [300, 303]"], ["c1 = r0+r1+r2 [306]"], ["c2 = r0+r1+r2 [309]"]]
    assert [first.live_bytes(rank) for rank in range(3)] == [12, 8, 12]
    assert experiment.holds
    assert experiment.tables[1].frame["sent"].tolist() == [8, 12, 12]


def test_all_collectives_show_what_a_ring_saves():
    table = run(Arguments(ranks=4, elements=8)).tables[0].frame.set_index("collective")
    steps, most = table["steps"], table["most"]
    assert (steps["all_gather (ring)"], steps["all_gather (naive)"]) == (3, 12)
    assert (steps["all_reduce (ring)"], steps["all_reduce (tree)"], steps["all_reduce (star)"]) == (6, 4, 6)
    assert (most["all_reduce (ring)"], most["all_reduce (tree)"], most["all_reduce (star)"]) == (48, 64, 96)
    assert len(table) == sum(len(ALGORITHMS[kind.removesuffix("_v")]) for kind in KINDS)


@settings(max_examples=30, deadline=None)
@given(
    ranks=st.integers(1, 16),
    elements=st.integers(0, 70),
    element_bytes=st.integers(1, 8),
    root=st.integers(0, 15),
    latency=st.floats(0, 1e6),
    bandwidth=st.floats(1e-3, 1e6),
)
def test_every_check_holds_for_any_size(ranks, elements, element_bytes, root, latency, bandwidth):
    chosen = Arguments(
        ranks=ranks, elements=elements, element_bytes=element_bytes, root=root % ranks, latency_us=latency, bandwidth_gb_s=bandwidth
    )
    assert [check for check in run(chosen).checks if not check.holds] == []


@settings(max_examples=30, deadline=None)
@given(ranks=st.integers(1, 6), data=st.data())
def test_every_check_holds_for_uneven_sizes(ranks, data):
    for kind, count in (("all_gather", ranks), ("reduce_scatter", ranks), ("all_reduce", ranks), ("all_to_all_v", ranks * ranks)):
        sizes = tuple(data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)))
        experiment = run(Arguments(kind=kind, ranks=ranks, sizes=sizes))
        assert [check for check in experiment.checks if not check.holds] == []


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
@settings(max_examples=15, deadline=None)
@given(ranks=st.integers(1, 8), passes=st.integers(1, 4), elements=st.integers(0, 60))
def test_more_chunks_go_round_more_often_and_send_the_same(kind, ranks, passes, elements):
    once = run(Arguments(kind=kind, ranks=ranks, elements=elements * ranks * passes))
    more = run(Arguments(kind=kind, ranks=ranks, elements=elements * ranks * passes, chunks=ranks * passes))
    assert more.holds
    assert more.tables[0].frame["steps"][0] == passes * once.tables[0].frame["steps"][0]
    assert more.tables[0].frame["most"][0] == once.tables[0].frame["most"][0]


def test_fewer_elements_than_ranks_are_said():
    experiment = run(Arguments(kind="all_gather", ranks=4, elements=2))
    assert experiment.holds
    assert any("empty chunks" in note for note in experiment.notes)


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"kind": "all_reduce", "chunks": 17}, "17 chunks for 4 ranks: .*17 is no multiple of 4; give --chunks 16"),
        ({"chunks": 17}, "--chunks is for a ring"),
        ({"kind": "broadcast", "chunks": 4}, "--chunks is for a ring"),
        ({"kind": "all_reduce", "chunks": -4}, "-4 chunks"),
        ({"kind": "all_gather", "chunks": 8, "sizes": (1, 2, 3, 4)}, "exclude each other"),
        ({"kind": "all_gather", "sizes": (1, 2, 3)}, "--sizes gives 3 sizes, all_gather needs 4"),
        ({"kind": "all_to_all_v", "sizes": (1, 2, 3, 4)}, "needs 16: one for each pair of ranks"),
        ({"kind": "all_gather", "sizes": (1, 2, 3, -1)}, "negative"),
        ({"kind": "broadcast", "sizes": (1, 2, 3, 4)}, "--sizes needs a collective that cuts"),
        ({"kind": "scatter", "algorithm": "ring"}, "no ring algorithm of scatter here; choose star or tree"),
        ({"algorithm": "ring"}, "without a kind"),
        ({"ranks": 0}, "--ranks 0; give 1 to 64"),
        ({"ranks": 65}, "--ranks 65"),
        ({"elements": -1}, "--elements -1"),
        ({"root": 4}, "--root 4 is not one of 4 ranks"),
        ({"element_bytes": 0}, "--element-bytes 0"),
        ({"bandwidth_gb_s": 0.0}, "make no time"),
        ({"latency_us": float("nan")}, "make no time"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(chosen, words):
    with pytest.raises(UsageError, match=words):
        run(Arguments(**chosen))
