"""Memory of one rank: model state, and the moment of a step at which everything together is most.

The step is walked through unit by unit (forward, loss, backward, optimizer). At each moment every category is a whole number of bytes, and
their sum is what is allocated then; the peak is the largest sum. Categories are those of ``tracekit analyze``, with ``logits`` and
``allocator_rounding`` beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tracekit.estimate.activations import Activations
from tracekit.estimate.allocator import reserved_bytes, rounding
from tracekit.estimate.buckets import MIB, assign
from tracekit.estimate.gathered import Bucketed, Fsdp1, Fsdp2, Sharding, Transient, UnitBytes, unit_bytes
from tracekit.estimate.model_state import ModelState, model_state
from tracekit.estimate.parameters import Parameter
from tracekit.estimate.pipeline import in_flight_until_weight
from tracekit.estimate.plan import Plan
from tracekit.estimate.units import Unit, units_of

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
#: Without another word, ZeRO-1 and ZeRO-2 reduce gradients in buckets of this many bytes.
ZERO_BUCKET_BYTES = 25 * MIB


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
        self.state = model_state(units, plan)
        self.root, self.places = _places(units, plan)
        self.early = _early_root_elements(parameters)
        self.sharding = _sharding(self)
        self.waiting = self._waiting(stage)
        self.lost = rounding(self.state.tensors) if plan.device == "cuda" else 0

    def _waiting(self, stage: int) -> int:
        """Activations of the micro-batches (chunks) in flight beside the one that is being worked on [bytes]."""
        p, m, v = self.plan.mesh.pp, self.plan.batch.micro_batches, self.plan.virtual_stages
        count = in_flight_until_weight(self.plan.schedule, p, m, v)[stage] if p > 1 else 1
        each = max(sum(chunk.saved.values()) + chunk.logits_saved + chunk.inputs for chunk in self.chunks)
        return (count - 1) * each

    def memory(self) -> RankMemory:
        """All moments, and what the allocator reserves."""
        moments = tuple(self.moments())
        peak = max(moments, key=lambda moment: moment.total)
        held = reserved_bytes(self.state.tensors) if self.plan.device == "cuda" else sum(self.state.tensors)
        return RankMemory(moments, self.state, max(peak.total, held + peak.total - sum(self.state.tensors) - self.lost))

    def moments(self) -> Iterator[Moment]:
        """Forward and backward of the last micro-batch, then the optimizer."""
        names = [place.name for place in self.places]
        saved = [self.now.saved.get(name, 0) for name in names]
        beside = sum(size for unit, size in self.now.saved.items() if unit not in names)
        for i, name in enumerate(names):
            for transient in self.sharding.forward(i):
                during = self.now.forward.get(name, 0) if transient.what == "compute" else 0
                yield self._moment("forward", name, transient, sum(saved[: i + 1]), 0, during, -1, i + 1)
        everything = sum(saved) + beside
        loss, count = self.sharding.loss(), len(names)
        yield self._moment("forward", "", loss, everything, self.now.logits_forward, 0, -1, count)
        yield self._moment("backward", "", loss, everything, self.now.logits_backward, 0, -1, count)
        for i in reversed(range(count)):
            for transient in self.sharding.backward(i):
                again = self.now.recomputed.get(names[i], 0) if transient.what == "compute" else 0
                during = self.now.backward.get(names[i], 0) if transient.what == "compute" else 0
                yield self._moment("backward", names[i], transient, sum(saved[: i + 1]) + again, 0, during, i, i + 1)
        yield self._moment("backward", "", self.sharding.finish(), 0, 0, 0, -2, 0)
        yield self._moment("optimizer", "", Transient("step"), 0, 0, self.state.optimizer_temporaries, -3, 0)

    def _moment(self, phase: str, unit: str, t: Transient, activations: int, logits: int, temporaries: int, done: int, held: int) -> Moment:
        """``done``: place in backward (-1 before it, -2 after all places, -3 at the optimizer); ``held``: places whose casts are alive."""
        last = done == -3
        gradients, whole = self._gradients(done)
        sizes = {
            "parameters": self.state.parameters,
            "gradients": gradients,
            "optimizer_state": self.state.optimizer_state,
            "gathered_parameters": t.gathered,
            "unsharded_gradients": t.unsharded + whole,
            "communication_buffers": t.buffers + self.state.buckets,
            "activations": activations + (0 if done <= -2 else self.waiting),
            "logits": logits,
            "inputs": 0 if last else self.now.inputs,
            "temporaries": temporaries + (0 if last else self._casts(held)),
            "allocator_rounding": self.lost,
        }
        return Moment(phase, unit, t.what, sizes)

    def _casts(self, held: int) -> int:
        """Copies of whole parameters in the compute type, which autocast makes and autograd keeps."""
        recipe = self.plan.recipe
        if self.plan.strategy.shards_parameters or recipe.compute == recipe.parameter:
            return 0
        root = self.root.whole if self.root is not None else 0
        return root + sum(place.whole for place in self.places[:held])

    def _gradients(self, done: int) -> tuple[int, int]:
        """(gradients kept to the optimizer, whole ones that are added up before they are reduced) [bytes]."""
        plan = self.plan
        if self.state.gradients_are_buckets:
            return self.state.gradients, 0
        root_kept = self.root.kept if self.root is not None else 0
        many = plan.batch.micro_batches > 1
        sharded = plan.strategy.shards_parameters and _needs_sharding(plan)
        if done == -3 or (many and (plan.strategy.syncs_each or not sharded)):
            return self.state.gradients, 0
        finished = self.places[done + 1 :] if done >= 0 else self.places if done == -2 else ()
        if not sharded and plan.strategy.name != "zero2":  # whole gradients are kept from the moment they are there
            finished = self.places[done:] if done >= 0 else finished
            early = self.early if done >= 0 else 0
            return sum(place.kept for place in finished) + (root_kept if done == -2 else early), 0
        if not many or not sharded:
            return sum(place.kept for place in finished), 0
        left = self.places[: done + 1] if done >= 0 else () if done == -2 else self.places
        root_whole = self.root.accumulated if self.root is not None else 0
        return sum(place.kept for place in finished), sum(place.accumulated for place in left) + root_whole


def _needs_sharding(plan: Plan) -> bool:
    """False for a group of one that computes with what it stores: nothing is gathered, gradients are kept as they come."""
    return plan.strategy.framework == "torch_fsdp2" or plan.shard > 1 or plan.recipe.compute != plan.recipe.parameter


def _places(units: Sequence[Unit], plan: Plan) -> tuple[UnitBytes | None, list[UnitBytes]]:
    """(the root's unit, all others in order of use: a layer together with its experts)."""
    places: dict[str, list[Unit]] = {}
    root: list[Unit] = []
    for unit in units:
        if unit.root:
            root.append(unit)
        else:
            places.setdefault(unit.parameters[0].unit, []).append(unit)
    return unit_bytes(root, plan) if root else None, [unit_bytes(members, plan) for members in places.values()]


def _early_root_elements(parameters: Sequence[Parameter]) -> int:
    """Elements of the root's gradients that backward computes before those of the other units.

    Parameters listed behind the first unit (norm, head) come first; so does an embedding that is the head as well.
    """
    first = next((index for index, p in enumerate(parameters) if p.unit), 0)
    root = [(index, p) for index, p in enumerate(parameters) if not p.unit]
    tied = any(p.role == "norm" for _, p in root) and not any(p.role == "head" for p in parameters)
    return sum(p.elements for index, p in root if index >= first or (tied and p.role == "embedding"))


def _sharding(walk: _Walk) -> Sharding:
    """The behaviour of the plan's strategy. Sets the bytes of the root's early gradients on the walk."""
    plan = walk.plan
    name, recipe = plan.strategy.name, plan.recipe
    plain = not plan.strategy.shards_parameters or not _needs_sharding(plan)
    transient = walk.early * recipe.autograd
    walk.early = walk.early * recipe.gradients if plain else transient
    if name in ("zero1", "zero2") and plan.shard > 1 and not walk.state.buckets:
        cap = plan.strategy.bucket_cap_mb
        limit = int(cap * MIB) if cap is not None else ZERO_BUCKET_BYTES
        sizes = [bucket.bytes for bucket in assign(list(reversed(walk.parameters)), [limit], recipe.reduce)]
        largest = max(sizes, default=0)
        output = -(-largest // plan.shard) if not plan.strategy.deepspeed_allreduce else 0
        return Bucketed(plan, walk.places, walk.root, transient, largest + output, name == "zero1")
    if plain:
        return Sharding(plan, walk.places, walk.root)
    if plan.strategy.framework == "torch_fsdp2":
        return Fsdp2(plan, walk.places, walk.root, transient)
    flat = name == "fsdp1" and plan.strategy.use_orig_params
    return Fsdp1(plan, walk.places, walk.root, transient, flat)
