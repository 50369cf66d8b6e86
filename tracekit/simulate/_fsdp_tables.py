"""Tables and checks of the FSDP experiment: who keeps what, bytes at every moment, collectives of a step, counts against closed forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from tracekit.findings import Table
from tracekit.simulate._step_tables import collectives_table, live_table, peak_table, table
from tracekit.simulate.experiment import Call, Check, Moment
from tracekit.simulate.flat_parameter import intervals
from tracekit.simulate.linear_model import LinearStack, Trained, largest_error
from tracekit.simulate.model_units import Unit
from tracekit.simulate.shard_layout import ShardLayout
from tracekit.simulate.sharded_parameter import rows_of_rank
from tracekit.simulate.sharded_units import Widths
from tracekit.simulate.virtual import Network

#: Sums in another order: some rounding errors of float64 at values about 1.
GRADIENT_TOLERANCE = 1e-12
#: Adam divides by sqrt(v) + 1e-8: where a gradient is about as small, its rounding error is magnified by up to 1e8 x the learning rate.
PARAMETER_TOLERANCE = 1e-8


@dataclass(frozen=True)
class Outcome:
    """What came out of one version. ``moments``, ``network`` are of the first step, ``results`` and ``reference`` of every step."""

    version: str
    model: LinearStack
    units: Sequence[Unit]
    layouts: Sequence[ShardLayout]
    widths: Widths
    kept: frozenset[str]
    aligned: int
    moments: Sequence[Moment]
    network: Network
    results: Sequence[Trained]
    reference: Sequence[Trained]

    @property
    def name(self) -> str:
        """As it is called in tables."""
        return f"FSDP{self.version}"

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.layouts[0].world

    @property
    def calls(self) -> list[Call]:
        """The collectives of rank 0 in the first step."""
        return self.network.calls(0)


def tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """All tables of the experiment, in reading order."""
    layouts = [_flat_parameter(outcome) if outcome.version == "1" else _single_parameters(outcome) for outcome in outcomes]
    return [
        _shards(outcomes),
        *layouts,
        peak_table({outcome.name: outcome.moments for outcome in outcomes}),
        *(live_table(outcome.name, outcome.moments, printed=True) for outcome in outcomes),
        collectives_table({outcome.name: outcome.calls for outcome in outcomes}, outcomes[0].world),
    ]


def _shards(outcomes: Sequence[Outcome]) -> Table:
    """One row a version, unit and rank: what its shard is made of."""
    rows = [
        {
            "version": outcome.name,
            "unit": layout.name,
            "rank": rank,
            "shard": ", ".join(f"{p.label} ({p.elements})" if p.parameter is None else p.label for p in layout.pieces[rank]) or "nothing",
            "elements": sum(p.elements for p in layout.pieces[rank] if p.parameter is not None),
            "padding": sum(p.elements for p in layout.pieces[rank] if p.parameter is None),
            "bytes": layout.shard_elements * outcome.widths.stored,
            "state_bytes": 2 * int(layout.state_mask(rank).sum()) * outcome.widths.stored,
        }
        for outcome in outcomes
        for layout in outcome.layouts
        for rank in range(outcome.world)
    ]
    headings = {
        "version": "Version",
        "unit": "Unit",
        "rank": "Rank",
        "shard": "Shard, in order",
        "elements": "Elements",
        "padding": "Padding",
        "bytes": "Parameter [B]",
        "state_bytes": "Adam state [B]",
    }
    note = "Names alone are whole parameters; W[i:j] are rows, b[i:j] elements, flat(W)[i:j] elements counted row by row."
    return table("What each rank keeps", rows, headings, note)


def _flat_parameter(outcome: Outcome) -> Table:
    """One row an interval of a flat parameter."""
    rows = []
    for layout in outcome.layouts:
        size = layout.shard_elements
        for interval in intervals(layout.parameters, layout.world, outcome.aligned):
            parameter = interval.parameter
            view = f"flat[{interval.begin}:{interval.end}]"
            held = [
                f"rank {rank}: [{max(interval.begin, rank * size)}, {min(interval.end, (rank + 1) * size)})"
                for rank in range(layout.world)
                if max(interval.begin, rank * size) < min(interval.end, (rank + 1) * size)
            ]
            rows.append(
                {
                    "unit": layout.name,
                    "parameter": "padding" if parameter is None else parameter.name,
                    "interval": f"[{interval.begin}, {interval.end})",
                    "elements": interval.end - interval.begin,
                    "view": "" if parameter is None else f"{view}.view({', '.join(map(str, parameter.shape))})",
                    "held": ", ".join(held),
                    "cut": "yes" if len(held) > 1 else "no",
                }
            )
    headings = {
        "unit": "Unit",
        "parameter": "Parameter",
        "interval": "Interval of the flat parameter",
        "elements": "Elements",
        "view": "View when gathered",
        "held": "Kept by",
        "cut": "Cut by a shard boundary",
    }
    sizes = "; ".join(
        f"{layout.name}: {layout.elements} elements, {layout.padded_elements} with padding, {layout.shard_elements} a rank"
        for layout in outcome.layouts
    )
    return table("FSDP1: the flat parameter", rows, headings, sizes)


def _single_parameters(outcome: Outcome) -> Table:
    """One row a parameter and rank: its rows, offset and padding."""
    rows = []
    for layout in outcome.layouts:
        at = 0
        for parameter in layout.parameters:
            rest = prod(parameter.shape[1:])
            chunk = -(-parameter.shape[0] // layout.world)
            for rank in range(layout.world):
                begin, end = rows_of_rank(parameter.shape[0], layout.world, rank)
                rows.append(
                    {
                        "unit": layout.name,
                        "parameter": parameter.name,
                        "shape": " x ".join(map(str, parameter.shape)),
                        "rank": rank,
                        "rows": f"[{begin}, {end})" if end > begin else "none",
                        "local": " x ".join(map(str, (end - begin, *parameter.shape[1:]))),
                        "offset": at,
                        "elements": (end - begin) * rest,
                        "padding": (chunk - (end - begin)) * rest,
                        "bytes": chunk * rest * outcome.widths.stored,
                    }
                )
            at += chunk * rest
    headings = {
        "unit": "Unit",
        "parameter": "Parameter",
        "shape": "Shape",
        "rank": "Rank",
        "rows": "Rows",
        "local": "Local shape",
        "offset": "Offset in the shard",
        "elements": "Elements",
        "padding": "Padding",
        "bytes": "Stored [B]",
    }
    note = "Shard(0): ceil(rows / ranks) rows are stored on every rank, also where fewer or none are left."
    return table("FSDP2: each parameter by itself", rows, headings, note)


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
    formula = "F(W) * sum over units n (q + q + r); n with padding, one q where the unit stays gathered (arXiv:1910.02054, section 7.2.2)"
    found = [
        Check(f"{name}: bytes sent by rank {rank}", int(network.sent_bytes[rank]), sent, "bytes", formula)
        for rank in ([0, world - 1] if world > 1 else [0])
    ]
    found.append(Check(f"{name}: bytes sent by all ranks", int(network.sent_bytes.sum()), world * sent, "bytes", f"W times {formula}"))
    found.append(Check(f"{name}: logical steps", network.steps, collectives * (world - 1), "steps", "(W - 1) a collective"))
    if world > 1:
        text = "units x (all-gather forward, all-gather backward if freed, reduce-scatter)"
        found.append(Check(f"{name}: collectives of a step", len(outcome.calls), collectives, "calls", text))
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
    name, width = outcome.name, outcome.widths.stored
    start = outcome.moments[0]
    held = [[c.bytes for cells in start.holds for c in cells if c.kind == kind] for kind in ("parameter", "padding", "optimizer_state")]
    elements = sum(parameter.elements for parameter in outcome.model.parameters)
    padded = sum(_padded(outcome, unit) for unit in outcome.units)
    state_padding = padded - elements if outcome.version == "1" and not outcome.aligned else 0
    pieces = sum(p.elements for layout in outcome.layouts for rank in layout.pieces for p in rank if p.parameter is not None)
    return [
        Check(f"{name}: elements in all shards", pieces, elements, "elements", "every element of the parameters on exactly one rank"),
        Check(f"{name}: parameters on all ranks", sum(held[0]), elements * width, "bytes", "N x bytes an element"),
        Check(
            f"{name}: padding on all ranks",
            sum(held[1]),
            (padded - elements + 2 * state_padding) * width,
            "bytes",
            "FSDP1: to a multiple of W (and of 16 bytes); FSDP2: W ceil(d0/W) rest - N",
        ),
        Check(f"{name}: Adam state on all ranks", sum(held[2]), 2 * elements * width, "bytes", "two moments, N x bytes each"),
    ]


def _numbers(outcome: Outcome) -> list[Check]:
    names = ("gradients", "parameters", "first", "second")
    titles = ("mean gradient", "parameters", "first Adam moment", "second Adam moment")
    limits = (GRADIENT_TOLERANCE, PARAMETER_TOLERANCE, GRADIENT_TOLERANCE, GRADIENT_TOLERANCE)
    steps = len(outcome.results)
    found = []
    for attribute, title, limit in zip(names, titles, limits, strict=True):
        error = max(
            largest_error(getattr(result, attribute), getattr(expected, attribute))
            for result, expected in zip(outcome.results, outcome.reference, strict=True)
        )
        text = f"largest difference from one process on the whole batch, over {steps} step{'s' if steps > 1 else ''}"
        found.append(Check(f"{outcome.name}: error of the {title}", error, 0.0, "", text, limit))
    return found
