"""Axes, sizes and coordinates from what some ranks of a mesh know."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.errors import UsageError
from tracekit.mesh.mesh import Axis, coordinate, groups_of_axis, infer_mesh, parse_mesh, rank_of
from tracekit.mesh.names import axis_of_description
from tracekit.mesh.process_groups import LocalGroup, short_ranks, unite
from tracekit.mesh.topology import nodes, spans_nodes

AXES = (Axis("pp", 2), Axis("dp_shard", 4), Axis("tp", 2))


def local_groups_of(rank, axes, described=True, default=True):
    """What DeviceMesh makes for one rank: a group an axis, and the default group."""
    world = math.prod(a.size for a in axes)
    groups = [LocalGroup("0", "default_pg", tuple(range(world)), world)] if default else []
    for number, axis in enumerate(axes, 1):
        ranks = next(g for g in groups_of_axis(axes, [axis.name]) if rank in g)
        groups.append(LocalGroup(str(number), f"mesh_{axis.name}" if described else "undefined", ranks, len(ranks)))
    return groups


def inferred(axes, ranks, user=None, described=True):
    world = math.prod(a.size for a in axes)
    groups, _ = unite([(r, local_groups_of(r, axes, described)) for r in ranks], world)
    return (groups, *infer_mesh(groups, world, ranks, user))


def test_rank_5_of_pp2_dp4_tp2():
    assert coordinate(5, AXES) == (0, 2, 1)
    groups = {a.name: next(g for g in groups_of_axis(AXES, [a.name]) if 5 in g) for a in AXES}
    assert groups == {"tp": (4, 5), "dp_shard": (1, 3, 5, 7), "pp": (5, 13)}


def test_one_rank_is_enough_to_know_the_whole_mesh():
    groups, mesh, axis, notes = inferred(AXES, [5])
    assert list(mesh.axes) == list(AXES)
    assert mesh.source == "descriptions"
    assert len(mesh.coordinates) == 16
    assert mesh.coordinates[13] == (1, 2, 1)
    assert dict(zip([g.description for g in groups.groups], axis, strict=True))["mesh_dp_shard"] == "dp_shard"
    assert notes == []


sizes = st.lists(st.integers(2, 4), min_size=2, max_size=4)


@given(sizes, st.data())
def test_any_mesh_comes_back_from_any_rank(numbers, data):
    axes = tuple(Axis(name, size) for name, size in zip(("pp", "dp_shard", "cp", "tp"), numbers, strict=False))
    world = math.prod(numbers)
    ranks = data.draw(st.lists(st.integers(0, world - 1), min_size=1, max_size=3, unique=True))
    _, mesh, _, _ = inferred(axes, ranks)
    assert list(mesh.axes) == list(axes)
    assert all(rank_of(place, axes) == rank for rank, place in mesh.coordinates.items())
    _, unnamed, _, notes = inferred(axes, ranks, described=False)
    assert [a.size for a in unnamed.axes] == numbers
    assert unnamed.source == "rank_lists"
    assert any("named by stride" in n for n in notes)
    _, given_by_user, axis, _ = inferred(axes, ranks, user=axes, described=False)
    assert given_by_user.source == "user"
    assert set(axis) == {"world", *(a.name for a in axes)}


@given(st.permutations(range(8)))
def test_the_order_of_files_does_not_matter(order):
    axes = (Axis("dp", 4), Axis("tp", 2))
    groups, _ = unite([(r, local_groups_of(r, axes)) for r in order], 8)
    assert [g.id for g in groups.groups] == [g.id for g in unite([(r, local_groups_of(r, axes)) for r in range(8)], 8)[0].groups]
    assert len({g.id for g in groups.groups}) == len(groups.groups) == 1 + 2 + 4


def test_flattened_meshes_and_experts_are_axes_of_groups_not_dimensions():
    world = tuple(range(8))
    known = [
        LocalGroup("1", "mesh_dp_shard", (0, 4), 2),
        LocalGroup("2", "mesh_cp", (0, 2), 2),
        LocalGroup("3", "mesh_tp", (0, 1), 2),
        LocalGroup("4", "mesh_dp_shard_cp", (0, 2, 4, 6), 4),
        LocalGroup("5", "mesh_ep", (0, 2, 4, 6), 4),
        LocalGroup("0", "default_pg", world, 8),
    ]
    groups, _ = unite([(0, known)], 8)
    mesh, axis, _ = infer_mesh(groups, 8, [0], None)
    assert [(a.name, a.size) for a in mesh.axes] == [("dp_shard", 2), ("cp", 2), ("tp", 2)]
    assert {"dp_shard_cp", "ep", "world"} <= set(axis)


def test_a_users_mesh_that_does_not_fit_is_refused():
    with pytest.raises(UsageError, match="12 ranks, the job has 16"):
        inferred(AXES, [0], user=parse_mesh("pp=3,tp=4"))


@pytest.mark.parametrize("text", ["tp", "tp=0", "tp=x", "=2", "tp=2,tp=2", "tp=2,", "tp=-2", "tp=-1,pp=-1"])
def test_a_mesh_that_cannot_be_read(text):
    with pytest.raises(UsageError, match="--mesh"):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("description", "axis"),
    [
        ("mesh_tp", "tp"),
        ("mesh_dp_shard_cp", "dp_shard_cp"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("DATA_PARALLEL_GROUP_WITH_CP_GLOO", "dp_cp"),
        ("dp_replicate", "dp_replicate"),
        ("expert_group", "ep"),
        ("default_pg", ""),
        ("undefined", ""),
        ("my own group", ""),
    ],
)
def test_names_of_groups(description, axis):
    assert axis_of_description(description) == axis


def test_a_cut_list_is_completed_by_a_rank_that_has_it_whole():
    whole = LocalGroup("9", "odd", (0, 1, 3, 4), 4)
    cut = LocalGroup("9", "odd", None, 4, (0, 1))
    groups, _ = unite([(0, [cut]), (3, [whole])], 8)
    assert [g.ranks for g in groups.groups] == [(0, 1, 3, 4)]
    alone, _ = unite([(0, [cut])], 8)
    assert (alone[0].ranks, alone[0].known, alone[0].size) == (None, (0, 1), 4)


def test_two_groups_over_the_same_ranks_stay_two():
    groups, _ = unite([(0, [LocalGroup("1", "a", (0, 1), 2), LocalGroup("2", "b", (0, 1), 2)])], 2)
    assert [g.id for g in groups.groups] == ["1", "2"]


def test_nodes_by_count_or_by_host():
    group = unite([(0, [LocalGroup("1", "", (0, 2), 2)])], 4)[0][0]
    assert spans_nodes(group, nodes({}, 4, 2)) is True
    assert spans_nodes(group, nodes({}, 4, 4)) is False
    assert spans_nodes(group, nodes({0: "a", 2: "b"}, 4, None)) is True
    assert spans_nodes(group, nodes({0: "a"}, 4, None)) is None
    assert nodes({0: ""}, 4, None) is None
    with pytest.raises(UsageError):
        nodes({}, 4, 0)


def test_short_names_of_rank_lists():
    assert short_ranks(range(8)) == "0-7"
    assert short_ranks([1, 3, 5]) == "1-5:2"
    assert short_ranks([0, 4]) == "0,4"
    assert short_ranks([7]) == "7"
