"""Several strategies on one mesh: pipeline x FSDP (or HSDP) x context x tensor x expert parallelism, and the collectives of each.

Axes, outermost first: pp, dp_replicate, ep, dp_shard, cp, tp; what the mesh does not have is left out.
    tp             the matrices of every block are split (common/tensor); embedding, norms, head and experts are whole on every rank
    cp             every rank has a slice of the sequence, keys and values are gathered (context_parallel_allgather)
    dp_shard       FSDP2 shards what tensor parallelism left, over all ranks that hold the same part of the model: dp_shard, cp and ep
                   together for dense parameters (group ``ep_dp_shard_cp``), dp_shard and cp for experts, which differ along ep
    dp_replicate   HSDP: the reduced shards are averaged over the replicas
    ep             experts live on different ranks, tokens travel by all-to-all
    pp             layers are divided; gathered parameters stay until the last micro-batch's backward, gradients are reduced once a step
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tracekit.errors import UsageError
from tracekit.manifest import Expected

from ..context_parallel_allgather import GatheredAttention
from . import context, pipeline, sharding, tensor
from .experts import MoE, Routing, mixture
from .job import Job, Training
from .settings import option
from .transformer import Mlp, Shape, Transformer

AXES = ("pp", "dp_replicate", "ep", "dp_shard", "cp", "tp")
#: Axes over which ranks work on different samples.
DATA_AXES = ("dp_replicate", "ep", "dp_shard")


@dataclass(frozen=True)
class Options:
    """Options of all hybrids."""

    schedule: str = option("1f1b", "pipeline schedule", tuple(pipeline.SINGLE))


def planned() -> dict[str, object]:
    """What the analytical model is told: units stay gathered to the last micro-batch, and are reduced there."""
    return {"strategy": {"name": "fsdp2", "reshard_after_forward": False, "reshard_after_backward": False, "sync_every_micro_batch": False}}


def check(job: Job) -> None:
    """UsageError where the mesh has an axis that no hybrid knows, or sizes do not divide."""
    strange = [axis for axis in job.sizes if axis not in AXES]
    if strange:
        raise UsageError(f"hybrids have no use for axis {strange[0]} of the mesh", f"their axes are {', '.join(AXES)}")
    if [axis for axis in AXES if axis in job.sizes] != list(job.sizes):
        raise UsageError(f"the axes {', '.join(job.sizes)} stand in an order in which groups cross", f"write them as {', '.join(AXES)}")
    tensor.check(job)
    context.tokens_of(job)


def training(job: Job, options: Options, routing: Routing | None = None) -> Training:
    """This rank's stage, split, sharded and scheduled."""
    check(job)
    plan = pipeline.plan(job, options.schedule)
    group = job.group("ep") if job.size("ep") > 1 else None
    mlp: Callable[[Shape], nn.Module] = Mlp if routing is None else mixture(routing, group)
    dense, expert = _meshes(job)

    def parallelize(model: Transformer, stage: int) -> nn.Module:  # noqa: ARG001
        if job.size("tp") > 1:
            tensor.tensor_parallel(model, job.mesh["tp"])
        if job.size("cp") > 1:
            context.distribute(model, job.group("cp"), context.tokens_of(job), _gather_keys)
        policy = sharding.policy(job, "fp32")
        if dense is not None:
            for block in model.layers.values():
                if isinstance(block.mlp, MoE) and expert is not None:
                    fully_shard(block.mlp.experts, mesh=expert, mp_policy=policy, reshard_after_forward=False)
                    # Every rank of ep has sent its tokens here: their mean is over those ranks too.
                    block.mlp.experts.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it reduces
                    block.mlp.experts.set_gradient_divide_factor(float(job.size("ep", "dp_shard", "cp")))
            sharding.shard(model, dense, policy, reshard=False)
        return model

    result = pipeline.training(
        job,
        plan,
        parallelize=parallelize,
        gathered=lambda modules: {name: p for module in modules for name, p in sharding.gathered(module).items()},
        tokens=context.tokens_of(job),
        mlp=mlp,
        dtype=torch.float32 if job.settings.precision == "fp32" else sharding.TYPES[job.settings.precision],
        autocast=False,
    )
    step = result.step
    assert step is not None

    def on_own_tokens(ids_BT: Tensor, targets_BT: Tensor, recorder: object) -> Tensor | None:
        return step(context.own_tokens(job, ids_BT), context.own_tokens(job, targets_BT), recorder)

    result.step = on_own_tokens
    result.describe["precision"] = sharding.precision(job, "fp32")
    return result


def _gather_keys(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    mixed: Tensor = GatheredAttention.apply(q, k, v, group, False)
    return mixed


def _meshes(job: Job) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Meshes over which dense parameters and experts are sharded (and replicated); None where that is one rank."""
    return _mesh(job, ("ep", "dp_shard", "cp")), _mesh(job, ("dp_shard", "cp"))


def _mesh(job: Job, axes: Sequence[str]) -> DeviceMesh | None:
    here = [axis for axis in axes if axis in job.sizes]
    if job.size(*here, "dp_replicate") == 1:
        return None
    name = "_".join(here)
    flat = job.mesh[tuple(here)]._flatten(name) if len(here) > 1 else job.mesh[name]
    return job.mesh["dp_replicate", name] if job.size("dp_replicate") > 1 else flat


def expected(job: Job, options: Options, routing: Routing | None = None) -> list[Expected]:
    """Collectives of this rank a step: of the layers on its stage, and of the micro-batches."""
    check(job)
    plan = pipeline.plan(job, options.schedule)
    layers = [layer for stage in plan.stages_of(job.place("pp")) for layer in plan.layers_of(stage)]
    tokens = context.tokens_of(job)
    element = 4 if job.settings.precision == "fp32" else 2
    lines = pipeline.expected(job, plan, tokens=tokens, element_bytes=element)
    lines += _tensor(job, len(layers), tokens * job.local_batch, element, with_mlp=routing is None)
    lines += _context(job, len(layers), element)
    lines += _sharding(job, layers, routing)
    if routing is not None and job.size("ep") > 1:
        lines += _experts(len(layers), plan.micro_batches)
    return lines


def _tensor(job: Job, layers: int, tokens: int, element: int, *, with_mlp: bool) -> list[Expected]:
    """All-reduces over tp: in forward and backward, behind attention, and behind the MLP where it is split."""
    if job.size("tp") == 1:
        return []
    each = layers * (4 if with_mlp else 2)
    return [Expected("all_reduce", "tp", "tensor_parallel", each * job.settings.micro_batches, each * tokens * job.shape.hidden * element)]


def _context(job: Job, layers: int, element: int) -> list[Expected]:
    """Keys and values of this rank's heads: gathered in forward and again in backward, their gradients scattered in fp32."""
    if job.size("cp") == 1:
        return []
    heads = job.shape.kv_heads // job.size("tp")
    size = layers * job.local_batch * 2 * job.shape.sequence * heads * job.shape.head_size
    calls = layers * job.settings.micro_batches
    return [
        Expected("all_gather", "cp", "context_parallel", 2 * calls, 2 * size * element),
        Expected("reduce_scatter", "cp", "context_parallel", calls, 4 * size),
    ]


def _sharding(job: Job, layers: Sequence[int], routing: Routing | None) -> list[Expected]:
    """Every unit of the stage is gathered once a step and its gradients reduced once."""
    with torch.device("meta"):
        model = Transformer(job.shape, layers=layers, mlp=Mlp if routing is None else mixture(routing, None))
    gather, reduce = sharding.element_bytes(job, "fp32")
    dense_axes, expert_axes = ([a for a in axes if job.size(a) > 1] for axes in (("ep", "dp_shard", "cp"), ("dp_shard", "cp")))
    experts = range(0) if routing is None else range(routing.experts // job.size("ep"))
    units: dict[tuple[str, bool], int] = {}
    for name, parameter in model.named_parameters():
        words = name.split(".")
        expert = "experts" in words
        if expert and int(words[words.index("experts") + 1]) not in experts:
            continue  # all ranks hold as many
        world = job.size(*(expert_axes if expert else dense_axes))
        shape = _split(name, list(parameter.shape), job.size("tp"))
        unit = ".".join(words[:2]) if words[0] == "layers" else ""
        elements = -(-shape[0] // world) * world * math.prod(shape[1:])
        units[unit, expert] = units.get((unit, expert), 0) + elements
    lines = []
    for expert, axes in ((False, dense_axes), (True, expert_axes)):
        sizes = [size for (_, of_expert), size in units.items() if of_expert == expert]
        lines += _units(job, sizes, axes, gather, reduce)
    return lines


def _units(job: Job, sizes: Sequence[int], axes: Sequence[str], gather: int, reduce: int) -> list[Expected]:
    world, replicas = job.size(*axes), job.size("dp_replicate")
    axis, lines = axis_name(job, axes), []
    if world > 1 and sizes:
        lines.append(Expected("all_gather", axis, "parameter_gather", len(sizes), gather * sum(sizes)))
        lines.append(Expected("reduce_scatter", axis, "gradient_scatter", len(sizes), reduce * sum(sizes)))
    if replicas > 1 and sizes:
        lines.append(Expected("all_reduce", "dp_replicate", "gradient_sync", len(sizes), reduce * sum(sizes) // world))
    return lines


def axis_name(job: Job, axes: Sequence[str]) -> str:
    """What the group along ``axes`` is called: their names joined, ``world`` where it holds every rank of several axes."""
    return "world" if len(axes) > 1 and job.size(*axes) == math.prod(job.sizes.values()) else "_".join(axes)


def _split(name: str, shape: list[int], ranks: int) -> list[int]:
    """The shape of a parameter that tensor parallelism left on one rank."""
    words = name.split(".")
    if "experts" in words:
        return shape
    if any(word in ("q", "k", "v", "gate", "up") for word in words):
        return [shape[0] // ranks, *shape[1:]]
    if any(word in ("o", "down") for word in words):
        return [shape[0], shape[1] // ranks]
    return shape


def _experts(layers: int, micro_batches: int) -> list[Expected]:
    """All-to-alls of every layer and micro-batch: counts and rows out, rows back; in backward the same without counts. Sizes vary."""
    calls = layers * micro_batches
    return [
        Expected("all_to_all", "ep", "expert_dispatch", 3 * calls, -1),
        Expected("all_to_all", "ep", "expert_combine", 2 * calls, -1),
    ]
