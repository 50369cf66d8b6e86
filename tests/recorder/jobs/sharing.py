"""Layers shared over ranks in the pattern of torch's tutorials: tensor with sequence parallelism, and attention around a ring."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from models import LENGTH, WIDTH, WORDS
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module


class Attention(nn.Module):
    """Four heads, of which a rank may have a part: the width of a head is fixed, not their number."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(WIDTH, 64, bias=False), nn.Linear(WIDTH, 64, bias=False), nn.Linear(64, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SharedBlock(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class TensorSequence(nn.Module):
    """A small decoder; ``share`` lays it out over a mesh of one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(SharedBlock() for _ in range(2))
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def share(self, mesh) -> None:
        parallelize_module(
            self,
            mesh,
            {
                "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                "norm": SequenceParallel(),
                "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
            },
        )
        split = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        for layer in self.layers:
            parallelize_module(layer, mesh, split)

    def forward(self, ids):
        x = self.tok_embeddings(ids[:, :LENGTH])
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class Passed(torch.autograd.Function):
    """To the next rank of the ring, from the one before; its gradient the other way."""

    @staticmethod
    def forward(ctx, x):
        return around(x, 1)

    @staticmethod
    def backward(ctx, gradient):
        return around(gradient, -1)


def around(x, by: int):
    rank, world = dist.get_rank(), dist.get_world_size()
    got = torch.empty_like(x)
    works = [dist.isend(x.contiguous(), (rank + by) % world), dist.irecv(got, (rank - by) % world)]
    for work in works:
        work.wait()
    return got


class Ring(nn.Module):
    """Attention without a mask over a sequence of which each rank holds a part."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores, values = [], []
        for turn in range(dist.get_world_size()):
            if turn:
                k, v = Passed.apply(torch.stack((k, v))).unbind()
            scores.append(q @ k.transpose(-1, -2) / 4.0)
            values.append(v)
        return self.out(torch.cat(scores, -1).softmax(-1) @ torch.cat(values, -2))


def ring_attention():
    return Ring()
