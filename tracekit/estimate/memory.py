"""Memory of one rank: what a step (``step``) holds at each moment, its peak, and what the allocator takes from the device for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tracekit.estimate.activations import Activations
from tracekit.estimate.allocator import reserved_bytes, rounding
from tracekit.estimate.model_state import ModelState, model_state
from tracekit.estimate.parameters import Parameter
from tracekit.estimate.plan import Plan
from tracekit.estimate.step import Step
from tracekit.estimate.timeline import Moment, Sums
from tracekit.estimate.units import units_of


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank over a step."""

    sums: Sums
    """what is allocated at each moment"""
    state: ModelState
    """what stays between steps"""
    reserved: int
    """at least what the allocator takes from the device for the peak [bytes]"""

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """All moments in order."""
        return tuple(self.sums.moment(index) for index in range(len(self.sums.marks)))

    @cached_property
    def peak(self) -> Moment:
        """The first of the largest moments."""
        found = self.sums.largest()
        assert found is not None
        return found

    def largest(self, phase: str) -> Moment | None:
        """The largest moment of a phase."""
        return self.sums.largest(phase)


def rank_memory(
    parameters: Sequence[Parameter], activations: Sequence[Activations], plan: Plan, stage: int = 0, shard_rank: int = 0
) -> RankMemory:
    """Memory of a rank that holds ``parameters`` (those of its stage, divided by tp and ep, in order of use).

    ``activations``: one entry a chunk of the stage, of one micro-batch; the last one is the chunk whose passes are gone through.
    """
    units = units_of(parameters, plan, shard_rank)
    state = model_state(units, plan, parameters, shard_rank)
    sums = Step(parameters, units, state, activations, plan, stage).run()
    rounded = rounding(state.tensors) if plan.device == "cuda" else 0
    held = reserved_bytes(state.tensors) if plan.device == "cuda" else sum(state.tensors)
    most = int(sums.streams.max(axis=0).sum())  # a stream's segments serve no other stream
    return RankMemory(sums, state, max(most, held + most - sum(state.tensors) - rounded))
