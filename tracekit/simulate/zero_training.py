"""One step of data parallelism with nothing, the optimizer, the gradients or the parameters sharded, on virtual ranks.

A gradient is the mean over the ranks of the mean over their micro-batches: with equal parts, that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tracekit.simulate.adam import Adam
from tracekit.simulate.holdings import Holdings
from tracekit.simulate.layer_compute import LayerCompute, ValuesOf
from tracekit.simulate.linear_model import Batch, LinearStack, Values
from tracekit.simulate.model_units import Unit
from tracekit.simulate.shard_layout import ShardLayout
from tracekit.simulate.virtual import Network
from tracekit.simulate.zero_owners import OwnerUnits
from tracekit.simulate.zero_strategies import Recipe, Strategy
from tracekit.simulate.zero_units import ZeroUnits


@dataclass(frozen=True)
class Rules:
    """Choices within a strategy.

    ``broadcast``: the naive stage 1 sends updated parameters by broadcasts. Of stage 3: ``prefetch`` gathers the unit that backward needs
    next before the present one computes; ``reshard_last`` frees the last unit after forward, though backward begins with it.
    """

    broadcast: bool
    prefetch: bool
    reshard_last: bool


@dataclass(frozen=True)
class Results:
    """After a step, one entry a rank that has all of it, or one entry joined from the owners."""

    gradients: Sequence[Values]
    parameters: Sequence[Values]
    first: Sequence[Values]
    second: Sequence[Values]


class ZeroTraining:
    """A model trained by one strategy. ``layouts[i]`` is the flat layout of ``units[i]``; the moments are in ``holdings``.

    ``local[rank]`` are the mean gradients over the rank's own micro-batches of the latest step, before any reduction.
    """

    def __init__(
        self,
        model: LinearStack,
        units: Sequence[Unit],
        layouts: Sequence[ShardLayout],
        strategy: Strategy,
        recipe: Recipe,
        adam: Adam,
        rules: Rules,
    ) -> None:
        self.model, self.adam, self.rules = model, adam, rules
        self.holdings = Holdings(layouts[0].world)
        if strategy.whole_parameters:
            self.shards: ZeroUnits = OwnerUnits(layouts, strategy, recipe, self.holdings)
        else:
            self.shards = ZeroUnits(layouts, strategy, recipe, self.holdings, rules.broadcast)
        self.local: list[Values] = []
        self._compute = LayerCompute(model, self.holdings, recipe.parameter)
        self._unit_of = {layer: unit for unit in units for layer in unit.layers}

    @property
    def network(self) -> Network:
        """What was sent in the latest step."""
        return self.shards.network

    def start(self, values: Values) -> None:
        """Every rank keeps what the strategy leaves it of ``values``."""
        self.shards.start(values)
        self.holdings.record(
            "between steps, before",
            "What each rank holds when a step begins. In brackets which elements of the parameter, row by row; after them the offset in "
            "the flat vector or the rank's part of it.",
        )

    def step(self, batch: Batch, number: int, micro_batches: int) -> None:
        """One step on the global ``batch``: an equal part a rank, in equal micro-batches. ``number`` counts from 1; traffic from 0."""
        world = self.holdings.world
        self.shards.network = Network(world)
        self.local = [{} for _ in range(world)]
        for index in range(micro_batches):
            when = f"micro-batch {index + 1}, "
            self._compute.load([batch.part(rank, world).part(index, micro_batches) for rank in range(world)])
            self._forward(when)
            self._backward(when, micro_batches, index == micro_batches - 1)
        self.holdings.record("before the update", "All gradients are reduced; activations are gone.")
        self.shards.update(self.adam, number)
        self.shards.synchronise()

    def results(self) -> Results:
        """Everything that can be compared, outside every count."""
        shards = self.shards
        return Results(shards.mean_gradients(), shards.parameters(), shards.state("exp_avg"), shards.state("exp_avg_sq"))

    def finish(self) -> None:
        """Gradients are freed, as ``zero_grad`` does between steps."""
        self.shards.drop_gradients()
        self.holdings.record("between steps, after", "Gradients are freed: what is left is what each rank holds between two steps.")

    def _forward(self, when: str) -> None:
        for layer in range(self.model.layers):
            unit = self._unit_of[layer]
            self.shards.gather(unit.name, f"{when}forward", "forward")
            self._compute.forward(layer, self._values(unit))
            self.holdings.record(f"{when}forward: layer {layer + 1}", f"h{layer + 1} is computed and kept for backward.")
            last = layer == self.model.layers - 1
            if layer == unit.layers[-1] and (self.rules.reshard_last or not last):
                self.shards.release(unit.name)
        self._compute.loss()

    def _backward(self, when: str, micro_batches: int, last: bool) -> None:
        for layer in reversed(range(self.model.layers)):
            unit = self._unit_of[layer]
            self.shards.gather(unit.name, f"{when}backward", "backward")
            following = [self._unit_of[before] for before in reversed(range(layer)) if self._unit_of[before] is not unit]
            if self.rules.prefetch and following:
                self.shards.gather(following[0].name, f"{when}backward", "backward")
            for rank, gradients in enumerate(self._compute.backward(layer, self._values(unit))):
                self.shards.put_gradients(rank, gradients)
                for name, gradient in gradients.items():
                    self.local[rank][name] = self.local[rank].get(name, 0.0) + gradient / micro_batches
            self.holdings.record(f"{when}backward: layer {layer + 1}", "Gradients of the micro-batch, on each rank of its own samples.")
            self._compute.free(layer)
            if layer == unit.layers[0]:
                self.shards.release(unit.name)
                self.shards.collect(unit.name, f"{when}backward", micro_batches, last)

    def _values(self, unit: Unit) -> ValuesOf:
        return lambda rank: self.shards.values(rank, unit.name)
