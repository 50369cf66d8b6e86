"""One step of fully sharded data parallelism on virtual ranks: gather, forward, free, gather, backward, reduce-scatter, update.

The order of a step, u the unit of a layer (torch.distributed.fsdp; the root is gathered first and, unless asked otherwise, kept):

    forward    for each layer:            all-gather u if it is not there, compute; after the last layer of u: free u
    backward   for each layer backwards:  all-gather u if it is not there, [prefetch: all-gather the unit that follows], compute;
                                          after the first layer of u: free u, reduce-scatter its gradients
    optimizer  Adam on every shard
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tracekit.simulate.adam import Adam
from tracekit.simulate.holdings import Holdings
from tracekit.simulate.layer_compute import LayerCompute, ValuesOf
from tracekit.simulate.linear_model import Batch, LinearStack, Trained, Values
from tracekit.simulate.model_units import Unit
from tracekit.simulate.shard_layout import ShardLayout
from tracekit.simulate.sharded_units import ShardedUnits, Widths
from tracekit.simulate.virtual import Network


@dataclass(frozen=True)
class Rules:
    """Names of the units that forward does not free, and whether backward gathers the unit that follows before it computes."""

    keep_after_forward: frozenset[str]
    prefetch: bool


class ShardedTraining:
    """A model of which every rank keeps shards. ``layouts[i]`` belongs to ``units[i]``; the moments are in ``holdings``.

    ``replicas``: so many times as many ranks, each group of them with the whole model (hybrid sharding).

    ``local[rank]`` are the full gradients of the rank's own samples in the latest step, before any reduction.
    """

    def __init__(
        self,
        model: LinearStack,
        units: Sequence[Unit],
        layouts: Sequence[ShardLayout],
        widths: Widths,
        rules: Rules,
        adam: Adam,
        replicas: int = 1,
    ) -> None:
        self.model, self.units, self.rules, self.adam = model, list(units), rules, adam
        self.holdings = Holdings(replicas * layouts[0].world)
        self.shards = ShardedUnits(layouts, widths, self.holdings)
        self.local: list[Values] = []
        self._compute = LayerCompute(model, self.holdings, widths.gathered)
        self._unit_of = {layer: unit for unit in units for layer in unit.layers}

    @property
    def network(self) -> Network:
        """What was sent in the latest step."""
        return self.shards.network

    def start(self, values: Values) -> None:
        """Every rank keeps its shards of ``values``."""
        self.shards.start(values)
        self.holdings.record(
            "after init",
            "Each rank keeps its shard of every unit, and the two Adam moments of it (torch allocates them in the first update; here they "
            "are there from the start, so that the bytes are those of any later step). In brackets which elements of the parameter, row by "
            "row; after them the offset in the shard.",
        )

    def step(self, batch: Batch, number: int) -> None:
        """One step on the global ``batch``, an equal part a rank; ``number`` counts from 1. Counting starts anew."""
        self.shards.network = Network(self.holdings.world)
        self.local = [{} for _ in range(self.holdings.world)]
        self._compute.load([batch.part(rank, self.holdings.world) for rank in range(self.holdings.world)])
        self.holdings.record("batch", "Each rank takes its own part of the batch.")
        self._forward()
        self.shards.end_forward()
        self._compute.loss()
        self.holdings.record("loss", "Each rank's loss is the mean over its own samples; its gradient starts backward.")
        self._backward()
        self.shards.update(self.adam, number)

    def result(self, replica: int = 0) -> Trained:
        """Full tensors joined from all shards of a replica, to compare; reading them is no communication of the strategy."""
        return Trained(*(self.shards.joined(name, replica) for name in ("shard_grad", "shard", "exp_avg", "exp_avg_sq")))

    def finish(self) -> None:
        """Gradients are freed, as ``zero_grad`` does between steps."""
        self.shards.drop_gradients()
        self.holdings.record("between steps", "Gradients are freed: what is left is what each rank holds between two steps.")

    def _forward(self) -> None:
        for unit in self.units:
            if unit.root:
                self.shards.gather(unit.name, "forward")
        for layer in range(self.model.layers):
            unit = self._unit_of[layer]
            self.shards.gather(unit.name, "forward")
            self._compute.forward(layer, self._values(unit))
            self.holdings.record(f"forward: layer {layer + 1}", f"h{layer + 1} is computed from h{layer}; both stay for backward.")
            if layer == unit.layers[-1] and not unit.root and unit.name not in self.rules.keep_after_forward:
                self.shards.free(unit.name, "forward")
        for unit in self.units:
            if unit.root and unit.name not in self.rules.keep_after_forward:
                self.shards.free(unit.name, "forward")

    def _backward(self) -> None:
        for unit in self.units:
            if unit.root:
                self.shards.gather(unit.name, "backward")
        for layer in reversed(range(self.model.layers)):
            unit = self._unit_of[layer]
            self.shards.gather(unit.name, "backward")
            following = [self._unit_of[before] for before in reversed(range(layer)) if self._unit_of[before] is not unit]
            if self.rules.prefetch and following:
                self.shards.fetch(following[0].name, "backward")
            self._backward_layer(layer, unit)
            if layer == unit.layers[0]:
                self.shards.scatter(unit.name)
        self.shards.end_backward()

    def _backward_layer(self, layer: int, unit: Unit) -> None:
        for rank, gradients in enumerate(self._compute.backward(layer, self._values(unit))):
            self.local[rank] |= gradients
            self.shards.put_gradients(unit.name, rank, gradients)
        self.holdings.record(
            f"backward: layer {layer + 1}", f"Full gradients of layer {layer + 1}, on each rank of its own samples: every rank has others."
        )
        self._compute.free(layer)

    def _values(self, unit: Unit) -> ValuesOf:
        return lambda rank: self.shards.values(rank, unit.name)
