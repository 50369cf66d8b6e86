"""DDP: every rank holds the whole model; gradients are averaged over axis ``dp_replicate`` in buckets while backward still runs.

    torchrun --nproc-per-node 2 -m tracekit.workloads.ddp -o traces/ddp

Collectives a rank and step:
    all-reduce   one a bucket, of all gradients together N elements; under gradient accumulation only in the last micro-batch (no_sync)
A bucket holds whole gradients in reverse order of use, until it has reached ``bucket_cap_mb``. Which samples of a global batch are a
rank's own a DistributedSampler says: another shuffle every step, no sample twice. ``--batch`` fixes the samples of a rank, so that the
global batch grows with the ranks; ``--global-batch`` fixes those of all ranks together. ``--recompute`` sends nothing more.
Numerics: after one step the parameters equal the single-process reference within float rounding.
Sources: PyTorch Distributed, arXiv:2006.15704.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor
from torch.utils.data import DistributedSampler

from tracekit.manifest import Expected

from .common import float8, loop, zero
from .common.buckets import buckets_of
from .common.job import Job, Training
from .common.planned import Planned
from .common.recompute import IN_THE_MODEL, recompute, recompute_option
from .common.reference import adam
from .common.replicas import replicate
from .common.settings import option
from .common.transformer import Transformer, initialize

MESH = {"dp_replicate": 2}


@dataclass(frozen=True)
class Options:
    """Options of DDP."""

    bucket_cap_mb: float = option(0.5, "largest bucket in MiB")
    gradient_as_bucket_view: bool = option(False, "gradients are views into the buckets: saves one copy of all gradients")
    no_sync: bool = option(True, "reduce only in the last micro-batch; without it every micro-batch reduces")
    overlap: bool = option(True, "reduce buckets during backward; without it one bucket holds everything and goes last")
    recompute: str = recompute_option()


def build(job: Job, options: Options) -> Training:
    """The replicated model."""
    zero.check(job, "dp_replicate")
    model = Transformer(job.shape)
    initialize(model, job.settings.seed)
    model.to(job.device)
    if job.settings.precision == "fp8":
        float8.convert(model)
    recompute(model, options.recompute)
    replica = replicate(
        job,
        model,
        "dp_replicate",
        bucket_cap_mb=options.bucket_cap_mb if options.overlap else 1 << 20,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
    )
    return Training(
        models=[replica],
        optimizer=adam(replica.parameters(), job.settings.learning_rate),
        gathered=lambda: {name: p.detach() for name, p in model.named_parameters()},
        share=shares(job),
        accumulating=lambda last: nullcontext() if last or not options.no_sync else replica.no_sync(),
        scaler=loop.scaler(job),
    )


def shares(job: Job) -> Callable[[int, Tensor], Tensor]:
    """This rank's samples of a global batch [samples, ...] in a step."""
    ranks, place = job.size("dp_replicate"), job.place("dp_replicate")
    sampler: DistributedSampler[int] = DistributedSampler(
        range(job.global_batch), num_replicas=ranks, rank=place, shuffle=True, seed=job.settings.seed
    )

    def share(step: int, batch: Tensor) -> Tensor:
        sampler.set_epoch(step)
        return batch[list(sampler)]

    return share


def expected(job: Job, options: Options) -> list[Expected]:
    """All-reduces of one rank and step."""
    cap = options.bucket_cap_mb if options.overlap else 1 << 20
    buckets = buckets_of(Transformer(job.shape), cap)
    rounds = 1 if options.no_sync else job.settings.micro_batches
    elements = sum(buckets)
    return [Expected("all_reduce", "dp_replicate", "gradient_sync", rounds * len(buckets), rounds * 4 * elements)]


def planned(job: Job, options: Options) -> Planned:  # noqa: ARG001
    """What the analytical model is told."""
    cap = options.bucket_cap_mb if options.overlap else float(1 << 20)
    views, each = options.gradient_as_bucket_view, not options.no_sync
    strategy = {"name": "ddp", "bucket_cap_mb": cap, "gradient_as_bucket_view": views, "sync_every_micro_batch": each}
    return {"strategy": strategy, "recompute": IN_THE_MODEL[options.recompute]}


if __name__ == "__main__":
    loop.main(__name__)
