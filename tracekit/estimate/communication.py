"""What one rank sends in a step, by mesh axis and purpose: calls, full bytes, sent bytes.

Symbols: m micro-batches, W shard group, R replicas, N padded elements of the stage; q, r bytes of a gathered and a reduced element; T
tokens of a micro-batch on this rank; h hidden; t, c, p, EP sizes of axes; F(x) = (x-1)/x. A step's calls and bytes sent (ring):

    ddp            all-reduce of every bucket over R: 2 F(R) r N
    zero1, zero2   reduce-scatter of every bucket + all-gather of the updated parameters: F(W) N (r + q)
    zero3, fsdp    all-gather in forward and in backward, reduce-scatter, of every unit: F(W) N (q + q + r); a root that stays gathered,
                   and units that are not resharded, are gathered once. A second unit of experts beside a layer counts as a unit
    hsdp           the same + all-reduce of every unit's shard over R: 2 F(R) r N/W
    tp             2 all-reduces a layer forward and 2 backward, T h elements each (arXiv:1909.08053); vocabulary-parallel embedding 1,
                   head 1, loss 3 of one number a token
    sp             4 all-gathers + 4 reduce-scatters a layer of T h elements, 2 more all-gathers where inputs are gathered again
                   (arXiv:2205.05198); gradients of norms all-reduced once
    cp             ring: c-1 hops of the local keys and values forward, twice backward (KV and its gradient); allgather: all-gather of keys
                   and values, backward again and a reduce-scatter; ulysses: all-to-all of Q, K, V and output, forward and backward;
                   blockwise: all-gather of Q, all-reduce of its softmax' scale, reduce-scatter of the output, and the way back
    pp             an activation of T h elements to the next stage, a gradient to the one before; tied embeddings all-reduced
    ep             dispatch and combine, forward and backward: all-to-all of k T h elements each
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tracekit.estimate.parameters import Parameter
from tracekit.estimate.pipeline import boundary_bytes, messages_sent
from tracekit.estimate.plan import Plan
from tracekit.estimate.saved import expert_rows_sent, tokens
from tracekit.estimate.shape import ModelShape
from tracekit.estimate.traffic import Traffic, merged, stride_of

#: Bytes of an element that is summed over ranks while it travels (gradients of keys and values).
SUMMED = 4
#: Bytes of a count of rows for one expert.
COUNT = 8


def model_parallel(shape: ModelShape, plan: Plan, layers: Sequence[int], stage: int, parameters: Sequence[Parameter]) -> list[Traffic]:
    """Traffic of tensor, sequence, context, pipeline and expert parallelism of one stage in a step."""
    first, last = stage == 0, stage == plan.last_stage
    rows = [row for layer in layers for row in _layer(shape, plan, layer)]
    rows += _ends(shape, plan, first, last)
    rows += _norm_gradients(plan, parameters)
    rows += _pipeline(shape, plan, stage, first, last)
    return merged(rows)


def _layer(shape: ModelShape, plan: Plan, layer: int) -> Iterator[Traffic]:
    again = 1 if plan.batch.recompute == "full" else 0
    yield from _tensor(shape, plan, layer, again)
    yield from _context(shape, plan, again)
    yield from _expert(shape, plan, layer, again)


def _tensor(shape: ModelShape, plan: Plan, layer: int, again: int) -> Iterator[Traffic]:
    """Two blocks a layer (attention, MLP), each with one pair of collectives a pass. Full recomputation repeats those of the forward.

    A layer of undivided experts (etp 1) has only attention's pair with sequence parallelism, as its tokens are divided already, and where
    every rank computes all experts' outputs itself.
    """
    m, t, e = plan.batch.micro_batches, plan.mesh.tp, plan.recipe.activation
    full = tokens(shape, plan) * shape.hidden * e
    alone = plan.sequence_parallel or plan.mesh.expert_copies
    blocks = 1 if shape.has_experts(layer) and alone and plan.mesh.etp == 1 and t > 1 else 2
    if not plan.sequence_parallel:
        yield Traffic("tp", "tensor_parallel", "all_reduce", "forward", t, 1, blocks * m, full)
        yield Traffic("tp", "tensor_parallel", "all_reduce", "backward", t, 1, blocks * m * (1 + again), full)
        return
    regather = 1 if plan.implementation.regather_inputs else 0
    for kind, backward in (("all_gather", 1 + again + regather), ("reduce_scatter", 1 + again)):
        yield Traffic("tp", "sequence_parallel", kind, "forward", t, 1, blocks * m, full)
        yield Traffic("tp", "sequence_parallel", kind, "backward", t, 1, blocks * m * backward, full)


def _context(shape: ModelShape, plan: Plan, again: int) -> Iterator[Traffic]:
    """Gradients of keys and values are summed in fp32. Ulysses repeats heads of keys and values until the ranks divide them."""
    m, c, e = plan.batch.micro_batches, plan.mesh.cp, plan.recipe.activation
    stride = stride_of(plan, "cp")
    local = tokens(shape, plan)

    def row(kind: str, phase: str, calls: int, width: int, count: int, size: int = e) -> Traffic:
        return Traffic("cp", "context_parallel", kind, phase, c, stride, calls * m, -(-count * width * size // plan.mesh.tp))

    keys = shape.key_width + shape.value_width
    if c == 1:
        return
    if plan.context_parallel == "ring":
        for kind in ("send", "recv"):
            yield row(kind, "forward", c - 1, keys, local)
            yield row(kind, "backward", (1 + again) * (c - 1), keys, local)
            yield row(kind, "backward", c - 1, keys, local, SUMMED)
    elif plan.context_parallel == "allgather":
        yield row("all_gather", "forward", 1, keys, local * c)
        yield row("all_gather", "backward", again + (0 if plan.implementation.keeps_gathered_keys else 1), keys, local * c)
        yield row("reduce_scatter", "backward", 1, keys, local * c, SUMMED)
    elif plan.context_parallel == "blockwise":  # queries travel, not keys; lse and weights are one fp32 number a query and head
        outputs, whole = shape.attention_width, local * c
        yield row("all_gather", "forward", 1, shape.query_width, whole)
        yield row("all_gather", "backward", again, shape.query_width, whole)
        yield row("all_gather", "backward", 1, shape.query_width + outputs, whole)
        yield row("all_gather", "backward", 1, 2 * shape.heads, whole, SUMMED)
        for phase, calls in (("forward", 1), ("backward", again)):
            yield row("all_reduce", phase, calls, shape.heads, whole, SUMMED)
            yield row("reduce_scatter", phase, calls, outputs + shape.heads, whole, SUMMED)
        yield row("reduce_scatter", "backward", 1, shape.query_width, whole, SUMMED)
    else:
        heads = shape.kv_heads // plan.mesh.tp or 1
        repeated = c // math.gcd(heads, c)
        for width in (shape.query_width, shape.key_width * repeated, shape.value_width * repeated, shape.attention_width):
            yield row("all_to_all", "forward", 1, width, local)
            yield row("all_to_all", "backward", 1 + again, width, local)


def _expert(shape: ModelShape, plan: Plan, layer: int, again: int) -> Iterator[Traffic]:
    """Balanced routing. With tensor parallelism each rank routes its share of the tokens, unless it has copies of the experts."""
    if not shape.has_experts(layer) or plan.mesh.ep == 1:
        return
    m = plan.batch.micro_batches
    share = 1 if plan.mesh.expert_copies else plan.mesh.tp
    full = -(-expert_rows_sent(shape, plan, tokens(shape, plan)) * shape.hidden * plan.recipe.activation // share)
    if plan.implementation.expert_counts:
        counts = COUNT * shape.experts
        yield Traffic("ep", "expert_dispatch", "all_to_all", "forward", plan.mesh.ep, plan.mesh.etp, m, counts)
        yield Traffic("ep", "expert_dispatch", "all_to_all", "backward", plan.mesh.ep, plan.mesh.etp, m * again, counts)
    for purpose in ("expert_dispatch", "expert_combine"):
        yield Traffic("ep", purpose, "all_to_all", "forward", plan.mesh.ep, plan.mesh.etp, m, full)
        yield Traffic("ep", purpose, "all_to_all", "backward", plan.mesh.ep, plan.mesh.etp, m * (1 + again), full)


def _ends(shape: ModelShape, plan: Plan, first: bool, last: bool) -> Iterator[Traffic]:
    """Embedding, head and loss. Divided (Megatron): the embedding's partial rows are summed forward, the gradient of the head's input
    backward; the loss reduces the maximum, the target's logit and the sum of a token. Whole on every rank: with sequence parallelism the
    head's input is gathered forward, the gradient of the embedding's output backward; else nothing.
    """
    t, m, divided = plan.mesh.tp, plan.batch.micro_batches, plan.vocabulary_parallel
    count = tokens(shape, plan)
    full = count * shape.hidden * plan.recipe.activation
    purpose = "sequence_parallel" if plan.sequence_parallel else "tensor_parallel"

    def row(kind: str, phase: str, calls: int = m, size: int = full, what: str = purpose) -> Traffic:
        return Traffic("tp", what, kind, phase, t, 1, calls, size)

    if first and plan.sequence_parallel:
        yield row("reduce_scatter", "forward", m if divided else 0)
        yield row("all_gather", "backward")
    elif first and divided:
        yield row("all_reduce", "forward")
    if last and plan.sequence_parallel:
        yield row("all_gather", "forward")
        yield row("all_gather", "backward", m if divided and plan.implementation.regather_inputs else 0)
        yield row("reduce_scatter", "backward", m if divided else 0)
    elif last and divided:
        yield row("all_reduce", "backward")
    if last and divided and plan.vocabulary_parallel_loss:
        yield row("all_reduce", "forward", 3 * m, SUMMED * count, "loss")
    elif last and divided:
        yield row("all_gather", "forward", m, count * shape.vocabulary * plan.recipe.activation)


def _norm_gradients(plan: Plan, parameters: Sequence[Parameter]) -> Iterator[Traffic]:
    """With sequence parallelism each rank's norms saw only its tokens: their gradients are summed over tp once a step, or one by one in
    every backward."""
    norms = [p.elements for p in parameters if p.role == "norm"] if plan.sequence_parallel else []
    calls = 1 if plan.implementation.regather_inputs else plan.batch.micro_batches
    for elements in [sum(norms)] if plan.implementation.regather_inputs and norms else norms:
        yield Traffic("tp", "gradient_sync", "all_reduce", "backward", plan.mesh.tp, 1, calls, elements * plan.recipe.gradient)


def _pipeline(shape: ModelShape, plan: Plan, stage: int, first: bool, last: bool) -> Iterator[Traffic]:
    p, m, v = plan.mesh.pp, plan.batch.micro_batches, plan.virtual_stages
    if p == 1:
        return
    t = plan.mesh.tp if plan.sequence_parallel else 1
    full = boundary_bytes(shape.sequence, plan.batch.micro_batch, shape.hidden, plan.recipe.activation, t, plan.mesh.cp)
    stride = stride_of(plan, "pp")
    sent = messages_sent(plan.schedule, p, m, v)[stage]
    forward = sent // 2 if plan.vee else m * v - (m if last else 0)
    received = sent // 2 if plan.vee else m * v - (m if first else 0)
    yield Traffic("pp", "pipeline", "send", "forward", p, stride, forward, full)
    yield Traffic("pp", "pipeline", "send", "backward", p, stride, sent - forward, full)
    yield Traffic("pp", "pipeline", "recv", "forward", p, stride, received, full)
    yield Traffic("pp", "pipeline", "recv", "backward", p, stride, forward, full)
    if shape.tied_embeddings and (first or last):
        weights = -(-shape.vocabulary // plan.mesh.tp) * shape.hidden * plan.recipe.reduce
        yield Traffic("embedding", "gradient_sync", "all_reduce", "backward", 2, stride * (p - 1), 1, weights)
