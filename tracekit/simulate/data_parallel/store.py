"""What all ranks hold of a sharded model, the network between them and the pictures: the ground that ``shards`` stands on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tracekit.simulate.data_parallel.layouts import Array, Segment, ShardLayout
from tracekit.simulate.data_parallel.strategies import Sharding
from tracekit.simulate.experiment import Cell
from tracekit.simulate.holdings import Holdings
from tracekit.simulate.virtual import Network


class UnitEvent(NamedTuple):
    """Something that happens to a unit: ``event`` as the narration names it, ``moment`` the index of the picture that shows it."""

    phase: str
    event: str
    unit: str
    moment: int


class ShardStore:
    """Arrays by name and rank, and collectives on them. The layouts of the units by the units' names.

    Of R W ranks, W the world of the layouts, rank r keeps shard r mod W of replica r div W (hybrid sharding; R = 1 without).
    """

    def __init__(self, sharding: Sharding, holdings: Holdings) -> None:
        self.sharding, self.strategy, self.widths, self.holdings = sharding, sharding.strategy, sharding.widths, holdings
        self.layouts = {layout.name: layout for layout in sharding.layouts}
        self.world, self.shards = holdings.world, sharding.world
        self.groups = [range(first, first + self.shards) for first in range(0, self.world, self.shards)]
        self.phase = self.when = ""
        self.begin_step()

    def begin_step(self) -> None:
        """Traffic is counted from 0 again."""
        self.network = Network(self.world)
        self._pictured = 0
        self.journal: list[UnitEvent] = []

    def enter(self, phase: str, prefix: str) -> None:
        """Forward, backward or the optimizer begins; ``prefix`` says in which micro-batch."""
        self.phase, self.when = phase, f"{prefix}{phase}"

    def picture(self, event: str, **words: object) -> None:
        """Keep a picture of this moment with the messages since the last one, where the narration has the event."""
        if event in self.sharding.narration:
            title, text = (part.format(when=self.when, **words) for part in self.sharding.narration[event])
            messages = [message for _, message in self.network.messages[self._pictured :]]
            self._pictured = len(self.network.messages)
            self.holdings.record(title, text, messages, self.network.steps if messages else None)
            if "unit" in words:
                self.journal.append(UnitEvent(self.phase, event, str(words["unit"]), len(self.holdings.moments) - 1))

    def part(self, layout: ShardLayout, rank: int, owned: bool) -> tuple[slice, Sequence[Segment]]:
        """(where in the unit's vector, segments) of what ``rank`` owns, or of the whole, with padding where it is ever cut."""
        if owned:
            shard = rank % self.shards
            return slice(shard * layout.shard_elements, (shard + 1) * layout.shard_elements), layout.segments[shard]
        if self.strategy.cut:
            return slice(None), layout.gathered
        return slice(0, layout.elements), [segment for segment in layout.gathered if segment.parameter is not None]

    def owned(self, rank: int, name: str, layout: ShardLayout) -> Array:
        """View of what ``rank`` updates in an array that holds the whole vector or only that."""
        array = self.holdings.get(rank, name)
        if not self.strategy.owned_optimizer or array.size <= layout.shard_elements:
            return array
        return array[self.part(layout, rank, True)[0]]

    def exchange(
        self,
        collective: Callable[..., Sequence[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]],
        inputs: Sequence[Array],
        purpose: str,
        label: str,
        width: int,
        groups: Sequence[Sequence[int]] = (),
        axis: str = "",
    ) -> list[Array]:
        """One collective in every group, by default those that share a model; the result of each rank."""
        found = list(inputs)
        phase = "optimizer" if purpose == "parameter_sync" else self.phase
        for group in groups or self.groups:
            tags = {"axis": axis or self.strategy.axis, "purpose": purpose, "phase": phase, "label": label}
            results = collective([inputs[rank] for rank in group], group, element_bytes=width, **tags)
            for rank, result in zip(group, results, strict=True):
                found[rank] = floats(result)
        return found

    def of_all(self, name: str) -> list[Array]:
        """What every rank holds under ``name``."""
        return [self.holdings.get(rank, name) for rank in range(self.world)]

    def put(self, rank: int, name: str, array: Array, segments: Sequence[Segment], kind: str, width: int, prefix: str = "") -> None:
        """Let ``rank`` hold ``array``, a cell a segment; ``width``: bytes of an element."""
        self.holdings.put(rank, name, array, cells_of(segments, kind, width, prefix), width)


def cells_of(segments: Sequence[Segment], kind: str, element_bytes: int, prefix: str = "") -> tuple[Cell, ...]:
    """One cell a segment, padding in its own kind. ``prefix`` comes before the label (``grad ``, ``exp_avg ``).

    The detail is the interval of the parameter's elements, then the offset in the array: ``[4, 6) at 10``; of padding its length.
    """
    return tuple(
        Cell(
            f"{prefix}{segment.label}",
            "padding" if segment.parameter is None else kind,
            segment.elements * element_bytes,
            (f"{segment.elements}" if segment.parameter is None else f"[{segment.begin}, {segment.end})") + f" at {segment.offset}",
        )
        for segment in segments
    )


def floats(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Array:
    """An array that has come from the network, as what it was."""
    return np.asarray(array, np.float64)
