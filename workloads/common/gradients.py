"""Averaging the gradients of replicated parameters, by hand: in buckets, when backward is over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from tracekit.errors import UsageError
from tracekit.manifest import Expected

from .buckets import bucketed
from .job import DATA_AXES, Job

#: Largest bucket in MiB.
CAP_MB = 25

Named = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Replicas:
    """The ranks that hold the same parameters and saw different tokens: ``axis`` is what the analyzer calls their group."""

    axis: str
    size: int
    group: dist.ProcessGroup | None


def replicas(job: Job, *axes: str) -> Replicas:
    """Ranks along the data axes and ``axes``. UsageError where the mesh has other axes, which this workload would leave idle."""
    wanted = (*DATA_AXES, *axes)
    strange = [axis for axis in job.sizes if axis not in wanted]
    if strange:
        raise UsageError(f"this workload has no use for axis {strange[0]} of the mesh", f"its axes are {', '.join(dict.fromkeys(wanted))}")
    return along(job, [axis for axis, size in job.sizes.items() if size > 1])


def along(job: Job, axes: Sequence[str]) -> Replicas:
    """Ranks along none, one or all of the mesh's axes of more than one rank."""
    if not axes:
        return Replicas("", 1, None)
    if len(axes) == 1:
        return Replicas(axes[0], job.size(*axes), job.group(axes[0]))
    if job.size(*axes) != job.size(*job.sizes):
        raise UsageError(f"gradients are averaged over one axis or over all, not over {' and '.join(axes)}", "give the mesh fewer axes")
    return Replicas("world", job.size(*axes), dist.group.WORLD)


def average(parameters: Named, over: Replicas, divisor: int | None = None) -> None:
    """Sum the gradients over ``over`` and divide by ``divisor`` (its size where not given).

    One all-reduce a bucket, all started before any is waited for.
    """
    divisor = over.size if divisor is None else divisor
    if over.size == 1:
        for _, parameter in parameters:
            if parameter.grad is not None and divisor != 1:
                parameter.grad.div_(divisor)
        return
    started = []
    for bucket in bucketed(reversed(parameters), CAP_MB):
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for _, p in bucket]
        flat = torch.cat([g.flatten() for g in gradients])
        started.append((bucket, flat, dist.all_reduce(flat, group=over.group, async_op=True)))
    for bucket, flat, work in started:
        work.wait()
        pieces = flat.div_(divisor).split([p.numel() for _, p in bucket])
        for (_, parameter), piece in zip(bucket, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)


def expected(parameters: Iterable[tuple[str, nn.Parameter]], over: Replicas) -> list[Expected]:
    """All-reduces of one ``average``: one a bucket, together all the gradients."""
    named = list(parameters)
    if over.size == 1 or not named:
        return []
    calls = len(bucketed(reversed(named), CAP_MB))
    return [Expected("all_reduce", over.axis, "gradient_sync", calls, sum(p.numel() * p.element_size() for _, p in named))]
