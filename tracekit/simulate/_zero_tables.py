"""Tables of the ZeRO experiment: bytes by strategy, who holds what, what is sent, how gradients are averaged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from tracekit.findings import Table
from tracekit.simulate._step_tables import collectives_table, live_table, peak_table, table
from tracekit.simulate._zero_outcome import Outcome
from tracekit.simulate.experiment import Moment
from tracekit.simulate.holdings import bytes_by_kind, peak


def tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """All tables of the experiment, in reading order."""
    return [
        _memory(outcomes),
        _holders(outcomes),
        _communication(outcomes),
        _averaging(outcomes[0]),
        peak_table({outcome.name: outcome.moments for outcome in outcomes}),
        *(live_table(outcome.name, outcome.moments, printed=len(outcomes) == 1) for outcome in outcomes),
        collectives_table({outcome.name: outcome.calls for outcome in outcomes}, outcomes[0].world),
    ]


def _state(moment: Moment, rank: int) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state with their padding, at a moment without anything else."""
    held = bytes_by_kind(moment.holds[rank])
    return {kind: held.get(kind, 0) for kind in ("parameter", "gradient", "optimizer_state", "padding")}


def _memory(outcomes: Sequence[Outcome]) -> Table:
    """One row a strategy: model state of rank 0 between steps and before the update, and the largest sum in the step."""
    rows = []
    for outcome in outcomes:
        index, rank = peak(outcome.moments)
        full = _state(outcome.before_update, 0)
        rows.append(
            {
                "strategy": outcome.name,
                "between": outcome.moments[-1].live_bytes(0),
                **full,
                "sum": sum(full.values()),
                "formula": outcome.strategy.state_formula,
                "peak": outcome.moments[index].live_bytes(rank),
                "moment": outcome.moments[index].title,
            }
        )
    headings = {
        "strategy": "Strategy",
        "between": "Between steps [B]",
        "parameter": "Before the update: parameters [B]",
        "gradient": "Gradients [B]",
        "optimizer_state": "Optimizer state [B]",
        "padding": "Padding [B]",
        "sum": "Sum [B]",
        "formula": "Closed form",
        "peak": "Peak of the step [B]",
        "moment": "Peak at",
    }
    recipe, first = outcomes[0].recipe, outcomes[0]
    note = (
        f"Rank 0 of W = {first.world}. N = {first.elements} elements (where a unit is owned in parts, filled up to a multiple of W); "
        f"P = {recipe.parameter}, G = {recipe.gradient}, O = {recipe.optimizer} bytes an element. The peak includes activations and "
        "what is gathered."
    )
    return table("Bytes of a rank", rows, headings, note)


def _holders(outcomes: Sequence[Outcome]) -> Table:
    """One row a strategy and rank: which elements of parameters, gradients and optimizer state it keeps."""
    rows = []
    for outcome in outcomes:
        for rank in range(outcome.world):
            own = outcome.owned_labels(rank)
            strategy = outcome.strategy
            rows.append(
                {
                    "strategy": outcome.name,
                    "rank": rank,
                    "parameters": own if strategy.owned_parameters else "all",
                    "during": "a unit at a time: all of it" if strategy.owned_parameters else "all",
                    "backward": "a unit at a time: all of it" if strategy.owned_gradients else "all",
                    "gradients": own if strategy.owned_gradients else "all",
                    "reduced": "all" if strategy.all_reduce else own,
                    "optimizer": own if strategy.owned_optimizer else "all",
                }
            )
    headings = {
        "strategy": "Strategy",
        "rank": "Rank",
        "parameters": "Parameters between steps",
        "during": "Parameters in forward and backward",
        "backward": "Gradients in backward",
        "gradients": "Gradients kept",
        "reduced": "Of them the mean over all ranks",
        "optimizer": "Optimizer state, and what it updates",
    }
    note = "b[i:j] are elements, flat(W)[i:j] elements counted row by row; units are separated by semicolons."
    return table("Who holds what", rows, headings, note)


def _communication(outcomes: Sequence[Outcome]) -> Table:
    """One row a strategy: its collectives by phase, what a rank sent."""
    rows = []
    for outcome in outcomes:
        made = Counter((call.phase, call.kind) for call in outcome.calls)
        words = {
            phase: ", ".join(f"{count} {kind}" for (where, kind), count in made.items() if where == phase) or "none"
            for phase in ("forward", "backward", "optimizer")
        }
        sent = [int(size) for size in outcome.network.sent_bytes]
        rows.append(
            {
                "strategy": outcome.name,
                **words,
                "most": max(sent),
                "total": sum(sent),
                "steps": outcome.network.steps,
                "formula": outcome.sent_formula,
            }
        )
    headings = {
        "strategy": "Strategy",
        "forward": "In forward",
        "backward": "In backward",
        "optimizer": "After the update",
        "most": "Most sent by a rank [B]",
        "total": "Sent by all [B]",
        "steps": "Logical steps",
        "formula": "Closed form, a rank",
    }
    first = outcomes[0]
    note = f"F = (W-1)/W = {Fraction(first.world - 1, first.world)}, m = {first.micro_batches} micro-batches, N as above."
    kept = max(outcome.kept_elements for outcome in outcomes)
    if kept:
        note += f" L = {kept}: the last unit, with which backward begins, is not freed in between; --reshard-last yes frees it."
    return table("What is sent in a step", rows, headings, note)


def _averaging(outcome: Outcome) -> Table:
    """How the first element's gradient comes about: each rank's own mean, the sum, the mean, one process on the whole batch."""
    name = outcome.model.parameters[0].name
    values = [float(local[name].flat[0]) for local in outcome.local]
    used = float(outcome.results[0].gradients[0][name].flat[0])
    rows = [(f"rank {rank}", value, "mean over its own micro-batches") for rank, value in enumerate(values)]
    rows.append(("sum", float(np.sum(values)), f"what a reduction adds up: {outcome.world} times too large"))
    rows.append(("mean", used, f"the sum divided by {outcome.world}: what the optimizer gets"))
    rows.append(("one process", float(outcome.reference[0].gradients[name].flat[0]), "mean over the whole batch at once"))
    headings = {"who": "Who", "gradient": f"Gradient of {name}[0, 0]", "meaning": "What it is"}
    return table(f"Gradient averaging ({outcome.name})", [dict(zip(headings, row, strict=True)) for row in rows], headings)
