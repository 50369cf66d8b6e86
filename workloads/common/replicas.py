"""DistributedDataParallel on any backend, the fake one included.

Annotations are evaluated here (no ``from __future__ import annotations``): DDP compares those of a hook with the types themselves.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .job import Job


def replicate(job: Job, model: nn.Module, axis: str, **options: Any) -> DistributedDataParallel:
    """``model`` with its gradients averaged along an axis; ``options`` are those of DistributedDataParallel."""
    replica = DistributedDataParallel(model, process_group=job.group(axis), **options)
    work_on_fake_group(job, replica)
    return replica


def work_on_fake_group(job: Job, replica: DistributedDataParallel) -> None:
    """Reduce through a hook under ``--backend fake``: DDP's own reduction needs a result that a fake all-reduce does not have."""
    if job.settings.backend == "fake":
        replica.register_comm_hook(replica.process_group, _reduce)


def _reduce(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The all-reduce of one bucket, done when it returns."""
    buffer = bucket.buffer().div_(group.size())
    dist.all_reduce(buffer, group=group)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done
