"""The six strategies of data parallelism with redundancy removed, and the number formats they are run with.

Every unit is a flat vector of which rank r owns ``[r*s, (r+1)*s)``, s its length over W, padded (``flat_parameter``); torch's stage 1 owns
whole parameters instead (``zero_owners``). With m micro-batches:

    strategy      parameters  gradients   optimizer   gradients are                            parameters are
    ddp           whole       whole       whole       all-reduced once                         updated by everybody
    zero1_naive   whole       whole       owned       all-reduced once, the slice is used      sent by their owners after the update
    zero1_torch   whole       whole       owned       all-reduced once                         broadcast by their owners after the update
    zero1         whole       whole       owned       reduce-scattered once                    all-gathered after the update
    zero2         whole       owned       owned       reduce-scattered in every micro-batch    all-gathered after the update
    zero3         owned       owned       owned       reduce-scattered in every micro-batch    all-gathered before use, twice

Source: ZeRO, arXiv:1910.02054, sections 5 and 7.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Strategy:
    """What a strategy shards, and how its gradients are reduced.

    ``state_formula``: bytes of parameters, gradients and optimizer state a rank; ``sent_formula``: bytes a rank sends in a step.
    ``whole_parameters``: owners have whole parameters, not slices of flat vectors.
    """

    key: str
    name: str
    owned_parameters: bool
    owned_gradients: bool
    owned_optimizer: bool
    all_reduce: bool
    state_formula: str
    sent_formula: str
    whole_parameters: bool = False

    @property
    def cut(self) -> bool:
        """Whether flat vectors are cut into the ranks' parts, and padded for it."""
        return self.owned_optimizer and not self.whole_parameters

    @property
    def axis(self) -> str:
        """The mesh axis of its group, as recordings name it."""
        return "dp_shard" if self.owned_optimizer else "dp_replicate"


STRATEGIES = (
    Strategy("ddp", "DDP", False, False, False, True, "N (P + G + O)", "2 F N G"),
    Strategy("zero1_naive", "ZeRO-1 naive", False, False, True, True, "N (P + G + O/W)", "2 F N G + F N P"),
    Strategy("zero1_torch", "ZeRO-1 torch", False, False, True, True, "N (P + G) + N_r O", "2 F N G + F N P", whole_parameters=True),
    Strategy("zero1", "ZeRO-1", False, False, True, False, "N (P + G + O/W)", "F N G + F N P"),
    Strategy("zero2", "ZeRO-2", False, True, True, False, "N (P + (G + O)/W)", "m F N G + F N P"),
    Strategy("zero3", "ZeRO-3", True, True, True, False, "N (P + G + O)/W", "m (2 F N P + F N G)"),
)


#: Optimizer state is float32 in every recipe.
STATE_BYTES = 4


@dataclass(frozen=True)
class Recipe:
    """Bytes an element of parameters and of gradients; ``state`` names the optimizer's arrays, 4 bytes an element each."""

    parameter: int
    gradient: int
    state: tuple[str, ...]

    @property
    def optimizer(self) -> int:
        """Bytes of optimizer state an element."""
        return STATE_BYTES * len(self.state)


RECIPES = {
    "fp32": Recipe(4, 4, ("exp_avg", "exp_avg_sq")),
    "mixed": Recipe(2, 2, ("master", "exp_avg", "exp_avg_sq")),
    "mixed_fp32_gradients": Recipe(2, 4, ("master", "exp_avg", "exp_avg_sq")),
}
