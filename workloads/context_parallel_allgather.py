"""Context parallelism by all-gather: every rank gathers the keys and values of the whole sequence for its own queries.

    torchrun --nproc-per-node 2 -m tracekit.workloads.context_parallel_allgather -o traces/context_parallel_allgather

Each of the c ranks of axis ``cp`` holds T/c tokens of every sample in a row and all weights. With K = 2 B T G D elements of keys and values
(B samples a micro-batch, G heads of keys and values, D head size, L layers, e bytes an element: 4, or 2 in bf16 and fp16).
Collectives a rank and step, M micro-batches:
    all-gather       2 L M   of K e bytes: keys and values in forward, again in backward (L M with --keep-gathered)
    reduce-scatter     L M   of 4 K bytes: gradients of keys and values, summed in fp32
    all-reduce       one a bucket of gradients of the replicated weights, when the last micro-batch is over
Rank r sees keys 0 to (r+1) T/c: under a causal mask the last rank has most to compute, which the trace shows as waiting of the others.
Numerics: after one step the parameters equal the single-process reference within float rounding.
Sources: Llama 3, arXiv:2407.21783 (section 3.3.2); FlashAttention's backward, arXiv:2205.14135.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tracekit.manifest import Expected

from .common import context, loop
from .common.job import Job, Training
from .common.planned import Planned, by_hand
from .common.settings import option

MESH = {"cp": 2}


@dataclass(frozen=True)
class Options:
    """Options of context parallelism by all-gather."""

    keep_gathered: bool = option(False, "keep the gathered keys and values for backward: one all-gather a layer less, c times the memory")


class GatheredAttention(torch.autograd.Function):
    """Own queries against the keys and values of every rank up to this one."""

    @staticmethod
    def forward(ctx: Any, q_BATD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, group: dist.ProcessGroup, keep: bool) -> Tensor:
        """Gather keys and values, attend."""
        own = torch.stack((k_BGTD, v_BGTD))
        everyone = context.gather_sequence(own, group)
        tokens = q_BATD.shape[2]
        k, v = everyone[:, :, :, : (group.rank() + 1) * tokens]
        output, lse = context.attend_part(q_BATD, k, v, group.rank() * tokens, 0)
        output = output.to(q_BATD.dtype)
        ctx.group, ctx.keep = group, keep
        ctx.save_for_backward(q_BATD, everyone if keep else own, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gather again unless kept; the gradients of keys and values go home as a reduce-scatter."""
        q, saved, output, lse = ctx.saved_tensors
        everyone = saved if ctx.keep else context.gather_sequence(saved, ctx.group)
        tokens = q.shape[2]
        seen = (ctx.group.rank() + 1) * tokens
        k, v = everyone[:, :, :, :seen]
        delta = context.delta_of(output, grads[0])
        d_q, d_k, d_v = context.part_gradients(q, k, v, grads[0], lse, delta, seen - tokens, 0)
        everyones = torch.zeros(everyone.shape, device=q.device)
        everyones[0, :, :, :seen], everyones[1, :, :, :seen] = d_k, d_v
        own = context.scatter_sequence(everyones, ctx.group).to(k.dtype)
        return d_q.to(q.dtype), own[0], own[1], None, None


def build(job: Job, options: Options) -> Training:
    """The replicated model on this rank's tokens."""
    return context.training(job, lambda q, k, v, group: GatheredAttention.apply(q, k, v, group, options.keep_gathered))


def expected(job: Job, options: Options) -> list[Expected]:
    """Of one rank and step."""
    shape, rounds = job.shape, 1 if options.keep_gathered else 2
    keys_and_values = 2 * shape.sequence * shape.kv_heads * shape.head_size
    return context.expected(
        job,
        ("all_gather", rounds, rounds * keys_and_values * context.element_bytes(job)),
        ("reduce_scatter", 1, 4 * keys_and_values),
    )


def planned(job: Job, options: Options) -> Planned:  # noqa: ARG001
    """What the analytical model is told."""
    return by_hand(context_parallel="allgather", implementation={"averages_after": True, "keeps_gathered_keys": options.keep_gathered})


if __name__ == "__main__":
    loop.main(__name__)
