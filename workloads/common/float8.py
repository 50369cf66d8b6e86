"""fp8 matrix products, where the hardware and the library for them are there."""

from __future__ import annotations

import importlib.util

from torch import nn

from tracekit.errors import UsageError


def require() -> None:
    """UsageError where torchao, which has the fp8 linear layer, is not installed."""
    if importlib.util.find_spec("torchao") is None:
        raise UsageError("--precision fp8 needs torchao", "pip install torchao")


def convert(model: nn.Module) -> None:
    """Make the linear layers of the blocks multiply in fp8 (dynamic scaling); embedding and head stay as they are."""
    require()
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=lambda module, name: isinstance(module, nn.Linear) and "head" not in name)
