"""Context parallelism by blocks of keys: keys and values stay where they are, queries are gathered and outputs are reduce-scattered.

    torchrun --nproc-per-node 2 -m tracekit.workloads.context_parallel_blockwise -o traces/context_parallel_blockwise

Each of the c ranks of axis ``cp`` holds T/c tokens of every sample in a row and all weights. Forward of one layer, B samples a micro-batch,
A heads of queries, D head size:
    1. all-gather of the queries, B T A D elements. Each rank attends with all queries to its own block of keys and values, which gives a
       partial output and, a query and head, the log of the partial softmax's denominator (lse); queries ahead of the block get nothing;
    2. all-reduce (maximum) of the lse, B T A elements: the common scale m. A rank's weight of a query is w = exp(lse - m), between 0 and 1;
    3. reduce-scatter (sum) of w * output and w, B T A (D + 1) elements: each rank gets both for its own queries, and their quotient is the
       attention's output; m + log(sum of w) is the whole softmax's lse.
Backward: each rank's gradients of keys and values need nothing from others but every query, its output's gradient, its lse and
delta = sum(output * gradient); these are all-gathered. The queries' gradients are partial sums: they are reduce-scattered.
Collectives a rank and step, M micro-batches, L layers, e bytes an element (4, or 2 in bf16 and fp16):
    all-gather       3 L M   queries B T A D e; queries and output gradients 2 B T A D e; lse and delta 2 B T A fp32
    all-reduce         L M   lse B T A fp32
    reduce-scatter   2 L M   B T A (D + 1) fp32 in forward, B T A D fp32 in backward
    all-reduce       one a bucket of gradients of the replicated weights, when the last micro-batch is over
Unlike the other kinds of context parallelism it never moves keys and values: that pays where they are larger than the queries.
Numerics: after one step the parameters equal the single-process reference within float rounding.
Sources: parts of a softmax and their log-sum-exp, arXiv:1805.02867; queries that pass by keys, arXiv:2411.01783; reductions of numerator
and denominator, arXiv:2408.04093.
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

MESH = {"cp": 2}


class BlockAttention(torch.autograd.Function):
    """Everybody's queries against this rank's block of keys and values."""

    @staticmethod
    def forward(ctx: Any, q_BATD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Partial outputs of all queries, put together at the ranks that own the queries."""
        tokens = q_BATD.shape[2]
        first = group.rank() * tokens
        queries = context.gather_sequence(q_BATD, group)
        part, part_lse = context.attend_part(queries[:, :, first:], k_BGTD, v_BGTD, first, first)
        lse = part_lse.new_full(queries.shape[:-1], -torch.inf)
        lse[:, :, first:] = part_lse
        scale = lse.clone()
        dist.all_reduce(scale, dist.ReduceOp.MAX, group=group)
        weight = (lse - scale).exp()[..., None]
        numerator = torch.zeros(queries.shape, device=queries.device)
        numerator[:, :, first:] = part * weight[:, :, first:]
        own = context.scatter_sequence(torch.cat((numerator, weight), -1), group)
        output = (own[..., :-1] / own[..., -1:]).to(q_BATD.dtype)
        ctx.group = group
        own_lse = scale[:, :, first : first + tokens] + own[..., -1].log()
        ctx.save_for_backward(q_BATD, k_BGTD, v_BGTD, output, own_lse)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gather what the queries' owners know, compute with the own block, send the queries' gradients home."""
        q, k, v, output, lse = ctx.saved_tensors
        first = ctx.group.rank() * q.shape[2]
        queries, gradients = context.gather_sequence(torch.stack((q, grads[0])), ctx.group)
        scalars = torch.stack((lse, context.delta_of(output, grads[0])))
        lses, deltas = context.gather_sequence(scalars[..., None], ctx.group)[..., 0]
        seeing, d_outputs, lses, deltas = (x[:, :, first:] for x in (queries, gradients, lses, deltas))
        part, d_k, d_v = context.part_gradients(seeing, k, v, d_outputs, lses, deltas, first, first)
        d_queries = torch.zeros(queries.shape, device=q.device)
        d_queries[:, :, first:] = part
        d_q = context.scatter_sequence(d_queries, ctx.group)
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), None


def build(job: Job, options: object) -> Training:  # noqa: ARG001
    """The replicated model on this rank's tokens."""
    return context.training(job, BlockAttention.apply)


def expected(job: Job, options: object) -> list[Expected]:  # noqa: ARG001
    """Of one rank and step."""
    rows, size = job.shape.sequence * job.shape.heads, job.shape.head_size
    return context.expected(
        job,
        ("all_gather", 3, rows * (3 * size * context.element_bytes(job) + 2 * 4)),
        ("all_reduce", 1, rows * 4),
        ("reduce_scatter", 2, rows * (2 * size + 1) * 4),
    )


def planned(job: Job, options: object) -> Planned:  # noqa: ARG001
    """What the analytical model is told."""
    return by_hand(context_parallel="blockwise")


if __name__ == "__main__":
    loop.main(__name__)
