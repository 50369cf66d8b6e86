"""What one rank's trace tells of its process groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builder import Trace, group
from tests.oracle import tables
from tracekit.mesh.local_groups import local_groups, parse_ranks
from tracekit.mesh.process_groups import LocalGroup

CASES = Path(__file__).resolve().parents[2].parent / "shared" / "cases"


def found(trace: Trace) -> tuple[list[LocalGroup], list[int], list[str]]:
    """(groups, group of each collective's row, problems)."""
    read = tables(trace.text())
    groups, place = local_groups(read)
    assert len(place) == len(read.side["communication"])
    return groups, place.tolist(), read.coverage.problems


def cut(ranks: list[int]) -> str:
    """A rank list as torch writes it: text, cut after 30 members."""
    return str(ranks) if len(ranks) <= 30 else f"[{', '.join(map(str, ranks[:30]))}, ...]"


def collective(trace: Trace, **args: Any) -> None:
    """A collective's arguments alone, without a kernel."""
    trace.operator("record_param_comms", 0, 10, **{"Collective name": "allreduce", **args})


# ---- where members come from ------------------------------------------------------------------------------------------------------------


def test_groups_of_the_configuration_and_which_collective_is_in_which() -> None:
    trace = Trace(1, 4, [group("0", "default_pg", [0, 1, 2, 3]), group("3", "mesh_tp", [0, 1])])
    trace.collective("allreduce", 0, 10, group="3", description="mesh_tp", ranks="[0, 1]")
    trace.collective("allreduce", 20, 10, group="0", ranks="[0, 1, 2, 3]")
    trace.collective("allreduce", 40, 10, group="3", description="mesh_tp", ranks="[0, 1]")
    groups, place, problems = found(trace)
    assert groups == [
        LocalGroup("0", "default_pg", (0, 1, 2, 3), 4, (), "cuda:nccl"),
        LocalGroup("3", "mesh_tp", (0, 1), 2, (), "cuda:nccl"),
    ]
    assert place == [1, 0, 1]
    assert problems == []


def test_an_old_trace_without_a_configuration() -> None:
    trace = Trace(None)
    trace.collective("allreduce", 0, 10, group="0", ranks="[0, 1, 2]")
    trace.collective("allreduce", 20, 10, group="5", description="undefined", ranks="[0, 2]")
    groups, place, _ = found(trace)
    assert [(g.name, g.ranks) for g in groups] == [("0", (0, 1, 2)), ("5", (0, 2))]
    assert sorted(place) == [0, 1]


def test_an_empty_list_is_the_whole_world() -> None:
    entry = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 4, "ranks": []}
    assert found(Trace(0, 4, [entry]))[0] == [LocalGroup("0", "default_pg", (0, 1, 2, 3), 4)]
    smaller = found(Trace(0, 8, [entry | {"pg_size": 4, "pg_desc": "undefined"}]))
    assert smaller[0] == [LocalGroup("0", "undefined", None, 4)]
    assert "only 0 of 4" in smaller[2][0]


def test_a_list_as_text() -> None:
    entry = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": "2", "ranks": "[0, 1]"}
    assert found(Trace(0, 2, [entry]))[0] == [LocalGroup("0", "default_pg", (0, 1), 2)]


def test_a_number_instead_of_a_name_is_the_groups_name() -> None:
    """torch 2.3: two groups over the same ranks, told apart by the number alone; its kernels name neither."""
    trace = Trace(0, 2, [group("0", "default_pg", [0, 1]), group("1", "undefined", [0, 1])])
    collective(trace, **{"Process Group ID": 1, "Process Group Ranks": "[0, 1]", "Group size": 2})
    collective(trace, **{"Process Group ID": 0, "Process Group Ranks": "[0, 1]", "Group size": 2})
    trace.kernel("ncclKernel_AllReduce_RING_LL_Sum_float", 30, 10, **{"Collective name": "allreduce", "Group size": 2})
    groups, place, problems = found(trace)
    assert [g.name for g in groups] == ["0", "1"]
    assert place == [1, 0, -1]
    assert problems == []


def test_a_number_that_counts_the_ranks_own_groups_yields_to_the_members() -> None:
    trace = Trace(2, 4, [group("0", "default_pg", [0, 1, 2, 3]), group("2", "undefined", [2, 3])])
    collective(trace, **{"Process Group ID": 1, "Process Group Ranks": "[2, 3]", "Group size": 2})
    groups, place, problems = found(trace)
    assert [g.name for g in groups] == ["0", "2"]
    assert place == [1]
    assert problems == []


def test_one_name_with_two_member_lists_is_two_groups_and_one_list_with_two_names_too() -> None:
    trace = Trace(0, 8, [])
    for name, ranks in (("3", "[0, 1]"), ("3", "[0, 2]"), ("4", "[0, 1]")):
        trace.collective("allreduce", 0, 10, group=name, description="mesh_x", ranks=ranks)
    groups, place, _ = found(trace)
    assert [(g.name, g.ranks) for g in groups] == [("3", (0, 1)), ("3", (0, 2)), ("4", (0, 1))]
    assert place == [0, 1, 2]


# ---- cut lists ----------------------------------------------------------------------------------------------------------------------


def test_a_cut_list_is_taken_whole_from_the_configuration() -> None:
    ranks = [r for r in range(90) if r % 3]
    trace = Trace(1, 90, [group("4", "odd", ranks)])
    trace.collective("allreduce", 0, 10, group="4", description="odd", ranks=cut(ranks), size=60)
    groups, place, problems = found(trace)
    assert groups[0].ranks == tuple(ranks)
    assert place == [0]
    assert problems == []


def test_a_cut_list_is_rebuilt_from_start_and_stride() -> None:
    ranks = list(range(3, 128, 4))
    trace = Trace(3, 128, [])
    regular = {"Global rank start": 3, "Global rank stride": 4}
    trace.collective("allreduce", 0, 10, group="4", description="mesh_dp", ranks=cut(ranks), size=32, **regular)
    assert found(trace)[0][0].ranks == tuple(ranks)


def test_start_and_stride_that_contradict_the_visible_members_are_not_believed() -> None:
    """Some versions write 0 and 1 whatever the group is."""
    ranks = [0, 1, 3, *range(4, 41)]
    trace = Trace(3, 64, [{"pg_name": "9", "pg_desc": "expert_group", "pg_size": 40, "ranks": cut(ranks)}])
    defaults = {"Global rank start": 0, "Global rank stride": 1}
    trace.collective("allreduce", 0, 10, group="9", description="expert_group", ranks=cut(ranks), size=40, **defaults)
    groups, place, problems = found(trace)
    assert groups == [LocalGroup("9", "expert_group", None, 40, tuple(ranks[:30]))]
    assert place == [0]
    assert problems == ["process group expert_group: only 30 of 40 members are recorded"]


@pytest.mark.parametrize(
    ("start", "stride", "size", "members"),
    [
        (4, 2, 3, (4, 6, 8)),
        (0, 1, 16, tuple(range(16))),  # as many as there are ranks
        (0, 1, 5, None),  # what torch writes where it was not told, though this rank would be among them
        (5, 2, 3, None),  # this rank is not among them
        (4, -1, 3, None),  # irregular
        (4, 6, 3, None),  # beyond the world
        (-4, 4, 3, None),
    ],
)
def test_start_and_stride_alone(start: int, stride: int, size: int, members: tuple[int, ...] | None) -> None:
    trace = Trace(4, 16, [])
    regular = {"Global rank start": start, "Global rank stride": stride}
    collective(trace, **{"Process Group Name": "7", "Group size": size, **regular})
    assert [(g.ranks, g.size) for g in found(trace)[0]] == [(members, size)]


def test_thirty_members_of_a_larger_group_are_a_cut_list_even_without_the_dots() -> None:
    trace = Trace(0, 64, [{"pg_name": "9", "pg_desc": "x", "pg_size": 40, "ranks": list(range(0, 60, 2))}])
    assert found(trace)[0] == [LocalGroup("9", "x", None, 40, tuple(range(0, 60, 2)))]


def test_as_many_members_as_ranks_are_all_ranks() -> None:
    trace = Trace(0, 64, [{"pg_name": "1", "pg_desc": "undefined", "pg_size": 64, "ranks": cut(list(range(64)))}])
    assert found(trace)[0][0].ranks == tuple(range(64))


# ---- what disagrees is said ---------------------------------------------------------------------------------------------------------


def test_counts_that_disagree() -> None:
    trace = Trace(0, 2)
    trace.top["distributedInfo"]["pg_count"] = 71
    trace.collective("allreduce", 0, 10, group="8", description="undefined", ranks="[0, 1]")
    groups, place, problems = found(trace)
    assert [g.name for g in groups] == ["0", "8"]
    assert place == [1]
    assert problems == [
        "pg_count is 71, 1 process groups are listed: the listed ones are used",
        "collectives run on process groups that pg_config does not list: 8",
    ]


def test_a_size_that_contradicts_the_list() -> None:
    groups, _, problems = found(Trace(0, 8, [{"pg_name": "1", "pg_desc": "mesh_tp", "pg_size": 4, "ranks": [0, 1]}]))
    assert groups == [LocalGroup("1", "mesh_tp", (0, 1), 2)]
    assert problems == ["process group mesh_tp: the size is given as 4, the list has 2 members and is used"]


def test_a_repeated_distributed_info_is_read_twice() -> None:
    trace = Trace(0, 2, [group("0", "default_pg", [0, 1])])
    info = trace.top["distributedInfo"]
    trace.top["_distributedInfo_all"] = [info, {"rank": 0, "pg_config": [group("1", "undefined", [0, 1])]}]
    assert [g.name for g in found(trace)[0]] == ["0", "1"]


# ---- hostile input --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "whole", "known"),
    [
        ([0, 1], (0, 1), (0, 1)),
        ("[0, 1]", (0, 1), (0, 1)),
        ("0,1", (0, 1), (0, 1)),
        ("[0, 1, ...]", None, (0, 1)),
        ("[]", (), ()),
        ("", (), ()),
        ([], (), ()),
        ([0, -1], None, (0,)),
        ("[0, x, 2]", None, (0,)),
        ([[0, 1], [2, 3]], None, ()),
        ("[[0, 1], [2, 3]]", None, ()),
        ([0, 1.5], None, (0,)),
        ([0, True], None, (0,)),
        (["0", "1"], (0, 1), (0, 1)),
        ([0, 0], None, ()),
        ([0, 10**30], None, (0,)),
        ("[²]", None, ()),
        (None, None, ()),
        ({"0": 1}, None, ()),
        (7, None, ()),
    ],
)
def test_parse_ranks(value: Any, whole: tuple[int, ...] | None, known: tuple[int, ...]) -> None:
    assert parse_ranks(value) == (whole, known)


def test_absurd_sizes_build_nothing() -> None:
    huge = 10**12
    trace = Trace(0, huge, [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": huge, "ranks": []}])
    absurd = {"Group size": huge, "Global rank start": 0, "Global rank stride": 1}
    collective(trace, **{"Process Group Name": "1", **absurd})
    collective(trace, **{"Process Group Name": "2", "Group size": -5, "Global rank start": -(2**63) + 1, "Global rank stride": 2**62})
    groups, place, _ = found(trace)
    assert [(g.name, g.ranks, g.size) for g in groups] == [("0", None, 0), ("1", None, 0), ("2", None, 0)]
    assert place == [1, 2]


def test_many_large_lists_are_built_up_to_a_limit() -> None:
    trace = Trace(None)
    for start in range(1, 40):
        large = {"Group size": 400_000, "Global rank start": start, "Global rank stride": 2}
        collective(trace, **{"Process Group Name": str(start), **large})
    groups, _, problems = found(trace)
    assert sum(g.ranks is not None for g in groups) == 10
    assert any("more process groups" in p for p in problems)


def test_a_trace_with_too_many_groups() -> None:
    trace = Trace(0, 2, [])
    for i in range(4200):
        collective(trace, **{"Process Group Name": f"g{i}", "Process Group Ranks": "[0, 1]"})
    groups, place, problems = found(trace)
    assert len(groups) == 4096
    assert place.count(-1) == 4200 - 4096
    assert "4200 different process groups" in problems[0]


_KEYS = st.sampled_from(["ranks", "pg_name", "pg_size", "pg_desc"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8) | st.just("[0, 1, ...]"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(_VALUES, _VALUES, _VALUES, st.dictionaries(st.sampled_from(["Process Group Name", "Process Group Ranks", "Group size"]), _VALUES))
@settings(max_examples=150, deadline=None)
def test_garbage_never_raises_and_every_row_has_a_place(info: Any, config: Any, world: Any, args: dict[str, Any]) -> None:
    trace = Trace(None)
    trace.top["distributedInfo"] = {"pg_config": config, "world_size": world, "rank": world, "pg_count": info} if info else info
    collective(trace, **args)
    groups, place, _ = found(trace)
    assert all(-1 <= p < len(groups) for p in place)
    for g in groups:
        assert g.ranks is None or (len(g.ranks) == g.size == len(set(g.ranks)) and min(g.ranks) >= 0)
        assert g.ranks is None or not g.known


# ---- the shared cases, where they are --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not CASES.is_dir(), reason="the shared cases are not here")
def test_shared_case_of_truncated_lists() -> None:
    folder = next(CASES.glob("G04*"))
    expected = json.loads((folder / "expected.json").read_text())
    read = tables((folder / "rank1.json").read_text())
    groups = {g.name: g for g in local_groups(read)[0]}
    for name, what in expected["expect"]["groups"].items():
        assert groups[name].size == what["size"]
        if what["complete_list"]:
            assert list(groups[name].ranks or ()) == what["ranks"]
        else:
            assert groups[name].ranks is None
            assert list(groups[name].known) == what["first_30"]
    assert all(any(word in problem for problem in read.coverage.problems) for word in expected["message_must_mention"])
