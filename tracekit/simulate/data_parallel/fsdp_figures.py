"""Tables and checks of the FSDP experiment: who keeps what, every element through the step, counted figures beside closed forms."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import islice
from math import prod

import numpy as np
import numpy.typing as npt

from tracekit.findings import Table
from tracekit.simulate.data_parallel.layouts import ALIGNMENT_BYTES, ShardLayout, intervals, rows_of_rank
from tracekit.simulate.data_parallel.run import StrategyRun
from tracekit.simulate.experiment import Check
from tracekit.simulate.tables import Columns, collectives_table, live_table, peak_table, table

#: Elements that are listed one by one; with more than these, or on more ranks, not in a terminal.
MOST_ELEMENTS, MOST_PRINTED, MOST_PRINTED_RANKS = 256, 20, 8


def tables(runs: Sequence[StrategyRun], life: Sequence[StrategyRun]) -> list[Table]:
    """All tables of the experiment, in reading order; ``life``: runs whose units' life cycles are shown in the place of theirs."""
    return [
        _shards(runs),
        *(_flat_parameter(run) if run.sharding.strategy.layout == "flat" else _single_parameters(run) for run in runs),
        _elements(runs),
        peak_table({run.name: run.moments for run in runs}),
        *(live_table(run.name, run.moments, printed=True) for run in runs),
        collectives_table({run.name: run.calls for run in runs}, runs[0].world, runs[0].sharding.replicas),
        *(life_cycle(run, printed=len(run.sharding.units) > 1) for run in (life if life else runs)),
    ]


def _aligned(run: StrategyRun) -> int:
    """Elements at a multiple of which a parameter begins in the flat parameter; 0: none does."""
    layout, widths = run.sharding.layouts[0], run.sharding.widths
    return max(1, ALIGNMENT_BYTES // widths.gathered) if layout.flat and not layout.state_has_padding else 0


def _shards(runs: Sequence[StrategyRun]) -> Table:
    """One row a version, unit and rank: what its shard is made of."""
    rows = [(run, layout, rank) for run in runs for layout in run.sharding.layouts for rank in range(run.world)]
    kept = [layout.segments[rank] for _, layout, rank in rows]
    labels = [[f"{s.label} ({s.elements})" if s.parameter is None else s.label for s in segments] for segments in kept]
    widths = [run.sharding.widths.stored for run, _, _ in rows]
    columns: Columns = {
        "version": ("Version", [run.name for run, _, _ in rows]),
        "unit": ("Unit", [layout.name for _, layout, _ in rows]),
        "rank": ("Rank", [rank for _, _, rank in rows]),
        "shard": ("Shard, in order", [", ".join(of_rank) or "nothing" for of_rank in labels]),
        "elements": ("Elements", [sum(s.elements for s in segments if s.parameter is not None) for segments in kept]),
        "padding": ("Padding", [sum(s.elements for s in segments if s.parameter is None) for segments in kept]),
        "bytes": ("Parameter [B]", [layout.shard_elements * width for (_, layout, _), width in zip(rows, widths, strict=True)]),
        "state_bytes": (
            "Adam state [B]",
            [2 * int(layout.state_mask(rank).sum()) * width for (_, layout, rank), width in zip(rows, widths, strict=True)],
        ),
    }
    note = "Names alone are whole parameters; W[i:j] are rows, b[i:j] elements, flat(W)[i:j] elements counted row by row."
    world, replicas = runs[0].world, runs[0].sharding.replicas
    if replicas > 1:
        note += f" Rank r of {replicas * world} keeps what rank r mod {world} has here."
    return table("What each rank keeps", columns, note)


def _flat_parameter(run: StrategyRun) -> Table:
    """One row an interval of a flat parameter."""
    layouts, aligned = run.sharding.layouts, _aligned(run)
    rows = [(layout, each) for layout in layouts for each in intervals(layout.parameters, layout.world, aligned)]
    kept = [_kept_by(layout, each.begin, each.end) for layout, each in rows]
    views = [
        "" if each.parameter is None else f"flat[{each.begin}:{each.end}].view({', '.join(map(str, each.parameter.shape))})"
        for _, each in rows
    ]
    columns: Columns = {
        "unit": ("Unit", [layout.name for layout, _ in rows]),
        "parameter": ("Parameter", ["padding" if each.parameter is None else each.parameter.name for _, each in rows]),
        "interval": ("Interval of the flat parameter", [f"[{each.begin}, {each.end})" for _, each in rows]),
        "elements": ("Elements", [each.end - each.begin for _, each in rows]),
        "view": ("View when gathered", views),
        "held": ("Kept by", [", ".join(ranks) for ranks in kept]),
        "cut": ("Cut by a shard boundary", ["yes" if len(ranks) > 1 else "no" for ranks in kept]),
    }
    sizes = [f"{one.name}: {one.elements} elements, {one.padded_elements} with padding, {one.shard_elements} a rank" for one in layouts]
    return table(f"{run.name}: the flat parameter", columns, "; ".join(sizes))


def _kept_by(layout: ShardLayout, begin: int, end: int) -> list[str]:
    """``rank 0: [0, 6)`` for every rank that keeps some of ``[begin, end)``."""
    size = layout.shard_elements
    cuts = [(rank, max(begin, rank * size), min(end, (rank + 1) * size)) for rank in range(layout.world)]
    return [f"rank {rank}: [{low}, {high})" for rank, low, high in cuts if low < high]


def _single_parameters(run: StrategyRun) -> Table:
    """One row a parameter and rank: its rows, offset and padding."""
    rows = []
    for layout in run.sharding.layouts:
        at = 0
        for parameter in layout.parameters:
            chunk = -(-parameter.shape[0] // layout.world)
            rows += [
                (layout.name, parameter, rank, rows_of_rank(parameter.shape[0], layout.world, rank), chunk, at)
                for rank in range(layout.world)
            ]
            at += chunk * prod(parameter.shape[1:])
    rests = [prod(parameter.shape[1:]) for _, parameter, *_ in rows]
    counts = [end - begin for *_, (begin, end), _, _ in rows]
    stored = [chunk * rest * run.sharding.widths.stored for (*_, chunk, _), rest in zip(rows, rests, strict=True)]
    columns: Columns = {
        "unit": ("Unit", [unit for unit, *_ in rows]),
        "parameter": ("Parameter", [parameter.name for _, parameter, *_ in rows]),
        "shape": ("Shape", [" x ".join(map(str, parameter.shape)) for _, parameter, *_ in rows]),
        "rank": ("Rank", [rank for _, _, rank, *_ in rows]),
        "rows": ("Rows", [f"[{begin}, {end})" if end > begin else "none" for *_, (begin, end), _, _ in rows]),
        "local": (
            "Local shape",
            [" x ".join(map(str, (n, *row[1].shape[1:]))) for row, n in zip(rows, counts, strict=True)],
        ),
        "offset": ("Offset in the shard", [at for *_, at in rows]),
        "elements": ("Elements", [n * rest for n, rest in zip(counts, rests, strict=True)]),
        "padding": ("Padding", [(row[4] - n) * rest for row, n, rest in zip(rows, counts, rests, strict=True)]),
        "bytes": ("Stored [B]", stored),
    }
    note = "Shard(0): ceil(rows / ranks) rows are stored on every rank, also where fewer or none are left."
    return table(f"{run.name}: each parameter by itself", columns, note)


#: Event -> what it is for a unit.
_LIFE = {
    "gather_flat": "all-gather",
    "gather_rows": "all-gather",
    "gather_alone": "copy of its only shard",
    "copy_out": "copied out of the buffer",
    "forward": "computes",
    "free": "reshard: gathered parameters freed",
    "backward": "computes gradients",
    "join": "gradients joined to one",
    "lay_out": "gradients laid out for the reduce-scatter",
    "scatter": "reduce-scatter of its gradients",
    "scatter_in_replica": "reduce-scatter of its gradients",
    "all_reduce_replicas": "all-reduce between replicas",
}


def life_cycle(run: StrategyRun, printed: bool = False) -> Table:
    """One row an event of a unit, in order: gather, compute, reshard, gather again, reduce-scatter."""
    seen: set[str] = set()
    there: list[str] = []
    what, gathered = [], []
    for each in run.journal:
        text = _LIFE[each.event]
        if each.event.startswith("gather_"):
            text += " again" if each.unit in seen else ""
            seen.add(each.unit)
            there.append(each.unit)
        elif each.event == "free":
            there.remove(each.unit)
        what.append(text)
        gathered.append(", ".join(sorted(there)) or "none")
    cells = [run.moments[each.moment].holds[0] for each in run.journal]
    full = [sum(cell.bytes for cell in held if cell.label.startswith("full ")) for held in cells]
    columns: Columns = {
        "number": ("No.", range(1, len(what) + 1)),
        "phase": ("Phase", [each.phase for each in run.journal]),
        "unit": ("Unit", [each.unit for each in run.journal]),
        "event": ("What happens to it", what),
        "gathered": ("Gathered, or on the way, then", gathered),
        "gathered_bytes": ("Gathered parameters of rank 0 [B]", full),
        "live_bytes": ("All that rank 0 holds [B]", [run.moments[each.moment].live_bytes(0) for each in run.journal]),
    }
    units = len(run.sharding.units)
    note = f"{units} unit{'s' if units > 1 else ''}. Between its events a unit is its shard alone: that stays on every rank all the time."
    return table(f"{run.name}: life cycle of the units", columns, note, shown=None if printed else 0)


def _elements(runs: Sequence[StrategyRun]) -> Table:
    """One row an element: who keeps it, its gradient on each rank, the mean that was used, and the updated value."""
    first = runs[0]
    every = ((parameter.name, index) for parameter in first.model.parameters for index in np.ndindex(parameter.shape))
    elements = list(islice(every, MOST_ELEMENTS))
    owners = {run.name: _owners(run) for run in runs}
    sharded, alone = first.results[0], first.reference[0]
    columns: dict[str, tuple[str, Sequence[object]]] = {
        "element": ("Element", [f"{name}[{', '.join(map(str, index))}]" for name, index in elements])
    }
    for name, owner in owners.items():
        columns[name] = (f"{name}: kept by rank", [int(owner[parameter][index]) for parameter, index in elements])
    numbers = {f"rank {rank}": (f"Gradient on rank {rank}", local) for rank, local in enumerate(first.local)} | {
        "mean": ("Mean, reduce-scattered", sharded["gradients"][0]),
        "expected": ("Mean, one process", alone.gradients),
        "updated": ("Value after Adam", sharded["parameters"][0]),
        "reference": ("Value, one process", alone.parameters),
    }
    for key, (heading, found) in numbers.items():
        columns[key] = (heading, [float(found[parameter][index]) for parameter, index in elements])
    many = f"; the first {MOST_ELEMENTS} elements." if len(elements) == MOST_ELEMENTS else "."
    few = len(elements) <= MOST_PRINTED and len(first.local) <= MOST_PRINTED_RANKS
    note = f"Numbers of {first.name} in the first step{many}"
    return table("Every element through the step", columns, note, shown=None if few else 0)


def _owners(run: StrategyRun) -> dict[str, npt.NDArray[np.int64]]:
    """The rank that keeps each element, in the shapes of the parameters."""
    found = {parameter.name: np.full(parameter.elements, -1) for parameter in run.model.parameters}
    for layout in run.sharding.layouts:
        for rank, segments in enumerate(layout.segments):
            for segment in segments:
                if segment.parameter is not None:
                    found[segment.parameter][segment.begin : segment.end] = rank
    return {parameter.name: found[parameter.name].reshape(parameter.shape) for parameter in run.model.parameters}


def checks(run: StrategyRun) -> list[Check]:
    """Counted figures of one version beside their closed forms, errors beside 0."""
    steps = len(run.results)
    text = f"largest difference from one process on the whole batch, over {steps} step{'s' if steps > 1 else ''}"
    return [*_communication(run), *_memory(run), *run.number_checks(text)]


def _communication(run: StrategyRun) -> list[Check]:
    name, world, network, sharding = run.name, run.world, run.network, run.sharding
    widths, replicas, units = sharding.widths, sharding.replicas, len(sharding.units)
    again = [unit.name not in sharding.kept for unit in sharding.units]
    moved = _padded_elements(run)
    each = [size * (widths.gathered * (1 + freed) + widths.reduced) for size, freed in zip(moved, again, strict=True)]
    shards = [size // world for size in moved]
    between = Fraction(2 * (replicas - 1), replicas) * sum(shards) * widths.reduced
    sent = Fraction(world - 1, world) * sum(each) + between
    collectives = 2 * units + sum(again)
    formula = "F(W) * sum over units n (q + q + r); n with padding, one q where the unit stays gathered (arXiv:1910.02054, section 7.2.2)"
    if replicas > 1:
        formula += "; 2 F(R) r n/W between replicas"
    ranks = replicas * world
    found = [
        Check(f"{name}: bytes sent by rank {rank}", int(network.sent_bytes[rank]), sent, "bytes", formula)
        for rank in sorted({0, ranks - 1})
        if all(size % replicas == 0 for size in shards)
    ]
    found.append(Check(f"{name}: bytes sent by all ranks", int(network.sent_bytes.sum()), ranks * sent, "bytes", f"ranks times {formula}"))
    steps = collectives * (world - 1) + 2 * units * (replicas - 1)
    text = "(W - 1) a collective" + (", 2 (R - 1) an all-reduce between replicas" if replicas > 1 else "")
    found.append(Check(f"{name}: logical steps", network.steps, steps, "steps", text))
    calls = (collectives if world > 1 else 0) + (units if replicas > 1 else 0)
    text = "units x (all-gather forward, all-gather backward if freed, reduce-scatter" + (", all-reduce)" if replicas > 1 else ")")
    return [*found, Check(f"{name}: collectives of a step", len(run.calls), calls, "calls", text)]


def _padded_elements(run: StrategyRun) -> list[int]:
    """Elements of every unit as its collectives move them, from shapes alone."""
    world, aligned, found = run.world, _aligned(run), []
    for unit in run.sharding.units:
        parameters, length = unit.parameters(run.model), 0
        if run.sharding.strategy.layout == "rows":
            found.append(sum(world * -(-p.shape[0] // world) * prod(p.shape[1:]) for p in parameters))
            continue
        for parameter in parameters:
            if aligned:
                length = -(-length // aligned) * aligned
            length += parameter.elements
        found.append(-(-length // world) * world)
    return found


def _memory(run: StrategyRun) -> list[Check]:
    name, width, copies, elements = run.name, run.sharding.widths.stored, run.sharding.replicas, run.elements
    cells = [cell for held in run.moments[0].holds for cell in held]
    held = {kind: sum(cell.bytes for cell in cells if cell.kind == kind) for kind in ("parameter", "padding", "optimizer_state")}
    padding = sum(_padded_elements(run)) - elements
    state_padding = padding if run.sharding.layouts[0].state_has_padding else 0
    segments = [s for layout in run.sharding.layouts for of_rank in layout.segments for s in of_rank if s.parameter is not None]
    every, number = "every element of the parameters on exactly one rank", sum(s.elements for s in segments)
    cut = "FSDP1: to a multiple of W (and of 16 bytes); FSDP2: W ceil(d0/W) rest - N"
    filled = copies * (padding + 2 * state_padding) * width
    return [
        Check(f"{name}: elements in all shards", number, elements, "elements", every),
        Check(f"{name}: parameters on all ranks", held["parameter"], copies * elements * width, "bytes", "N x bytes, in each replica"),
        Check(f"{name}: padding on all ranks", held["padding"], filled, "bytes", cut),
        Check(
            f"{name}: Adam state on all ranks",
            held["optimizer_state"],
            2 * copies * elements * width,
            "bytes",
            "two moments, N x bytes each",
        ),
    ]
