"""Tables of the FSDP experiment: who keeps what, every element through the step, bytes at every moment, collectives of a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import prod

import numpy as np
import numpy.typing as npt

from tracekit.findings import Table
from tracekit.simulate._fsdp_outcome import Outcome
from tracekit.simulate._step_tables import collectives_table, live_table, peak_table, table
from tracekit.simulate.flat_parameter import intervals
from tracekit.simulate.sharded_parameter import rows_of_rank

#: Elements that are listed one by one; with more than these, or on more ranks, not in a terminal.
MOST_ELEMENTS, MOST_PRINTED, MOST_PRINTED_RANKS = 256, 20, 8


def tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """All tables of the experiment, in reading order."""
    layouts = [_flat_parameter(outcome) if outcome.version == "1" else _single_parameters(outcome) for outcome in outcomes]
    return [
        _shards(outcomes),
        *layouts,
        _elements(outcomes),
        peak_table({outcome.name: outcome.moments for outcome in outcomes}),
        *(live_table(outcome.name, outcome.moments, printed=True) for outcome in outcomes),
        collectives_table({outcome.name: outcome.calls for outcome in outcomes}, outcomes[0].world, outcomes[0].replicas),
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
    if outcomes[0].replicas > 1:
        note += f" Rank r of {outcomes[0].replicas * outcomes[0].world} keeps what rank r mod {outcomes[0].world} has here."
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


def _elements(outcomes: Sequence[Outcome]) -> Table:
    """One row an element: who keeps it, its gradient on each rank, the mean that was used, and the updated value."""
    first = outcomes[0]
    owners = [(outcome.name, _owners(outcome)) for outcome in outcomes]
    places = ((parameter.name, place) for parameter in first.model.parameters for place in np.ndindex(parameter.shape))
    sharded, alone = first.results[0], first.reference[0]
    rows = [
        {
            "element": f"{parameter}[{', '.join(map(str, place))}]",
            **{name: int(owner[parameter][place]) for name, owner in owners},
            **{f"rank {rank}": float(values[parameter][place]) for rank, values in enumerate(first.local)},
            "mean": float(sharded.gradients[parameter][place]),
            "expected": float(alone.gradients[parameter][place]),
            "updated": float(sharded.parameters[parameter][place]),
            "reference": float(alone.parameters[parameter][place]),
        }
        for parameter, place in islice(places, MOST_ELEMENTS)
    ]
    headings = {
        "element": "Element",
        **{name: f"{name}: kept by rank" for name, _ in owners},
        **{f"rank {rank}": f"Gradient on rank {rank}" for rank in range(len(first.local))},
        "mean": "Mean, reduce-scattered",
        "expected": "Mean, one process",
        "updated": "Value after Adam",
        "reference": "Value, one process",
    }
    note = f"Numbers of {first.name} in the first step" + (f"; the first {MOST_ELEMENTS} elements." if len(rows) == MOST_ELEMENTS else ".")
    few = len(rows) <= MOST_PRINTED and len(first.local) <= MOST_PRINTED_RANKS
    return table("Every element through the step", rows, headings, note, printed=few)


def _owners(outcome: Outcome) -> dict[str, npt.NDArray[np.int64]]:
    """The rank that keeps each element, in the shapes of the parameters."""
    found = {parameter.name: np.full(parameter.elements, -1) for parameter in outcome.model.parameters}
    for layout in outcome.layouts:
        for rank, pieces in enumerate(layout.pieces):
            for piece in pieces:
                if piece.parameter is not None:
                    found[piece.parameter][piece.begin : piece.end] = rank
    return {parameter.name: found[parameter.name].reshape(parameter.shape) for parameter in outcome.model.parameters}
