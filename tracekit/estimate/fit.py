"""Meshes of N ranks and how to run on them: which fit into a device's memory, how fast a step would be, why the others do not fit.

Every mesh is tried with its leanest settings (one sequence at a time, full recomputation, 1F1B): what does not fit then does not fit. The
``REFINED`` meshes that could be fastest are then tried with less recomputation, other schedules and larger micro-batches, each kept where
it fits and is faster; so are replicas of whole nodes in place of ranks that shard. A mesh whose tensor parallelism leaves the node is
looked at only where no other fits. Settings leave ``HEADROOM`` of the memory free: fragmentation, the CUDA context and NCCL's buffers come
on top of the model's figure, which is up to 15% below what published runs had reserved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from tracekit.errors import UsageError
from tracekit.estimate.estimate import Estimate, check, estimate
from tracekit.estimate.plan import MeshSizes, Plan, Strategy
from tracekit.estimate.spec import Spec
from tracekit.estimate.time import StepTime
from tracekit.units import format_bytes

#: More meshes than this are not looked at: a world of so many divisors takes longer than anybody waits.
MOST_MESHES = 20_000
#: So many meshes are tried with all their settings.
REFINED = 40
#: A step that is shorter by less than this share is as long.
NOTHING = 1e-3
#: Share of the memory that is left free where there is a choice.
HEADROOM = 0.15
#: Fewest tokens of a sequence that a rank of cp works on: sequences are divided where they are long (Llama 3, arXiv:2407.21783, table 4).
LEAST_TOKENS = 8192
#: Tokens of a step where no batch is given, at most: that of Llama 3 405B on 16,384 GPUs (arXiv:2407.21783, table 4).
MOST_TOKENS = 2**24
#: What is searched for each mesh, unless it is given.
SEARCHED = ("micro_batch", "recompute", "schedule", "virtual_stages", "expert_overlap")
#: From what computes least again to what keeps least.
_RECOMPUTE = ("none", "selective-megatron", "selective-torchtitan", "full")
MOST_MICRO_BATCH, MOST_VIRTUAL = 16, 8
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Candidate:
    """One mesh with its settings."""

    mesh: MeshSizes
    micro_batches: int | None  # None: the batch does not divide
    step: StepTime | None  # of a predicted step [s]; None where the mesh cannot run at all
    mfu: float | None  # [share]
    peak: int | None  # reserved memory of the fullest rank [bytes]
    reason: str  # why it does not fit; '' where it does
    plan: Plan | None = None  # what was estimated
    tight: bool = False  # it fits, but less than ``HEADROOM`` is left

    @property
    def fits(self) -> bool:
        """Whether it runs within the memory."""
        return not self.reason

    @property
    def seconds(self) -> float | None:
        """Predicted time of a step [s]."""
        return None if self.step is None else self.step.total

    def settings(self) -> str:
        """``4 sequences at a time, full recomputation, interleaved_1f1b x 2``; '' of a mesh that cannot run."""
        if self.plan is None:
            return ""
        batch, plan = self.plan.batch, self.plan
        words = [f"{batch.micro_batch} sequence{'s' if batch.micro_batch > 1 else ''} at a time"]
        words.append("no recomputation" if batch.recompute == "none" else f"{batch.recompute} recomputation")
        if plan.expert_overlap:
            words.append("experts' exchanges overlapped")
        if plan.mesh.pp > 1:
            words.append(plan.schedule + (f" x {plan.virtual_stages}" if plan.virtual_stages > 1 else ""))
        return ", ".join(words)


def meshes_of(world: int, spec: Spec, inside: bool | None = None, short: bool | None = False) -> Iterator[MeshSizes]:
    """Meshes of ``world`` ranks over pp, cp, tp (and ep with experts) and data-parallel ranks: all of them replicas of ddp, else shards.

    ``inside``: only those whose tp stays within a node (False: only the others). ``short``: only those whose cp leaves a rank fewer than
    ``LEAST_TOKENS`` of a sequence (False: only the others).
    """
    whole, node = _strategy(spec).name == "ddp", spec.hardware.per_node
    for tp in divisors(world):
        if inside is not None and (tp <= node) != inside:
            continue
        for cp in divisors(world // tp):
            if short is not None and (cp > 1 and spec.shape.sequence // cp < LEAST_TOKENS) != short:
                continue
            for pp in divisors(world // (tp * cp)):
                data = world // (tp * cp * pp)
                for ep in _expert_sizes(spec, data * cp * tp):
                    yield MeshSizes(pp, data if whole else 1, 1 if whole else data, cp, tp, ep)


def _replicated(mesh: MeshSizes, node: int) -> Iterator[MeshSizes]:
    """The mesh with 2, 4, ... replicas, each of whole nodes, as long as its experts find ranks in one."""
    beside = mesh.cp * mesh.tp
    for replicate in divisors(mesh.dp_shard)[1:]:
        shard = mesh.dp_shard // replicate
        if replicate.bit_count() == 1 and shard * beside % node == 0 and shard * beside % mesh.ep == 0:
            yield replace(mesh, dp_replicate=replicate, dp_shard=shard)


def _strategy(spec: Spec) -> Strategy:
    """What data-parallel ranks do: the spec's strategy; FSDP2 where it names none."""
    return spec.plan.strategy if spec.plan.strategy.name != "none" else Strategy("fsdp2")


def _expert_sizes(spec: Spec, ranks: int) -> list[int]:
    return [size for size in divisors(ranks) if spec.shape.experts % size == 0] if spec.shape.experts else [1]


def usual_batch(spec: Spec, ranks: int) -> int:
    """Sequences a step where none are given: the plan's own on each of ``ranks``, halved until they have at most ``MOST_TOKENS``."""
    each = spec.plan.global_batch
    while ranks % 2 == 0 and each * ranks * spec.shape.sequence > MOST_TOKENS:
        ranks //= 2
    return each * ranks


def divisors(n: int) -> list[int]:
    """Divisors of n in order."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def search(
    spec: Spec,
    world: int,
    memory_bytes: int,
    global_batch: int | None = None,
    fixed: Collection[str] = (),
    progress: Progress | None = None,
) -> list[Candidate]:
    """Meshes of ``world`` ranks: those that fit by predicted time of a step, tight ones behind; then the others, the least too large first.

    The step is the same for all: ``global_batch`` sequences (the plan's own if None), so that times compare. ``fixed``: those of
    ``SEARCHED`` that are as the plan says. ``progress`` is told (done, of). UsageError for a world that has too many meshes to look at.
    """
    if world < 1:
        raise UsageError(f"{world} ranks", "give at least 1")
    total = spec.plan.global_batch if global_batch is None else global_batch
    found = _Search(spec, memory_bytes, total, set(fixed), progress).run(world)
    return sorted(found, key=_order)


def _order(candidate: Candidate) -> tuple[bool, bool, float, float, str]:
    seconds = candidate.seconds if candidate.seconds is not None else float("inf")
    peak = candidate.peak if candidate.peak is not None else float("inf")
    return (not candidate.fits, candidate.tight, seconds if candidate.fits else peak, peak, candidate.mesh.text())


class _Search:
    """The search for one spec, memory and batch."""

    def __init__(self, spec: Spec, memory_bytes: int, total: int, fixed: set[str], progress: Progress | None) -> None:
        self.spec, self.memory_bytes, self.total, self.fixed, self.progress = spec, memory_bytes, total, fixed, progress

    def run(self, world: int) -> list[Candidate]:
        """Meshes within nodes; those beyond, and those that divide sequences further, only where none of them fits."""
        found = self._lean(list(_bounded(meshes_of(world, self.spec, inside=True), world)))
        beyond = list(_bounded(meshes_of(world, self.spec, inside=False), world))
        if any(candidate.fits for candidate in found):
            why = f"leaves the node of {self.spec.hardware.per_node} devices, and meshes that stay inside fit"
            found += [Candidate(mesh, None, None, None, None, f"tp={mesh.tp} {why}") for mesh in beyond]
        else:
            found += self._lean(beyond)
        if not any(candidate.fits for candidate in found):
            found += self._lean(list(_bounded(meshes_of(world, self.spec, inside=True, short=True), world)))
        return self._refined(found)

    def _lean(self, meshes: Sequence[MeshSizes]) -> list[Candidate]:
        result = []
        for done, mesh in enumerate(meshes):
            self._tell(done, len(meshes) + REFINED)
            result.append(self._candidate(self._leanest(mesh)))
        return result

    def _tell(self, done: int, of: int) -> None:
        if self.progress is not None:
            self.progress(done, of)

    def _leanest(self, mesh: MeshSizes) -> dict[str, object]:
        plan = self.spec.plan
        chosen: dict[str, object] = {"mesh": mesh, "micro_batch": 1, "recompute": "full", "schedule": "1f1b", "virtual_stages": 1}
        for name in self.fixed:
            chosen[name] = getattr(plan.batch if name in ("micro_batch", "recompute") else plan, name)
        return chosen if mesh.pp > 1 else {**chosen, "schedule": "1f1b", "virtual_stages": 1}

    def _candidate(self, chosen: dict[str, object]) -> Candidate:
        mesh, micro_batch = chosen["mesh"], chosen["micro_batch"]
        assert isinstance(mesh, MeshSizes)
        assert isinstance(micro_batch, int)
        each = micro_batch * mesh.data
        if self.total % each:
            why = f"a batch of {self.total} does not divide into micro-batches of {micro_batch} for {mesh.data} ranks"
            return Candidate(mesh, None, None, None, None, why)
        try:
            plan = self._plan(mesh, chosen, self.total // each)
            check(self.spec.shape, plan)
            result = estimate(self.spec.shape, plan, self.spec.hardware, self.spec.assumptions)
        except UsageError as error:
            return Candidate(mesh, self.total // each, None, None, None, error.problem)
        peak = max(role.memory.reserved for role in result.roles)
        tight = (1 - HEADROOM) * self.memory_bytes < peak
        return Candidate(mesh, self.total // each, result.step, result.mfu, peak, too_large(result, self.memory_bytes), plan, tight)

    def _plan(self, mesh: MeshSizes, chosen: dict[str, object], micro_batches: int) -> Plan:
        """The spec's plan on another mesh; one rank alone with its parameters needs no strategy."""
        own = {"micro_batch": chosen["micro_batch"], "recompute": chosen["recompute"], "micro_batches": micro_batches}
        batch = replace(self.spec.plan.batch, **own)  # type: ignore[arg-type]
        strategy = _strategy(self.spec) if mesh.dense_ranks > 1 else Strategy("none")
        schedule = {name: chosen[name] for name in ("schedule", "virtual_stages", "expert_overlap") if name in chosen}
        return replace(self.spec.plan, mesh=mesh, strategy=strategy, batch=batch, **schedule)  # type: ignore[arg-type]

    def _refined(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Those that could be fastest, with all their settings."""
        fitting_ones = sorted((c for c in found if c.fits and c.step is not None), key=_hopeful)
        chosen = {id(candidate) for candidate in fitting_ones[:REFINED]}
        result: list[Candidate] = []
        for candidate in found:
            if id(candidate) in chosen:
                self._tell(len(found) + len([c for c in result if c.plan]) % REFINED, len(found) + REFINED)
                candidate = self._best(candidate)
            result.append(candidate)
        return result

    def _best(self, start: Candidate) -> Candidate:
        """One setting after another, each as far as it makes the step faster and fits."""
        chosen, best = self._leanest(start.mesh), start
        for name, values in self._ladder(start.mesh):
            for value in values:
                tried = self._candidate({**chosen, **value})
                if not tried.tight and _faster(tried, best, NOTHING if name != "recompute" else -NOTHING):
                    best, chosen = tried, {**chosen, **value}
                    if name == "recompute":
                        break
                elif name != "recompute":
                    break
        return best

    def _ladder(self, mesh: MeshSizes) -> Iterator[tuple[str, list[dict[str, object]]]]:
        """Settings to be tried in turn: recomputation, replicas, interleaving, micro-batches, and recomputation once more."""
        if mesh.pp > 1 and mesh.ep > 1 and "expert_overlap" not in self.fixed:
            yield "expert_overlap", [{"expert_overlap": True}]
        if "recompute" not in self.fixed:
            yield "recompute", [{"recompute": name} for name in _RECOMPUTE[:-1]]
        if _strategy(self.spec).name in ("fsdp2", "hsdp"):
            yield "mesh", [{"mesh": other} for other in _replicated(mesh, self.spec.hardware.per_node)]
        if mesh.pp > 1 and not {"schedule", "virtual_stages"} & self.fixed:
            counts = [v for v in range(2, MOST_VIRTUAL + 1) if self.spec.shape.layers >= mesh.pp * v]
            yield "schedule", [{"schedule": "zb_h1", "virtual_stages": 1}]  # keeps no more than 1f1b does
            yield "schedule", [{"schedule": "interleaved_1f1b", "virtual_stages": v} for v in counts]
        if "micro_batch" not in self.fixed:
            yield "micro_batch", [{"micro_batch": 2**power} for power in range(1, MOST_MICRO_BATCH.bit_length())]
            if "recompute" not in self.fixed:
                yield "recompute", [{"recompute": name} for name in _RECOMPUTE[:-1]]


def _bounded(meshes: Iterator[MeshSizes], world: int) -> Iterator[MeshSizes]:
    for count, mesh in enumerate(meshes):
        if count >= MOST_MESHES:
            raise UsageError(f"{world} ranks have more than {MOST_MESHES} meshes", "give a world with fewer divisors")
        yield mesh


def _faster(tried: Candidate, best: Candidate, by: float) -> bool:
    """Whether it fits and its step is shorter by more than this share."""
    return tried.fits and tried.seconds is not None and best.seconds is not None and tried.seconds < (1 - by) * best.seconds


def _hopeful(candidate: Candidate) -> float:
    """Time of a step without what full recomputation adds (a quarter of the compute), and with half the bubble [s]."""
    step = candidate.step
    assert step is not None
    return 0.75 * step.compute + step.exposed + 0.5 * step.bubble + step.optimizer


def too_large(result: Estimate, memory_bytes: int) -> str:
    """Why a plan does not fit into this much memory: which rank needs how much, and what takes most of it; '' where it fits."""
    role = max(result.roles, key=lambda role: role.memory.reserved)
    if role.memory.reserved <= memory_bytes:
        return ""
    peak = role.memory.peak
    category, size = max(peak.bytes.items(), key=lambda item: item[1])
    where = f"the {role.name} stage needs" if result.plan.mesh.pp > 1 else "a rank needs"
    return f"{where} {format_bytes(role.memory.reserved)}: {format_bytes(size)} are {category.replace('_', ' ')} ({peak.phase})"


def fitting(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that fit, in order."""
    return [candidate for candidate in candidates if candidate.fits]


def why_best(candidates: Sequence[Candidate]) -> str:
    """Why the first one is the best: what its step is made of, and what the next one loses and wins; '' where none fits."""
    fit = fitting(candidates)
    if not fit or fit[0].step is None:
        return ""
    step = fit[0].step
    parts = {"compute": step.compute, "exposed communication": step.exposed, "bubble": step.bubble}
    made = ", ".join(f"{seconds / step.total:.0%} {name}" for name, seconds in parts.items() if seconds)
    text = f"{fit[0].mesh.text()} is best with {fit[0].settings()}: its step is {made}."
    if len(fit) < 2 or fit[1].step is None:
        return text
    other = fit[1].step
    others = {"compute": other.compute, "exposed communication": other.exposed, "bubble": other.bubble}
    changes = {name: (others[name] - parts[name]) / step.total for name in parts}
    differences = [f"{abs(d):.1%} of a step {'more' if d > 0 else 'less'} {name}" for name, d in changes.items() if abs(d) >= 0.001]
    return f"{text} The next, {fit[1].mesh.text()} with {fit[1].settings()}, has {' and '.join(differences) or 'the same parts to 0.1%'}."
