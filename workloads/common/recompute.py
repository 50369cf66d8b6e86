"""Activation checkpointing: a block keeps its input, or its input and some outputs, and computes the rest again in backward.

    full        only the input of the block
    selective   also what every other matrix product of the block puts out (the first, third, ...) and what attention puts out
A block's ``forward`` is replaced, not the block, so that parameters keep their names. What the block communicates in forward it
communicates again in backward; what FSDP gathers is there already.
Sources: Chen et al., arXiv:1604.06174; torch.utils.checkpoint; torchtitan's selective checkpointing by operator, arXiv:2410.06511.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .settings import option
from .transformer import Transformer

CHOICES = ("none", "full", "selective")
#: In the words of the analytical model.
IN_THE_MODEL = {"none": "none", "full": "full", "selective": "selective-torchtitan"}
_ATTENTION = tuple(f"_scaled_dot_product_{kernel}" for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention"))


def recompute_option() -> Any:
    """The field of a workload's options."""
    return option("none", "activation checkpointing of every block: none; full; selective (every other matrix product is kept)", CHOICES)


def recompute(model: Transformer, how: str) -> None:
    """Let every block compute again in backward what it does not keep."""
    if how == "none":
        return
    for block in model.layers.values():
        block.forward = partial(_checkpointed, block.forward, how)  # type: ignore[method-assign]


def _checkpointed(forward: Callable[[Tensor], Tensor], how: str, x: Tensor) -> Tensor:
    extra = {"context_fn": partial(create_selective_checkpoint_contexts, _EveryOther())} if how == "selective" else {}
    result: Tensor = checkpoint(forward, x, use_reentrant=False, **extra)
    return result


class _EveryOther:
    """The policy of one pass through one block: counts its matrix products, in forward and when they are computed again."""

    def __init__(self) -> None:
        self.products: Counter[bool] = Counter()
        self.kept = {getattr(torch.ops.aten, name).default for name in _ATTENTION if hasattr(torch.ops.aten, name)}

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ARG002
        """Whether what an operator puts out is kept."""
        if operator is torch.ops.aten.mm.default:
            self.products[context.is_recompute] += 1
            keep = self.products[context.is_recompute] % 2 == 1
        else:
            keep = operator in self.kept
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
