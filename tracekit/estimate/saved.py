"""What autograd saves between forward and backward, tensor by tensor.

Symbols: T tokens of one micro-batch on this rank (b s / c), h hidden, a heads, f MLP width, t tensor-parallel ranks, e bytes an element.
For a block of GPT's kind with dropout and eager attention in 16 bit the list adds up to the published formulas (Korthikanti et al.,
arXiv:2205.05198, equations 1 to 6):

    no parallelism          s b h (34 + 5 a s / h)
    tensor parallel         s b h (10 + 24/t + 5 a s / (h t))
    + sequence parallel     s b h (34 + 5 a s / h) / t
    selective recompute     the same without the term 5 a s / h
    full recompute          2 s b h

Recomputation by name: ``selective-megatron`` (``selective`` is the same) computes attention's core again, the term 5 a s / h.
``selective-torchtitan`` keeps the layer's input, what every other matrix product puts out (the first, third, ... of the layer), what
attention puts out, and what tensor parallelism has reduced (torchtitan/models/llama3, ``_apply_ac_to_transformer_block``, mode op).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

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


def tokens(shape: ModelShape, plan: Plan) -> int:
    """T: tokens of one micro-batch on a rank, b ceil(s/c)."""
    return plan.batch.micro_batch * -(-shape.sequence // plan.mesh.cp)


class Sizes:
    """Widths of one rank: whole (w), divided over tensor parallelism (t), divided where sequence parallelism is on (s)."""

    def __init__(self, shape: ModelShape, plan: Plan) -> None:
        self.shape, self.plan = shape, plan
        self.e, self.t, self.count = plan.recipe.activation, plan.mesh.tp, tokens(shape, plan)
        self.sequence = self.t if plan.sequence_parallel else 1

    def whole(self, name: str, width: int, e: int | None = None) -> Saved:
        """The same on every rank."""
        return Saved(name, self.count * width * (e or self.e))

    def tensor(self, name: str, width: int, e: int | None = None, core: bool = False) -> Saved:
        """Divided over tensor-parallel ranks."""
        return Saved(name, -(-self.count * width * (e or self.e) // self.t), core)

    def by_sequence(self, name: str, width: int, e: int | None = None) -> Saved:
        """Divided where sequence parallelism is on."""
        return Saved(name, -(-self.count * width * (e or self.e) // self.sequence))

    def gathered(self, name: str, width: int) -> Saved:
        """The input of a column-parallel layer: with sequence parallelism the shard only, where it is gathered again."""
        keep_shard = self.plan.sequence_parallel and self.plan.implementation.regather_inputs
        return self.by_sequence(name, width) if keep_shard else self.whole(name, width)


def layer_saved(shape: ModelShape, plan: Plan, layer: int) -> list[Saved]:
    """Every tensor that one layer saves without recomputation, for one micro-batch."""
    size = Sizes(shape, plan)
    experts = shape.has_experts(layer)
    return [
        *norm_saved(size, "attention_norm"),
        *_attention(size),
        *norm_saved(size, "mlp_norm"),
        *(_experts(size, layer) if experts else _mlp(size, "mlp", shape.ffn)),
        *([size.by_sequence("residual_dropout_mask", 2 * shape.hidden, MASK)] if shape.dropout else []),
    ]


def norm_saved(size: Sizes, name: str) -> Iterator[Saved]:
    """Input and statistics; composed of single operations: input and normalised values in fp32. Statistics of 1 or 2 numbers a token.

    Korthikanti et al. leave the statistics out, as they are 1/h of the rest; so does a shape with dropout here, which is theirs.
    """
    hidden = size.shape.hidden
    if size.plan.implementation.norm_kernel == "composite":
        yield size.by_sequence(f"{name}.input", hidden, FULL)
        yield size.by_sequence(f"{name}.normalised", hidden, FULL)
    else:
        yield size.by_sequence(f"{name}.input", hidden)
    if not size.shape.dropout:
        yield size.by_sequence(f"{name}.statistics", 2 if size.shape.norm == "layernorm" else 1, FULL)


def _attention(size: Sizes) -> Iterator[Saved]:
    shape = size.shape
    yield size.gathered("attention.input", shape.hidden)
    if shape.latent:
        yield size.whole("attention.compressed", 2 * (shape.latent.query_rank + shape.latent.key_value_rank))
    expand = shape.heads // shape.kv_heads if size.plan.implementation.expand_kv else 1
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


def _mlp(size: Sizes, name: str, width: int) -> Iterator[Saved]:
    """Two linear layers: their inputs and that of the activation between; gated: gate, its activation, up and their product."""
    yield size.gathered(f"{name}.input", size.shape.hidden)
    yield from _mlp_inside(size, name, width)


def _mlp_inside(size: Sizes, name: str, width: int) -> Iterator[Saved]:
    for part in ("gate", "gate_activated", "up", "product") if size.shape.gated else ("up", "activated"):
        yield size.tensor(f"{name}.{part}", width)


def _experts(size: Sizes, layer: int) -> Iterator[Saved]:
    """Router, the k copies of each token that reach experts, and the shared experts. Balanced routing: as many arrive as leave.

    With tensor parallelism each of the t ranks routes its 1/t of the tokens (or, experts divided, has 1/t of each expert's width), unless
    it has copies of the experts.
    """
    shape, sent, arrived = size.shape, sent_rows(size), expert_rows(size.shape, size.plan, layer)
    yield size.gathered("mlp.input", shape.hidden)
    yield size.by_sequence("router.probabilities", shape.experts, FULL)
    yield Saved("experts.input", arrived * shape.hidden * size.e)
    for part in ("gate", "gate_activated", "up", "product") if shape.gated else ("up", "activated"):
        yield Saved(f"experts.{part}", arrived * shape.expert_ffn * size.e)
    yield Saved("experts.output", sent * shape.hidden * size.e)
    if size.plan.implementation.single_operations:
        yield Saved("experts.combined", sent * shape.hidden * size.e)
        yield Saved("experts.indices", (4 * sent + 2 * arrived) * ID + (2 * sent + size.count) * FULL)
    if shape.shared_experts:
        yield from _mlp_inside(size, "shared_experts", shape.shared_experts * shape.expert_ffn)


def sent_rows(size: Sizes) -> int:
    """Rows that this rank's tokens send to experts."""
    t = 1 if size.plan.mesh.expert_copies else size.t
    return -(-expert_rows_sent(size.shape, size.plan, size.count) // t)


def expert_rows_sent(shape: ModelShape, plan: Plan, count: int) -> int:
    """Rows of ``count`` tokens: k each; padded to E ceil(factor k T / E) where every expert takes as many."""
    rows = shape.top_k * count
    return shape.experts * math.ceil(plan.expert_padding * rows / shape.experts) if plan.expert_padding else rows


def expert_rows(shape: ModelShape, plan: Plan, layer: int) -> int:
    """Rows that arrive at this rank's experts in one micro-batch."""
    known = plan.expert_loads[layer] if layer < len(plan.expert_loads) else -1
    return known if known >= 0 else sent_rows(Sizes(shape, plan))


def every_other_product(shape: ModelShape, plan: Plan, layer: int) -> list[Saved]:
    """What ``selective-torchtitan`` keeps of a layer."""
    size = Sizes(shape, plan)
    outputs = [width for _, width in products(shape, layer)]
    kept = [size.by_sequence("checkpoint", shape.hidden), size.tensor("attention.output", shape.attention_width)]
    kept += [size.tensor("attention.log_sum_exp", shape.heads, FULL)]
    kept += [size.tensor("product", width) if width != shape.hidden else size.by_sequence("product", width) for width in outputs[::2]]
    if size.sequence > 1:  # reduce-scatters of attention's and the MLP's outputs; the products before them are not kept twice
        kept += [size.by_sequence("reduced", shape.hidden)] * 2
    return kept


def products(shape: ModelShape, layer: int) -> list[tuple[int, int]]:
    """(inputs, outputs) of the matrix products of a layer in order, stacked experts apart."""
    if shape.fused_qkv:
        found = [(shape.hidden, shape.query_width + shape.key_width + shape.value_width)]
    else:
        found = [(shape.hidden, width) for width in (shape.query_width, shape.key_width, shape.value_width)]
    found.append((shape.attention_width, shape.hidden))
    width = shape.shared_experts * shape.expert_ffn if shape.has_experts(layer) else shape.ffn
    if shape.has_experts(layer):
        found.append((shape.hidden, shape.experts))
    if width:
        found += [(shape.hidden, width)] * (2 if shape.gated else 1) + [(width, shape.hidden)]
    return found


def computed_again(shape: ModelShape) -> float:
    """Share of a dense layer's products that ``selective-torchtitan`` computes a second time."""
    sizes = [rows * columns for rows, columns in products(shape, 0)]
    return sum(sizes[1::2]) / sum(sizes)
