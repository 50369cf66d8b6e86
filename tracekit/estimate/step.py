"""One step of one rank, gone through: forward, loss and backward of a micro-batch, then the optimizer, every allocation on a tape.

Of several micro-batches two are gone through: the first, in which gradients come into being, and one of the later ones, which finds them
there. ``sharding`` and ``unit_sharding`` are what the framework does around each unit.
"""

from __future__ import annotations

from collections.abc import Sequence

from tracekit.estimate.activations import Activations, BackwardStep
from tracekit.estimate.allocator import rounding
from tracekit.estimate.buckets import zero_buckets
from tracekit.estimate.model_state import ModelState
from tracekit.estimate.parameters import ROOT, Parameter, early_root_elements
from tracekit.estimate.pipeline import in_flight_until_weight
from tracekit.estimate.plan import WHOLE_GRADIENTS, Plan
from tracekit.estimate.sharding import Bucketed, InPlace, Sharding
from tracekit.estimate.timeline import Sums, Tape
from tracekit.estimate.unit_sharding import Fsdp1, Fsdp2, Zero3
from tracekit.estimate.units import Unit, UnitBytes, used_together


class Step:
    """One step of one rank. Blocks on the tape are named by what they are, those of unit i with its number."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        units: Sequence[Unit],
        state: ModelState,
        activations: Sequence[Activations],
        plan: Plan,
        stage: int,
    ) -> None:
        self.plan, self.recipe, self.state, self.stage = plan, plan.recipe, state, stage
        self.chunks, self.now = activations, activations[-1]
        self.root, self.units = used_together(units, plan)
        self.early = early_root_elements(parameters)
        #: Gradients are kept whole, as autograd leaves them.
        self.plain = plan.strategy.name in WHOLE_GRADIENTS or (plan.strategy.shards_parameters and not needs_sharding(plan))
        self.flat_copies = flat_copies(units, plan) if plan.implementation.averages_after else 0
        self.tape = Tape()
        self.sharding = self._sharding(parameters)
        self.first = True
        self.arrived = 0  # elements whose gradients this micro-batch has brought

    def _sharding(self, parameters: Sequence[Parameter]) -> Sharding:
        """The behaviour of the plan's strategy."""
        plan, name, base = self.plan, self.plan.strategy.name, (self.plan, self.tape, self.root, self.units)
        if name in ("zero1", "zero2") and plan.shard > 1 and not self.state.buckets and plan.framework != "megatron":
            buckets = [bucket.bytes for bucket in zero_buckets(parameters, plan.strategy.bucket_cap_mb, plan.recipe.reduce)]
            views = self.state.gradients_are_buckets
            return InPlace(*base, buckets) if views else Bucketed(*base, buckets, name == "zero1")
        if self.plain or name == "zero2":
            return Sharding(*base)
        if plan.framework == "torch_fsdp2":
            return Fsdp2(*base)
        return Fsdp1(*base) if name == "fsdp1" else Zero3(*base)

    def run(self) -> Sums:
        """Forward and backward of a micro-batch before there are gradients, of a later one if there is one, then the optimizer."""
        self._start()
        many = self.plan.batch.micro_batches > 1
        if many and not self.plan.reshard_after_backward:
            self._gather_for_all()
        for first in (True, False) if many else (True,):
            self._begin(first, not (first and many))
            self._forward()
            self._loss()
            for i in reversed(range(len(self.units))):
                self._backward(i)
            self._finish()
        self._optimizer()
        return self.tape.sums()

    def _gather_for_all(self) -> None:
        """The forward of the very first micro-batch, before others wait: it gathers the units, which stay."""
        self._begin(first=True, last=False)
        self.tape.drop("waiting")
        self._forward()
        self.tape.drop(*(("saved", i) for i in range(len(self.units))))

    def _start(self) -> None:
        """What is there before the step, and its inputs."""
        state, tape = self.state, self.tape
        tape.put("parameters", "parameters", state.parameters)
        tape.put("optimizer state", "optimizer_state", state.optimizer_state)
        tape.put("buckets", "communication_buffers", state.buckets)
        tape.put("rounding", "allocator_rounding", rounding(state.tensors) if self.plan.device == "cuda" else 0)
        tape.put("received", "communication_buffers", receive_buffers(self.plan, self.stage, self.now.stream))
        tape.put("positions", "buffers", sum(chunk.positions for chunk in self.chunks))
        tape.put("inputs", "inputs", self.now.inputs)
        if state.gradients_are_buckets:
            tape.put("gradients", "gradients", state.gradients)
        if self.root is not None:
            self._cast(ROOT, self.root)

    def _begin(self, first: bool, last: bool) -> None:
        """Set up for a micro-batch."""
        self.first, self.arrived = first, 0
        self.in_place = adds_in_place(self.plan, self.state.gradients_are_buckets, not first)
        #: All gradients that stay are there, from the start or from micro-batches before.
        self.there = self.state.gradients_are_buckets or (not first and (self.plan.syncs_each or self.plain))
        self.tape.phase = "forward"
        self.tape.put("waiting", "activations", self._waiting())
        self.sharding.begin(first, last)

    def _waiting(self) -> int:
        """Activations of the micro-batches (chunks) in flight beside the one that is being worked on, and their outputs [bytes].

        A backward that is not the first has let go of one micro-batch's before.
        """
        p, m, v = self.plan.mesh.pp, self.plan.batch.micro_batches, self.plan.virtual_stages
        if p == 1:
            return 0
        count = min(m * v, in_flight_until_weight(self.plan.schedule, p, m, v)[self.stage] + self.plan.expert_overlap)
        count = count if self.first else min(count, m * v - 1)
        turns = [turn // p % v for turn in range(count)]  # chunks in the order of forward
        turns.remove(v - 1 if v - 1 in turns else turns[-1])
        return sum(waiting_bytes(self.chunks[turn], self.plan.implementation.frees_outputs) for turn in turns)

    def _forward(self) -> None:
        """Every unit in turn, what it saves and hands on."""
        tape, stream = self.tape, self.now.stream
        for i, unit in enumerate(self.units):
            tape.unit = unit.name
            tape.put("passing", "temporaries", stream)
            self.sharding.before_forward(i)
            tape.put(("saved", i), "activations", self.now.saved.get(unit.name, 0))
            tape.put("passing", "temporaries", 2 * stream)
            self._cast(i, unit)
            tape.mark("compute")
            self.sharding.after_forward(i)
        tape.unit = ""
        tape.drop("passing")
        if not self.units:  # all is one unit: what it was gathered into is free when its forward is over
            tape.put("saved by the root", "activations", sum(self.now.saved.values()))
            tape.put("logits", "logits", self.now.logits_output)
            tape.mark("compute")
        self.sharding.before_loss()

    def _cast(self, block: int | str, unit: UnitBytes) -> None:
        """The copy of whole parameters in the compute type, which autocast makes and autograd keeps."""
        if not self.plan.strategy.shards_parameters and self.recipe.compute != self.recipe.parameter:
            self.tape.put(("autocast", block), "temporaries", unit.whole)

    def _loss(self) -> None:
        """Logits and their gradient; then the head's backward brings the gradients of what the root has behind the units."""
        tape, now, names = self.tape, self.now, {unit.name for unit in self.units}
        tape.put("saved by the root", "activations", sum(size for unit, size in now.saved.items() if unit not in names))
        tape.put("logits", "logits", now.logits_forward)
        tape.mark("loss")
        tape.phase = "backward"
        tape.put("handed on", "gradients", self._handed())
        tape.put("logits", "logits", now.logits_backward)
        tape.idle("logits' segment", now.logits_idle)
        tape.mark("loss")
        tape.drop("logits' segment")
        head = self.root.parts.get("head", 0) * self.recipe.autograd if self.root is not None and self.in_place else 0
        tape.put("logits", "logits", now.logits_gradient)
        self.sharding.before_head()
        tape.put("passing", "temporaries", now.stream + (head if self.plain else 0))
        tape.put("own", "unsharded_gradients", 0 if self.plain else head)
        if not self.there and self.plain:
            tape.put("early", "gradients", self.early * self.recipe.gradients)
        elif not (self.plain or self.in_place or isinstance(self.sharding, Bucketed)):
            tape.put("early", "unsharded_gradients", self.early * self.recipe.autograd)
        self._bring(self.early, "head")
        tape.drop("own", "logits", "saved by the root")

    def _bring(self, elements: int, what: str) -> None:
        """Gradients of so many elements are there by now: the moment, and what it sets off."""
        self.arrived = max(self.arrived, elements)
        self.sharding.computed(self.arrived * self.recipe.reduce, what)
        self.sharding.sent()

    def _handed(self) -> int:
        """Gradients of the stage's inputs [bytes]: that of the micro-batch before is on its way; of several chunks torch keeps a step's."""
        plan = self.plan
        p, m, v = plan.mesh.pp, plan.batch.micro_batches, plan.virtual_stages
        if p == 1 or not plan.implementation.receive_buffers or self.first:
            return 0
        if v == 1:
            return self.now.stream if self.stage else 0
        rounds, before = (m // p - 1) * p, p - 1  # behind it: whole rounds of p micro-batches, and its own chunk's of this one
        return self.now.stream * (rounds * (v - (self.stage == 0)) + before)

    def _backward(self, i: int) -> None:
        """Unit i: what it saved is used up step by step, gradients come one after another."""
        tape, unit, stream = self.tape, self.units[i], self.now.stream
        steps = self.now.backward.get(unit.name) or (
            BackwardStep(self.now.saved.get(unit.name, 0), stream),
            BackwardStep(0, stream, None),
        )
        before = self.arrived
        tape.unit = unit.name
        tape.put(("saved", i), "activations", steps[0].saved)
        tape.put("passing", "temporaries", stream)
        self.sharding.before_backward(i)
        for step, after in zip(steps, [*steps[1:], steps[-1]], strict=True):
            elements = self._elements(unit, step)
            tape.put(("saved", i), "activations", step.saved)
            tape.put("passing", "temporaries", step.temporaries)
            tape.put("logits", "logits", self.now.logits_gradient if unit.name == "head" and step.parts is not None else 0)
            tape.put("exchange", "communication_buffers", step.buffers)
            self._own(i, elements)
            self.arrived = max(self.arrived, before + elements)
            self.sharding.computed(self.arrived * self.recipe.reduce)
            tape.put(("saved", i), "activations", after.saved)
            self.sharding.sent()
        self.arrived = before + unit.parts[""]
        tape.put("passing", "temporaries", stream)
        tape.drop(("saved", i), "exchange")
        if not self.plain:
            tape.put("own", "unsharded_gradients", 0 if self.in_place else unit.gradients)
        self.sharding.after_backward(i)
        self._keep(i, unit)
        tape.drop("own", ("autocast", i))

    def _elements(self, unit: UnitBytes, step: BackwardStep) -> int:
        """Elements of the unit's gradients that are there; where they are added up in place, of the one that is being added."""
        parts = unit.parts
        if self.in_place:
            shared = sum(parts.get(part, 0) // count for part, _, count in step.shares[-1:])
            return shared + (parts.get(step.parts[-1], 0) if step.parts else 0)
        shared = sum(parts.get(part, 0) * done // count for part, done, count in step.shares)
        return shared + (parts[""] if step.parts is None else sum(parts.get(part, 0) for part in step.parts))

    def _own(self, i: int, elements: int) -> None:
        """Gradients of unit i while it computes: kept as they are, added to what is there, or whole until they are reduced."""
        size = elements * self.recipe.autograd
        if self.plain and self.in_place:
            self.tape.put("own", "temporaries", size)
        elif self.plain and not self.there:
            self.tape.put(("gradient", i), "gradients", elements * self.recipe.gradients)
        elif not self.plain and not isinstance(self.sharding, Bucketed):
            self.tape.put("own", "unsharded_gradients", size)

    def _keep(self, i: int, unit: UnitBytes) -> None:
        """What stays of the gradients of unit i behind its backward."""
        if self.plain or self.there:
            return
        self.tape.drop(("accumulated", i))
        if not self.sharding.reduces:
            self.tape.put(("accumulated", i), "unsharded_gradients", unit.accumulated)
        elif not isinstance(self.sharding, Bucketed) or not self.first:
            self.tape.put(("gradient", i), "gradients", unit.kept, self.sharding.gradients_stream)

    def _finish(self) -> None:
        """The embedding's backward, then the root's gradients are reduced."""
        tape, root = self.tape, self.root
        tape.unit = ""
        tape.put("passing", "temporaries", max(self.now.stream, self.now.embedding))
        tape.drop("waiting")
        if root is not None and self.plain and not self.there:
            tape.drop("early")
            tape.put(("gradient", ROOT), "gradients", root.kept)
        if root is not None and not self.plain and not self.in_place and not isinstance(self.sharding, Bucketed):
            tape.put("own", "unsharded_gradients", root.gradients)
        self.sharding.finish()
        if root is not None and not self.plain and not self.sharding.reduces:
            tape.put(("accumulated", ROOT), "unsharded_gradients", root.accumulated)
        tape.drop("early", "own", "passing")
        if self.plain or self.sharding.reduces:
            self._settle()

    def _settle(self) -> None:
        """All gradients have become those that the optimizer takes."""
        self.tape.drop("shards", ("accumulated", ROOT), *(("gradient", i) for i in (ROOT, *range(len(self.units)))))
        self.tape.put("gradients", "gradients", self.state.gradients, self.sharding.gradients_stream)

    def _optimizer(self) -> None:
        """Gradients are averaged where nothing else has done so; then the optimizer's step."""
        tape = self.tape
        if self.flat_copies:
            tape.put("flat", "gradients", self.flat_copies)
            tape.mark("average")
            tape.drop("flat")
        tape.phase = "optimizer"
        tape.drop("handed on", "inputs", ("autocast", ROOT))
        tape.put("step", "temporaries", self.state.optimizer_temporaries)
        tape.mark("step")


def needs_sharding(plan: Plan) -> bool:
    """False for a group of one that computes with what it stores: nothing is gathered, gradients are kept as they come."""
    return plan.framework == "torch_fsdp2" or plan.shard > 1 or plan.recipe.compute != plan.recipe.parameter


def receive_buffers(plan: Plan, stage: int, message: int) -> int:
    """Bytes of the buffers in which torch's stages receive: one for each micro-batch and neighbour, there from the start.

    torch/distributed/pipelining/stage.py, ``_create_act_recv_info``; with several chunks a rank, for each of them.
    """
    p, m, v = plan.mesh.pp, plan.batch.micro_batches, plan.virtual_stages
    if p == 1 or not plan.implementation.receive_buffers:
        return 0
    return m * message * (2 * v - (stage == 0) - (stage == p - 1))


def waiting_bytes(chunk: Activations, frees_outputs: bool) -> int:
    """What one micro-batch keeps of a chunk between its two passes, its output too [bytes]."""
    output = 0 if frees_outputs else chunk.logits_output or chunk.stream
    return sum(chunk.saved.values()) + chunk.logits_saved + chunk.inputs + output


def flat_copies(units: Sequence[Unit], plan: Plan) -> int:
    """Most that is copied at once to be averaged [bytes]: dense gradients, or experts', where other ranks have them too."""
    size = {expert: sum(u.elements for u in units if u.expert == expert and u.r > 1) for expert in (False, True)}
    return max(size.values()) * plan.recipe.gradient


def adds_in_place(plan: Plan, views: bool, many: bool) -> bool:
    """Whether autograd adds each whole gradient to one that is there (``many``: of micro-batches before; ``views``: of DDP's buckets).

    Then it lives for a moment only. That is so where gradients of several micro-batches are not reduced in between, and have no other type.
    """
    if not plan.strategy.shards_parameters:
        return views or (many and plan.strategy.name != "zero2" and plan.recipe.gradient == plan.recipe.autograd)
    return many and not plan.syncs_each and plan.recipe.reduce == plan.recipe.autograd
