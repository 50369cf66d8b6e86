"""Forward and backward of a linear stack, layer by layer, on every rank at once; what has to stay for backward stays in the holdings.

Names held: ``h0`` the input, ``h1``, ``h2``, ... outputs of the layers, ``target``, and ``d h2`` for the gradient of an output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tracekit.simulate.experiment import Cell
from tracekit.simulate.holdings import Holdings
from tracekit.simulate.linear_model import Batch, LinearStack, Values
from tracekit.simulate.shard_layout import Array

#: Full parameters of a layer on a rank.
ValuesOf = Callable[[int], Values]


class LayerCompute:
    """The local work of all ranks. ``width``: bytes an element of inputs and activations."""

    def __init__(self, model: LinearStack, holdings: Holdings, width: int) -> None:
        self.model, self.holdings, self.width = model, holdings, width

    def load(self, parts: Sequence[Batch]) -> None:
        """Rank r takes ``parts[r]``."""
        for rank, part in enumerate(parts):
            self._put(rank, "h0", part.x, "input")
            self._put(rank, "target", part.target, "input")

    def forward(self, layer: int, values: ValuesOf) -> None:
        """Compute the output of a layer; it and the input stay for backward."""
        for rank in range(self.holdings.world):
            y = self.model.forward_layer(layer, values(rank), self.holdings.get(rank, f"h{layer}"))
            self._put(rank, f"h{layer + 1}", y, "activation")

    def loss(self) -> None:
        """Gradient of each rank's own loss by its last output; the target is not needed any more."""
        last = self.model.layers
        for rank in range(self.holdings.world):
            dy = self.model.loss_gradient(self.holdings.get(rank, f"h{last}"), self.holdings.get(rank, "target"))
            self._put(rank, f"d h{last}", dy, "activation")
        self.holdings.drop("target")

    def backward(self, layer: int, values: ValuesOf) -> list[Values]:
        """Gradients by the layer's parameters on each rank. The gradient of the input is held for the layer below."""
        found = []
        for rank in range(self.holdings.world):
            x, y, dy = (self.holdings.get(rank, name) for name in (f"h{layer}", f"h{layer + 1}", f"d h{layer + 1}"))
            dx, gradients = self.model.backward_layer(layer, values(rank), x, y, dy)
            if layer:
                self._put(rank, f"d h{layer}", dx, "activation")
            found.append(gradients)
        return found

    def free(self, layer: int) -> None:
        """What nothing needs after the backward of ``layer``: its output, the gradient of that, and below the first layer the input."""
        for name in (f"h{layer + 1}", f"d h{layer + 1}", *(() if layer else ("h0",))):
            self.holdings.drop(name)

    def _put(self, rank: int, name: str, array: Array, kind: str) -> None:
        cell = Cell(name, kind, array.size * self.width, "shape " + " x ".join(map(str, array.shape)))
        self.holdings.put(rank, name, array, [cell], self.width)
