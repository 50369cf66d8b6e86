"""What sharding allocates and frees around each unit: gathered parameters, buffers of collectives, gradients that are still whole.

Symbols, for one unit of n padded elements over W ranks: q bytes of a gathered element, r of a reduced one, g of a gradient as autograd
leaves it. Everything is counted as the program allocates and frees it; CUDA streams may hold a block a little longer ("active" memory).

FSDP2 (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py; checked against torch 2.13)

    forward, copy-out   the unit (q n) + its all-gather buffer (q n) + the buffer of the unit before, freed after this copy
    forward, compute    the unit + its all-gather buffer
    backward, compute   the unit + the buffer of the next one + its gradients (g n) + the reduce-scatter input of the one before (r n)
    backward, reduce    the prefetched buffer + its gradients + its reduce-scatter input (+ its output in another type, r n / W)

FSDP1 (torch/distributed/fsdp/_runtime_utils.py, _flat_param.py; checked against torch 2.13)

    forward             the unit (q n), and this rank's shard of it in the gathered type while it is gathered
    backward, prefetch pre    unit + next unit + its gradients, twice: piece by piece and as the flat gradient they are copied into
    backward, post      the unit + its gradients twice; the next unit is gathered when this one is freed

ZeRO-3 with flat units gathers the next unit in forward as well, and one reduction is under way beside it. The root stays gathered from the
start of forward to the end of backward unless ``root_reshards``. On CUDA what FSDP2 gathers into, and what comes out of its reductions
(gradients), is taken from streams of their own, whose segments nothing else can use (_fsdp_collectives.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from tracekit.estimate.parameters import ROOT
from tracekit.estimate.plan import Plan
from tracekit.estimate.timeline import COMPUTE, GATHER, REDUCE, Tape
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


class Fsdp2(Sharding):
    """FSDP2 and HSDP; see the head of this file. ``there``: all units stay gathered from a micro-batch before."""

    there = False
    gradients_stream = REDUCE

    def begin(self, first: bool, last: bool) -> None:
        """The root is gathered, in the same way as the others."""
        super().begin(first, last)
        if self.root is not None and not self.plan.implementation.root_reshards and not self.there:
            self.tape.put(("gathered", ROOT), _GATHERED, self.root.whole)
            self.tape.put(("buffer", -1), _BUFFERS, self.root.buffer, GATHER)

    def before_forward(self, i: int) -> None:
        """Copy-out, with two all-gather buffers."""
        if self.there:
            return
        unit = self.units[i]
        self._gather(i)
        self.tape.mark("gather")
        self.tape.drop("cast", "copy")
        self.tape.put(("gathered", i), _GATHERED, unit.whole)
        self.tape.mark("copy-out")
        self.tape.drop(("buffer", i - 1))

    def _gather(self, i: int) -> None:
        unit = self.units[i]
        self.tape.put(("buffer", i), _BUFFERS, unit.buffer, GATHER)
        self.tape.put("cast", _BUFFERS, unit.cast, GATHER)
        self.tape.put("copy", _BUFFERS, self.copies(unit.buffer))

    def after_forward(self, i: int) -> None:
        """What stays between forward and backward."""
        whole, after = self.units[i].whole, self.plan.reshard_after_forward
        if after is True:
            self.tape.drop(("gathered", i))
        elif after is not False:
            self.tape.put(("gathered", i), _GATHERED, -(-whole // after))

    def before_loss(self) -> None:
        """The last buffer is free."""
        self.tape.drop(("buffer", len(self.units) - 1))
        self.there = not self.plan.reshard_after_backward

    def before_head(self) -> None:
        """The root's backward begins, and with it the last unit is on its way."""
        if self.root is not None and self.units and self.reshards and not self.there:
            self._gather(len(self.units) - 1)
            self.tape.mark("prefetch")
            self.tape.drop("cast", "copy")

    def before_backward(self, i: int) -> None:
        """The unit is gathered, and the next one on its way."""
        self.tape.put(("gathered", i), _GATHERED, self.units[i].whole)
        self.tape.drop(("buffer", i))
        if i and self.reshards:
            self._gather(i - 1)
        self.tape.mark("prefetch")
        self.tape.drop("cast", "copy")

    def after_backward(self, i: int) -> None:
        """The unit is freed, then reduced."""
        if self.plan.reshard_after_backward or self.last:
            self.tape.drop(("gathered", i))
        if self.reduces:
            self._reduce(self.units[i], i)

    def _reduce(self, unit: UnitBytes, i: int) -> None:
        """The input of the reduction before is free when this one's is filled. The backend's copy comes when gradients are gone."""
        other_type = self.recipe.reduce != self.recipe.gradient
        self.tape.put("input", _BUFFERS, unit.reduce)
        self.tape.put(("output", i), _BUFFERS, unit.reduced if other_type else 0, REDUCE)
        self.tape.mark("reduce")
        self.tape.drop("own")
        if i >= 0 and self.copies(unit.reduce):
            self.tape.put("copy", _BUFFERS, self.copies(unit.reduce))
            self.tape.mark("reduce")
            self.tape.drop("copy")
        if self.plan.replicas == 1:  # HSDP holds the outputs of all units until backward ends
            self.tape.drop(("output", i))

    def finish(self) -> None:
        """The root's gradients are reduced when all else has been; the last unit's reduce-scatter input is there until then."""
        root = self.root
        if root is None:
            self.tape.mark("reduce")
        else:
            if not self.plan.implementation.root_reshards or self.tape.size("early"):
                self.tape.put(("gathered", ROOT), _GATHERED, root.whole)
            self.tape.drop("early")
            self.tape.mark("embedding")
            if self.plan.reshard_after_backward or self.last:
                self.tape.drop(("gathered", ROOT))
            if self.reduces:
                self._reduce(root, -1)
        self.tape.drop(*(("output", i) for i in range(-1, len(self.units))))
        if self.last or not self.plan.implementation.marks_last_backward:
            self.tape.drop("input")


class Fsdp1(Sharding):
    """FSDP1; see the head of this file."""

    def begin(self, first: bool, last: bool) -> None:
        """The root is gathered."""
        super().begin(first, last)
        if self.root is not None and not self.plan.implementation.root_reshards:
            self.tape.put(("gathered", ROOT), _GATHERED, self.root.whole)

    def before_forward(self, i: int) -> None:
        """One unit at a time."""
        unit = self.units[i]
        self.tape.put(("gathered", i), _GATHERED, unit.whole)
        self.tape.put("copy", _BUFFERS, unit.cast + self.copies(unit.whole))
        self.tape.mark("gather")
        self.tape.drop("copy")

    def after_forward(self, i: int) -> None:
        """Freed, unless it is used again at once."""
        if self.reshards and not (self.plan.implementation.last_stays and i == len(self.units) - 1):
            self.tape.drop(("gathered", i))

    def before_backward(self, i: int) -> None:
        """The unit, and with prefetch pre the next one beside it."""
        self.tape.put(("gathered", i), _GATHERED, self.units[i].whole)
        self._prefetch(i, "pre")
        self.tape.mark("prefetch")
        self.tape.drop("copy")

    def _prefetch(self, i: int, when: str) -> None:
        if i and self.reshards and self.strategy.backward_prefetch == when:
            following = self.units[i - 1].whole
            self.tape.put(("gathered", i - 1), _GATHERED, following)
            self.tape.put("copy", _BUFFERS, self.copies(following))

    def after_backward(self, i: int) -> None:
        """Gradients become one flat tensor, which is reduced."""
        unit = self.units[i]
        self.twice()
        self.tape.mark("flatten")
        self.tape.drop("flat", ("gathered", i))
        self._prefetch(i, "post")
        if self.reduces:
            self._reduce(unit, self.copies(unit.reduce))
        self.tape.drop("copy")

    def _reduce(self, unit: UnitBytes, copies: int) -> None:
        self.tape.put("output", _BUFFERS, unit.reduced + copies)
        self.tape.put("wider", _UNSHARDED, unit.accumulated if self.recipe.reduce != self.recipe.autograd else 0)
        self.tape.mark("reduce")
        self.tape.drop("output", "wider")

    def finish(self) -> None:
        """The root's gradient is made flat and reduced."""
        self.tape.drop("early", "under way")
        if self.root is None:
            self.tape.mark("reduce")
            return
        self.twice()
        self.tape.mark("embedding")
        self.tape.drop("flat", ("gathered", ROOT))
        if self.reduces:
            self._reduce(self.root, 0)


class Zero3(Fsdp1):
    """ZeRO-3 with flat units: the next one is gathered while one computes, in forward as well; one reduction is under way beside it.

    A backend's copy of what is gathered is taken to be gone before the unit's own temporaries come: that is a matter of timing.
    Gradients of views are copied into a flat one, as in FSDP1. ``last_stays``: the last unit is not freed between its two passes.
    """

    def _follow(self, i: int) -> None:
        """Unit i is gathered beside the one at work."""
        if 0 <= i < len(self.units) and self.strategy.backward_prefetch != "none":
            self.tape.put(("gathered", i), _GATHERED, self.units[i].whole)
            self.tape.put("copy", _BUFFERS, self.copies(self.units[i].whole))

    def before_forward(self, i: int) -> None:
        """The unit and the next one."""
        self.tape.put(("gathered", i), _GATHERED, self.units[i].whole)
        self._follow(i + 1)
        self.tape.mark("gather")
        self.tape.drop("copy")

    def before_backward(self, i: int) -> None:
        """The unit, the next one, and the reduction of the one before."""
        self.tape.put(("gathered", i), _GATHERED, self.units[i].whole)
        if self.reshards:
            self._follow(i - 1)
        self.tape.mark("prefetch")
        self.tape.drop("copy")

    def after_backward(self, i: int) -> None:
        """Then the unit's own reduction: of its flat gradient, or of a wider copy of it."""
        unit, wider = self.units[i], self.recipe.reduce != self.recipe.autograd
        self.twice()
        self.tape.mark("flatten")
        self.tape.drop("flat", ("gathered", i))
        if not self.reduces:
            return
        self.tape.put("wider", _UNSHARDED, unit.reduce if wider else 0)
        self.tape.mark("reduce")
        self.tape.drop("wider")
        self.tape.put("under way", _BUFFERS if wider else _UNSHARDED, unit.reduce)
        self.tape.put("under way, copied", _BUFFERS, self.copies(unit.reduce))

    def finish(self) -> None:
        """The last reduction is over."""
        self.tape.drop("under way, copied")
        super().finish()
