"""One collective on virtual ranks: data made, moved step by step, and compared with what has to come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from tracekit.simulate.collectives.closed_forms import sent_elements
from tracekit.simulate.experiment import Cell, Message, Moment
from tracekit.simulate.schedules import Chunk, Key, Round, chunk_label, schedule
from tracekit.simulate.virtual import Held, Network

Values = npt.NDArray[np.int64]
REDUCING = ("reduce", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Setting:
    """One collective to run. ``chunks``: elements of each chunk, ``passes`` chunks a rank one behind the other (1, but in a long ring).

    ``pieces[i][j]`` (all_to_all): elements from rank i to rank j. ``element_bytes``: bytes of one element.
    """

    kind: str
    algorithm: str
    size: int
    chunks: Sequence[int]
    passes: int
    pieces: Sequence[Sequence[int]]
    root: int
    element_bytes: int

    @property
    def cut(self) -> bool:
        """Whether the tensor is cut into a chunk (or several) for each rank."""
        return len(self.chunks) > 1 or self.size == 1


@dataclass(frozen=True)
class CollectiveRun:
    """What was counted. ``expected_sent``: bytes of each rank; ``wrong``: elements that differ from what they have to be.

    ``left_out``: moments at the end that would have made the picture too large.
    """

    setting: Setting
    network: Network
    moments: Sequence[Moment]
    before: Sequence[str]
    after: Sequence[str]
    expected_sent: Sequence[int]
    wrong: int
    left_out: int

    def seconds(self, latency_s: Fraction, seconds_per_byte: Fraction) -> Fraction:
        """Time by the alpha-beta model: each step lasts as long as its largest message."""
        largest: dict[int, int] = {}
        for step, message in self.network.messages:
            largest[step] = max(largest.get(step, 0), message.bytes)
        return sum((latency_s + size * seconds_per_byte for size in largest.values()), Fraction(0))

    @property
    def full_bytes(self) -> int:
        """Size of the full tensor; of an uneven all_to_all the largest send buffer."""
        setting = self.setting
        if setting.pieces:
            return max(sum(row) for row in setting.pieces) * setting.element_bytes
        return sum(setting.chunks) * setting.element_bytes


def run_collective(setting: Setting, most_cells: int) -> CollectiveRun:
    """Make the data, move it, compare. Moments are kept while they hold at most ``most_cells`` cells in all."""
    network = Network(setting.size, setting.element_bytes)
    held = _start(setting)
    before = [_text(setting, mine) for mine in held]
    picture = _Picture(setting, most_cells)
    picture.add("before", _BEFORE[setting.kind], held)
    network.run(_rounds(setting), range(setting.size), held, watch=picture.watch)
    after = [_text(setting, mine) for mine in held]
    return CollectiveRun(setting, network, picture.moments, before, after, _expected_sent(setting), _wrong(setting, held), picture.left_out)


class _Picture:
    """Moments as they come, up to a number of cells."""

    def __init__(self, setting: Setting, most_cells: int) -> None:
        self.moments: list[Moment] = []
        self.left_out = 0
        self._setting, self._room, self._step = setting, most_cells, 0

    def watch(self, now: Sequence[Mapping[Key, Chunk]], messages: Sequence[Message]) -> None:
        """A step has ended."""
        self._step += 1
        text = f"{len(messages)} message{'s' if len(messages) != 1 else ''} under way, {sum(m.bytes for m in messages)} B in all."
        self.add(f"after step {self._step}", text, now, tuple(messages), self._step)

    def add(
        self, title: str, text: str, now: Sequence[Mapping[Key, Chunk]], messages: Sequence[Message] = (), step: int | None = None
    ) -> None:
        """A moment, if there is room for it and was for all before it."""
        self._room -= sum(map(len, now)) + len(messages)
        if self._room < 0 and self.moments:
            self.left_out += 1
            return
        name = f"{self._setting.kind} ({self._setting.algorithm}): {title}"
        self.moments.append(Moment(name, text, _cells(self._setting, now), messages, step))


_BEFORE = {
    "broadcast": "Only the root holds the tensor.",
    "scatter": "The root holds one chunk for each rank.",
    "gather": "Every rank holds its own chunk.",
    "reduce": "Every rank holds a tensor of its own; the root is to hold their sum.",
    "all_gather": "Every rank holds its own chunk; all are to hold all chunks.",
    "reduce_scatter": "Every rank holds a whole tensor; chunk i of the sum is to lie on rank i.",
    "all_reduce": "Every rank holds a whole tensor; all are to hold the sum.",
    "all_to_all": "Every rank holds one piece for each rank.",
}


def _values(rank: int, begin: int, count: int) -> Values:
    """Whole numbers that tell where they come from: element 7 of rank 2 is 207 (hundreds, or more digits where there are more elements)."""
    values: Values = np.arange(begin, begin + count, dtype=np.int64) + rank * 10 ** max(2, len(str(begin + count)))
    return values


def _tensor(setting: Setting, rank: int) -> list[Values]:
    """The full tensor of one rank, chunk by chunk."""
    whole = _values(rank, 0, sum(setting.chunks))
    return np.split(whole, np.cumsum(setting.chunks)[:-1].tolist())


def _start(setting: Setting) -> Held:
    ranks = range(setting.size)
    if setting.kind == "all_to_all":
        return [{(i, j): Chunk(_values(i, 100 * j % 97, n), (i,)) for j, n in enumerate(setting.pieces[i])} for i in ranks]
    every: Held = [{(c,): Chunk(chunk, (rank,)) for c, chunk in enumerate(_tensor(setting, rank))} for rank in ranks]
    if setting.kind in REDUCING:
        return every
    if setting.kind in ("broadcast", "scatter"):
        return [mine if rank == setting.root else {} for rank, mine in enumerate(every)]
    return [{key: piece for key, piece in mine.items() if key[0] // setting.passes == rank} for rank, mine in enumerate(every)]


def _rounds(setting: Setting) -> list[Round]:
    """The schedule, as often as there are passes: pass p moves the p-th chunk of each rank."""
    base = schedule(setting.kind, setting.algorithm, setting.size, setting.root)
    if setting.passes == 1:
        return base
    return [
        [t._replace(keys=tuple((key[0] * setting.passes + p,) for key in t.keys)) for t in transfers]
        for p in range(setting.passes)
        for transfers in base
    ]


def _expected_sent(setting: Setting) -> list[int]:
    size = setting.size
    if setting.kind == "all_to_all":
        return [(sum(row) - row[i]) * setting.element_bytes for i, row in enumerate(setting.pieces)]
    chunks = list(setting.chunks) if setting.cut else [sum(setting.chunks)] + [0] * (size - 1)
    total = np.zeros(size, np.int64)
    for p in range(setting.passes):
        total += np.array(sent_elements(setting.kind, setting.algorithm, chunks[p :: setting.passes], setting.root), np.int64)
    return [int(n) * setting.element_bytes for n in total]


def _wrong(setting: Setting, held: Sequence[Mapping[Key, Chunk]]) -> int:
    """Elements that are not what the collective is defined to give, worked out without moving anything."""
    wrong = 0
    for rank, mine in enumerate(held):
        for key, value in _wanted(setting, rank).items():
            got = mine[key].array if key in mine else np.zeros(0, np.int64)
            wrong += int((got != value).sum()) if got.shape == value.shape else len(value)
    return wrong


def _wanted(setting: Setting, rank: int) -> dict[Key, Values]:
    ranks = range(setting.size)
    if setting.kind == "all_to_all":
        return {(i, rank): _values(i, 100 * rank % 97, setting.pieces[i][rank]) for i in ranks}
    tensors = [_tensor(setting, other) for other in ranks]
    everything = range(len(setting.chunks))
    own = [c for c in everything if c // setting.passes == rank]
    if setting.kind in REDUCING:
        total = [np.sum([tensor[c] for tensor in tensors], axis=0) for c in everything]
        chosen: Sequence[int] = {"all_reduce": everything, "reduce_scatter": own, "reduce": everything if rank == setting.root else []}[
            setting.kind
        ]
        return {(c,): total[c] for c in chosen}
    if setting.kind in ("broadcast", "scatter"):
        return {(c,): tensors[setting.root][c] for c in (everything if setting.kind == "broadcast" else own)}
    return {(c,): tensors[c // setting.passes][c] for c in everything if setting.kind == "all_gather" or rank == setting.root}


def _cells(setting: Setting, held: Sequence[Mapping[Key, Chunk]]) -> list[list[Cell]]:
    reducing = setting.kind in REDUCING
    return [
        [
            Cell(
                chunk_label(key, piece.ranks, reducing),
                _kind(setting, piece),
                int(piece.array.size) * setting.element_bytes,
                shown(piece.array),
            )
            for key, piece in sorted(mine.items())
        ]
        for mine in held
    ]


def _kind(setting: Setting, piece: Chunk) -> str:
    if setting.kind not in REDUCING or len(piece.ranks) == setting.size:
        return "chunk"
    return "input" if len(piece.ranks) == 1 else "partial_sum"


def _text(setting: Setting, mine: Mapping[Key, Chunk]) -> str:
    reducing = setting.kind in REDUCING
    return "; ".join(f"{chunk_label(key, piece.ranks, reducing)} {shown(piece.array)}" for key, piece in sorted(mine.items())) or "nothing"


def shown(values: npt.NDArray[np.generic], most: int = 8) -> str:
    """Values for a reader: ``[100, 101]``, or the first of many and how many there are."""
    texts = [str(value) for value in values[:most]]
    return f"[{', '.join(texts)}]" if len(values) <= most else f"[{', '.join(texts)}, ... {len(values)} in all]"
