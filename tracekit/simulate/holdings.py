"""What every virtual rank holds: arrays with the cells that picture them, so that bytes shown are always bytes that exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tracekit.simulate.experiment import CELL_KINDS, Cell, Message, Moment
from tracekit.simulate.shard_layout import Array, Piece
from tracekit.simulate.virtual import Network


class Holdings:
    """The arrays of all ranks by name, and the moments recorded of them.

    An array is counted at ``element_bytes`` an element, whatever NumPy computes in. ``put`` and ``drop`` are the only ways to change what
    is held; ``record`` keeps a picture.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.moments: list[Moment] = []
        self._arrays: list[dict[str, Array]] = [{} for _ in range(world)]
        self._cells: list[dict[str, tuple[Cell, ...]]] = [{} for _ in range(world)]

    def put(self, rank: int, name: str, array: Array, cells: Sequence[Cell], element_bytes: int) -> None:
        """Let ``rank`` hold ``array``, pictured by ``cells``, in the place of an earlier one of this name."""
        shown = sum(cell.bytes for cell in cells)
        real = array.size * element_bytes
        assert shown == real, f"{name} on rank {rank}: {shown} B in cells, {real} B in the array"
        self._arrays[rank][name] = array
        self._cells[rank][name] = tuple(cells)

    def get(self, rank: int, name: str) -> Array:
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

    def record(self, title: str, text: str, messages: Sequence[Message] = (), logical_step: int | None = None) -> Moment:
        """Keep a picture of the present."""
        holds = tuple(tuple(cell for held in cells.values() for cell in held) for cells in self._cells)
        moment = Moment(title, text, holds, tuple(messages), logical_step)
        self.moments.append(moment)
        return moment

    def record_sent(self, title: str, text: str, network: Network, before: int) -> Moment:
        """Keep a picture that ends the messages of ``network`` from number ``before`` on."""
        messages = [message for _, message in network.messages[before:]]
        return self.record(title, text, messages, network.steps if messages else None)


def cells_of(pieces: Iterable[Piece], kind: str, element_bytes: int, prefix: str = "") -> tuple[Cell, ...]:
    """One cell a piece, padding in its own kind. ``prefix`` comes before the label (``grad ``, ``exp_avg ``).

    The detail is the interval of the parameter's elements, then the offset in the array: ``[4, 6) at 10``; of padding its length.
    """
    return tuple(
        Cell(
            f"{prefix}{piece.label}",
            "padding" if piece.parameter is None else kind,
            piece.elements * element_bytes,
            f"{piece.elements} at {piece.offset}" if piece.parameter is None else f"[{piece.begin}, {piece.end}) at {piece.offset}",
        )
        for piece in pieces
    )


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
