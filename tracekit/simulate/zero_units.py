"""What the strategies of ``zero_strategies`` do to one unit: gather it, collect and reduce its gradients, update and synchronise it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tracekit.simulate.adam import Adam
from tracekit.simulate.experiment import Cell
from tracekit.simulate.holdings import Holdings, cells_of
from tracekit.simulate.linear_model import Values
from tracekit.simulate.shard_layout import Array, Piece, ShardLayout
from tracekit.simulate.virtual import Network
from tracekit.simulate.zero_strategies import STATE_BYTES, Recipe, Strategy


class ZeroUnits:
    """Parameters, gradients and optimizer state of all units on all ranks. Layouts are flat.

    ``broadcast``: under the naive strategy owners broadcast what they have updated, one after the other; otherwise an all-gather.
    """

    def __init__(self, layouts: Sequence[ShardLayout], strategy: Strategy, recipe: Recipe, holdings: Holdings, broadcast: bool) -> None:
        self.layouts = {layout.name: layout for layout in layouts}
        self.strategy, self.recipe, self.holdings, self.broadcast = strategy, recipe, holdings, broadcast
        self.world = holdings.world
        self.network = Network(self.world)

    def start(self, values: Values) -> None:
        """Every rank keeps what the strategy leaves it of ``values``, and optimizer state for what it updates."""
        self._start_parameters(values)
        for unit, layout in self.layouts.items():
            packed = layout.pack(values)
            for rank in range(self.world):
                place, pieces = self._part(layout, rank, self.strategy.owned_optimizer)
                for name in self.recipe.state:
                    state = packed[place].copy() if name == "master" else np.zeros_like(packed[place])
                    self._put(rank, f"{name} {unit}", state, pieces, "optimizer_state", STATE_BYTES, f"{name} ")

    def _start_parameters(self, values: Values) -> None:
        for unit, layout in self.layouts.items():
            packed = layout.pack(values)
            for rank in range(self.world):
                place, pieces = self._part(layout, rank, self.strategy.owned_parameters)
                self._put(rank, f"parameter {unit}", packed[place].copy(), pieces, "parameter", self.recipe.parameter)

    def values(self, rank: int, unit: str) -> Values:
        """The full parameters of a unit on a rank, as views."""
        name = f"gathered {unit}" if self.strategy.owned_parameters else f"parameter {unit}"
        return self.layouts[unit].views(self.holdings.get(rank, name))

    def gather(self, unit: str, when: str, phase: str) -> None:
        """Where parameters are sharded: all-gather a unit, unless it is there."""
        if not self.strategy.owned_parameters or self.holdings.has(0, f"gathered {unit}"):
            return
        layout, before = self.layouts[unit], len(self.network.messages)
        packed = self._all_gather(f"parameter {unit}", "parameter_gather", phase)
        for rank in range(self.world):
            self._put(rank, f"gathered {unit}", packed[rank], layout.gathered, "gathered_parameter", self.recipe.parameter, "full ")
        self.holdings.record_sent(f"{when}: all-gather of {unit}", "The owners' parts are joined before use.", self.network, before)

    def put_gradients(self, rank: int, gradients: Mapping[str, Array]) -> None:
        """Full gradients of some parameters from one micro-batch, as ``rank`` has computed them."""
        for name, gradient in gradients.items():
            whole = Piece(name, 0, gradient.size, 0, name)
            self._put(rank, f"grad {name}", gradient.reshape(-1), [whole], "gradient", self.recipe.gradient, "grad ")

    def release(self, unit: str) -> None:
        """Free the gathered parameters of a unit; nothing where none are gathered."""
        self.holdings.drop(f"gathered {unit}")

    def collect(self, unit: str, when: str, micro_batches: int, last: bool) -> None:
        """Add the micro-batch's gradients of a unit to what is there, and reduce them when the strategy does."""
        layout = self.layouts[unit]
        owned = self.strategy.owned_gradients
        name = f"full gradient {unit}" if owned else f"gradient {unit}"
        for rank in range(self.world):
            own = {p.name: self.holdings.get(rank, f"grad {p.name}").reshape(p.shape) for p in layout.parameters}
            place, pieces = self._part(layout, rank, False)
            flat = layout.pack(own)[place] / micro_batches
            if not owned and self.holdings.has(rank, name):
                flat = flat + self.holdings.get(rank, name)
            self._put(rank, name, flat, pieces, "gradient", self.recipe.gradient, "local grad ")
        for parameter in layout.parameters:
            self.holdings.drop(f"grad {parameter.name}")
        if self.strategy.all_reduce and last:
            self._all_reduce(layout, when)
        elif owned or last:
            self._reduce_scatter(layout, name, when)
        else:
            self.holdings.record(f"{when}: {unit} accumulated", "Gradients are added up on each rank; nothing is sent yet.")

    def update(self, adam: Adam, number: int) -> None:
        """Adam on what each rank updates; ``number`` counts the steps from 1."""
        for unit, layout in self.layouts.items():
            for rank in range(self.world):
                parameter, gradient = (self._owned(rank, f"{name} {unit}", layout) for name in ("parameter", "gradient"))
                state = {name: self.holdings.get(rank, f"{name} {unit}") for name in self.recipe.state}
                updated = state.get("master", parameter)
                adam.update(updated, gradient, state["exp_avg"], state["exp_avg_sq"], number)
                parameter[:] = updated
        whose = "what it owns" if self.strategy.owned_optimizer else "everything, all ranks alike"
        self.holdings.record("update", f"Each rank updates {whose}.")

    def synchronise(self) -> None:
        """After the update every rank gets the parameters that others have updated, if it keeps them: units as backward reduced them."""
        if self.strategy.owned_optimizer and not self.strategy.owned_parameters:
            for unit in reversed(self.layouts):
                self._synchronise(unit)

    def drop_gradients(self) -> None:
        """Free what is left of the gradients."""
        for unit in self.layouts:
            self.holdings.drop(f"gradient {unit}")

    def parameters(self) -> list[Values]:
        """Full parameters as each rank has them after the step; of sharded ones, joined, one entry."""
        return self._full("parameter", self.strategy.owned_parameters)

    def mean_gradients(self) -> list[Values]:
        """The gradients that were used: of each rank where all have all, joined from the owners otherwise."""
        return self._full("gradient", not self.strategy.all_reduce)

    def state(self, name: str) -> list[Values]:
        """An array of the optimizer state, as ``mean_gradients``."""
        return self._full(name, self.strategy.owned_optimizer)

    def _full(self, name: str, owned: bool) -> list[Values]:
        joined: list[Values] = [{} for _ in range(1 if owned else self.world)]
        for unit, layout in self.layouts.items():
            if owned:
                packed = [self._owned(rank, f"{name} {unit}", layout) for rank in range(self.world)]
                joined[0] |= layout.unpack(np.concatenate(packed))
            else:
                for rank, values in enumerate(joined):
                    values |= {n: view.copy() for n, view in layout.views(self.holdings.get(rank, f"{name} {unit}")).items()}
        return joined

    def _part(self, layout: ShardLayout, rank: int, owned: bool) -> tuple[slice, Sequence[Piece]]:
        """(place in the flat vector, pieces) of what ``rank`` owns, or of the whole, with padding where it is ever cut."""
        if owned:
            return slice(rank * layout.shard_elements, (rank + 1) * layout.shard_elements), layout.pieces[rank]
        if self.strategy.cut:
            return slice(None), layout.gathered
        return slice(0, layout.elements), [piece for piece in layout.gathered if piece.parameter is not None]

    def _owned(self, rank: int, name: str, layout: ShardLayout) -> Array:
        """View of what ``rank`` updates in an array that holds the whole vector or only that."""
        array = self.holdings.get(rank, name)
        if not self.strategy.owned_optimizer or array.size == layout.shard_elements:
            return array
        return array[rank * layout.shard_elements : (rank + 1) * layout.shard_elements]

    def _all_reduce(self, layout: ShardLayout, when: str) -> None:
        name, before = f"gradient {layout.name}", len(self.network.messages)
        sums = self.network.all_reduce(
            self._all(name),
            range(self.world),
            axis=self.strategy.axis,
            purpose="gradient_sync",
            phase="backward",
            label=layout.name,
            element_bytes=self.recipe.gradient,
        )
        for rank in range(self.world):
            _, pieces = self._part(layout, rank, False)
            self._put(rank, name, np.asarray(sums[rank], np.float64) / self.world, pieces, "gradient", self.recipe.gradient, "mean grad ")
        text = "Every rank gets the mean of all gradients" + (
            ", and will use its own part alone." if self.strategy.owned_optimizer else "."
        )
        self.holdings.record_sent(f"{when}: all-reduce of {layout.name}", text, self.network, before)

    def _reduce_scatter(self, layout: ShardLayout, name: str, when: str) -> None:
        """Every rank gets the mean of what it owns: into its place of the whole (stage 1), or added to its own part (stages 2 and 3)."""
        before = len(self.network.messages)
        sums = self.network.reduce_scatter(
            self._all(name),
            range(self.world),
            axis=self.strategy.axis,
            purpose="gradient_scatter",
            phase="backward",
            label=layout.name,
            element_bytes=self.recipe.gradient,
        )
        for rank in range(self.world):
            mean = np.asarray(sums[rank], np.float64) / self.world
            if self.strategy.owned_gradients:
                own = f"gradient {layout.name}"
                if self.holdings.has(rank, own):
                    mean = mean + self.holdings.get(rank, own)
                self._put(rank, own, mean, layout.pieces[rank], "gradient", self.recipe.gradient, "mean grad ")
            else:
                self._owned(rank, name, layout)[:] = mean
                self.holdings.put(rank, name, self.holdings.get(rank, name), self._mixed_cells(layout, rank), self.recipe.gradient)
        text = "Every rank gets the mean of the part it owns."
        self.holdings.record_sent(f"{when}: reduce-scatter of {layout.name}", text, self.network, before)
        self.holdings.drop(f"full gradient {layout.name}")

    def _mixed_cells(self, layout: ShardLayout, rank: int) -> list[Cell]:
        """The whole gradient of stage 1 after the reduce-scatter: reduced where the rank is the owner, its own elsewhere."""
        return [
            cell
            for owner, pieces in enumerate(layout.pieces)
            for cell in cells_of(pieces, "gradient", self.recipe.gradient, "mean grad " if owner == rank else "local grad ")
        ]

    def _synchronise(self, unit: str) -> None:
        """Every rank gets the updated parameters from their owners."""
        layout, before = self.layouts[unit], len(self.network.messages)
        if self.broadcast and self.strategy.all_reduce:
            packed = self._broadcast(unit)
        else:
            packed = self._all_gather(f"parameter {unit}", "parameter_sync", "optimizer")
        for rank in range(self.world):
            self._put(rank, f"parameter {unit}", packed[rank], layout.gathered, "parameter", self.recipe.parameter)
        self.holdings.record_sent(f"{unit} synchronised", "Every rank gets the parts that others have updated.", self.network, before)

    def _all_gather(self, name: str, purpose: str, phase: str) -> list[Array]:
        """The owners' parts of ``parameter UNIT``, end to end, on every rank."""
        unit = name.removeprefix("parameter ")
        parts = [self._owned(rank, name, self.layouts[unit]) for rank in range(self.world)]
        width = self.recipe.parameter
        found = self.network.all_gather(
            parts, range(self.world), axis=self.strategy.axis, purpose=purpose, phase=phase, label=unit, element_bytes=width
        )
        return [np.asarray(array, np.float64) for array in found]

    def _broadcast(self, unit: str) -> list[Array]:
        """Each owner hands its part to everybody, one after the other."""
        parts: list[list[Array]] = [[] for _ in range(self.world)]
        for root in range(self.world):
            own = self._owned(root, f"parameter {unit}", self.layouts[unit])
            copies = self.network.broadcast(
                own,
                range(self.world),
                root,
                axis=self.strategy.axis,
                purpose="parameter_sync",
                phase="optimizer",
                label=unit,
                element_bytes=self.recipe.parameter,
            )
            for rank, copy in enumerate(copies):
                parts[rank].append(np.asarray(copy, np.float64))
        return [np.concatenate(found) for found in parts]

    def _all(self, name: str) -> list[Array]:
        return [self.holdings.get(rank, name) for rank in range(self.world)]

    def _put(self, rank: int, name: str, array: Array, pieces: Sequence[Piece], kind: str, width: int, prefix: str = "") -> None:
        self.holdings.put(rank, name, array, cells_of(pieces, kind, width, prefix), width)
