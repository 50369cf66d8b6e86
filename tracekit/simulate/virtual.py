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
from tracekit.simulate.schedules import Chunk, Key, Round

Array = npt.NDArray[np.generic]
Held = list[dict[Key, Chunk]]
#: Called after each step of a collective with what every member (in group order) holds, and the messages of the step.
Watch = Callable[[Sequence[Mapping[Key, Chunk]], Sequence[Message]], None]


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
        held: Held = [{(i,): Chunk(part, (group[i],))} for i, part in enumerate(parts)]
        self._run("all_gather", algorithm, group, held, tags, [parts] * len(group))
        return [np.concatenate([mine[i,].array for i in range(len(group))], axis=dim) for mine in held]

    def reduce_scatter(
        self, inputs: Sequence[Array], group: Sequence[int], splits: Sequence[int] | None = None, dim: int = 0, **tags: Unpack[Tags]
    ) -> list[Array]:
        """Member i gets the sum of everybody's i-th chunk along ``dim``, by a ring.

        ``splits``: lengths of the chunks, one a member; None cuts as evenly as possible, longer chunks first.
        """
        self._members(group, inputs)
        held = _chunks(inputs, group, splits, len(group), dim)
        self._run("reduce_scatter", "ring", group, held, tags, [[array] for array in inputs])
        return [mine[i,].array.copy() for i, mine in enumerate(held)]

    def all_reduce(
        self, inputs: Sequence[Array], group: Sequence[int], algorithm: str = "ring", largest: bool = False, **tags: Unpack[Tags]
    ) -> list[Array]:
        """Every member gets the sum (``largest``: the maximum, element by element).

        ``ring`` (reduce-scatter, then all-gather), ``tree`` or ``star`` (reduce, then broadcast).
        """
        self._members(group, inputs)
        count = len(group) if algorithm == "ring" else 1
        held = _chunks([array.reshape(-1) for array in inputs], group, None, count, 0)
        self._run("all_reduce", algorithm, group, held, tags, [[array] for array in inputs], largest=largest)
        return [np.concatenate([mine[c,].array for c in range(count)]).reshape(inputs[0].shape) for mine in held]

    def broadcast(self, array: Array, group: Sequence[int], root: int, algorithm: str = "tree", **tags: Unpack[Tags]) -> list[Array]:
        """Every member gets ``array`` of rank ``root``. ``tree`` or ``star``."""
        self._members(group, None)
        held: Held = [{(0,): Chunk(array, (root,))} if rank == root else {} for rank in group]
        self._run("broadcast", algorithm, group, held, tags, [[array]] * len(group), self._position(root, group))
        return [mine[0,].array.copy() for mine in held]

    def reduce(self, inputs: Sequence[Array], group: Sequence[int], root: int, algorithm: str = "tree", **tags: Unpack[Tags]) -> Array:
        """Rank ``root`` gets the sum. ``tree`` or ``star``."""
        self._members(group, inputs)
        held: Held = [{(0,): Chunk(array, (rank,))} for rank, array in zip(group, inputs, strict=True)]
        at = self._position(root, group)
        self._run("reduce", algorithm, group, held, tags, [[array] for array in inputs], at)
        return held[at][0,].array.copy()

    def scatter(
        self, pieces: Sequence[Array], group: Sequence[int], root: int, algorithm: str = "star", **tags: Unpack[Tags]
    ) -> list[Array]:
        """Member i gets ``pieces[i]`` of rank ``root``. ``star`` or ``tree``."""
        self._members(group, pieces)
        at = self._position(root, group)
        held: Held = [{} for _ in group]
        held[at] = {(i,): Chunk(piece, (root,)) for i, piece in enumerate(pieces)}
        self._run("scatter", algorithm, group, held, tags, [pieces] * len(group), at)
        return [mine[i,].array.copy() for i, mine in enumerate(held)]

    def gather(self, parts: Sequence[Array], group: Sequence[int], root: int, algorithm: str = "star", **tags: Unpack[Tags]) -> Array:
        """Rank ``root`` gets all parts, concatenated along their first dimension in group order. ``star`` or ``tree``."""
        self._members(group, parts)
        at = self._position(root, group)
        held: Held = [{(i,): Chunk(part, (group[i],))} for i, part in enumerate(parts)]
        self._run("gather", algorithm, group, held, tags, [parts] * len(group), at)
        return np.concatenate([held[at][i,].array for i in range(len(group))])

    def all_to_all(self, pieces: Sequence[Sequence[Array]], group: Sequence[int], **tags: Unpack[Tags]) -> list[list[Array]]:
        """``pieces[i][j]`` goes from member i to member j; result ``[j][i]`` is what member j got from member i. Pairwise, any sizes."""
        self._members(group, pieces)
        if any(len(row) != len(group) for row in pieces):
            raise ValueError(f"all_to_all in a group of {len(group)} needs one piece for each member from each member")
        held: Held = [{(i, j): Chunk(piece, (group[i],)) for j, piece in enumerate(row)} for i, row in enumerate(pieces)]
        self._run("all_to_all", "pairwise", group, held, tags, pieces)
        return [[held[j][i, j].array.copy() for i in range(len(group))] for j in range(len(group))]

    def run(self, rounds: Sequence[Round], group: Sequence[int], held: Held, largest: bool = False, **tags: Unpack[Tags]) -> None:
        """Carry out a schedule: ``held[i]`` is what member i holds, and is changed. Each round is one logical step.

        ``largest``: where chunks meet, their maximum is kept in the place of their sum.
        """
        watch, about = tags.get("watch"), tags.get("label", "")
        for transfers in rounds:
            with self.step(group) as sent:
                under_way = [[held[t.source][key] for key in t.keys] for t in transfers]
                arrived = []
                for t, chunks in zip(transfers, under_way, strict=True):
                    label = f"{about}: {schedules.label(t, chunks)}" if about else schedules.label(t, chunks)
                    arrived.append(self._hand_over(group[t.source], group[t.target], chunks, label, tags))
                    if not t.keep:
                        for key in t.keys:
                            del held[t.source][key]
            for t, chunks in zip(transfers, arrived, strict=True):
                for key, chunk in zip(t.keys, chunks, strict=True):
                    held[t.target][key] = held[t.target][key].plus(chunk, largest) if t.add else chunk
            if watch is not None:
                watch(held, sent)

    def _run(
        self,
        kind: str,
        algorithm: str,
        group: Sequence[int],
        held: Held,
        tags: Tags,
        full: Sequence[Sequence[Array]],
        root: int = 0,
        largest: bool = False,
    ) -> None:
        """Carry out a collective and note it; ``full[i]`` are the arrays that make the full tensor of member i."""
        self.run(schedules.schedule(kind, algorithm, len(group), root), group, held, largest, **tags)
        sizes = [sum(array.size for array in arrays) * self._element(arrays[0], tags) for arrays in full]
        self._record(kind, group, sizes, tags, tags.get("label", ""))

    def _hand_over(self, source: int, target: int, chunks: Sequence[Chunk], label: str, tags: Tags) -> list[Chunk]:
        """Several chunks in one message."""
        size = sum(chunk.array.size * self._element(chunk.array, tags) for chunk in chunks)
        assert self._open is not None
        self._open.append(Message(source, target, label, size))
        self.sent_bytes[source] += size
        self.received_bytes[target] += size
        return [Chunk(chunk.array.copy(), chunk.ranks) for chunk in chunks]

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
    def _position(root: int, group: Sequence[int]) -> int:
        if root not in group:
            raise ValueError(f"root {root} is not in the group {list(group)}")
        return list(group).index(root)


def even_splits(length: int, pieces: int) -> list[int]:
    """``length`` cut into ``pieces`` that differ by at most 1, the longer ones first: 10 in 4 is 3, 3, 2, 2."""
    whole, more = divmod(length, pieces)
    return [whole + (i < more) for i in range(pieces)]


def _chunks(arrays: Sequence[Array], group: Sequence[int], splits: Sequence[int] | None, count: int, dim: int) -> Held:
    """Each member's array cut into ``count`` chunks along ``dim``."""
    held: Held = []
    for rank, array in zip(group, arrays, strict=True):
        lengths = even_splits(array.shape[dim], count) if splits is None else list(splits)
        if len(lengths) != count or min(lengths) < 0 or sum(lengths) != array.shape[dim]:
            raise ValueError(f"splits {lengths} do not cut {array.shape[dim]} elements into {count} chunks")
        cut = np.split(array, np.cumsum(lengths)[:-1].tolist(), axis=dim)
        held.append({(c,): Chunk(chunk, (rank,)) for c, chunk in enumerate(cut)})
    return held
