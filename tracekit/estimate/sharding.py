"""What a strategy allocates and frees around each unit: the base that gathers nothing, and optimizers that reduce in buckets.

Everything is counted as the program allocates and frees it; CUDA streams may hold a block a little longer ("active" memory). Strategies
that shard the parameters of each unit stand in ``unit_sharding``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from tracekit.estimate.plan import Plan
from tracekit.estimate.timeline import COMPUTE, Tape
from tracekit.estimate.units import UnitBytes

_GATHERED, _BUFFERS, _UNSHARDED = "gathered_parameters", "communication_buffers", "unsharded_gradients"


class Sharding:
    """Base: parameters are whole on every rank, nothing is gathered. Its methods are called in the order of a micro-batch."""

    gradients_stream = COMPUTE

    def __init__(self, plan: Plan, tape: Tape, root: UnitBytes | None, units: Sequence[UnitBytes]) -> None:
        self.plan, self.tape, self.root, self.units = plan, tape, root, units
        self.strategy, self.recipe = plan.strategy, plan.recipe
        self.first = self.last = self.reduces = True

    def begin(self, first: bool, last: bool) -> None:
        """A micro-batch begins: the first, the last one of the step, or both. Gradients are reduced behind it, or only added up."""
        self.first, self.last, self.reduces = first, last, last or self.plan.syncs_each

    def before_forward(self, i: int) -> None:
        """Unit i is about to compute."""

    def after_forward(self, i: int) -> None:
        """Unit i has computed."""

    def before_loss(self) -> None:
        """All units have computed."""

    def before_head(self) -> None:
        """The loss has its gradient; what the root has behind the units is about to compute its own."""

    def before_backward(self, i: int) -> None:
        """Unit i is about to compute gradients."""

    def computed(self, gradients: int, what: str = "compute") -> None:  # noqa: ARG002
        """Backward has brought so many bytes of gradients, of all units together, in the reduced type."""
        self.tape.mark(what)

    def sent(self) -> None:
        """What was computed is sent off where enough is there."""

    def after_backward(self, i: int) -> None:
        """Gradients of unit i are complete, in block ``own``."""

    def finish(self) -> None:
        """All units are done; the root's gradients are complete, in block ``own``."""
        self.tape.mark("embedding")

    def copies(self, size: int) -> int:
        """What the backend adds to a buffer of ``size`` bytes that is being gathered or reduced [bytes]."""
        return size if self.plan.implementation.backend_copies and self.plan.shard > 1 else 0

    def twice(self) -> None:
        """Gradients exist once more, put together in one flat tensor."""
        self.tape.put("flat", _UNSHARDED, self.tape.size("own"))

    @property
    def reshards(self) -> bool:
        """Whether units are freed after forward, all or in part."""
        return self.plan.reshard_after_forward is not False


class Bucketed(Sharding):
    """ZeRO-1 and ZeRO-2: whole parameters; gradients are copied into a bucket that is reduced, and (ZeRO-2) only a shard is kept.

    ``buckets``: bytes of each in order of backward. ZeRO-2 lets go of a bucket's gradients when they are in its buffer; one reduction is
    under way while the next bucket fills, so that two buffers may exist.
    """

    def __init__(
        self, plan: Plan, tape: Tape, root: UnitBytes | None, units: Sequence[UnitBytes], buckets: Sequence[int], keeps_whole: bool
    ) -> None:
        super().__init__(plan, tape, root, units)
        self.buckets, self.ends, self.keeps_whole = buckets, list(accumulate(buckets)), keeps_whole
        self.done = self.there = 0

    def begin(self, first: bool, last: bool) -> None:
        """No bucket is full yet."""
        super().begin(first, last)
        self.done = self.there = 0

    def computed(self, gradients: int, what: str = "compute") -> None:
        """All gradients that are not sent off yet are there, and the bucket before is still under way."""
        self.there = max(self.there, gradients)
        if self.reduces:
            self._hold(self.done, self.there - (self.ends[self.done - 1] if self.done else 0))
        self.tape.mark(what)

    def sent(self) -> None:
        """Each full bucket in turn."""
        full = bisect_right(self.ends, self.there) if self.reduces else 0
        for index in range(self.done, full):
            self._hold(index, self.buckets[index], self.buckets[index])
            self.tape.mark("send")
        self.done = max(self.done, full)

    def finish(self) -> None:
        """The gradients of the embedding come last; then the last bucket is under way alone."""
        self.computed(self.ends[-1] if self.ends else 0, "embedding")
        self.sent()
        if self.reduces:
            self._hold(self.done, 0)
            self.tape.mark("reduce")
        self.tape.drop("under way", "unsent")

    def _hold(self, done: int, unsent: int, filling: int = 0) -> None:
        """``done`` buckets are sent; ``unsent`` bytes of gradients wait, ``filling`` bytes of them copied into a buffer."""
        self.tape.put("unsent", _UNSHARDED, 0 if self.keeps_whole else unsent)
        self.tape.put("under way", _BUFFERS, self._under_way(done) + filling)
        if not self.keeps_whole and self.first:
            w, size = self.plan.shard, self.recipe.reduce
            kept = sum(-(-(bucket // size) // w) for bucket in self.buckets[:done])
            self.tape.put("shards", "gradients", kept * self.recipe.gradients)

    def _under_way(self, index: int) -> int:
        """Buffer of the bucket before ``index``, which is still being reduced; what comes out of it counts as a gradient already."""
        size = self.buckets[index - 1] if index else 0
        if self.plan.implementation.deepspeed_allreduce:
            return size
        added = -(-size // self.plan.shard) if not self.first else 0  # what comes out is added to a gradient that is there
        return size + self.copies(size) + added


class InPlace(Sharding):
    """ZeRO-1 whose gradients are views of one flat buffer a bucket, of ``buckets`` bytes: each is reduced where it lies, one at a time.

    Only what the backend adds for the bucket under way comes on top.
    """

    def __init__(self, plan: Plan, tape: Tape, root: UnitBytes | None, units: Sequence[UnitBytes], buckets: Sequence[int]) -> None:
        super().__init__(plan, tape, root, units)
        self.buckets, self.ends, self.there = buckets, list(accumulate(buckets)), 0

    def begin(self, first: bool, last: bool) -> None:
        """No bucket is full yet."""
        super().begin(first, last)
        self.there = 0

    def computed(self, gradients: int, what: str = "compute") -> None:
        """So many bytes of gradients are there."""
        self.there = max(self.there, gradients)
        self.tape.mark(what)

    def sent(self) -> None:
        """The bucket that was filled last is under way."""
        full = bisect_right(self.ends, self.there) if self.reduces else 0
        self.tape.put("under way", _BUFFERS, self.copies(self.buckets[full - 1]) if full else 0)
        self.tape.mark("send")

    def finish(self) -> None:
        """The gradients of the embedding come last."""
        self.computed(self.ends[-1] if self.ends else 0, "embedding")
        self.sent()
        self.tape.drop("under way")
