"""Small models of the kinds that training scripts are written for, and their batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

WORDS, LENGTH, WIDTH = 50, 12, 32


class Block(nn.Module):
    """Attention and MLP of a small GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, 4, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """With the head's weight tied to the embedding's, positions as a buffer."""

    def __init__(self, tied: bool = True, recomputed: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.recomputed = recomputed
        if tied:
            self.head.weight = self.wte.weight
        self.register_buffer("positions", torch.randn(LENGTH, WIDTH))

    def forward(self, ids):
        x = self.wte(ids) + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        return self.head(self.norm(x))


class Conv(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class Lstm(nn.Module):
    """A language model over words."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rnn, self.decoder = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, 2), nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        return self.decoder(self.rnn(self.encoder(ids))[0])


def ids():
    return torch.randint(0, WORDS, (4, LENGTH))


def words_loss(out, goal):
    return F.cross_entropy(out.flatten(0, 1), goal.flatten())


def text_batch():
    return ids(), ids()


def image_batch():
    return torch.randn(4, 3, 12, 12), torch.randint(0, 10, (4,))
