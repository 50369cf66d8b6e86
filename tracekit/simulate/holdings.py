"""What every virtual rank holds: arrays with the cells that picture them, so that bytes shown are always bytes that exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tracekit.simulate.experiment import CELL_KINDS, Cell, Message, Moment
from tracekit.simulate.functions import Float
from tracekit.simulate.virtual import Network


class Holdings:
    """The arrays of all ranks by name, and the moments recorded of them.

    An array is counted at ``element_bytes`` an element, whatever NumPy computes in. ``put`` and ``drop`` are the only ways to change what
    is held; ``record`` keeps a picture.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.moments: list[Moment] = []
        self._arrays: list[dict[str, Float]] = [{} for _ in range(world)]
        self._cells: list[dict[str, tuple[Cell, ...]]] = [{} for _ in range(world)]

    def put(self, rank: int, name: str, array: Float, cells: Sequence[Cell], element_bytes: int) -> None:
        """Let ``rank`` hold ``array``, pictured by ``cells``, in the place of an earlier one of this name."""
        shown = sum(cell.bytes for cell in cells)
        real = array.size * element_bytes
        assert shown == real, f"{name} on rank {rank}: {shown} B in cells, {real} B in the array"
        self._arrays[rank][name] = array
        self._cells[rank][name] = tuple(cells)

    def get(self, rank: int, name: str) -> Float:
        """The array that ``rank`` holds under ``name``."""
        return self._arrays[rank][name]

    def has(self, rank: int, name: str) -> bool:
        """Whether ``rank`` holds something under ``name``."""
        return name in self._arrays[rank]

    def drop(self, name: str) -> None:
        """All ranks free ``name``; a rank without it is passed over."""
        for arrays, cells in zip(self._arrays, self._cells, strict=True):
            arrays.pop(name, None)
            cells.pop(name, None)

    def rename(self, old: str, new: str) -> None:
        """All ranks hold under ``new`` what they held under ``old``, in the place of an earlier one."""
        for rank in range(self.world):
            self._arrays[rank][new] = self._arrays[rank].pop(old)
            self._cells[rank][new] = self._cells[rank].pop(old)

    def record(self, title: str, text: str, messages: Sequence[Message] = (), logical_step: int | None = None) -> None:
        """Keep a picture of the present."""
        holds = tuple(tuple(cell for held in cells.values() for cell in held) for cells in self._cells)
        self.moments.append(Moment(title, text, holds, tuple(messages), logical_step))


def bytes_by_kind(cells: Iterable[Cell]) -> dict[str, int]:
    """Bytes of each kind, kinds without any left out, in the order of CELL_KINDS."""
    found: Counter[str] = Counter()
    for cell in cells:
        found[cell.kind] += cell.bytes
    return {kind: found[kind] for kind in CELL_KINDS if found[kind]}


def peak(moments: Sequence[Moment]) -> tuple[int, int]:
    """(moment, rank) at which one rank holds most; the first of equals."""
    return max(
        ((index, rank) for index, moment in enumerate(moments) for rank in range(len(moment.holds))),
        key=lambda place: (moments[place[0]].live_bytes(place[1]), -place[0], -place[1]),
    )


class PicturedRanks:
    """``world`` ranks on one ``network``. All arrays count ``element_bytes`` an element, held or under way, where nothing else is said."""

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
