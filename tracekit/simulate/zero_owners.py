"""ZeRO-1 as torch's ZeroRedundancyOptimizer does it: whole parameters have owners, who alone update them and broadcast them afterwards.

Gradients are all-reduced as under DDP. Nothing is cut and nothing padded, so the ranks' shares are as even as whole parameters allow.
Source: torch.distributed.optim.ZeroRedundancyOptimizer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tracekit.simulate.adam import Adam
from tracekit.simulate.holdings import Holdings
from tracekit.simulate.linear_model import Values
from tracekit.simulate.shard_layout import Parameter, Piece, ShardLayout
from tracekit.simulate.zero_strategies import STATE_BYTES, Recipe, Strategy
from tracekit.simulate.zero_units import ZeroUnits


def dealt_out(parameters: Sequence[Parameter], world: int) -> list[tuple[Parameter, ...]]:
    """The parameters of every rank: the largest first (of equals the earlier), each to the rank with the fewest elements so far."""
    owned: list[list[Parameter]] = [[] for _ in range(world)]
    held = [0] * world
    for parameter in sorted(parameters, key=lambda p: -p.elements):
        rank = held.index(min(held))
        owned[rank].append(parameter)
        held[rank] += parameter.elements
    return [tuple(mine) for mine in owned]


class OwnerUnits(ZeroUnits):
    """Units whose parameters are updated by owners. ``owned[rank]`` are whole parameters, in the order in which they are broadcast."""

    def __init__(self, layouts: Sequence[ShardLayout], strategy: Strategy, recipe: Recipe, holdings: Holdings) -> None:
        super().__init__(layouts, strategy, recipe, holdings, broadcast=True)
        self.owned = dealt_out([p for layout in layouts for p in layout.parameters], self.world)
        self._unit_of = {p.name: layout.name for layout in layouts for p in layout.parameters}

    def start(self, values: Values) -> None:
        """Every rank keeps all ``values``, and optimizer state for its own parameters."""
        self._start_parameters(values)
        for rank, mine in enumerate(self.owned):
            for parameter in mine:
                whole = [Piece(parameter.name, 0, parameter.elements, 0, parameter.name)]
                start = values[parameter.name].reshape(-1)
                for name in self.recipe.state:
                    state = start.copy() if name == "master" else np.zeros_like(start)
                    self._put(rank, f"{name} of {parameter.name}", state, whole, "optimizer_state", STATE_BYTES, f"{name} ")

    def update(self, adam: Adam, number: int) -> None:
        """Adam on the parameters that each rank owns; ``number`` counts the steps from 1."""
        for rank, mine in enumerate(self.owned):
            for parameter in mine:
                value, gradient = (self._view(rank, f"{what} {self._unit_of[parameter.name]}", parameter) for what in _BOTH)
                state = {name: self.holdings.get(rank, f"{name} of {parameter.name}") for name in self.recipe.state}
                updated = state.get("master", value)
                adam.update(updated, gradient, state["exp_avg"], state["exp_avg_sq"], number)
                value[:] = updated
        self.holdings.record("update", "Each rank updates the parameters that it owns.")

    def synchronise(self) -> None:
        """One owner after the other broadcasts its parameters, each by itself."""
        for root, mine in enumerate(self.owned):
            before = len(self.network.messages)
            for parameter in mine:
                name = f"parameter {self._unit_of[parameter.name]}"
                copies = self.network.broadcast(
                    self._view(root, name, parameter),
                    range(self.world),
                    root,
                    axis=self.strategy.axis,
                    purpose="parameter_sync",
                    phase="optimizer",
                    label=parameter.name,
                    element_bytes=self.recipe.parameter,
                )
                for rank, copy in enumerate(copies):
                    self._view(rank, name, parameter)[:] = copy
            if mine:
                names = ", ".join(parameter.name for parameter in mine)
                text = f"Everybody gets what rank {root} has updated: {names}."
                self.holdings.record_sent(f"rank {root} broadcasts", text, self.network, before)

    def state(self, name: str) -> list[Values]:
        """An array of the optimizer state, joined from the owners."""
        return [
            {
                parameter.name: self.holdings.get(rank, f"{name} of {parameter.name}").reshape(parameter.shape).copy()
                for rank, mine in enumerate(self.owned)
                for parameter in mine
            }
        ]

    def _view(self, rank: int, name: str, parameter: Parameter) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """The flat view of one parameter in a unit's whole vector."""
        return self.layouts[self._unit_of[parameter.name]].views(self.holdings.get(rank, name))[parameter.name].reshape(-1)


_BOTH = ("parameter", "gradient")
