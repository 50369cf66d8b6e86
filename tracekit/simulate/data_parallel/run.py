"""A training by one strategy beside one process on the whole batch: what the engine hands to the experiments' tables and checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tracekit.simulate.data_parallel.model import Adam, LinearStack, Trained, Values, batches, largest_error, train_in_one_process
from tracekit.simulate.data_parallel.shards import Results
from tracekit.simulate.data_parallel.store import UnitEvent
from tracekit.simulate.data_parallel.strategies import Sharding
from tracekit.simulate.data_parallel.training import Training
from tracekit.simulate.experiment import Call, Check, Moment
from tracekit.simulate.virtual import Network

#: Sums in another order: some rounding errors of float64 at values about 1.
GRADIENT_TOLERANCE = 1e-12
#: Adam divides by sqrt(v) + 1e-8: where a gradient is about as small, its rounding error is magnified by up to 1e8 x the learning rate.
PARAMETER_TOLERANCE = 1e-8
_QUANTITIES = (
    ("gradients", "mean gradient", GRADIENT_TOLERANCE),
    ("parameters", "parameters", PARAMETER_TOLERANCE),
    ("first", "first Adam moment", GRADIENT_TOLERANCE),
    ("second", "second Adam moment", GRADIENT_TOLERANCE),
)


@dataclass(frozen=True)
class StrategyRun:
    """What came out of one strategy: ``results``, ``reference`` of every step, the rest of the first."""

    sharding: Sharding
    model: LinearStack
    micro_batches: int
    moments: Sequence[Moment]
    journal: Sequence[UnitEvent]
    network: Network
    local: Sequence[Values]
    results: Sequence[Results]
    reference: Sequence[Trained]

    @property
    def name(self) -> str:
        """As it is called in tables."""
        return self.sharding.strategy.name

    @property
    def world(self) -> int:
        """Number of ranks that share the model: of one replica."""
        return self.sharding.world

    @property
    def calls(self) -> list[Call]:
        """The collectives of rank 0 in the first step."""
        return self.network.calls(0)

    @property
    def elements(self) -> int:
        """Elements of the model's parameters."""
        return sum(parameter.elements for parameter in self.model.parameters)

    def number_checks(self, formula: str) -> list[Check]:
        """Errors against one process: the largest of any element, on any rank that has it, in any step."""
        found = []
        for key, title, limit in _QUANTITIES:
            errors = [
                largest_error(values, getattr(expected, key))
                for results, expected in zip(self.results, self.reference, strict=True)
                for values in results[key]
            ]
            found.append(Check(f"{self.name}: error of the {title}", float(np.max(errors)), 0.0, "", formula, limit))
        return found


def train(model: LinearStack, sharding: Sharding, batch: int, micro_batches: int, steps: int, seed: int) -> StrategyRun:
    """Train for some steps with ``batch`` samples a micro-batch and rank; more than one micro-batch may be named in the pictures."""
    ranks, adam = sharding.replicas * sharding.world, Adam()
    data = batches(model, ranks * batch * micro_batches, steps, seed)
    reference = train_in_one_process(model, data, adam, seed)
    training = Training(model, sharding, adam)
    training.shards.start(model.initial(seed))
    moments: Sequence[Moment] = ()
    results: list[Results] = []
    local: list[Values] = []
    for number, samples in enumerate(data, 1):
        training.step(samples, number, micro_batches, named=not sharding.as_torch)
        results.append(training.shards.results())
        training.shards.drop_gradients()
        if number == 1:
            moments, journal = tuple(training.holdings.moments), training.shards.journal
            network, local = training.shards.network, training.local
        training.holdings.moments.clear()
    return StrategyRun(sharding, model, micro_batches, moments, journal, network, local, results, reference)


def named_moments(runs: Sequence[StrategyRun], separator: str, always: bool = False) -> list[Moment]:
    """The moments of all runs, with the strategy in front of the title where several are shown (or ``always``)."""
    if len(runs) == 1 and not always:
        return list(runs[0].moments)
    return [replace(moment, title=f"{run.name}{separator}{moment.title}") for run in runs for moment in run.moments]
