"""Tables and checks of the ZeRO experiment: bytes by strategy, who holds what, what is sent, how gradients are averaged, errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tracekit.findings import Table
from tracekit.simulate._step_tables import collectives_table, live_table, peak_table, table
from tracekit.simulate.experiment import Call, Check, Moment
from tracekit.simulate.holdings import bytes_by_kind, peak
from tracekit.simulate.linear_model import LinearStack, Trained, Values, largest_error
from tracekit.simulate.model_units import Unit
from tracekit.simulate.shard_layout import ShardLayout
from tracekit.simulate.virtual import Network
from tracekit.simulate.zero_strategies import Recipe, Strategy
from tracekit.simulate.zero_training import Results

#: Sums in another order: some rounding errors of float64 at values about 1.
GRADIENT_TOLERANCE = 1e-12
#: Adam divides by sqrt(v) + 1e-8: where a gradient is about as small, its rounding error is magnified by up to 1e8 x the learning rate.
PARAMETER_TOLERANCE = 1e-8


@dataclass(frozen=True)
class Outcome:
    """What came out of one strategy. ``moments``, ``network``, ``local`` are of the first step, the rest of every step."""

    strategy: Strategy
    recipe: Recipe
    model: LinearStack
    units: Sequence[Unit]
    layouts: Sequence[ShardLayout]
    micro_batches: int
    broadcast: bool
    moments: Sequence[Moment]
    network: Network
    local: Sequence[Values]
    results: Sequence[Results]
    reference: Sequence[Trained]

    @property
    def name(self) -> str:
        """As it is called in tables."""
        return self.strategy.name

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.layouts[0].world

    @property
    def calls(self) -> list[Call]:
        """The collectives of rank 0 in the first step."""
        return self.network.calls(0)

    @property
    def before_update(self) -> Moment:
        """The moment at which parameters, gradients and optimizer state are all there."""
        (found,) = [moment for moment in self.moments if moment.title == "before the update"]
        return found

    @property
    def elements(self) -> int:
        """Elements of the model's parameters."""
        return sum(parameter.elements for parameter in self.model.parameters)

    @property
    def flat_elements(self) -> int:
        """Elements of the flat vectors: with DDP those of the model, otherwise each unit's filled up to a multiple of the ranks."""
        sizes = [sum(parameter.elements for parameter in unit.parameters(self.model)) for unit in self.units]
        return sum(-(-size // self.world) * self.world for size in sizes) if self.strategy.owned_optimizer else sum(sizes)


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
                "formula": _state_formula(outcome.strategy),
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


def _state_formula(strategy: Strategy) -> str:
    return {
        "ddp": "N (P + G + O)",
        "zero1_naive": "N (P + G + O/W)",
        "zero1": "N (P + G + O/W)",
        "zero2": "N (P + (G + O)/W)",
        "zero3": "N (P + G + O)/W",
    }[strategy.key]


def _holders(outcomes: Sequence[Outcome]) -> Table:
    """One row a strategy and rank: which elements of parameters, gradients and optimizer state it keeps."""
    rows = []
    for outcome in outcomes:
        for rank in range(outcome.world):
            own = "; ".join(", ".join(piece.label for piece in layout.pieces[rank]) for layout in outcome.layouts)
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
                "formula": _sent_formula(outcome.strategy),
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
    return table("What is sent in a step", rows, headings, note)


def _sent_formula(strategy: Strategy) -> str:
    return {
        "ddp": "2 F N G",
        "zero1_naive": "2 F N G + F N P",
        "zero1": "F N G + F N P",
        "zero2": "m F N G + F N P",
        "zero3": "m (2 F N P + F N G)",
    }[strategy.key]


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


def checks(outcome: Outcome) -> list[Check]:
    """Counted figures of one strategy beside their closed forms, errors beside 0."""
    return [*_state_checks(outcome), *_traffic_checks(outcome), *_number_checks(outcome)]


def _state_checks(outcome: Outcome) -> list[Check]:
    """Model state of every rank: parameters and optimizer state between steps, with gradients before the update."""
    strategy, recipe, world = outcome.strategy, outcome.recipe, outcome.world
    n = Fraction(outcome.flat_elements)
    kept = n * recipe.parameter / (world if strategy.owned_parameters else 1)
    kept += n * recipe.optimizer / (world if strategy.owned_optimizer else 1)
    full = kept + n * recipe.gradient / (world if strategy.owned_gradients else 1)
    found = []
    for title, moment, expected in (
        ("kept between steps", outcome.moments[-1], kept),
        ("kept when the step begins", outcome.moments[0], kept),
        ("model state before the update", outcome.before_update, full),
    ):
        held = [moment.live_bytes(rank) for rank in range(world)]
        gradients = "" if moment is outcome.before_update else " without G"
        formula = f"{_state_formula(strategy)}{gradients}, N filled up where owned (arXiv:1910.02054, section 5)"
        found += [
            Check(f"{outcome.name}: {which} {title}", size, expected, "bytes", formula)
            for which, size in (("most that a rank has", max(held)), ("least that a rank has", min(held)))
        ]
    return found


def _traffic_checks(outcome: Outcome) -> list[Check]:
    """Bytes of all ranks and, where parts are even, of each; logical steps."""
    world, network, recipe = outcome.world, outcome.network, outcome.recipe
    n, m = outcome.flat_elements, outcome.micro_batches
    times_gradient, times_parameter = {"ddp": (2, 0), "zero1_naive": (2, 1), "zero1": (1, 1), "zero2": (m, 1), "zero3": (m, 2 * m)}[
        outcome.strategy.key
    ]
    each = Fraction(world - 1, world) * n * (times_gradient * recipe.gradient + times_parameter * recipe.parameter)
    formula = _sent_formula(outcome.strategy) + " (arXiv:1910.02054, section 7)"
    sent = [int(size) for size in network.sent_bytes]
    found = [Check(f"{outcome.name}: bytes sent by all ranks", sum(sent), world * each, "bytes", f"W times {formula}")]
    if outcome.strategy.owned_optimizer and not outcome.broadcast:
        found += [
            Check(f"{outcome.name}: {which} sent by a rank", size, each, "bytes", formula)
            for which, size in (("most", max(sent)), ("least", min(sent)))
        ]
        steps = len(outcome.units) * (times_gradient + times_parameter) * (world - 1)
        text = "(W - 1) a reduce-scatter or all-gather, 2 (W - 1) an all-reduce, for each unit"
        found.append(Check(f"{outcome.name}: logical steps", network.steps, steps, "steps", text))
    return found


def _number_checks(outcome: Outcome) -> list[Check]:
    """Errors against one process: the largest of any element, on any rank that has it, in any step."""
    found = []
    for attribute, title, limit in (
        ("gradients", "mean gradient", GRADIENT_TOLERANCE),
        ("parameters", "parameters", PARAMETER_TOLERANCE),
        ("first", "first Adam moment", GRADIENT_TOLERANCE),
        ("second", "second Adam moment", GRADIENT_TOLERANCE),
    ):
        errors = [
            largest_error(values, getattr(expected, attribute))
            for results, expected in zip(outcome.results, outcome.reference, strict=True)
            for values in getattr(results, attribute)
        ]
        text = "largest difference from one process on the whole batch, on any rank and in any step"
        found.append(Check(f"{outcome.name}: error of the {title}", float(np.max(errors)), 0.0, "", text, limit))
    return found
