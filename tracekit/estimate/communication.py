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
from dataclasses import dataclass

from tracekit.estimate.buckets import ddp_buckets, deepspeed_buckets, deepspeed_limit, zero_buckets
from tracekit.estimate.model_state import row_shard
from tracekit.estimate.padding import round_up
from tracekit.estimate.parameters import Parameter
from tracekit.estimate.pipeline import boundary_bytes, messages_sent
from tracekit.estimate.plan import WHOLE_STATE, Plan
from tracekit.estimate.saved import expert_rows_sent, tokens
from tracekit.estimate.shape import ModelShape
from tracekit.estimate.units import Unit, units_of

#: Where the axis' groups lie: how many ranks apart their members are, on a mesh pp, dp_replicate, dp_shard, cp, tp (tp innermost).
#: Bytes of an element that is summed over ranks while it travels (gradients of keys and values).
SUMMED = 4
#: Bytes of a count of rows for one expert.
COUNT = 8
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind, size and purpose on one axis in a step of one rank. ``full_bytes`` of one call; ``size`` of the group."""

    axis: str
    purpose: str
    kind: str
    phase: str
    size: int
    stride: int
    calls: int
    full_bytes: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in all calls under the ring algorithm."""
        return self.calls * sent_bytes(self.kind, self.full_bytes, self.size)


def sent_bytes(kind: str, full: int, size: int) -> int:
    """Bytes one rank sends for one call (ring): AG, RS, A2A F(x) S; AR 2 F(x) S; broadcast, reduce, send S; a group of one nothing.

    A share S/x that is no whole number is rounded down: the most that a rank of the ring sends, as ``collectives.semantics`` counts.
    """
    if kind == "send":
        return full
    if size == 1 or kind in ("recv", "barrier"):
        return 0
    share = full - full // size
    return {"all_reduce": 2 * share, "broadcast": full, "reduce": full, "gather": -(-full // size)}.get(kind, share)


def stride_of(plan: Plan, axis: str) -> int:
    """Ranks between neighbours on a mesh axis."""
    sizes = [getattr(plan.mesh, name) for name in AXES]
    result = 1
    for size in sizes[AXES.index(axis) + 1 :]:
        result *= size
    return result


def axis_name(plan: Plan, *axes: str) -> str:
    """Name of the groups over several axes: those longer than 1, joined by ``_``; the first where none is."""
    long = [axis for axis in axes if getattr(plan.mesh, axis) > 1]
    return "_".join(long) or axes[0]


def merged(rows: Sequence[Traffic]) -> list[Traffic]:
    """Rows that differ only in calls put together, in order of first appearance; groups of one and rows without calls left out."""
    calls: dict[tuple[object, ...], int] = {}
    first: dict[tuple[object, ...], Traffic] = {}
    for row in rows:
        if row.calls and (row.size > 1 or row.kind in ("send", "recv")):
            key = (row.axis, row.purpose, row.kind, row.phase, row.size, row.full_bytes)
            calls[key] = calls.get(key, 0) + row.calls
            first.setdefault(key, row)
    return [_with_calls(first[key], count) for key, count in calls.items()]


def _with_calls(row: Traffic, calls: int) -> Traffic:
    return Traffic(row.axis, row.purpose, row.kind, row.phase, row.size, row.stride, calls, row.full_bytes)


def data_parallel(parameters: Sequence[Parameter], plan: Plan) -> list[Traffic]:
    """Traffic of the data-parallel strategy, for the parameters of a rank (as ``memory.rank_memory`` takes them)."""
    units = units_of(parameters, plan)
    if plan.strategy.shards_parameters:
        rows = [row for unit in units for row in _sharded_unit(unit, plan, unit is units[-1])]
        if plan.strategy.framework == "deepspeed" and plan.strategy.bucket_cap_mb is not None:
            rows = _deepspeed_reductions(units, parameters, plan, rows)
    elif plan.strategy.name in WHOLE_STATE:
        rows = list(_ddp(parameters, plan))
    else:
        rows = list(_zero(parameters, units, plan))
    return merged(rows)


def _reduces(plan: Plan) -> int:
    """How often a step reduces each gradient."""
    return plan.batch.micro_batches if plan.strategy.syncs_each else 1


def _groups(unit: Unit, plan: Plan) -> tuple[tuple[str, int], tuple[str, int]]:
    """(axis and stride of the shard group, those of the replicas) of a unit."""
    if unit.expert:
        near = plan.mesh.expert_stride
        return ("dp_shard_in_ep", near), ("dp_replicate", stride_of(plan, "dp_replicate"))
    inner = "cp" if plan.mesh.dp_shard == 1 else "dp_shard"
    shard = stride_of(plan, "cp") if plan.mesh.cp > 1 else stride_of(plan, inner)
    return (axis_name(plan, "dp_shard", "cp"), shard), ("dp_replicate", stride_of(plan, "dp_replicate"))


def _sharded_unit(unit: Unit, plan: Plan, last: bool) -> Iterator[Traffic]:
    recipe, strategy, m = plan.recipe, plan.strategy, plan.batch.micro_batches
    (axis, stride), (replicas, replica_stride) = _groups(unit, plan)
    whole = unit.padded * recipe.compute
    once = not strategy.reshard_after_backward and strategy.reshard_after_forward is False
    yield Traffic(axis, "parameter_gather", "all_gather", "forward", unit.w, stride, 1 if once else m, whole)
    after = strategy.reshard_after_forward
    stays = after is False or (last and strategy.last_stays) or (unit.root and strategy.name != "zero3" and not strategy.root_reshards)
    if not stays:
        size = unit.w if after is True else min(int(after), unit.w)
        yield Traffic(axis, "parameter_gather", "all_gather", "backward", size, stride, m, whole)
    reduces = _reduces(plan)
    yield Traffic(axis, "gradient_scatter", "reduce_scatter", "backward", unit.w, stride, reduces, unit.padded * recipe.reduce)
    yield Traffic(replicas, "gradient_sync", "all_reduce", "backward", unit.r, replica_stride, reduces, unit.shard * recipe.reduce)


def _ddp(parameters: Sequence[Parameter], plan: Plan) -> Iterator[Traffic]:
    """Dense gradients over all data and context ranks, experts' over those with the same experts; each set has its own buckets."""
    stride = stride_of(plan, "cp") if plan.mesh.cp > 1 else stride_of(plan, "dp_replicate")
    apart = plan.mesh.ep > 1
    dense = [p for p in parameters if not (apart and p.experts)]
    sets = [(axis_name(plan, "dp_replicate", "cp"), stride, plan.replicas, dense)]
    if apart:
        experts = [p for p in parameters if p.experts]
        sets.append(("edp", plan.mesh.expert_stride, plan.expert_replicas, experts))
    for axis, near, size, members in sets:
        for bucket in ddp_buckets(members, plan.strategy.bucket_cap_mb, gradient_bytes=plan.recipe.gradient):
            yield Traffic(axis, "gradient_sync", "all_reduce", "backward", size, near, _reduces(plan), bucket.bytes)


def _zero(parameters: Sequence[Parameter], units: Sequence[Unit], plan: Plan) -> Iterator[Traffic]:
    """Gradients bucket by bucket, reduced to shards (all-reduced by torch's optimizer on top of DDP, and by DeepSpeed); then parameters.

    What was updated comes back bucket by bucket; from DeepSpeed all at once; from torch each parameter by itself.
    """
    recipe, strategy, w, reduces = plan.recipe, plan.strategy, plan.shard, _reduces(plan)
    (axis, stride), _ = _groups(units[0], plan)
    if strategy.framework == "torch_zero":
        for bucket in ddp_buckets(parameters, strategy.bucket_cap_mb, gradient_bytes=recipe.gradient):
            yield Traffic(axis, "gradient_sync", "all_reduce", "backward", w, stride, reduces, bucket.bytes)
        for parameter in parameters:
            yield Traffic(axis, "parameter_sync", "broadcast", "optimizer", w, stride, 1, parameter.elements * recipe.parameter)
        return
    for size in _zero_bucket_bytes(parameters, plan):
        elements = round_up(size // recipe.reduce, w)
        if strategy.deepspeed_allreduce:
            yield Traffic(axis, "gradient_sync", "all_reduce", "backward", w, stride, reduces, size)
        else:
            yield Traffic(axis, "gradient_scatter", "reduce_scatter", "backward", w, stride, reduces, elements * recipe.reduce)
        if strategy.framework == "buckets":
            yield Traffic(axis, "parameter_sync", "all_gather", "optimizer", w, stride, 1, elements * recipe.parameter)
    if strategy.framework != "buckets":
        full = row_shard(parameters, plan, w)[0] * w * recipe.parameter
        yield Traffic(axis, "parameter_sync", "all_gather", "optimizer", w, stride, 1, full)


def _zero_bucket_bytes(parameters: Sequence[Parameter], plan: Plan) -> list[int]:
    """Bytes of every bucket of ZeRO-1 and ZeRO-2. DeepSpeed's, where a limit is given, in elements of four bytes: stage 1 goes forward."""
    strategy, size = plan.strategy, plan.recipe.reduce
    if strategy.framework != "deepspeed" or strategy.bucket_cap_mb is None:
        return [bucket.bytes for bucket in zero_buckets(parameters, strategy.bucket_cap_mb, size)]
    order = list(parameters) if strategy.name == "zero1" else list(reversed(parameters))
    return [bucket.bytes * size for bucket in deepspeed_buckets(order, deepspeed_limit(parameters, strategy.bucket_cap_mb))]


def _deepspeed_reductions(units: Sequence[Unit], parameters: Sequence[Parameter], plan: Plan, rows: Sequence[Traffic]) -> list[Traffic]:
    """Stage 3 gathers unit by unit, and reduces bucket by bucket, each parameter padded by itself."""
    cap, w = plan.strategy.bucket_cap_mb, plan.shard
    kept = [row for row in rows if row.purpose != "gradient_scatter"]
    (axis, stride), _ = _groups(units[0], plan)
    size = {parameter.name: round_up(parameter.elements, w) * plan.recipe.reduce for parameter in parameters}
    for bucket in deepspeed_buckets(list(reversed(parameters)), deepspeed_limit(parameters, cap or 0)):
        full = sum(size[name] for name in bucket.names)
        kept.append(Traffic(axis, "gradient_scatter", "reduce_scatter", "backward", w, stride, _reduces(plan), full))
    return kept


def model_parallel(shape: ModelShape, plan: Plan, layers: Sequence[int], stage: int, parameters: Sequence[Parameter]) -> list[Traffic]:
    """Traffic of tensor, sequence, context, pipeline and expert parallelism of one stage in a step."""
    first, last = stage == 0, stage == plan.mesh.pp - 1
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
    m, t, e = plan.batch.micro_batches, plan.mesh.tp, plan.recipe.autograd
    full = tokens(shape, plan) * shape.hidden * e
    alone = plan.sequence_parallel or plan.mesh.expert_copies
    blocks = 1 if shape.has_experts(layer) and alone and plan.mesh.etp == 1 and t > 1 else 2
    if not plan.sequence_parallel:
        yield Traffic("tp", "tensor_parallel", "all_reduce", "forward", t, 1, blocks * m, full)
        yield Traffic("tp", "tensor_parallel", "all_reduce", "backward", t, 1, blocks * m * (1 + again), full)
        return
    regather = 1 if plan.regather_inputs else 0
    for kind, backward in (("all_gather", 1 + again + regather), ("reduce_scatter", 1 + again)):
        yield Traffic("tp", "sequence_parallel", kind, "forward", t, 1, blocks * m, full)
        yield Traffic("tp", "sequence_parallel", kind, "backward", t, 1, blocks * m * backward, full)


def _context(shape: ModelShape, plan: Plan, again: int) -> Iterator[Traffic]:
    """Gradients of keys and values are summed in fp32. Ulysses repeats heads of keys and values until the ranks divide them."""
    m, c, e = plan.batch.micro_batches, plan.mesh.cp, plan.recipe.autograd
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
        yield row("all_gather", "backward", again + (0 if plan.keeps_gathered_keys else 1), keys, local * c)
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
    full = -(-expert_rows_sent(shape, plan, tokens(shape, plan)) * shape.hidden * plan.recipe.autograd // share)
    if plan.expert_counts:
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
    full = count * shape.hidden * plan.recipe.autograd
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
        yield row("all_gather", "backward", m if divided and plan.regather_inputs else 0)
        yield row("reduce_scatter", "backward", m if divided else 0)
    elif last and divided:
        yield row("all_reduce", "backward")
    if last and divided and plan.vocabulary_parallel_loss:
        yield row("all_reduce", "forward", 3 * m, SUMMED * count, "loss")
    elif last and divided:
        yield row("all_gather", "forward", m, count * shape.vocabulary * plan.recipe.autograd)


def _norm_gradients(plan: Plan, parameters: Sequence[Parameter]) -> Iterator[Traffic]:
    """With sequence parallelism each rank's norms saw only its tokens: their gradients are summed over tp once a step, or one by one in
    every backward."""
    norms = [p.elements for p in parameters if p.role == "norm"] if plan.sequence_parallel else []
    calls = 1 if plan.regather_inputs else plan.batch.micro_batches
    for elements in [sum(norms)] if plan.regather_inputs and norms else norms:
        yield Traffic("tp", "gradient_sync", "all_reduce", "backward", plan.mesh.tp, 1, calls, elements * plan.recipe.gradient)


def _pipeline(shape: ModelShape, plan: Plan, stage: int, first: bool, last: bool) -> Iterator[Traffic]:
    p, m, v = plan.mesh.pp, plan.batch.micro_batches, plan.virtual_stages
    if p == 1:
        return
    t = plan.mesh.tp if plan.sequence_parallel else 1
    full = boundary_bytes(shape.sequence, plan.batch.micro_batch, shape.hidden, plan.recipe.autograd, t, plan.mesh.cp)
    stride = stride_of(plan, "pp")
    sent = messages_sent(plan.schedule, p, m, v)[stage]
    forward = m * v - (m if last else 0)
    yield Traffic("pp", "pipeline", "send", "forward", p, stride, forward, full)
    yield Traffic("pp", "pipeline", "send", "backward", p, stride, sent - forward, full)
    yield Traffic("pp", "pipeline", "recv", "forward", p, stride, m * v - (m if first else 0), full)
    yield Traffic("pp", "pipeline", "recv", "backward", p, stride, m * v - (m if last else 0), full)
    if shape.tied_embeddings and (first or last):
        weights = -(-shape.vocabulary // plan.mesh.tp) * shape.hidden * plan.recipe.reduce
        yield Traffic("embedding", "gradient_sync", "all_reduce", "backward", 2, stride * (p - 1), 1, weights)
