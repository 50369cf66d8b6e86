"""Small training programs that know nothing of tracekit: each is (model, batch -> loss, optimizer, options), run under torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Gpt(nn.Module):
    """Tied embeddings; ``named``: a range with forward in its name around the attention alone; ``again``: checkpointed blocks."""

    def __init__(self, named: bool = False, again: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(2000, 128)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True) for _ in range(3)])
        self.head = nn.Linear(128, 2000, bias=False)
        self.head.weight = self.tokens.weight
        self.named, self.again = named, again

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            if self.named:
                with torch.profiler.record_function("attention forward"):
                    x = x + block.self_attn(x, x, x, need_weights=False)[0]
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(x)


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        self.inner = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())
        self.up = nn.ConvTranspose2d(64, 32, 2, stride=2)
        self.last = nn.Conv2d(35, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.up(self.inner(self.down(x))), x], 1))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(64, 256, 2, batch_first=True), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.over_tokens = nn.ModuleList([nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)])
        self.over_channels = nn.ModuleList([nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for tokens, channels in zip(self.over_tokens, self.over_channels, strict=True):
            x = x + tokens(x.transpose(1, 2)).transpose(1, 2)
            x = x + channels(x)
        return x


def ids() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 2000, (8, 64)), torch.randint(0, 2000, (8, 64))


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 64, 64), torch.randn(4, 3, 64, 64)


def series() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 32, 64), torch.randn(8, 32, 64)


def patches() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 64, 128), torch.randn(8, 64, 128)


def tokens_loss(out: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(out.flatten(0, 1).float(), target.flatten())


def square_loss(out: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(out.float(), target)


@dataclass
class Program:
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    micro_batches: int = 1
    bf16: bool = False
    set_to_none: bool = True


PROGRAMS = {
    "gpt": Program(Gpt, ids, tokens_loss, torch.optim.AdamW),
    "gpt with a range of its own": Program(lambda: Gpt(named=True), ids, tokens_loss, torch.optim.AdamW),
    "gpt checkpointed": Program(lambda: Gpt(again=True), ids, tokens_loss, torch.optim.Adam),
    "gpt bf16": Program(Gpt, ids, tokens_loss, torch.optim.AdamW, bf16=True),
    "gpt accumulating": Program(Gpt, ids, tokens_loss, torch.optim.AdamW, micro_batches=2),
    "unet": Program(Unet, images, square_loss, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "unet keeps gradients": Program(Unet, images, square_loss, torch.optim.Adam, set_to_none=False),
    "lstm": Program(Lstm, series, square_loss, torch.optim.Adam),
    "lstm rmsprop": Program(Lstm, series, square_loss, torch.optim.RMSprop),
    "mixer": Program(Mixer, patches, square_loss, torch.optim.AdamW),
    "mixer adafactor": Program(Mixer, patches, square_loss, torch.optim.Adafactor),
    "mixer plain sgd": Program(Mixer, patches, square_loss, lambda p: torch.optim.SGD(p, 0.1)),
    "mixer bf16 accumulating": Program(Mixer, patches, square_loss, torch.optim.AdamW, micro_batches=3, bf16=True),
}


@dataclass
class Known:
    """Bytes that are known without any profiler."""

    parameters: int
    optimizer_state: int
    gradients: int
    batch: int


def run(name: str, path: Path) -> Known:
    """Build and train under the profiler; the trace at ``path``."""
    program = PROGRAMS[name]
    torch.manual_seed(0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, record_shapes=False) as profiler:
        model = program.model()
        optimizer = program.optimizer(model.parameters())
        for _ in range(3):
            optimizer.zero_grad(set_to_none=program.set_to_none)
            for _ in range(program.micro_batches):
                x, target = program.batch()
                with torch.autocast("cpu", torch.bfloat16, enabled=program.bf16):
                    out = model(x)
                program.loss(out, target).backward()
                del out
            optimizer.step()
            profiler.step()
    profiler.export_chrome_trace(str(path))
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    parameters = list(model.parameters())
    size = sum(p.nbytes for p in parameters)
    gradients = sum(p.grad.nbytes for p in parameters if p.grad is not None)
    return Known(size, sum(t.nbytes for t in tensors), gradients, x.nbytes + target.nbytes)
