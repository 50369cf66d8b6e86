"""Tables and checks of the ZeRO experiment: bytes by strategy, who holds what, what is sent, how gradients are averaged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from tracekit.findings import Table
from tracekit.simulate.data_parallel.owners import dealt_out
from tracekit.simulate.data_parallel.run import StrategyRun
from tracekit.simulate.experiment import Check, Moment
from tracekit.simulate.holdings import bytes_by_kind, peak
from tracekit.simulate.tables import Columns, collectives_table, live_table, peak_table, table

#: How often gradients and parameters go round, (W-1)/W of them each time: an all-reduce is two; what is owned, in each micro-batch.
_TIMES = {"ddp": (2, 0), "zero1_torch": (2, 1), "zero1_naive": (2, 1), "zero1": (1, 1), "zero2": (1, 1), "zero3": (1, 2)}


def tables(runs: Sequence[StrategyRun]) -> list[Table]:
    """All tables of the experiment, in reading order."""
    return [
        _memory(runs),
        _holders(runs),
        _communication(runs),
        _averaging(runs[0]),
        peak_table({run.name: run.moments for run in runs}),
        *(live_table(run.name, run.moments, printed=len(runs) == 1) for run in runs),
        collectives_table({run.name: run.calls for run in runs}, runs[0].world),
    ]


def before_update(run: StrategyRun) -> Moment:
    """The moment at which parameters, gradients and optimizer state are all there."""
    (found,) = [moment for moment in run.moments if moment.title == "before the update"]
    return found


def _flat_elements(run: StrategyRun) -> int:
    """Elements of the flat vectors: with DDP those of the model, otherwise each unit's filled up to a multiple of the ranks."""
    return sum(_filled_up(run, sum(p.elements for p in unit.parameters(run.model))) for unit in run.sharding.units)


def _kept_elements(run: StrategyRun) -> int:
    """Elements of the flat vector that forward does not free under stage 3: those of the last unit, or none."""
    if not run.sharding.strategy.owned_parameters:
        return 0
    kept = [unit for unit in run.sharding.units if unit.name in run.sharding.kept]
    return sum(_filled_up(run, sum(p.elements for p in unit.parameters(run.model))) for unit in kept)


def _filled_up(run: StrategyRun, elements: int) -> int:
    return -(-elements // run.world) * run.world if run.sharding.strategy.cut else elements


def _owned_elements(run: StrategyRun) -> list[int]:
    """Elements that each rank has optimizer state for."""
    if run.sharding.strategy.layout == "owners":
        return [sum(p.elements for p in mine) for mine in dealt_out(run.model.parameters, run.world)]
    return [_flat_elements(run) // (run.world if run.sharding.strategy.owned_optimizer else 1)] * run.world


def _owned_labels(run: StrategyRun, rank: int) -> str:
    """What ``rank`` owns: units separated by semicolons."""
    if run.sharding.strategy.layout == "owners":
        return ", ".join(p.name for p in dealt_out(run.model.parameters, run.world)[rank])
    return "; ".join(", ".join(segment.label for segment in layout.segments[rank]) for layout in run.sharding.layouts)


def _sent_formula(run: StrategyRun) -> str:
    """Bytes a rank sends in a step."""
    return "m F ((2 N - L) P + N G)" if _kept_elements(run) else run.sharding.strategy.sent_formula


def _memory(runs: Sequence[StrategyRun]) -> Table:
    """One row a strategy: model state of rank 0 between steps and before the update, and the largest sum in the step."""
    full = [bytes_by_kind(before_update(run).holds[0]) for run in runs]
    peaks = [(run.moments[index], rank) for run in runs for index, rank in [peak(run.moments)]]
    columns: Columns = {
        "strategy": ("Strategy", [run.name for run in runs]),
        "between": ("Between steps [B]", [run.moments[-1].live_bytes(0) for run in runs]),
        "parameter": ("Before the update: parameters [B]", [held.get("parameter", 0) for held in full]),
        "gradient": ("Gradients [B]", [held.get("gradient", 0) for held in full]),
        "optimizer_state": ("Optimizer state [B]", [held.get("optimizer_state", 0) for held in full]),
        "padding": ("Padding [B]", [held.get("padding", 0) for held in full]),
        "sum": ("Sum [B]", [sum(held.values()) for held in full]),
        "formula": ("Closed form", [run.sharding.strategy.state_formula for run in runs]),
        "peak": ("Peak of the step [B]", [moment.live_bytes(rank) for moment, rank in peaks]),
        "moment": ("Peak at", [moment.title for moment, _ in peaks]),
    }
    first, widths = runs[0], runs[0].sharding.widths
    note = (
        f"Rank 0 of W = {first.world}. N = {first.elements} elements (where a unit is owned in parts, filled up to a multiple of W); "
        f"P = {widths.stored}, G = {widths.gradient}, O = {widths.optimizer} bytes an element. The peak includes activations and "
        "what is gathered."
    )
    return table("Bytes of a rank", columns, note)


def _holders(runs: Sequence[StrategyRun]) -> Table:
    """One row a strategy and rank: which elements of parameters, gradients and optimizer state it keeps."""
    rows = [(run, run.sharding.strategy, rank, _owned_labels(run, rank)) for run in runs for rank in range(run.world)]
    at_a_time = "a unit at a time: all of it"
    columns: Columns = {
        "strategy": ("Strategy", [run.name for run, *_ in rows]),
        "rank": ("Rank", [rank for _, _, rank, _ in rows]),
        "parameters": ("Parameters between steps", [own if s.owned_parameters else "all" for _, s, _, own in rows]),
        "during": ("Parameters in forward and backward", [at_a_time if s.owned_parameters else "all" for _, s, _, _ in rows]),
        "backward": ("Gradients in backward", [at_a_time if s.owned_gradients else "all" for _, s, _, _ in rows]),
        "gradients": ("Gradients kept", [own if s.owned_gradients else "all" for _, s, _, own in rows]),
        "reduced": ("Of them the mean over all ranks", ["all" if s.reduction == "all_reduce" else own for _, s, _, own in rows]),
        "optimizer": ("Optimizer state, and what it updates", [own if s.owned_optimizer else "all" for _, s, _, own in rows]),
    }
    note = "b[i:j] are elements, flat(W)[i:j] elements counted row by row; units are separated by semicolons."
    return table("Who holds what", columns, note)


def _communication(runs: Sequence[StrategyRun]) -> Table:
    """One row a strategy: its collectives by phase, what a rank sent."""
    made = [Counter((call.phase, call.kind) for call in run.calls) for run in runs]

    def of_phase(phase: str) -> list[str]:
        return [", ".join(f"{n} {kind}" for (where, kind), n in counts.items() if where == phase) or "none" for counts in made]

    columns: Columns = {
        "strategy": ("Strategy", [run.name for run in runs]),
        "forward": ("In forward", of_phase("forward")),
        "backward": ("In backward", of_phase("backward")),
        "optimizer": ("After the update", of_phase("optimizer")),
        "most": ("Most sent by a rank [B]", [int(run.network.sent_bytes.max()) for run in runs]),
        "total": ("Sent by all [B]", [int(run.network.sent_bytes.sum()) for run in runs]),
        "steps": ("Logical steps", [run.network.steps for run in runs]),
        "formula": ("Closed form, a rank", [_sent_formula(run) for run in runs]),
    }
    first = runs[0]
    note = f"F = (W-1)/W = {Fraction(first.world - 1, first.world)}, m = {first.micro_batches} micro-batches, N as above."
    kept = max(_kept_elements(run) for run in runs)
    if kept:
        note += f" L = {kept}: the last unit, with which backward begins, is not freed in between; --reshard-last yes frees it."
    return table("What is sent in a step", columns, note)


def _averaging(run: StrategyRun) -> Table:
    """How the first element's gradient comes about: each rank's own mean, the sum, the mean, one process on the whole batch."""
    name = run.model.parameters[0].name
    local = [float(values[name].flat[0]) for values in run.local]
    used, alone = float(run.results[0]["gradients"][0][name].flat[0]), float(run.reference[0].gradients[name].flat[0])
    own = "mean over its own micro-batches"
    total = f"what a reduction adds up: {run.world} times too large"
    columns: Columns = {
        "who": ("Who", [*(f"rank {rank}" for rank in range(len(local))), "sum", "mean", "one process"]),
        "gradient": (f"Gradient of {name}[0, 0]", [*local, float(np.sum(local)), used, alone]),
        "meaning": (
            "What it is",
            [*[own] * len(local), total, f"the sum divided by {run.world}: what the optimizer gets", "mean over the whole batch at once"],
        ),
    }
    return table(f"Gradient averaging ({run.name})", columns)


def checks(run: StrategyRun) -> list[Check]:
    """Counted figures of one strategy beside their closed forms, errors beside 0."""
    text = "largest difference from one process on the whole batch, on any rank and in any step"
    return [*_state_checks(run), *_traffic_checks(run), *run.number_checks(text)]


def _state_checks(run: StrategyRun) -> list[Check]:
    """Model state of every rank: parameters and optimizer state between steps, with gradients before the update."""
    strategy, widths, world = run.sharding.strategy, run.sharding.widths, run.world
    n = Fraction(_flat_elements(run))
    parameters = n * widths.stored / (world if strategy.owned_parameters else 1)
    gradient = n * widths.gradient / (world if strategy.owned_gradients else 1)
    kept = [parameters + mine * widths.optimizer for mine in _owned_elements(run)]
    found = []
    for title, moment, without, more in (
        ("kept between steps", run.moments[-1], " without G", Fraction(0)),
        ("kept when the step begins", run.moments[0], " without G", Fraction(0)),
        ("model state before the update", before_update(run), "", gradient),
    ):
        held = [moment.live_bytes(rank) for rank in range(world)]
        formula = f"{strategy.state_formula}{without}, N filled up where owned (arXiv:1910.02054, section 5)"
        for which, size, expected in (("most", max(held), max(kept)), ("least", min(held), min(kept))):
            found.append(Check(f"{run.name}: {which} that a rank has {title}", size, expected + more, "bytes", formula))
    return found


def _traffic_checks(run: StrategyRun) -> list[Check]:
    """Bytes of all ranks and, where parts are even, of each; logical steps."""
    world, network, strategy, widths = run.world, run.network, run.sharding.strategy, run.sharding.widths
    n, m, kept = _flat_elements(run), run.micro_batches, _kept_elements(run)
    times_gradient, times_parameter = _TIMES[strategy.key]
    times_gradient *= m if strategy.owned_gradients else 1
    times_parameter *= m if strategy.owned_parameters else 1
    gathered = times_parameter * n - m * kept
    each = Fraction(world - 1, world) * (times_gradient * n * widths.gradient + gathered * widths.stored)
    formula = _sent_formula(run) + " (arXiv:1910.02054, section 7)"
    sent = [int(size) for size in network.sent_bytes]
    found = [Check(f"{run.name}: bytes sent by all ranks", sum(sent), world * each, "bytes", f"W times {formula}")]
    if strategy.owned_optimizer and not run.sharding.broadcast:
        for which, size in (("most", max(sent)), ("least", min(sent))):
            found.append(Check(f"{run.name}: {which} sent by a rank", size, each, "bytes", formula))
        calls = len(run.sharding.units) * (times_gradient + times_parameter) - (m if kept else 0)
        text = "(W - 1) a reduce-scatter or all-gather, 2 (W - 1) an all-reduce, for each unit"
        found.append(Check(f"{run.name}: logical steps", network.steps, calls * (world - 1), "steps", text))
    return found
