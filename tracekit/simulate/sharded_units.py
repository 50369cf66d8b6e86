"""What happens to one unit of sharded parameters: all-gather, free, reduce-scatter of its gradients, update of its shards.

``ShardedUnits`` owns the shards, the optimizer state and what is gathered of all units on all ranks; the order of a step is decided
elsewhere (``sharded_training``). The two layouts differ in their copies (torch.distributed.fsdp, version 1 and 2):

    flat parameter      gathered in place; the parameters are views. Their gradients are joined to one flat gradient, which is the input of
                        the reduce-scatter unless it has to be padded or cast first
    single parameters   gathered into a buffer, copied out into a storage for each parameter; gradients are copied into a padded buffer.
                        Each buffer stays until the next one of its sort is in use
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tracekit.simulate.adam import Adam
from tracekit.simulate.holdings import Holdings, cells_of
from tracekit.simulate.shard_layout import Array, Piece, ShardLayout
from tracekit.simulate.virtual import Network

AXIS, REPLICA_AXIS = "dp_shard", "dp_replicate"
MOMENTS = ("exp_avg", "exp_avg_sq")
#: Of single parameters, so that copies and collectives can overlap: the buffer of the unit that forward copied out last, and the input of
#: the latest reduce-scatter.
SPENT_BUFFER, SCATTER_INPUT = "spent buffer", "scatter input"


@dataclass(frozen=True)
class Widths:
    """Bytes of one element.

    ``stored``: shards, sharded gradients, optimizer state; ``gathered``: gathered parameters and all that is computed with them;
    ``reduced``: what a reduce-scatter moves.
    """

    stored: int
    gathered: int
    reduced: int


class ShardedUnits:
    """Units by name, each with its layout. Gradients of a unit's parameters are held as ``grad NAME``, one array a parameter.

    Of R W ranks, W the world of the layouts, rank r keeps shard r mod W of replica r div W (hybrid sharding; R = 1 without).
    """

    def __init__(self, layouts: Sequence[ShardLayout], widths: Widths, holdings: Holdings) -> None:
        self.layouts = {layout.name: layout for layout in layouts}
        self.world, self.widths, self.holdings = holdings.world, widths, holdings
        self.shards = layouts[0].world
        self.groups = [range(first, first + self.shards) for first in range(0, self.world, self.shards)]
        self.replicas = [range(shard, self.world, self.shards) for shard in range(self.shards)]
        self.network = Network(self.world)

    def start(self, values: Mapping[str, Array]) -> None:
        """Every rank keeps its shards of ``values``, and Adam moments of zero for what the optimizer sees of them."""
        for unit, layout in self.layouts.items():
            for rank, shard in enumerate(layout.split(values) * len(self.groups)):
                self._put(rank, f"shard {unit}", shard.copy(), self._pieces(layout, rank), "parameter", self.widths.stored)
                pieces = layout.state_pieces(rank % self.shards)
                for moment in MOMENTS:
                    zeros = np.zeros(sum(piece.elements for piece in pieces))
                    self._put(rank, f"{moment} {unit}", zeros, pieces, "optimizer_state", self.widths.stored, f"{moment} ")

    def gathered(self, unit: str) -> bool:
        """Whether the unit's full parameters are there."""
        return self.holdings.has(0, f"gathered {unit}")

    def values(self, rank: int, unit: str) -> dict[str, Array]:
        """The full parameters that ``rank`` has gathered, as views."""
        return self.layouts[unit].views(self.holdings.get(rank, f"gathered {unit}"))

    def gather(self, unit: str, phase: str) -> None:
        """Make the unit's full parameters available, unless they are: all-gather, and copy out where they are no views."""
        self.fetch(unit, phase)
        if not self.gathered(unit):
            self._copy_out(unit, phase)

    def fetch(self, unit: str, phase: str) -> None:
        """All-gather the unit, unless it is there or under way. Single parameters wait in the buffer until ``gather``."""
        if self.gathered(unit) or self.holdings.has(0, f"buffer {unit}"):
            return
        layout, width = self.layouts[unit], self.widths.gathered
        if layout.flat and width != self.widths.stored:
            for rank, shard in enumerate(self._all(f"shard {unit}")):
                self._put(rank, f"cast {unit}", shard.copy(), self._pieces(layout, rank), "buffer", width, "cast ")
        before = len(self.network.messages)
        shards = self._all(f"shard {unit}")
        packed = [
            gathered
            for group in self.groups
            for gathered in self.network.all_gather(
                [shards[rank] for rank in group],
                group,
                axis=AXIS,
                purpose="parameter_gather",
                phase=phase,
                label=unit,
                element_bytes=width,
            )
        ]
        for rank in range(self.world):
            if layout.flat or self.shards == 1:  # one rank needs no buffer: its shards are copied
                stored = layout.arrange(_floats(packed[rank]))
                self._put(rank, f"gathered {unit}", stored, layout.gathered, "gathered_parameter", width, "full ")
            else:
                self._put(rank, f"buffer {unit}", _floats(packed[rank]), _everything(layout), "buffer", width, "buffer ")
        text = "The shards of all ranks arrive in one buffer, rank by rank." if self.shards > 1 else "Each parameter gets its own storage."
        if layout.flat:
            text = "The shards of all ranks end to end are the unsharded flat parameter; the parameters are views into it."
        self.holdings.record_sent(f"{phase}: all-gather of {unit}", text, self.network, before)
        self.holdings.drop(f"cast {unit}")

    def _copy_out(self, unit: str, phase: str) -> None:
        """Give each parameter its own storage. In forward the buffer outlives this, until the next unit has been copied out."""
        layout = self.layouts[unit]
        for rank, packed in enumerate(self._all(f"buffer {unit}")):
            stored = layout.arrange(packed)
            self._put(rank, f"gathered {unit}", stored, layout.gathered, "gathered_parameter", self.widths.gathered, "full ")
        after = "is kept until the next unit is copied out, or to the end of forward" if phase == "forward" else "is freed after this"
        self.holdings.record(f"{phase}: {unit} copied out", f"Each parameter gets its own storage; the buffer {after}.")
        if phase == "forward":
            self.holdings.rename(f"buffer {unit}", SPENT_BUFFER)
        else:
            self.holdings.drop(f"buffer {unit}")

    def end_forward(self) -> None:
        """The buffer of the last unit is freed."""
        self.holdings.drop(SPENT_BUFFER)

    def end_backward(self) -> None:
        """The input of the last reduce-scatter is freed."""
        self.holdings.drop(SCATTER_INPUT)

    def free(self, unit: str, phase: str) -> None:
        """Free the gathered parameters (reshard)."""
        self.holdings.drop(f"gathered {unit}")
        self.holdings.record(f"{phase}: {unit} freed", "The gathered parameters are freed; the shards were there all the time.")

    def put_gradients(self, unit: str, rank: int, gradients: Mapping[str, Array]) -> None:
        """Full gradients of some of the unit's parameters, as ``rank`` has computed them from its own samples."""
        for parameter in self.layouts[unit].parameters:
            if parameter.name in gradients:
                whole = Piece(parameter.name, 0, parameter.elements, 0, parameter.name)
                own = gradients[parameter.name].reshape(-1)
                self._put(rank, f"grad {parameter.name}", own, [whole], "gradient", self.widths.gathered, "grad ")

    def scatter(self, unit: str) -> None:
        """Free the unit and reduce-scatter its gradients: every rank gets the mean over the ranks for its own shard."""
        layout = self.layouts[unit]
        if layout.flat:
            self._join_gradients(layout)
        self.free(unit, "backward")
        self.holdings.drop(SCATTER_INPUT)
        name = self._lay_out_gradients(layout)
        before = len(self.network.messages)
        inputs = self._all(name)
        sums = [
            own
            for group in self.groups
            for own in self.network.reduce_scatter(
                [inputs[rank] for rank in group],
                group,
                axis=AXIS,
                purpose="gradient_scatter",
                phase="backward",
                label=unit,
                element_bytes=self.widths.reduced,
            )
        ]
        for rank in range(self.world):
            mean = _floats(sums[rank]) / self.shards
            self._put(rank, f"shard_grad {unit}", mean, self._pieces(layout, rank), "gradient", self.widths.reduced, "mean grad ")
        text = "Each rank gets its own piece, summed over all ranks and divided by their number."
        if len(self.groups) > 1:
            text = "Each rank gets its own piece, the mean over its replica."
        self.holdings.record_sent(f"backward: reduce-scatter of {unit}", text, self.network, before)
        if len(self.groups) > 1:
            self._reduce_replicas(layout)
        if layout.flat:
            self.holdings.drop(name)
            self.holdings.drop(f"flat {unit}")
        for rank, mean in enumerate(self._all(f"shard_grad {unit}")):
            self._put(rank, f"shard_grad {unit}", mean, self._pieces(layout, rank), "gradient", self.widths.stored, "mean grad ")

    def _reduce_replicas(self, layout: ShardLayout) -> None:
        """The mean of a shard's gradient over the replicas, each of which has seen other samples."""
        before, name = len(self.network.messages), f"shard_grad {layout.name}"
        means = self._all(name)
        for group in self.replicas:
            sums = self.network.all_reduce(
                [means[rank] for rank in group],
                group,
                axis=REPLICA_AXIS,
                purpose="gradient_sync",
                phase="backward",
                label=layout.name,
                element_bytes=self.widths.reduced,
            )
            for rank, total in zip(group, sums, strict=True):
                mean = _floats(total) / len(group)
                self._put(rank, name, mean, self._pieces(layout, rank), "gradient", self.widths.reduced, "mean grad ")
        text = "Ranks with the same shard in each replica add up what they have: the mean over all samples."
        self.holdings.record_sent(f"backward: all-reduce of {layout.name}", text, self.network, before)

    def update(self, adam: Adam, number: int) -> None:
        """Adam on every shard; ``number`` counts the steps from 1."""
        for unit, layout in self.layouts.items():
            for rank in range(self.world):
                shard, mean, first, second = (self.holdings.get(rank, f"{name} {unit}") for name in ("shard", "shard_grad", *MOMENTS))
                kept = layout.state_mask(rank % self.shards)
                updated = shard[kept]
                adam.update(updated, mean[kept], first, second, number)
                shard[kept] = updated
        self.holdings.record("optimizer: Adam on the shards", "Each rank updates its own shard with the mean gradient; nothing is sent.")

    def drop_gradients(self) -> None:
        """Free the sharded gradients."""
        for unit in self.layouts:
            self.holdings.drop(f"shard_grad {unit}")

    def joined(self, name: str, replica: int = 0) -> dict[str, Array]:
        """Full tensors from the shards ``name`` (shard, shard_grad, exp_avg, exp_avg_sq) of a replica, read outside every count."""
        values: dict[str, Array] = {}
        for unit, layout in self.layouts.items():
            shards = np.zeros((self.shards, layout.shard_elements))
            for place, rank in enumerate(self.groups[replica]):
                kept = layout.state_mask(place) if name in MOMENTS else slice(None)
                shards[place, kept] = self.holdings.get(rank, f"{name} {unit}")
            values |= layout.unpack(shards.reshape(-1))
        return values

    def _join_gradients(self, layout: ShardLayout) -> None:
        """Autograd joins the gradients of the views to the gradient of the flat parameter; then they are freed."""
        pieces = _flat_gradient(layout)
        for rank in range(self.world):
            own = layout.pack(self._gradients(rank, layout))[: sum(piece.elements for piece in pieces)]
            self._put(rank, f"flat {layout.name}", own, pieces, "gradient", self.widths.gathered, "flat grad ")
        self.holdings.record(
            f"backward: flat gradient of {layout.name}", "The gradients of the views are joined to one; for a moment both are there."
        )
        self._drop_full_gradients(layout)

    def _lay_out_gradients(self, layout: ShardLayout) -> str:
        """Name of the input of the reduce-scatter: the flat gradient where it fits as it is, else a padded buffer."""
        flat = f"flat {layout.name}"
        if layout.flat and self.widths.reduced == self.widths.gathered and _flat_gradient(layout) == layout.gathered:
            return flat
        name = SCATTER_INPUT
        for rank in range(self.world):
            if layout.flat:
                own = self.holdings.get(rank, flat)
                packed = np.concatenate([own, np.zeros(layout.padded_elements - own.size)])
            else:
                packed = layout.pack(self._gradients(rank, layout))
            self._put(rank, name, packed, _everything(layout), "buffer", self.widths.reduced, "buffer grad ")
        self.holdings.record(
            f"backward: gradients of {layout.name} laid out", "The input of the reduce-scatter: a piece for each rank, in order, padded."
        )
        self._drop_full_gradients(layout)
        return name

    def _gradients(self, rank: int, layout: ShardLayout) -> dict[str, Array]:
        return {p.name: self.holdings.get(rank, f"grad {p.name}").reshape(p.shape) for p in layout.parameters}

    def _drop_full_gradients(self, layout: ShardLayout) -> None:
        for parameter in layout.parameters:
            self.holdings.drop(f"grad {parameter.name}")

    def _pieces(self, layout: ShardLayout, rank: int) -> Sequence[Piece]:
        return layout.pieces[rank % self.shards]

    def _all(self, name: str) -> list[Array]:
        return [self.holdings.get(rank, name) for rank in range(self.world)]

    def _put(self, rank: int, name: str, array: Array, pieces: Sequence[Piece], kind: str, width: int, prefix: str = "") -> None:
        self.holdings.put(rank, name, array, cells_of(pieces, kind, width, prefix), width)


def _everything(layout: ShardLayout) -> list[Piece]:
    """All shards end to end."""
    return [piece for pieces in layout.pieces for piece in pieces]


def _flat_gradient(layout: ShardLayout) -> tuple[Piece, ...]:
    """Pieces of the flat gradient: padding that aligns is part of it, padding of the cut at the end is not."""
    cut_end = layout.state_has_padding and layout.gathered and layout.gathered[-1].parameter is None
    return layout.gathered[:-1] if cut_end else layout.gathered


def _floats(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Array:
    return np.asarray(array, np.float64)
