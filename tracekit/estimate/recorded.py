"""A recorder's manifest as the model's input: the shape of the model, and the plan of mesh, strategy, recipe and batch.

``plan_of`` knows the options of the reference workloads; of any other job it takes what the manifest shows: units tell FSDP or DDP,
placements tell tensor parallelism, element types the recipe. What the model has no formula for is a ``UsageError`` that says which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tracekit.errors import UsageError
from tracekit.estimate.parameters import Parameter
from tracekit.estimate.plan import Batch, MeshSizes, Plan, Strategy
from tracekit.estimate.recipe import OPTIMIZERS, RECIPES, Recipe
from tracekit.estimate.shape import ModelShape
from tracekit.manifest import Manifest

#: Element type -> bytes.
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "float8_e4m3fn": 1}
#: Axes of a recorded mesh that the model knows.
AXES = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
_SCHEDULES = {"interleaved_zero_bubble": "interleaved_1f1b"}
_REFUSED_SCHEDULES = ("zbv",)
#: Buckets of gradients that workloads average by hand [MiB].
_HAND_BUCKETS = 25.0


@dataclass(frozen=True)
class Recorded:
    """What a manifest says, in the model's terms. ``stage`` of the pipeline this rank is on; ``shape`` None for a model of unknown kind.

    ``axis_names`` maps the model's name of a data-parallel group to the recording's. ``keeps_buckets`` False: gradients travel like DDP's,
    but are averaged by hand when backward is over.
    """

    shape: ModelShape | None
    plan: Plan
    stage: int
    shard_rank: int
    axis_names: Mapping[str, str]
    keeps_buckets: bool = True


def recorded(manifest: Manifest) -> Recorded:
    """The model's input for one rank. UsageError where there is no formula for what the job did."""
    sizes = {axis.name: axis.size for axis in manifest.mesh}
    strange = [name for name, size in sizes.items() if name not in AXES and size > 1]
    if strange:
        raise UsageError(f"the model knows no mesh axis {strange[0]!r}")
    if manifest.strategy == "collectives":
        raise UsageError("single collectives are no training: there is nothing to predict of them")
    shape = shape_of(manifest)
    plan = plan_of(manifest, sizes)
    place = manifest.coordinate
    by_hand = _maker(manifest) is _by_hand
    return Recorded(shape, plan, place.get("pp", 0), _shard_rank(manifest, sizes), _axis_names(sizes), not by_hand)


def shape_of(manifest: Manifest) -> ModelShape | None:
    """The transformer that the manifest describes; None where it describes none."""
    model = manifest.model
    needed = ("layers", "hidden", "heads", "ffn", "vocabulary", "sequence")
    if model.get("architecture") != "transformer" or not all(isinstance(model.get(key), int) for key in needed):
        return None
    options = manifest.options
    experts = int(options.get("experts", 0)) if manifest.strategy in ("expert_parallel", "hybrid_5d") else 0
    layers, hidden, heads, ffn, vocabulary, sequence = (int(model[key]) for key in needed)
    return ModelShape(
        layers,
        hidden,
        heads,
        ffn,
        vocabulary,
        sequence,
        kv_heads=int(model.get("kv_heads", 0)),
        gated=bool(model.get("gated_mlp", False)),
        learned_positions=bool(model.get("learned_positions", False)),
        tied_embeddings=bool(model.get("tied_embeddings", False)),
        norm=str(model.get("norm", "rmsnorm")),
        experts=experts,
        top_k=int(options.get("top_k", 1)) if experts else 1,
        name=manifest.strategy,
    )


def plan_of(manifest: Manifest, sizes: Mapping[str, int]) -> Plan:
    """Mesh, strategy, recipe and batch of a recording."""
    strategy, data = _strategy(manifest, sizes)
    batch = manifest.batch
    device = "cuda" if manifest.device not in ("", "CPU") else "cpu"
    shape = manifest.model
    context = manifest.strategy.removeprefix("context_parallel_") if manifest.strategy.startswith("context_parallel_") else "allgather"
    schedule = str(manifest.pipeline.get("schedule", "1f1b"))
    if schedule in _REFUSED_SCHEDULES:
        raise UsageError(f"the model has no messages of schedule {schedule}")
    return Plan(
        mesh=data,
        strategy=strategy,
        recipe=recipe_of(manifest, strategy),
        batch=Batch(micro_batch=(batch.micro_batch if batch and batch.micro_batch else 1), micro_batches=_micro_batches(manifest)),
        schedule=_SCHEDULES.get(schedule, schedule),
        virtual_stages=int(manifest.pipeline.get("virtual_stages", 1)),
        sequence_parallel=manifest.strategy == "sequence_parallel",
        vocabulary_parallel=False,
        vocabulary_parallel_loss=False,
        context_parallel=context,
        device=device,
        norm_kernel="composite" if device == "cpu" else "fused",
        expand_kv=shape.get("kv_heads") != shape.get("heads") and sizes.get("cp", 1) == 1,
        regather_inputs=False,
        expert_counts=not manifest.options.get("padding", False),
        wrap="ends" if manifest.strategy == "zero3" else "layers",
    )


def _micro_batches(manifest: Manifest) -> int:
    return (manifest.batch.micro_batches if manifest.batch else None) or 1


def recipe_of(manifest: Manifest, strategy: Strategy) -> Recipe:
    """Bytes an element of every copy of a parameter, by the precision and the optimizer that were recorded."""
    precision, optimizer = manifest.precision, manifest.optimizer
    states = OPTIMIZERS.get((optimizer.kind.lower() if optimizer else "adam").removeprefix("sharded"), 2)
    if precision is None or precision.parameters not in BYTES:
        raise UsageError("the element type of the parameters is not recorded")
    parameter = BYTES[precision.parameters]
    compute = BYTES.get(precision.compute, parameter)
    reduce = BYTES.get(precision.reduce, parameter) if strategy.shards_parameters else parameter
    gradient = BYTES.get(precision.gradients, parameter)
    if (parameter, compute, gradient, reduce) == (4, 4, 4, 4):
        return replace(RECIPES["fp32"], moments=RECIPES["fp32"].moments[:states])
    return Recipe("recorded", parameter, compute, gradient, reduce, (4,) * states)


# Strategies ----------------------------------------------------------------------------------------------------------


def _strategy(manifest: Manifest, sizes: Mapping[str, int]) -> tuple[Strategy, MeshSizes]:
    """The data-parallel strategy and the mesh, in which ranks of ep are counted among the data-parallel ones."""
    strategy = _maker(manifest)(manifest)
    mesh = {name: sizes.get(name, 1) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    experts = sizes.get("ep", 1)
    mesh["dp_shard" if strategy.shards_parameters else "dp_replicate"] *= experts
    if strategy.name in ("fsdp2",) and mesh["dp_replicate"] > 1:
        strategy = replace(strategy, name="hsdp")
    if strategy.name == "ddp" and mesh["dp_replicate"] * mesh["dp_shard"] * mesh["cp"] == 1:
        strategy = Strategy("none")
    return strategy, MeshSizes(**mesh, ep=experts)


def _maker(manifest: Manifest) -> Callable[[Manifest], Strategy]:
    return _KNOWN.get(manifest.strategy, _KNOWN.get(manifest.strategy.partition("_")[0], _by_units))


def _ddp(manifest: Manifest) -> Strategy:
    options = manifest.options
    cap = float(options.get("bucket_cap_mb", 25.0)) if options.get("overlap", True) else 2.0**20
    return Strategy(
        "ddp",
        gradient_as_bucket_view=bool(options.get("gradient_as_bucket_view", False)),
        bucket_cap_mb=cap,
        sync_every_micro_batch=not options.get("no_sync", True),
    )


def _zero1(manifest: Manifest) -> Strategy:
    options = manifest.options
    if options.get("parameters_as_bucket_view"):
        raise UsageError("the model has no formula for ZeroRedundancyOptimizer's parameters_as_bucket_view")
    cap, each = float(options.get("bucket_cap_mb", 25.0)), not options.get("no_sync", True)
    return Strategy("zero1", bucket_cap_mb=cap, sync_every_micro_batch=each, padding="torch_zero")


def _zero2(manifest: Manifest) -> Strategy:
    options = manifest.options
    each = bool(options.get("reduce_every_micro_batch", True))
    return Strategy("zero2", bucket_cap_mb=float(options.get("bucket_cap_mb", 25.0)), sync_every_micro_batch=each, padding="buckets")


def _zero3(manifest: Manifest) -> Strategy:
    after = bool(manifest.options.get("reshard_after_forward", True))
    return Strategy("zero3", reshard_after_forward=after, last_stays=True, padding="torch_fsdp1", use_orig_params=False)


def _fsdp1(manifest: Manifest) -> Strategy:
    options = manifest.options
    name = "hsdp" if options.get("strategy") == "hybrid" else "fsdp1"
    after = options.get("strategy") != "shard_grad_op"
    return Strategy(name, reshard_after_forward=after, use_orig_params=bool(options.get("use_orig_params", True)), padding="torch_fsdp1")


def _fsdp2(manifest: Manifest) -> Strategy:
    options = manifest.options
    told = str(options.get("reshard_after_forward", "true")).lower()
    after: bool | int = int(told) if told.isdecimal() else told == "true"
    return Strategy("fsdp2", reshard_after_forward=after, sync_every_micro_batch=bool(options.get("sync_every_round", True)))


def _hybrid(manifest: Manifest) -> Strategy:  # noqa: ARG001
    return Strategy("fsdp2", reshard_after_forward=False, reshard_after_backward=False, sync_every_micro_batch=False)


def _by_hand(manifest: Manifest) -> Strategy:  # noqa: ARG001
    """Gradients averaged in buckets when backward is over, or nothing to average at all."""
    return Strategy("ddp", bucket_cap_mb=_HAND_BUCKETS)


def _by_units(manifest: Manifest) -> Strategy:
    """A job that is no workload: what its units are."""
    kinds = {unit.kind for unit in manifest.units}
    for kind, name in (("fsdp2", "fsdp2"), ("fsdp1", "fsdp1"), ("ddp_bucket", "ddp")):
        if kind in kinds:
            told = {unit.reshard_after_forward for unit in manifest.units if not unit.root} - {None}
            after = told.pop() if len(told) == 1 else True
            return Strategy(name, reshard_after_forward=True if after is None else after)
    if all(axis.size == 1 for axis in manifest.mesh):
        return Strategy("ddp")
    raise UsageError("the manifest does not tell how data-parallel ranks share the model")


_KNOWN: dict[str, Callable[[Manifest], Strategy]] = {
    "ddp": _ddp,
    "accelerate_ddp": _ddp,
    "zero1": _zero1,
    "zero2": _zero2,
    "zero3": _zero3,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "hsdp": _fsdp2,
    "hybrid": _hybrid,
    "tensor": _by_hand,
    "sequence": _by_hand,
    "context": _by_hand,
    "pipeline": _by_hand,
    "expert": _by_hand,
}


# Axes and ranks ------------------------------------------------------------------------------------------------------


def _axis_names(sizes: Mapping[str, int]) -> dict[str, str]:
    """The model's names of groups over several axes -> those of the recording."""
    world = math.prod(sizes.values())

    def joined(*axes: str) -> str:
        long = [name for name in sizes if name in axes and sizes[name] > 1]
        size = math.prod(sizes[name] for name in long)
        return "world" if len(long) > 1 and size == world else "_".join(long)

    shard = joined("ep", "dp_shard", "cp")
    replicas = joined("dp_replicate", "ep", "cp")
    names = {"dp_shard": shard, "dp_shard_cp": shard, "cp_as_shard": shard, "dp_shard_in_ep": joined("dp_shard", "cp")}
    names |= {"dp_replicate_cp": replicas, "edp": joined("dp_replicate", "cp"), "embedding": "embedding"}
    return names


def axis_of(found: Recorded, axis: str, purpose: str) -> str:
    """The recording's name of the axis of one line of predicted traffic."""
    data = purpose in ("parameter_gather", "gradient_scatter", "gradient_sync", "parameter_sync")
    plain = found.plan.strategy.name == "ddp" or (axis != "dp_replicate" and found.plan.strategy.shards_parameters)
    if data and axis in ("dp_replicate", "cp", "dp_shard") and plain:
        key = "dp_replicate_cp" if found.plan.strategy.name == "ddp" else "dp_shard"
        return found.axis_names.get(key, axis) or axis
    return found.axis_names.get(axis, axis) or axis


def _shard_rank(manifest: Manifest, sizes: Mapping[str, int]) -> int:
    """Place of this rank among those that share its parameters."""
    place = 0
    for name in sizes:
        if name in ("ep", "dp_shard", "cp"):
            place = place * sizes[name] + manifest.coordinate.get(name, 0)
    return place


def parameters_of(manifest: Manifest) -> list[Parameter]:
    """The parameters of a model of any kind as one rank computes with them: divided by tensor parallelism, not by data parallelism."""
    sizes = {axis.name: axis.size for axis in manifest.mesh}
    result = []
    for told in manifest.parameters:
        shape = list(told.shape)
        for axis, placement in zip(told.axes, told.placements, strict=False):
            if axis == "tp" and "Shard(" in placement:
                dim = int(placement.rpartition("(")[2].split(",")[0].rstrip(")").rpartition("=")[2] or 0)
                if dim < len(shape):
                    shape[dim] = -(-shape[dim] // sizes.get(axis, 1))
        width = BYTES.get(told.dtype, 4)
        result.append(Parameter(told.name, tuple(shape), told.unit, width, told.role, trainable=told.trainable))
    return result


