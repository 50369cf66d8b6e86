"""Laws that hold for any model and mesh."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.collectives.cost import ALGORITHMS, logical_steps, seconds
from tracekit.collectives.semantics import sent_bytes as sent_of_operations
from tracekit.estimate import nccl
from tracekit.estimate.activations import Activations
from tracekit.estimate.estimate import chunk_activations, estimate, local_parameters
from tracekit.estimate.hardware import hardware
from tracekit.estimate.memory import rank_memory
from tracekit.estimate.parameters import Parameter, elements_of
from tracekit.estimate.pipeline import SCHEDULES
from tracekit.estimate.plan import STRATEGIES, Batch, MeshSizes, Plan, Strategy
from tracekit.estimate.recipe import RECIPES
from tracekit.estimate.shape import ModelShape, parameters
from tracekit.estimate.timeline import CATEGORIES
from tracekit.estimate.traffic import data_parallel, sent_bytes

SMALL = ModelShape(layers=4, hidden=64, heads=4, kv_heads=2, ffn=160, vocabulary=500, sequence=32, gated=True)
MOE = replace(SMALL, experts=8, top_k=2, expert_ffn=48, shared_experts=1, dense_layers=1)
H100 = hardware("h100")
SIZES = st.integers(1, 64)
BYTES = st.integers(0, 2**34)

parameter_lists = st.lists(
    st.tuples(st.sampled_from(["", "a", "b", "c"]), st.lists(st.integers(1, 40), max_size=3).map(tuple)), min_size=1, max_size=12
).map(lambda entries: [Parameter(f"p{i}.weight", shape, unit) for i, (unit, shape) in enumerate(entries)])


def mesh_for(strategy: str, ranks: int, replicas: int = 1) -> MeshSizes:
    return MeshSizes(dp_replicate=ranks) if strategy == "ddp" else MeshSizes(dp_shard=ranks, dp_replicate=replicas)


@given(st.sampled_from(sorted(ALGORITHMS)), st.data(), SIZES, SIZES, BYTES, BYTES)
def test_costs_grow_with_bytes_and_ranks(kind, data, x, y, s, t):
    algorithm = data.draw(st.sampled_from(ALGORITHMS[kind]))
    low, high = sorted((x, y))
    less, more = sorted((s, t))
    assert seconds(kind, algorithm, low, less, 1e-6, 1e-9) <= seconds(kind, algorithm, high, more, 1e-6, 1e-9) * (1 + 1e-12)
    assert sent_bytes(kind, less, low) <= sent_bytes(kind, more, low)


@given(SIZES, st.integers(0, 2**20))
def test_all_reduce_is_reduce_scatter_and_all_gather(x, shares):
    full = shares * x
    assert sent_bytes("all_reduce", full, x) == sent_bytes("reduce_scatter", full, x) + sent_bytes("all_gather", full, x)
    steps = [logical_steps(kind, "ring", x) for kind in ("all_reduce", "reduce_scatter", "all_gather")]
    assert steps[0] == steps[1] + steps[2]
    times = [seconds(kind, "ring", x, full, 1e-6, 1e-9) for kind in ("all_reduce", "reduce_scatter", "all_gather")]
    assert times[0] == pytest.approx(times[1] + times[2])


@pytest.mark.parametrize("kind", [kind for kind in ALGORITHMS if kind != "send"])
def test_a_group_of_one_costs_nothing(kind):
    assert sent_bytes(kind, 10**9, 1) == 0
    assert nccl.latency_us(kind, 1) == 0
    for algorithm in ALGORITHMS[kind]:
        assert seconds(kind, algorithm, 1, 10**9, 1e-6, 1e-9) == 0


@given(st.sampled_from([kind for kind in ALGORITHMS if kind != "send"]), SIZES, BYTES)
def test_sent_bytes_are_those_of_measured_operations(kind, x, full):
    import numpy as np

    measured = sent_of_operations(np.array([kind], object), np.array([full]), np.array([x]))
    assert sent_bytes(kind, full, x) == measured[0]


@given(st.sampled_from(["ring", "tree"]), st.sampled_from(nccl.PROTOCOLS), st.integers(2, 64), st.integers(2, 64))
def test_nccl_latency_grows_with_ranks(algorithm, protocol, x, y):
    low, high = sorted((x, y))
    assert nccl.latency_us("all_reduce", low, 1, algorithm, protocol) <= nccl.latency_us("all_reduce", high, 1, algorithm, protocol)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_sends_nothing(strategy):
    assert data_parallel(parameters(SMALL), Plan(strategy=Strategy(strategy))) == []


@given(parameter_lists, st.sampled_from(STRATEGIES[1:]), st.integers(1, 9), st.sampled_from(["fp32", "fsdp_bf16", "fsdp_bf16_fp32_reduce"]))
@settings(deadline=None)
def test_categories_are_whole_bytes_that_add_up(held, strategy, ranks, recipe):
    plan = Plan(mesh=mesh_for(strategy, ranks), strategy=Strategy(strategy), recipe=RECIPES[recipe])
    memory = rank_memory(held, [Activations({})], plan)
    for moment in memory.moments:
        assert list(moment.bytes) == list(CATEGORIES)
        assert all(isinstance(size, int) and size >= 0 for size in moment.bytes.values()), moment
        assert moment.total == sum(moment.bytes.values()) <= memory.peak.total
    assert memory.reserved >= memory.peak.total
    assert sum(memory.state.tensors) == memory.state.total
    assert {moment.phase for moment in memory.moments} == {"forward", "backward", "optimizer"}


@given(parameter_lists)
@settings(deadline=None)
def test_zero_3_on_one_rank_is_ddp_without_buckets(held):
    """Moment by moment: nothing is gathered, gradients come and stay whole."""
    zero = rank_memory(held, [Activations({})], Plan(strategy=Strategy("zero3"), recipe=RECIPES["fp32"]))
    ddp = rank_memory(held, [Activations({})], Plan(strategy=Strategy("ddp"), recipe=RECIPES["fp32"]))
    none = rank_memory(held, [Activations({})], Plan(strategy=Strategy("none"), recipe=RECIPES["fp32"]))
    assert [m.bytes for m in none.moments if m.phase == "optimizer"] == [m.bytes for m in zero.moments if m.phase == "optimizer"]
    buckets = elements_of(held) * 4
    for ours, theirs in zip(zero.moments, ddp.moments, strict=True):
        without = {**theirs.bytes, "communication_buffers": theirs.bytes["communication_buffers"] - buckets}
        assert {**ours.bytes, "allocator_rounding": 0} == {**without, "allocator_rounding": 0}


@given(parameter_lists, st.integers(2, 9), st.sampled_from(["fp32", "fsdp_bf16_fp32_reduce"]))
@settings(deadline=None)
def test_hsdp_with_one_replica_is_fsdp(held, ranks, recipe):
    plan = Plan(mesh=MeshSizes(dp_shard=ranks), recipe=RECIPES[recipe])
    hsdp = replace(plan, strategy=Strategy("hsdp"))
    assert rank_memory(held, [Activations({})], hsdp) == rank_memory(held, [Activations({})], plan)
    assert data_parallel(held, hsdp) == data_parallel(held, plan)


@given(parameter_lists, st.integers(1, 8), st.integers(2, 8))
@settings(deadline=None)
def test_replicas_of_hsdp_add_all_reduces_and_divide_nothing(held, ranks, replicas):
    one = Plan(mesh=MeshSizes(dp_shard=ranks), strategy=Strategy("hsdp"), recipe=RECIPES["fp32"])
    many = replace(one, mesh=MeshSizes(dp_shard=ranks, dp_replicate=replicas))
    assert rank_memory(held, [Activations({})], many).state == rank_memory(held, [Activations({})], one).state
    reduced = [row for row in data_parallel(held, many) if row.axis == "dp_replicate"]
    assert [row for row in data_parallel(held, many) if row.axis != "dp_replicate"] == data_parallel(held, one)
    assert all(row.kind == "all_reduce" and row.size == replicas for row in reduced)
    assert reduced


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize("shape", [SMALL, MOE], ids=["dense", "experts"])
def test_memory_grows_with_the_batch_and_shrinks_with_recomputation(strategy, shape):
    def peak(micro_batch: int, recompute: str = "none", attention: str = "flash") -> int:
        batch = Batch(micro_batch=micro_batch, recompute=recompute, attention=attention)
        return estimate(shape, Plan(mesh=mesh_for(strategy, 4), strategy=Strategy(strategy), batch=batch), H100).peak.peak_bytes

    peaks = [peak(micro_batch) for micro_batch in (1, 2, 4, 64)]
    assert peaks == sorted(peaks)
    assert peak(64, "full") < peak(64, "selective", "eager") < peak(64, "none", "eager")


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "fsdp1", "fsdp2"])
def test_model_state_shrinks_with_ranks(strategy):
    """Up to the padding of ranks that share less than there is to divide."""
    sizes = [
        rank_memory(parameters(SMALL), [Activations({})], Plan(mesh=MeshSizes(dp_shard=w), strategy=Strategy(strategy))).state.total
        for w in (1, 2, 4, 8)
    ]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_more_micro_batches_never_need_less(schedule):
    virtual = 2 if schedule == "interleaved_1f1b" else 1

    def peaks(m: int) -> list[int]:
        plan = Plan(mesh=MeshSizes(pp=2), batch=Batch(micro_batches=m), schedule=schedule, virtual_stages=virtual)
        return [role.peak_bytes for role in estimate(SMALL, plan, H100).roles]

    assert all(few <= many for few, many in zip(peaks(4), peaks(8), strict=True))


@pytest.mark.parametrize(
    ("mesh", "parts"),
    [
        (MeshSizes(pp=2), 1),
        (MeshSizes(pp=4), 1),
        (MeshSizes(tp=2), 2),
    ],
)
@pytest.mark.parametrize("shape", [SMALL, MOE, replace(SMALL, learned_positions=True, norm="layernorm", mlp_bias=True)])
def test_stages_and_shards_make_up_the_model(mesh, parts, shape):
    """Stages together hold every parameter once; tensor-parallel ranks divide matrices and share norms, routers and positions."""
    plan = Plan(mesh=mesh, recipe=RECIPES["fp32"])
    held = [p for stage in range(mesh.pp) for p in local_parameters(shape, plan, stage)]
    whole = parameters(shape)
    shared = [p for p in whole if p.tensor_dim is None]
    # experts are not divided over tensor-parallel ranks unless etp says so
    experts = sum(p.elements for p in held if p.experts)
    assert experts == sum(p.elements for p in whole if p.experts)
    divided = sum(p.elements for p in held if p.tensor_dim is not None and not p.experts)
    assert divided * parts == sum(p.elements for p in whole if p.tensor_dim is not None and not p.experts)
    assert sum(p.elements for p in held if p.tensor_dim is None) == elements_of(shared)


def test_expert_parallel_ranks_divide_experts_only():
    plan = Plan(mesh=MeshSizes(dp_shard=4, ep=4), recipe=RECIPES["fp32"])
    held, whole = local_parameters(MOE, plan, 0), parameters(MOE)
    assert 4 * sum(p.elements for p in held if p.experts) == sum(p.elements for p in whole if p.experts)
    assert [p for p in held if not p.experts] == [p for p in whole if not p.experts]


def test_roles_stand_for_all_stages():
    """Every stage is in one role, and none holds more than the role says; layers with and without experts are told apart."""
    shape = replace(MOE, layers=9, dense_layers=3)
    plan = Plan(mesh=MeshSizes(pp=4), batch=Batch(micro_batches=8))
    found = estimate(shape, plan, H100)
    assert sorted(stage for role in found.roles for stage in role.stages) == [0, 1, 2, 3]
    for role in found.roles:
        for stage in role.stages:
            memory = rank_memory(local_parameters(shape, plan, stage), chunk_activations(shape, plan, stage), plan, stage)
            assert memory.state == role.memory.state
            assert memory.peak.total <= role.peak_bytes
