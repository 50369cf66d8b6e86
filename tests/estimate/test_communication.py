"""Calls and bytes of a step by axis and purpose, on models small enough to count by hand."""

from dataclasses import replace

import pytest

from tracekit.errors import UsageError
from tracekit.estimate import nccl
from tracekit.estimate.communication import model_parallel
from tracekit.estimate.estimate import estimate, local_parameters
from tracekit.estimate.hardware import HARDWARE, exchange_gb_s, hardware, path_of
from tracekit.estimate.parameters import Parameter
from tracekit.estimate.plan import IMPLEMENTATIONS, Batch, Implementation, MeshSizes, Plan, Strategy
from tracekit.estimate.recipe import RECIPES
from tracekit.estimate.shape import ModelShape
from tracekit.estimate.time import collective_seconds
from tracekit.estimate.traffic import Traffic, axis_name, data_parallel, sent_bytes

SHAPE = ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, ffn=160, vocabulary=500, sequence=32, gated=True)
MOE = replace(SHAPE, experts=8, top_k=2, expert_ffn=48)
N = 8 * 100
UNITS = [Parameter(f"l{i}.weight", (8, 100), f"l{i}") for i in range(6)]
ROOT = Parameter("embedding.weight", (8, 100), role="embedding")


def counted(rows: list[Traffic]) -> dict[tuple[str, str, str], tuple[int, int]]:
    """(axis, kind, phase) -> (calls, full bytes of all of them)."""
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for row in rows:
        key = (row.axis, row.kind, row.phase)
        calls, full = found.get(key, (0, 0))
        found[key] = (calls + row.calls, full + row.calls * row.full_bytes)
    return found


def sharded(parameters, implementation=IMPLEMENTATIONS["torch"], recipe="fsdp_bf16_fp32_reduce", mesh=None, micro_batches=1, **strategy):
    plan = Plan(
        mesh=mesh or MeshSizes(dp_shard=8),
        strategy=Strategy(**{"name": "fsdp2", **strategy}),
        recipe=RECIPES[recipe],
        batch=Batch(micro_batches=micro_batches),
        implementation=implementation,
    )
    return counted(data_parallel(parameters, plan))


def test_fsdp_gathers_twice_and_scatters_once():
    """6 units: 12 all-gathers, 6 reduce-scatters."""
    assert sharded(UNITS) == {
        ("dp_shard", "all_gather", "forward"): (6, 6 * 2 * N),
        ("dp_shard", "all_gather", "backward"): (6, 6 * 2 * N),
        ("dp_shard", "reduce_scatter", "backward"): (6, 6 * 4 * N),
    }


def test_a_root_that_stays_gathered_is_gathered_once():
    """5 units and the root: 11 all-gathers, 6 reduce-scatters; 12 where the root is resharded too."""
    found = sharded([ROOT, *UNITS[:5]])
    assert [found["dp_shard", "all_gather", phase][0] for phase in ("forward", "backward")] == [6, 5]
    assert found["dp_shard", "reduce_scatter", "backward"][0] == 6
    assert sharded([ROOT, *UNITS[:5]], Implementation(root_reshards=True))["dp_shard", "all_gather", "backward"][0] == 6


def test_no_reshard_after_forward_gathers_once():
    found = sharded(UNITS, reshard_after_forward=False)
    assert ("dp_shard", "all_gather", "backward") not in found
    assert found["dp_shard", "all_gather", "forward"][0] == found["dp_shard", "reduce_scatter", "backward"][0] == 6


def test_reshard_to_a_smaller_group_gathers_from_it_in_backward():
    plan = Plan(mesh=MeshSizes(dp_shard=8), strategy=Strategy("fsdp2", reshard_after_forward=4))
    sizes = {row.phase: row.size for row in data_parallel(UNITS, plan) if row.kind == "all_gather"}
    assert sizes == {"forward": 8, "backward": 4}


def test_accumulation_repeats_gathers_and_reduces_each_time_unless_told_otherwise():
    each = sharded(UNITS, micro_batches=4)
    assert {key[1:]: calls for key, (calls, _) in each.items()} == {
        ("all_gather", "forward"): 24, ("all_gather", "backward"): 24, ("reduce_scatter", "backward"): 24,
    }  # fmt: skip
    once = sharded(UNITS, micro_batches=4, sync_every_micro_batch=False)
    assert once["dp_shard", "reduce_scatter", "backward"][0] == 6


def test_hsdp_reduces_shards_over_replicas():
    found = sharded(UNITS, name="hsdp", mesh=MeshSizes(dp_replicate=2, dp_shard=4))
    assert found["dp_replicate", "all_reduce", "backward"] == (6, 6 * 4 * N // 4)
    assert found["dp_shard", "all_gather", "forward"] == (6, 6 * 2 * N)


def test_padding_travels():
    """d0 = 10 over 8 ranks is 16 rows on the wire."""
    found = sharded([Parameter("p", (10, 16), "u")], recipe="fp32")
    assert found["dp_shard", "all_gather", "forward"] == (1, 16 * 16 * 4)


def test_ddp_reduces_its_buckets():
    forty = [Parameter(f"p{i}", (2**18,)) for i in range(40)]
    plan = Plan(mesh=MeshSizes(dp_replicate=4), strategy=Strategy("ddp"), recipe=RECIPES["fp32"], batch=Batch(micro_batches=3))
    rows = data_parallel(forty, plan)
    assert [(row.kind, row.calls, row.full_bytes // 2**20) for row in rows] == [("all_reduce", 1, size) for size in (1, 25, 14)]
    assert sum(row.sent_bytes for row in rows) == 2 * 3 * 40 * 2**20 // 4
    every = replace(plan, strategy=Strategy("ddp", sync_every_micro_batch=True))
    assert [row.calls for row in data_parallel(forty, every)] == [3, 3, 3]


@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_zero_sends_what_ddp_sends(stage):
    """Reduce-scatter of gradients + all-gather of parameters = 2 F(W) S; DeepSpeed's whole all-reduce sends half as much again."""
    mesh, recipe = MeshSizes(dp_shard=4), RECIPES["fp32"]
    parameters = [Parameter(f"p{i}", (2**20,)) for i in range(8)]

    def sent(name: str, **habits: bool) -> int:
        sizes = MeshSizes(dp_replicate=4) if name == "ddp" else mesh
        plan = Plan(mesh=sizes, strategy=Strategy(name), recipe=recipe, implementation=Implementation(**habits))
        return sum(row.sent_bytes for row in data_parallel(parameters, plan))

    assert sent(stage) == sent("ddp")
    assert sent(stage, deepspeed_allreduce=True) == sent("ddp") * 3 // 2


def test_zero_3_sends_half_as_much_again_as_ddp():
    """ZeRO, arXiv:1910.02054, section 7.2.2: two all-gathers and one reduce-scatter."""
    parameters = [Parameter(f"p{i}", (2**20,), f"u{i}") for i in range(8)]
    three = Plan(mesh=MeshSizes(dp_shard=4), strategy=Strategy("zero3"), recipe=RECIPES["fp32"])
    ddp = Plan(mesh=MeshSizes(dp_replicate=4), strategy=Strategy("ddp"), recipe=RECIPES["fp32"])
    sent = [sum(row.sent_bytes for row in data_parallel(parameters, plan)) for plan in (three, ddp)]
    assert sent[0] == sent[1] * 3 // 2


def parallel(shape: ModelShape, plan: Plan, stage: int = 0) -> list[Traffic]:
    return model_parallel(shape, plan, range(shape.layers), stage, local_parameters(shape, plan, stage))


def test_tensor_parallel():
    """2 all-reduces a layer and pass of T h elements; embedding forward, head backward; the loss 3 of one number a token."""
    plan = Plan(mesh=MeshSizes(tp=2), recipe=RECIPES["bf16"], batch=Batch(micro_batch=3, micro_batches=2))
    t = 3 * 32
    assert {(row.purpose, row.phase): (row.calls, row.full_bytes) for row in parallel(SHAPE, plan)} == {
        ("tensor_parallel", "forward"): ((2 * 2 + 1) * 2, t * 64 * 2),
        ("tensor_parallel", "backward"): ((2 * 2 + 1) * 2, t * 64 * 2),
        ("loss", "forward"): (3 * 2, t * 4),
    }


def test_sequence_parallel_sends_the_same_bytes():
    """4 all-gathers and 4 reduce-scatters a layer for 4 all-reduces; gathering inputs again adds 2 all-gathers."""
    inner = range(SHAPE.layers)
    plan = Plan(mesh=MeshSizes(pp=1, tp=4), recipe=RECIPES["bf16"])
    plain = [row for row in model_parallel(SHAPE, plan, inner, 5, []) if row.purpose == "tensor_parallel"]  # a stage without ends
    kept = replace(plan, sequence_parallel=True, implementation=Implementation(regather_inputs=False))
    rows = model_parallel(SHAPE, kept, inner, 5, [])
    assert sum(row.sent_bytes for row in rows) == sum(row.sent_bytes for row in plain)
    assert {(row.kind, row.phase): row.calls for row in rows} == {
        ("all_gather", "forward"): 4, ("all_gather", "backward"): 4, ("reduce_scatter", "forward"): 4, ("reduce_scatter", "backward"): 4,
    }  # fmt: skip
    again = model_parallel(SHAPE, replace(kept, implementation=Implementation()), inner, 5, [])
    assert sum(row.calls for row in again) - sum(row.calls for row in rows) == 2 * SHAPE.layers


@pytest.mark.parametrize("way", ["ring", "allgather", "ulysses"])
def test_context_parallel(way):
    """Keys and values of 2 x 2 heads of 16 for 32 tokens in bf16, over 4 ranks (arXiv:2310.01889; arXiv:2309.14509), 2 layers.

    Their gradients are summed in fp32. Ulysses repeats 2 heads of keys and values for 4 ranks.
    """
    plan = Plan(mesh=MeshSizes(cp=4), recipe=RECIPES["bf16"], context_parallel=way)
    rows = counted([row for row in parallel(SHAPE, plan) if row.axis == "cp"])
    local, whole = 8 * 64 * 2, 32 * 64 * 2
    hops = {"forward": (2 * 3, 6 * local), "backward": (2 * 6, 6 * local + 6 * 2 * local)}
    assert (
        rows
        == {
            "ring": {("cp", kind, phase): hops[phase] for phase in hops for kind in ("send", "recv")},
            "allgather": {
                ("cp", "all_gather", "forward"): (2, 2 * whole),
                ("cp", "all_gather", "backward"): (2, 2 * whole),
                ("cp", "reduce_scatter", "backward"): (2, 2 * 2 * whole),
            },
            "ulysses": {("cp", "all_to_all", phase): (2 * 4, 2 * 8 * (64 + 64 + 64 + 64) * 2) for phase in hops},
        }[way]
    )


def test_context_ranks_share_the_model():
    """torchtitan folds cp into the shard group."""
    plan = Plan(mesh=MeshSizes(dp_shard=2, cp=2))
    rows = data_parallel(UNITS, plan)
    assert {(row.axis, row.size) for row in rows} == {("dp_shard_cp", 4)}
    assert axis_name(Plan(mesh=MeshSizes(cp=2)), "dp_shard", "cp") == "cp"


def test_expert_parallel():
    """4 all-to-alls a layer of k T h elements; experts have a shard group of their own, smaller by ep."""
    plan = Plan(mesh=MeshSizes(dp_shard=8, ep=4), recipe=RECIPES["bf16"], batch=Batch(micro_batch=2))
    counts, *rows = [row for row in parallel(MOE, plan) if row.axis == "ep"]
    assert (counts.phase, counts.calls, counts.full_bytes) == ("forward", 2, 8 * 8)  # how many rows go to each expert
    assert {(row.purpose, row.phase): (row.calls, row.full_bytes, row.size) for row in rows} == {
        (purpose, phase): (2, 2 * 2 * 32 * 64 * 2, 4)
        for purpose in ("expert_dispatch", "expert_combine")
        for phase in ("forward", "backward")
    }
    gathers = {row.axis: row for row in data_parallel(local_parameters(MOE, plan, 0), plan) if row.phase == "forward"}
    assert gathers["dp_shard_in_ep"].size == 2
    assert gathers["dp_shard_in_ep"].full_bytes == 2 * 3 * 48 * 64 * 2  # of the 8 experts two: gate, up, down


def test_pipeline_messages():
    plan = Plan(mesh=MeshSizes(pp=2), recipe=RECIPES["bf16"], batch=Batch(micro_batch=2, micro_batches=4))
    message = 2 * 32 * 64 * 2
    for stage, sent, received in ((0, "forward", "backward"), (1, "backward", "forward")):
        rows = [(row.kind, row.phase, row.calls, row.full_bytes) for row in parallel(SHAPE, plan, stage)]
        assert rows == [("send", sent, 4, message), ("recv", received, 4, message)]


def test_tied_embeddings_are_summed_between_first_and_last_stage():
    tied = replace(SHAPE, tied_embeddings=True)
    plan = Plan(mesh=MeshSizes(pp=2), recipe=RECIPES["bf16"], batch=Batch(micro_batches=2))
    for stage in (0, 1):
        row = next(row for row in parallel(tied, plan, stage) if row.axis == "embedding")
        assert (row.kind, row.size, row.full_bytes) == ("all_reduce", 2, 500 * 64 * 2)


def test_full_recomputation_repeats_the_forwards_collectives():
    plan = Plan(mesh=MeshSizes(dp_shard=2, tp=2, ep=2), recipe=RECIPES["bf16"], implementation=Implementation(expert_counts=False))
    again = replace(plan, batch=Batch(recompute="full"))

    def backward(p: Plan, kind: str) -> int:
        return sum(row.calls for row in parallel(MOE, p) if row.phase == "backward" and row.kind == kind)

    assert backward(again, "all_reduce") - backward(plan, "all_reduce") == 2 * MOE.layers
    assert backward(again, "all_to_all") == 2 * backward(plan, "all_to_all")


def test_links_of_a_group():
    """8 devices a node: neighbours on NVLink; a group of one rank a node has one network port each; whole nodes have all their ports."""
    h100 = HARDWARE["h100"]
    for size, stride in ((8, 1), (2, 4)):
        near = path_of(h100, size, stride)
        assert (near.nodes, near.inside, near.gb_s) == (1, size, 450.0)
    apart = path_of(h100, 4, 8)
    assert (apart.nodes, apart.inside, apart.gb_s) == (4, 1, 50.0)
    whole = path_of(h100, 32, 1)
    assert (whole.nodes, whole.inside, whole.gb_s) == (4, 8, 400.0)
    assert path_of(HARDWARE["gb200"], 64, 1).nodes == 1


def test_exchange_of_all_with_all_over_nodes():
    """Over 4 nodes of 8, 24 of 31 messages leave through the rank's own port: neighbours' ports help in a ring alone."""
    h100 = HARDWARE["h100"]
    assert exchange_gb_s(h100, path_of(h100, 8, 1), 8) == 450.0
    assert exchange_gb_s(h100, path_of(h100, 4, 8), 4) == 50.0
    assert exchange_gb_s(h100, path_of(h100, 32, 1), 32) == pytest.approx(50 * 31 / 24)
    size = 31 * 10**6
    rows = [Traffic("ep", "expert_dispatch", "all_to_all", "forward", ranks, 1, 1, size * ranks // (ranks - 1)) for ranks in (8, 32)]
    inside, outside = (collective_seconds(row, h100) for row in rows)
    assert outside - 31 * h100.outside.latency_us * 1e-6 == pytest.approx(24e6 / 50e9)
    assert inside < outside


def test_alpha_beta_time():
    row = Traffic("tp", "tensor_parallel", "all_reduce", "forward", 8, 1, 1, 450 * 10**6)
    expected = 14 * 1.9e-6 + 2 * 7 / 8 * 1e-3
    assert collective_seconds(row, hardware("h100")) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "size", "nodes", "algorithm", "protocol", "expected"),
    [
        # by hand from the constants of NCCL 2.28's tuner
        ("all_reduce", 8, 1, "ring", "ll", 6.6 + 14 * 0.6),
        ("all_reduce", 8, 1, "ring", "simple", 8.4 + 14 * 3.4),
        ("all_gather", 8, 1, "ring", "ll128", 14.0 + 7 * 1.9),
        ("reduce_scatter", 16, 2, "ring", "simple", 8.4 + 14 * 3.4 + 14.0),
        ("all_gather", 16, 2, "ring", "ll", 6.6 + 14 * 1.0 + 2.7),
        ("all_gather", 4, 4, "ring", "ll", 6.6 + 3 * 5.0),
        ("all_reduce", 16, 2, "tree", "ll", 6.8 + 2 * (7 * 0.6 + 5.0)),
        ("broadcast", 8, 1, "ring", "simple", 8.4 + 3.4),
    ],
)
def test_nccl_latency(kind, size, nodes, algorithm, protocol, expected):
    assert nccl.latency_us(kind, size, nodes, algorithm, protocol) == pytest.approx(expected)


def test_nccl_refuses_what_it_does_not_have():
    for arguments in (("all_gather", 8, 1, "tree"), ("all_reduce", 8, 1, "ring", "ll256"), ("all_reduce", 8, 9)):
        with pytest.raises(UsageError):
            nccl.latency_us(*arguments)


def test_nccl_latencies_as_an_option():
    row = Traffic("tp", "tensor_parallel", "all_reduce", "forward", 8, 1, 1, 1024)
    small = collective_seconds(row, hardware("h100"), "nccl")
    assert small == pytest.approx(nccl.latency_us("all_reduce", 8, protocol="ll") * 1e-6 + 2 * 7 / 8 * 1024 / 450e9)


@pytest.mark.parametrize("kind", ["recv", "barrier"])
def test_who_only_receives_sends_nothing(kind):
    assert sent_bytes(kind, 100, 4) == 0


def test_every_rank_of_a_stage_reports_its_own_traffic():
    plan = Plan(mesh=MeshSizes(pp=2, dp_shard=2, tp=2), batch=Batch(micro_batches=4))
    first, last = estimate(SHAPE, plan, hardware("h100")).roles
    assert {row.axis for row in first.traffic} == {row.axis for row in last.traffic} == {"dp_shard", "tp", "pp"}
    assert [row.purpose for row in first.traffic].count("loss") == 0


def test_whole_embeddings_need_no_collectives_of_their_own():
    """DTensor with embedding and head on every rank: 2 L all-reduces a pass; with sequence parallelism 4 L + 2 all-gathers, 4 L
    reduce-scatters and an all-reduce for each norm."""
    plan = Plan(
        mesh=MeshSizes(tp=2), recipe=RECIPES["fp32"], vocabulary_parallel=False, implementation=Implementation(regather_inputs=False)
    )
    assert [(row.phase, row.calls) for row in parallel(SHAPE, plan)] == [("forward", 4), ("backward", 4)]
    calls: dict[str, int] = {}
    for row in parallel(SHAPE, replace(plan, sequence_parallel=True)):
        calls[row.kind] = calls.get(row.kind, 0) + row.calls
    assert calls == {"all_gather": 4 * 2 + 2, "reduce_scatter": 4 * 2, "all_reduce": 2 * 2 + 1}


def test_torchs_zero_1_broadcasts_every_parameter():
    parameters = [Parameter(f"p{i}", (1000,)) for i in range(5)]
    habits = Implementation(padding="torch_zero")
    plan = Plan(mesh=MeshSizes(dp_shard=2), strategy=Strategy("zero1"), recipe=RECIPES["fp32"], implementation=habits)
    assert [(row.kind, row.calls, row.full_bytes) for row in data_parallel(parameters, plan)] == [
        ("all_reduce", 1, 20_000),
        ("broadcast", 5, 4_000),
    ]


def test_zero_2_gathers_and_scatters_bucket_by_bucket():
    parameters = [Parameter(f"p{i}", (2**20 + 1,)) for i in range(8)]
    plan = Plan(mesh=MeshSizes(dp_shard=4), strategy=Strategy("zero2"), recipe=RECIPES["fp32"], batch=Batch(micro_batches=3))
    rows = data_parallel(parameters, plan)
    sizes = [4 * (7 * (2**20 + 1) + 1), 4 * (2**20 + 4)]  # seven gradients reach 25 MiB; both padded to multiples of 4
    assert [(row.kind, row.calls, row.full_bytes) for row in rows] == [
        ("reduce_scatter", 3, sizes[0]), ("all_gather", 1, sizes[0]), ("reduce_scatter", 3, sizes[1]), ("all_gather", 1, sizes[1]),
    ]  # fmt: skip


def test_the_last_unit_may_stay_between_its_passes():
    found = sharded(UNITS, Implementation(last_stays=True), name="zero3")
    assert found["dp_shard", "all_gather", "backward"][0] == 5


def test_pipelines_of_torch_gather_once_a_step():
    found = sharded(UNITS, micro_batches=4, reshard_after_forward=False, reshard_after_backward=False, sync_every_micro_batch=False)
    assert {key[1]: calls for key, (calls, _) in found.items()} == {"all_gather": 6, "reduce_scatter": 6}
