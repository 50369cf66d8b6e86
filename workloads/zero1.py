"""ZeRO-1: optimizer state sharded over axis ``dp_shard``: each rank updates some whole parameters and broadcasts them after the step.

    torchrun --nproc-per-node 2 -m tracekit.workloads.zero1 -o traces/zero1

Collectives a rank and step, N elements in P parameters, W ranks:
    all-reduce   one a bucket of gradients, N elements together, by DDP; under gradient accumulation only in the last micro-batch
    broadcast    P, of N elements together: each parameter from the rank that updated it; with parameters_as_bucket_view W, one a rank
A rank keeps Adam's two numbers for its own parameters only, about 2N/W in all; whole parameters are dealt out, the largest first, each to
the rank that has the fewest elements so far. Gradients are all-reduced although a rank needs only those of its own parameters: the
paper only reduces them to their owners, which sends half as much.
Numerics: after one step the parameters equal the single-process reference within float rounding.
Sources: ZeRO, arXiv:1910.02054 (P_os); torch.distributed.optim.ZeroRedundancyOptimizer.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from tracekit.manifest import Expected

from .common import float8, loop, zero
from .common.buckets import buckets_of
from .common.job import Job, Training
from .common.planned import Planned
from .common.reference import adam
from .common.replicas import replicate
from .common.settings import option
from .common.transformer import Transformer, initialize

MESH = {"dp_shard": 2}


@dataclass(frozen=True)
class Options:
    """Options of ZeRO-1."""

    bucket_cap_mb: float = option(0.5, "largest bucket of gradients in MiB")
    parameters_as_bucket_view: bool = option(False, "parameters of one rank lie in one buffer: one broadcast a rank, not one a parameter")
    no_sync: bool = option(True, "reduce only in the last micro-batch; without it every micro-batch reduces")


def build(job: Job, options: Options) -> Training:
    """The replicated model with an optimizer whose state is sharded."""
    zero.check(job, "dp_shard")
    model = Transformer(job.shape)
    initialize(model, job.settings.seed)
    model.to(job.device)
    if job.settings.precision == "fp8":
        float8.convert(model)
    replica = replicate(job, model, "dp_shard", bucket_cap_mb=options.bucket_cap_mb)
    optimizer = ZeroRedundancyOptimizer(
        replica.parameters(),
        optimizer_class=torch.optim.Adam,
        process_group=job.group("dp_shard"),
        parameters_as_bucket_view=options.parameters_as_bucket_view,
        **adam(replica.parameters(), job.settings.learning_rate).defaults,
    )
    return Training(
        models=[replica],
        optimizer=optimizer,
        gathered=lambda: {name: p.detach() for name, p in model.named_parameters()},
        accumulating=lambda last: nullcontext() if last or not options.no_sync else replica.no_sync(),
        scaler=loop.scaler(job),
    )


def expected(job: Job, options: Options) -> list[Expected]:
    """All-reduces and broadcasts of one rank and step."""
    world = job.size("dp_shard")
    with torch.device("meta"):
        model = Transformer(job.shape)
    buckets = buckets_of(model, options.bucket_cap_mb)
    rounds = 1 if options.no_sync else job.settings.micro_batches
    sizes = [p.numel() for p in model.parameters()]
    broadcasts = dealt_out(sizes, world) if options.parameters_as_bucket_view else sizes
    return [
        Expected("all_reduce", "dp_shard", "gradient_sync", rounds * len(buckets), rounds * 4 * sum(buckets)),
        Expected("broadcast", "dp_shard", "parameter_sync", len(broadcasts), 4 * sum(broadcasts)),
    ]


def dealt_out(sizes: list[int], world: int) -> list[int]:
    """Elements that each of ``world`` ranks broadcasts: parameters go to the rank with the fewest; a rank without any sends one number."""
    held = [0] * world
    for size in sorted(sizes, reverse=True):
        held[held.index(min(held))] += size
    return [max(1, elements) for elements in held]


def planned(job: Job, options: Options) -> Planned:  # noqa: ARG001
    """What the analytical model is told."""
    if options.parameters_as_bucket_view:
        return {"not_modelled": "ZeroRedundancyOptimizer's parameters_as_bucket_view"}
    strategy = {"name": "zero1", "bucket_cap_mb": options.bucket_cap_mb, "sync_every_micro_batch": not options.no_sync}
    return {"strategy": strategy, "implementation": {"padding": "torch_zero"}}


if __name__ == "__main__":
    loop.main(__name__)
