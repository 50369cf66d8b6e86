"""A small model run through a pipeline in the order of a schedule: real activations and gradients between virtual ranks.

Every chunk is one layer, y = gelu(x W) with W of h x h, and the loss half the mean over tokens of |y - target|^2. Micro-batches X_j hold
s b tokens. By hand: dz = gelu'(z) dy, dx = dz W^T (backward for the input), dW += x^T dz (backward for the weights).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracekit.simulate.experiment import Call, Cell, Moment
from tracekit.simulate.functions import Float, gelu, gelu_backward
from tracekit.simulate.pipeline.messages import Post, posts
from tracekit.simulate.pipeline.order import Action, StepTimes, TimedAction
from tracekit.simulate.virtual import Network


@dataclass(frozen=True)
class Model:
    """``weights`` (chunks, h, h), ``inputs`` and ``targets`` (m, tokens, h)."""

    weights: Float
    inputs: Float
    targets: Float

    @property
    def tokens(self) -> int:
        """Tokens of all micro-batches together."""
        return int(self.inputs.shape[0] * self.inputs.shape[1])


def random_model(chunks: int, m: int, tokens: int, h: int, seed: int) -> Model:
    """Weights that keep activations at their size, inputs and targets from one seed."""
    draw = np.random.default_rng(seed).standard_normal
    return Model(draw((chunks, h, h)) / np.sqrt(h), draw((m, tokens, h)), draw((m, tokens, h)))


def unsharded(model: Model) -> tuple[float, Float]:
    """Loss and gradient of the weights of the whole batch on one rank, layer by layer."""
    x = model.inputs.reshape(model.tokens, -1)
    inputs, sums = [], []
    for weight in model.weights:
        inputs.append(x)
        sums.append(x @ weight)
        x = gelu(sums[-1])
    difference = x - model.targets.reshape(x.shape)
    loss, dy = 0.5 * float((difference**2).sum()) / model.tokens, difference / model.tokens
    gradient = np.empty_like(model.weights)
    for layer in reversed(range(len(model.weights))):
        dz = gelu_backward(sums[layer], dy)
        gradient[layer] = inputs[layer].T @ dz
        dy = dz @ model.weights[layer].T
    return loss, gradient


class PipelineRun:
    """Carries out the actions of a timeline. ``loss`` and ``gradient`` are whole once all are done; ``network`` has counted what was sent.

    ``calls[rank]``: sends and receives in the order in which the rank's own program posts them. ``moments``: one for each instant at which
    an action ends, unless there would be more than ``most_moments`` (then none).
    """

    def __init__(self, model: Model, timeline: StepTimes, element_bytes: int, most_moments: int) -> None:
        self.model = model
        self.network = Network(timeline.stages, element_bytes)
        self.loss = 0.0
        self.gradient = np.zeros_like(model.weights)
        self.moments: list[Moment] = []
        self._stages = timeline.stages
        self._element_bytes = element_bytes
        self._arrived: dict[Action, Float] = {}  # what an action was handed: the activation of an F, the gradient of a backward
        self._saved: dict[tuple[int, int], dict[str, Float]] = {}  # (chunk, micro-batch) -> x and z, later dz
        instants = _instants(timeline.actions)
        for actions in instants:
            self._instant(actions, pictured=len(instants) <= most_moments)
        size = model.inputs[0].size * element_bytes
        self.calls = [[_call(post, size) for post in mine] for mine in posts(timeline, self._chunks)]

    def _instant(self, actions: Sequence[TimedAction], pictured: bool) -> None:
        before = len(self.network.messages)
        for timed in actions:
            self._do(timed.action)
        if not pictured:
            return
        messages = [message for _, message in self.network.messages[before:]]
        done = ", ".join(f"{action_label(timed.action, self._stages, self._chunks)} on rank {timed.rank}" for timed in actions)
        self.moments.append(
            Moment(
                title=f"t = {float(actions[0].end):g}",
                text=f"Done: {done}." + ("" if messages else " Nothing is sent."),
                holds=tuple(tuple(self._cells(rank)) for rank in range(self._stages)),
                messages=messages,
                logical_step=sum(1 for moment in self.moments if moment.messages) + 1 if messages else None,
            )
        )

    @property
    def _chunks(self) -> int:
        return len(self.model.weights)

    def _do(self, action: Action) -> None:
        if action.kind == "F":
            self._forward(action)
        if action.kind in ("B", "BW"):
            self._backward_input(action)
        if action.kind in ("W", "BW"):
            saved = self._saved.pop((action.chunk, action.micro_batch))
            self.gradient[action.chunk] += saved["x"].T @ saved["dz"]

    def _forward(self, action: Action) -> None:
        _, chunk, j = action
        x = self.model.inputs[j] if chunk == 0 else self._arrived.pop(action)
        z = x @ self.model.weights[chunk]
        self._saved[chunk, j] = {"x": x, "z": z}
        y = gelu(z)
        if chunk + 1 < self._chunks:
            self._arrived[Action("F", chunk + 1, j)] = self._hand_on(chunk, chunk + 1, y, f"activation {j}")
            return
        difference = y - self.model.targets[j]
        self.loss += 0.5 * float((difference**2).sum()) / self.model.tokens
        self._arrived[Action("B", chunk, j)] = difference / self.model.tokens

    def _backward_input(self, action: Action) -> None:
        _, chunk, j = action
        saved = self._saved[chunk, j]
        saved["dz"] = gelu_backward(saved.pop("z"), self._arrived.pop(Action("B", chunk, j)))
        if chunk:
            dx = saved["dz"] @ self.model.weights[chunk].T
            self._arrived[Action("B", chunk - 1, j)] = self._hand_on(chunk, chunk - 1, dx, f"gradient {j}")

    def _hand_on(self, source: int, target: int, array: Float, label: str) -> Float:
        """The copy of the rank that holds chunk ``target``. Nothing is counted between chunks of one rank."""
        ranks = source % self._stages, target % self._stages
        if ranks[0] == ranks[1]:
            return array
        return np.asarray(self.network.send(*ranks, array, label), np.float64)

    def _cells(self, rank: int) -> list[Cell]:
        """What ``rank`` keeps for its backwards, and what has arrived and waits."""
        cells = []
        for (chunk, j), saved in sorted(self._saved.items()):
            if chunk % self._stages == rank:
                place = f" c{chunk // self._stages}" if self._chunks > self._stages else ""
                cells += [
                    Cell(
                        f"{name} {j}{place}",
                        "gradient" if name == "dz" else "activation",
                        array.size * self._element_bytes,
                        f"micro-batch {j}, chunk {chunk}",
                    )
                    for name, array in saved.items()
                ]
        for action, array in sorted(self._arrived.items()):
            if action.chunk % self._stages == rank:
                what = "activation" if action.kind == "F" else "gradient"
                size = array.size * self._element_bytes
                cells.append(Cell(f"{what} {action.micro_batch} waits", "buffer", size, f"for {action.kind} of chunk {action.chunk}"))
        return cells


def _call(post: Post, size: int) -> Call:
    phase, what = ("forward", "activation") if post.made_by.kind == "F" else ("backward", "gradient")
    return Call(post.kind, "pp", "pipeline", size, phase, f"{what} {post.made_by.micro_batch}")


def action_label(action: Action, stages: int, chunks: int) -> str:
    """``F3``: kind and micro-batch; with several chunks a rank ``F3 c1``, the chunk of that rank."""
    name = "B" if action.kind == "BW" else action.kind
    return f"{name}{action.micro_batch}" + (f" c{action.chunk // stages}" if chunks > stages else "")


def _instants(actions: Sequence[TimedAction]) -> list[list[TimedAction]]:
    """Actions that end together, in order of time."""
    groups: list[list[TimedAction]] = []
    for timed in actions:
        if groups and groups[-1][0].end == timed.end:
            groups[-1].append(timed)
        else:
            groups.append([timed])
    return groups
