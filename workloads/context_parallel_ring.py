"""Ring attention: keys and values travel around axis ``cp``; each rank adds up its queries' attention with an online softmax.

    torchrun --nproc-per-node 4 -m tracekit.workloads.context_parallel_ring -o traces/context_parallel_ring

Each of the c ranks holds T/c tokens of every sample in a row and all weights. A hop sends a block of keys and values, 2 B (T/c) G D
elements (B samples a micro-batch, G heads of keys and values, D head size), to the next rank and gets one from the rank before, while
the block in hand is computed with. Forward: after c - 1 hops every rank has met every block. Backward: the blocks travel again, and
behind each its gradient, to which every rank adds; a rank's own share stays at home, so that c - 1 hops bring the rest there.
Collectives a rank and step, M micro-batches, L layers, e bytes an element (4, or 2 in bf16 and fp16):
    send, recv   3 L M (c - 1) each: keys and values 2 L M (c - 1) of 2 B (T/c) G D e bytes, their gradients L M (c - 1) of four bytes
                 an element
    all-reduce   one a bucket of gradients of the replicated weights, when the last micro-batch is over
Blocks behind a rank's queries are passed on without computing: under the causal mask rank r computes r + 1 of c blocks.
Numerics: after one step the parameters equal the single-process reference within float rounding.
Sources: Ring Attention, arXiv:2310.01889; online softmax, arXiv:1805.02867; FlashAttention's backward, arXiv:2205.14135.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tracekit.manifest import Expected

from .common import context, loop
from .common.job import Job, Training
from .common.planned import Planned, by_hand

MESH = {"cp": 4}


class Hop:
    """One block under way: ``sent`` to the next rank, another one from the rank before."""

    def __init__(self, block: Tensor, group: dist.ProcessGroup) -> None:
        self._sent, self._received = block.contiguous(), torch.zeros_like(block)
        place, ranks = group.rank(), group.size()
        after, before = (dist.get_global_rank(group, p % ranks) for p in (place + 1, place - 1))
        self._works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, self._sent, after, group), dist.P2POp(dist.irecv, self._received, before, group)]
        )

    def wait(self) -> Tensor:
        """The block from the rank before; only now may the one that was sent be let go."""
        for work in self._works:
            work.wait()
        return self._received


class RingAttention(torch.autograd.Function):
    """Own queries against the blocks as they come by; the block in hand at turn i is that of the rank i places before."""

    @staticmethod
    def forward(ctx: Any, q_BATD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Output and log-sum-exp grow with every block."""
        place, ranks, tokens = group.rank(), group.size(), q_BATD.shape[2]
        block = torch.stack((k_BGTD, v_BGTD))
        output = lse = torch.empty(0)
        for turn in range(ranks):
            hop = Hop(block, group) if turn < ranks - 1 else None
            source = (place - turn) % ranks
            if source <= place:
                part = context.attend_part(q_BATD, block[0], block[1], place * tokens, source * tokens)
                output, lse = merged(output, lse, *part) if turn else part
            block = hop.wait() if hop is not None else block
        output = output.to(q_BATD.dtype)
        ctx.group = group
        ctx.save_for_backward(q_BATD, k_BGTD, v_BGTD, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the block in hand at turn i comes from the rank before at the end of turn i - 1."""
        q, k, v, output, lse = ctx.saved_tensors
        place, ranks, tokens = ctx.group.rank(), ctx.group.size(), q.shape[2]
        block, delta = torch.stack((k, v)), context.delta_of(output, grads[0])
        d_q = torch.zeros(q.shape, device=q.device)
        own = torch.zeros(block.shape, device=q.device)
        travelling: Hop | None = None
        for turn in range(ranks):
            hop = Hop(block, ctx.group) if turn < ranks - 1 else None
            source = (place - turn) % ranks
            share = torch.zeros_like(own)
            if source <= place:
                part = context.part_gradients(q, block[0], block[1], grads[0], lse, delta, place * tokens, source * tokens)
                d_q += part[0]
                share = torch.stack(part[1:])
            if turn == 0:
                own = share
            else:
                travelling = Hop(share if travelling is None else share + travelling.wait(), ctx.group)
            block = hop.wait() if hop is not None else block
        d_k, d_v = (own if travelling is None else own + travelling.wait()).to(k.dtype)
        return d_q.to(q.dtype), d_k, d_v, None


def merged(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """(output [B, A, T, D], lse [B, A, T]) of two sets of keys from those of each."""
    both = torch.logaddexp(lse, part_lse)
    return output * (lse - both).exp()[..., None] + part * (part_lse - both).exp()[..., None], both


def build(job: Job, options: object) -> Training:  # noqa: ARG001
    """The replicated model on this rank's tokens."""
    return context.training(job, RingAttention.apply)


def expected(job: Job, options: object) -> list[Expected]:  # noqa: ARG001
    """Of one rank and step."""
    shape, hops = job.shape, job.size("cp") - 1
    block = 2 * context.tokens_of(job) * shape.kv_heads * shape.head_size
    size = hops * block * (2 * context.element_bytes(job) + 4)
    return context.expected(job, ("send", 3 * hops, size), ("recv", 3 * hops, size))


def planned(job: Job, options: object) -> Planned:  # noqa: ARG001
    """What the analytical model is told."""
    return by_hand(context_parallel="ring")


if __name__ == "__main__":
    loop.main(__name__)
