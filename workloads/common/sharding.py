"""What the FSDP workloads share: how the transformer is cut into units, precision policies, gathered parameters, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tracekit.errors import UsageError
from tracekit.manifest import Expected, Precision

from .job import Job
from .transformer import Transformer, initial

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def initialize_shards(model: nn.Module, device: torch.device, seed: int) -> None:
    """Give memory and values to the shards of a model that was built without any (on the meta device).

    Only one parameter at a time is whole, and nothing is sent: every rank knows the values.
    """
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            whole = initial(name, parameter.shape, seed).to(device)
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None))


#: What makes a unit: blocks; blocks, embedding, and last norm with head; nothing but the root; every module that has parameters itself.
WRAPS = ("layers", "ends", "whole", "modules")


def shard(model: Transformer, mesh: DeviceMesh, policy: MixedPrecisionPolicy, reshard: bool | int, wrap: str = "layers") -> None:
    """Make units, then one of what is left; the root stays gathered between forward and backward, as torch recommends."""
    for modules in _units(model, wrap):
        fully_shard(modules, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def _units(model: Transformer, wrap: str) -> list[list[nn.Module]]:
    """The modules of each unit but the root."""
    if wrap == "whole":
        return []
    if wrap == "modules":
        return [[module] for module in model.modules() if list(module.parameters(recurse=False))]
    blocks: list[list[nn.Module]] = [[block] for block in model.layers.values()]
    if wrap == "layers":
        return blocks
    head = [module for module in (model.norm, model.head) if module is not None]
    return [*([[model.embedding]] if model.embedding is not None else []), *blocks, *([head] if head else [])]


def unit_of(name: str, wrap: str = "layers") -> str:
    """The unit of a parameter, '' the root's."""
    words = name.split(".")
    if wrap == "whole":
        return ""
    if wrap == "modules":
        return ".".join(words[:-1])
    if words[0] == "layers":
        return ".".join(words[:2])
    return "" if wrap == "layers" else "embedding" if words[0] == "embedding" else "head"


def policy(job: Job, reduce_dtype: str) -> MixedPrecisionPolicy:
    """Parameters gathered in the precision of the job, gradients reduced in ``reduce_dtype``."""
    precision = job.settings.precision
    if precision in ("fp32", "fp8"):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=TYPES[precision], reduce_dtype=TYPES[reduce_dtype])


def precision(job: Job, reduce_dtype: str) -> Precision:
    """The same for the manifest."""
    compute = TYPES.get(job.settings.precision, torch.float32)
    reduce = torch.float32 if job.settings.precision == "fp32" else TYPES[reduce_dtype]
    names = [str(t).removeprefix("torch.") for t in (compute, reduce)]
    return Precision("float32", names[0], names[1], "float32", job.settings.precision == "fp16")


def element_bytes(job: Job, reduce_dtype: str) -> tuple[int, int]:
    """Bytes an element of gathered parameters and of reduced gradients."""
    if job.settings.precision in ("fp32", "fp8"):
        return 4, 4
    return TYPES[job.settings.precision].itemsize, TYPES[reduce_dtype].itemsize


def reshard_of(text: str, world: int) -> bool | int:
    """``true``, ``false`` or a number of ranks; UsageError for anything else."""
    if text in ("true", "false"):
        return text == "true"
    if text.isdecimal() and 1 < int(text) < world and world % int(text) == 0:
        return int(text)
    problem = f"--reshard-after-forward {text} is neither true nor false nor a proper divisor of {world} ranks"
    raise UsageError(problem, "say true, false or such a number")


def unit_elements(model: nn.Module) -> dict[str, list[int]]:
    """Unit -> elements of each of its parameters in order, '' the root's."""
    units: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        units.setdefault(unit_of(name), []).append(parameter.numel())
    return units


def padded_elements(model: nn.Module, world: int, wrap: str = "layers") -> dict[str, int]:
    """Unit -> elements that its all-gather moves, '' the root: every parameter padded along its first dimension to all ranks alike."""
    units: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        unit = unit_of(name, wrap)
        rows = -(-parameter.shape[0] // world) * world
        units[unit] = units.get(unit, 0) + rows * (parameter.numel() // parameter.shape[0])
    return units


def expected(
    job: Job, units: dict[str, int], reshard: bool | int, reduce_dtype: str, *, rounds: int = 1, reductions: int | None = None
) -> list[Expected]:
    """Collectives of FSDP2 of one rank and step: ``units`` as ``padded_elements`` gives them, '' the root, which stays gathered.

    ``rounds`` of forward and backward, ``reductions`` of them (all by default) with reduction of gradients; over dp_replicate too where the
    mesh has it. Gathers in backward after a partial reshard run over a smaller group of ranks along dp_shard.
    """
    gather, reduce = element_bytes(job, reduce_dtype)
    reductions = rounds if reductions is None else reductions
    world, replicas = job.size("dp_shard"), job.size("dp_replicate")
    everything, blocks = sum(units.values()), sum(size for name, size in units.items() if name)
    lines = []
    if world > 1:
        lines.append(Expected("all_gather", "dp_shard", "parameter_gather", rounds * len(units), rounds * gather * everything))
        if reshard is not False:
            inner = sum(1 for name in units if name)
            lines.append(Expected("all_gather", "dp_shard", "parameter_gather", rounds * inner, rounds * gather * blocks))
        lines.append(Expected("reduce_scatter", "dp_shard", "gradient_scatter", reductions * len(units), reductions * reduce * everything))
    if job.settings.precision == "fp16":  # whether any gradient overflowed
        lines.append(Expected("all_reduce", "dp_shard", "metrics", 1, 4))
    if replicas > 1:
        size = reductions * reduce * everything // world
        lines.append(Expected("all_reduce", "dp_replicate", "gradient_sync", reductions * len(units), size))
    return lines


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """Full parameters by name (a collective: every rank has to call it)."""
    return {name: p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for name, p in model.named_parameters()}


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """A sharded checkpoint: every rank writes its own part. Raises OSError."""
    import torch.distributed.checkpoint as dcp

    dcp.save(_state(model, optimizer), checkpoint_id=folder)


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Load the checkpoint in ``folder`` where there is one; it may have been written by another number of ranks."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    if not (Path(folder) / ".metadata").exists():
        return
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if dist.get_rank() == 0:
        print(f"resumed from {folder}", flush=True)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}
