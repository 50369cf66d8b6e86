"""What comes out of one strategy of the ZeRO experiment: the border between training and its tables and checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tracekit.simulate.experiment import Call, Moment
from tracekit.simulate.linear_model import LinearStack, Trained, Values
from tracekit.simulate.model_units import Unit
from tracekit.simulate.shard_layout import ShardLayout
from tracekit.simulate.virtual import Network
from tracekit.simulate.zero_owners import dealt_out
from tracekit.simulate.zero_strategies import Recipe, Strategy
from tracekit.simulate.zero_training import Results


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
    kept_last: bool
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
        return sum(self._filled_up(size) for size in sizes)

    @property
    def kept_elements(self) -> int:
        """Elements of the flat vector that forward does not free under stage 3: those of the last unit, or none."""
        if not (self.kept_last and self.strategy.owned_parameters):
            return 0
        last = next(unit for unit in self.units if self.model.layers - 1 in unit.layers)
        return self._filled_up(sum(parameter.elements for parameter in last.parameters(self.model)))

    @property
    def owned(self) -> list[int]:
        """Elements that each rank has optimizer state for."""
        if self.strategy.whole_parameters:
            return [sum(p.elements for p in mine) for mine in dealt_out(self.model.parameters, self.world)]
        return [self.flat_elements // (self.world if self.strategy.owned_optimizer else 1)] * self.world

    def owned_labels(self, rank: int) -> str:
        """What ``rank`` owns, in words: units separated by semicolons."""
        if self.strategy.whole_parameters:
            return ", ".join(p.name for p in dealt_out(self.model.parameters, self.world)[rank])
        return "; ".join(", ".join(piece.label for piece in layout.pieces[rank]) for layout in self.layouts)

    @property
    def sent_formula(self) -> str:
        """Bytes a rank sends in a step."""
        return "m F ((2 N - L) P + N G)" if self.kept_elements else self.strategy.sent_formula

    def _filled_up(self, elements: int) -> int:
        return -(-elements // self.world) * self.world if self.strategy.cut else elements
