"""HSDP: sharded over axis ``dp_shard`` within a group of ranks, replicated over axis ``dp_replicate`` between groups.

    torchrun --nproc-per-node 4 -m tracekit.workloads.hsdp -o traces/hsdp

FSDP2 on a two-dimensional mesh. Collectives a rank and step, L blocks and the root:
    all-gather      2L + 1   over dp_shard, as FSDP2
    reduce-scatter   L + 1   over dp_shard, every unit in backward
    all-reduce       L + 1   over dp_replicate, of each unit's reduced shard: 1 / dp_shard of its gradients
Numerics: after one step the gathered parameters equal the single-process reference within float rounding.
Sources: PyTorch FSDP, arXiv:2304.11277, hybrid sharding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tracekit.manifest import Expected

from .common import loop, sharding
from .common.job import Job, Training
from .common.planned import Planned
from .common.reference import adam
from .common.settings import option
from .common.transformer import Transformer, initialize

MESH = {"dp_replicate": 2, "dp_shard": 2}


@dataclass(frozen=True)
class Options:
    """Options of HSDP."""

    reshard_after_forward: bool = option(True, "free gathered parameters between forward and backward")
    reduce_dtype: str = option("fp32", "element type in which gradients are reduced under bf16", ("fp32", "bf16"))


def build(job: Job, options: Options) -> Training:
    """The sharded and replicated model."""
    model = Transformer(job.shape)
    initialize(model, job.settings.seed)
    model.to(job.device)
    mesh = job.mesh["dp_replicate", "dp_shard"]
    sharding.shard(model, mesh, sharding.policy(job, options.reduce_dtype), options.reshard_after_forward)
    return Training(
        models=[model],
        optimizer=adam(model.parameters(), job.settings.learning_rate),
        gathered=lambda: sharding.gathered(model),
        autocast=False,
        scaler=loop.scaler(job),
        describe={"precision": sharding.precision(job, options.reduce_dtype)},
    )


def expected(job: Job, options: Options) -> list[Expected]:
    """Collectives of one rank and step."""
    with torch.device("meta"):
        units = sharding.padded_elements(Transformer(job.shape), job.size("dp_shard"))
    return sharding.expected(job, units, options.reshard_after_forward, options.reduce_dtype, rounds=job.settings.micro_batches)


def planned(job: Job, options: Options) -> Planned:  # noqa: ARG001
    """What the analytical model is told."""
    return {"strategy": {"name": "fsdp2", "reshard_after_forward": options.reshard_after_forward}}


if __name__ == "__main__":
    loop.main(__name__)
