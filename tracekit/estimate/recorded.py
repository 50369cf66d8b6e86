"""A recorder's manifest as the model's input: the shape of the model, and the plan of mesh, strategy, recipe and batch.

A program that knows its plan writes it into the manifest (``Manifest.plan``, with the keys of a plan file); what it leaves out, and a job
that writes none, is described by what was observed: units tell FSDP or DDP, placements tensor parallelism, element types and optimizer the
recipe. What a job is called chooses nothing. What the model has no formula for is a ``UsageError`` that says which.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tracekit.errors import UsageError
from tracekit.estimate.parameters import Parameter
from tracekit.estimate.plan import IMPLEMENTATIONS, Batch, Implementation, MeshSizes, Plan, Strategy
from tracekit.estimate.recipe import OPTIMIZERS, RECIPES, Recipe
from tracekit.estimate.recorded_axes import axis_names, axis_of, shard_rank, used_sizes
from tracekit.estimate.shape import ModelShape
from tracekit.estimate.spec import built, implementation_of, only, strategy_of
from tracekit.estimate.traffic import Traffic
from tracekit.manifest import Manifest

#: Element type -> bytes.
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "float8_e4m3fn": 1}
_MODEL = "the manifest's model"
_PLAN = "the manifest's plan"
#: Keys of a recorded plan that are fields of ``Plan`` as they are, and all of its keys.
_STATED = ("sequence_parallel", "vocabulary_parallel", "vocabulary_parallel_loss", "context_parallel", "expert_padding", "wrap")
_KEYS = (*_STATED, "strategy", "implementation", "model", "recompute", "not_modelled")
#: A size of the transformer in the model's words -> in the manifest's.
_SIZES = {name: name for name in ("layers", "hidden", "heads", "ffn", "vocabulary", "sequence")}
_CHOICES = {name: name for name in ("kv_heads", "learned_positions", "tied_embeddings", "norm", "experts")}
_CHOICES |= {"gated": "gated_mlp", "top_k": "experts_per_token"}
_SCHEDULES = {"interleaved_zero_bubble": "interleaved_1f1b"}
#: Gradients of weights are computed later than those of inputs.
_DEFERRED = ("interleaved_zero_bubble", "zbv")
#: A dimension of a DTensor that is divided, in the long and the short form of torch: ``Shard(dim=0)``, ``S(0)``, ``_S(0, 2)``.
_SHARDED = re.compile(r"_?S(?:hard|tridedShard)?\((?:dim=)?(\d{1,3})")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,5})(?:\.|$)")
MOST_DIMENSIONS, MOST = 16, 10**9


@dataclass(frozen=True)
class Recorded:
    """What a manifest says, in the model's terms."""

    shape: ModelShape | None  # None for a model of unknown kind
    plan: Plan
    stage: int  # of the pipeline, on which this rank is
    shard_rank: int  # its index among the ranks that share its parameters
    axis_names: Mapping[str, str]  # the model's name of a data-parallel group -> the recording's
    units: Mapping[str, str]  # parameter -> its FSDP unit, as far as recorded
    defers_weights: bool = False  # gradients of weights are computed later: what they are made of is not in the model
    flags: tuple[Traffic, ...] = ()  # small all-reduces beside training: norms of gradients, whether any is not finite

    def axis_of(self, row: Traffic) -> str:
        """The recording's name of the axis of one line of predicted traffic."""
        return axis_of(self.plan, self.axis_names, row.axis, row.purpose)

    def wrapped(self, held: Sequence[Parameter]) -> Sequence[Parameter]:
        """The parameters in the units of the recording."""
        return [replace(p, unit=self.units.get(p.name, p.unit)) for p in held] if self.units else held


def recorded(manifest: Manifest, step: int | None = None) -> Recorded:
    """The model's input for one rank. UsageError where there is no formula for what the job did.

    ``step``: whose loads of experts to take, where the manifest lists them; without it experts are balanced.
    """
    stated = manifest.plan
    only(stated, _KEYS, _PLAN)
    if stated.get("not_modelled"):
        raise UsageError(f"the model has no formula for {str(stated['not_modelled'])[:100]}")
    if not stated and not manifest.parameters and not manifest.model.get("architecture"):
        raise UsageError("the manifest lists no parameters: there is nothing to predict of the job")
    sizes = used_sizes(manifest)
    plan = replace(plan_of(manifest, sizes), expert_loads=_expert_loads(manifest, step), buckets=_buckets(manifest))
    stage = manifest.coordinate.get("pp", 0) if plan.mesh.pp > 1 else 0
    if not 0 <= stage < plan.mesh.pp:
        raise UsageError(f"the manifest's coordinate along pp is none of {plan.mesh.pp}", "record the job again")
    names = axis_names(sizes, math.prod(axis.size for axis in manifest.mesh), manifest.roles)
    fsdp = any(unit.kind in ("fsdp1", "fsdp2") for unit in manifest.units)
    units = {parameter.name: parameter.unit for parameter in manifest.parameters} if fsdp else {}
    flags, deferred = tuple(_flags(manifest, plan, sizes)), plan.mesh.pp > 1 and manifest.pipeline.get("schedule") in _DEFERRED
    return Recorded(shape_of(manifest), plan, stage, shard_rank(manifest, sizes), names, units, deferred, flags)


def shape_of(manifest: Manifest) -> ModelShape | None:
    """The transformer that the manifest describes; None where it describes none."""
    model = manifest.model
    if model.get("architecture") != "transformer" or any(key not in model for key in _SIZES):
        return None
    sizes = {name: model[key] for name, key in (_SIZES | _CHOICES).items() if model.get(key) is not None}
    extra = manifest.plan.get("model", {})
    shape: ModelShape = built(ModelShape, {**sizes, **(extra if isinstance(extra, Mapping) else {})}, _MODEL)
    return shape


def plan_of(manifest: Manifest, sizes: Mapping[str, int]) -> Plan:
    """Mesh, strategy, recipe and batch of a recording."""
    stated, pipeline = manifest.plan, manifest.pipeline
    implementation = _implementation(manifest)
    strategy, mesh = _data_parallel(manifest, sizes)
    schedule = pipeline.get("schedule", "1f1b")
    values: dict[str, Any] = {
        "mesh": mesh,
        "strategy": strategy,
        "implementation": implementation,
        "recipe": recipe_of(manifest, strategy, implementation),
        "batch": _batch(manifest),
        "schedule": _SCHEDULES.get(schedule, schedule) if isinstance(schedule, str) else schedule,
        "virtual_stages": pipeline.get("virtual_stages", 1),
        "context_parallel": "allgather",
        "vocabulary_parallel": False,
        "vocabulary_parallel_loss": False,
        "device": _device(manifest),
        **{key: stated[key] for key in _STATED if key in stated},
    }
    plan: Plan = built(Plan, values, _PLAN)
    return plan


def _device(manifest: Manifest) -> str:
    return "cuda" if manifest.device not in ("", "CPU") else "cpu"


def _implementation(manifest: Manifest) -> Implementation:
    """What the plan says; else torch as DTensor works. Kernels and the backend are those of the device that was recorded."""
    stated = manifest.plan.get("implementation")
    base = replace(IMPLEMENTATIONS["torch"], regather_inputs=False) if stated is None else implementation_of(stated, _PLAN)
    cpu = _device(manifest) == "cpu"
    return replace(base, norm_kernel="composite" if cpu else "fused", backend_copies=cpu and "gloo" in manifest.backend)


def _data_parallel(manifest: Manifest, sizes: Mapping[str, int]) -> tuple[Strategy, MeshSizes]:
    """The data-parallel strategy and the mesh, in which ranks of ep are counted among the data-parallel ones."""
    stated = manifest.plan.get("strategy")
    strategy = _observed(manifest, sizes) if stated is None else strategy_of(stated, _PLAN)
    mesh = {name: sizes.get(name, 1) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    experts = sizes.get("ep", 1)
    mesh["dp_shard" if strategy.shards_parameters else "dp_replicate"] *= experts
    if strategy.name == "fsdp2" and mesh["dp_replicate"] > 1:
        strategy = replace(strategy, name="hsdp")
    if strategy.name == "ddp" and mesh["dp_replicate"] * mesh["dp_shard"] * mesh["cp"] == 1:
        strategy = Strategy("none")
    return strategy, MeshSizes(**mesh, ep=experts, expert_copies=mesh["tp"] > 1)


def _observed(manifest: Manifest, sizes: Mapping[str, int]) -> Strategy:
    """What the units are. Ranks that nothing wraps share nothing, if there is one of them a copy of the model."""
    kinds = {unit.kind for unit in manifest.units}
    for kind, name in (("fsdp2", "fsdp2"), ("fsdp1", "fsdp1"), ("ddp_bucket", "ddp")):
        if kind in kinds:
            seen = {unit.reshard_after_forward for unit in manifest.units if not unit.root} - {None}
            after = True if len(seen) > 1 or not seen else seen.pop()
            return Strategy(name, reshard_after_forward=True if after is None else after)
    if all(size == 1 for axis, size in sizes.items() if axis not in ("pp", "tp")):
        return Strategy("none")
    raise UsageError("the manifest does not tell how data-parallel ranks share the model")


def _buckets(manifest: Manifest) -> tuple[int, ...]:
    """Elements of DDP's buckets, where the program does not say how they are cut."""
    if "strategy" in manifest.plan:
        return ()
    return tuple(unit.elements for unit in manifest.units if unit.kind == "ddp_bucket" and 0 < unit.elements <= MOST)


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
    found = manifest.batch
    sizes = {} if found is None else {"micro_batch": found.micro_batch, "micro_batches": found.micro_batches}
    again = {"recompute": manifest.plan["recompute"]} if "recompute" in manifest.plan else {}
    batch: Batch = built(Batch, {**{name: size for name, size in sizes.items() if size}, **again}, "the manifest's batch")
    return batch


def recipe_of(manifest: Manifest, strategy: Strategy, implementation: Implementation) -> Recipe:
    """Bytes an element of every copy of a parameter, by the precision and the optimizer that were recorded."""
    precision, optimizer = manifest.precision, manifest.optimizer
    kind = (optimizer.kind.lower() if optimizer else "adam").removeprefix("sharded")
    states = OPTIMIZERS.get("momentum" if kind == "sgd" and optimizer and optimizer.options.get("momentum") else kind, 2)
    if precision is None or precision.parameters not in BYTES:
        raise UsageError("the element type of the parameters is not recorded")
    parameter = BYTES[precision.parameters]
    compute = BYTES.get(precision.compute, parameter)
    reduce = BYTES.get(precision.reduce, parameter) if strategy.shards_parameters else parameter
    gradient = BYTES.get(precision.gradients, parameter)
    if implementation.padding == "deepspeed":  # its optimizer has a copy of the parameters of any type
        return Recipe("recorded", parameter, compute, gradient, reduce, (4,) * states, master=4)
    if (parameter, compute, gradient, reduce) == (4, 4, 4, 4):
        return replace(RECIPES["fp32"], moments=RECIPES["fp32"].moments[:states])
    return Recipe("recorded", parameter, compute, gradient, reduce, (4,) * states)


def _flags(manifest: Manifest, plan: Plan, sizes: Mapping[str, int]) -> list[Traffic]:
    """One number or so, all-reduced in every step: DeepSpeed's norm and its check; torch's gradient scaler over sharded gradients."""
    precision = manifest.precision
    scales = precision is not None and precision.loss_scaling
    low = precision is not None and precision.parameters in ("float16", "bfloat16")

    def row(axis: str, size: int) -> Traffic:
        return Traffic(axis, "metrics", "all_reduce", "optimizer", sizes.get(axis, 1), 1, 1, size)

    if plan.framework == "deepspeed":
        whole_state = plan.strategy.shards_parameters
        return [row("dp_shard", 8 if whole_state else 4), *([row("dp_shard", 1)] if scales or (low and not whole_state) else [])]
    axis = "pp" if plan.mesh.pp > 1 else "dp_shard"
    return [row(axis, 4)] if scales and plan.framework != "torch_zero" and sizes.get(axis, 1) > 1 else []


def parameters_of(manifest: Manifest) -> list[Parameter]:
    """The parameters of a model of any kind as one rank computes with them: divided by tensor parallelism, not by data parallelism."""
    sizes = {axis.name: axis.size for axis in manifest.mesh}
    result = []
    for listed in manifest.parameters:
        shape = list(listed.shape)
        if len(shape) > MOST_DIMENSIONS or any(not 0 <= size <= MOST for size in shape):
            raise UsageError("a parameter in the manifest has a shape that no tensor has", "record the job again")
        for axis, placement in zip(listed.axes, listed.placements, strict=False):
            found = _SHARDED.match(placement) if axis == "tp" else None
            if found is not None and int(found[1]) < len(shape):
                shape[int(found[1])] = -(-shape[int(found[1])] // max(1, sizes.get(axis, 1)))
        width = BYTES.get(listed.dtype, 4)
        result.append(Parameter(listed.name, tuple(shape), listed.unit, width, listed.role, trainable=listed.trainable))
    return result
