"""A stack of linear layers with tanh between them, forward and backward by hand, and its training in one process.

    h_i = tanh(h_(i-1) W_i^T + b_i),  the last layer without tanh;  loss = mean over samples and outputs of (h_L - target)^2

It is small enough to follow and has what sharding is about: several parameters of different shapes, activations that are kept for
backward, gradients that are means over the batch. Everything is float64, so that differences show errors of sharding, not of formats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tracekit.errors import UsageError
from tracekit.simulate.data_parallel.layouts import Array, ParameterShape

#: More would make a picture that nobody can read, and seconds into minutes.
MOST_LAYERS = 32
MOST_WIDTH = 4096

Values = dict[str, Array]


@dataclass(frozen=True)
class LinearStack:
    """``shapes[i]`` is the weight of layer i, (outputs, inputs) as in torch; names count from 1: W1, b1, W2, ..."""

    shapes: tuple[tuple[int, int], ...]
    bias: bool = True

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.shapes)

    def layer_parameters(self, layer: int) -> tuple[ParameterShape, ...]:
        """Weight and bias of layer ``layer`` (from 0)."""
        outputs, inputs = self.shapes[layer]
        weight = ParameterShape(f"W{layer + 1}", (outputs, inputs))
        return (weight, ParameterShape(f"b{layer + 1}", (outputs,))) if self.bias else (weight,)

    @property
    def parameters(self) -> tuple[ParameterShape, ...]:
        """All parameters in order of the layers."""
        return tuple(parameter for layer in range(self.layers) for parameter in self.layer_parameters(layer))

    def refuse_large(self, ranks: int, samples: int, most: int) -> None:
        """UsageError where parameters and activations of all ranks together are more elements than an experiment takes."""
        held = ranks * (sum(p.elements for p in self.parameters) + samples * max(max(shape) for shape in self.shapes))
        if held > most:
            raise UsageError(f"{held:,} elements on all ranks together", f"give smaller layers or fewer ranks: at most {most:,}")

    def initial(self, seed: int) -> Values:
        """Start values, the same for the same seed: uniform within 1/sqrt(inputs), as torch's linear layers."""
        rng = np.random.default_rng([seed, 0])
        bounds = {name: 1 / np.sqrt(inputs) for i, (_, inputs) in enumerate(self.shapes) for name in (f"W{i + 1}", f"b{i + 1}")}
        return {p.name: rng.uniform(-bounds[p.name], bounds[p.name], p.shape) for p in self.parameters}

    def forward_layer(self, layer: int, values: Mapping[str, Array], x: Array) -> Array:
        """Output [samples, outputs] of one layer for ``x`` [samples, inputs]."""
        y = x @ values[f"W{layer + 1}"].T
        if self.bias:
            y = y + values[f"b{layer + 1}"]
        return y if layer == self.layers - 1 else np.tanh(y)

    def loss_gradient(self, y: Array, target: Array) -> Array:
        """Gradient of the mean square error by the last output."""
        return 2 * (y - target) / y.size

    def backward_layer(self, layer: int, values: Mapping[str, Array], x: Array, y: Array, dy: Array) -> tuple[Array, Values]:
        """(gradient by ``x``, gradients by the layer's parameters), from its input, output and the output's gradient."""
        inner = dy if layer == self.layers - 1 else dy * (1 - y**2)
        gradients = {f"W{layer + 1}": inner.T @ x}
        if self.bias:
            gradients[f"b{layer + 1}"] = inner.sum(0)
        return inner @ values[f"W{layer + 1}"], gradients

    def gradients(self, values: Mapping[str, Array], x: Array, target: Array) -> Values:
        """Gradients of the loss over the whole of ``x`` [samples, inputs] by all parameters."""
        outputs = [x]
        for layer in range(self.layers):
            outputs.append(self.forward_layer(layer, values, outputs[-1]))
        found: Values = {}
        dy = self.loss_gradient(outputs[-1], target)
        for layer in reversed(range(self.layers)):
            dy, own = self.backward_layer(layer, values, outputs[layer], outputs[layer + 1], dy)
            found |= own
        return found


@dataclass(frozen=True)
class Adam:
    """Adam, element by element, so that a shard of the state updates a shard of the parameter exactly as the whole would.

        m = b1 m + (1-b1) g,  v = b2 v + (1-b2) g^2,  p -= lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    Source: Kingma and Ba, 2015, arXiv:1412.6980, algorithm 1; defaults as in ``torch.optim.Adam``.
    """

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def update(self, parameter: Array, gradient: Array, first: Array, second: Array, step: int) -> None:
        """One step in place on equally long arrays; ``first``, ``second`` are the moments, ``step`` counts from 1."""
        first *= self.beta1
        first += (1 - self.beta1) * gradient
        second *= self.beta2
        second += (1 - self.beta2) * gradient**2
        scale = np.sqrt(second / (1 - self.beta2**step)) + self.epsilon
        parameter -= self.learning_rate * (first / (1 - self.beta1**step)) / scale


@dataclass(frozen=True)
class Samples:
    """The samples of one step: ``x`` [samples, inputs], ``target`` [samples, outputs]."""

    x: Array
    target: Array

    def part(self, index: int, parts: int) -> Samples:
        """The ``index``-th of ``parts`` equal parts."""
        size = len(self.x) // parts
        return Samples(self.x[index * size : (index + 1) * size], self.target[index * size : (index + 1) * size])


@dataclass(frozen=True)
class Trained:
    """After a step: ``gradients`` of that step, parameters and both Adam moments after it."""

    gradients: Values
    parameters: Values
    first: Values
    second: Values


def batches(model: LinearStack, samples: int, steps: int, seed: int) -> list[Samples]:
    """Random samples for each step, the same for the same seed."""
    rng = np.random.default_rng([seed, 1])
    inputs, outputs = model.shapes[0][1], model.shapes[-1][0]
    return [Samples(rng.standard_normal((samples, inputs)), rng.standard_normal((samples, outputs))) for _ in range(steps)]


def train_in_one_process(model: LinearStack, data: Sequence[Samples], adam: Adam, seed: int) -> list[Trained]:
    """The reference: every step on its whole batch, nothing sharded."""
    values = model.initial(seed)
    first = {name: np.zeros_like(value) for name, value in values.items()}
    second = {name: np.zeros_like(value) for name, value in values.items()}
    done = []
    for step, batch in enumerate(data, 1):
        gradients = model.gradients(values, batch.x, batch.target)
        for name, value in values.items():
            adam.update(value, gradients[name], first[name], second[name], step)
        done.append(Trained(gradients, *({n: v.copy() for n, v in held.items()} for held in (values, first, second))))
    return done


def largest_error(found: Mapping[str, Array], expected: Mapping[str, Array]) -> float:
    """Largest absolute difference of any element; NaN where one is NaN."""
    return float(np.max([np.max(np.abs(found[name] - value), initial=0.0) for name, value in expected.items()]))


def layers_from_text(text: str) -> tuple[tuple[int, int], ...]:
    """Weight shapes from ``2x3,2x2``: outputs x inputs of each layer in order. UsageError where they make no stack."""
    shapes = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})\s*[xX]\s*([0-9]{1,6})\s*", word)
        if match is None:
            raise UsageError(f"layers {text!r}: {word.strip()!r} is no weight", "write outputs x inputs of each layer, as in 2x3,2x2")
        shapes.append((int(match[1]), int(match[2])))
    if any(not 1 <= side <= MOST_WIDTH for shape in shapes for side in shape):
        raise UsageError(f"layers {text!r}: a width is outside 1 to {MOST_WIDTH}", "give smaller layers")
    if len(shapes) > MOST_LAYERS:
        raise UsageError(f"{len(shapes)} layers, at most {MOST_LAYERS} can be shown", "give fewer")
    for before, (outputs, _), (_, inputs) in zip(range(1, len(shapes)), shapes, shapes[1:], strict=False):
        if outputs != inputs:
            problem = f"layers {text!r}: layer {before} has {outputs} outputs, but layer {before + 1} takes {inputs} inputs"
            raise UsageError(problem, "outputs and inputs of neighbours have to be equal")
    return tuple(shapes)
