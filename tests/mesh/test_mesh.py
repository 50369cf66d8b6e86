"""Axes, sizes and coordinates from the groups of some ranks."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.mesh.made import along, device_mesh, seen_by
from tracekit.errors import UsageError
from tracekit.mesh.mesh import Axis, Mesh, Recorded, coordinate, groups_of_axis, infer_mesh, parse_mesh, rank_of
from tracekit.mesh.process_groups import LocalGroup, ProcessGroups, unite
from tracekit.notes import sentences

PP2_DP4_TP2 = (Axis("pp", 2), Axis("dp_shard", 4), Axis("tp", 2))


def inferred(
    groups: list[LocalGroup], ranks: list[int], world: int | None, user: str | None = None
) -> tuple[Mesh, dict[str, str], list[str]]:
    """(mesh, axis by members, notes) from the groups that these ranks are in."""
    united, _ = unite(seen_by(groups, ranks), world)
    mesh, axes, notes = infer_mesh(united, world, ranks, parse_mesh(user) if user else None)
    return mesh, {str(list(g.ranks or g.known)): axis for g, axis in zip(united.groups, axes, strict=True)}, sentences(notes)


@st.composite
def meshes(draw: st.DrawFn) -> tuple[Axis, ...]:
    names = draw(st.lists(st.sampled_from(["pp", "dp_replicate", "dp_shard", "cp", "tp", "mine"]), min_size=2, max_size=4, unique=True))
    return tuple(Axis(name, draw(st.integers(1, 4))) for name in names)


def shown(draw: st.DataObject, world: int) -> list[int]:
    return sorted(draw.draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=min(world, 6))))


# ---- one rank is enough -----------------------------------------------------------------------------------------------------------------


def test_one_rank_of_a_three_axis_job_tells_the_whole_mesh() -> None:
    mesh, axes, notes = inferred(device_mesh(PP2_DP4_TP2), [5], 16)
    assert mesh.axes == PP2_DP4_TP2
    assert mesh.source == "descriptions"
    assert axes == {"[4, 5]": "tp", "[1, 3, 5, 7]": "dp_shard", "[5, 13]": "pp", str(list(range(16))): "world"}
    assert mesh.coordinates[0] == (0, 0, 0)
    assert mesh.coordinates[5] == (0, 2, 1)
    assert mesh.coordinates[13] == (1, 2, 1)
    assert len(mesh.coordinates) == 16
    assert notes == []


def test_without_descriptions_axes_are_named_by_stride_and_size_and_a_note_says_so() -> None:
    mesh, axes, notes = inferred(device_mesh(PP2_DP4_TP2, described=False), [5], 16)
    assert [(a.name, a.size) for a in mesh.axes] == [("axis_8x2", 2), ("axis_2x4", 4), ("axis_1x2", 2)]
    assert mesh.source == "rank_lists"
    assert axes["[1, 3, 5, 7]"] == "axis_2x4"
    assert "--mesh" in notes[0]
    assert "axis_8x2" in notes[0]


def test_a_users_mesh_names_axes_that_nothing_describes() -> None:
    mesh, axes, notes = inferred(device_mesh(PP2_DP4_TP2, described=False), [5], 16, "pp=2,dp_shard=4,tp=2")
    assert mesh.axes == PP2_DP4_TP2
    assert mesh.source == "user"
    assert axes == {"[4, 5]": "tp", "[1, 3, 5, 7]": "dp_shard", "[5, 13]": "pp", str(list(range(16))): "world"}
    assert notes == []


@given(meshes(), st.data())
@settings(max_examples=150, deadline=None)
def test_described_axes_come_back_whatever_ranks_are_shown(axes: tuple[Axis, ...], data: st.DataObject) -> None:
    world = int(np.prod([a.size for a in axes]))
    long = tuple(a for a in axes if a.size > 1)
    ranks = shown(data, world)
    mesh, by_members, _ = inferred(device_mesh(axes), ranks, world)
    if len(long) > 1:
        assert mesh.axes == long
        assert all(by_members[str(list(g))] == a.name for a in long for g in along(axes, [a.name]) if set(g) & set(ranks))
        places = np.stack(np.unravel_index(np.arange(world), [a.size for a in long]), axis=1)
        assert mesh.coordinates == {rank: tuple(place) for rank, place in enumerate(places.tolist())}
    elif len(long) == 1:  # it spans the world: DeviceMesh uses default_pg for it, and its name is lost
        assert mesh.axes == (Axis("world", world),)
    else:
        assert mesh.axes == ()


@given(meshes(), st.data())
@settings(max_examples=150, deadline=None)
def test_sizes_and_places_come_back_without_descriptions(axes: tuple[Axis, ...], data: st.DataObject) -> None:
    world = int(np.prod([a.size for a in axes]))
    long = [a.size for a in axes if a.size > 1]
    mesh, _, _ = inferred(device_mesh(axes, described=False), shown(data, world), world)
    assert [a.size for a in mesh.axes] == long
    expected = np.stack(np.unravel_index(np.arange(world), long), axis=1).tolist() if long else []
    assert mesh.coordinates == {rank: tuple(place) for rank, place in enumerate(expected)}


@given(meshes(), st.booleans(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_users_mesh_gives_what_descriptions_give(axes: tuple[Axis, ...], described: bool, data: st.DataObject) -> None:
    world = int(np.prod([a.size for a in axes]))
    ranks = shown(data, world)
    mesh, by_members, notes = inferred(device_mesh(axes, described=described), ranks, world, ",".join(f"{a.name}={a.size}" for a in axes))
    assert mesh.axes == axes
    assert mesh.coordinates == {rank: coordinate(rank, axes) for rank in range(world)}
    long = [a for a in axes if a.size > 1]
    for axis in long:
        mine = [g for g in along(axes, [axis.name]) if set(g) & set(ranks)]
        assert {by_members[str(list(g))] for g in mine} == {axis.name}
    assert notes == []


@given(meshes(), st.data())
@settings(max_examples=100, deadline=None)
def test_flattened_axes_change_no_dimension(axes: tuple[Axis, ...], data: st.DataObject) -> None:
    world = int(np.prod([a.size for a in axes]))
    names = [a.name for a in axes if a.name != "mine"]
    pairs = [list(pair) for pair in combinations(names, 2)]
    flattened = [pair for pair in pairs if data.draw(st.booleans())]
    ranks = shown(data, world)
    plain, _, _ = inferred(device_mesh(axes), ranks, world)
    mesh, by_members, _ = inferred(device_mesh(axes, flattened), ranks, world)
    if sum(a.size > 1 for a in axes) > 1:
        assert mesh == plain
    for names in flattened:
        for group in along(axes, names):
            if set(group) & set(ranks) and sum(a.size > 1 for a in axes if a.name in names) == 2 and len(group) < world:
                assert by_members[str(list(group))] == "_".join(names)


# ---- axes of real frameworks ------------------------------------------------------------------------------------------------------------


def described(description: str, *lists: list[int]) -> list[LocalGroup]:
    return [LocalGroup(f"{description}{ranks}", description, tuple(ranks), len(ranks)) for ranks in lists]


def test_torchtitans_flattened_names_give_the_dimension_that_has_no_group_of_its_own() -> None:
    # dp_shard=4, cp=2, tp=2 of a torchtitan job: shards go over dp_shard and cp together, and dp_shard has no group.
    axes = (Axis("dp_shard", 4), Axis("cp", 2), Axis("tp", 2))
    groups = [g for g in device_mesh(axes, [["dp_shard", "cp"]]) if g.description != "mesh_dp_shard"]
    mesh, by_members, notes = inferred(groups, [0], 16)
    assert mesh.axes == axes
    assert by_members[str(list(range(0, 16, 2)))] == "dp_shard_cp"
    assert notes == []


def test_torchtitan_with_experts_over_shards_and_context() -> None:
    # pp=2, dp_replicate=2, dp_shard=4, cp=2, tp=2; experts 2 wide over the same ranks as cp. No group is called dp_shard.
    axes = (Axis("pp", 2), Axis("dp_replicate", 2), Axis("dp_shard", 4), Axis("cp", 2), Axis("tp", 2))
    named = {
        "dp": ["dp_replicate", "dp_shard"],
        "dp_shard_cp": ["dp_shard", "cp"],
        "dp_cp": ["dp_replicate", "dp_shard", "cp"],
        "dp_shard_in_ep": ["dp_shard"],
        "ep": ["cp"],
        **{name: [name] for name in ("pp", "dp_replicate", "cp", "tp")},
    }
    groups = [LocalGroup(f"{name}{r}", f"mesh_{name}", r, len(r)) for name, of in named.items() for r in along(axes, of)]
    mesh, by_members, notes = inferred([g for g in groups if g.description != "mesh_ep"], [17], 64)
    assert mesh.axes == axes
    assert by_members["[1, 5, 9, 13, 17, 21, 25, 29]"] == "dp"
    assert by_members["[17, 21, 25, 29]"] == "dp_shard_in_ep"
    assert notes == []
    assert inferred(groups, [17], 64)[0].axes == axes


def test_experts_lie_over_the_axes_whose_ranks_they_use() -> None:
    groups = device_mesh(PP2_DP4_TP2) + described("mesh_ep", [0, 2], [4, 6], [1, 3], [5, 7]) + described("mesh_loss", [0, 2, 4, 6])
    mesh, by_members, _ = inferred(groups, [0, 1], 16)
    assert mesh.axes == PP2_DP4_TP2
    assert by_members["[0, 2]"] == "ep"
    mesh, by_members, notes = inferred(groups, [0, 1], 16, "pp=2,dp_shard=4,tp=2")
    assert by_members["[0, 2]"] == "ep"
    assert notes == []


def test_megatrons_groups_by_their_descriptions() -> None:
    # tp=2, cp=2, dp=2, pp=2 in Megatron's order: tp innermost, pp outermost.
    groups = [
        *described("TENSOR_MODEL_PARALLEL_GROUP", [0, 1]),
        *described("CONTEXT_PARALLEL_GROUP", [0, 2]),
        *described("DATA_PARALLEL_GROUP", [0, 4]),
        *described("DATA_PARALLEL_GROUP_WITH_CP", [0, 2, 4, 6]),
        *described("PIPELINE_MODEL_PARALLEL_GROUP", [0, 8]),
        *described("MODEL_PARALLEL_GROUP", [0, 1, 8, 9]),
        *described("EMBEDDING_GROUP", [0, 8]),
        *described("POSITION_EMBEDDING_GROUP", [0]),
        *described("EXPERT_MODEL_PARALLEL_GROUP", [0, 1, 2, 3]),
    ]
    united, _ = unite([(0, groups)], 16)
    mesh, axes, notes = infer_mesh(united, 16, [0], None)
    notes = sentences(notes)
    assert [(a.name, a.size) for a in mesh.axes] == [("pp", 2), ("dp", 2), ("cp", 2), ("tp", 2)]
    assert dict(zip([g.description for g in united.groups], axes, strict=True)) == {
        "TENSOR_MODEL_PARALLEL_GROUP": "tp",
        "CONTEXT_PARALLEL_GROUP": "cp",
        "DATA_PARALLEL_GROUP": "dp",
        "DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
        "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
        "MODEL_PARALLEL_GROUP": "tp_pp",
        "EMBEDDING_GROUP": "embedding",
        "POSITION_EMBEDDING_GROUP": "embedding",
        "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    }
    assert notes == []


def test_hybrid_sharding_without_descriptions() -> None:
    # FSDP1 HYBRID_SHARD on two nodes of four: groups inside a node, groups across nodes, none described.
    groups = described("default_pg", [*range(8)]) + described("undefined", [0, 1, 2, 3], [4, 5, 6, 7], [0, 4], [1, 5], [2, 6], [3, 7])
    mesh, by_members, _ = inferred(groups, [*range(8)], 8)
    assert [(a.name, a.size) for a in mesh.axes] == [("axis_4x2", 2), ("axis_1x4", 4)]
    assert by_members["[4, 5, 6, 7]"] == "axis_1x4"
    assert by_members[str([*range(8)])] == "world"


def test_an_undescribed_group_fills_the_gap_between_described_axes() -> None:
    groups = described("mesh_tp", [0, 1]) + described("undefined", [0, 2, 4, 6], [0, 1, 2, 3])
    mesh, by_members, notes = inferred(groups, [0], 8)
    assert [(a.name, a.size) for a in mesh.axes] == [("axis_2x4", 4), ("tp", 2)]
    assert by_members == {"[0, 1]": "tp", "[0, 2, 4, 6]": "axis_2x4", "[0, 1, 2, 3]": ""}
    assert notes == ["no description names axis_2x4 (named by stride and size)"]


def test_an_axis_along_which_no_group_was_seen_still_gives_coordinates() -> None:
    mesh, _, notes = inferred(described("mesh_pp", [1, 9]) + described("mesh_tp", [0, 1]), [1], 16)
    assert [(a.name, a.size) for a in mesh.axes] == [("pp", 2), ("axis_2x4", 4), ("tp", 2)]
    assert mesh.coordinates[13] == (1, 2, 1)
    assert notes == ["no process group was seen along axis_2x4 (named by stride and size)"]


def test_a_group_made_for_a_few_ranks_is_no_axis() -> None:
    groups = described("default_pg", [*range(8)]) + described("undefined", [0, 1])
    mesh, by_members, _ = inferred(groups, [*range(8)], 8)
    assert mesh.axes == (Axis("world", 8),)
    assert by_members["[0, 1]"] == ""


def test_only_the_group_of_all_ranks() -> None:
    mesh, by_members, _ = inferred(described("default_pg", [0, 1, 2]), [0], None)
    assert mesh.axes == (Axis("world", 3),)
    assert mesh.source == "rank_lists"
    assert mesh.coordinates == {0: (0,), 1: (1,), 2: (2,)}
    assert by_members == {"[0, 1, 2]": "world"}


def test_nothing_known() -> None:
    assert infer_mesh(ProcessGroups([], []), 8, [0, 1], None) == (Mesh((), {}, "none"), [], [])


# ---- what does not fit is said --------------------------------------------------------------------------------------------------------


def test_shapes_that_differ_are_noted_and_the_usual_one_is_used() -> None:
    groups = described("mesh_tp", [0, 1], [2, 3], [4, 5, 6, 7])
    mesh, by_members, notes = inferred(groups, [0, 2, 4], 8)
    assert mesh.axes[-1] == Axis("tp", 2)
    assert by_members["[4, 5, 6, 7]"] == "tp"
    assert "2 ranks at stride 1, 4 ranks at stride 1" in notes[0]


def test_axes_that_do_not_tile_the_world_give_no_coordinates() -> None:
    mesh, by_members, notes = inferred(described("mesh_tp", [0, 1, 2, 3]), [0], 6)
    assert mesh == Mesh((), {}, "none")
    assert by_members == {"[0, 1, 2, 3]": "tp"}
    assert "do not tile 6 ranks" in notes[0]


def test_an_irregular_group_is_known_by_description_alone() -> None:
    mesh, by_members, notes = inferred(described("mesh_odd", [0, 1, 3]) + described("mesh_tp", [0, 1]), [0], 8)
    assert by_members == {"[0, 1, 3]": "odd", "[0, 1]": "tp"}
    assert mesh.axes[-1] == Axis("tp", 2)
    assert "odd" in notes[0]


def test_a_group_that_contradicts_the_users_mesh() -> None:
    groups = described("mesh_tp", [0, 2]) + described("undefined", [0, 1, 2])
    _, by_members, notes = inferred(groups, [0], 4, "dp=2,tp=2")
    assert by_members == {"[0, 2]": "dp", "[0, 1, 2]": ""}
    assert "described as tp" in notes[0]
    assert "no axis has the members" in notes[1]


def test_ranks_beyond_the_world_do_not_break_the_mesh() -> None:
    mesh, by_members, _ = inferred(described("mesh_tp", [0, 1], [8, 9]), [0, 8], 4)
    assert mesh.axes[-1] == Axis("tp", 2)
    assert by_members["[8, 9]"] == "tp"


def test_a_world_too_large_to_list_has_the_coordinates_of_the_ranks_that_were_read() -> None:
    mesh, _, _ = inferred(described("mesh_tp", [6, 7]), [6], 1_000_000)
    assert mesh.axes == (Axis("axis_2x500000", 500_000), Axis("tp", 2))
    assert mesh.coordinates == {6: (3, 0)}


# ---- the user's option ----------------------------------------------------------------------------------------------------------------


def test_parse_mesh() -> None:
    assert parse_mesh("pp=2, dp_shard = 4,tp=2") == PP2_DP4_TP2
    assert parse_mesh("dp=-1,tp=2") == (Axis("dp", -1), Axis("tp", 2))


@pytest.mark.parametrize(
    "text", ["", "tp", "tp=", "=2", "tp=0", "tp=-2", "tp=x", "tp=2,", "tp=1.5", "tp=²", "tp=" + "9" * 5000, "tp=2,tp=2", "a=-1,b=-1"]
)
def test_a_mesh_that_is_none_costs_one_clear_line(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_mesh(text)
    assert "--mesh" in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("text", "world", "says"),
    [
        ("pp=2,tp=2", 8, "an axis of 2 is missing"),
        ("pp=2,tp=3", 8, "6 does not divide 8"),
        ("pp=2,tp=8", 8, "16 does not divide 8"),
        ("dp=-1,tp=3", 8, "3 does not divide the 8 ranks"),
        ("dp=-1,tp=3", None, "world size is not recorded"),
        ("tp=2", None, "the job has a rank 5"),
    ],
)
def test_a_mesh_that_misses_the_world_says_how(text: str, world: int | None, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        infer_mesh(ProcessGroups([], []), world, [0, 5], parse_mesh(text))


def test_one_size_can_be_left_open() -> None:
    mesh, _, _ = infer_mesh(ProcessGroups([], []), 8, [0], parse_mesh("dp=-1,tp=2"))
    assert mesh.axes == (Axis("dp", 4), Axis("tp", 2))


def test_a_users_single_axis_names_the_group_of_all_ranks() -> None:
    _, by_members, _ = inferred(described("default_pg", [0, 1, 2, 3]), [0], 4, "fsdp=4")
    assert by_members == {"[0, 1, 2, 3]": "fsdp"}


def test_a_users_mesh_joins_the_axes_of_a_flattened_group() -> None:
    axes = (Axis("pp", 2), Axis("dp_shard", 2), Axis("cp", 2), Axis("tp", 2))
    lists = [*along(axes, ["dp_shard", "cp"]), *along(axes, ["pp", "tp"])]
    groups = [LocalGroup(str(i), "undefined", ranks, 4) for i, ranks in enumerate(lists)]
    _, by_members, _ = inferred(groups, [0], 16, "pp=2,dp_shard=2,cp=2,tp=2")
    assert by_members == {"[0, 2, 4, 6]": "dp_shard_cp", "[0, 1, 8, 9]": "pp_tp"}


# ---- coordinates ----------------------------------------------------------------------------------------------------------------------


@given(meshes(), st.data())
def test_a_coordinate_and_its_rank_are_inverse(axes: tuple[Axis, ...], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, int(np.prod([a.size for a in axes])) - 1))
    place = coordinate(rank, axes)
    assert place == tuple(np.unravel_index(rank, [a.size for a in axes]))
    assert rank_of(place, axes) == rank


@given(meshes(), st.data())
def test_groups_of_axes_partition_the_ranks_as_numpy_does(axes: tuple[Axis, ...], data: st.DataObject) -> None:
    names = data.draw(st.sets(st.sampled_from([a.name for a in axes])))
    groups = groups_of_axis(axes, names)
    assert groups == along(axes, sorted(names))
    assert [g[0] for g in groups] == sorted(g[0] for g in groups)


def test_places_that_are_not_on_the_mesh() -> None:
    with pytest.raises(ValueError, match="rank 16 is not on a mesh"):
        coordinate(16, PP2_DP4_TP2)
    with pytest.raises(ValueError, match="rank -1"):
        coordinate(-1, PP2_DP4_TP2)
    with pytest.raises(ValueError, match="no place on axis dp_shard"):
        rank_of((0, 4, 0), PP2_DP4_TP2)
    with pytest.raises(ValueError, match="no axis cp"):
        groups_of_axis(PP2_DP4_TP2, ["cp"])


def test_coordinates_of_manifests_are_those_of_the_mesh_however_its_ranks_are_numbered() -> None:
    """DeviceMesh("cpu", [[0, 2], [1, 3]]): rank 2 is at dp=0, tp=1."""
    told = {0: (0, 0), 1: (1, 0), 2: (0, 1), 3: (1, 1)}
    united, _ = unite([], 4)
    mesh, _, notes = infer_mesh(united, 4, [0, 1, 2, 3], None, Recorded([Axis("dp", 2), Axis("tp", 2)], {}, told))
    assert mesh.coordinates == told
    assert not notes
