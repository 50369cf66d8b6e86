"""What autograd saves between forward and backward, tensor by tensor.

Symbols: T tokens of one micro-batch on this rank (b s / c), h hidden, a heads, f MLP width, t tensor-parallel ranks, e bytes an element.
For a block of GPT's kind with dropout and eager attention in 16 bit the list adds up to the published formulas (Korthikanti et al.,
arXiv:2205.05198, equations 1 to 6):

    no parallelism          s b h (34 + 5 a s / h)
    tensor parallel         s b h (10 + 24/t + 5 a s / (h t))
    + sequence parallel     s b h (34 + 5 a s / h) / t
    selective recompute     the same without the term 5 a s / h
    full recompute          2 s b h
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from tracekit.estimate.parameters import ROOT
from tracekit.estimate.plan import Plan
from tracekit.estimate.shape import ModelShape

#: Bytes of what is always in full precision: norms' statistics, log-sum-exp of attention, log-softmax of logits; of ids; of dropout masks.
FULL, ID, MASK = 4, 8, 1


@dataclass(frozen=True)
class Saved:
    """One saved tensor: its bytes on this rank, and whether selective recomputation does without it (``core``)."""

    name: str
    bytes: int
    core: bool = False


@dataclass(frozen=True)
class BackwardStep:
    """A moment in the backward of a unit: ``saved`` bytes of its own still held, ``temporaries``: gradients of activations [bytes].

    ``parts``: the layers (last but one word of a parameter's name) whose gradients are there; None: all of the unit.
    ``shares``: (part, of how many experts, of how many in all) where experts work one after another.
    """

    saved: int
    temporaries: int
    parts: tuple[str, ...] | None = ()
    shares: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one rank, by unit of the model.

    ``saved`` from forward to backward; ``stream``: what one unit hands to the next; ``embedding``: the gradient of
    the embedding's output; ``backward`` the moments of a unit's backward, with
    what is computed again for it. ``logits_saved`` stays from the loss to its backward, ``logits_forward`` and ``logits_backward`` are the
    most that logits, their copies and gradients take in each, ``logits_gradient`` what is left for the head's backward,
    ``logits_output`` the logits themselves, which a pipeline's last stage keeps as its output. ``inputs``: token
    ids and targets.
    """

    saved: Mapping[str, int]
    stream: int = 0
    embedding: int = 0
    backward: Mapping[str, tuple[BackwardStep, ...]] = field(default_factory=dict)
    logits_saved: int = 0
    logits_forward: int = 0
    logits_backward: int = 0
    logits_gradient: int = 0
    logits_output: int = 0
    inputs: int = 0


def tokens(shape: ModelShape, plan: Plan) -> int:
    """T: tokens of one micro-batch on a rank, b ceil(s/c)."""
    return plan.batch.micro_batch * -(-shape.sequence // plan.mesh.cp)


class _Sizes:
    """Widths of one rank: whole (w), divided over tensor parallelism (t), divided where sequence parallelism is on (s)."""

    def __init__(self, shape: ModelShape, plan: Plan) -> None:
        self.shape, self.plan = shape, plan
        self.e, self.t, self.count = plan.recipe.autograd, plan.mesh.tp, tokens(shape, plan)
        self.sequence = self.t if plan.sequence_parallel else 1

    def whole(self, name: str, width: int, e: int | None = None) -> Saved:
        return Saved(name, self.count * width * (e or self.e))

    def tensor(self, name: str, width: int, e: int | None = None, core: bool = False) -> Saved:
        return Saved(name, -(-self.count * width * (e or self.e) // self.t), core)

    def by_sequence(self, name: str, width: int, e: int | None = None) -> Saved:
        return Saved(name, -(-self.count * width * (e or self.e) // self.sequence))

    def gathered(self, name: str, width: int) -> Saved:
        """The input of a column-parallel layer: with sequence parallelism the shard only, where it is gathered again."""
        keep_shard = self.plan.sequence_parallel and self.plan.regather_inputs
        return self.by_sequence(name, width) if keep_shard else self.whole(name, width)


def layer_saved(shape: ModelShape, plan: Plan, layer: int) -> list[Saved]:
    """Every tensor that one layer saves without recomputation, for one micro-batch."""
    size = _Sizes(shape, plan)
    experts = shape.has_experts(layer)
    return [
        *_norm(size, "attention_norm"),
        *_attention(size),
        *_norm(size, "mlp_norm"),
        *(_experts(size, layer) if experts else _mlp(size, "mlp", shape.ffn)),
        *([size.by_sequence("residual_dropout_mask", 2 * shape.hidden, MASK)] if shape.dropout else []),
    ]


def _norm(size: _Sizes, name: str) -> Iterator[Saved]:
    """Input and statistics; composed of single operations: input and normalised values in fp32. Statistics of 1 or 2 numbers a token.

    Korthikanti et al. leave the statistics out, as they are 1/h of the rest; so does a shape with dropout here, which is theirs.
    """
    hidden = size.shape.hidden
    if size.plan.norm_kernel == "composite":
        yield size.by_sequence(f"{name}.input", hidden, FULL)
        yield size.by_sequence(f"{name}.normalised", hidden, FULL)
    else:
        yield size.by_sequence(f"{name}.input", hidden)
    if not size.shape.dropout:
        yield size.by_sequence(f"{name}.statistics", 2 if size.shape.norm == "layernorm" else 1, FULL)


def _attention(size: _Sizes) -> Iterator[Saved]:
    shape = size.shape
    yield size.gathered("attention.input", shape.hidden)
    if shape.latent:
        yield size.whole("attention.compressed", 2 * (shape.latent.query_rank + shape.latent.key_value_rank))
    expand = shape.heads // shape.kv_heads if size.plan.expand_kv else 1
    yield size.tensor("attention.queries", shape.query_width)
    yield size.tensor("attention.keys", shape.key_width * expand)
    yield size.tensor("attention.values", shape.value_width * expand)
    if size.plan.batch.attention == "flash":
        yield size.tensor("attention.log_sum_exp", shape.heads, FULL)
    else:
        yield size.tensor("attention.softmax", shape.heads * shape.sequence, core=True)
        if shape.dropout:
            yield size.tensor("attention.softmax_dropout", shape.heads * shape.sequence, core=True)
            yield size.tensor("attention.softmax_dropout_mask", shape.heads * shape.sequence, MASK, core=True)
    yield size.tensor("attention.output", shape.attention_width)
    if size.plan.mesh.cp > 1:  # put together from the ranks' parts, and laid out for the linear layer behind
        yield size.tensor("attention.joined", shape.attention_width)


def _mlp(size: _Sizes, name: str, width: int) -> Iterator[Saved]:
    """Two linear layers: their inputs and that of the activation between; gated: gate, its activation, up and their product."""
    yield size.gathered(f"{name}.input", size.shape.hidden)
    yield from _mlp_inside(size, name, width)


def _mlp_inside(size: _Sizes, name: str, width: int) -> Iterator[Saved]:
    for part in ("gate", "gate_activated", "up", "product") if size.shape.gated else ("up", "activated"):
        yield size.tensor(f"{name}.{part}", width)


def _experts(size: _Sizes, layer: int) -> Iterator[Saved]:
    """Router, the k copies of each token that reach experts, and the shared experts. Balanced routing: as many arrive as leave.

    With tensor parallelism each of the t ranks routes its 1/t of the tokens (or, experts divided, has 1/t of each expert's width), unless
    it has copies of the experts.
    """
    shape, sent, arrived = size.shape, _sent_rows(size), expert_rows(size.shape, size.plan, layer)
    yield size.gathered("mlp.input", shape.hidden)
    yield size.by_sequence("router.probabilities", shape.experts, FULL)
    yield Saved("experts.input", arrived * shape.hidden * size.e)
    for part in ("gate", "gate_activated", "up", "product") if shape.gated else ("up", "activated"):
        yield Saved(f"experts.{part}", arrived * shape.expert_ffn * size.e)
    yield Saved("experts.output", sent * shape.hidden * size.e)
    if size.plan.plain_experts:
        yield Saved("experts.combined", sent * shape.hidden * size.e)
        yield Saved("experts.indices", (4 * sent + 2 * arrived) * ID + (2 * sent + size.count) * FULL)
    if shape.shared_experts:
        yield from _mlp_inside(size, "shared_experts", shape.shared_experts * shape.expert_ffn)


def _sent_rows(size: _Sizes) -> int:
    """Rows that this rank's tokens send to experts."""
    t = 1 if size.plan.mesh.expert_copies else size.t
    return -(-expert_rows_sent(size.shape, size.plan, size.count) // t)


def expert_rows_sent(shape: ModelShape, plan: Plan, count: int) -> int:
    """Rows of ``count`` tokens: k each; padded to E ceil(factor k T / E) where every expert takes as many."""
    rows = shape.top_k * count
    return shape.experts * math.ceil(plan.expert_padding * rows / shape.experts) if plan.expert_padding else rows


def expert_rows(shape: ModelShape, plan: Plan, layer: int) -> int:
    """Rows that arrive at this rank's experts in one micro-batch."""
    return plan.expert_loads[layer] if layer < len(plan.expert_loads) else _sent_rows(_Sizes(shape, plan))


def layer_bytes(shape: ModelShape, plan: Plan, layer: int) -> tuple[int, int]:
    """(bytes that a layer keeps to its backward, bytes that come back while it is computed again), by the plan's recomputation."""
    saved = layer_saved(shape, plan, layer)
    everything = sum(tensor.bytes for tensor in saved)
    if plan.batch.recompute == "full":
        return checkpoint_bytes(shape, plan), everything
    core = sum(tensor.bytes for tensor in saved if tensor.core) if plan.batch.recompute == "selective" else 0
    return everything - core, core


def checkpoint_bytes(shape: ModelShape, plan: Plan) -> int:
    """The input of one layer, which full recomputation keeps: e T h (/t with sequence parallelism) [bytes]."""
    return _Sizes(shape, plan).by_sequence("checkpoint", shape.hidden).bytes


def logits_bytes(shape: ModelShape, plan: Plan, e: int) -> int:
    """T V elements of ``e`` bytes, divided over tensor parallelism where the loss works on shards of the vocabulary."""
    t = plan.mesh.tp if plan.vocabulary_parallel and plan.vocabulary_parallel_loss else 1
    return -(-tokens(shape, plan) * shape.vocabulary * e // t)


def block_backward(shape: ModelShape, plan: Plan, layer: int) -> tuple[BackwardStep, ...]:
    """The backward of one layer from its last matrix to its first, each with what is saved, new gradients and gradients passed on.

    S is the residual's gradient, F that of the MLP's inner tensors. A linear layer's backward holds its input, the gradient that comes, the
    one it passes on and that of its weight; the input is free after it.
    """
    size = _Sizes(shape, plan)
    saved = layer_saved(shape, plan, layer)
    whole = sum(tensor.bytes for tensor in saved)
    stream = size.by_sequence("residual", shape.hidden).bytes
    inner = size.tensor("inner", shape.ffn).bytes
    if shape.has_experts(layer):
        inner = expert_rows(shape, plan, layer) * shape.expert_ffn * size.e
    mlp = sum(tensor.bytes for tensor in saved if tensor.name.startswith(("mlp.", "experts.", "shared_experts.", "router.")))
    inside = sum(tensor.bytes for tensor in saved if tensor.name.endswith((".up", ".activated", ".gate", ".gate_activated", ".product")))
    heads = size.tensor("heads", shape.query_width + shape.key_width + shape.value_width).bytes
    return (
        BackwardStep(whole, stream + inner, ("down",)),
        BackwardStep(whole - inner, stream + inner * (3 if shape.gated else 2), ("down",)),
        BackwardStep(whole - inside, 2 * stream + inner * (2 if shape.gated else 1), ("down", "up")),
        BackwardStep(whole - inside, (3 if shape.gated else 2) * stream + inner, ("down", "up", "gate")),
        BackwardStep(whole - mlp, 3 * stream, ("down", "up", "gate", "router", "o")),
        BackwardStep(whole - mlp, 2 * stream + heads, ("down", "up", "gate", "router", "mlp_norm", "o")),
        BackwardStep(0, stream, None),
    )


def stage_activations(shape: ModelShape, plan: Plan, layers: list[int], first: bool, last: bool) -> Activations:
    """Activations of the layers of one stage (or one chunk of it), with embedding and head where they belong to it."""
    size = _Sizes(shape, plan)
    saved: dict[str, int] = {}
    backward: dict[str, tuple[BackwardStep, ...]] = {}
    kinds: dict[object, tuple[int, tuple[BackwardStep, ...]]] = {}  # all layers without experts are alike, and all with as many rows
    for layer in layers:
        kind = (shape.has_experts(layer), plan.expert_loads[layer : layer + 1])
        if kind not in kinds:
            kinds[kind] = layer_bytes(shape, plan, layer)[0], block_backward(shape, plan, layer)
        unit = ROOT if plan.wrap == "whole" else f"layers.{layer}"
        saved[unit] = saved.get(unit, 0) + kinds[kind][0]
        backward[unit] = kinds[kind][1]
    stream = size.by_sequence("residual", shape.hidden).bytes
    if layers and not first and plan.mesh.pp > 1 and plan.receive_buffers and (plan.norm_kernel == "fused" or size.e == FULL):
        unit = ROOT if plan.wrap == "whole" else f"layers.{layers[0]}"
        saved[unit] -= stream  # the first norm's input is the buffer in which it was received
        backward[unit] = tuple(replace(step, saved=max(0, step.saved - stream)) for step in backward[unit])
    embedding = size.whole("embedding", shape.hidden).bytes if first else stream
    count = tokens(shape, plan)
    inputs = count * ID * (first + last)
    if first and shape.dropout:
        unit = "embedding" if plan.wrap == "ends" else ROOT
        saved[unit] = saved.get(unit, 0) + size.by_sequence("embedding_dropout_mask", shape.hidden, MASK).bytes
    if not last:
        return Activations(saved, stream, embedding, backward, inputs=inputs)
    unit = "head" if plan.wrap == "ends" else ROOT
    head = [*_norm(size, "norm"), size.gathered("head.input", shape.hidden)]
    saved[unit] = saved.get(unit, 0) + sum(tensor.bytes for tensor in head)
    return Activations(saved, stream, embedding, backward, *_logits(shape, plan), inputs)


def _logits(shape: ModelShape, plan: Plan) -> tuple[int, int, int, int, int]:
    """(saved, most in forward, most in backward, gradient for the head, output) of logits [bytes].

    Forward: logits as computed, a copy in fp32 where they are not, and their log-softmax, which is saved. Backward: that, its gradient and
    the gradient of what it was made of, 12 T V bytes; then one gradient in the type of the logits. A fused loss holds the saved tensor.
    """
    full, own = logits_bytes(shape, plan, FULL), logits_bytes(shape, plan, plan.recipe.autograd)
    if plan.fused_loss:
        return full, full, full, full, 0
    held = own if plan.keeps_logits or plan.mesh.pp > 1 else 0
    forward = full + own + (full if plan.recipe.autograd != FULL else 0)
    return full, forward, 3 * full + held, own + held, own
