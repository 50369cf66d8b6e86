"""The same training on one process without any parallelism: what every strategy has to arrive at."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .transformer import Mlp, Shape, Transformer, initialize, loss_of


def batch_of(shape: Shape, samples: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """The global batch of one step: token ids and targets, both [samples, T]; the same on every rank."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    tokens = torch.randint(shape.vocabulary, (samples, shape.sequence + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def adam(parameters: object, learning_rate: float) -> torch.optim.Optimizer:
    """The optimizer of all workloads.

    ``eps`` is larger than usual: Adam divides by the size of the gradient, so with 1e-8 a rounding difference in a gradient near zero would
    become a visible step, and no two strategies could be compared.
    Parameters that lie on different meshes cannot be updated by one fused loop, so there every one is updated alone.
    """
    listed = list(parameters)  # type: ignore[call-overload]
    meshes = {getattr(p, "device_mesh", None) for p in listed}
    return torch.optim.Adam(listed, lr=learning_rate, eps=1e-4, foreach=False if len(meshes) > 1 else None)


def train(
    shape: Shape,
    samples: int,
    seed: int,
    steps: int,
    learning_rate: float,
    mlp: Callable[[Shape], nn.Module] = Mlp,
    pieces: int = 1,
    extra: Callable[[nn.Module], Tensor | float] = lambda model: 0.0,  # noqa: ARG005
) -> dict[str, Tensor]:
    """Parameters after ``steps`` steps on the whole global batch, in ``pieces``; ``extra`` is added to the loss of each."""
    model = Transformer(shape, mlp=mlp)
    initialize(model, seed)
    optimizer = adam(model.parameters(), learning_rate)
    for step in range(steps):
        ids_BT, targets_BT = batch_of(shape, samples, seed, step)
        for ids, targets in zip(ids_BT.chunk(pieces), targets_BT.chunk(pieces), strict=True):
            ((loss_of(model(ids), targets) + extra(model)) / pieces).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
