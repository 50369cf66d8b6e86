"""What sharding needs for a moment where a unit is one flat parameter: FSDP1 and ZeRO-3. Symbols as in ``gathered``.

FSDP1 (torch/distributed/fsdp/_runtime_utils.py, _flat_param.py; checked against torch 2.13)

    forward             the unit (q n), and this rank's shard of it in the gathered type while it is gathered
    backward, prefetch pre    unit + next unit + its gradients, twice: piece by piece and as the flat gradient they are copied into
    backward, post      the unit + its gradients twice; the next unit is gathered when this one is freed

ZeRO-3 gathers the next unit in forward as well, and one reduction is under way beside it.
"""

from __future__ import annotations

from tracekit.estimate.gathered import Sharding, Transient


class Fsdp1(Sharding):
    """FSDP1; see the head of this file."""

    def _resident(self, i: int) -> int:
        strategy = self.plan.strategy
        root = self.root.whole if self.root is not None and not strategy.root_reshards else 0
        if strategy.last_stays and i == len(self.places) and strategy.reshard_after_forward is not False:
            return root + (self.places[-1].whole if self.places else 0)
        kept = sum(place.whole for place in self.places[:i]) if strategy.reshard_after_forward is False else 0
        return root + kept

    def forward(self, i: int) -> list[Transient]:
        """One unit at a time."""
        place = self.places[i]
        held = self._resident(i) + place.whole
        return [Transient("gather", held, place.cast + self.copies(place.whole)), Transient("compute", held)]

    def loss(self) -> Transient:
        """The root, and all that was not freed."""
        return Transient("loss", self._resident(len(self.places)))

    def backward(self, i: int) -> list[Transient]:
        """The unit computes with the next one beside it (prefetch pre); then its gradient is reduced."""
        place, strategy = self.places[i], self.plan.strategy
        freed = strategy.reshard_after_forward is not False
        following = self.places[i - 1] if i and freed else None
        beside = following.whole if following is not None and strategy.backward_prefetch == "pre" else 0
        later = following.whole if following is not None and strategy.backward_prefetch != "none" else 0
        held = self._resident(i)
        wider = place.accumulated if self.plan.recipe.reduce != self.plan.recipe.autograd else 0
        reduced = place.reduced + self.copies(place.reduce)
        return [
            Transient("prefetch", held + place.whole + beside, self.copies(beside), self.root_early),
            Transient("compute", held + place.whole + beside, 0, self.root_early, own=1),
            Transient("flatten", held + place.whole + beside, 0, self.root_early, own=2),
            Transient("reduce", held + later, reduced + self.copies(later - beside), wider + self.root_early, own=1),
        ]

    def finish(self) -> list[Transient]:
        """The root's gradient is made flat and reduced."""
        if self.root is None:
            return [Transient("reduce")]
        wider = self.root.accumulated if self.plan.recipe.reduce != self.plan.recipe.autograd else 0
        whole = 0 if self.plan.strategy.root_reshards else self.root.whole
        return [
            Transient("embedding", whole, own=2),
            Transient("reduce", 0, self.root.reduced, wider, own=1),
        ]


class Zero3(Fsdp1):
    """ZeRO-3 with flat units: the next one is gathered while one computes, in forward as well; one reduction is under way beside it.

    A backend's copy of what is gathered is taken to be gone before the unit's own temporaries come: that is a matter of timing.
    Gradients of views are copied into a flat one, as in FSDP1. ``last_stays``: the last unit is not freed between its two passes.
    """

    def _following(self, i: int) -> int:
        return self.places[i].whole if 0 <= i < len(self.places) and self.plan.strategy.backward_prefetch != "none" else 0

    def forward(self, i: int) -> list[Transient]:
        """The unit and the next one."""
        held, following = self._resident(i) + self.places[i].whole, self._following(i + 1)
        return [Transient("gather", held + following, self.copies(following)), Transient("compute", held + following)]

    def backward(self, i: int) -> list[Transient]:
        """The unit, the next one, and the reduction of the one before; then the unit's own reduction."""
        place, recipe = self.places[i], self.plan.recipe
        freed = self.plan.strategy.reshard_after_forward is not False
        held, beside = self._resident(i), self._following(i - 1) if freed else 0
        earlier = self.places[i + 1].reduce if i + 1 < len(self.places) else 0
        wider = place.reduce if recipe.reduce != recipe.autograd else 0
        copies = self.copies(earlier)
        if recipe.reduce != recipe.autograd:  # not the flat gradient is under way, but a wider copy of it
            copies, earlier = copies + earlier, 0
        return [
            Transient("prefetch", held + place.whole + beside, self.copies(beside) + copies, earlier),
            Transient("compute", held + place.whole + beside, copies, earlier, own=1),
            Transient("flatten", held + place.whole + beside, copies, earlier, own=2),
            Transient("reduce", held + beside, copies, earlier + wider, own=1),
        ]
