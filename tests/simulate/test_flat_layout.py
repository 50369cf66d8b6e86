"""FSDP1's flat parameter: intervals, cuts, padding, views."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulate.shapes import WORLDS, parameters
from tracekit.simulate.data_parallel.layouts import ParameterShape, flat_layout, intervals

TWO_LINEAR = [ParameterShape("W1", (2, 3)), ParameterShape("b1", (2,)), ParameterShape("W2", (2, 2)), ParameterShape("b2", (2,))]


def labels(layout):
    return [[segment.label for segment in segments] for segments in layout.segments]


def test_two_linear_layers_are_cut_inside_the_first_bias():
    assert [(i.parameter.name, i.begin, i.end) for i in intervals(TWO_LINEAR, 2)] == [
        ("W1", 0, 6),
        ("b1", 6, 8),
        ("W2", 8, 12),
        ("b2", 12, 14),
    ]
    layout = flat_layout("model", TWO_LINEAR, 2)
    assert layout.shard_elements == 7
    assert labels(layout) == [["W1", "b1[0:1]"], ["b1[1:2]", "W2", "b2"]]
    assert [segment.offset for segment in layout.segments[1]] == [0, 1, 5]


def test_what_is_missing_at_the_end_is_padding_also_on_whole_ranks():
    layout = flat_layout("u", [ParameterShape("w", (5,))], 4)  # 2 a rank: 2, 2, 1 + 1 padding, 2 padding
    assert labels(layout) == [["w[0:2]"], ["w[2:4]"], ["w[4:5]", "padding"], ["padding"]]
    assert [layout.state_mask(rank).sum() for rank in range(4)] == [2, 2, 2, 2], "the optimizer sees one parameter, padding included"


def test_aligned_parameters_begin_at_16_bytes():
    """6 float32 elements end at byte 24: the next begins at 32."""
    aligned = intervals(TWO_LINEAR, 2, aligned_elements=4)
    assert [(i.parameter.name if i.parameter else None, i.begin, i.end) for i in aligned] == [
        ("W1", 0, 6),
        (None, 6, 8),
        ("b1", 8, 10),
        (None, 10, 12),
        ("W2", 12, 16),
        ("b2", 16, 18),
    ]
    layout = flat_layout("model", TWO_LINEAR, 2, aligned_elements=4)
    assert labels(layout) == [["W1", "padding", "b1[0:1]"], ["b1[1:2]", "padding", "W2", "b2"]]
    assert [layout.state_mask(rank).sum() for rank in range(2)] == [7, 7], "no state for padding: the optimizer sees the views"


@pytest.mark.parametrize(
    ("world", "aligned", "shards"),
    [(2, 0, [12, 15, 25, 12]), (2, 4, [12, 15, 26, 14]), (5, 0, [5, 6, 10, 5]), (5, 4, [5, 6, 11, 6])],
)
def test_shard_lengths_are_those_of_torch(world, aligned, shards):
    """Linear layers 5-4-6-7-3 in float32, each a unit of FullyShardedDataParallel (torch 2.13, gloo)."""
    units = [[ParameterShape("w", (out, into)), ParameterShape("b", (out,))] for out, into in ((4, 5), (6, 4), (7, 6), (3, 7))]
    assert [flat_layout("u", unit, world, aligned).shard_elements for unit in units] == shards


def test_a_part_of_a_matrix_is_named_by_elements_row_by_row():
    assert labels(flat_layout("u", [ParameterShape("W", (2, 3))], 3)) == [["flat(W)[0:2]"], ["flat(W)[2:4]"], ["flat(W)[4:6]"]]


def test_views_share_the_memory_of_the_flat_parameter():
    layout = flat_layout("model", TWO_LINEAR, 2)
    flat = np.arange(14.0)
    views = layout.views(flat)
    assert views["W1"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert views["b1"].tolist() == [6, 7]
    flat[7] = -1
    assert views["b1"].tolist() == [6, -1]


@given(parameters(), WORLDS, st.sampled_from([0, 1, 2, 4, 8]))
def test_shards_of_any_parameters(shapes, world, aligned):
    layout = flat_layout("u", shapes, world, aligned)
    end = 0
    for parameter in shapes:
        end = (-(-end // aligned) * aligned if aligned else end) + parameter.elements
    assert layout.shard_elements == -(-end // world)
    covered = {parameter.name: [] for parameter in shapes}
    for segments in layout.segments:
        at = 0
        for segment in segments:
            assert segment.offset == at
            at += segment.elements
            if segment.parameter is not None:
                covered[segment.parameter] += range(segment.begin, segment.end)
        assert at == layout.shard_elements
    assert covered == {parameter.name: list(range(parameter.elements)) for parameter in shapes}, "every element once, in order"


@given(parameters(), WORLDS, st.sampled_from([0, 4]), st.integers(0, 2**32 - 1))
def test_shards_joined_are_the_parameters(shapes, world, aligned, seed):
    layout = flat_layout("u", shapes, world, aligned)
    rng = np.random.default_rng(seed)
    full = {parameter.name: rng.standard_normal(parameter.shape) for parameter in shapes}
    shards = layout.split(full)
    assert {shard.shape for shard in shards} == {(layout.shard_elements,)}
    packed = np.concatenate(shards)
    for found in (layout.unpack(packed), layout.views(layout.arrange(packed))):
        assert list(found) == list(full)
        for name, value in full.items():
            assert np.array_equal(found[name], value) and found[name].shape == value.shape
    assert np.abs(packed).sum() == pytest.approx(sum(np.abs(value).sum() for value in full.values())), "padding is 0"
