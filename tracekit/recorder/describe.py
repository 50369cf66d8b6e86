"""The manifest of one rank, assembled from the running process."""

from __future__ import annotations

import math
import platform
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tracekit import __version__
from tracekit.manifest import Batch, Calls, Expected, ExpertLoad, Manifest, Optimizer, Owners, Precision
from tracekit.recorder import mesh as meshes
from tracekit.recorder import private, units
from tracekit.recorder.place import Place


@dataclass
class Description:
    """What the training loop says of itself; the rest is found out."""

    mesh: Any = None
    models: Sequence[nn.Module] = ()
    optimizers: Sequence[Any] = ()
    strategy: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    model_shape: dict[str, Any] = field(default_factory=dict)
    batch: Batch | None = None
    precision: Precision | None = None
    pipeline: dict[str, Any] = field(default_factory=dict)
    expected: Sequence[Expected] = ()
    experts: Sequence[ExpertLoad] = ()
    units: Sequence[Any] = ()
    command: str = ""


def manifest(said: Description, place: Place, steps: Sequence[int], owners: Owners, calls: Calls, notes: Sequence[str]) -> Manifest:
    """Everything known of this rank at the end of its window; ``calls`` point into the groups of ``place``."""
    found = list(said.units) or units.units(said.models)
    layout = place.layout
    axes = layout.axes or meshes.axes_of(said.mesh)
    return Manifest(
        tracekit_version=__version__,
        rank=place.rank,
        world_size=place.world,
        backend=place.backend,
        device=_device_name(),
        host=socket.gethostname(),
        strategy=said.strategy,
        options=said.options,
        plan=said.plan,
        command=said.command or shlex.join([sys.executable.rpartition("/")[2], *sys.argv]),
        recorded=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        versions={"python": platform.python_version(), "torch": str(torch.__version__), "tracekit": __version__},
        mesh=axes,
        coordinate=layout.coordinate or meshes.row_major(place.rank, axes),
        roles=layout.roles,
        groups=layout.groups,
        model={"parameters": sum(math.prod(private.full_shape(p)) for m in said.models for p in m.parameters()), **said.model_shape},
        units=found,
        parameters=units.parameters(said.models, found),
        optimizer=_optimizer(said),
        precision=said.precision or _precision(said.models),
        batch=said.batch,
        steps=list(steps),
        pipeline=said.pipeline,
        expected=list(said.expected),
        experts=[load for load in said.experts if load.step in steps],
        owners=owners,
        calls=calls,
        notes=[
            *notes,
            *layout.notes,
            *(f"this torch has no {name}: what it would have told is not recorded" for name in sorted(private.missing)),
        ],
    )


def _lacking() -> list[str]:
    return [f"this torch has no {name}: what it would have told is not recorded" for name in sorted(private.missing)]


def _device_name() -> str:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return str(torch.cuda.get_device_name())
    return "CPU"


def _optimizer(said: Description) -> Optimizer | None:
    return units.optimizer_of(said.optimizers)


def _precision(models: Sequence[nn.Module]) -> Precision | None:
    types = {str(p.dtype).removeprefix("torch.") for m in models for p in m.parameters()}
    return Precision(parameters=types.pop()) if len(types) == 1 else None
