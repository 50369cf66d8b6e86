"""The collectives that a rank shows in the recordings of sample_traces, one after the other, are the simulator's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.simulate.recordings import ParameterChain, Recorded, Shown, recorded
from tracekit.simulate import context_parallel, experts, fsdp, mesh, pipeline, tensor_parallel, zero
from tracekit.simulate.data_parallel import narration
from tracekit.simulate.data_parallel.layouts import ALIGNMENT_BYTES, flat_layout, rows_layout
from tracekit.simulate.data_parallel.model import Adam
from tracekit.simulate.data_parallel.strategies import FSDP, RECIPES, ZERO, Sharding, fsdp_widths
from tracekit.simulate.data_parallel.training import Training
from tracekit.simulate.data_parallel.units import buckets_of
from tracekit.simulate.experiment import Call

FP32 = 4
PHASES = ("forward", "backward")


def shown(calls: Sequence[Call]) -> list[Shown]:
    return [(call.kind, call.axis, call.purpose, call.full_bytes) for call in calls]


def zero_step(sample: Recorded, key: str, by_bucket: bool) -> list[Shown]:
    """One step of DDP or a stage of ZeRO at the sample's sizes, as rank 0 sees it."""
    axis = "dp_replicate" if key == "ddp" else "dp_shard"
    world, micro_batches = sample.size(axis), sample.manifest["batch"]["micro_batches"]
    model = ParameterChain(sample.parameters)
    if by_bucket:
        units = buckets_of(model, int(sample.manifest["options"]["bucket_cap_mb"] * 2**20), FP32)
    else:
        units = model.units(sample.manifest["units"])
    layouts = [flat_layout(unit.name, unit.parameters(model), world) for unit in units]
    strategy = next(one for one in ZERO if one.key == key)
    last = frozenset(unit.name for unit in units if model.layers - 1 in unit.layers)
    sharding = Sharding(strategy, units, layouts, RECIPES["fp32"], narration.ZERO, kept=last)
    training = Training(model, sharding, Adam())
    training.shards.start(model.initial())
    training.step(model.batch(world, micro_batches), 1, micro_batches)
    return shown(training.shards.network.calls(0))


@pytest.mark.parametrize(
    ("name", "key", "by_bucket"),
    [
        ("ddp_2", "ddp", True),
        ("ddp_accumulation_2", "ddp", True),
        ("accelerate_ddp_2", "ddp", True),
        ("zero1_2", "zero1_torch", True),
        ("zero2_2", "zero2", True),
        ("zero3_2", "zero3", False),
    ],
)
def test_ddp_and_zero(name, key, by_bucket):
    sample = recorded(name)
    assert zero_step(sample, key, by_bucket) == sample.calls()


def fsdp_step(sample: Recorded, gathered: int = FP32) -> list[Shown]:
    """One step of FSDP at the sample's sizes, as rank 0 sees it."""
    described, world = sample.manifest["units"], sample.size("dp_shard")
    model = ParameterChain(sample.parameters)
    units = model.units(described)
    flat = described[0]["kind"] == "fsdp1"
    aligned = ALIGNMENT_BYTES // gathered
    layouts = [
        flat_layout(unit.name, unit.parameters(model), world, aligned) if flat else rows_layout(unit.name, unit.parameters(model), world)
        for unit in units
    ]
    assert [layout.padded_elements for layout in layouts] == [unit["padded_elements"] for unit in described]
    pairs = zip(units, described, strict=True)
    kept = frozenset(unit.name for unit, entry in pairs if unit.root or entry["reshard_after_forward"] is False)
    replicas = next((axis["size"] for axis in sample.manifest["mesh"] if axis["name"] == "dp_replicate"), 1)
    widths = fsdp_widths(FP32, gathered, FP32)
    sharding = Sharding(FSDP[0 if flat else 1], units, layouts, widths, narration.FSDP, kept, replicas=replicas, as_torch=True)
    training = Training(model, sharding, Adam())
    training.shards.start(model.initial())
    training.step(model.batch(replicas * world, 1), 1)
    return shown(training.shards.network.calls(0))


@pytest.mark.parametrize(
    ("name", "gathered"),
    [
        ("fsdp1_2", FP32),
        ("fsdp2_2", FP32),
        ("fsdp2_no_reshard_2", FP32),
        ("fsdp2_uneven_3", FP32),
        ("fsdp2_bf16_2", 2),
        ("hsdp_4", FP32),
        ("accelerate_fsdp2_2", FP32),
        ("fsdp2_fake_rank5_of_16", FP32),
    ],
)
def test_fsdp(name, gathered):
    sample = recorded(name)
    assert fsdp_step(sample, gathered) == sample.calls(sample.manifest["rank"])


def layers_of(calls: Sequence[Shown], phases: Sequence[str], layers: int) -> list[Shown]:
    """What a model of so many layers calls, of the calls of one: all forwards, then all backwards."""
    forward = [call for call, phase in zip(calls, phases, strict=True) if phase == "forward"]
    backward = [call for call, phase in zip(calls, phases, strict=True) if phase == "backward"]
    return forward * layers + backward * layers


def tokens_of(sample: Recorded) -> dict[str, int]:
    """Sizes of a micro-batch on a rank, as the experiments call them."""
    m, batch = sample.manifest["model"], sample.manifest["batch"]
    return {"sequence": batch["sequence"], "batch": batch["micro_batch"], "heads": m["heads"], "element_bytes": FP32}


def model_gradients(sample: Recorded, axis: str) -> Shown:
    """What replicas of the whole model add up behind the backward of their own tokens; the experiment of attention has no weights."""
    return ("all_reduce", axis, "gradient_sync", FP32 * sample.manifest["model"]["parameters"])


@pytest.mark.parametrize(("algorithm", "ranks"), [("allgather", 2), ("ring", 4), ("blockwise", 2), ("ulysses", 2)])
def test_context_parallel(algorithm, ranks):
    sample = recorded(f"context_parallel_{algorithm}_{ranks}")
    m = sample.manifest["model"]
    done = context_parallel.run(
        context_parallel.Arguments(
            algorithm={"allgather": "all_gather"}.get(algorithm, algorithm),
            cp=sample.size("cp"),
            kv_heads=m["kv_heads"],
            head_size=m["hidden"] // m["heads"],
            **tokens_of(sample),
        )
    )
    layer = layers_of(shown(done.calls), [call.phase for call in done.calls], m["layers"])
    assert [*layer, model_gradients(sample, "cp")] == sample.calls()


def tensor_parallel_layer(sample: Recorded, sequence_parallel: bool) -> list[Call]:
    m = sample.manifest["model"]
    sizes = tensor_parallel.Arguments(
        tp=sample.size("tp"), sequence_parallel=sequence_parallel, hidden=m["hidden"], ffn=m["ffn"], **tokens_of(sample)
    )
    return list(tensor_parallel.run(sizes).calls)


def test_tensor_parallel():
    sample = recorded("tensor_parallel_2")
    calls = tensor_parallel_layer(sample, sequence_parallel=False)
    assert layers_of(shown(calls), [call.phase for call in calls], sample.manifest["model"]["layers"]) == sample.calls()


def test_sequence_parallel():
    """The model's norms have gamma alone, its linears no biases; in front of the replicated head and behind the embedding it gathers."""
    sample = recorded("sequence_parallel_2")
    layers = sample.manifest["model"]["layers"]
    calls = tensor_parallel_layer(sample, sequence_parallel=True)
    phases = {phase: [call for call in calls if call.phase == phase and call.purpose == "sequence_parallel"] for phase in PHASES}
    gammas = [call for call in calls if call.purpose == "gradient_sync" and call.label.endswith(".gamma")]
    head = embedding = phases["forward"][:1]
    norm = gammas[:1]
    wanted = [*phases["forward"] * layers, *head, *phases["backward"] * layers, *embedding, *gammas * layers, *norm]
    assert shown(wanted) == sample.calls()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("rank", [0, 1])
def test_pipeline(schedule, rank):
    sample = recorded(f"pipeline_{schedule}_2")
    described, batch = sample.manifest["pipeline"], sample.manifest["batch"]
    sizes = pipeline.Arguments(
        schedule=described["schedule"],
        stages=described["ranks"],
        micro_batches=described["microbatches"],
        virtual_stages=described["virtual_stages"],
        sequence=batch["sequence"],
        micro_batch_size=batch["micro_batch"],
        hidden=sample.manifest["model"]["hidden"],
        element_bytes=FP32,
        rank=rank,
    )
    assert shown(pipeline.run(sizes).calls) == sample.calls(rank)


def test_experts():
    """Where tokens go is up to the weights: sizes of what comes in are those that the router of the recording wrote down."""
    sample = recorded("expert_parallel_2")
    m, options = sample.manifest["model"], sample.manifest["options"]
    tokens = sample.manifest["batch"]["micro_batch"] * m["sequence"]
    sizes = experts.Arguments(
        ep=sample.size("ep"),
        experts=m["experts"],
        top_k=m["experts_per_token"],
        tokens=tokens,
        hidden=m["hidden"],
        capacity_factor=options["capacity_factor"],
        element_bytes=FP32,
    )
    done = experts.run(sizes)
    step = sample.manifest["steps"][-1]
    received = [sum(layer["received"]) * m["hidden"] * FP32 for layer in sample.manifest["experts"] if layer["step"] == step]
    (own,) = {call.full_bytes for call in done.calls if call.purpose == "expert_combine" and call.phase == "forward"}

    def layer(phase: str, size: int) -> list[Shown]:
        calls = shown([call for call in done.calls if call.phase == phase])
        return [(*call[:3], size if call[3] == own else call[3]) for call in calls]

    forward = [call for size in received for call in layer("forward", size)]
    backward = [call for size in reversed(received) for call in layer("backward", size)]
    replicated = sample.manifest["model"]["parameters"] - m["layers"] * m["experts"] * 2 * m["hidden"] * m["ffn"]
    assert [*forward, *backward, ("all_reduce", "ep", "gradient_sync", replicated * FP32)] == sample.calls()


@pytest.mark.parametrize("name", ["hybrid_3d_8"])
def test_a_walk_over_the_mesh_meets_the_groups_of_the_recording(name):
    """The walk is one micro-batch through one layer a stage: what comes first is compared, not how often."""
    sample = recorded(name)
    described = ",".join(f"{axis['name']}={axis['size']}" for axis in sample.manifest["mesh"])
    walked = mesh.run(mesh.Arguments(mesh=described, rank=0)).calls
    assert list(dict.fromkeys(call[:3] for call in shown(walked))) == list(dict.fromkeys(call[:3] for call in sample.calls()))


#: Experiment at its own small sizes, as the command runs it, and the sample of which it shows the sequence.
SMALL = [
    (zero.Arguments(strategy="zero2", world=2, micro_batches=1, layers=",".join(["2x2"] * 4)), "zero2_2"),
    (zero.Arguments(strategy="zero3", world=2, micro_batches=1, layers=",".join(["2x2"] * 4)), "zero3_2"),
    (fsdp.Arguments(version="1", world=2, layers=",".join(["2x2"] * 4), units="blocks"), "fsdp1_2"),
    (fsdp.Arguments(version="2", world=2, layers=",".join(["2x2"] * 4), units="blocks"), "fsdp2_2"),
    (fsdp.Arguments(version="2", world=2, layers=",".join(["2x2"] * 4), units="blocks", reshard_after_forward="no"), "fsdp2_no_reshard_2"),
    (fsdp.Arguments(version="2", world=2, replicas=2, layers=",".join(["2x2"] * 4), units="blocks"), "hsdp_4"),
]


@pytest.mark.parametrize(("arguments", "name"), SMALL)
def test_the_command_shows_the_sequence_of_the_recording(arguments, name):
    run = zero.run if isinstance(arguments, zero.Arguments) else fsdp.run
    assert [call[:3] for call in shown(run(arguments).calls)] == [call[:3] for call in recorded(name).calls()]
