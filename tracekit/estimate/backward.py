"""The moments of a layer's backward: what is still saved, which gradients are there, what passes on.

Symbols as in ``saved``; S is the gradient of the residual, F that of the MLP's inner tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tracekit.estimate.plan import Plan
from tracekit.estimate.saved import FULL, Sizes, expert_rows, layer_saved, sent_rows
from tracekit.estimate.shape import ModelShape

#: Parts whose gradients are there when attention's core computes its own.
_BEFORE_ATTENTION = ("down", "up", "gate", "router", "mlp_norm", "o")


@dataclass(frozen=True)
class BackwardStep:
    """A moment in the backward of a unit: ``saved`` bytes of its own still held, ``temporaries``: gradients of activations [bytes].

    ``parts``: the layers (last but one word of a parameter's name) whose gradients are there; None: all of the unit.
    ``shares``: (part, of how many experts, of how many in all) where experts work one after another, the one at work last. ``buffers``
    that the backend takes for a collective of the layer itself [bytes].
    """

    saved: int
    temporaries: int
    parts: tuple[str, ...] | None = ()
    shares: tuple[tuple[str, int, int], ...] = ()
    buffers: int = 0


def block_backward(shape: ModelShape, plan: Plan, layer: int) -> tuple[BackwardStep, ...]:
    """The backward of one layer from its last matrix to its first, each with what is saved, new gradients and gradients passed on.

    S is the residual's gradient, F that of the MLP's inner tensors. A linear layer's backward holds its input, the gradient that comes, the
    one it passes on and that of its weight; the input is free after it.
    """
    size = Sizes(shape, plan)
    saved = layer_saved(shape, plan, layer)
    whole = sum(tensor.bytes for tensor in saved)
    stream = size.by_sequence("residual", shape.hidden).bytes
    inner = size.tensor("inner", shape.ffn).bytes
    if shape.has_experts(layer):
        inner = expert_rows(shape, plan, layer) * shape.expert_ffn * size.e
    mlp = sum(tensor.bytes for tensor in saved if tensor.name.startswith(("mlp.", "experts.", "shared_experts.", "router.")))
    inside = sum(tensor.bytes for tensor in saved if tensor.name.endswith((".up", ".activated", ".gate", ".gate_activated", ".product")))
    heads = size.tensor("heads", shape.query_width + shape.key_width + shape.value_width).bytes
    first: tuple[BackwardStep, ...] = (
        BackwardStep(whole, stream + inner, ("down",)),
        BackwardStep(whole - inner, stream + inner * (3 if shape.gated else 2), ("down",)),
        BackwardStep(whole - inside, 2 * stream + inner * (2 if shape.gated else 1), ("down", "up")),
        BackwardStep(whole - inside, (3 if shape.gated else 2) * stream + inner, ("down", "up", "gate")),
    )
    if shape.has_experts(layer) and plan.single_operations and not shape.gated:
        first = tuple(_experts(size, layer, whole, stream, inner))
    return (
        *first,
        BackwardStep(whole - mlp, 3 * stream, ("down", "up", "gate", "router", "o")),
        BackwardStep(whole - mlp, 2 * stream + heads, _BEFORE_ATTENTION),
        *_gathered_keys(size, whole - mlp, stream),
        BackwardStep(0, stream, None),
    )


def _experts(size: Sizes, layer: int, whole: int, stream: int, inner: int) -> Iterator[BackwardStep]:
    """Experts one after another, each with as many rows: down, its activation, up. Gradients of all rows' outputs are there from the start,
    those of their inputs come one by one."""
    shape = size.shape
    count = -(-shape.experts // size.plan.mesh.ep)
    rows = expert_rows(shape, size.plan, layer) * shape.hidden * size.e
    whole -= 2 * sent_rows(size) * shape.hidden * size.e  # outputs, and what they were combined to
    each, own = 2 * inner // count, inner // count
    for done in range(count):
        passing, left = stream + rows + done * rows // count, whole - done * each
        before = (("up", done, count), ("down", done + 1, count))
        yield BackwardStep(left, passing + own, (), before)
        yield BackwardStep(left - own, passing + 2 * own, (), before)
        yield BackwardStep(left - each, passing + own + rows // count, (), (("down", done + 1, count), ("up", done + 1, count)))


def _gathered_keys(size: Sizes, saved: int, stream: int) -> Iterator[BackwardStep]:
    """Context parallelism by all-gather: everybody's keys and values, their gradients, those in the order of ranks, this rank's share."""
    shape, plan = size.shape, size.plan
    if plan.mesh.cp == 1 or plan.context_parallel != "allgather" or not plan.single_operations:
        return
    keys = size.tensor("keys", (shape.key_width + shape.value_width) * plan.mesh.cp, 1).bytes
    outputs = size.tensor("outputs", shape.attention_width).bytes
    gradients = keys * FULL
    queries = size.tensor("queries", shape.query_width, FULL).bytes
    passing = stream + outputs + keys * size.e + 2 * gradients + gradients // plan.mesh.cp + queries
    yield BackwardStep(saved - outputs, passing, _BEFORE_ATTENTION, (), gradients if plan.backend_copies else 0)
