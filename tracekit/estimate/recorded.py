"""A recorder's manifest as the model's input: the shape of the model, and the plan of mesh, strategy, recipe and batch.

``recorded`` knows the options of the reference workloads; of any other job it takes what the manifest shows: units tell FSDP or DDP,
placements tell tensor parallelism, element types the recipe. What the model has no formula for is a ``UsageError`` that says which.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tracekit.errors import UsageError
from tracekit.estimate.parameters import Parameter
from tracekit.estimate.plan import Batch, MeshSizes, Plan, Strategy
from tracekit.estimate.recipe import OPTIMIZERS, RECIPES, Recipe
from tracekit.estimate.recorded_axes import axis_names, axis_of, shard_rank, used_sizes
from tracekit.estimate.recorded_strategy import strategy_of
from tracekit.estimate.recorded_values import MOST, flag, number, whole, word
from tracekit.estimate.shape import ModelShape
from tracekit.estimate.traffic import Traffic
from tracekit.manifest import Manifest

#: Element type -> bytes.
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "float8_e4m3fn": 1}
_SIZES = ("layers", "hidden", "heads", "ffn", "vocabulary", "sequence")
_SCHEDULES = {"interleaved_zero_bubble": "interleaved_1f1b"}
_REFUSED_SCHEDULES = ("zbv",)
#: A dimension of a DTensor that is divided, in the long and the short form of torch: ``Shard(dim=0)``, ``S(0)``, ``_S(0, 2)``.
_SHARDED = re.compile(r"_?S(?:hard|tridedShard)?\((?:dim=)?(\d{1,3})")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,5})(?:\.|$)")
MOST_LAYERS, MOST_MICRO_BATCHES, MOST_DIMENSIONS = 10_000, 1_000_000, 16


@dataclass(frozen=True)
class Recorded:
    """What a manifest says, in the model's terms. ``stage`` of the pipeline this rank is on; ``shape`` None for a model of unknown kind.

    ``axis_names`` maps the model's name of a data-parallel group to the recording's. ``units``: parameter -> its unit, where that is not as
    the plan wraps. ``flags``: small all-reduces beside training (norms of gradients, whether any is not finite).
    """

    shape: ModelShape | None
    plan: Plan
    stage: int
    shard_rank: int
    axis_names: Mapping[str, str]
    units: Mapping[str, str] | None = None
    flags: tuple[Traffic, ...] = ()

    def axis_of(self, row: Traffic) -> str:
        """The recording's name of the axis of one line of predicted traffic."""
        return axis_of(self.plan, self.axis_names, row.axis, row.purpose)

    def wrapped(self, held: Sequence[Parameter]) -> Sequence[Parameter]:
        """The parameters in the units of the recording."""
        units = self.units
        return held if units is None else [replace(p, unit=units.get(p.name, p.unit)) for p in held]


def recorded(manifest: Manifest, step: int | None = None) -> Recorded:
    """The model's input for one rank. UsageError where there is no formula for what the job did.

    ``step``: whose loads of experts to take, where the manifest lists them; without it experts are balanced.
    """
    if manifest.strategy == "collectives":
        raise UsageError("single collectives are no training: there is nothing to predict of them")
    sizes = used_sizes(manifest)
    shape = shape_of(manifest)
    plan = replace(plan_of(manifest, sizes), expert_loads=_expert_loads(manifest, step))
    stage = manifest.coordinate.get("pp", 0) if plan.mesh.pp > 1 else 0
    if not 0 <= stage < plan.mesh.pp:
        raise UsageError(f"the manifest's place along pp is none of {plan.mesh.pp}", "record the job again")
    names = axis_names(sizes, math.prod(axis.size for axis in manifest.mesh))
    place, units = shard_rank(manifest, sizes), _units(manifest, plan)
    return Recorded(shape, plan, stage, place, names, units, tuple(_flags(manifest, plan, sizes)))


def shape_of(manifest: Manifest) -> ModelShape | None:
    """The transformer that the manifest describes; None where it describes none."""
    model, options = manifest.model, manifest.options
    if model.get("architecture") != "transformer" or any(key not in model for key in _SIZES):
        return None
    experts = whole(options, "experts", 0, 10**5) if manifest.strategy in ("expert_parallel", "hybrid_5d") else 0
    layers, hidden, heads, ffn, vocabulary, sequence = (whole(model, key, None, MOST_LAYERS if key == "layers" else MOST) for key in _SIZES)
    return ModelShape(
        layers,
        hidden,
        heads,
        ffn,
        vocabulary,
        sequence,
        kv_heads=whole(model, "kv_heads", 0),
        gated=flag(model, "gated_mlp", False),
        learned_positions=flag(model, "learned_positions", False),
        tied_embeddings=flag(model, "tied_embeddings", False),
        norm=word(model, "norm", "rmsnorm"),
        experts=experts,
        top_k=whole(options, "top_k", 1) if experts else 1,
        name=manifest.strategy,
    )


def plan_of(manifest: Manifest, sizes: Mapping[str, int]) -> Plan:
    """Mesh, strategy, recipe and batch of a recording."""
    options, shape = manifest.options, manifest.model
    strategy, mesh = _strategy(manifest, sizes)
    device = "cuda" if manifest.device not in ("", "CPU") else "cpu"
    context = manifest.strategy.removeprefix("context_parallel_") if manifest.strategy.startswith("context_parallel_") else "allgather"
    schedule = word(manifest.pipeline, "schedule", "1f1b")
    if schedule in _REFUSED_SCHEDULES:
        raise UsageError(f"the model has no messages of schedule {schedule}")
    padded = flag(options, "padding", False)
    return Plan(
        mesh=mesh,
        strategy=strategy,
        recipe=recipe_of(manifest, strategy),
        batch=_batch(manifest),
        schedule=_SCHEDULES.get(schedule, schedule),
        virtual_stages=whole(manifest.pipeline, "virtual_stages", 1, 1000),
        sequence_parallel=manifest.strategy == "sequence_parallel",
        vocabulary_parallel=False,
        vocabulary_parallel_loss=False,
        context_parallel=context,
        keeps_gathered_keys=flag(options, "keep_gathered", False),
        device=device,
        norm_kernel="composite" if device == "cpu" else "fused",
        expand_kv=shape.get("kv_heads") != shape.get("heads") and sizes.get("cp", 1) == 1,
        regather_inputs=False,
        backend_copies=device == "cpu" and "gloo" in manifest.backend,
        expert_counts=not padded,
        single_operations=True,
        expert_padding=number(options, "capacity_factor", 0.0) if padded else 0.0,
        wrap="ends" if manifest.strategy == "zero3" else "layers",
    )


def _expert_loads(manifest: Manifest, step: int | None) -> tuple[int, ...]:
    """Rows that arrived at this rank's experts of every layer, mean of a step's micro-batches; -1 where they are not known."""
    rows: dict[int, int] = {}
    for load in manifest.experts:
        layer = _LAYER.search(load.layer)
        if load.step == step and layer is not None and load.received and all(0 <= count <= MOST for count in load.received):
            rows[int(layer[1])] = -(-sum(load.received) // _batch(manifest).micro_batches)
    return tuple(rows.get(layer, -1) for layer in range(max(rows, default=-1) + 1))


def routed_rows(manifest: Manifest, step: int) -> tuple[int, int, int] | None:
    """(choices of this rank's tokens, rows they sent, rows that arrived) in all layers of one step; None where that was not recorded."""
    loads = [load for load in manifest.experts if load.step == step]
    if not loads or any(not load.routed or not load.received for load in loads):
        return None
    sent = sum(sum(load.routed) for load in loads)
    return sent + sum(load.dropped for load in loads), sent, sum(sum(load.received) for load in loads)


def _batch(manifest: Manifest) -> Batch:
    told = manifest.batch
    sizes = {"micro_batch": (told.micro_batch if told else None) or 1, "micro_batches": (told.micro_batches if told else None) or 1}
    return Batch(whole(sizes, "micro_batch", least=1), whole(sizes, "micro_batches", most=MOST_MICRO_BATCHES, least=1))


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
    if strategy.framework == "deepspeed":  # its optimizer has a copy of the parameters of any type
        return Recipe("recorded", parameter, compute, gradient, reduce, (4,) * states, master=4)
    if (parameter, compute, gradient, reduce) == (4, 4, 4, 4):
        return replace(RECIPES["fp32"], moments=RECIPES["fp32"].moments[:states])
    return Recipe("recorded", parameter, compute, gradient, reduce, (4,) * states)


def _strategy(manifest: Manifest, sizes: Mapping[str, int]) -> tuple[Strategy, MeshSizes]:
    """The data-parallel strategy and the mesh, in which ranks of ep are counted among the data-parallel ones."""
    strategy = strategy_of(manifest)
    mesh = {name: sizes.get(name, 1) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    experts = sizes.get("ep", 1)
    mesh["dp_shard" if strategy.shards_parameters else "dp_replicate"] *= experts
    if strategy.name == "fsdp2" and mesh["dp_replicate"] > 1:
        strategy = replace(strategy, name="hsdp")
    if strategy.name == "ddp" and mesh["dp_replicate"] * mesh["dp_shard"] * mesh["cp"] == 1:
        strategy = Strategy("none")
    return strategy, MeshSizes(**mesh, ep=experts, expert_copies=mesh["tp"] > 1)


def _units(manifest: Manifest, plan: Plan) -> dict[str, str] | None:
    """Units that are cut in another way than layer by layer: Accelerate's, and DeepSpeed's, which gathers every parameter by itself."""
    if plan.strategy.framework == "deepspeed" and plan.strategy.shards_parameters:
        return {parameter.name: parameter.name for parameter in manifest.parameters}
    return {p.name: p.unit for p in manifest.parameters} if manifest.strategy == "accelerate_fsdp2" else None


def _flags(manifest: Manifest, plan: Plan, sizes: Mapping[str, int]) -> list[Traffic]:
    """One number or so, all-reduced in every step: DeepSpeed's norm and its check; torch's gradient scaler over sharded gradients."""
    precision = manifest.precision
    scales = precision is not None and precision.loss_scaling
    low = precision is not None and precision.parameters in ("float16", "bfloat16")

    def row(axis: str, size: int) -> Traffic:
        return Traffic(axis, "metrics", "all_reduce", "optimizer", sizes.get(axis, 1), 1, 1, size)

    if plan.strategy.framework == "deepspeed":
        whole_state = plan.strategy.shards_parameters
        return [row("dp_shard", 8 if whole_state else 4), *([row("dp_shard", 1)] if scales or (low and not whole_state) else [])]
    axis = "pp" if plan.mesh.pp > 1 else "dp_shard"
    return [row(axis, 4)] if scales and plan.strategy.name != "zero1" and sizes.get(axis, 1) > 1 else []


def parameters_of(manifest: Manifest) -> list[Parameter]:
    """The parameters of a model of any kind as one rank computes with them: divided by tensor parallelism, not by data parallelism."""
    sizes = {axis.name: axis.size for axis in manifest.mesh}
    result = []
    for told in manifest.parameters:
        shape = list(told.shape)
        if len(shape) > MOST_DIMENSIONS or any(not 0 <= size <= MOST for size in shape):
            raise UsageError("a parameter in the manifest has a shape that no tensor has", "record the job again")
        for axis, placement in zip(told.axes, told.placements, strict=False):
            found = _SHARDED.match(placement) if axis == "tp" else None
            if found is not None and int(found[1]) < len(shape):
                shape[int(found[1])] = -(-shape[int(found[1])] // max(1, sizes.get(axis, 1)))
        width = BYTES.get(told.dtype, 4)
        result.append(Parameter(told.name, tuple(shape), told.unit, width, told.role, trainable=told.trainable))
    return result
