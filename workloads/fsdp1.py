"""FSDP1: every unit's parameters laid end to end in one flat parameter, sharded over axis ``dp_shard``.

    torchrun --nproc-per-node 2 -m tracekit.workloads.fsdp1 -o traces/fsdp1

Strategy ``full_shard`` frees gathered parameters after forward, ``shard_grad_op`` keeps them until backward is over, ``hybrid`` shards
within dp_shard and replicates over dp_replicate (give a mesh with both axes). Collectives a rank and step, L blocks and the root:
    all-gather      2L + 1   every unit in forward; blocks again in backward (the root stays gathered)
                     L + 1   shard_grad_op: nothing in backward
    reduce-scatter   L + 1   every unit in backward
    all-reduce       L + 1   hybrid only, over dp_replicate, of each unit's reduced shard
A flat parameter starts every parameter at a multiple of 16 bytes and is padded to a multiple of the ranks.
Numerics: after one step the gathered parameters equal the single-process reference within float rounding.
Sources: PyTorch FSDP, arXiv:2304.11277.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from tracekit.errors import UsageError
from tracekit.manifest import Expected
from tracekit.recorder.units import plain_name

from .common import loop, sharding
from .common.job import Job, Training
from .common.planned import Planned
from .common.reference import adam
from .common.settings import option
from .common.transformer import Block, Transformer, initialize

MESH = {"dp_shard": 2}
STRATEGIES = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "shard_grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
}


@dataclass(frozen=True)
class Options:
    """Options of FSDP1."""

    strategy: str = option("full_shard", "when parameters are gathered, and where they are replicated", tuple(STRATEGIES))
    reduce_dtype: str = option("fp32", "element type in which gradients are reduced under bf16", ("fp32", "bf16"))
    use_orig_params: bool = option(True, "keep the original parameters as views into the flat one")


def build(job: Job, options: Options) -> Training:
    """The wrapped model."""
    hybrid = options.strategy == "hybrid"
    if hybrid != ("dp_replicate" in job.sizes):
        problem = f"--strategy {options.strategy} on axes {', '.join(job.sizes)}"
        raise UsageError(problem, "hybrid needs dp_replicate and dp_shard, the others only dp_shard")
    model = Transformer(job.shape)
    initialize(model, job.settings.seed)
    groups: Any = (job.group("dp_shard"), job.group("dp_replicate")) if hybrid else job.group("dp_shard")
    wrapped = FullyShardedDataParallel(
        model.to(job.device),
        process_group=groups,
        sharding_strategy=STRATEGIES[options.strategy],
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, Block),  # noqa: ARG005
        mixed_precision=_policy(job, options.reduce_dtype),
        device_id=job.device,
        use_orig_params=options.use_orig_params,
    )
    return Training(
        models=[wrapped],
        optimizer=adam(wrapped.parameters(), job.settings.learning_rate),
        gathered=lambda: _gathered(wrapped),
        accumulating=lambda last: nullcontext(),  # noqa: ARG005
        autocast=False,
        scaler=ShardedGradScaler(job.device.type, init_scale=job.settings.loss_scale) if job.settings.precision == "fp16" else None,
        describe={"precision": sharding.precision(job, options.reduce_dtype)},
    )


def _policy(job: Job, reduce_dtype: str) -> MixedPrecision | None:
    if job.settings.precision in ("fp32", "fp8"):
        return None
    compute = sharding.TYPES[job.settings.precision]
    return MixedPrecision(param_dtype=compute, reduce_dtype=sharding.TYPES[reduce_dtype], buffer_dtype=compute)


def _gathered(model: FullyShardedDataParallel) -> dict[str, Tensor]:
    with FullyShardedDataParallel.summon_full_params(model):
        return {plain_name(name): p.detach().clone() for name, p in model.named_parameters()}


def expected(job: Job, options: Options) -> list[Expected]:
    """Collectives of one rank and step."""
    world = job.size("dp_shard")
    with torch.device("meta"):
        model = Transformer(job.shape)
    units = {name: flat_elements(list(shapes), world, options.use_orig_params) for name, shapes in sharding.unit_elements(model).items()}
    reshard = options.strategy != "shard_grad_op"
    return sharding.expected(job, units, reshard, options.reduce_dtype, rounds=job.settings.micro_batches)


def flat_elements(elements: list[int], world: int, use_orig_params: bool) -> int:
    """Elements of a flat parameter made of fp32 parameters: each but the last aligned to 16 bytes, the whole padded to ``world``."""
    per_line = 4 if use_orig_params else 1
    total = sum(-(-size // per_line) * per_line for size in elements[:-1]) + elements[-1]
    return -(-total // world) * world


def planned(job: Job, options: Options) -> Planned:  # noqa: ARG001
    """What the analytical model is told."""
    strategy = {
        "name": "hsdp" if options.strategy == "hybrid" else "fsdp1",
        "reshard_after_forward": options.strategy != "shard_grad_op",
        "use_orig_params": options.use_orig_params,
    }
    return {"strategy": strategy, "implementation": {"padding": "torch_fsdp1"}}


if __name__ == "__main__":
    loop.main(__name__)
