"""Checks of the FSDP experiment: traffic and bytes counted beside closed forms from the shapes alone, numbers beside one process."""

from __future__ import annotations

from fractions import Fraction
from math import prod

from tracekit.simulate._fsdp_outcome import Outcome
from tracekit.simulate.experiment import Check
from tracekit.simulate.linear_model import largest_error
from tracekit.simulate.model_units import Unit

#: Sums in another order: some rounding errors of float64 at values about 1.
GRADIENT_TOLERANCE = 1e-12
#: Adam divides by sqrt(v) + 1e-8: where a gradient is about as small, its rounding error is magnified by up to 1e8 x the learning rate.
PARAMETER_TOLERANCE = 1e-8


def checks(outcome: Outcome) -> list[Check]:
    """Counted figures of one version beside their closed forms, errors beside 0."""
    return [*_communication(outcome), *_memory(outcome), *_numbers(outcome)]


def _communication(outcome: Outcome) -> list[Check]:
    name, world, network = outcome.name, outcome.world, outcome.network
    again = [unit.name for unit in outcome.units if unit.name not in outcome.kept]
    share = Fraction(world - 1, world)
    moved = {layout.name: _padded(outcome, unit) for layout, unit in zip(outcome.layouts, outcome.units, strict=True)}
    sent = share * sum(
        size * (outcome.widths.gathered * (2 if unit in again else 1) + outcome.widths.reduced) for unit, size in moved.items()
    )
    collectives = 2 * len(outcome.units) + len(again)
    replicas, shards = outcome.replicas, [size // world for size in moved.values()]
    between = Fraction(2 * (replicas - 1), replicas) * sum(shards) * outcome.widths.reduced
    formula = "F(W) * sum over units n (q + q + r); n with padding, one q where the unit stays gathered (arXiv:1910.02054, section 7.2.2)"
    if replicas > 1:
        formula += "; 2 F(R) r n/W between replicas"
    ranks = replicas * world
    found = [
        Check(f"{name}: bytes sent by rank {rank}", int(network.sent_bytes[rank]), sent + between, "bytes", formula)
        for rank in sorted({0, ranks - 1})
        if all(size % replicas == 0 for size in shards)
    ]
    total = ranks * (sent + between)
    found.append(Check(f"{name}: bytes sent by all ranks", int(network.sent_bytes.sum()), total, "bytes", f"ranks times {formula}"))
    steps = collectives * (world - 1) + 2 * len(outcome.units) * (replicas - 1)
    text = "(W - 1) a collective" + (", 2 (R - 1) an all-reduce between replicas" if replicas > 1 else "")
    found.append(Check(f"{name}: logical steps", network.steps, steps, "steps", text))
    calls = (collectives if world > 1 else 0) + (len(outcome.units) if replicas > 1 else 0)
    text = "units x (all-gather forward, all-gather backward if freed, reduce-scatter" + (", all-reduce)" if replicas > 1 else ")")
    found.append(Check(f"{name}: collectives of a step", len(outcome.calls), calls, "calls", text))
    return found


def _padded(outcome: Outcome, unit: Unit) -> int:
    """Elements of one unit as its collectives move them, from shapes alone."""
    world = outcome.world
    parameters = unit.parameters(outcome.model)
    if outcome.version == "2":
        return sum(world * -(-p.shape[0] // world) * prod(p.shape[1:]) for p in parameters)
    length = 0
    for parameter in parameters:
        if outcome.aligned:
            length = -(-length // outcome.aligned) * outcome.aligned
        length += parameter.elements
    return -(-length // world) * world


def _memory(outcome: Outcome) -> list[Check]:
    name, width, copies = outcome.name, outcome.widths.stored, outcome.replicas
    start = outcome.moments[0]
    held = [[c.bytes for cells in start.holds for c in cells if c.kind == kind] for kind in ("parameter", "padding", "optimizer_state")]
    elements = sum(parameter.elements for parameter in outcome.model.parameters)
    padded = sum(_padded(outcome, unit) for unit in outcome.units)
    state_padding = padded - elements if outcome.version == "1" and not outcome.aligned else 0
    pieces = sum(p.elements for layout in outcome.layouts for rank in layout.pieces for p in rank if p.parameter is not None)
    return [
        Check(f"{name}: elements in all shards", pieces, elements, "elements", "every element of the parameters on exactly one rank"),
        Check(f"{name}: parameters on all ranks", sum(held[0]), copies * elements * width, "bytes", "N x bytes, in each replica"),
        Check(
            f"{name}: padding on all ranks",
            sum(held[1]),
            copies * (padded - elements + 2 * state_padding) * width,
            "bytes",
            "FSDP1: to a multiple of W (and of 16 bytes); FSDP2: W ceil(d0/W) rest - N",
        ),
        Check(f"{name}: Adam state on all ranks", sum(held[2]), 2 * copies * elements * width, "bytes", "two moments, N x bytes each"),
    ]


def _numbers(outcome: Outcome) -> list[Check]:
    names = ("gradients", "parameters", "first", "second")
    titles = ("mean gradient", "parameters", "first Adam moment", "second Adam moment")
    limits = (GRADIENT_TOLERANCE, PARAMETER_TOLERANCE, GRADIENT_TOLERANCE, GRADIENT_TOLERANCE)
    steps = len(outcome.results) // outcome.replicas
    found = []
    for attribute, title, limit in zip(names, titles, limits, strict=True):
        error = max(
            largest_error(getattr(result, attribute), getattr(expected, attribute))
            for result, expected in zip(outcome.results, outcome.reference, strict=True)
        )
        text = f"largest difference from one process on the whole batch, over {steps} step{'s' if steps > 1 else ''}"
        found.append(Check(f"{outcome.name}: error of the {title}", error, 0.0, "", text, limit))
    return found
