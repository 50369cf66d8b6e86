"""Virtual ranks whose arrays can be looked at: the network that counts, and pictures of what every rank holds."""

from __future__ import annotations

from collections.abc import Sequence

from tracekit.simulate.experiment import Cell, Moment
from tracekit.simulate.functions import Float
from tracekit.simulate.holdings import Holdings
from tracekit.simulate.virtual import Network


class PicturedRanks:
    """``world`` ranks on one ``network``. All arrays count ``element_bytes`` an element, held or under way."""

    def __init__(self, world: int, element_bytes: int) -> None:
        self.world = world
        self.element_bytes = element_bytes
        self.network = Network(world, element_bytes)
        self.group = list(range(world))
        self._holdings = Holdings(world)
        self._pictured = 0

    @property
    def moments(self) -> list[Moment]:
        """The pictures so far."""
        return self._holdings.moments

    def keep(self, name: str, arrays: Sequence[Float], kind: str = "activation", labels: Sequence[str] | None = None) -> None:
        """Every rank holds its array under ``name`` from now on. ``labels``: what it is called on each rank, else ``name``."""
        for rank, array in enumerate(arrays):
            shape = " x ".join(str(length) for length in array.shape)
            cell = Cell(labels[rank] if labels else name, kind, array.size * self.element_bytes, shape)
            self._holdings.put(rank, name, array, [cell], self.element_bytes)

    def drop(self, *names: str) -> None:
        """Every rank frees what it holds under ``names``."""
        for name in names:
            self._holdings.drop(name)

    def picture(self, title: str, text: str) -> None:
        """Record a moment with the messages since the last one; its logical step is the count so far, None where nothing was sent."""
        sent = self.network.messages[self._pictured :]
        self._pictured = len(self.network.messages)
        self._holdings.record(title, text, [message for _, message in sent], self.network.steps if sent else None)

    def most_held(self) -> int:
        """Most bytes that one rank holds in any picture."""
        return max((moment.live_bytes(rank) for moment in self.moments for rank in range(self.world)), default=0)
