"""The job's mesh, and what the model uses each of its axes for: from the mesh that was handed over, and from the model itself.

A model that is sharded or replicated knows over which process group: FSDP2's mesh, DDP's and FSDP1's group, DeepSpeed's, the mesh of a
DTensor, the group of a pipeline's stages. What neither the user nor the model knows stays unknown, and is said to be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from tracekit.manifest import Axis, Group
from tracekit.recorder import found, mesh, private
from tracekit.recorder.units import holder

#: What people call an axis -> what it is for. The model has the first word, this table the second.
_USUAL = {
    **dict.fromkeys(("dp_replicate", "dp", "ddp", "data", "batch", "replicate", "replica", "data_parallel"), "dp_replicate"),
    **dict.fromkeys(("dp_shard", "fsdp", "shard", "zero", "sharding"), "dp_shard"),
    **dict.fromkeys(("tp", "tensor", "model", "mp", "tensor_parallel", "model_parallel"), "tp"),
    **dict.fromkeys(("cp", "context", "sequence", "seq", "sp", "context_parallel", "sequence_parallel"), "cp"),
    **dict.fromkeys(("pp", "pipe", "pipeline", "stage", "pipeline_parallel"), "pp"),
    **dict.fromkeys(("ep", "expert", "experts", "expert_parallel"), "ep"),
}


@dataclass
class Layout:
    """``roles``: axis -> pp, dp_replicate, dp_shard, ep, cp or tp, for the axes of which it is known; ``notes`` on what is not."""

    axes: list[Axis] = field(default_factory=list)
    coordinate: dict[str, int] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Use:
    """A process group that the model uses: global ranks in group order, and for what."""

    ranks: tuple[int, ...]
    role: str


def layout(given: Any, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> Layout:
    """The mesh and groups of this rank. Called while torch.distributed is initialized."""
    uses = list(dict.fromkeys(use for use in uses_of(models, optimizers) if len(use.ranks) > 1))
    world = dist.get_world_size()
    named = given if given is not None else _named_mesh(models, world)
    result = _of_mesh(named) if named is not None else _of_uses(uses, world)
    places = mesh.places(named, result.axes)
    result.groups = mesh.groups_of_rank(named, result.axes, places)
    own = {tuple(sorted(group.ranks)): group.axis for group in result.groups if group.axis}
    for use in uses:
        axis = own.get(tuple(sorted(use.ranks)))
        if axis in {a.name for a in result.axes}:
            result.roles.setdefault(str(axis), str(axis) if axis in _USUAL.values() else use.role)
        elif axis is None:
            result.groups = [_with_axis(group, use) for group in result.groups]
    for name in {axis.name for axis in result.axes} - set(result.roles):
        if name.lower() in _USUAL:
            result.roles[name] = _USUAL[name.lower()]
    _tell(result, world)
    return result


def _of_mesh(given: Any) -> Layout:
    axes = mesh.axes_of(given)
    coordinate = mesh.coordinate_of(given, axes, dist.get_rank())
    return Layout(axes, coordinate)


def _of_uses(uses: Sequence[Use], world: int) -> Layout:
    """Axes from the groups alone, the one with the largest stride outermost; none where they do not make up the world."""
    by_role: dict[str, Use] = {}
    for use in uses:
        by_role.setdefault(use.role, use)
    if math.prod(len(use.ranks) for use in by_role.values()) != world or not by_role:
        return Layout()
    ordered = sorted(by_role.values(), key=lambda use: use.ranks[0] - use.ranks[1])
    axes = [Axis(use.role, len(use.ranks)) for use in ordered]
    return Layout(axes, mesh.row_major(dist.get_rank(), axes), {axis.name: axis.name for axis in axes})


def _with_axis(group: Group, use: Use) -> Group:
    if group.axis or sorted(group.ranks) != sorted(use.ranks):
        return group
    return Group(group.name, group.ranks, group.description, use.role, group.backend)


def _tell(result: Layout, world: int) -> None:
    if world > 1 and not result.axes:
        seen = sorted({group.axis for group in result.groups if group.axis and len(group.ranks) > 1})
        beyond = f" beyond {', '.join(seen)}" if seen else ""
        result.notes.append(f"how the {world} ranks share the model is not known{beyond}: the recorder was given no mesh, and found none")
    unknown = [axis.name for axis in result.axes if axis.size > 1 and axis.name not in result.roles]
    if unknown:
        result.notes.append(f"what the model uses the mesh axis {', '.join(unknown)} for is not known")


def _named_mesh(models: Sequence[nn.Module], world: int) -> Any:
    """The mesh with names and all ranks that the model's DTensors lie on; None where there is none."""
    for model in models:
        for parameter in model.parameters():
            whole = private.whole_mesh(getattr(parameter, "device_mesh", None))
            if whole is not None and whole.mesh_dim_names and whole.size() == world:
                return whole
    return None


# What the model uses -------------------------------------------------------------------------------------------------


def uses_of(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> Iterator[Use]:
    """Every process group over which these models and optimizers are shared or copied."""
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                yield from _fsdp2(module)
            elif isinstance(module, FullyShardedDataParallel):
                yield from _use(private.fsdp1_groups(module))
        if found.is_engine(model):
            yield from _use(private.deepspeed_groups(model))
    replicas = found.replicas(models)
    sharded = any(private.shards_state(holder(optimizer), optimizer) for optimizer in optimizers)
    yield from _use([(replica.process_group, "dp_shard" if sharded else "dp_replicate") for replica in replicas])
    yield from _use([(private.pipeline_group(stage), "pp") for stage in found.stages(models)])
    yield from _tensor_parallel(models)


def _fsdp2(module: nn.Module) -> Iterator[Use]:
    for group in private.fsdp2_groups(module):
        info = getattr(group, "mesh_info", None)
        yield from _use(
            [(getattr(info, "shard_process_group", None), "dp_shard"), (getattr(info, "replicate_process_group", None), "dp_replicate")]
        )


def _tensor_parallel(models: Sequence[nn.Module]) -> Iterator[Use]:
    """Dimensions of the DTensors' meshes along which no data parallelism runs; the caller has named that already."""
    for model in models:
        inside = any(isinstance(module, FSDPModule) for module in model.modules())
        for parameter in model.parameters():
            of = getattr(parameter, "device_mesh", None)
            if of is None:
                continue
            names = of.mesh_dim_names or ()
            for number in range(of.ndim):
                usual = _USUAL.get(names[number].lower()) if names else None
                if (usual == "tp") or (usual is None and not inside):
                    yield from _use([(of.get_group(number), "tp")])


def _use(pairs: Sequence[tuple[Any, str]]) -> Iterator[Use]:
    for group, role in pairs:
        if group is not None and private.is_member(group):
            yield Use(tuple(dist.get_process_group_ranks(group)), role)
