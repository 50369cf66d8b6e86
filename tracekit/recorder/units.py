"""What the model consists of: units (FSDP units, DDP buckets, blocks), parameters, and what each holds on this rank."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from tracekit.manifest import Optimizer, Parameter, Unit
from tracekit.recorder import private
from tracekit.recorder.accepted import has_groups
from tracekit.recorder.owners import storage

#: What wrappers put into a parameter's name, and what says nothing about the model.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module.")
_ROLES = (
    ("expert", re.compile(r"(^|\.)experts?(\.|$)")),
    ("router", re.compile(r"(^|\.)(router|gate)\.(?!proj)")),
    ("head", re.compile(r"(^|\.)(lm_head|head|output)\.")),
    ("embedding", re.compile(r"emb|wte|wpe|(^|\.)(tokens?|positions?)\.")),
    ("norm", re.compile(r"norm|(^|\.)ln_?")),
    ("attention", re.compile(r"att|(^|\.)(q|k|v|o|wq|wk|wv|wo|qkv)(_proj)?\.")),
    ("mlp", re.compile(r"mlp|feed_?forward|ffn|(^|\.)(up|down|gate_proj|w1|w2|w3)(_proj)?\.")),
)


def plain_name(name: str) -> str:
    """A parameter's or module's name without what DDP, FSDP1, checkpointing and compile put around it."""
    if name.startswith("module."):
        name = name.removeprefix("module.")
    for wrapper in _WRAPPERS[:-1]:
        name = name.replace(wrapper, "")
    return name.removesuffix("._fsdp_wrapped_module").removesuffix("_fsdp_wrapped_module")


def role_of(name: str) -> str:
    """What a parameter is for by its name: embedding, head, attention, mlp, norm, router, expert, or other."""
    return next((role for role, pattern in _ROLES if pattern.search(name)), "other")


def unit_modules(models: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """(name, module) of everything whose forward is worth a range: FSDP units, else the members of every ModuleList or ModuleDict.

    The root is not among them: its forward is the phase ``forward``.
    """
    found: list[tuple[str, nn.Module]] = []
    for model in models:
        sharded = [(plain_name(n), m) for n, m in model.named_modules() if n and isinstance(m, FSDPModule | FullyShardedDataParallel)]
        found += sharded or [
            (plain_name(f"{name}.{key}" if name else key), child)
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList | nn.ModuleDict)
            for key, child in module.named_children()
            if not _inside_list(name)
        ]
    return found


def _inside_list(name: str) -> bool:
    """Whether a list of modules stands inside a member of another one (experts inside a block): the outer ones are the units."""
    return any(part.isdigit() for part in name.split("."))


def units(models: Sequence[nn.Module]) -> list[Unit]:
    """Units of the strategy in force: FSDP2, FSDP1, DDP's buckets; a plain model has one a block and one for the rest."""
    result: list[Unit] = []
    for model in models:
        found = [*_fsdp2(model), *_fsdp1(model), *_buckets(model)]
        result += found or _blocks(model)
    return result


def fsdp2_units(model: nn.Module) -> list[tuple[str, list[tuple[str, nn.Module]], list[Any]]]:
    """(name, modules by name, parameter groups) of every FSDP2 unit.

    Modules that were sharded together (``fully_shard([norm, head])``) share their groups: one unit, whose name torch joins from theirs.
    """
    together: dict[int, tuple[list[tuple[str, nn.Module]], list[Any]]] = {}
    for name, module in model.named_modules():
        groups = private.fsdp2_groups(module) if isinstance(module, FSDPModule) else []
        if groups:
            together.setdefault(id(groups[0]), ([], groups))[0].append((name, module))
    return [(", ".join(plain_name(name) for name, _ in modules), modules, groups) for modules, groups in together.values()]


def _fsdp2(model: nn.Module) -> list[Unit]:
    """Several parameter groups of one module travel apart; they are one unit by name."""
    result = []
    for label, modules, groups in fsdp2_units(model):
        named = {plain_name(f"{name}.{n}" if name else n): p for name, module in modules for n, p in _owned(module)}
        world = _shard_world(list(named.values()))
        elements = sum(p.numel() for p in named.values())
        padded = sum(world * -(-p.shape[0] // world) * (p.numel() // max(1, p.shape[0])) for p in named.values() if p.dim())
        root = any(not name for name, _ in modules)
        result.append(Unit(label, "fsdp2", list(named), elements, padded, root, private.fsdp2_reshards(groups[0])))
    return result


def _shard_world(parameters: Sequence[torch.Tensor]) -> int:
    """Ranks over which the parameters are sharded on dimension 0."""
    for parameter in parameters:
        mesh, placements = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", ())
        sizes = [mesh.size(i) for i, p in enumerate(placements) if p.is_shard()] if mesh is not None else []
        if sizes:
            return int(sizes[0])
    return 1


def _owned(module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Parameters under an FSDP2 module that no FSDP2 module further down owns."""
    inner = [n for n, m in module.named_modules() if n and isinstance(m, FSDPModule)]
    for name, parameter in module.named_parameters():
        if not any(name.startswith(f"{prefix}.") for prefix in inner):
            yield name, parameter


def _fsdp1(model: nn.Module) -> list[Unit]:
    result = []
    for name, module in model.named_modules():
        handle = private.fsdp1_handle(module) if isinstance(module, FullyShardedDataParallel) else None
        if handle is None:
            continue
        flat = private.fsdp1_flat(handle)
        own = plain_name(name)
        names = [plain_name(f"{own}.{n}" if own else n) for n in flat["names"]]
        result.append(Unit(own, "fsdp1", names, flat["elements"], flat["padded"], not name))
    return result


def _buckets(model: nn.Module) -> list[Unit]:
    """DDP's buckets in the order in which they are reduced, each with its parameters in the order in which they became ready."""
    result: list[Unit] = []
    for prefix, replica in model.named_modules():
        if not isinstance(replica, DistributedDataParallel):
            continue
        width = next((p.element_size() for p in replica.parameters()), 4)
        sizes = [size // width for size in private.ddp_bucket_bytes(replica) or []]
        names = [plain_name(f"{prefix}.{n}" if prefix else n) for n, p in replica.named_parameters() if p.requires_grad]
        members = [[names[i] for i in each if i < len(names)] for each in private.ddp_bucket_members(replica)]
        members = members if len(members) == len(sizes) else [[] for _ in sizes]
        result += [Unit(f"bucket {len(result) + i}", "ddp_bucket", members[i], size, size) for i, size in enumerate(sizes)]
    return result


def _blocks(model: nn.Module) -> list[Unit]:
    blocks = unit_modules([model])
    result = []
    taken: set[str] = set()
    for name, module in blocks:
        names = [f"{name}.{n}" for n, _ in module.named_parameters()]
        elements = sum(math.prod(private.full_shape(p)) for p in module.parameters())
        taken.update(names)
        result.append(Unit(name, "module", names, elements, elements))
    rest = [(plain_name(n), p) for n, p in model.named_parameters() if plain_name(n) not in taken]
    if rest:
        elements = sum(math.prod(private.full_shape(p)) for _, p in rest)
        result.append(Unit("", "module", [n for n, _ in rest], elements, elements, root=True))
    return result


def parameters(models: Sequence[nn.Module], found: Sequence[Unit]) -> list[Parameter]:
    """Every parameter of the models as this rank holds it."""
    unit_of = {name: unit.name for unit in found if unit.kind != "ddp_bucket" for name in unit.parameters}  # a bucket holds gradients
    result = []
    for model in models:
        for raw, tensor in model.named_parameters():
            name = plain_name(raw)
            mesh = getattr(tensor, "device_mesh", None)
            placements = [str(p) for p in getattr(tensor, "placements", ())]
            shard = private.local(tensor)
            address, size = storage(tensor) or (0, shard.numel() * shard.element_size())
            result.append(
                Parameter(
                    name=name,
                    shape=private.full_shape(tensor),
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    unit=unit_of.get(name, ""),
                    local_shape=list(shard.shape),
                    address=address,
                    bytes=size,
                    trainable=tensor.requires_grad,
                    placements=placements,
                    axes=list(getattr(mesh, "mesh_dim_names", None) or ()),
                    role=role_of(name),
                )
            )
    return result


def holder(optimizer: Any) -> Any:
    """The optimizer that holds this rank's state, inside of wrappers.

    ZeroRedundancyOptimizer has one in ``optim`` that knows only the parameters updated here; Accelerate's and DeepSpeed's wrappers have the
    one that was given to them in ``optimizer``.
    """
    for name in ("optim", "optimizer"):
        inner = getattr(optimizer, name, None)
        if inner is not optimizer and (isinstance(inner, torch.optim.Optimizer) or has_groups(inner)):
            return holder(inner)
    return optimizer


def state_of(optimizer: Any) -> dict[Any, dict[str, Any]]:
    """Parameter -> what the optimizer keeps of it; {} where it keeps its state in a way that torch does not."""
    state = getattr(holder(optimizer), "state", None)
    return {key: value for key, value in state.items() if isinstance(value, dict)} if isinstance(state, Mapping) else {}


def optimizer_of(optimizers: Sequence[Any]) -> Optimizer | None:
    """Kind and state of the optimizers together; None where there are none. Only plain numbers of the options are kept."""
    optimizers = [holder(optimizer) for optimizer in optimizers]
    if not optimizers:
        return None
    elements = size = count = 0
    for optimizer in optimizers:
        count += sum(len(group["params"]) for group in optimizer.param_groups)
        for state in state_of(optimizer).values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    inner = private.local(value)
                    elements += inner.numel()
                    size += inner.numel() * inner.element_size()
    group: dict[str, Any] = next((group for optimizer in optimizers for group in optimizer.param_groups), {})
    options = {k: v for k, v in group.items() if k != "params" and isinstance(v, int | float | bool | str)}
    return Optimizer(type(optimizers[0]).__name__, count, elements, size, options)
