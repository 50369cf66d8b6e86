"""Parameters that travel together: their values lie in one flat buffer, of which every rank updates a slice (ZeRO-1, ZeRO-2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tracekit.manifest import Unit

from . import zero
from .buckets import bucketed
from .job import Job


class Bucket:
    """Parameters that travel together. Their values are views of one flat buffer; ``own`` is the slice of it that this rank updates."""

    def __init__(self, name: str, parameters: list[tuple[str, nn.Parameter]], rank: int, world: int) -> None:
        self.name = name
        self.names = [n for n, _ in parameters]
        self.parameters = [p for _, p in parameters]
        self.elements = sum(p.numel() for p in self.parameters)
        self.values = zero.flattened(self.parameters, zero.padded(self.elements, world))
        for parameter, piece in zip(self.parameters, self.pieces(self.values), strict=True):
            parameter.data = piece
        self.own = nn.Parameter(self.values.chunk(world)[rank])
        self.gradients: dict[int, Tensor] = {}
        self.arrived = 0

    def pieces(self, buffer: Tensor) -> list[Tensor]:
        """The part of a buffer of this bucket's length that belongs to each parameter, in its shape."""
        sizes = [p.numel() for p in self.parameters]
        return [piece.view_as(p) for p, piece in zip(self.parameters, buffer[: self.elements].split(sizes), strict=True)]

    def unit(self) -> Unit:
        """For the manifest."""
        return Unit(self.name, "zero_bucket", self.names, self.elements, self.values.numel())


def buckets(job: Job, model: nn.Module, cap_mb: float) -> list[Bucket]:
    """The parameters of a model in buckets, in the order in which backward makes their gradients."""
    cut = bucketed(reversed(list(model.named_parameters())), cap_mb)
    return [Bucket(f"bucket {i}", members, job.place("dp_shard"), job.size("dp_shard")) for i, members in enumerate(cut)]


def gather(found: Sequence[Bucket], group: dist.ProcessGroup) -> None:
    """Every rank has updated its slices: bring all of them together in the flat buffers, where the parameters are."""
    with torch.profiler.record_function("gather updated parameters"):
        works = [zero.all_gather(b.values, b.own.data, group=group, async_op=True) for b in found]
        for work in works:
            work.wait()


class WholeGradients:
    """Gradients that stay whole, as views of one flat buffer a bucket; each is reduced to this rank's slice where it lies (ZeRO-1)."""

    def __init__(self, found: Sequence[Bucket], reducer: zero.Reducer) -> None:
        self.buckets, self.reducer, self.last = found, reducer, True
        self.flat = [torch.zeros_like(bucket.values) for bucket in found]
        for bucket, flat in zip(found, self.flat, strict=True):
            for parameter, piece in zip(bucket.parameters, bucket.pieces(flat), strict=True):
                parameter.grad = piece
                parameter.register_post_accumulate_grad_hook(partial(self.ready, bucket, flat))

    def ready(self, bucket: Bucket, flat: Tensor, parameter: nn.Parameter) -> None:  # noqa: ARG002
        """Backward has added one gradient; in the last micro-batch a bucket that has all of them is reduced."""
        bucket.arrived += 1
        if bucket.arrived == len(bucket.parameters):
            bucket.arrived = 0
            if self.last:
                self.reducer.send(bucket.own, flat, bucket.name, self.slice(flat))

    def slice(self, flat: Tensor) -> Tensor:
        """This rank's part of a buffer."""
        return flat.chunk(self.reducer.group.size())[self.reducer.group.rank()]

    def clear(self) -> None:
        """A new step begins."""
        for flat in self.flat:
            flat.zero_()

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch."""
        self.last = last
        yield
        self.reducer.collect()
