"""FSDP2, FSDP1 and ZeRO-3 around each unit: gathered parameters, buffers of collectives, gradients that are still whole.

Symbols, for one unit of n padded elements over W ranks: q bytes of a gathered element, r of a reduced one, g of a gradient as autograd
leaves it.

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

from tracekit.estimate.parameters import ROOT
from tracekit.estimate.sharding import Sharding
from tracekit.estimate.timeline import GATHER, REDUCE
from tracekit.estimate.units import UnitBytes

_GATHERED, _BUFFERS, _UNSHARDED = "gathered_parameters", "communication_buffers", "unsharded_gradients"


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
