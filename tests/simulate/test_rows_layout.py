"""FSDP2's shards of single parameters: rows, empty ranks, offsets, padding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulate.shapes import WORLDS, parameters
from tracekit.errors import UsageError
from tracekit.simulate.data_parallel.layouts import ParameterShape, rows_layout, rows_of_rank


def labels(layout):
    return [[segment.label for segment in segments] for segments in layout.segments]


def test_two_linear_layers_are_cut_row_by_row():
    parameters = [ParameterShape("W1", (2, 3)), ParameterShape("b1", (2,)), ParameterShape("W2", (2, 2)), ParameterShape("b2", (2,))]
    layout = rows_layout("model", parameters, 2)
    assert layout.shard_elements == 7
    assert labels(layout) == [["W1[0:1]", "b1[0:1]", "W2[0:1]", "b2[0:1]"], ["W1[1:2]", "b1[1:2]", "W2[1:2]", "b2[1:2]"]]
    assert [segment.offset for segment in layout.segments[0]] == [0, 3, 4, 6]


def test_the_last_ranks_may_have_no_row_and_store_padding():
    """Shape (10, 16) on 8 ranks: 2 rows a rank, rank 5 and later none, but everybody stores 2 rows."""
    layout = rows_layout("u", [ParameterShape("w", (10, 16))], 8)
    assert [rows_of_rank(10, 8, rank) for rank in range(8)] == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 10), (10, 10), (10, 10)]
    assert layout.shard_elements == 32
    assert labels(layout)[7] == ["padding"]
    assert [int(layout.state_mask(rank).sum()) for rank in (0, 7)] == [32, 0]


@pytest.mark.parametrize(("world", "gathered"), [(2, [24, 30, 56, 32]), (5, [30, 50, 70, 40])])
def test_gathered_sizes_are_those_of_torch(world, gathered):
    """Linear layers 5-4-6-7-3, each a unit of fully_shard (torch 2.13, gloo): outputs of the all-gathers."""
    units = [[ParameterShape("w", (out, into)), ParameterShape("b", (out,))] for out, into in ((4, 5), (6, 4), (7, 6), (3, 7))]
    assert [rows_layout("u", unit, world).padded_elements for unit in units] == gathered


def test_a_scalar_is_refused():
    with pytest.raises(UsageError, match="scale is a scalar"):
        rows_layout("u", [ParameterShape("scale", ())], 2)


@given(st.integers(0, 100), st.integers(1, 16))
def test_rows_are_shared_without_gap(rows, world):
    cuts = [rows_of_rank(rows, world, rank) for rank in range(world)]
    assert [row for begin, end in cuts for row in range(begin, end)] == list(range(rows))
    assert max(end - begin for begin, end in cuts) == -(-rows // world)


@given(parameters(scalars=False), WORLDS, st.integers(0, 2**32 - 1))
def test_shards_of_any_parameters(shapes, world, seed):
    layout = rows_layout("u", shapes, world)
    assert layout.shard_elements == sum(-(-p.shape[0] // world) * int(np.prod(p.shape[1:], dtype=int)) for p in shapes)
    covered = {parameter.name: [] for parameter in shapes}
    for segments in layout.segments:
        at = 0
        for segment in segments:
            assert segment.offset == at
            at += segment.elements
            if segment.parameter is not None:
                covered[segment.parameter] += range(segment.begin, segment.end)
        assert at == layout.shard_elements
    assert covered == {parameter.name: list(range(parameter.elements)) for parameter in shapes}
    rng = np.random.default_rng(seed)
    full = {parameter.name: rng.standard_normal(parameter.shape) for parameter in shapes}
    packed = np.concatenate(layout.split(full))
    stored = layout.arrange(packed)
    assert stored.size == layout.padded_elements
    for found in (layout.unpack(packed), layout.views(stored)):
        for name, value in full.items():
            assert np.array_equal(found[name], value) and found[name].shape == value.shape
