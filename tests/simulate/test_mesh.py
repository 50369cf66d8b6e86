"""``simulate mesh``: coordinates and groups of any mesh, and the walk of a micro-batch."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.errors import UsageError
from tracekit.simulate.mesh import Arguments, run


def _table(experiment, title):
    return next(table.frame for table in experiment.tables if table.title.startswith(title))


def test_rank_5_of_sixteen():
    experiment = run(Arguments(mesh="pp=2,dp_shard=4,tp=2", rank=5))
    assert experiment.verdict == "16 ranks; rank 5 = (0, 2, 1), in groups pp [5, 13], dp_shard [1, 3, 5, 7], tp [4, 5]"
    own = _table(experiment, "Rank 5")
    assert own.to_dict("list") == {
        "axis": ["pp", "dp_shard", "tp"],
        "place": [0, 2, 1],
        "group": ["[5, 13]", "[1, 3, 5, 7]", "[4, 5]"],
        "crosses": [True, False, False],
    }
    axes = _table(experiment, "Axes")
    assert axes["stride"].tolist() == [8, 2, 1]
    assert axes["groups"].tolist() == [8, 4, 8]
    assert axes["crossing"].tolist() == [8, 0, 0]
    assert experiment.holds


def test_walk_of_the_micro_batch_of_rank_5():
    walk = _table(run(Arguments()), "Walk")
    rows = [(r.phase, r.stage, r.kind, r.axis, r.groups) for r in walk.itertuples()]
    assert rows[:4] == [
        ("forward", 0, "all_gather", "dp_shard", "[0, 2, 4, 6], [1, 3, 5, 7]"),
        ("forward", 0, "all_reduce", "tp", "[4, 5]"),
        ("forward", 0, "send", "pp", "4 -> 12, 5 -> 13"),
        ("forward", 1, "all_gather", "dp_shard", "[8, 10, 12, 14], [9, 11, 13, 15]"),
    ]
    assert rows[-1] == ("backward", 0, "reduce_scatter", "dp_shard", "[0, 2, 4, 6], [1, 3, 5, 7]")
    assert walk[walk["crosses"]]["kind"].unique().tolist() == ["send"]


@pytest.mark.parametrize(
    ("mesh", "kinds"),
    [
        ("dp_shard=4,cp=2,tp=4", {"all_gather", "reduce_scatter", "all_reduce"}),
        ("pp=2,dp_replicate=2,dp_shard=2,ep=4,tp=2", {"send", "recv", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"}),
        ("dp=4", {"all_reduce"}),
        ("pp=3,cp=3", {"send", "recv", "all_gather", "reduce_scatter"}),
    ],
)
def test_meshes_with_context_and_experts_walk_through_all_their_groups(mesh, kinds):
    ranks = range(math.prod(int(part.split("=")[1]) for part in mesh.split(",")))
    seen = {call.kind for rank in (ranks[0], ranks[-1]) for call in run(Arguments(mesh=mesh, rank=rank, tokens=13, hidden=5)).calls}
    assert seen == kinds


_MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda sizes: math.prod(sizes) <= 64)


@settings(max_examples=40, deadline=None)
@given(sizes=_MESHES, names=st.permutations(["pp", "dp_shard", "cp", "tp", "ep", "dp_replicate"]), data=st.data())
def test_any_mesh_holds_its_checks(sizes, names, data):
    rank = data.draw(st.integers(0, math.prod(sizes) - 1))
    mesh = ",".join(f"{name}={size}" for name, size in zip(names, sizes, strict=False))
    experiment = run(Arguments(mesh=mesh, rank=rank, tokens=data.draw(st.integers(1, 9)), hidden=3))
    assert [check for check in experiment.checks if not check.holds] == []
    coordinates = _table(experiment, "Coordinates")
    expected = np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes), axis=1)
    np.testing.assert_array_equal(coordinates[names[: len(sizes)]].to_numpy(), expected)


def test_large_meshes_have_tables_without_a_walk():
    experiment = run(Arguments(mesh="pp=8,dp_shard=64,tp=8", rank=4095))
    assert experiment.holds
    assert experiment.moments == ()
    assert any("up to 128 ranks" in note for note in experiment.notes)


def test_an_axis_without_a_known_strategy_is_said():
    assert any("no strategy" in note.lower() for note in run(Arguments(mesh="rows=2,columns=2", rank=0)).notes)


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"mesh": "pp"}, "'pp' is not NAME=SIZE"),
        ({"mesh": "pp=2,dp=-1"}, "leaves the size of dp open"),
        ({"mesh": "tp=2,tp=2"}, "names axis tp twice"),
        ({"mesh": "dp=5000", "rank": 0}, "5000 ranks; give at most 4096"),
        ({"rank": 16}, "--rank 16 is not one of 16 ranks"),
        ({"gpus_per_node": 0}, "--gpus-per-node 0"),
        ({"tokens": 0}, "--tokens 0"),
    ],
)
def test_what_is_no_mesh_is_refused(chosen, words):
    with pytest.raises(UsageError, match=words):
        run(Arguments(**chosen))
