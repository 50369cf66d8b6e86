"""What frameworks pad, and how DDP cuts its buckets. Figures marked (torch) are those of torch 2.13."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.errors import UsageError
from tracekit.estimate.allocator import block_bytes, reserved_bytes, rounding
from tracekit.estimate.buckets import MIB, assign, ddp_buckets
from tracekit.estimate.model_state import model_state
from tracekit.estimate.padding import (
    FRAMEWORKS,
    Rules,
    deepspeed_padded,
    fsdp1_local,
    fsdp1_padded,
    fsdp1_starts,
    fsdp2_local,
    fsdp2_padded,
    local_state,
    megatron_padded,
    padded,
    torch_zero_partition,
)
from tracekit.estimate.parameters import Parameter, elements_of
from tracekit.estimate.plan import MeshSizes, Plan, Strategy
from tracekit.estimate.recipe import RECIPES
from tracekit.estimate.units import units_of


def made(*shapes: tuple[int, ...]) -> list[Parameter]:
    return [Parameter(f"p{i}", shape) for i, shape in enumerate(shapes)]


lists = st.lists(st.lists(st.integers(1, 50), max_size=3).map(tuple), min_size=1, max_size=8).map(lambda shapes: made(*shapes))


@pytest.mark.parametrize(("rank", "rows", "stored", "state"), [(0, 2, 128, 128), (4, 2, 128, 128), (5, 0, 128, 0), (7, 0, 128, 0)])
def test_fsdp2_stores_as_many_rows_on_ranks_that_have_none(rank, rows, stored, state):
    """(torch) A parameter of shape (10, 16) over 8 ranks: 128 bytes of storage and of gradient on each, Adam's state only for real rows."""
    parameter = Parameter("p", (10, 16))
    assert fsdp2_local(parameter, 8, rank) == rows * 16
    assert fsdp2_padded(parameter, 8) // 8 * 4 == stored
    plan = Plan(mesh=MeshSizes(dp_shard=8), recipe=RECIPES["fp32"])
    found = model_state(units_of([parameter], plan, rank), plan, [parameter])
    assert (found.parameters, found.gradients, found.optimizer_state) == (stored, stored, 2 * state)


def test_fsdp2_divides_stacked_experts_fewer_than_ranks_by_their_rows():
    experts = Parameter("experts", (2, 30, 7), experts=2, role="expert")
    assert fsdp2_padded(experts, 2) == 2 * 30 * 7
    assert fsdp2_padded(experts, 4) == 4 * 8 * 14  # 30 rows in parts of 8, 2 x 7 elements each


def test_fsdp1_starts_every_parameter_at_16_bytes():
    """(torch) Parameters of 3, 5 and 4 elements line up at 4 (fp32) or 8 (bf16); without use_orig_params only the end is padded."""
    parameters = made((3,), (5,), (4,))
    assert fsdp1_starts(parameters, 4, True) == ([0, 4, 12], 16)
    assert fsdp1_starts(parameters, 2, True) == ([0, 8, 16], 20)
    assert fsdp1_starts(parameters, 4, False) == ([0, 3, 8], 12)
    assert fsdp1_padded(parameters, 8, 4, False) == 16
    assert [fsdp1_local(parameters, 8, 4, True, rank) for rank in range(8)] == [2, 1, 2, 2, 1, 0, 2, 2]


def test_deepspeed_and_megatron():
    parameters = made((10,), (7,))
    assert deepspeed_padded(parameters, 4, 3) == 12 + 8
    assert deepspeed_padded(parameters, 4, 1) == 24  # 17 in a row, to a multiple of 8
    assert megatron_padded(parameters, 4) == 128  # 7, then 10 from 64 on; the end at a multiple of lcm(4, 128)
    assert megatron_padded(parameters, 3, 5) == 2 * 384  # a bucket each: lcm(3, 128)


def test_torch_zero_gives_the_largest_first_to_the_emptiest_rank():
    parts = torch_zero_partition(made((2,), (9,), (4,), (5,)), 2)
    assert [[p.elements for p in part] for part in parts] == [[9, 2], [5, 4]]


@given(lists, st.integers(1, 16), st.sampled_from(FRAMEWORKS))
def test_shards_hold_every_element_once(parameters, w, framework):
    rules = Rules(framework)
    whole = elements_of(parameters)
    assert padded(rules, parameters, w) >= whole
    state = sum(local_state(rules, parameters, w, rank) for rank in range(w))
    exact = framework in ("torch_fsdp1", "torch_fsdp2", "torch_zero")
    assert state == whole if exact else state >= whole


def test_an_unknown_framework_is_refused():
    with pytest.raises(UsageError, match="no padding rules of 'horovod'; choose one of torch_fsdp2"):
        Rules("horovod")


def mib(buckets) -> list[float]:
    return [bucket.bytes / MIB for bucket in buckets]


@pytest.mark.parametrize(
    ("options", "first", "later"),
    [
        # (torch) forty gradients of 1 MiB: sizes as seen by a communication hook
        ({}, [40], [1, 25, 14]),
        ({"bucket_cap_mb": 25}, [40], [25, 15]),
        ({"bucket_cap_mb": 10}, [40], [10, 10, 10, 10]),
        ({"find_unused_parameters": True}, [14, 25, 1], [14, 25, 1]),
    ],
)
def test_ddp_buckets(options, first, later):
    parameters = made(*[(MIB // 4,)] * 40)
    assert mib(ddp_buckets(parameters, first_iteration=True, **options)) == first
    buckets = ddp_buckets(parameters, **options)
    assert mib(buckets) == later
    order = [name for bucket in buckets for name in bucket.names]
    assert sorted(order) == sorted(p.name for p in parameters)
    assert buckets[0].names[0] == ("p39" if "find_unused_parameters" not in options else "p26")


def test_element_sizes_never_share_a_bucket():
    """(torch) compute_bucket_assignment_by_size of forty gradients of 2^18 elements, every third in bf16, limits 1 and 4 MiB."""
    parameters = [Parameter(str(i), (2**18,), element_bytes=2 if i % 3 == 0 else 4) for i in range(40)]
    found = [[int(name) for name in bucket.names] for bucket in assign(parameters, [MIB, 4 * MIB])]
    assert found[:5] == [[0, 3], [1], [2, 4, 5, 7], [6, 9, 12, 15, 18, 21, 24, 27], [8, 10, 11, 13]]
    assert found[-3:] == [[30, 33, 36, 39], [32, 34, 35, 37], [38]]


def test_frozen_parameters_have_no_bucket():
    frozen = [Parameter("a", (4,), trainable=False), Parameter("b", (4,))]
    assert [bucket.names for bucket in ddp_buckets(frozen)] == [("b",)]


def test_buckets_cost_memory_unless_gradients_are_views():
    def state(view: bool):
        plan = Plan(strategy=Strategy("ddp", gradient_as_bucket_view=view), recipe=RECIPES["fp32"])
        parameters = made((10, 10))
        return model_state(units_of(parameters, plan), plan, parameters)

    assert (state(False).buckets, state(True).buckets) == (400, 0)
    assert state(False).gradients == state(True).gradients == 400


def test_allocator_rounds_to_blocks_and_segments():
    assert [block_bytes(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert rounding([1, 512, 700]) == 511 + 0 + 324
    assert reserved_bytes([100, 1000]) == 2 * MIB  # both from one small segment
    assert reserved_bytes([MIB, MIB, 1]) == 4 * MIB
    assert reserved_bytes([2 * MIB] * 10) == 20 * MIB
    assert reserved_bytes([11 * MIB]) == 12 * MIB
    assert reserved_bytes([]) == 0
