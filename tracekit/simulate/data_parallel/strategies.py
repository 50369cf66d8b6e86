"""The settings of the engine: what a strategy of data parallelism shards, in which layout, and how its gradients are reduced.

Rank r of W owns a W-th of what is sharded. With m micro-batches of one step:

    strategy      sharded        layout  gradients are                            parameters are
    ddp           nothing        flat    all-reduced once                         updated by everybody
    zero1_naive   optimizer      flat    all-reduced once, the slice is used      sent by their owners after the update
    zero1_torch   optimizer      owners  all-reduced once                         broadcast by their owners after the update
    zero1         optimizer      flat    reduce-scattered once                    all-gathered after the update
    zero2         gradients      flat    reduce-scattered in every micro-batch    all-gathered after the update
    zero3, fsdp1  parameters     flat    reduce-scattered in every micro-batch    all-gathered before use, twice
    fsdp2         parameters     rows    reduce-scattered in every micro-batch    all-gathered before use, twice

What is sharded includes what stands above it: parameters include gradients and optimizer state. ``layouts`` has the layouts; *owners* gives
whole parameters to ranks, as torch's ZeroRedundancyOptimizer does (``owners``). Sources: ZeRO, arXiv:1910.02054, sections 5 and 7; PyTorch
FSDP, arXiv:2304.11277.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tracekit.simulate.data_parallel.layouts import ShardLayout
from tracekit.simulate.data_parallel.units import Unit

_LEVELS = ("nothing", "optimizer", "gradients", "parameters")


@dataclass(frozen=True)
class Strategy:
    """What is sharded and how it is reduced; see the table above."""

    #: As an option names it.
    key: str
    #: As a reader knows it.
    name: str
    sharded: Literal["nothing", "optimizer", "gradients", "parameters"]
    layout: Literal["flat", "rows", "owners"]
    reduction: Literal["all_reduce", "reduce_scatter"]
    #: Bytes of parameters, gradients and optimizer state of a rank, in closed form.
    state_formula: str = ""
    #: Bytes that a rank sends in a step, in closed form.
    sent_formula: str = ""

    @property
    def owned_optimizer(self) -> bool:
        """Whether a rank has optimizer state for its own part alone."""
        return _LEVELS.index(self.sharded) >= 1

    @property
    def owned_gradients(self) -> bool:
        """Whether a rank keeps the reduced gradients of its own part alone."""
        return _LEVELS.index(self.sharded) >= 2

    @property
    def owned_parameters(self) -> bool:
        """Whether a rank keeps its own part of the parameters alone, and gathers the rest before use."""
        return _LEVELS.index(self.sharded) >= 3

    @property
    def cut(self) -> bool:
        """Whether units are cut into the ranks' parts, and padded for it."""
        return self.owned_optimizer and self.layout != "owners"

    @property
    def axis(self) -> str:
        """The mesh axis of its group, as recordings name it."""
        return "dp_shard" if self.owned_optimizer else "dp_replicate"


ZERO = (
    Strategy("ddp", "DDP", "nothing", "flat", "all_reduce", "N (P + G + O)", "2 F N G"),
    Strategy("zero1_naive", "ZeRO-1 naive", "optimizer", "flat", "all_reduce", "N (P + G + O/W)", "2 F N G + F N P"),
    Strategy("zero1_torch", "ZeRO-1 torch", "optimizer", "owners", "all_reduce", "N (P + G) + N_r O", "2 F N G + F N P"),
    Strategy("zero1", "ZeRO-1", "optimizer", "flat", "reduce_scatter", "N (P + G + O/W)", "F N G + F N P"),
    Strategy("zero2", "ZeRO-2", "gradients", "flat", "reduce_scatter", "N (P + (G + O)/W)", "m F N G + F N P"),
    Strategy("zero3", "ZeRO-3", "parameters", "flat", "reduce_scatter", "N (P + G + O)/W", "m (2 F N P + F N G)"),
)
FSDP = (
    Strategy("1", "FSDP1", "parameters", "flat", "reduce_scatter"),
    Strategy("2", "FSDP2", "parameters", "rows", "reduce_scatter"),
)


@dataclass(frozen=True)
class Widths:
    """Bytes of one element of each thing; ``state`` names the arrays of the optimizer."""

    #: Parameters, or the shards of them that a rank keeps.
    stored: int
    #: Gathered parameters and activations.
    gathered: int
    #: Gradients as backward leaves them.
    gradient: int
    #: Gradients under way.
    reduced: int
    #: Reduced gradients that wait for the update.
    kept_gradient: int
    #: One array of the optimizer state.
    state_bytes: int
    state: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    @property
    def optimizer(self) -> int:
        """Bytes of optimizer state an element."""
        return self.state_bytes * len(self.state)


def fsdp_widths(stored: int, gathered: int, reduced: int) -> Widths:
    """FSDP's mixed precision: shards with their state, what is computed with, and what is reduce-scattered."""
    return Widths(stored, gathered, gathered, reduced, stored, stored)


def _recipe(parameter: int, gradient: int, *state: str) -> Widths:
    return Widths(parameter, parameter, gradient, gradient, gradient, 4, state)


#: ZeRO's recipes: bytes of a parameter and its gradient; optimizer state is float32 in each.
RECIPES = {
    "fp32": _recipe(4, 4, "exp_avg", "exp_avg_sq"),
    "mixed": _recipe(2, 2, "master", "exp_avg", "exp_avg_sq"),
    "mixed_fp32_gradients": _recipe(2, 4, "master", "exp_avg", "exp_avg_sq"),
}


@dataclass(frozen=True)
class Sharding:
    """All settings of one training. ``layouts[i]`` is that of ``units[i]``."""

    strategy: Strategy
    units: Sequence[Unit]
    layouts: Sequence[ShardLayout]
    widths: Widths
    #: Moments of a step that are pictured, and their sentences; see ``narration``.
    narration: Mapping[str, tuple[str, str]]
    #: Names of the units that stay gathered between forward and backward.
    kept: frozenset[str] = frozenset()
    #: Whether backward gathers the unit that follows before the present one computes.
    prefetch: bool = True
    #: Groups of ranks that each have the whole model (hybrid sharding).
    replicas: int = 1
    #: Copies, casts and padding as torch's FSDP makes them; otherwise gradients are padded from the start and reduced in place.
    as_torch: bool = False
    #: Owners broadcast what they have updated, one after the other, in the place of one all-gather.
    broadcast: bool = False

    @property
    def world(self) -> int:
        """Ranks that share the model: of one replica."""
        return self.layouts[0].world
