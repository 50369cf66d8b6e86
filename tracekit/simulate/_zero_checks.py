"""Checks of the ZeRO experiment: model state and traffic counted beside closed forms, numbers beside one process."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from tracekit.simulate._zero_outcome import Outcome
from tracekit.simulate.experiment import Check
from tracekit.simulate.linear_model import largest_error

#: Sums in another order: some rounding errors of float64 at values about 1.
GRADIENT_TOLERANCE = 1e-12
#: Adam divides by sqrt(v) + 1e-8: where a gradient is about as small, its rounding error is magnified by up to 1e8 x the learning rate.
PARAMETER_TOLERANCE = 1e-8


#: How often gradients and parameters go round, (W-1)/W of them each time: an all-reduce is two; what is owned, in each micro-batch.
_TIMES = {"ddp": (2, 0), "zero1_torch": (2, 1), "zero1_naive": (2, 1), "zero1": (1, 1), "zero2": (1, 1), "zero3": (1, 2)}


def checks(outcome: Outcome) -> list[Check]:
    """Counted figures of one strategy beside their closed forms, errors beside 0."""
    return [*_state_checks(outcome), *_traffic_checks(outcome), *_number_checks(outcome)]


def _state_checks(outcome: Outcome) -> list[Check]:
    """Model state of every rank: parameters and optimizer state between steps, with gradients before the update."""
    strategy, recipe, world = outcome.strategy, outcome.recipe, outcome.world
    n = Fraction(outcome.flat_elements)
    parameters = n * recipe.parameter / (world if strategy.owned_parameters else 1)
    gradient = n * recipe.gradient / (world if strategy.owned_gradients else 1)
    kept = [parameters + mine * recipe.optimizer for mine in outcome.owned]
    found = []
    for title, moment, more in (
        ("kept between steps", outcome.moments[-1], Fraction(0)),
        ("kept when the step begins", outcome.moments[0], Fraction(0)),
        ("model state before the update", outcome.before_update, gradient),
    ):
        held = [moment.live_bytes(rank) for rank in range(world)]
        gradients = "" if moment is outcome.before_update else " without G"
        formula = f"{strategy.state_formula}{gradients}, N filled up where owned (arXiv:1910.02054, section 5)"
        found += [
            Check(f"{outcome.name}: {which} {title}", size, expected + more, "bytes", formula)
            for which, size, expected in (
                ("most that a rank has", max(held), max(kept)),
                ("least that a rank has", min(held), min(kept)),
            )
        ]
    return found


def _traffic_checks(outcome: Outcome) -> list[Check]:
    """Bytes of all ranks and, where parts are even, of each; logical steps."""
    world, network, recipe = outcome.world, outcome.network, outcome.recipe
    n, m = outcome.flat_elements, outcome.micro_batches
    times_gradient, times_parameter = _TIMES[outcome.strategy.key]
    times_gradient *= m if outcome.strategy.owned_gradients else 1
    times_parameter *= m if outcome.strategy.owned_parameters else 1
    gathered = times_parameter * n - m * outcome.kept_elements
    each = Fraction(world - 1, world) * (times_gradient * n * recipe.gradient + gathered * recipe.parameter)
    formula = outcome.sent_formula + " (arXiv:1910.02054, section 7)"
    sent = [int(size) for size in network.sent_bytes]
    found = [Check(f"{outcome.name}: bytes sent by all ranks", sum(sent), world * each, "bytes", f"W times {formula}")]
    if outcome.strategy.owned_optimizer and not outcome.broadcast:
        found += [
            Check(f"{outcome.name}: {which} sent by a rank", size, each, "bytes", formula)
            for which, size in (("most", max(sent)), ("least", min(sent)))
        ]
        calls = len(outcome.units) * (times_gradient + times_parameter) - (m if outcome.kept_elements else 0)
        steps = calls * (world - 1)
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
