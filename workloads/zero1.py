"""ZeRO-1: optimizer state sharded over axis ``dp_shard``: each rank updates some of the parameters and sends them to the others.

    torchrun --nproc-per-node 2 -m tracekit.workloads.zero1 -o traces/zero1

Collectives a rank and step, N elements in P parameters and B buckets of gradients, W ranks. By default torch's optimizer on top of DDP:
    all-reduce       B, N elements together, by DDP; under gradient accumulation only in the last micro-batch
    broadcast        P, of N elements together: each parameter from the rank that updated it; with parameters_as_bucket_view W, one a rank
A rank keeps Adam's two numbers for its own parameters only, about 2N/W in all; whole parameters are dealt out, the largest first, each to
the rank that has the fewest elements so far. Gradients are all-reduced although a rank needs only those of its own parameters.
``--exchange reduce_scatter`` only reduces them to their owners, as the paper does, by hand; each bucket padded to a multiple of W:
    reduce-scatter   B, of N elements and padding together, as soon as backward has filled a bucket, in the last micro-batch
    all-gather       B, of the same elements, behind the optimizer: the parameters that each rank has updated
    all-reduce       1 of one number under fp16: whether any rank found a gradient that is not finite
All-reduce and broadcast send 2N (W-1)/W + N a rank and step, reduce-scatter and all-gather 2N (W-1)/W: as much as DDP. Gradients stay
whole, as views of one flat buffer a bucket; rank r keeps Adam's state of slice r of every bucket, across the borders of parameters.
Numerics: after one step the parameters equal the single-process reference within float rounding.
Sources: ZeRO, arXiv:1910.02054 (P_os); torch.distributed.optim.ZeroRedundancyOptimizer; Megatron-LM's distributed optimizer.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer

from tracekit.errors import UsageError
from tracekit.manifest import Expected

from .common import flat, float8, loop, zero
from .common.buckets import buckets_of
from .common.job import Job, Training
from .common.planned import Planned
from .common.reference import adam
from .common.replicas import replicate
from .common.settings import option
from .common.transformer import Transformer, initialize

MESH = {"dp_shard": 2}
EXCHANGES = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class Options:
    """Options of ZeRO-1."""

    exchange: str = option("all_reduce", "all_reduce and broadcast, by torch; reduce_scatter and all-gather, by hand", EXCHANGES)
    bucket_cap_mb: float = option(0.5, "largest bucket of gradients in MiB")
    parameters_as_bucket_view: bool = option(False, "parameters of one rank lie in one buffer: one broadcast a rank, not one a parameter")
    no_sync: bool = option(True, "reduce only in the last micro-batch; without it every micro-batch reduces")


def build(job: Job, options: Options) -> Training:
    """The replicated model with an optimizer whose state is sharded."""
    check(job, options)
    model = Transformer(job.shape)
    initialize(model, job.settings.seed)
    model.to(job.device)
    if job.settings.precision == "fp8":
        float8.convert(model)
    if options.exchange == "reduce_scatter":
        return by_slices(job, options, model)
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


def check(job: Job, options: Options) -> None:
    """UsageError for options that exclude each other."""
    zero.check(job, "dp_shard")
    if options.exchange == "reduce_scatter" and (options.parameters_as_bucket_view or not options.no_sync):
        problem = "--exchange reduce_scatter reduces gradients where they lie, once a step, and its parameters lie in buckets anyway"
        raise UsageError(problem, "leave out --parameters-as-bucket-view and --no-no-sync")


def by_slices(job: Job, options: Options, model: Transformer) -> Training:
    """Whole gradients, reduced to slices, and Adam on this rank's slices of the parameters."""
    group = job.group("dp_shard")
    buckets = flat.buckets(job, model, options.bucket_cap_mb)
    gradients = flat.WholeGradients(buckets, zero.Reducer(group))
    optimizer = adam([bucket.own for bucket in buckets], job.settings.learning_rate)
    optimizer.register_step_post_hook(lambda *_: flat.gather(buckets, group))
    training = Training(
        models=[model],
        optimizer=optimizer,
        gathered=lambda: {name: p.detach() for name, p in model.named_parameters()},
        accumulating=gradients.micro_batch,
        scaler=zero.scaler(job, "dp_shard"),
        describe={"units": [bucket.unit() for bucket in buckets]},
    )

    def step(ids_BT: Tensor, targets_BT: Tensor, recorder: Any) -> Tensor:
        gradients.reducer.recorder = recorder
        gradients.clear()
        for bucket, flat_gradients in zip(buckets, gradients.flat, strict=True):
            recorder.own(bucket.values, "parameters", "flat parameters", bucket.name)
            recorder.own(flat_gradients, "gradients", f"gradients of {bucket.name}", bucket.name)
        return loop.step(job, training, ids_BT, targets_BT, recorder)

    training.step = step
    return training


def expected(job: Job, options: Options) -> list[Expected]:
    """Reductions of gradients and what brings the updated parameters to all, of one rank and step."""
    check(job, options)
    world = job.size("dp_shard")
    with torch.device("meta"):
        model = Transformer(job.shape)
    buckets = buckets_of(model, options.bucket_cap_mb)
    if options.exchange == "reduce_scatter":
        size = 4 * sum(zero.padded(elements, world) for elements in buckets)
        return [
            Expected("reduce_scatter", "dp_shard", "gradient_scatter", len(buckets), size),
            Expected("all_gather", "dp_shard", "parameter_sync", len(buckets), size),
            *zero.expected_of_scaler(job, "dp_shard"),
        ]
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
    if options.exchange == "reduce_scatter":
        return {"strategy": {**strategy, "gradient_as_bucket_view": True}}
    return {"strategy": strategy, "implementation": {"padding": "torch_zero"}}


if __name__ == "__main__":
    loop.main(__name__)
