"""Memory of one rank: model state, and the moment of a step at which everything together is most.

The step is walked through unit by unit (forward, loss, backward, optimizer). At each moment every category is a whole number of bytes, and
their sum is what is allocated then; the peak is the largest sum. Categories are those of ``tracekit analyze``, with ``logits`` and
``allocator_rounding`` beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tracekit.estimate.activations import Activations
from tracekit.estimate.allocator import reserved_bytes, rounding
from tracekit.estimate.backward import BackwardStep
from tracekit.estimate.buckets import zero_buckets
from tracekit.estimate.flat_units import Fsdp1, Zero3
from tracekit.estimate.gathered import Bucketed, Fsdp2, Sharding, Transient
from tracekit.estimate.model_state import ModelState, model_state
from tracekit.estimate.parameters import ROOT, Parameter
from tracekit.estimate.pipeline import in_flight_until_weight
from tracekit.estimate.places import (
    adds_in_place,
    by_part,
    early_root_elements,
    flat_copies,
    needs_sharding,
    places_of,
    receive_buffers,
    waiting_bytes,
)
from tracekit.estimate.plan import WHOLE_GRADIENTS, Plan
from tracekit.estimate.units import units_of

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer_state",
    "gathered_parameters",
    "unsharded_gradients",
    "communication_buffers",
    "activations",
    "logits",
    "inputs",
    "temporaries",
    "allocator_rounding",
)


@dataclass(frozen=True)
class Moment:
    """Bytes of every category at one moment. ``phase`` forward, backward or optimizer; ``unit`` where it is; ``what`` goes on there."""

    phase: str
    unit: str
    what: str
    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        """Everything allocated at the moment [bytes]."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank over a step. ``moments`` in order; ``reserved`` at least what the allocator takes from the device for the peak."""

    moments: tuple[Moment, ...]
    state: ModelState
    reserved: int

    @property
    def peak(self) -> Moment:
        """The first of the largest moments."""
        return max(self.moments, key=lambda moment: moment.total)

    def largest(self, phase: str) -> Moment | None:
        """The largest moment of a phase."""
        return max((m for m in self.moments if m.phase == phase), key=lambda m: m.total, default=None)


def rank_memory(
    parameters: Sequence[Parameter], activations: Sequence[Activations], plan: Plan, stage: int = 0, shard_rank: int = 0
) -> RankMemory:
    """Memory of a rank that holds ``parameters`` (those of its stage, divided by tp and ep, in order of use).

    ``activations``: one entry a chunk of the stage, of one micro-batch; the last one is the chunk whose passes are walked through.
    """
    return _Walk(parameters, activations, plan, stage, shard_rank).memory()


class _Walk:
    """One step of one rank."""

    def __init__(
        self, parameters: Sequence[Parameter], activations: Sequence[Activations], plan: Plan, stage: int, shard_rank: int
    ) -> None:
        self.plan, self.parameters = plan, parameters
        self.chunks, self.now = activations, activations[-1]
        units = units_of(parameters, plan, shard_rank)
        self.state = model_state(units, plan, parameters, shard_rank)
        self.root, self.places = places_of(units, plan)
        self.early_elements = early_root_elements(parameters)
        self.early = self.early_elements * plan.recipe.gradients
        self.root_elements = sum(p.elements for p in parameters if not p.unit)
        self.produced = 0
        self.by_part = by_part(units)
        #: Gradients are kept whole, as autograd leaves them.
        self.plain = plan.strategy.name in WHOLE_GRADIENTS or (plan.strategy.shards_parameters and not needs_sharding(plan))
        self.lost = rounding(self.state.tensors) if plan.device == "cuda" else 0
        self.received = receive_buffers(plan, stage, self.now.stream)
        self.stage = stage
        self.flat_copies = flat_copies(units, plan)
        self.first = plan.batch.micro_batches == 1
        self._begin()

    def _begin(self) -> None:
        """Set up for the first backward of the step (``first``: no gradient is there yet), or for a later one."""
        self.in_place = adds_in_place(self.plan, self.state.gradients_are_buckets, not self.first)
        self.sharding = _sharding(self)
        self.waiting = self._waiting()

    def _waiting(self) -> int:
        """Activations of the micro-batches (chunks) in flight beside the one that is being worked on, and their outputs [bytes].

        A backward that is not the first has let go of one micro-batch's before.
        """
        p, m, v = self.plan.mesh.pp, self.plan.batch.micro_batches, self.plan.virtual_stages
        if p == 1:
            return 0
        count = in_flight_until_weight(self.plan.schedule, p, m, v)[self.stage]
        count = count if self.first else min(count, m * v - 1)
        turns = [turn // p % v for turn in range(count)]  # chunks in the order of forward
        turns.remove(v - 1 if v - 1 in turns else turns[-1])
        return sum(waiting_bytes(self.chunks[turn]) for turn in turns)

    def memory(self) -> RankMemory:
        """All moments, and what the allocator reserves."""
        moments = tuple(self.moments())
        peak = max(moments, key=lambda moment: moment.total)
        held = reserved_bytes(self.state.tensors) if self.plan.device == "cuda" else sum(self.state.tensors)
        return RankMemory(moments, self.state, max(peak.total, held + peak.total - sum(self.state.tensors) - self.lost))

    def moments(self) -> Iterator[Moment]:
        """Forward and backward of a micro-batch before there are gradients, of a later one if there is one, then the optimizer."""
        for first in (True, False) if self.plan.batch.micro_batches > 1 else (True,):
            self.first = first
            self._begin()
            yield from self._passes()
        if self.plan.strategy.averages_after and self.flat_copies:
            kept = self.state.gradients + self.flat_copies
            yield self._moment("backward", "", Transient("average", kept=kept), 0, 0, -2, 0)
        yield self._moment("optimizer", "", Transient("step"), 0, self.state.optimizer_temporaries, -3, 0)

    def _passes(self) -> Iterator[Moment]:
        """Forward, loss and backward of one micro-batch."""
        names = [place.name for place in self.places]
        saved = [self.now.saved.get(name, 0) for name in names]
        beside = sum(size for unit, size in self.now.saved.items() if unit not in names)
        stream, count = self.now.stream, len(names)
        for i, name in enumerate(names):
            for t in self.sharding.forward(i):
                computes = t.what == "compute"
                held = sum(saved[: i + 1] if computes else saved[:i])
                yield self._moment("forward", name, t, held, stream * (2 if computes else 1), -1, i + computes)
        everything, loss = sum(saved) + beside, self.sharding.loss()
        yield self._moment("forward", "", loss, everything, 0, -1, count, self.now.logits_forward)
        yield self._moment("backward", "", loss, everything, 0, -1, count, self.now.logits_backward)
        self.produced = 0
        own = self._head_gradient()
        head = replace(loss, what="head", unsharded=loss.unsharded + self.sharding.root_early + (0 if self.plain else own))
        passing = stream + (own if self.plain else 0)
        for moment in filter(None, self._bucketed(head, self.early_elements)):
            yield self._moment("backward", "", moment, everything, passing, 0 if not names else count, count, self.now.logits_gradient)
        for i in reversed(range(count)):
            yield from self._backward(i, sum(saved[:i]), saved[i])
        for t in self.sharding.finish():
            for moment in filter(None, self._bucketed(self._owning(t, self._root_bytes()), self.root_elements - self.early_elements)):
                yield self._moment("backward", "", moment, 0, max(stream, self.now.embedding), -2, 0)

    def _head_gradient(self) -> int:
        """The head's gradient before it is added to one that is there [bytes]."""
        own = self.by_part.get(ROOT, {})
        return own.get("head", 0) * self.plan.recipe.autograd if self.in_place else 0

    def _root_bytes(self) -> int:
        """Whole gradients of the root, where they are not kept as they are [bytes]."""
        return self.root.gradients if self.root is not None and not self.plain else 0

    def _backward(self, i: int, earlier: int, own: int) -> Iterator[Moment]:
        """Moments of the backward of place i; ``earlier`` saved bytes of the places before, ``own`` of this one."""
        place = self.places[i]
        steps = self.now.backward.get(place.name) or (BackwardStep(own, self.now.stream), BackwardStep(0, self.now.stream, None))
        before = self.produced
        for t in self.sharding.backward(i):
            if t.what == "prefetch":
                yield self._moment("backward", place.name, t, earlier + steps[0].saved, self.now.stream, i, i + 1)
            elif t.what != "compute":
                yield self._moment("backward", place.name, self._owning(t, place.gradients), earlier, self.now.stream, i, i + 1)
            else:
                for step, after in zip(steps, [*steps[1:], steps[-1]], strict=True):
                    elements = self._elements(place.name, step.parts) + self._shares(place.name, step)
                    there = elements * self.plan.recipe.autograd
                    kept = 0 if not self.plain else elements * self.plan.recipe.gradients - place.kept
                    passing = step.temporaries + (there if self.plain and self.in_place else 0)
                    logits = self.now.logits_gradient if place.name == "head" and step.parts is not None else 0
                    owning = self._owning(replace(t, buffers=t.buffers + step.buffers), there)
                    computed, sent = self._bucketed(owning, before + elements - self.produced)
                    yield self._moment("backward", place.name, computed, earlier + step.saved, passing, i, i + 1, logits, kept)
                    if sent is not None:
                        yield self._moment("backward", place.name, sent, earlier + after.saved, passing, i, i + 1, logits, kept)
        self.produced = before + self.by_part[place.name][""]

    def _bucketed(self, t: Transient, elements: int) -> tuple[Transient, Transient | None]:
        """(the moment in which backward has brought the gradients of so many more elements, the one in which full buckets are sent)."""
        if not isinstance(self.sharding, Bucketed):
            return t, None
        size = self.plan.recipe.reduce
        before, self.produced = self.produced, self.produced + max(0, elements)
        computed, sent = self.sharding.between(before * size, self.produced * size)
        return replace(computed, what=t.what), sent

    def _owning(self, t: Transient, own: int) -> Transient:
        """The moment with its unit's gradients, unless those are kept as they are."""
        if t.what != "compute" and self.in_place:
            return t
        return t if self.plain else replace(t, unsharded=t.unsharded + t.own * own)

    def _elements(self, name: str, parts: tuple[str, ...] | None) -> int:
        """Elements of the parameters of a unit whose gradients are there, beside those that are added up in place."""
        if self.in_place:  # each one is added to what is there as soon as it is computed
            return self.by_part[name].get(parts[-1], 0) if parts else 0
        if parts is None:
            return self.by_part[name][""]
        return sum(self.by_part[name].get(part, 0) for part in parts)

    def _shares(self, name: str, step: BackwardStep) -> int:
        """Elements of parameters of which only some experts' gradients are there."""
        if self.in_place:
            return sum(self.by_part[name].get(part, 0) // count for part, _, count in step.shares[-1:])
        return sum(self.by_part[name].get(part, 0) * done // count for part, done, count in step.shares)

    def _moment(
        self,
        phase: str,
        unit: str,
        t: Transient,
        activations: int,
        temporaries: int,
        done: int,
        held: int,
        logits: int = 0,
        partly: int = 0,
    ) -> Moment:
        """``done``: place in backward (-1 before it, -2 after all places, -3 at the optimizer); ``held``: places whose casts are alive.

        ``partly``: what the place's kept gradients are too much, while only some of them are there (negative or 0).
        """
        last = done == -3
        gradients, whole = self._gradients(done)
        gradients = gradients if t.kept is None else t.kept
        sizes = {
            "parameters": self.state.parameters,
            "gradients": gradients + (partly if self._builds_up(done) else 0) + (self._handed() if phase == "backward" else 0),
            "optimizer_state": self.state.optimizer_state,
            "gathered_parameters": t.gathered,
            "unsharded_gradients": t.unsharded + whole,
            "communication_buffers": t.buffers + self.state.buckets + self.received,
            "activations": activations + (0 if done <= -2 else self.waiting),
            "logits": logits,
            "inputs": 0 if last else self.now.inputs,
            "temporaries": temporaries + (0 if last else self._casts(held)),
            "allocator_rounding": self.lost,
        }
        return Moment(phase, unit, t.what, sizes)

    def _handed(self) -> int:
        """Gradients of the stage's inputs [bytes]: that of the micro-batch before is on its way; of several chunks torch keeps a step's."""
        plan = self.plan
        p, m, v = plan.mesh.pp, plan.batch.micro_batches, plan.virtual_stages
        if p == 1 or not plan.receive_buffers or self.first:
            return 0
        if v == 1:
            return self.now.stream if self.stage else 0
        rounds, before = (m // p - 1) * p, p - 1  # behind it: whole rounds of p micro-batches, and its own chunk's of this one
        return self.now.stream * (rounds * (v - (self.stage == 0)) + before)

    def _builds_up(self, done: int) -> bool:
        """Whether gradients come one by one in this backward: not when they are views of buckets, or there from micro-batches before."""
        return done >= 0 and not self.state.gradients_are_buckets and self.first

    def _casts(self, held: int) -> int:
        """Copies of whole parameters in the compute type, which autocast makes and autograd keeps."""
        recipe = self.plan.recipe
        if self.plan.strategy.shards_parameters or recipe.compute == recipe.parameter:
            return 0
        root = self.root.whole if self.root is not None else 0
        return root + sum(place.whole for place in self.places[:held])

    def _gradients(self, done: int) -> tuple[int, int]:
        """(gradients kept to the optimizer, whole ones that are added up before they are reduced) [bytes]."""
        plan, many = self.plan, not self.first
        if self.state.gradients_are_buckets or done == -3 or (many and (plan.strategy.syncs_each or self.plain)):
            return self.state.gradients, 0
        finished = self.places[max(done, 0) if self.plain else done + 1 :] if done >= 0 else self.places if done == -2 else ()
        kept = sum(place.kept for place in finished)
        if self.plain:
            root = 0 if self.root is None else self.root.kept if done == -2 else self.early if done >= 0 else 0
            return kept + root, 0
        if not many:
            return kept, 0
        left = self.places[: done + 1] if done >= 0 else () if done == -2 else self.places
        return kept, sum(place.accumulated for place in left) + (self.root.accumulated if self.root is not None else 0)


def _sharding(walk: _Walk) -> Sharding:
    """The behaviour of the plan's strategy. Sets the bytes of the root's early gradients on the walk."""
    plan = walk.plan
    name, recipe = plan.strategy.name, plan.recipe
    transient = 0 if walk.plain or walk.in_place else walk.early_elements * recipe.autograd
    if name in ("zero1", "zero2") and plan.shard > 1 and not walk.state.buckets:
        buckets = [bucket.bytes for bucket in zero_buckets(walk.parameters, plan.strategy.bucket_cap_mb, recipe.reduce)]
        return Bucketed(plan, walk.places, walk.root, 0, buckets, name == "zero1", walk.first)
    if walk.plain or name == "zero2":
        return Sharding(plan, walk.places, walk.root)
    if plan.strategy.framework == "torch_fsdp2":
        return Fsdp2(plan, walk.places, walk.root, transient, walk.first)
    kind = Fsdp1 if name == "fsdp1" else Zero3
    return kind(plan, walk.places, walk.root, transient)
