"""DDP driven by Hugging Face Accelerate: the job of ``ddp``, with the same collectives.

    torchrun --nproc-per-node 2 -m tracekit.workloads.accelerate_ddp -o traces/accelerate_ddp

Collectives a rank and step:
    all-reduce   one a bucket, of all gradients together N elements; under gradient accumulation only in the last micro-batch, which
                 ``Accelerator.accumulate`` sees to
Numerics: after one step the parameters equal the single-process reference within float rounding.
Needs the extra ``accelerate``.
Sources: PyTorch Distributed, arXiv:2006.15704; huggingface.co/docs/accelerate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tracekit.manifest import Expected

from .common import accelerated, loop
from .common.buckets import buckets_of
from .common.job import Job, Training
from .common.planned import Planned
from .common.reference import adam
from .common.replicas import work_on_fake_group
from .common.settings import option
from .common.transformer import Transformer, initialize

MESH = {"dp_replicate": 2}


@dataclass(frozen=True)
class Options:
    """Options of DDP under Accelerate."""

    bucket_cap_mb: int = option(1, "largest bucket in MiB")
    gradient_as_bucket_view: bool = option(False, "gradients are views into the buckets: saves one copy of all gradients")


def build(job: Job, options: Options) -> Training:
    """Model and optimizer as Accelerate prepares them."""
    model = Transformer(job.shape)
    initialize(model, job.settings.seed)
    kwargs = accelerated.library().utils.DistributedDataParallelKwargs(
        bucket_cap_mb=options.bucket_cap_mb, gradient_as_bucket_view=options.gradient_as_bucket_view
    )
    accelerator = accelerated.accelerator(job, "dp_replicate", kwargs_handlers=[kwargs])
    replica, optimizer = accelerator.prepare(model, adam(model.parameters(), job.settings.learning_rate))
    work_on_fake_group(job, replica)
    return Training(
        models=[replica],
        optimizer=optimizer,
        gathered=lambda: {name: p.detach() for name, p in model.named_parameters()},
        step=accelerated.training_step(job, accelerator, replica, optimizer),
    )


def expected(job: Job, options: Options) -> list[Expected]:
    """All-reduces of one rank and step."""
    with torch.device("meta"):
        buckets = buckets_of(Transformer(job.shape), options.bucket_cap_mb)
    return [Expected("all_reduce", "dp_replicate", "gradient_sync", len(buckets), 4 * sum(buckets))]


def planned(job: Job, options: Options) -> Planned:  # noqa: ARG001
    """What the analytical model is told."""
    cap, views = float(options.bucket_cap_mb), options.gradient_as_bucket_view
    return {"strategy": {"name": "ddp", "bucket_cap_mb": cap, "gradient_as_bucket_view": views, "sync_every_micro_batch": False}}


if __name__ == "__main__":
    loop.main(__name__)
