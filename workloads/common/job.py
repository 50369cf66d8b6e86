"""One rank of a workload's job: its place on the mesh, its device, its share of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tracekit.errors import UsageError

from .settings import Settings
from .transformer import Shape, loss_of

#: Axes over which ranks work on different samples. For all but the experts' weights, ``ep`` is one of them.
DATA_AXES = ("dp_replicate", "dp_shard", "ep")


@dataclass(frozen=True)
class Job:
    """What ``build`` of a workload gets. ``sizes`` are the axes of ``mesh``, outermost first."""

    settings: Settings
    shape: Shape
    sizes: dict[str, int]
    mesh: DeviceMesh
    device: torch.device
    rank: int
    data_axes: tuple[str, ...] = DATA_AXES

    def size(self, *axes: str) -> int:
        """Ranks along one axis, or several together; 1 for an axis that the mesh does not have."""
        return math.prod(self.sizes.get(axis, 1) for axis in axes)

    def place(self, axis: str) -> int:
        """Coordinate of this rank on an axis; 0 where the mesh does not have it."""
        return int(self.mesh.get_local_rank(axis)) if axis in self.sizes else 0

    def group(self, axis: str) -> dist.ProcessGroup:
        """Process group of this rank along an axis."""
        return self.mesh.get_group(axis)

    @property
    def data_size(self) -> int:
        """Ranks that work on different samples."""
        return self.size(*self.data_axes)

    @property
    def data_place(self) -> int:
        """Which share of the samples is this rank's."""
        place = 0
        for axis in self.sizes:
            if axis in self.data_axes:
                place = place * self.sizes[axis] + self.place(axis)
        return place

    @property
    def global_batch(self) -> int:
        """Samples a step of all ranks. UsageError where they cannot be shared out evenly."""
        samples = self.settings.global_batch or self.settings.batch * self.data_size
        if samples % (self.data_size * self.settings.micro_batches):
            raise UsageError(
                f"{samples} samples do not divide into {self.data_size} data-parallel ranks x {self.settings.micro_batches} micro-batches",
                "change --batch, --global-batch or --micro-batches",
            )
        return samples

    @property
    def local_batch(self) -> int:
        """Samples a step of this rank."""
        return self.global_batch // self.data_size

    def refuse_data_axes(self) -> None:
        """UsageError where ranks work on other samples, for a workload that averages no gradients over them."""
        if self.data_size > 1:
            axes = ", ".join(axis for axis in self.data_axes if self.size(axis) > 1)
            problem = f"this workload averages no gradients, so it has no use for {axes}"
            raise UsageError(problem, "leave it out of --mesh, or run hybrid_3d")

    def share(self, tensor: Tensor) -> Tensor:
        """This rank's samples of a global batch [samples, ...]."""
        return tensor[self.data_place * self.local_batch :][: self.local_batch]

    def autocast(self) -> AbstractContextManager[Any]:
        """16-bit arithmetic where the precision asks for it and the strategy has no policy of its own."""
        types = {"bf16": torch.bfloat16, "fp16": torch.float16}
        if self.settings.precision not in types:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=types[self.settings.precision])


def nothing(last: bool) -> AbstractContextManager[Any]:  # noqa: ARG001
    """Accumulation that needs no switch."""
    return nullcontext()


@dataclass
class Training:
    """What ``build`` of a workload makes.

    Either ``models`` and ``optimizer`` with the usual loop (``accumulating(last)`` is entered around each micro-batch, so that a strategy
    can synchronise only the last), or ``step``, which does it all itself. ``gathered`` gives the full parameters by their plain names, on
    every rank (those of its own stage under pipeline parallelism). What trains nothing has no models, no ``optimizer``, and ``verified`` in
    place of ``gathered``.
    """

    models: list[nn.Module]
    optimizer: torch.optim.Optimizer | Any
    gathered: Callable[[], dict[str, Tensor]]
    accumulating: Callable[[bool], AbstractContextManager[Any]] = nothing
    step: Callable[[Tensor, Tensor, Any], Tensor | None] | None = None
    autocast: bool = True
    loss: Callable[[Tensor, Tensor], Tensor] = loss_of
    scaler: Any = None
    share: Callable[[int, Tensor], Tensor] | None = None  # (step, global batch) -> this rank's samples, where ``Job.share`` is not it
    before_optimizer: Callable[[], None] | None = None  # between the last backward and the optimizer's step
    finish: Callable[[], None] | None = None  # after the last step, outside of the recording
    reference: Callable[[], dict[str, Tensor]] | None = None  # parameters after one step on one process, where that takes options
    verified: Callable[[], str] | None = None  # what --verify has found; raises AssertionError. Without it parameters are compared
    describe: dict[str, Any] = field(default_factory=dict)
