"""What ZeRO-2 and ZeRO-3 share: flat, padded buffers, the reduce-scatter of gradients, and loss scaling that all ranks agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from tracekit.errors import UsageError
from tracekit.manifest import Expected

from . import loop
from .job import Job

#: Both have a new name since torch 2.13, the old one warns.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def check(job: Job, axis: str) -> None:
    """UsageError where ranks along another axis work on samples of their own: nothing would synchronise them."""
    if job.data_size != job.size(axis):
        raise UsageError(
            f"this workload synchronises gradients along {axis} only", "leave the other data-parallel axis out of --mesh, or run hsdp"
        )


def padded(elements: int, world: int) -> int:
    """The smallest multiple of ``world`` that holds so many elements: every rank gets a share of one size."""
    return -(-elements // world) * world


def flattened(tensors: Sequence[Tensor], length: int) -> Tensor:
    """The elements of all tensors one after another in a new buffer of ``length``, the rest of it zero."""
    flat = torch.zeros(length, dtype=tensors[0].dtype, device=tensors[0].device)
    used = sum(tensor.numel() for tensor in tensors)
    torch.cat([tensor.detach().flatten() for tensor in tensors], out=flat[:used])
    return flat


class Reducer:
    """Sums gradients over the ranks while backward goes on, and gives this rank its share of the mean."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.recorder: Any = loop.NoRecorder()
        self._under_way: tuple[nn.Parameter, str, Tensor, Tensor, dist.Work] | None = None

    def send(self, own: nn.Parameter, buffer: Tensor, name: str, into: Tensor | None = None) -> None:
        """Begin to reduce ``buffer``, which is given away; this rank's share of it is for ``own.grad``.

        Only one reduction is under way at a time, so that no more than two buffers exist. ``into``: where the share comes to lie.
        """
        self.collect()
        with torch.profiler.record_function(f"reduce gradients of {name}"):
            buffer /= self.group.size()
            part = torch.empty(own.shape, dtype=buffer.dtype, device=own.device) if into is None else into
            work = reduce_scatter(part, buffer, group=self.group, async_op=True)
        self._under_way = (own, name, buffer, part, work)

    def collect(self) -> None:
        """Wait for the reduction under way and add its result to the gradient that it is for."""
        if self._under_way is None:
            return
        (own, name, _, part, work), self._under_way = self._under_way, None
        work.wait()
        if own.grad is None:
            own.grad = part.to(own.dtype)
            self.recorder.own(own.grad, "gradients", name, name)
        else:
            own.grad += part


def scaler(job: Job, axis: str) -> Any:
    """A gradient scaler for fp16, None for every other precision.

    A rank sees only its own share of the gradients; where one finds an infinity there all have to leave the step out.
    """
    if job.settings.precision != "fp16":
        return None
    return ShardedGradScaler(device=job.device.type, init_scale=job.settings.loss_scale, process_group=job.group(axis))


def expected_of_scaler(job: Job, axis: str) -> list[Expected]:
    """What that scaler adds to a step: one all-reduce of whether a gradient was not finite."""
    return [Expected("all_reduce", axis, "metrics", 1, 4)] if job.settings.precision == "fp16" else []
