"""What happens to one unit under any strategy: all-gather, free, reduction of its gradients, update, synchronisation.

The order of a step is decided elsewhere (``training``). As torch's FSDP does it (``Sharding.as_torch``), layouts differ in their copies:

    flat   gathered in place; the parameters are views. Their gradients are joined to one flat gradient, which is the input of the
           reduce-scatter unless it has to be padded or cast first
    rows   gathered into a buffer, copied out into a storage for each parameter; gradients are copied into a padded buffer. Each buffer
           stays until the next one of its sort is in use
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tracekit.simulate.data_parallel.layouts import Array, Segment, ShardLayout
from tracekit.simulate.data_parallel.model import Adam, Values
from tracekit.simulate.data_parallel.store import ShardStore, cells_of, floats
from tracekit.simulate.experiment import Cell
from tracekit.simulate.virtual import Tags

REPLICA_AXIS = "dp_replicate"
#: Of rows, so that copies and collectives can overlap: the buffer of the unit that forward copied out last, and the input of the latest
#: reduce-scatter.
SPENT_BUFFER, SCATTER_INPUT = "spent buffer", "scatter input"
#: Of each quantity after a step: one entry a rank that has all of it, or one joined from its owners in each replica.
Results = Mapping[str, Sequence[Values]]


class Shards(ShardStore):
    """Held by unit: ``parameter``, ``gathered``, ``gradient``, the optimizer's arrays; by parameter: ``grad``, as backward left it."""

    def start(self, values: Values) -> None:
        """Every rank keeps what the strategy leaves it of ``values``, and optimizer state for what it updates."""
        layouts = list(self.layouts.values())
        for together in [[layout] for layout in layouts] if self.sharding.as_torch else [layouts]:
            for layout in together:
                self._start_parameters(layout, values)
            for layout in together:
                self._start_state(layout, values)
        self.picture("start")

    def _start_parameters(self, layout: ShardLayout, values: Values) -> None:
        packed = layout.pack(values)
        for rank in range(self.world):
            place, segments = self.part(layout, rank, self.strategy.owned_parameters)
            self.put(rank, f"parameter {layout.name}", packed[place].copy(), segments, "parameter", self.widths.stored)

    def _start_state(self, layout: ShardLayout, values: Values) -> None:
        """Zeros for both Adam moments, and a copy of the parameters where the recipe has a master."""
        packed = layout.pack(values)
        for rank in range(self.world):
            place, segments = self.part(layout, rank, self.strategy.owned_optimizer)
            own = packed[place]
            if self.strategy.owned_optimizer:
                own, segments = own[layout.state_mask(rank % self.shards)], layout.state_segments(rank % self.shards)
            for name in self.widths.state:
                state = own.copy() if name == "master" else np.zeros_like(own)
                self.put(rank, f"{name} {layout.name}", state, segments, "optimizer_state", self.widths.state_bytes, f"{name} ")

    def values(self, rank: int, unit: str) -> dict[str, Array]:
        """The full parameters of a unit on a rank, as views."""
        name = f"gathered {unit}" if self.strategy.owned_parameters else f"parameter {unit}"
        return self.layouts[unit].views(self.holdings.get(rank, name))

    def gather(self, unit: str) -> None:
        """Make the unit's full parameters available, unless they are: all-gather, and copy out where they are no views."""
        self.fetch(unit)
        if self.holdings.has(0, f"buffer {unit}"):
            self._copy_out(unit)

    def fetch(self, unit: str) -> None:
        """Where parameters are sharded: all-gather the unit, unless it is there or under way. Rows wait in the buffer until ``gather``."""
        there = any(self.holdings.has(0, f"{what} {unit}") for what in ("gathered", "buffer"))
        if there or not self.strategy.owned_parameters:
            return
        layout, width = self.layouts[unit], self.widths.gathered
        if layout.flat and width != self.widths.stored:
            for rank, shard in enumerate(self.of_all(f"parameter {unit}")):
                self.put(rank, f"cast {unit}", shard.copy(), layout.segments[rank % self.shards], "buffer", width, "cast ")
        packed = self.exchange(self.network.all_gather, self.of_all(f"parameter {unit}"), "parameter_gather", unit, width)
        for rank, shards in enumerate(packed):
            if layout.flat or self.shards == 1:  # one rank needs no buffer: its shards are copied
                self.put(rank, f"gathered {unit}", layout.arrange(shards), layout.gathered, "gathered_parameter", width, "full ")
            else:
                self.put(rank, f"buffer {unit}", shards, _everything(layout), "buffer", width, "buffer ")
        self.picture("gather_flat" if layout.flat else "gather_rows" if self.shards > 1 else "gather_alone", unit=unit)
        self.holdings.drop(f"cast {unit}")

    def _copy_out(self, unit: str) -> None:
        """Give each parameter its own storage. In forward the buffer outlives this, until the next unit has been copied out."""
        layout = self.layouts[unit]
        for rank, packed in enumerate(self.of_all(f"buffer {unit}")):
            stored = layout.arrange(packed)
            self.put(rank, f"gathered {unit}", stored, layout.gathered, "gathered_parameter", self.widths.gathered, "full ")
        forward = self.phase == "forward"
        fate = "is kept until the next unit is copied out, or to the end of forward" if forward else "is freed after this"
        self.picture("copy_out", unit=unit, fate=fate)
        if forward:
            self.holdings.rename(f"buffer {unit}", SPENT_BUFFER)
        else:
            self.holdings.drop(f"buffer {unit}")

    def end_forward(self) -> None:
        """The buffer of the last unit is freed."""
        self.holdings.drop(SPENT_BUFFER)

    def end_backward(self) -> None:
        """The input of the last reduce-scatter is freed."""
        self.holdings.drop(SCATTER_INPUT)

    def free(self, unit: str) -> None:
        """Free the gathered parameters (reshard); nothing where none are gathered."""
        self.holdings.drop(f"gathered {unit}")
        self.picture("free", unit=unit)

    def put_gradients(self, rank: int, gradients: Mapping[str, Array]) -> None:
        """Full gradients of some parameters from one micro-batch, as ``rank`` has computed them from its own samples."""
        for name, gradient in gradients.items():
            segment = Segment(name, 0, gradient.size, 0, name)
            self.put(rank, f"grad {name}", gradient.reshape(-1), [segment], "gradient", self.widths.gradient, "grad ")

    def reduce(self, unit: str, micro_batches: int, last: bool) -> None:
        """Free the unit, add the micro-batch's gradients to what is there, and reduce them when the strategy does (``last``: the last)."""
        layout, strategy = self.layouts[unit], self.strategy
        if layout.flat:
            self._join_gradients(layout, micro_batches)
        self.free(unit)
        self.holdings.drop(SCATTER_INPUT)
        if strategy.owned_gradients:
            self._reduce_scatter(layout)
        elif not last:
            self.picture("accumulate", unit=unit)
        elif strategy.reduction == "all_reduce":
            self._all_reduce(layout)
        else:
            self._reduce_scatter_in_place(layout)

    def update(self, adam: Adam, number: int) -> None:
        """Adam on what each rank updates; ``number`` counts the steps from 1."""
        for unit, layout in self.layouts.items():
            for rank in range(self.world):
                parameter, gradient = (self.owned(rank, f"{name} {unit}", layout) for name in ("parameter", "gradient"))
                kept = layout.state_mask(rank % self.shards) if self.strategy.owned_optimizer else slice(None)
                state = {name: self.holdings.get(rank, f"{name} {unit}") for name in self.widths.state}
                updated = state["master"] if "master" in state else parameter[kept]
                adam.update(updated, gradient[kept], state["exp_avg"], state["exp_avg_sq"], number)
                parameter[kept] = updated
        self.picture("update_owned" if self.strategy.owned_optimizer else "update_all")

    def synchronise(self) -> None:
        """After the update every rank gets the parameters that others have updated, if it keeps them: units as backward reduced them."""
        if not self.strategy.owned_optimizer or self.strategy.owned_parameters:
            return
        for unit, layout in reversed(self.layouts.items()):
            parts = [self.owned(rank, f"parameter {unit}", layout) for rank in range(self.world)]
            if self.sharding.broadcast:
                copies = [self.broadcast(part, root, unit) for root, part in enumerate(parts)]
                packed = [np.concatenate(of_rank) for of_rank in zip(*copies, strict=True)]
            else:
                packed = self.exchange(self.network.all_gather, parts, "parameter_sync", unit, self.widths.stored)
            for rank, shards in enumerate(packed):
                self.put(rank, f"parameter {unit}", shards, layout.gathered, "parameter", self.widths.stored)
            self.picture("synchronise", unit=unit)

    def broadcast(self, array: Array, root: int, label: str) -> list[Array]:
        """Hand what ``root`` has updated to everybody."""
        tags: Tags = {"axis": self.strategy.axis, "purpose": "parameter_sync", "phase": "optimizer", "label": label}
        tags["element_bytes"] = self.widths.stored
        return [floats(copy) for copy in self.network.broadcast(array, range(self.world), root, **tags)]

    def drop_gradients(self) -> None:
        """Free what is left of the gradients, as ``zero_grad`` does between steps."""
        for unit in self.layouts:
            self.holdings.drop(f"gradient {unit}")
        self.picture("finish")

    def results(self) -> Results:
        """Gradients that were used, parameters and both Adam moments, read outside every count."""
        strategy = self.strategy
        return {
            "gradients": self._full("gradient", strategy.reduction != "all_reduce"),
            "parameters": self._full("parameter", strategy.owned_parameters),
            "first": self._full("exp_avg", strategy.owned_optimizer),
            "second": self._full("exp_avg_sq", strategy.owned_optimizer),
        }

    def _full(self, name: str, owned: bool) -> list[Values]:
        if owned:
            return [self._joined(name, group) for group in self.groups]
        views: list[Values] = [{} for _ in range(self.world)]
        for unit, layout in self.layouts.items():
            for rank, values in enumerate(views):
                values |= {n: view.copy() for n, view in layout.views(self.holdings.get(rank, f"{name} {unit}")).items()}
        return views

    def _joined(self, name: str, group: Sequence[int]) -> Values:
        values: Values = {}
        for unit, layout in self.layouts.items():
            shards = np.zeros((self.shards, layout.shard_elements))
            for shard, rank in enumerate(group):
                kept = layout.state_mask(shard) if name in self.widths.state else slice(None)
                shards[shard, kept] = self.owned(rank, f"{name} {unit}", layout)
            values |= layout.unpack(shards.reshape(-1))
        return values

    def _join_gradients(self, layout: ShardLayout, micro_batches: int) -> None:
        """The gradients of a unit's parameters become one flat gradient, added to that of earlier micro-batches; then they are freed."""
        as_torch = self.sharding.as_torch
        name, prefix = (f"flat {layout.name}", "flat grad ") if as_torch else (self._gradient_name(layout), "local grad ")
        for rank in range(self.world):
            segments = _flat_gradient(layout) if as_torch else self.part(layout, rank, False)[1]
            flat = layout.pack(self._gradients(rank, layout))[: sum(segment.elements for segment in segments)] / micro_batches
            if self.holdings.has(rank, name):
                flat = flat + self.holdings.get(rank, name)
            self.put(rank, name, flat, segments, "gradient", self.widths.gradient, prefix)
        self.picture("join", unit=layout.name)
        self._drop_full_gradients(layout)

    def _gradient_name(self, layout: ShardLayout) -> str:
        """Name of a unit's local gradient: a buffer where the rank keeps a part of it alone."""
        return f"full gradient {layout.name}" if self.strategy.owned_gradients else f"gradient {layout.name}"

    def _scatter_input(self, layout: ShardLayout) -> str:
        """Name of the input of the reduce-scatter: the flat gradient where it fits as it is, else a padded buffer."""
        if not self.sharding.as_torch:
            return self._gradient_name(layout)
        flat = f"flat {layout.name}"
        if layout.flat and self.widths.reduced == self.widths.gradient and _flat_gradient(layout) == layout.gathered:
            return flat
        for rank in range(self.world):
            if layout.flat:
                own = self.holdings.get(rank, flat)
                packed = np.concatenate([own, np.zeros(layout.padded_elements - own.size)])
            else:
                packed = layout.pack(self._gradients(rank, layout))
            self.put(rank, SCATTER_INPUT, packed, _everything(layout), "buffer", self.widths.reduced, "buffer grad ")
        self.picture("lay_out", unit=layout.name)
        self._drop_full_gradients(layout)
        return SCATTER_INPUT

    def _reduce_scatter(self, layout: ShardLayout) -> None:
        """Every rank gets the mean over the ranks for its own shard, added to that of earlier micro-batches."""
        unit, own = layout.name, f"gradient {layout.name}"
        name = self._scatter_input(layout)
        sums = self.exchange(self.network.reduce_scatter, self.of_all(name), "gradient_scatter", unit, self.widths.reduced)
        for rank, total in enumerate(sums):
            mean = total / self.shards
            if self.holdings.has(rank, own):
                mean = mean + self.holdings.get(rank, own)
            self._put_shard(rank, mean, layout, self.widths.reduced)
        self.picture("scatter_in_replica" if len(self.groups) > 1 else "scatter", unit=unit)
        if len(self.groups) > 1:
            self._all_reduce_replicas(layout)
        if layout.flat:
            self.holdings.drop(name)
            self.holdings.drop(f"flat {unit}")
        for rank, mean in enumerate(self.of_all(own)):
            self._put_shard(rank, mean, layout, self.widths.kept_gradient)

    def _all_reduce_replicas(self, layout: ShardLayout) -> None:
        """The mean of a shard's gradient over the replicas, each of which has seen other samples."""
        means = self.of_all(f"gradient {layout.name}")
        groups = [range(shard, self.world, self.shards) for shard in range(self.shards)]
        sums = self.exchange(self.network.all_reduce, means, "gradient_sync", layout.name, self.widths.reduced, groups, REPLICA_AXIS)
        for rank, total in enumerate(sums):
            self._put_shard(rank, total / len(self.groups), layout, self.widths.reduced)
        self.picture("all_reduce_replicas", unit=layout.name)

    def _all_reduce(self, layout: ShardLayout) -> None:
        """Every rank gets the mean of the whole gradient."""
        name = f"gradient {layout.name}"
        sums = self.exchange(self.network.all_reduce, self.of_all(name), "gradient_sync", layout.name, self.widths.reduced)
        for rank, total in enumerate(sums):
            segments = self.part(layout, rank, False)[1]
            self.put(rank, name, total / self.world, segments, "gradient", self.widths.reduced, "mean grad ")
        self.picture("all_reduce_owned" if self.strategy.owned_optimizer else "all_reduce", unit=layout.name)

    def _reduce_scatter_in_place(self, layout: ShardLayout) -> None:
        """Every rank gets the mean of what it owns into its place of the whole gradient, which is its own elsewhere."""
        name, width = f"gradient {layout.name}", self.widths.reduced
        sums = self.exchange(self.network.reduce_scatter, self.of_all(name), "gradient_scatter", layout.name, width)
        for rank, total in enumerate(sums):
            self.owned(rank, name, layout)[:] = total / self.world
            cells: list[Cell] = []
            for owner, segments in enumerate(layout.segments):
                cells += cells_of(segments, "gradient", width, "mean grad " if owner == rank else "local grad ")
            self.holdings.put(rank, name, self.holdings.get(rank, name), cells, width)
        self.picture("scatter", unit=layout.name)

    def _gradients(self, rank: int, layout: ShardLayout) -> dict[str, Array]:
        return {p.name: self.holdings.get(rank, f"grad {p.name}").reshape(p.shape) for p in layout.parameters}

    def _drop_full_gradients(self, layout: ShardLayout) -> None:
        for parameter in layout.parameters:
            self.holdings.drop(f"grad {parameter.name}")

    def _put_shard(self, rank: int, mean: Array, layout: ShardLayout, width: int) -> None:
        """The reduced gradient of a rank's shard."""
        self.put(rank, f"gradient {layout.name}", mean, layout.segments[rank % self.shards], "gradient", width, "mean grad ")


def _everything(layout: ShardLayout) -> list[Segment]:
    """All shards end to end."""
    return [segment for segments in layout.segments for segment in segments]


def _flat_gradient(layout: ShardLayout) -> tuple[Segment, ...]:
    """Segments of torch's flat gradient: padding that aligns is part of it, padding of the cut at the end is not."""
    cut_end = layout.state_has_padding and layout.gathered and layout.gathered[-1].parameter is None
    return layout.gathered[:-1] if cut_end else layout.gathered
