"""A transformer's sizes, and the exact list of parameters that follows from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tracekit.errors import UsageError
from tracekit.estimate.parameters import ROOT, Parameter


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): compressed widths and head sizes."""

    query_rank: int  # width that queries are compressed to; 0: they are not [elements]
    key_value_rank: int  # width that keys and values are compressed to together [elements]
    nope_head: int  # of a query's or key's head, without position [elements]
    rope_head: int  # of a query's or key's head, turned by its position [elements]
    value_head: int  # of a value's head [elements]


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer.

    With ``experts`` some layers have a mixture of experts in place of the MLP: those from ``dense_layers`` on, every ``expert_every``-th.
    """

    layers: int
    hidden: int  # width of the residual stream [elements]
    heads: int  # of queries
    ffn: int  # inner width of a dense MLP [elements]
    vocabulary: int  # [tokens]
    sequence: int  # [tokens]
    kv_heads: int = 0  # of keys and values; 0: as many as ``heads``
    head_dim: int = 0  # width of a head; 0: hidden / heads [elements]
    gated: bool = False  # three matrices in the MLP (gate, up, down) instead of two
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's last linear layer
    mlp_bias: bool = False
    norm: str = "rmsnorm"  # or layernorm, which has a bias
    tied_embeddings: bool = False  # the head is the embedding's matrix
    learned_positions: bool = False  # a second embedding, one row a position
    rotary: bool = False  # positions turn queries and keys (RoFormer, arXiv:2104.09864), by sines and cosines in a table
    fused_qkv: bool = False  # one matrix for queries, keys and values
    experts: int = 0  # of a layer; each matrix of all of them is one stacked tensor
    top_k: int = 1  # experts that a token uses
    expert_ffn: int = 0  # inner width of an expert; 0: ``ffn`` [elements]
    shared_experts: int = 0  # experts that every token uses
    shared_gate: bool = False  # which a gate of their own weighs
    dense_layers: int = 0  # first layers without experts
    expert_every: int = 1  # of the layers behind them, the last of each so many has experts
    qk_norm: bool = False  # norms of queries' and keys' heads
    post_norms: bool = False  # norms behind attention and MLP as well
    latent: LatentAttention | None = None
    dropout: bool = False
    name: str = "transformer"

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        if self.heads >= 1:
            object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.heads)
        object.__setattr__(self, "expert_ffn", self.expert_ffn or self.ffn)
        _check(self)

    @property
    def query_width(self) -> int:
        """Elements a token of all heads' queries."""
        return self.heads * (self.latent.nope_head + self.latent.rope_head if self.latent else self.head_dim)

    @property
    def key_width(self) -> int:
        """Elements a token of all keys as attention reads them."""
        return self.query_width if self.latent else self.kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Elements a token of all values as attention reads them."""
        return self.heads * self.latent.value_head if self.latent else self.kv_heads * self.head_dim

    @property
    def attention_width(self) -> int:
        """Elements a token of what attention puts out, the input of its last linear layer."""
        return self.heads * (self.latent.value_head if self.latent else self.head_dim)

    @property
    def rotary_bytes(self) -> int:
        """The table of sines and cosines of all positions: 4 s d bytes, in fp32 for half of a head's width or in 16 bits for all of it."""
        width = self.latent.rope_head if self.latent else self.head_dim
        return 4 * self.sequence * width if self.rotary else 0

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        return self.experts > 0 and layer >= self.dense_layers and (layer + 1) % self.expert_every == 0


def _check(shape: ModelShape) -> None:
    sizes = ("layers", "hidden", "heads", "ffn", "vocabulary", "sequence", "kv_heads", "head_dim", "top_k", "expert_every")
    low = next((name for name in sizes if getattr(shape, name) < 1), None)
    if low is not None:
        raise UsageError(f"the model's {low} is {getattr(shape, low)}", "give a number of at least 1")
    negative = next((n for n in ("experts", "shared_experts", "dense_layers", "expert_ffn") if getattr(shape, n) < 0), None)
    if negative is not None:
        raise UsageError(f"the model's {negative} is {getattr(shape, negative)}", "give a number of 0 or more")
    if shape.heads % shape.kv_heads:
        raise UsageError(f"{shape.kv_heads} kv_heads do not divide {shape.heads} heads", "give a number of kv_heads that divides the heads")
    if shape.norm not in ("rmsnorm", "layernorm"):
        raise UsageError(f"there is no norm {shape.norm!r}", "choose rmsnorm or layernorm")
    if shape.experts and shape.top_k > shape.experts:
        raise UsageError(f"top_k {shape.top_k} of {shape.experts} experts", "give a top_k of at most the number of experts")


def parameters(shape: ModelShape, element_bytes: int = 4, wrap: str = "layers", vocabulary_parallel: bool = True) -> list[Parameter]:
    """Every parameter in order of use, unsharded, with the dimension that tensor parallelism divides (Megatron, arXiv:1909.08053).

    ``wrap`` says what FSDP gathers at once: ``layers``: each layer is a unit, embedding, last norm and head belong to the root (wrapping
    blocks, then the model); ``ends``: embedding, and last norm with head, are units of their own as well; ``whole``: one unit, the root;
    ``parameters``: every parameter is a unit (DeepSpeed's stage 3).
    ``vocabulary_parallel``: embedding and head are divided as well.
    """
    if wrap not in ("layers", "ends", "whole", "parameters"):
        raise UsageError(f"there is no way to wrap called {wrap!r}", "choose layers, ends, whole or parameters")
    head_unit, embedding_unit = ("head", "embedding") if wrap == "ends" else (ROOT, ROOT)
    found = [*_embedding(shape, embedding_unit)]
    for layer in range(shape.layers):
        found += _layer(shape, layer, ROOT if wrap == "whole" else f"layers.{layer}")
    found += _norm(shape, "norm", head_unit, None)
    if not shape.tied_embeddings:
        found.append(Parameter("head.weight", (shape.vocabulary, shape.hidden), head_unit, role="head", tensor_dim=0))
    if wrap == "parameters":
        found = [replace(p, unit=p.name) for p in found]
    whole = () if vocabulary_parallel else ("embedding", "head")
    return [replace(p, element_bytes=element_bytes, tensor_dim=None if p.role in whole else p.tensor_dim) for p in found]


def _embedding(shape: ModelShape, unit: str) -> Iterator[Parameter]:
    yield Parameter("embedding.tokens.weight", (shape.vocabulary, shape.hidden), unit, role="embedding", tensor_dim=0)
    if shape.learned_positions:
        yield Parameter("embedding.positions.weight", (shape.sequence, shape.hidden), unit, role="embedding")


def _layer(shape: ModelShape, layer: int, unit: str) -> Iterator[Parameter]:
    prefix = f"layers.{layer}"
    yield from _norm(shape, f"{prefix}.attention_norm", unit, layer)
    yield from _latent(shape, prefix, unit, layer) if shape.latent else _attention(shape, prefix, unit, layer)
    for place in ("mlp_norm", "attention_post_norm", "mlp_post_norm") if shape.post_norms else ("mlp_norm",):
        yield from _norm(shape, f"{prefix}.{place}", unit, layer)
    if not shape.has_experts(layer):
        yield from _mlp(shape, f"{prefix}.mlp", unit, layer, shape.ffn)
        return
    yield Parameter(f"{prefix}.router.weight", (shape.experts, shape.hidden), unit, role="router", layer=layer)
    yield from _stacked(shape, f"{prefix}.experts", unit, layer)
    if shape.shared_experts:
        yield from _mlp(shape, f"{prefix}.shared_experts", unit, layer, shape.expert_ffn * shape.shared_experts)
    if shape.shared_gate:
        yield Parameter(f"{prefix}.shared_gate.weight", (1, shape.hidden), unit, role="router", layer=layer)


def _norm(shape: ModelShape, name: str, unit: str, layer: int | None, size: int = 0) -> Iterator[Parameter]:
    for part in ("weight", "bias") if shape.norm == "layernorm" else ("weight",):
        yield Parameter(f"{name}.{part}", (size or shape.hidden,), unit, role="norm", layer=layer)


def _linear(name: str, rows: int, columns: int, bias: bool, split: int | None, base: Parameter) -> Iterator[Parameter]:
    """A linear layer [rows out, columns in]; ``split`` 0 divides its outputs over tensor-parallel ranks, 1 its inputs, None nothing."""
    yield replace(base, name=f"{name}.weight", shape=(rows, columns), tensor_dim=split)
    if bias:
        yield replace(base, name=f"{name}.bias", shape=(rows,), tensor_dim=0 if split == 0 else None)


def _attention(shape: ModelShape, prefix: str, unit: str, layer: int) -> Iterator[Parameter]:
    base = Parameter("", (), unit, role="attention", layer=layer)
    widths = {"q": shape.query_width, "k": shape.key_width, "v": shape.value_width}
    if shape.fused_qkv:
        widths = {"qkv": sum(widths.values())}
    for name, width in widths.items():
        yield from _linear(f"{prefix}.attention.{name}", width, shape.hidden, shape.qkv_bias, 0, base)
    for name in ("q_norm", "k_norm") if shape.qk_norm else ():
        yield from _norm(shape, f"{prefix}.attention.{name}", unit, layer, shape.head_dim)
    yield from _linear(f"{prefix}.attention.o", shape.hidden, shape.attention_width, shape.output_bias, 1, base)


def _latent(shape: ModelShape, prefix: str, unit: str, layer: int) -> Iterator[Parameter]:
    """Queries and keys/values through narrow matrices; only what comes out of those, per head, is divided."""
    latent = shape.latent
    assert latent is not None
    base = Parameter("", (), unit, role="attention", layer=layer)
    name = f"{prefix}.attention"
    if latent.query_rank:
        yield from _linear(f"{name}.q_down", latent.query_rank, shape.hidden, False, None, base)
        yield from _norm(shape, f"{name}.q_norm", unit, layer, latent.query_rank)
        yield from _linear(f"{name}.q_up", shape.query_width, latent.query_rank, False, 0, base)
    else:
        yield from _linear(f"{name}.q", shape.query_width, shape.hidden, False, 0, base)
    yield from _linear(f"{name}.kv_down", latent.key_value_rank + latent.rope_head, shape.hidden, False, None, base)
    yield from _norm(shape, f"{name}.kv_norm", unit, layer, latent.key_value_rank)
    wide = shape.heads * (latent.nope_head + latent.value_head)
    yield from _linear(f"{name}.kv_up", wide, latent.key_value_rank, False, 0, base)
    yield from _linear(f"{name}.o", shape.hidden, shape.attention_width, False, 1, base)


def _mlp(shape: ModelShape, name: str, unit: str, layer: int, width: int) -> Iterator[Parameter]:
    base = Parameter("", (), unit, role="mlp", layer=layer)
    for part in ("gate", "up") if shape.gated else ("up",):
        yield from _linear(f"{name}.{part}", width, shape.hidden, shape.mlp_bias, 0, base)
    yield from _linear(f"{name}.down", shape.hidden, width, shape.mlp_bias, 1, base)


def _stacked(shape: ModelShape, name: str, unit: str, layer: int) -> Iterator[Parameter]:
    """All experts of a layer: one tensor [experts, rows, columns] for each matrix of the MLP."""
    for parameter in _mlp(shape, name, unit, layer, shape.expert_ffn):
        split = None if parameter.tensor_dim is None else parameter.tensor_dim + 1
        sizes = (shape.experts, *parameter.shape)
        yield replace(parameter, shape=sizes, tensor_dim=split, role="expert", experts=shape.experts)
