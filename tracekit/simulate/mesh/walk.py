"""One micro-batch's walk over a mesh: which groups it meets in which order, with its activation moved through every one of them.

Every stage is one layer whose weight is as large as needed to show who holds what: its shards are gathered, the activation is exchanged
over context, tensor and expert groups, and sent on. All ranks of a stage do the same at the same time, each with the micro-batch of its own
place on the data axes. What is exchanged comes back as it was, so that the activation that arrives can be compared with the one that set
out. The order of a layer: gather parameters, context (keys and values), tensor (partial sums), experts (there and back).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pandas as pd

from tracekit.collectives.purpose import role_of_axis
from tracekit.findings import Table
from tracekit.mesh.mesh import Axis, coordinate, groups_of_axis
from tracekit.simulate.experiment import Call, Cell, Check, Message, Moment
from tracekit.simulate.virtual import Array, Network, even_splits

#: Ranks of the largest world that is walked.
MOST_WALKED = 128
#: Ranks whose groups move together with the followed micro-batch are named up to so many groups.
_NAMED = 4


@dataclass(frozen=True)
class WalkSizes:
    """Tokens of a micro-batch, elements of a token, bytes of an element."""

    tokens: int
    hidden: int
    element_bytes: int


@dataclass(frozen=True)
class Walk:
    """What was seen on the way."""

    table: Table
    moments: Sequence[Moment]
    checks: Sequence[Check]
    calls: Sequence[Call]


def walk(axes: Sequence[Axis], rank: int, gpus_per_node: int, sizes: WalkSizes) -> Walk:
    """Follow the micro-batch of ``rank``: forward through all stages, and backward again."""
    walker = _Walker(axes, rank, gpus_per_node, sizes)
    walker.look("before", "The micro-batch lies on the first stage, each weight in shards.")
    stages = walker.stages()
    for number, stage in enumerate(stages):
        walker.forward(number, stage)
        if number + 1 < len(stages):
            walker.hand_over(number, stage, stages[number + 1], "forward", "activation")
    for number, stage in reversed(list(enumerate(stages))):
        walker.backward(number, stage)
        if number > 0:
            walker.hand_over(number, stage, stages[number - 1], "backward", "gradient")
    return walker.finish()


@dataclass
class _Walker:
    axes: Sequence[Axis]
    rank: int
    gpus_per_node: int
    sizes: WalkSizes
    rows: list[tuple[object, ...]] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world = int(np.prod([axis.size for axis in self.axes]))
        self.network = Network(self.world, self.sizes.element_bytes)
        self.places = [coordinate(rank, self.axes) for rank in range(self.world)]
        self.start = {rank: self._activation(rank) for rank in self.stages()[0]}
        self.activation: dict[int, Array] = dict(self.start)
        self.gathered: dict[int, int] = {}
        self.gradient: dict[int, int] = {}
        self.seen_messages = 0
        self.followed = [r for r in range(self.world) if self._data_place(r) == self._data_place(self.rank)]

    def stages(self) -> list[list[int]]:
        """Ranks of each stage; stage i holds place i of the (first) pipeline axis."""
        pipeline = self._numbers("pipeline")
        if not pipeline:
            return [list(range(self.world))]
        return [[r for r in range(self.world) if coordinate(r, self.axes)[pipeline[0]] == i] for i in range(self.axes[pipeline[0]].size)]

    def forward(self, number: int, stage: Sequence[int]) -> None:
        """One layer forward."""
        self._gather_parameters(number, stage, "forward")
        self._context(number, stage, "forward")
        self._tensor(number, stage, "forward")
        self._experts(number, stage, "forward")
        self.gathered.clear()

    def backward(self, number: int, stage: Sequence[int]) -> None:
        """The same layer backward, from its end, then its gradients."""
        self._gather_parameters(number, stage, "backward")
        self._experts(number, stage, "backward")
        self._tensor(number, stage, "backward")
        self._context(number, stage, "backward")
        self._reduce_gradients(number, stage)
        self.gathered.clear()

    def hand_over(self, number: int, stage: Sequence[int], to: Sequence[int], phase: str, what: str) -> None:
        """Every rank of a stage sends to the one at the same place of the next stage."""
        axis = self.axes[self._numbers("pipeline")[0]].name
        with self.network.step():
            moved = {
                target: self.network.send(source, target, self.activation[source], what, axis=axis, purpose="pipeline", phase=phase)
                for source, target in zip(stage, to, strict=True)
            }
        self.activation = moved
        pairs = [(source, target) for source, target in zip(stage, to, strict=True) if source in self.followed]
        self._note(phase, number, "send", axis, "pipeline", pairs)

    def look(self, title: str, text: str) -> None:
        """A picture of this moment, with the messages since the last one."""
        new = self.network.messages[self.seen_messages :]
        self.seen_messages = len(self.network.messages)
        messages = tuple(Message(m.source, m.target, m.label, m.bytes) for _, m in new)
        step = self.network.steps if messages else None
        self.moments.append(Moment(title, text, [self._cells(rank) for rank in range(self.world)], messages, step))

    def finish(self) -> Walk:
        """Compare what came back, and sum up."""
        differ = sum(int((self.activation[rank] != self.start[rank]).sum()) for rank in self.start)
        stages, per_hop = len(self.stages()), self.world // len(self.stages())
        hops = sum(call.kind == "send" for rank in range(self.world) for call in self.network.calls(rank))
        checks = [
            Check(
                "walk: elements that came back otherwise", differ, 0, "elements", "what is exchanged in every group comes back as it was"
            ),
            Check("walk: sends between stages", hops, 2 * (stages - 1) * per_hop, "sends", "2 (p-1) a rank of a stage"),
        ]
        heads = {
            "phase": "phase",
            "stage": "stage",
            "kind": "collective",
            "axis": "axis",
            "purpose": "purpose",
            "groups": "groups that hold a part of the micro-batch",
            "crosses": "crosses nodes",
        }
        frame = pd.DataFrame(self.rows, columns=list(heads))
        note = f"The micro-batch of rank {self.rank} lies on ranks {self.followed}; the others do the same with theirs."
        table = Table("Walk of one micro-batch", frame, heads, note, preview=max(1, min(40, len(frame))))
        return Walk(table, self.moments, checks, self.network.calls(self.rank))

    def _numbers(self, *roles: str) -> list[int]:
        return [n for n, axis in enumerate(self.axes) if role_of_axis(axis.name) in roles and axis.size > 1]

    def _data_place(self, rank: int) -> tuple[int, ...]:
        """Places on the axes over which micro-batches differ: data, sharding, experts, and axes of which nothing is known."""
        same = self._numbers("pipeline", "tensor", "context")
        return tuple(place for number, place in enumerate(self.places[rank]) if number not in same)

    def _part(self, rank: int) -> int:
        """Tokens of the micro-batch on one rank: its share over the context axes."""
        tokens = self.sizes.tokens
        for number in self._numbers("context"):
            tokens = even_splits(tokens, self.axes[number].size)[self.places[rank][number]]
        return tokens

    def _activation(self, rank: int) -> Array:
        """Whole numbers that tell which micro-batch and which tokens they belong to; equal on the ranks of a tensor group."""
        tokens, context = self._part(rank), [self.places[rank][n] for n in self._numbers("context")]
        seed = sum(place * 31**power for power, place in enumerate([*self._data_place(rank), *context])) * 1000
        values: Array = seed + np.arange(tokens * self.sizes.hidden, dtype=np.int64)
        return values.reshape(tokens, self.sizes.hidden)

    def _each(self, stage: Sequence[int], number: int) -> list[tuple[int, ...]]:
        inside = set(stage)
        return [group for group in groups_of_axis(self.axes, [self.axes[number].name]) if inside.issuperset(group)]

    def _gather_parameters(self, number: int, stage: Sequence[int], phase: str) -> None:
        for n in self._numbers("sharding"):
            axis = self.axes[n]
            for group in self._each(stage, n):
                shards = [np.full(size, rank) for rank, size in zip(group, even_splits(self._weight(), axis.size), strict=True)]
                whole = self.network.all_gather(shards, group, axis=axis.name, purpose="parameter_gather", phase=phase, label="weight")
                self.gathered.update({rank: got.size for rank, got in zip(group, whole, strict=True)})
            self._note(phase, number, "all_gather", axis.name, "parameter_gather", self._met(stage, n))

    def _context(self, number: int, stage: Sequence[int], phase: str) -> None:
        """Keys and values of all tokens forward; their gradients summed and shared out backward. The activation stays as it is."""
        for n in self._numbers("context"):
            axis = self.axes[n]
            for group in self._each(stage, n):
                keys = [self.activation[rank] for rank in group]
                if phase == "forward":
                    self.network.all_gather(keys, group, axis=axis.name, purpose="context_parallel", phase=phase, label="keys, values")
                else:
                    whole = [np.concatenate(keys)] * len(group)
                    splits = [len(part) for part in keys]
                    label = "gradients of keys, values"
                    self.network.reduce_scatter(whole, group, splits, axis=axis.name, purpose="context_parallel", phase=phase, label=label)
            self._note(
                phase, number, "all_gather" if phase == "forward" else "reduce_scatter", axis.name, "context_parallel", self._met(stage, n)
            )

    def _tensor(self, number: int, stage: Sequence[int], phase: str) -> None:
        """Partial sums that add up to the activation: each rank has some of its columns, and 0 elsewhere."""
        for n in self._numbers("tensor"):
            axis = self.axes[n]
            for group in self._each(stage, n):
                partial = []
                for place, rank in enumerate(group):
                    part = np.zeros_like(self.activation[rank])
                    part[:, place :: axis.size] = self.activation[rank][:, place :: axis.size]
                    partial.append(part)
                total = self.network.all_reduce(
                    partial, group, axis=axis.name, purpose="tensor_parallel", phase=phase, label="partial sums"
                )
                self.activation.update(dict(zip(group, total, strict=True)))
            self._note(phase, number, "all_reduce", axis.name, "tensor_parallel", self._met(stage, n))

    def _experts(self, number: int, stage: Sequence[int], phase: str) -> None:
        """Token k goes to expert rank k mod ep, and comes back to its place."""
        for n in self._numbers("expert"):
            axis = self.axes[n]
            for group in self._each(stage, n):
                pieces = [[self.activation[rank][place :: axis.size] for place in range(axis.size)] for rank in group]
                there, back = ("expert_dispatch", "expert_combine") if phase == "forward" else ("expert_combine", "expert_dispatch")
                out = self.network.all_to_all(pieces, group, axis=axis.name, purpose=there, phase=phase, label="tokens")
                home = self.network.all_to_all(out, group, axis=axis.name, purpose=back, phase=phase, label="tokens")
                for rank, parts in zip(group, home, strict=True):
                    whole = np.empty_like(self.activation[rank])
                    for place, part in enumerate(parts):
                        whole[place :: axis.size] = part
                    self.activation[rank] = whole
            self._note(phase, number, "all_to_all, twice", axis.name, "expert_dispatch, expert_combine", self._met(stage, n))

    def _reduce_gradients(self, number: int, stage: Sequence[int]) -> None:
        self.gradient.update(dict.fromkeys(stage, self._weight()))
        for n in self._numbers("sharding"):
            axis = self.axes[n]
            for group in self._each(stage, n):
                full = [np.ones(self.gradient[rank], np.int64) for rank in group]
                own = self.network.reduce_scatter(
                    full, group, axis=axis.name, purpose="gradient_scatter", phase="backward", label="gradient"
                )
                self.gradient.update({rank: got.size for rank, got in zip(group, own, strict=True)})
            self._note("backward", number, "reduce_scatter", axis.name, "gradient_scatter", self._met(stage, n))
        for n in self._numbers("data"):
            axis = self.axes[n]
            for group in self._each(stage, n):
                full = [np.ones(self.gradient[rank], np.int64) for rank in group]
                self.network.all_reduce(full, group, axis=axis.name, purpose="gradient_sync", phase="backward", label="gradient")
            self._note("backward", number, "all_reduce", axis.name, "gradient_sync", self._met(stage, n))

    def _weight(self) -> int:
        """Elements of one stage's weight on a tensor rank, before it is sharded."""
        return self.sizes.hidden * self.sizes.hidden

    def _met(self, stage: Sequence[int], number: int) -> list[tuple[int, ...]]:
        return [group for group in self._each(stage, number) if set(group) & set(self.followed)]

    def _note(self, phase: str, stage: int, kind: str, axis: str, purpose: str, groups: Sequence[tuple[int, ...]]) -> None:
        """A row of the table, and a picture."""
        crosses = any(a // self.gpus_per_node != b // self.gpus_per_node for group in groups for a, b in pairwise(group))
        arrow: Callable[[tuple[int, ...]], str] = (lambda g: f"{g[0]} -> {g[1]}") if kind == "send" else (lambda g: str(list(g)))
        named = ", ".join(arrow(group) for group in groups[:_NAMED]) + (f", ... ({len(groups)} in all)" if len(groups) > _NAMED else "")
        self.rows.append((phase, stage, kind, axis, purpose, named, crosses))
        text = f"Groups that hold a part of the followed micro-batch: {named}{'; across nodes' if crosses else ''}."
        self.look(f"{phase}, stage {stage}: {kind} along {axis} ({purpose.replace('_', ' ')})", text)

    def _cells(self, rank: int) -> list[Cell]:
        unit = self.sizes.element_bytes
        shard = self._weight()
        for n in self._numbers("sharding"):
            shard = even_splits(shard, self.axes[n].size)[self.places[rank][n]]
        sharded = bool(self._numbers("sharding"))
        cells = [Cell("weight shard" if sharded else "weight", "parameter", shard * unit)]
        if rank in self.gathered:
            cells.append(Cell("gathered weight", "gathered_parameter", self.gathered[rank] * unit))
        if rank in self.gradient:
            cells.append(Cell("gradient", "gradient", self.gradient[rank] * unit))
        if rank in self.activation:
            followed = rank in self.followed
            cells.append(
                Cell(
                    "micro-batch" if followed else "another micro-batch",
                    "activation" if followed else "buffer",
                    int(self.activation[rank].size) * unit,
                    f"{len(self.activation[rank])} tokens",
                )
            )
        return cells
