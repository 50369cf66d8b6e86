"""What sharding needs for a moment: gathered parameters, buffers of collectives, gradients that are still whole.

Symbols, for one unit of n padded elements over W ranks: q bytes of a gathered element, r of a reduced one, g of a gradient as autograd
leaves it. Everything is counted as the program allocates and frees it; CUDA streams may hold a block a little longer ("active" memory).

FSDP2 (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py; checked against torch 2.13)

    forward, copy-out   the unit (q n) + its all-gather buffer (q n) + the buffer of the unit before, freed after this copy
    forward, compute    the unit + its all-gather buffer
    backward, compute   the unit + the buffer of the next one + its gradients (g n) + the reduce-scatter input of the one before (r n)
    backward, reduce    the prefetched buffer + its gradients + its reduce-scatter input (+ its output in another type, r n / W)

FSDP1 and ZeRO-3: ``flat_units``.

The root stays gathered from the start of forward to the end of backward unless ``root_reshards``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tracekit.estimate.plan import WHOLE_GRADIENTS, Plan
from tracekit.estimate.units import Unit


@dataclass(frozen=True)
class Transient:
    """Bytes beside model state at one moment of one unit.

    ``own``: how many copies of the unit's own gradients there are; while it computes, of those that are there already. ``kept``: bytes of
    sharded gradients, where it is not the units that are done which decide.
    """

    what: str = "compute"
    gathered: int = 0
    buffers: int = 0
    unsharded: int = 0
    own: int = 0
    kept: int | None = None


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of the units that are used at one place of the model (a layer, and its experts where they are apart).

    ``whole`` q n; ``buffer`` of the all-gather, 0 in a group of one; ``cast`` this rank's shard in the gathered type where it is stored in
    another; ``gradients`` g x elements; ``reduce`` input of the reduce-scatter, r n; ``reduced`` its output, r n / W; ``kept`` the gradient
    that stays; ``accumulated`` whole gradients in the reduced type.
    """

    name: str
    whole: int
    buffer: int
    cast: int
    gradients: int
    reduce: int
    reduced: int
    kept: int
    accumulated: int


def unit_bytes(units: Sequence[Unit], plan: Plan) -> UnitBytes:
    """Sizes of one place, summed over its units."""
    recipe = plan.recipe
    many = [unit for unit in units if unit.w > 1]
    casts = recipe.compute != recipe.parameter
    return UnitBytes(
        units[0].name,
        sum(unit.padded for unit in units) * recipe.compute,
        sum(unit.padded for unit in many) * recipe.compute,
        sum(unit.shard for unit in many) * recipe.compute if casts else 0,
        sum(unit.elements for unit in units) * recipe.autograd,
        sum(unit.padded for unit in units) * recipe.reduce,
        sum(unit.shard for unit in units) * recipe.reduce,
        sum(unit.elements if plan.strategy.name in WHOLE_GRADIENTS else unit.shard for unit in units) * recipe.gradients,
        sum(unit.elements for unit in units) * recipe.reduce,
    )


class Sharding:
    """Base: parameters and gradients are whole on every rank; nothing is gathered."""

    def __init__(self, plan: Plan, places: Sequence[UnitBytes], root: UnitBytes | None, root_early: int = 0) -> None:
        self.plan, self.places, self.root = plan, places, root
        self.root_early = root_early

    def copies(self, size: int) -> int:
        """What the backend adds to a buffer of ``size`` bytes that is being gathered or reduced [bytes]."""
        return size if self.plan.backend_copies and self.plan.shard > 1 else 0

    def forward(self, i: int) -> list[Transient]:  # noqa: ARG002
        """Moments of the forward of place i."""
        return [Transient()]

    def loss(self) -> Transient:
        """Between forward and backward; the head of the root computes."""
        return Transient("loss")

    def backward(self, i: int) -> list[Transient]:  # noqa: ARG002
        """Moments of the backward of place i."""
        return [Transient(own=1)]

    def finish(self) -> list[Transient]:
        """After the backward of all places: the embedding's, then the root's gradients are reduced."""
        return [Transient("embedding", own=1)]


class Bucketed(Sharding):
    """ZeRO-1 and ZeRO-2: whole parameters; gradients are copied into a bucket that is reduced, and (ZeRO-2) only a shard is kept.

    ``buckets``: bytes of each in order of backward. ZeRO-2 lets go of a bucket's gradients when they are in its buffer; one reduction is
    under way while the next bucket fills, so that two buffers may exist.
    """

    def __init__(
        self,
        plan: Plan,
        places: Sequence[UnitBytes],
        root: UnitBytes | None,
        root_early: int,
        buckets: Sequence[int],
        keeps_whole: bool,
        first: bool,
    ) -> None:
        super().__init__(plan, places, root, root_early)
        self.ends = list(accumulate(buckets))
        self.buckets = buckets
        self.keeps_whole = keeps_whole
        self.first = first

    def between(self, before: int, now: int) -> tuple[Transient, Transient | None]:
        """What there is while backward brings its gradients from ``before`` to ``now`` bytes.

        First with all of them there and none sent off; then the most while full buckets are sent off, None where none is.
        """
        first, last = bisect_right(self.ends, before), bisect_right(self.ends, now)
        filled = self.ends[first - 1] if first else 0
        computed = Transient("compute", 0, self._under_way(first), 0 if self.keeps_whole else now - filled, kept=self._kept(first))
        sent = [
            Transient("send", 0, self._under_way(i) + size, 0 if self.keeps_whole else size, kept=self._kept(i))
            for i, size in enumerate(self.buckets[first:last], first)
        ]
        return computed, max(sent, key=lambda t: t.buffers + t.unsharded + (t.kept or 0), default=None)

    def _kept(self, count: int) -> int | None:
        """Bytes of the shards of the first buckets; None where gradients stay whole, or are there from an earlier micro-batch."""
        if self.keeps_whole or not self.first:
            return None
        recipe, w = self.plan.recipe, self.plan.shard
        return sum(-(-(size // recipe.reduce) // w) for size in self.buckets[:count]) * recipe.gradients

    def backward(self, i: int) -> list[Transient]:  # noqa: ARG002
        """The walk asks ``between`` for what gradients and buffers take."""
        return [Transient()]

    def finish(self) -> list[Transient]:
        """The gradients of the embedding come last."""
        return [Transient("embedding")]

    def _under_way(self, index: int) -> int:
        """Buffer of the bucket before ``index``, which is still being reduced; what comes out of it counts as a gradient already."""
        size = self.buckets[index - 1] if index else 0
        if self.plan.strategy.deepspeed_allreduce:
            return size
        added = -(-size // self.plan.shard) if not self.first else 0  # what comes out is added to a gradient that is there
        return size + self.copies(size) + added


class Fsdp2(Sharding):
    """FSDP2 and HSDP; see the head of this file. ``left``: input of a reduction of the micro-batch before, kept until the next one."""

    def __init__(self, plan: Plan, places: Sequence[UnitBytes], root: UnitBytes | None, root_early: int, first: bool) -> None:
        super().__init__(plan, places, root, root_early)
        last = root if root is not None else places[0] if places else None
        keeps = plan.strategy.marks_last_backward and plan.strategy.syncs_each and not first
        self.left = last.reduce if keeps and last is not None else 0

    def _resident(self, i: int) -> int:
        """Gathered bytes that stay while place i is used: the root's, and those of earlier places that were not freed after forward."""
        root = self.root.whole if self.root is not None and not self.plan.strategy.root_reshards else 0
        if self._stays():  # all places but the one that is counted by itself
            return root + sum(place.whole for index, place in enumerate(self.places) if index != i)
        return root + (sum(self._left(place) for place in self.places[:i]) if self.plan.strategy.reshard_after_forward is not True else 0)

    def _stays(self) -> bool:
        """Whether all units are gathered from the first micro-batch to the last; at the last one, nothing moves any more."""
        return not self.plan.strategy.reshard_after_backward and self.plan.batch.micro_batches > 1

    def _left(self, place: UnitBytes) -> int:
        """What is left of a place between its forward and backward."""
        after = self.plan.strategy.reshard_after_forward
        if after is True:
            return 0
        return place.whole if after is False else -(-place.whole // after)

    def forward(self, i: int) -> list[Transient]:
        """Copy-out, with two all-gather buffers; then compute."""
        place = self.places[i]
        before = self.places[i - 1] if i else self.root
        held, whole = self._resident(i), place.whole
        if self._stays():
            return [Transient("compute", held + whole, self.left)]
        second = before.buffer if before is not None and place.buffer else 0
        return [
            Transient("gather", held, self.left + place.buffer + second + place.cast + self.copies(place.buffer)),
            Transient("copy-out", held + whole, self.left + place.buffer + second),
            Transient("compute", held + whole, self.left + place.buffer),
        ]

    def loss(self) -> Transient:
        """The root, and all that was not freed."""
        return Transient("loss", self._resident(len(self.places)), self.left)

    def backward(self, i: int) -> list[Transient]:
        """The unit computes while the next one is gathered and the one before is reduced; then it is reduced itself."""
        place = self.places[i]
        gathers = self.plan.strategy.reshard_after_forward is not False
        ahead = self.places[i - 1].buffer + self.places[i - 1].cast if i and gathers else 0
        prefetched = self.places[i - 1].buffer if i and gathers else 0
        earlier = self.places[i + 1].reduce if i + 1 < len(self.places) else self.left
        held = self._resident(i)
        early, kept = self.root_early, self.kept_outputs(i + 1)
        output = place.reduced if self.plan.recipe.reduce != self.plan.recipe.gradient else 0
        return [
            Transient("prefetch", held + place.whole, ahead + self.copies(prefetched) + earlier + kept, early),
            Transient("compute", held + place.whole, prefetched + earlier + kept, early, own=1),
            Transient("reduce", held, prefetched + place.reduce + output + kept, early, own=1),
            *self._copied(held, prefetched + place.reduce + output + kept, early, place),
        ]

    def _copied(self, held: int, buffers: int, early: int, place: UnitBytes) -> list[Transient]:
        """The backend's copy of what is reduced; the gradients that were copied into it are free by then."""
        size = self.copies(place.reduce)
        return [Transient("reduce", held, buffers + size, early)] if size else []

    def kept_outputs(self, first: int) -> int:
        """HSDP that reduces in another type than it keeps holds the reduce-scatter output of every finished unit until backward ends."""
        if self.plan.replicas == 1 or self.plan.recipe.reduce == self.plan.recipe.gradient:
            return 0
        return sum(place.reduced for place in self.places[first:])

    def finish(self) -> list[Transient]:
        """The root's gradients are reduced when all else has been; the last place's reduce-scatter input is there until then."""
        kept = self.kept_outputs(0)
        earlier = self.places[0].reduce if self.places else 0
        if self.root is None:
            return [Transient("reduce", 0, earlier + kept)]
        whole = 0 if self.plan.strategy.root_reshards and not self.root_early else self.root.whole
        output = self.root.reduced if self.plan.recipe.reduce != self.plan.recipe.gradient else 0
        return [Transient("embedding", whole, earlier + kept, own=1), Transient("reduce", 0, self.root.reduce + output + kept, own=1)]
