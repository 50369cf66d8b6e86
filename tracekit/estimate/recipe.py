"""Precision recipes: how many bytes every parameter costs in each of its copies.

P, G and O are bytes an element of parameters, gradients and optimizer state (with master copy), as in the ZeRO paper:

    recipe            P + G + O   source
    fp32              4 + 4 + 8   Adam with two fp32 moments
    bf16_zero         2 + 2 + 12  arXiv:1910.02054, section 3.1: fp32 master copy and moments
    bf16_zero_fp32_accumulation   2 + (2 + 4) + 12: gradients are added up in an fp32 copy
    megatron_bf16     2 + 4 + 12  Megatron-LM, docs of the distributed optimizer: bf16 parameters, fp32 gradients
    megatron_fp16     2 + 2 + 16  the same: fp16 gradients; fp32 gradients, master copy and moments are the optimizer's
    megatron_fp32     4 + 4 + 8   the same
    fsdp_bf16         4 + 4 + 8   FSDP with MixedPrecisionPolicy(param_dtype=bf16): gathered and reduced in bf16, kept in fp32
    fsdp_bf16_fp32_reduce         the same, reduced in fp32
    bf16_moments      4 + 4 + 4   Adam with bf16 moments
    bf16              2 + 2 + 4   everything in bf16
    fp8_transformer_engine 16, fp8_lm 9, fp8_deepseek_v3 15, fp8_nanotron 10 bytes a parameter: The Ultra-Scale Playbook (Hugging Face,
                      2025), table of fp8 training; DeepSeek-V3 arXiv:2412.19437, FP8-LM arXiv:2310.18313
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tracekit.errors import UsageError, choose


@dataclass(frozen=True)
class Recipe:
    """Bytes an element of every copy of a parameter; 0: there is no such copy.

    ``parameter`` as kept between steps; ``compute``: as gathered, and of activations; ``gradient`` as kept until the optimizer;
    ``accumulation``: of a second, wider copy in which gradients are added up, sharded as gradients are; ``main_gradient``: one that is
    sharded as the optimizer's state is; ``master`` the optimizer's own copy of the parameter; ``moments`` of each further state;
    ``reduce``: gradients on their way between ranks; ``autograd``: gradients as autograd leaves them (0: as ``compute``).
    """

    name: str
    parameter: int
    compute: int
    gradient: int
    reduce: int
    moments: tuple[int, ...]
    master: int = 0
    accumulation: int = 0
    main_gradient: int = 0
    autograd: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "autograd", self.autograd or self.compute)
        sizes = (self.parameter, self.compute, self.gradient, self.reduce, self.autograd)
        if min(sizes) < 1 or min((self.master, self.accumulation, self.main_gradient, *self.moments)) < 0:
            raise UsageError(f"recipe {self.name}: an element of {min(sizes)} bytes", "give sizes of 1 byte or more")

    @property
    def activation(self) -> int:
        """An element of an activation [bytes]: fp8 is for matrix products, and what is saved for backward stays in 16 bits or more."""
        return max(2, self.autograd)

    @property
    def optimizer_state(self) -> int:
        """O: master copy, moments and the optimizer's own gradients [bytes an element]."""
        return self.master + self.main_gradient + sum(self.moments)

    @property
    def gradients(self) -> int:
        """G: gradients and the copy in which they are added up [bytes an element]."""
        return self.gradient + self.accumulation

    @property
    def total(self) -> int:
        """P + G + O [bytes an element]."""
        return self.parameter + self.gradients + self.optimizer_state


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("fp32", 4, 4, 4, 4, (4, 4)),
        Recipe("bf16_zero", 2, 2, 2, 2, (4, 4), master=4),
        Recipe("bf16_zero_fp32_accumulation", 2, 2, 2, 2, (4, 4), master=4, accumulation=4),
        Recipe("megatron_bf16", 2, 2, 4, 4, (4, 4), master=4),
        Recipe("megatron_fp16", 2, 2, 2, 2, (4, 4), master=4, main_gradient=4),
        Recipe("megatron_fp32", 4, 4, 4, 4, (4, 4)),
        Recipe("fsdp_bf16", 4, 2, 4, 2, (4, 4)),
        Recipe("fsdp_bf16_fp32_reduce", 4, 2, 4, 4, (4, 4)),
        Recipe("bf16_moments", 4, 2, 4, 4, (2, 2)),
        Recipe("bf16", 2, 2, 2, 2, (2, 2)),
        Recipe("fp8_transformer_engine", 4, 1, 4, 4, (4, 4), autograd=2),
        Recipe("fp8_lm", 1, 1, 1, 1, (1, 2), master=2, accumulation=2),
        Recipe("fp8_deepseek_v3", 1, 1, 2, 2, (2, 2), master=4, accumulation=4),
        Recipe("fp8_nanotron", 1, 1, 1, 1, (1, 1), master=2, accumulation=4),
    )
}
#: Optimizers by the number of states they keep for each element beside the master copy.
OPTIMIZERS = {"adam": 2, "adamw": 2, "momentum": 1, "sgd": 0}


def recipe(name: str, optimizer: str = "adamw") -> Recipe:
    """A recipe by name, with the states of another optimizer. UsageError names the ones there are."""
    if name not in RECIPES:
        raise UsageError(f"there is no recipe called {name[:80]!r}", choose(name, RECIPES))
    if optimizer not in OPTIMIZERS:
        raise UsageError(f"there is no optimizer called {optimizer!r}", f"choose one of {', '.join(OPTIMIZERS)}")
    chosen = RECIPES[name]
    return replace(chosen, moments=chosen.moments[: OPTIMIZERS[optimizer]])


def deepspeed_estimate(
    total: int, largest_layer: int, gpus: int, stage: int, offload_optimizer: bool = False, offload: bool = False
) -> int:
    """Bytes a GPU as DeepSpeed's own estimator says (deepspeed/runtime/zero/stage3.py, stage_1_and_2.py, ``estimate_zero*_mem_needs``).

    Stage 3: 4 bytes a parameter of the largest layer + 18/gpus a parameter; 2/gpus with the optimizer offloaded, nothing of it with the
    parameters offloaded as well. Stage 2: 2 + 18/gpus (2 with the optimizer offloaded). Activations and buffers are left out there.
    """
    if stage == 2:
        return 2 * total + (0 if offload_optimizer else 18 * total // gpus)
    if offload:
        return 4 * largest_layer
    return 4 * largest_layer + (2 if offload_optimizer else 18) * total // gpus


def moment_bytes(chosen: Recipe) -> Iterable[int]:
    """Bytes an element of every optimizer tensor, one after the other: main gradients, master copy, moments."""
    return [size for size in (chosen.main_gradient, chosen.master, *chosen.moments) if size]
