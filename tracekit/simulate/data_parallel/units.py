"""Which layers of a stack are gathered and freed together: one unit a layer, one for the whole model, blocks with a root, or buckets."""

from __future__ import annotations

from dataclasses import dataclass

from tracekit.errors import UsageError
from tracekit.simulate.data_parallel.layouts import ParameterShape
from tracekit.simulate.data_parallel.model import LinearStack

WAYS = ("layer", "model", "blocks")


@dataclass(frozen=True)
class Unit:
    """Layers (from 0) that are gathered together. The root unit is what the outermost wrapping keeps for itself."""

    name: str
    layers: tuple[int, ...]
    root: bool

    def parameters(self, model: LinearStack) -> tuple[ParameterShape, ...]:
        """The unit's parameters in order."""
        return tuple(parameter for layer in self.layers for parameter in model.layer_parameters(layer))


def units_of(model: LinearStack, way: str) -> tuple[Unit, ...]:
    """Units in the order in which forward needs them.

    ``layer``: every layer is a unit, the root owns nothing. ``model``: one unit, the root. ``blocks``: the root owns the first and the last
    layer (as it owns embedding and head of a transformer), every layer between is a unit.
    """
    last = model.layers - 1
    if way == "model":
        return (Unit("model", tuple(range(model.layers)), True),)
    if way == "layer":
        return tuple(Unit(f"layer {layer + 1}", (layer,), False) for layer in range(model.layers))
    if last < 2:
        raise UsageError(f"units 'blocks' need at least 3 layers, there are {model.layers}", "add layers, or take units 'layer' or 'model'")
    return (Unit("root", (0, last), True), *(Unit(f"layer {layer + 1}", (layer,), False) for layer in range(1, last)))


def buckets_of(model: LinearStack, most_bytes: int, element_bytes: int) -> tuple[Unit, ...]:
    """Units as DDP fills its buckets: layers from the last on, until one reaches ``most_bytes`` of gradients. In the order of forward."""
    buckets: list[list[int]] = []
    filled = most_bytes
    for layer in reversed(range(model.layers)):
        if filled >= most_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].insert(0, layer)
        filled += element_bytes * sum(parameter.elements for parameter in model.layer_parameters(layer))
    return tuple(Unit(f"bucket {number}", tuple(layers), False) for number, layers in reversed(list(enumerate(buckets))))
