"""Virtual ranks whose arrays can be looked at: the network that counts, and pictures of what every rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import numpy as np

from tracekit.simulate import schedules
from tracekit.simulate.experiment import Cell, Moment
from tracekit.simulate.functions import Float
from tracekit.simulate.holdings import Holdings
from tracekit.simulate.schedules import Piece
from tracekit.simulate.virtual import Network, Tags


class _Largest(Piece):
    """A piece that keeps the larger of two elements where others add them up."""

    __slots__ = ()

    def plus(self, other: Piece) -> Piece:
        """The maximum of both, element by element."""
        return _Largest(np.maximum(self.array, other.array), tuple(sorted(self.ranks + other.ranks)))


class ReducingNetwork(Network):
    """A network that can also reduce to the maximum."""

    def all_reduce_max(self, inputs: Sequence[Float], group: Sequence[int], **tags: Unpack[Tags]) -> list[Float]:
        """Every member gets the maximum of all inputs, element by element; moves what a ring all-reduce moves."""
        x = len(group)
        held: list[dict[schedules.Key, Piece]] = [
            {(c,): _Largest(chunk, (rank,)) for c, chunk in enumerate(np.array_split(array.reshape(-1), x))}
            for rank, array in zip(group, inputs, strict=True)
        ]
        self.run(schedules.schedule("all_reduce", "ring", x, 0), group, held, **tags)
        self._record("all_reduce", group, [a.size * self._element(a, tags) for a in inputs], tags, tags.get("label", ""))
        shape = inputs[0].shape
        return [np.asarray(np.concatenate([mine[c,].array for c in range(x)]), np.float64).reshape(shape) for mine in held]


class PicturedRanks:
    """``world`` ranks on one ``network``. All arrays count ``element_bytes`` an element, held or under way, where nothing else is said."""

    def __init__(self, world: int, element_bytes: int) -> None:
        self.world = world
        self.element_bytes = element_bytes
        self.network = ReducingNetwork(world, element_bytes)
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
            self.keep_cells(rank, name, array, [cell])

    def keep_cells(self, rank: int, name: str, array: Float, cells: Sequence[Cell]) -> None:
        """One rank holds ``array`` under ``name``, pictured by several cells whose bytes add up to the array's."""
        self._holdings.put(rank, name, array, cells, self.element_bytes)

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
