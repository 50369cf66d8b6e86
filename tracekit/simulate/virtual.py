"""A small machine of virtual ranks: it moves arrays between them, and counts every byte and every logical step.

``Network`` hands arrays from rank to rank and offers the collectives of ``tracekit.collectives.semantics`` on any group of ranks. What a
collective moves is decided by its schedule (``tracekit.simulate.schedules``); nothing is worked out by a formula. The arrays handed back
are copies: no two ranks ever share memory.

    net = Network(4, element_bytes=4)
    full = net.all_gather(shards, [0, 1, 2, 3], axis="dp_shard", purpose="parameter_gather", phase="forward")
    net.sent_bytes, net.steps, net.calls(0)

Logical steps. Each rank can send one message and receive one in a step. Ranks that have nothing to do with each other go on side by side:
a collective begins where the last of its members has arrived, so ``steps`` is the longest chain, not the sum over groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from tracekit.simulate import schedules
from tracekit.simulate.experiment import Call, Message
from tracekit.simulate.schedules import Key, Piece, Round

Array = npt.NDArray[np.generic]
Held = list[dict[Key, Piece]]
#: Called after each step of a collective with what every member (in group order) holds, and the messages of the step.
Watch = Callable[[Sequence[Mapping[Key, Piece]], Sequence[Message]], None]


class SendTags(TypedDict, total=False):
    """What every transfer may be told.

    ``axis``, ``purpose``, ``phase`` go into the ``Call`` of each rank that takes part; without ``axis`` no call is recorded.
    ``element_bytes``: bytes of one element under way, where they differ from the network's.
    """

    axis: str
    purpose: str
    phase: str
    element_bytes: int


class Tags(SendTags, total=False):
    """What every collective may be told besides: ``label`` stands in its call and messages, ``watch`` sees every step."""

    label: str
    watch: Watch


class Network:
    """``world`` virtual ranks. ``element_bytes``: bytes of one element under way; None takes those of each array.

    ``sent_bytes[rank]`` and ``received_bytes[rank]`` count; ``messages`` are (logical step from 0, Message) in order.
    """

    def __init__(self, world: int, element_bytes: int | None = None) -> None:
        if world < 1:
            raise ValueError(f"a network of {world} ranks")
        self.world = world
        self.element_bytes = element_bytes
        self.sent_bytes: npt.NDArray[np.int64] = np.zeros(world, np.int64)
        self.received_bytes: npt.NDArray[np.int64] = np.zeros(world, np.int64)
        self.messages: list[tuple[int, Message]] = []
        self._clock = [0] * world
        self._calls: list[list[Call]] = [[] for _ in range(world)]
        self._open: list[Message] | None = None

    @property
    def steps(self) -> int:
        """Logical steps so far: the longest chain of messages that had to wait for each other."""
        return max(self._clock)

    def steps_of(self, rank: int) -> int:
        """Logical steps after which ``rank`` has done all its sending and receiving."""
        return self._clock[rank]

    def calls(self, rank: int) -> list[Call]:
        """The collectives, sends and receives of ``rank`` in order, as far as they were given an ``axis``."""
        return list(self._calls[rank])

    @contextmanager
    def step(self, group: Sequence[int] = ()) -> Iterator[list[Message]]:
        """All ``send`` inside are one logical step, of everybody in ``group`` too; gives the list that they are added to.

        Steps do not nest, and one in which nothing is sent does not count.
        """
        if self._open is not None:
            raise ValueError("a step inside a step")
        sent: list[Message] = []
        self._open = sent
        try:
            yield sent
        finally:
            self._open = None
        ranks = {rank for message in sent for rank in (message.source, message.target)}
        if ranks:
            ranks.update(group)
            now = max(self._clock[rank] for rank in ranks)
            self.messages += [(now, message) for message in sent]
            for rank in ranks:
                self._clock[rank] = now + 1

    def send(self, source: int, target: int, array: Array, label: str = "", **tags: Unpack[SendTags]) -> Array:
        """Hand ``array`` from rank to rank; returns the target's copy. Outside ``step`` it is a step of its own.

        Counts nothing where source and target are one rank. ValueError for a rank that does not exist.
        """
        self._check((source,))
        self._check((target,))
        if source != target:
            size = array.size * self._element(array, tags)
            message = Message(source, target, label, size)
            if self._open is None:
                with self.step() as sent:
                    sent.append(message)
            else:
                self._open.append(message)
            self.sent_bytes[source] += size
            self.received_bytes[target] += size
            self._record("send", (source,), (size,), tags, label)
            self._record("recv", (target,), (size,), tags, label)
        return array.copy()

    def all_gather(
        self, parts: Sequence[Array], group: Sequence[int], algorithm: str = "ring", dim: int = 0, **tags: Unpack[Tags]
    ) -> list[Array]:
        """Every member gets all parts, concatenated along ``dim`` in group order. Parts may be uneven or empty. ``ring`` or ``naive``."""
        self._members(group, parts)
        held: Held = [{(i,): Piece(part, (group[i],))} for i, part in enumerate(parts)]
        self._run("all_gather", algorithm, group, held, tags)
        self._record(
            "all_gather", group, [sum(p.size for p in parts) * self._element(parts[0], tags)] * len(group), tags, tags.get("label", "")
        )
        return [np.concatenate([mine[i,].array for i in range(len(group))], axis=dim) for mine in held]

    def reduce_scatter(
        self, inputs: Sequence[Array], group: Sequence[int], splits: Sequence[int] | None = None, dim: int = 0, **tags: Unpack[Tags]
    ) -> list[Array]:
        """Member i gets the sum of everybody's i-th chunk along ``dim``, by a ring.

        ``splits``: lengths of the chunks, one a member; None cuts as evenly as possible, longer chunks first.
        """
        self._members(group, inputs)
        cut = [_cut(array, splits, len(group), dim) for array in inputs]
        held: Held = [{(c,): Piece(chunk, (rank,)) for c, chunk in enumerate(chunks)} for rank, chunks in zip(group, cut, strict=True)]
        self._run("reduce_scatter", "ring", group, held, tags)
        self._record("reduce_scatter", group, [a.size * self._element(a, tags) for a in inputs], tags, tags.get("label", ""))
        return [mine[i,].array.copy() for i, mine in enumerate(held)]

    def all_reduce(self, inputs: Sequence[Array], group: Sequence[int], algorithm: str = "ring", **tags: Unpack[Tags]) -> list[Array]:
        """Every member gets the sum. ``ring`` (reduce-scatter, then all-gather), ``tree`` or ``star`` (reduce, then broadcast)."""
        self._members(group, inputs)
        flat = [array.reshape(-1) for array in inputs]
        pieces = len(group) if algorithm == "ring" else 1
        held: Held = [
            {(c,): Piece(chunk, (rank,)) for c, chunk in enumerate(_cut(array, None, pieces, 0))}
            for rank, array in zip(group, flat, strict=True)
        ]
        self._run("all_reduce", algorithm, group, held, tags)
        self._record("all_reduce", group, [a.size * self._element(a, tags) for a in inputs], tags, tags.get("label", ""))
        shape = inputs[0].shape
        return [np.concatenate([mine[c,].array for c in range(pieces)]).reshape(shape) for mine in held]

    def broadcast(self, array: Array, group: Sequence[int], root: int, algorithm: str = "tree", **tags: Unpack[Tags]) -> list[Array]:
        """Every member gets ``array`` of rank ``root``. ``tree`` or ``star``."""
        self._members(group, None)
        held: Held = [{(0,): Piece(array, (root,))} if rank == root else {} for rank in group]
        self._run("broadcast", algorithm, group, held, tags, self._place(root, group))
        self._record("broadcast", group, [array.size * self._element(array, tags)] * len(group), tags, tags.get("label", ""))
        return [mine[0,].array.copy() for mine in held]

    def reduce(self, inputs: Sequence[Array], group: Sequence[int], root: int, algorithm: str = "tree", **tags: Unpack[Tags]) -> Array:
        """Rank ``root`` gets the sum. ``tree`` or ``star``."""
        self._members(group, inputs)
        held: Held = [{(0,): Piece(array, (rank,))} for rank, array in zip(group, inputs, strict=True)]
        place = self._place(root, group)
        self._run("reduce", algorithm, group, held, tags, place)
        self._record("reduce", group, [a.size * self._element(a, tags) for a in inputs], tags, tags.get("label", ""))
        return held[place][0,].array.copy()

    def scatter(
        self, pieces: Sequence[Array], group: Sequence[int], root: int, algorithm: str = "star", **tags: Unpack[Tags]
    ) -> list[Array]:
        """Member i gets ``pieces[i]`` of rank ``root``. ``star`` or ``tree``."""
        self._members(group, pieces)
        place = self._place(root, group)
        held: Held = [{} for _ in group]
        held[place] = {(i,): Piece(piece, (root,)) for i, piece in enumerate(pieces)}
        self._run("scatter", algorithm, group, held, tags, place)
        self._record(
            "scatter", group, [sum(p.size for p in pieces) * self._element(pieces[0], tags)] * len(group), tags, tags.get("label", "")
        )
        return [mine[i,].array.copy() for i, mine in enumerate(held)]

    def gather(self, parts: Sequence[Array], group: Sequence[int], root: int, algorithm: str = "star", **tags: Unpack[Tags]) -> Array:
        """Rank ``root`` gets all parts, concatenated along their first dimension in group order. ``star`` or ``tree``."""
        self._members(group, parts)
        place = self._place(root, group)
        held: Held = [{(i,): Piece(part, (group[i],))} for i, part in enumerate(parts)]
        self._run("gather", algorithm, group, held, tags, place)
        self._record(
            "gather", group, [sum(p.size for p in parts) * self._element(parts[0], tags)] * len(group), tags, tags.get("label", "")
        )
        return np.concatenate([held[place][i,].array for i in range(len(group))])

    def all_to_all(self, pieces: Sequence[Sequence[Array]], group: Sequence[int], **tags: Unpack[Tags]) -> list[list[Array]]:
        """``pieces[i][j]`` goes from member i to member j; result ``[j][i]`` is what member j got from member i. Pairwise, any sizes."""
        self._members(group, pieces)
        if any(len(row) != len(group) for row in pieces):
            raise ValueError(f"all_to_all in a group of {len(group)} needs one piece for each member from each member")
        held: Held = [{(i, j): Piece(piece, (group[i],)) for j, piece in enumerate(row)} for i, row in enumerate(pieces)]
        self._run("all_to_all", "pairwise", group, held, tags)
        sizes = [sum(p.size for p in row) * self._element(row[0], tags) for row in pieces]
        self._record("all_to_all", group, sizes, tags, tags.get("label", ""))
        return [[held[j][i, j].array.copy() for i in range(len(group))] for j in range(len(group))]

    def run(self, rounds: Sequence[Round], group: Sequence[int], held: Held, **tags: Unpack[Tags]) -> None:
        """Carry out a schedule: ``held[i]`` is what member i holds, and is changed. Each round is one logical step."""
        watch, about = tags.get("watch"), tags.get("label", "")
        for transfers in rounds:
            with self.step(group) as sent:
                under_way = [[held[t.source][key] for key in t.keys] for t in transfers]
                arrived = []
                for t, pieces in zip(transfers, under_way, strict=True):
                    label = f"{about}: {schedules.label(t, pieces)}" if about else schedules.label(t, pieces)
                    arrived.append(self._hand_over(group[t.source], group[t.target], pieces, label, tags))
                    if not t.keep:
                        for key in t.keys:
                            del held[t.source][key]
            for t, pieces in zip(transfers, arrived, strict=True):
                for key, piece in zip(t.keys, pieces, strict=True):
                    held[t.target][key] = held[t.target][key].plus(piece) if t.add else piece
            if watch is not None:
                watch(held, sent)

    def _run(self, kind: str, algorithm: str, group: Sequence[int], held: Held, tags: Tags, root: int = 0) -> None:
        self.run(schedules.schedule(kind, algorithm, len(group), root), group, held, **tags)

    def _hand_over(self, source: int, target: int, pieces: Sequence[Piece], label: str, tags: Tags) -> list[Piece]:
        """Several pieces in one message."""
        size = sum(piece.array.size * self._element(piece.array, tags) for piece in pieces)
        assert self._open is not None
        self._open.append(Message(source, target, label, size))
        self.sent_bytes[source] += size
        self.received_bytes[target] += size
        return [Piece(piece.array.copy(), piece.ranks) for piece in pieces]

    def _element(self, array: Array, tags: SendTags) -> int:
        given = tags.get("element_bytes", self.element_bytes)
        return array.itemsize if given is None else given

    def _record(self, kind: str, ranks: Sequence[int], full_bytes: Sequence[int], tags: SendTags, label: str) -> None:
        axis = tags.get("axis", "")
        if not axis or (len(ranks) == 1 and kind not in ("send", "recv")):
            return
        purpose, phase = tags.get("purpose", "unknown"), tags.get("phase", "")
        for rank, size in zip(ranks, full_bytes, strict=True):
            self._calls[rank].append(Call(kind=kind, axis=axis, purpose=purpose, full_bytes=int(size), phase=phase, label=label))

    def _members(self, group: Sequence[int], given: Sequence[object] | None) -> None:
        self._check(group)
        if not group or len(set(group)) != len(group):
            raise ValueError(f"{list(group)} is no process group: it is empty, or names a rank twice")
        if given is not None and len(given) != len(group):
            raise ValueError(f"{len(given)} inputs for a group of {len(group)} ranks")

    def _check(self, ranks: Sequence[int]) -> None:
        wrong = [rank for rank in ranks if not 0 <= rank < self.world]
        if wrong:
            raise ValueError(f"rank {wrong[0]} does not exist among {self.world}")

    @staticmethod
    def _place(root: int, group: Sequence[int]) -> int:
        if root not in group:
            raise ValueError(f"root {root} is not in the group {list(group)}")
        return list(group).index(root)


def even_splits(length: int, pieces: int) -> list[int]:
    """``length`` cut into ``pieces`` that differ by at most 1, the longer ones first: 10 in 4 is 3, 3, 2, 2."""
    whole, more = divmod(length, pieces)
    return [whole + (i < more) for i in range(pieces)]


def _cut(array: Array, splits: Sequence[int] | None, pieces: int, dim: int) -> list[Array]:
    lengths = even_splits(array.shape[dim], pieces) if splits is None else list(splits)
    if len(lengths) != pieces or min(lengths) < 0 or sum(lengths) != array.shape[dim]:
        raise ValueError(f"splits {lengths} do not cut {array.shape[dim]} elements into {pieces} chunks")
    return np.split(array, np.cumsum(lengths)[:-1].tolist(), axis=dim)
