"""What a stage of the model keeps between forward and backward, by unit, with recomputation; the moments of a layer's backward; logits.

Symbols as in ``saved``; S is the gradient of the residual, F that of the MLP's inner tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from tracekit.estimate.parameters import ROOT
from tracekit.estimate.plan import Plan
from tracekit.estimate.saved import FULL, ID, MASK, Sizes, every_other_product, expert_rows, layer_saved, norm_saved, sent_rows, tokens
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


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one rank, by unit of the model.

    ``saved`` from forward to backward; ``stream``: what one unit hands to the next; ``embedding``: the gradient of
    the embedding's output; ``backward`` the moments of a unit's backward, with
    what is computed again for it. ``logits_saved`` stays from the loss to its backward, ``logits_forward`` and ``logits_backward`` are the
    most that logits, their copies and gradients take in each, ``logits_gradient`` what is left for the head's backward,
    ``logits_output`` the logits themselves, which a pipeline's last stage keeps as its output, ``logits_idle`` their segment where it is
    free in the loss's backward, too small for gradients in fp32. ``inputs``: token ids and targets. ``positions``: the table that turns
    queries and keys, of the whole sequence on each rank (context parallelism takes its part of it).
    """

    saved: Mapping[str, int]
    stream: int = 0
    embedding: int = 0
    backward: Mapping[str, tuple[BackwardStep, ...]] = field(default_factory=dict)
    logits_saved: int = 0
    logits_forward: int = 0
    logits_backward: int = 0
    logits_gradient: int = 0
    logits_output: int = 0
    logits_idle: int = 0
    inputs: int = 0
    positions: int = 0


def layer_bytes(shape: ModelShape, plan: Plan, layer: int) -> tuple[int, int]:
    """(bytes that a layer keeps to its backward, bytes that come back while it is computed again), by the plan's recomputation."""
    saved = layer_saved(shape, plan, layer)
    everything = sum(tensor.bytes for tensor in saved)
    if plan.batch.recompute == "full":
        return checkpoint_bytes(shape, plan), everything
    if plan.batch.recompute == "selective-torchtitan":
        return sum(tensor.bytes for tensor in every_other_product(shape, plan, layer)), everything
    core = sum(tensor.bytes for tensor in saved if tensor.core) if plan.batch.recompute.startswith("selective") else 0
    return everything - core, core


def checkpoint_bytes(shape: ModelShape, plan: Plan) -> int:
    """The input of one layer, which full recomputation keeps: e T h (/t with sequence parallelism) [bytes]."""
    return Sizes(shape, plan).by_sequence("checkpoint", shape.hidden).bytes


def logits_bytes(shape: ModelShape, plan: Plan, e: int) -> int:
    """T V elements of ``e`` bytes, divided over tensor parallelism where the loss works on shards of the vocabulary."""
    t = plan.mesh.tp if plan.vocabulary_parallel and plan.vocabulary_parallel_loss else 1
    return -(-tokens(shape, plan) * shape.vocabulary * e // t)


def stage_activations(shape: ModelShape, plan: Plan, layers: list[int], first: bool, last: bool) -> Activations:
    """Activations of the layers of one stage (or one chunk of it), with embedding and head where they belong to it."""
    size = Sizes(shape, plan)
    saved: dict[str, int] = {}
    backward: dict[str, tuple[BackwardStep, ...]] = {}
    kinds: dict[object, tuple[int, tuple[BackwardStep, ...]]] = {}  # all layers without experts are alike, and all with as many rows
    for layer in layers:
        kind = (shape.has_experts(layer), plan.expert_loads[layer : layer + 1])
        if kind not in kinds:
            kinds[kind] = layer_bytes(shape, plan, layer)[0], block_backward(shape, plan, layer)
        unit = ROOT if plan.wrap == "whole" else f"layers.{layer}"
        saved[unit] = saved.get(unit, 0) + kinds[kind][0]
        backward[unit] = kinds[kind][1]
    stream = size.by_sequence("residual", shape.hidden).bytes
    habits = plan.implementation
    if layers and not first and plan.mesh.pp > 1 and habits.receive_buffers and (habits.norm_kernel == "fused" or size.e == FULL):
        unit = ROOT if plan.wrap == "whole" else f"layers.{layers[0]}"
        saved[unit] -= stream  # the first norm's input is the buffer in which it was received
        backward[unit] = tuple(replace(step, saved=max(0, step.saved - stream)) for step in backward[unit])
    embedding = size.whole("embedding", shape.hidden).bytes if first else stream
    count = tokens(shape, plan)
    inputs = count * ID * (first + last)
    positions = shape.rotary_bytes if layers else 0
    if first and shape.dropout:
        unit = "embedding" if plan.wrap == "ends" else ROOT
        saved[unit] = saved.get(unit, 0) + size.by_sequence("embedding_dropout_mask", shape.hidden, MASK).bytes
    if not last:
        return Activations(saved, stream, embedding, backward, inputs=inputs, positions=positions)
    unit = "head" if plan.wrap == "ends" else ROOT
    head = [*norm_saved(size, "norm"), size.gathered("head.input", shape.hidden)]
    saved[unit] = saved.get(unit, 0) + sum(tensor.bytes for tensor in head)
    return Activations(saved, stream, embedding, backward, *_logits(shape, plan), inputs, positions)


def _logits(shape: ModelShape, plan: Plan) -> tuple[int, int, int, int, int, int]:
    """(saved, most in forward, most in backward, gradient for the head, output, idle) of logits [bytes].

    Forward: logits as computed, a copy in fp32 where they are not, and their log-softmax, which is saved. Backward: that, its gradient and
    the gradient of what it was made of, 12 T V bytes; then one gradient in the type of the logits. A fused loss holds the saved tensor.
    Where the loss works on shards of the vocabulary, DTensor puts the gradient together from two tensors of its size
    (torch/distributed/tensor/parallel/loss.py, ``_nll_loss_and_log_softmax_backward``).
    """
    full, own = logits_bytes(shape, plan, FULL), logits_bytes(shape, plan, plan.recipe.activation)
    if plan.implementation.fused_loss:
        return full, full, full, full, 0, 0
    held = own if plan.implementation.keeps_logits or plan.mesh.pp > 1 else 0
    forward = full + own + (full if plan.recipe.activation != FULL else 0)
    divided = plan.mesh.tp > 1 and plan.vocabulary_parallel and plan.vocabulary_parallel_loss
    return full, forward, (4 if divided else 3) * full + held, own + held, own, own - held if own < full else 0


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
    if shape.has_experts(layer) and plan.implementation.single_operations:
        first = tuple(_experts(size, layer, whole, stream, inner))
    return (
        *first,
        BackwardStep(whole - mlp, 3 * stream, ("down", "up", "gate", "router", "o")),
        BackwardStep(whole - mlp, 2 * stream + heads, _BEFORE_ATTENTION),
        *_gathered_keys(size, whole - mlp, stream),
        BackwardStep(0, stream, None),
    )


def _experts(size: Sizes, layer: int, whole: int, stream: int, inner: int) -> Iterator[BackwardStep]:
    """Experts one after another, each with as many rows. Gradients of all rows' outputs are there from the start, those of their inputs
    come one by one."""
    shape = size.shape
    count = -(-shape.experts // size.plan.mesh.ep)
    rows = expert_rows(shape, size.plan, layer) * shape.hidden * size.e
    whole -= 2 * sent_rows(size) * shape.hidden * size.e  # outputs, and what they were combined to
    own, back = inner // count, rows // count
    each = (4 if shape.gated else 2) * inner // count
    for done in range(count):
        passing, left = stream + rows + done * back, whole - done * each
        moments = _gated(left, passing, own, back) if shape.gated else _plain(left, passing, own, back)
        for saved, temporaries, ready in moments:
            parts = ("up", "gate", "down") if shape.gated else ("up", "down")
            yield BackwardStep(saved, temporaries, (), tuple((part, done + (part in ready), count) for part in parts))


#: What one expert still keeps, gradients of activations, and the weights whose gradients are there.
_Moment = tuple[int, int, tuple[str, ...]]


def _plain(left: int, passing: int, own: int, back: int) -> Iterator[_Moment]:
    """Down, its activation, up."""
    yield left, passing + own, ("down",)
    yield left - own, passing + 2 * own, ("down",)
    yield left - 2 * own, passing + own + back, ("down", "up")


def _gated(left: int, passing: int, own: int, back: int) -> Iterator[_Moment]:
    """Down, the product of gate and up, up, the gate's activation, gate: last in the forward first in the backward."""
    yield left, passing + own, ("down",)
    yield left - own, passing + 3 * own, ("down",)
    yield left - 3 * own, passing + 2 * own + back, ("down", "up")  # as much again in the activation's backward
    yield left - 4 * own, passing + own + 2 * back, ("down", "up", "gate")


def _gathered_keys(size: Sizes, saved: int, stream: int) -> Iterator[BackwardStep]:
    """Context parallelism by all-gather: everybody's keys and values, their gradients, those in the order of ranks, this rank's share."""
    shape, plan = size.shape, size.plan
    if plan.mesh.cp == 1 or plan.context_parallel != "allgather" or not plan.implementation.single_operations:
        return
    keys = size.tensor("keys", (shape.key_width + shape.value_width) * plan.mesh.cp, 1).bytes
    outputs = size.tensor("outputs", shape.attention_width).bytes
    gradients = keys * FULL
    queries = size.tensor("queries", shape.query_width, FULL).bytes
    passing = stream + outputs + keys * size.e + 2 * gradients + gradients // plan.mesh.cp + queries
    yield BackwardStep(saved - outputs, passing, _BEFORE_ATTENTION, (), gradients if plan.implementation.backend_copies else 0)
