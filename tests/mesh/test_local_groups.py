"""Groups as one rank's trace tells of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builder import Trace, group
from tests.oracle import tables
from tracekit.mesh.local_groups import local_groups, parse_ranks

CUT = "[" + ", ".join(str(r) for r in range(1, 61, 2)) + ", ...]"


def found(trace):
    t = tables(trace.text())
    groups, index = local_groups(t)
    return groups, index.tolist(), t.coverage.problems


def test_config_and_arguments_are_one_group():
    trace = Trace(0, 2)
    trace.collective("allreduce", 10, 5, launch=1)
    groups, index, problems = found(trace)
    assert [(g.name, g.description, g.ranks, g.size) for g in groups] == [("0", "default_pg", (0, 1), 2)]
    assert index == [0, 0]
    assert problems == []


def test_a_cut_list_is_rebuilt_by_start_and_stride():
    trace = Trace(1, 64, groups=[])
    more = {"Global rank start": 1, "Global rank stride": 2, "size": 32}
    trace.collective("allreduce", 10, 5, group="7", description="mesh_dp", ranks=CUT, **more)
    groups, _, _ = found(trace)
    assert groups[0].ranks == tuple(range(1, 64, 2))


@pytest.mark.parametrize("more", [{}, {"Global rank start": 0, "Global rank stride": 1}])
def test_a_cut_list_that_nothing_confirms_stays_unknown(more):
    """(0, 1) is written by some versions for groups that are not regular."""
    trace = Trace(1, 64, groups=[])
    trace.collective("allreduce", 10, 5, group="9", description="expert_group", ranks=CUT, size=40, **more)
    groups, _, problems = found(trace)
    assert groups[0].ranks is None
    assert (len(groups[0].known), groups[0].size) == (30, 40)
    assert any("expert_group" in p and "30 of 40" in p for p in problems)


def test_lists_written_as_text_and_empty_lists():
    text = {**group("0", "default_pg", [0, 1]), "ranks": "[0, 1]"}
    everyone = {**group("1", "all", []), "pg_size": 2}
    trace = Trace(0, 2, groups=[text, everyone])
    assert [g.ranks for g in found(trace)[0]] == [(0, 1), (0, 1)]


def test_an_id_stands_for_the_name():
    trace = Trace(0, 2, groups=[group("0", "default_pg", [0, 1]), group("1", "undefined", [0, 1])])
    trace.operator("record_param_comms", 0, 5, **{"Collective name": "allreduce", "Process Group ID": 1, "Process Group Ranks": "[0, 1]"})
    groups, index, _ = found(trace)
    assert len(groups) == 2
    assert index == [1]


def test_counts_that_disagree_are_said():
    trace = Trace(0, 2)
    trace.top["distributedInfo"]["pg_count"] = 71
    trace.step(1, 0, 1)
    assert any("71" in p for p in found(trace)[2])


@pytest.mark.parametrize(
    ("value", "whole", "known"),
    [
        ("[0, 1]", (0, 1), (0, 1)),
        ([3, 4], (3, 4), (3, 4)),
        ("[0, 1, ...]", None, (0, 1)),
        ("[0, 0]", None, ()),
        ("[0, -1]", None, (0,)),
        ("[[0], 1]", None, ()),
        ("", (), ()),
        (None, None, ()),
        ({"a": 1}, None, ()),
        ([1, "x"], None, (1,)),
        ("[99999999999999999999]", None, ()),
    ],
)
def test_rank_lists(value, whole, known):
    assert parse_ranks(value) == (whole, known)


@given(st.recursive(st.none() | st.integers() | st.text(max_size=9) | st.floats(), lambda x: st.lists(x, max_size=4), max_leaves=9))
def test_any_garbage_is_survived(value):
    bad = {"pg_name": value, "pg_desc": value, "pg_size": value, "ranks": value}
    trace = Trace(0, 2, groups=[bad, bad])
    trace.top["distributedInfo"]["pg_count"] = str(value)
    trace.collective("allreduce", 10, 5, ranks=str(value), size=10**12)
    t = tables(trace.text())
    groups, index = local_groups(t)
    assert all(-1 <= i < len(groups) for i in index.tolist())
