"""What a training loop hands over as mesh, model and optimizer: those of torch, lists of them, and whatever wraps them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn


def accepted(mesh: Any, model: Any, optimizer: Any) -> tuple[Any, list[nn.Module], list[Any], list[str]]:
    """(mesh, modules, optimizers, a sentence for everything that is neither)."""
    notes: list[str] = []
    meshes = _taken("mesh", [] if mesh is None else [mesh], _is_mesh, notes)
    models = _taken("model", _listed(model, nn.Module), lambda one: isinstance(one, nn.Module), notes)
    optimizers = _taken("optimizer", _listed(optimizer, torch.optim.Optimizer), has_groups, notes)
    return (meshes[0] if meshes else None), models, optimizers, notes


def has_groups(value: Any) -> bool:
    """Whether it holds parameters as torch's optimizers do: ``param_groups``, a list of dictionaries with ``params``."""
    groups = getattr(value, "param_groups", None)
    return isinstance(groups, list) and all(isinstance(group, dict) and "params" in group for group in groups)


def _is_mesh(value: Any) -> bool:
    sizes = isinstance(value, Mapping) and all(isinstance(name, str) and isinstance(size, int) and size > 0 for name, size in value.items())
    return sizes or all(hasattr(value, name) for name in ("mesh_dim_names", "ndim", "get_group"))


def _listed(value: Any, one: type) -> list[Any]:
    if value is None:
        return []
    single = isinstance(value, one | str) or has_groups(value) or not isinstance(value, Iterable)
    return [value] if single else list(value)


def _taken(what: str, values: list[Any], fits: Any, notes: list[str]) -> list[Any]:
    notes += [
        f"{what} of type {type(value).__name__} is none that the recorder knows: it is left out" for value in values if not fits(value)
    ]
    return [value for value in values if fits(value)]
