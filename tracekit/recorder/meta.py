"""Parameters of any module, built on the meta device: shapes and names without memory."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch
from torch import nn

from tracekit.errors import UsageError
from tracekit.estimate.parameters import Parameter
from tracekit.recorder.units import role_of, units


def parameters_of_module(target: str) -> list[Parameter]:
    """Parameters of the module that ``package.module:function`` builds, called without arguments under the meta device.

    Units are its blocks (members of ModuleList and ModuleDict), what is left belongs to the root. The current folder is searched as well.
    Raises UsageError where the function cannot be found or called, or builds no module.
    """
    module = _built(target)
    unit_of = {name: unit.name for unit in units([module]) for name in unit.parameters}
    return [
        Parameter(
            name=name,
            shape=tuple(tensor.shape),
            unit=unit_of.get(name, ""),
            element_bytes=tensor.element_size(),
            role=role_of(name),
            trainable=tensor.requires_grad,
        )
        for name, tensor in module.named_parameters()
    ]


def _built(target: str) -> nn.Module:
    name, colon, function = target.partition(":")
    if not colon or not name or not function:
        raise UsageError(f"--module {target!r} is not package.module:function", "write it like models.llama:build")
    sys.path.insert(0, str(Path.cwd()))
    try:
        make = getattr(importlib.import_module(name), function)
        with torch.device("meta"):
            module = make()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--module {target}: {error}", "check the name; the current folder is searched too") from error
    except Exception as error:
        raise UsageError(f"--module {target} raised {type(error).__name__}: {error}", "it is called without arguments") from error
    finally:
        sys.path.pop(0)
    if not isinstance(module, nn.Module):
        raise UsageError(f"--module {target} gives a {type(module).__name__}, not a torch.nn.Module", "return the module")
    return module
