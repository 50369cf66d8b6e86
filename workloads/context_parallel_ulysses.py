"""Ulysses: all-to-all turns tokens split over axis ``cp`` into heads split over it and back, so that attention itself is local.

    torchrun --nproc-per-node 2 -m tracekit.workloads.context_parallel_ulysses -o traces/context_parallel_ulysses

Each of the c ranks holds T/c tokens of every sample in a row and all weights. Ahead of attention every rank gives each other one that one's
share of the heads for its own tokens, and gets the other tokens of its own heads; behind attention it is the other way round.
Collectives a rank and step, M micro-batches, L layers, e bytes an element (4, or 2 in bf16 and fp16), B samples a micro-batch, A heads of
queries, G of keys and values, D head size:
    all-to-all   8 L M   forward: queries and outputs of B (T/c) A D e bytes, keys and values of B (T/c) G D e; backward the same
    all-reduce   one a bucket of gradients of the replicated weights, when the last micro-batch is over
c must divide A. Where c does not divide G, each head of keys and values is sent to r ranks, as the smallest G r that c divides; G r stands
for G then.
Numerics: after one step the parameters equal the single-process reference within float rounding.
Sources: DeepSpeed Ulysses, arXiv:2309.14509.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tracekit.errors import UsageError
from tracekit.manifest import Expected

from .common import context, loop
from .common.job import Job, Training
from .common.planned import Planned, by_hand
from .common.transformer import attend

MESH = {"cp": 2}


class Exchange(torch.autograd.Function):
    """[B, heads, tokens / c, D] -> [B, heads / c, tokens, D], or back; backward is the other direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
        """Exchange."""
        ctx.group, ctx.to_heads = group, to_heads
        return exchanged(x, group, to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Exchange the other way."""
        return exchanged(grads[0], ctx.group, not ctx.to_heads), None, None


def exchanged(x: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
    """Cut dimension ``split`` in c pieces, give one to each rank, join what comes along the other dimension."""
    split, join = (1, 2) if to_heads else (2, 1)
    pieces = x.unflatten(split, (group.size(), -1)).movedim(split, 0).contiguous()
    received = torch.zeros_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)
    return received.movedim(0, join).flatten(join, join + 1)


def copies(heads: int, kv_heads: int, ranks: int) -> int:
    """How often each head of keys and values has to be sent: the least that makes their number divide by the ranks."""
    times = ranks // math.gcd(ranks, kv_heads)
    # ranks divide the heads, and kv_heads divide the heads, so the repetition stays within the groups of queries
    assert heads % (kv_heads * times) == 0
    return times


def mix(q_BATD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All tokens of this rank's heads, attention, own tokens of all heads."""
    times = copies(q_BATD.shape[1], k_BGTD.shape[1], group.size())
    q, k, v = (
        Exchange.apply(x if r == 1 else x.repeat_interleave(r, 1), group, True) for x, r in ((q_BATD, 1), (k_BGTD, times), (v_BGTD, times))
    )
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return Exchange.apply(attend(q, k, v), group, False)


def check(job: Job) -> None:
    """UsageError where the heads cannot be shared out."""
    ranks = job.size("cp")
    if job.shape.heads % ranks:
        raise UsageError(f"{job.shape.heads} heads do not divide into {ranks} ranks of axis cp", "change --heads or --mesh")


def build(job: Job, options: object) -> Training:  # noqa: ARG001
    """The replicated model on this rank's tokens."""
    check(job)
    return context.training(job, mix)


def expected(job: Job, options: object) -> list[Expected]:  # noqa: ARG001
    """Of one rank and step."""
    check(job)
    shape, ranks = job.shape, job.size("cp")
    heads = 2 * shape.heads + 2 * shape.kv_heads * copies(shape.heads, shape.kv_heads, ranks)
    elements = 2 * heads * context.tokens_of(job) * shape.head_size
    return context.expected(job, ("all_to_all", 8, elements * context.element_bytes(job)))


def planned(job: Job, options: object) -> Planned:  # noqa: ARG001
    """What the analytical model is told."""
    return by_hand(context_parallel="ulysses")


if __name__ == "__main__":
    loop.main(__name__)
