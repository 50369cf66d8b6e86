"""ZeRO-1 as torch's ZeroRedundancyOptimizer does it: whole parameters have owners, who alone update them and broadcast them afterwards.

Gradients are all-reduced as under DDP. Nothing is cut and nothing padded, so the ranks' shares are as even as whole parameters allow.
Source: torch.distributed.optim.ZeroRedundancyOptimizer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tracekit.simulate.data_parallel.layouts import Array, ParameterShape, whole
from tracekit.simulate.data_parallel.model import Adam, Values
from tracekit.simulate.data_parallel.shards import Results, Shards
from tracekit.simulate.data_parallel.strategies import Sharding
from tracekit.simulate.holdings import Holdings


def dealt_out(parameters: Sequence[ParameterShape], world: int) -> list[tuple[ParameterShape, ...]]:
    """The parameters of every rank: the largest first (of equals the earlier), each to the rank with the fewest elements so far."""
    owned: list[list[ParameterShape]] = [[] for _ in range(world)]
    held = [0] * world
    for parameter in sorted(parameters, key=lambda p: -p.elements):
        rank = held.index(min(held))
        owned[rank].append(parameter)
        held[rank] += parameter.elements
    return [tuple(mine) for mine in owned]


class OwnerShards(Shards):
    """Units whose parameters are updated by owners. ``parameters_of[rank]`` are whole parameters, in the order of their broadcasts."""

    def __init__(self, sharding: Sharding, holdings: Holdings) -> None:
        super().__init__(sharding, holdings)
        self.parameters_of = dealt_out([p for layout in sharding.layouts for p in layout.parameters], self.world)
        self._unit_of = {p.name: layout.name for layout in sharding.layouts for p in layout.parameters}

    def start(self, values: Values) -> None:
        """Every rank keeps all ``values``, and optimizer state for its own parameters."""
        for layout in self.layouts.values():
            self._start_parameters(layout, values)
        for rank, mine in enumerate(self.parameters_of):
            for parameter in mine:
                own = values[parameter.name].reshape(-1)
                for name in self.widths.state:
                    state, key = own.copy() if name == "master" else np.zeros_like(own), f"{name} of {parameter.name}"
                    self.put(rank, key, state, [whole(parameter)], "optimizer_state", self.widths.state_bytes, f"{name} ")
        self.picture("start")

    def update(self, adam: Adam, number: int) -> None:
        """Adam on the parameters that each rank owns; ``number`` counts the steps from 1."""
        for rank, mine in enumerate(self.parameters_of):
            for parameter in mine:
                value, gradient = (self._view(rank, what, parameter) for what in ("parameter", "gradient"))
                state = {name: self.holdings.get(rank, f"{name} of {parameter.name}") for name in self.widths.state}
                updated = state.get("master", value)
                adam.update(updated, gradient, state["exp_avg"], state["exp_avg_sq"], number)
                value[:] = updated
        self.picture("update_owners")

    def synchronise(self) -> None:
        """One owner after the other broadcasts its parameters, each by itself."""
        for root, mine in enumerate(self.parameters_of):
            for parameter in mine:
                for rank, copy in enumerate(self.broadcast(self._view(root, "parameter", parameter), root, parameter.name)):
                    self._view(rank, "parameter", parameter)[:] = copy
            if mine:
                self.picture("broadcast", root=root, names=", ".join(parameter.name for parameter in mine))

    def results(self) -> Results:
        """As the base class; optimizer state is joined from the owners."""
        joined: dict[str, Values] = {"exp_avg": {}, "exp_avg_sq": {}}
        for rank, mine in enumerate(self.parameters_of):
            for p in mine:
                for name, values in joined.items():
                    values[p.name] = self.holdings.get(rank, f"{name} of {p.name}").reshape(p.shape).copy()
        gradients, parameters = self._full("gradient", False), self._full("parameter", False)
        return {"gradients": gradients, "parameters": parameters, "first": [joined["exp_avg"]], "second": [joined["exp_avg_sq"]]}

    def _view(self, rank: int, what: str, parameter: ParameterShape) -> Array:
        """The flat view of one parameter in a unit's whole vector."""
        unit = self._unit_of[parameter.name]
        return self.layouts[unit].views(self.holdings.get(rank, f"{what} {unit}"))[parameter.name].reshape(-1)
