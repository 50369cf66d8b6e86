"""The model of all workloads: a small decoder-only transformer that knows nothing of parallelism.

Shapes in names: B samples, T tokens a sample, H hidden size, A heads, D head size, F size inside the MLP, V vocabulary, E experts.
Every strategy takes this module and changes how it is laid out (``parallelize_module``, ``fully_shard``), or replaces one of three seams:
``Attention.mix`` (context parallelism), ``Mlp`` by ``experts.MoE``, and the range of layers that a pipeline stage builds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. ``head_size`` = hidden / heads; no biases, untied embeddings, learned positions.

    ``swiglu``: a third matrix in the MLP, whose output gates the others' (arXiv:2002.05202).
    """

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 4
    ffn: int = 512
    vocabulary: int = 512
    sequence: int = 64
    swiglu: bool = False

    def __post_init__(self) -> None:
        """ValueError for sizes that do not fit together."""
        if min(self.sizes().values()) < 1:
            raise ValueError("every size of the model is at least 1")
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ValueError(f"hidden {self.hidden}, heads {self.heads}, kv_heads {self.kv_heads}: each must divide the one before")

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return self.hidden // self.heads

    def sizes(self) -> dict[str, int]:
        """Everything that is a number."""
        return {name: value for name, value in asdict(self).items() if name != "swiglu"}

    def mlp_elements(self) -> int:
        """Elements of the parameters of one MLP: up and down, with SwiGLU a gate too."""
        return (3 if self.swiglu else 2) * self.hidden * self.ffn

    def block_elements(self) -> int:
        """Elements of the parameters of one block: q, k, v, o, the MLP and two norms."""
        kv = self.kv_heads * self.head_size
        return 2 * self.hidden * self.hidden + 2 * self.hidden * kv + self.mlp_elements() + 2 * self.hidden

    def outer_elements(self) -> int:
        """Elements of embedding, positions, last norm and head."""
        return 2 * self.vocabulary * self.hidden + self.sequence * self.hidden + self.hidden

    def elements(self) -> int:
        """Elements of all parameters."""
        return self.layers * self.block_elements() + self.outer_elements()

    def describe(self) -> dict[str, Any]:
        """For the manifest."""
        return {"architecture": "transformer", **self.sizes(), "gated_mlp": self.swiglu, "biases": False, "tied_embeddings": False,
                "learned_positions": True, "norm": "rmsnorm"}  # fmt: skip


def attend(q_BADT: Tensor, k_BADT: Tensor, v_BADT: Tensor) -> Tensor:
    """Causal attention of every query to the keys up to its own place; all shaped [B, A, T, D]."""
    return F.scaled_dot_product_attention(q_BADT, k_BADT, v_BADT, is_causal=True)


class Attention(nn.Module):
    """Self-attention. ``mix`` turns queries, keys and values [B, A, T, D] into the heads' outputs: context parallelism replaces it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size = shape.head_size
        self.q = nn.Linear(shape.hidden, shape.heads * shape.head_size, bias=False)
        self.k = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.v = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.o = nn.Linear(shape.heads * shape.head_size, shape.hidden, bias=False)
        self.mix: Callable[[Tensor, Tensor, Tensor], Tensor] = attend

    def forward(self, x_BTH: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]. The number of heads follows from the weights: under tensor parallelism a rank has only some."""
        q, k, v = (self.split(linear(x_BTH)) for linear in (self.q, self.k, self.v))
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return self.o(self.mix(q, k, v).transpose(1, 2).flatten(2))

    def split(self, x_BTH: Tensor) -> Tensor:
        """[B, T, A*D] -> [B, A, T, D]."""
        return x_BTH.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class Mlp(nn.Module):
    """Two linear layers with GELU between: hidden -> ffn -> hidden. With SwiGLU up's output is multiplied with silu of a gate's instead."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False) if shape.swiglu else None
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x_BTH: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]."""
        if self.gate is not None:
            return self.down(F.silu(self.gate(x_BTH)) * self.up(x_BTH))
        return self.down(F.gelu(self.up(x_BTH)))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, shape: Shape, mlp: Callable[[Shape], nn.Module] = Mlp) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.hidden)
        self.mlp = mlp(shape)

    def forward(self, x_BTH: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]."""
        x_BTH = x_BTH + self.attention(self.attention_norm(x_BTH))
        return x_BTH + self.mlp(self.mlp_norm(x_BTH))


class Embedding(nn.Module):
    """Tokens and learned positions. ``first_position`` is that of this rank's first token under context parallelism."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.sequence, shape.hidden)
        self.first_position = 0

    def forward(self, ids_BT: Tensor) -> Tensor:
        """[B, T] -> [B, T, H]."""
        places = torch.arange(self.first_position, self.first_position + ids_BT.shape[1], device=ids_BT.device)
        return self.tokens(ids_BT) + self.positions(places)


class Transformer(nn.Module):
    """The whole model, or the layers ``first`` to ``last`` of it (a pipeline stage): embedding before layer 0, head behind the last.

    Layers keep their numbers in every stage, so that parameter names are the same in all strategies.
    """

    def __init__(self, shape: Shape, layers: Sequence[int] | None = None, mlp: Callable[[Shape], nn.Module] = Mlp) -> None:
        super().__init__()
        chosen = range(shape.layers) if layers is None else layers
        self.embedding = Embedding(shape) if 0 in chosen else None
        self.layers = nn.ModuleDict({str(i): Block(shape, mlp) for i in chosen})
        last = shape.layers - 1 in chosen
        self.norm = nn.RMSNorm(shape.hidden) if last else None
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Token ids [B, T] (or the hidden states of the stage before) -> logits [B, T, V] (or hidden states)."""
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.layers.values():
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def initialize(model: nn.Module, seed: int) -> None:
    """Give every parameter values that depend on the seed and its own name only: every strategy and every stage starts alike."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial(name, parameter.shape, seed))


def initial(name: str, shape: torch.Size, seed: int) -> Tensor:
    """The values of one parameter."""
    if "norm" in name:
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(seed + sum(ord(c) * 31**i % 1_000_003 for i, c in enumerate(name)))
    return torch.randn(shape, generator=generator) * (0.02 if "embedding" in name else shape[-1] ** -0.5)


def loss_of(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross entropy over all tokens."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())
