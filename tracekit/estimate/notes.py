"""What a reader should know about the figures of an estimate, in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from tracekit.estimate.estimate import Estimate, estimate
from tracekit.estimate.flops import attention_flops_a_token
from tracekit.estimate.parameters import elements_of
from tracekit.estimate.pipeline import in_flight
from tracekit.estimate.plan import IMPLEMENTATIONS, Implementation, Plan
from tracekit.estimate.recipe import deepspeed_estimate
from tracekit.estimate.shape import parameters
from tracekit.units import format_bytes

#: A habit of an implementation is told where another one's would change the peak, or what is sent, by more than this share.
TOLD = 0.05
#: The loop of tracekit.workloads is nobody's alternative.
_OTHERS = tuple(each for each in IMPLEMENTATIONS.values() if each.name != "workloads")


def notes(result: Estimate) -> list[str]:
    """All of them."""
    return [*_of_mesh(result), *_of_arithmetic(result), *_sequence_parallel(result), *_habits(result), *_deepspeed(result)]


def _of_mesh(result: Estimate) -> Iterator[str]:
    plan, shape = result.plan, result.shape
    mesh = plan.mesh
    if mesh.pp > 1:
        counts = in_flight(plan.schedule, mesh.pp, plan.batch.micro_batches, plan.virtual_stages)
        unit = "chunks" if plan.virtual_stages > 1 else "micro-batches"
        yield f"activations of {counts[0]} {unit} are in flight on the first stage, of {counts[-1]} on the last"
        if shape.layers % (mesh.pp * plan.virtual_stages):
            yield f"{shape.layers} layers do not divide evenly over {mesh.pp * plan.virtual_stages} chunks: the first have one more"
    if mesh.tp > result.hardware.per_node:
        yield f"tp={mesh.tp} leaves the node of {result.hardware.per_node} devices: its collectives run over the network"
    if shape.experts:
        yield "experts are taken to be balanced: with skewed routing a rank holds and sends more"


def _of_arithmetic(result: Estimate) -> Iterator[str]:
    """How attention's FLOP are counted, and what fp8 does not shrink."""
    shape, causal = result.shape, result.plan.batch.causal
    attention = 3 * result.tokens * shape.layers * attention_flops_a_token(shape, causal)
    share = f"attention's scores are {attention / result.model_flops:.0%} of the model's FLOP"
    yield f"{share}, half of them counted as the mask is causal" if causal else f"{share}; a causal mask needs half of them (batch.causal)"
    if result.plan.recipe.compute == 1:
        yield "fp8 is for matrix products: activations are counted with 2 bytes an element"


def _habits(result: Estimate) -> Iterator[str]:
    """Habits of the plan's implementation that matter: another one's, each by itself, would change a figure."""
    own = result.plan.implementation
    for habit in (f.name for f in fields(Implementation) if f.name not in ("name", "padding")):
        others = {getattr(other, habit): other.name for other in _OTHERS if getattr(other, habit) != getattr(own, habit)}
        for value, name in others.items():
            text = _changed(result, replace(result.plan, implementation=replace(own, **{habit: value})))
            if text:
                yield f"{habit} {_word(getattr(own, habit))} is how {own.name} works; as {name} has it ({_word(value)}), {text}"


def _sequence_parallel(result: Estimate) -> Iterator[str]:
    """What tensor parallelism leaves whole on every rank, and most who use it do not."""
    plan = result.plan
    if plan.mesh.tp > 1 and not plan.sequence_parallel and result.shape.sequence // plan.mesh.cp % plan.mesh.tp == 0:
        text = _changed(result, replace(plan, sequence_parallel=True))
        if text:
            yield f"norms work on all tokens on every rank of tp; with sequence_parallel {text}"


def _changed(result: Estimate, plan: Plan) -> str:
    """The figure that changes most with another plan; '' where none does by more than ``TOLD``."""
    other = estimate(result.shape, plan, result.hardware, result.assumptions)
    figures = (("the peak", result.peak.peak_bytes, other.peak.peak_bytes), ("a rank", _sent(result), _sent(other)))
    what, before, after = max(figures, key=lambda each: abs(each[2] / each[1] - 1) if each[1] else 0.0)
    if not before or abs(after / before - 1) <= TOLD:
        return ""
    return f"{what} would {'be' if what == 'the peak' else 'send'} {format_bytes(after)}, not {format_bytes(before)}"


def _sent(result: Estimate) -> int:
    return max(sum(row.sent_bytes for row in role.traffic) for role in result.roles)


def _word(value: Any) -> str:
    return str(value).lower() if value != "" else "its own"


def _deepspeed(result: Estimate) -> Iterator[str]:
    """DeepSpeed's own figure for what it shards over all ranks."""
    plan, mesh = result.plan, result.plan.mesh
    stage = {"zero2": 2, "zero3": 3}.get(plan.strategy.name)
    if plan.implementation.name != "deepspeed" or stage is None or mesh.world != mesh.data:
        return
    layers: dict[int, int] = {}
    for parameter in parameters(result.shape):
        if parameter.layer is not None:
            layers[parameter.layer] = layers.get(parameter.layer, 0) + parameter.elements
    largest = max(*layers.values(), *(p.elements for p in parameters(result.shape) if p.layer is None))
    size = deepspeed_estimate(elements_of(parameters(result.shape)), largest, mesh.world, stage)
    yield f"DeepSpeed's own estimator of stage {stage} says {format_bytes(size)} a GPU: model state alone, no activations and buffers"
