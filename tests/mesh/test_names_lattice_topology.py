"""Names of axes, shapes of rank lists, and nodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.mesh.made import along
from tracekit.errors import UsageError
from tracekit.mesh.lattice import Span, spans
from tracekit.mesh.mesh import Axis
from tracekit.mesh.names import axis_of_description, is_overlay, parts
from tracekit.mesh.process_groups import ProcessGroup
from tracekit.mesh.topology import nodes, spans_nodes


@pytest.mark.parametrize(
    ("description", "axis"),
    [
        ("mesh_tp", "tp"),
        ("mesh_dp_shard_cp", "dp_shard_cp"),
        ("mesh_dim_0", "dim_0"),
        ("mesh_my_axis", "my_axis"),
        ("dp_shard_mod_ep", "dp_shard_mod_ep"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("DATA_PARALLEL_GROUP_WITH_CP_GLOO", "dp_cp"),
        ("DATA_PARALLEL_GROUP_WITH_CP_AG", "dp_cp"),
        ("HYBRID_DP_CP_GROUP_4", "dp_cp"),
        ("EXPERT_TENSOR_PARALLEL_GROUP", "etp"),
        ("EXPERT_DATA_PARALLEL_GROUP_GLOO", "edp"),
        ("DATA_MODULO_EXPERT_PARALLEL_GROUP", "edp"),
        ("INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "dp_shard_cp"),
        ("MODEL_PARALLEL_GROUP", "tp_pp"),
        ("EMBEDDING_GROUP", "embedding"),
        ("HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L1", "cp_l1"),
        ("HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_GLOO_L0", "edp_l0"),
        ("tp", "tp"),
        ("tp:0", "tp"),
        ("fsdp_pg", "fsdp"),
        ("expert_group", "ep"),
        ("tensor parallel group", "tp"),
        ("pipeline-parallel", "pp"),
        ("", ""),
        ("undefined", ""),
        ("default_pg", ""),
        ("data", ""),
        ("checkpointing group", ""),
        ("mesh_", ""),
        ("mesh_" + "x" * 1000, ""),
    ],
)
def test_axis_of_description(description: str, axis: str) -> None:
    assert axis_of_description(description) == axis


def test_parts_of_a_flattened_name() -> None:
    assert parts("dp_shard_cp") == ("dp_shard", "cp")
    assert parts("dp_replicate") == ("dp_replicate",)
    assert parts("my_cp") == ("my_cp",)
    names = ("tp", "dp_shard", "my_axis", "dp_cp", "ep", "loss", "cp_l0")
    assert [name for name in names if is_overlay(name)] == ["dp_cp", "ep", "loss", "cp_l0"]


@pytest.mark.parametrize(
    ("ranks", "shape"),
    [
        ([5], ()),
        ([0, 1, 2, 3], (Span(1, 4),)),
        ([1, 3, 5, 7], (Span(2, 8),)),
        ([7, 3, 5, 1], (Span(2, 8),)),
        ([0, 1, 8, 9], (Span(1, 2), Span(8, 16))),
        ([], None),
        ([1, 2], None),  # no mesh over ranks 0, 1, 2, ... has it
        ([0, 1, 3], None),
        ([0, 1, 2, 4], None),
        ([0, 2, 4, 5, 7, 9], None),
        ([3, 3], None),
        ([0, 10**9], (Span(10**9, 2 * 10**9),)),
    ],
)
def test_spans(ranks: list[int], shape: tuple[Span, ...] | None) -> None:
    assert spans(ranks) == shape


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_spans_of_every_group_of_a_mesh_cover_its_axes(sizes: list[int], data: st.DataObject) -> None:
    axes = [Axis(str(i), size) for i, size in enumerate(sizes)]
    chosen = data.draw(st.sets(st.sampled_from([a.name for a in axes])))
    shapes = {spans(group) for group in along(axes, sorted(chosen))}
    assert len(shapes) == 1  # all groups of an axis have one shape
    shape = shapes.pop()
    assert shape is not None
    built = {sum(int(p) * s.low for p, s in zip(place, shape, strict=True)) for place in np.ndindex(*(s.size for s in shape))}
    assert built == set(along(axes, sorted(chosen))[0])


def group(ranks: tuple[int, ...] | None, known: tuple[int, ...] = ()) -> ProcessGroup:
    return ProcessGroup("0", "0", "", ranks, known, len(ranks or ()))


def test_nodes_by_the_users_number() -> None:
    node_of = nodes({0: "a"}, 6, 4)
    assert node_of == {0: "node 0", 1: "node 0", 2: "node 0", 3: "node 0", 4: "node 1", 5: "node 1"}
    assert spans_nodes(group((0, 3)), node_of) is False
    assert spans_nodes(group((3, 4)), node_of) is True
    assert spans_nodes(group((3, 9)), node_of) is None


def test_nodes_by_host_names() -> None:
    assert nodes({}, 4, None) is None
    assert nodes({0: "", 1: ""}, 4, None) is None
    node_of = nodes({0: "a", 1: "a", 2: "b", 3: ""}, 4, None)
    assert node_of == {0: "a", 1: "a", 2: "b"}
    assert spans_nodes(group((0, 1)), node_of) is False
    assert spans_nodes(group((1, 2)), node_of) is True
    assert spans_nodes(group((2, 3)), node_of) is None  # the host of rank 3 is not known
    assert spans_nodes(group(None, (0, 1)), node_of) is None  # nor is who else is in the group
    assert spans_nodes(group(None, (1, 2)), node_of) is True
    assert spans_nodes(group((0, 1)), None) is None
    assert spans_nodes(group((3,)), node_of) is False  # one rank is on one node, whichever


def test_a_number_of_gpus_that_is_none() -> None:
    with pytest.raises(UsageError, match="gpus-per-node 0"):
        nodes({}, 4, 0)
