"""ZeRO-2: gradients and optimizer state sharded over axis ``dp_shard``, by hand: reduce-scatter in backward, all-gather after the step.

    torchrun --nproc-per-node 2 -m tracekit.workloads.zero2 -o traces/zero2

Collectives a rank and step, B buckets that hold N elements, each bucket padded to a multiple of the ranks:
    reduce-scatter   B a micro-batch, of N elements and padding together, as soon as backward has filled a bucket
    all-gather       B, of the same elements, behind the optimizer: the parameters that each rank has updated
    all-reduce       1 of one number under fp16: whether any rank found a gradient that is not finite
A bucket holds whole gradients in reverse order of use, up to ``bucket_cap_mb``. It is cut into as many equal slices as there are ranks,
across the borders of parameters; rank r keeps the sum of slice r, its Adam state, and updates slice r of the parameters. A whole gradient
lives only until its bucket is reduced, so there is nothing to accumulate whole gradients in: every micro-batch reduces.
Numerics: after one step the parameters equal the single-process reference within float rounding.
Sources: ZeRO, arXiv:1910.02054 (P_os+g).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tracekit.manifest import Expected

from .common import flat, float8, loop, zero
from .common.buckets import buckets_of
from .common.flat import Bucket
from .common.job import Job, Training
from .common.planned import Planned
from .common.reference import adam
from .common.settings import option
from .common.transformer import Transformer, initialize

MESH = {"dp_shard": 2}


@dataclass(frozen=True)
class Options:
    """Options of ZeRO-2."""

    bucket_cap_mb: float = option(0.5, "largest bucket in MiB")
    reduce_every_micro_batch: bool = option(True, "without it whole gradients are kept, and only the last micro-batch reduces")


@dataclass
class Zero2:
    """Takes every gradient away from its parameter as soon as backward has made it, and sends a bucket off when it is full."""

    buckets: list[Bucket]
    reducer: zero.Reducer
    reducing: bool = True

    def __post_init__(self) -> None:
        """Hook into backward."""
        for bucket in self.buckets:
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(partial(self.ready, bucket, index))

    def ready(self, bucket: Bucket, index: int, parameter: nn.Parameter) -> None:
        """Backward has made one gradient."""
        gradient, parameter.grad = parameter.grad, None
        if index in bucket.gradients:  # kept from an earlier micro-batch
            gradient = bucket.gradients[index].add_(gradient)
        self.reducer.recorder.own(gradient, "unsharded_gradients", bucket.names[index], bucket.name)
        bucket.gradients[index] = gradient
        bucket.arrived += 1
        if bucket.arrived == len(bucket.parameters):
            bucket.arrived = 0
            if self.reducing:
                self.reduce(bucket)

    def reduce(self, bucket: Bucket) -> None:
        """A bucket is full: copy its gradients into one buffer, let go of them, and send the buffer off."""
        buffer = zero.flattened([bucket.gradients[i] for i in range(len(bucket.parameters))], bucket.values.numel())
        bucket.gradients.clear()
        self.reducer.recorder.own(buffer, "communication_buffers", "gradients", bucket.name)
        self.reducer.send(bucket.own, buffer, bucket.name)

    @contextmanager
    def micro_batch(self, last: bool, every: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch."""
        self.reducing = last or every
        yield
        self.reducer.collect()


def build(job: Job, options: Options) -> Training:
    """The model with its parameters in flat buckets, and Adam on this rank's slices of them."""
    zero.check(job, "dp_shard")
    model = Transformer(job.shape)
    initialize(model, job.settings.seed)
    model.to(job.device)
    if job.settings.precision == "fp8":
        float8.convert(model)
    buckets = flat.buckets(job, model, options.bucket_cap_mb)
    zero2 = Zero2(buckets, zero.Reducer(job.group("dp_shard")))
    optimizer = adam([bucket.own for bucket in buckets], job.settings.learning_rate)
    optimizer.register_step_post_hook(lambda *_: flat.gather(buckets, job.group("dp_shard")))
    training = Training(
        models=[model],
        optimizer=optimizer,
        gathered=lambda: {name: p.detach() for name, p in model.named_parameters()},
        accumulating=lambda last: zero2.micro_batch(last, options.reduce_every_micro_batch),
        scaler=zero.scaler(job, "dp_shard"),
        describe={"units": [bucket.unit() for bucket in buckets]},
    )

    def step(ids_BT: Tensor, targets_BT: Tensor, recorder: Any) -> Tensor:
        zero2.reducer.recorder = recorder
        for bucket in buckets:
            recorder.own(bucket.values, "parameters", "flat parameters", bucket.name)
        return loop.step(job, training, ids_BT, targets_BT, recorder)

    training.step = step
    return training


def expected(job: Job, options: Options) -> list[Expected]:
    """Reduce-scatters and all-gathers of one rank and step."""
    with torch.device("meta"):
        buckets = [zero.padded(elements, job.size("dp_shard")) for elements in buckets_of(Transformer(job.shape), options.bucket_cap_mb)]
    rounds = job.settings.micro_batches if options.reduce_every_micro_batch else 1
    return [
        Expected("reduce_scatter", "dp_shard", "gradient_scatter", rounds * len(buckets), rounds * 4 * sum(buckets)),
        Expected("all_gather", "dp_shard", "parameter_sync", len(buckets), 4 * sum(buckets)),
        *zero.expected_of_scaler(job, "dp_shard"),
    ]


def planned(job: Job, options: Options) -> Planned:  # noqa: ARG001
    """What the analytical model is told."""
    each = options.reduce_every_micro_batch
    return {"strategy": {"name": "zero2", "bucket_cap_mb": options.bucket_cap_mb, "sync_every_micro_batch": each}}


if __name__ == "__main__":
    loop.main(__name__)
