"""The order of a training step, the same for every strategy; what each part of it does is up to ``shards``.

    for each micro-batch
        forward    for each layer:            gather its unit, compute; after the last layer of a unit: free it unless it is kept
        backward   for each layer backwards:  gather its unit, [prefetch: fetch the unit that follows], compute;
                                              after the first layer of a unit: free it, reduce its gradients
    optimizer      update what each rank owns; hand it on where others keep it too

The root unit is gathered first (torch.distributed.fsdp). Gathering does nothing where parameters are not sharded. A gradient is the mean
over the ranks of the mean over their micro-batches: with equal parts, that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from tracekit.simulate.data_parallel.layouts import Array
from tracekit.simulate.data_parallel.model import Adam, LinearStack, Samples, Values
from tracekit.simulate.data_parallel.owners import OwnerShards
from tracekit.simulate.data_parallel.shards import Shards
from tracekit.simulate.data_parallel.strategies import Sharding
from tracekit.simulate.experiment import Cell
from tracekit.simulate.holdings import Holdings


class Training:
    """A model trained by one strategy; the moments are in ``holdings``.

    ``local[rank]`` are the mean gradients over the rank's own micro-batches of the latest step, before any reduction.
    """

    def __init__(self, model: LinearStack, sharding: Sharding, adam: Adam) -> None:
        self.model, self.sharding, self.adam = model, sharding, adam
        self.holdings = Holdings(sharding.replicas * sharding.world)
        self.ranks = range(self.holdings.world)
        self.shards = (OwnerShards if sharding.strategy.layout == "owners" else Shards)(sharding, self.holdings)
        self.local: list[Values] = []
        self._unit_of = {layer: unit for unit in sharding.units for layer in unit.layers}
        self._roots = [unit for unit in sharding.units if unit.root]

    def step(self, samples: Samples, number: int, micro_batches: int = 1, named: bool = False) -> None:
        """One step on the global batch: an equal part a rank, in equal micro-batches. ``number`` counts from 1; traffic from 0.

        ``named``: the pictures say which micro-batch they are of.
        """
        self.shards.begin_step()
        self.local = [{} for _ in self.ranks]
        for index in range(micro_batches):
            prefix = f"micro-batch {index + 1}, " if named else ""
            self._load([samples.part(rank, len(self.ranks)).part(index, micro_batches) for rank in self.ranks])
            self.shards.enter("forward", prefix)
            self._forward()
            self.shards.enter("backward", prefix)
            self._backward(micro_batches, index == micro_batches - 1)
        self.shards.picture("before_update")
        self.shards.update(self.adam, number)
        self.shards.synchronise()

    def _load(self, parts: Sequence[Samples]) -> None:
        for rank, part in enumerate(parts):
            self._put(rank, "h0", part.x, "input")
            self._put(rank, "target", part.target, "input")
        self.shards.picture("load")

    def _forward(self) -> None:
        """Names held: ``h0`` the input, ``h1``, ``h2``, ... outputs of the layers, ``target``, ``d h2`` the gradient of an output."""
        model, holdings = self.model, self.holdings
        for unit in self._roots:
            self.shards.gather(unit.name)
        for layer in range(model.layers):
            unit = self._unit_of[layer]
            self.shards.gather(unit.name)
            for rank in self.ranks:
                y = model.forward_layer(layer, self.shards.values(rank, unit.name), holdings.get(rank, f"h{layer}"))
                self._put(rank, f"h{layer + 1}", y, "activation")
            self.shards.picture("forward", unit=unit.name, layer=layer + 1, below=layer)
            if layer == unit.layers[-1] and unit.name not in self.sharding.kept:
                self.shards.free(unit.name)
        self.shards.end_forward()
        for rank in self.ranks:
            dy = model.loss_gradient(holdings.get(rank, f"h{model.layers}"), holdings.get(rank, "target"))
            self._put(rank, f"d h{model.layers}", dy, "activation")
        holdings.drop("target")
        self.shards.picture("loss")

    def _backward(self, micro_batches: int, last: bool) -> None:
        for unit in self._roots:
            self.shards.gather(unit.name)
        for layer in reversed(range(self.model.layers)):
            unit = self._unit_of[layer]
            self.shards.gather(unit.name)
            following = [self._unit_of[before] for before in reversed(range(layer)) if self._unit_of[before] is not unit]
            if self.sharding.prefetch and following:
                self.shards.fetch(following[0].name)
            self._backward_layer(layer, micro_batches)
            if layer == unit.layers[0]:
                self.shards.reduce(unit.name, micro_batches, last)
        self.shards.end_backward()

    def _backward_layer(self, layer: int, micro_batches: int) -> None:
        """Gradients by the layer's parameters and its input on each rank; then nothing needs its output any more."""
        unit = self._unit_of[layer]
        for rank in self.ranks:
            x, y, dy = (self.holdings.get(rank, name) for name in (f"h{layer}", f"h{layer + 1}", f"d h{layer + 1}"))
            dx, gradients = self.model.backward_layer(layer, self.shards.values(rank, unit.name), x, y, dy)
            if layer:
                self._put(rank, f"d h{layer}", dx, "activation")
            self.shards.put_gradients(rank, gradients)
            local = self.local[rank]
            for name, gradient in gradients.items():
                own = gradient / micro_batches
                local[name] = local[name] + own if name in local else own
        self.shards.picture("backward", unit=unit.name, layer=layer + 1)
        for name in (f"h{layer + 1}", f"d h{layer + 1}", *(() if layer else ("h0",))):
            self.holdings.drop(name)

    def _put(self, rank: int, name: str, array: Array, kind: str) -> None:
        width = self.sharding.widths.gathered
        cell = Cell(name, kind, array.size * width, "shape " + " x ".join(map(str, array.shape)))
        self.holdings.put(rank, name, array, [cell], width)
