"""The followed rank's job: which axes share what, and the collectives of one micro-batch, moved with arrays of the model's shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tracekit.collectives.purpose import role_of_axis
from tracekit.mesh.mesh import Axis, coordinate, groups_of_axis
from tracekit.simulate.arguments import bytes_of_element, option
from tracekit.simulate.virtual import Network, Tags, even_splits

#: Bytes of the number of tokens that a rank sends to each expert.
COUNT_BYTES = 8


@dataclass(frozen=True)
class Arguments:
    """What can be chosen."""

    mesh: str = option("pp=2,dp_shard=2,tp=2", "Axes and sizes, outermost first: pp, dp_replicate, dp_shard, ep, cp, tp.")
    rank: int = option(0, "The rank whose traffic is shown.", least=0)
    gpus_per_node: int = option(8, "Consecutive ranks on one node.", most=4096)
    layers: int = option(4, "Layers L of the model.", most=128)
    hidden: int = option(32, "Hidden size h.", most=4096)
    ffn: int = option(0, "Hidden size of the MLP or of an expert; 0: 4 h.", least=0, most=32768)
    vocabulary: int = option(128, "Tokens of the vocabulary; embedding on the first stage, head on the last.", most=100_000)
    sequence: int = option(32, "Tokens s of a sequence.", most=65536)
    micro_batch_size: int = option(1, "Sequences b of a micro-batch.", most=1024)
    experts: int = option(0, "Experts of a layer; 0: a plain MLP, or where there is an ep axis as many as it has ranks.", least=0, most=512)
    top_k: int = option(2, "Experts of a token.", most=64)
    sequence_parallel: bool = option(False, "Between its linears tp keeps shares of the tokens: all-gather and reduce-scatter.")
    reshard_after_forward: bool = option(True, "Gathered parameters are freed after forward, and gathered again in backward.")
    element_bytes: int = bytes_of_element("of parameters and activations")
    gradient_bytes: int = option(4, "Bytes of one element of a gradient that is reduced.", choices=(2, 4, 8))


class Sent(NamedTuple):
    """One collective of the followed rank. ``often``: every micro-batch, or once a step."""

    axis: str
    kind: str
    purpose: str
    phase: str
    label: str
    full_bytes: int
    sent_bytes: int
    often: str


EVERY, ONCE = "every micro-batch", "once a step"


class Job:
    """The ranks of one stage at work side by side; what the followed rank sends is kept in ``sent``."""

    def __init__(self, arguments: Arguments, axes: Sequence[Axis]) -> None:
        self.a, self.axes = arguments, axes
        self.world = math.prod(axis.size for axis in axes)
        self.network = Network(self.world, arguments.element_bytes)
        self.sent: list[Sent] = []
        self.wrong = 0
        self.stage_axis = next((axis for axis in axes if role_of_axis(axis.name) == "pipeline" and axis.size > 1), None)
        self.stages = self.stage_axis.size if self.stage_axis is not None else 1
        self.stage = coordinate(arguments.rank, axes)[list(axes).index(self.stage_axis)] if self.stage_axis is not None else 0
        self.experts = arguments.experts or (self.size("expert") if self.size("expert") > 1 else 0)
        self.sharding = self.names("sharding", "context", "expert") if self.names("sharding") else []
        self.local_tokens = arguments.sequence * arguments.micro_batch_size // self.size("context")

    def names(self, *roles: str, least: int = 2) -> list[str]:
        """Axes of these roles that have more than one rank, in the mesh's order."""
        return [axis.name for axis in self.axes if role_of_axis(axis.name) in roles and axis.size >= least]

    def size(self, *roles: str) -> int:
        """Ranks along all axes of these roles together."""
        return math.prod(axis.size for axis in self.axes if role_of_axis(axis.name) in roles)

    @property
    def own_layers(self) -> int:
        """Layers of the followed rank's stage."""
        return even_splits(self.a.layers, self.stages)[self.stage]

    def units(self) -> list[tuple[str, int, bool]]:
        """(name, elements on one tensor rank, whether it is of experts alone) of what is gathered together on this stage, in order."""
        h, ffn, tp = self.a.hidden, self.a.ffn or 4 * self.a.hidden, self.size("tensor")
        ends = (self.a.vocabulary * h if self.stage == 0 else 0) + (self.a.vocabulary * h + h if self.stage == self.stages - 1 else 0)
        found = [("root", ends, False)] if ends else []
        for layer in range(self.own_layers):
            mlp = 2 * h * ffn // tp
            if self.experts:
                found.append((f"layer {layer + 1}", 4 * h * h // tp + 2 * h + h * self.experts, False))
                found.append((f"layer {layer + 1}, experts", self.experts // self.size("expert") * mlp, True))
            else:
                found.append((f"layer {layer + 1}", 4 * h * h // tp + 2 * h + mlp, False))
        return found

    def micro_batch(self) -> None:
        """Forward and backward of one micro-batch; the gradients of a unit are reduced behind its backward, the root's last."""
        units, reshard = self.units(), self.a.reshard_after_forward
        layers = [f"layer {layer + 1}" for layer in range(self.own_layers)]
        of_layer = {layer: [unit for unit in units if unit[0].split(",")[0] == layer] for layer in ["root", *layers]}
        for layer in ["root", *layers]:
            for unit in of_layer[layer]:
                self.gather(*unit, "forward", EVERY if reshard else ONCE)
            if layer != "root":
                self._layer(layer, "forward")
        self._to_stage(1, "forward", "activation")
        for layer in [*reversed(layers), "root"]:
            for unit in of_layer[layer]:
                if reshard and layer != "root":
                    self.gather(*unit, "backward", EVERY)
            if layer != "root":
                self._layer(layer, "backward")
            for unit in reversed(of_layer[layer]):
                self.reduce(*unit)
        self._to_stage(-1, "backward", "gradient of an activation")

    def _layer(self, layer: str, phase: str) -> None:
        for block in ("attention", "mlp") if phase == "forward" else ("mlp", "attention"):
            if block == "attention":
                self._context(layer, phase)
            elif self.experts:
                self._experts(layer, phase)
            self._tensor(f"{layer}, {block}", phase)

    def _tensor(self, label: str, phase: str) -> None:
        """The partial sums of a block; with sequence parallel its input is gathered before it as well."""
        elements, tp = self.local_tokens * self.a.hidden, self.names("tensor")
        if not self.a.sequence_parallel:
            self.move("all_reduce", tp, elements, "tensor_parallel", phase, label)
            return
        self.move("all_gather", tp, elements, "sequence_parallel", phase, label)
        self.move("reduce_scatter", tp, elements, "sequence_parallel", phase, label)

    def _context(self, layer: str, phase: str) -> None:
        elements = 2 * self.a.sequence * self.a.micro_batch_size * self.a.hidden // self.size("tensor")
        self.move("all_gather", self.names("context"), elements, "context_parallel", phase, f"{layer}, keys and values")
        if phase == "backward":
            label = f"{layer}, gradients of keys and values"
            self.move("reduce_scatter", self.names("context"), elements, "context_parallel", phase, label)

    def _experts(self, layer: str, phase: str) -> None:
        axis, elements = self.names("expert"), self.a.top_k * self.local_tokens * self.a.hidden
        there, back = ("expert_dispatch", "expert_combine") if phase == "forward" else ("expert_combine", "expert_dispatch")
        if phase == "forward":
            self.move("all_to_all", axis, self.experts, there, phase, f"{layer}, counts", width=COUNT_BYTES)
        self.move("all_to_all", axis, elements, there, phase, f"{layer}, tokens to experts")
        self.move("all_to_all", axis, elements, back, phase, f"{layer}, tokens back")

    def shard_axes(self, expert: bool) -> list[str]:
        """Axes over which a unit's parameters are sharded; experts not over their own axis."""
        return [name for name in self.sharding if not (expert and role_of_axis(name) == "expert")]

    def gather(self, name: str, elements: int, expert: bool, phase: str, often: str) -> None:
        """All-gather a unit's parameters over the axes that share them."""
        self.move("all_gather", self.shard_axes(expert), elements, "parameter_gather", phase, name, often=often)

    def copy_axes(self, expert: bool) -> list[str]:
        """Axes whose ranks have copies of a unit's shards."""
        return self.names("data") if self.sharding else self.names("data", "context", *(() if expert else ("expert",)))

    def ranks_of(self, names: Sequence[str]) -> int:
        """Ranks of a group over these axes."""
        return math.prod(axis.size for axis in self.axes if axis.name in names)

    def reduce(self, name: str, elements: int, expert: bool) -> None:
        """Gradients of a unit: scattered over the axes that share it, summed over those that have copies."""
        shared, width = self.shard_axes(expert), self.a.gradient_bytes
        self.move("reduce_scatter", shared, elements, "gradient_scatter", "backward", name, width, ONCE)
        shard = -(-elements // self.ranks_of(shared))
        self.move("all_reduce", self.copy_axes(expert), shard, "gradient_sync", "backward", name, width, ONCE)

    @property
    def boundary_bytes(self) -> int:
        """Bytes of the activation between two stages on one rank."""
        shares = self.size("tensor") if self.a.sequence_parallel else 1
        return self.local_tokens * self.a.hidden // shares * self.a.element_bytes

    def _to_stage(self, step: int, phase: str, what: str) -> None:
        """Send to the next stage, or to the one before."""
        if self.stage_axis is None or not 0 <= self.stage + step < self.stages:
            return
        name, rank = self.stage_axis.name, self.a.rank
        group = next(g for g in groups_of_axis(self.axes, [name]) if rank in g)
        array, before = np.ones(self.boundary_bytes // self.a.element_bytes), int(self.network.sent_bytes[rank])
        self.network.send(rank, group[self.stage + step], array, what, axis=name, purpose="pipeline", phase=phase)
        sent = int(self.network.sent_bytes[rank]) - before
        self.sent.append(Sent(name, "send", "pipeline", phase, what, self.boundary_bytes, sent, EVERY))

    def move(
        self,
        kind: str,
        axes: Sequence[str],
        elements: int,
        purpose: str,
        phase: str,
        label: str,
        width: int | None = None,
        often: str = EVERY,
    ) -> None:
        """One collective over (joined) axes in the followed rank's group: arrays of that many elements in full."""
        group = next((g for g in groups_of_axis(self.axes, axes) if self.a.rank in g), ()) if axes else ()
        x, name, bytes_each = len(group), "_".join(axes), width or self.a.element_bytes
        if x < 2:
            return
        before = int(self.network.sent_bytes[self.a.rank])
        tags: Tags = {"axis": name, "purpose": purpose, "phase": phase, "label": label, "element_bytes": bytes_each}
        padded = -(-elements // x) * x
        if kind == "all_gather":
            got = self.network.all_gather([np.ones(padded // x)] * x, group, **tags)
            self.wrong += sum(len(one) != padded for one in got)
        elif kind == "all_to_all":
            self.network.all_to_all([[np.ones(n) for n in even_splits(elements, x)]] * x, group, **tags)
            padded = elements
        else:
            inputs = [np.ones(padded)] * x
            reduce = kind == "all_reduce"
            sums = self.network.all_reduce(inputs, group, **tags) if reduce else self.network.reduce_scatter(inputs, group, **tags)
            self.wrong += sum(int((one != x).sum()) for one in sums)
        sent = int(self.network.sent_bytes[self.a.rank]) - before
        self.sent.append(Sent(name, kind, purpose, phase, label, padded * bytes_each, sent, often))
