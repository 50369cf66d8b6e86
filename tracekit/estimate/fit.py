"""Every mesh of N ranks: which of them fit into a device's memory, how fast a step would be, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tracekit.errors import UsageError
from tracekit.estimate.estimate import Estimate, check, estimate
from tracekit.estimate.plan import MeshSizes, Plan, Strategy
from tracekit.estimate.spec import Spec
from tracekit.units import format_bytes

#: More meshes than this are not looked at: a world of so many divisors takes longer than anybody waits.
MOST_MESHES = 20_000


@dataclass(frozen=True)
class Candidate:
    """One mesh. ``seconds`` of a predicted step and ``peak`` bytes of its fullest rank are None where it cannot run at all.

    ``reason``: why it does not fit, '' where it does.
    """

    mesh: MeshSizes
    micro_batches: int | None
    seconds: float | None
    mfu: float | None
    peak: int | None
    reason: str

    @property
    def fits(self) -> bool:
        """Whether it runs within the memory."""
        return not self.reason


def meshes_of(world: int, spec: Spec) -> Iterator[MeshSizes]:
    """Every mesh of ``world`` ranks: all ways to divide them over pp, dp_replicate, dp_shard, cp, tp (and ep with experts).

    Strategies without replicas (or without shards) leave that axis at 1.
    """
    strategy = _strategy(spec).name
    replicas = strategy in ("ddp", "fsdp2", "hsdp")
    for tp in divisors(world):
        for cp in divisors(world // tp):
            for pp in divisors(world // (tp * cp)):
                data = world // (tp * cp * pp)
                for replicate in [data] if strategy == "ddp" else divisors(data) if replicas else [1]:
                    for ep in _expert_sizes(spec, data * cp * tp):
                        yield MeshSizes(pp, replicate, data // replicate, cp, tp, ep)


def _strategy(spec: Spec) -> Strategy:
    """What data-parallel ranks do: the spec's strategy; FSDP2 where it names none."""
    return spec.plan.strategy if spec.plan.strategy.name != "none" else Strategy("fsdp2")


def _expert_sizes(spec: Spec, ranks: int) -> list[int]:
    return [size for size in divisors(ranks) if spec.shape.experts % size == 0] if spec.shape.experts else [1]


def divisors(n: int) -> list[int]:
    """Divisors of n in order."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def search(spec: Spec, world: int, memory_bytes: int, global_batch: int | None = None) -> list[Candidate]:
    """All meshes of ``world`` ranks, those that fit first, by predicted time of a step; then the others, the least too large first.

    The step is the same for all: ``global_batch`` sequences (the plan's own if None), so that times compare. UsageError for a world that
    has too many meshes to look at.
    """
    if world < 1:
        raise UsageError(f"{world} ranks", "give at least 1")
    total = spec.plan.global_batch if global_batch is None else global_batch
    found = []
    for mesh in meshes_of(world, spec):
        found.append(_candidate(spec, mesh, memory_bytes, total))
        if len(found) > MOST_MESHES:
            raise UsageError(f"{world} ranks have more than {MOST_MESHES} meshes", "give a world with fewer divisors")
    return sorted(found, key=_order)


def _order(candidate: Candidate) -> tuple[bool, float, float, str]:
    seconds = candidate.seconds if candidate.seconds is not None else float("inf")
    peak = candidate.peak if candidate.peak is not None else float("inf")
    return (not candidate.fits, seconds if candidate.fits else peak, peak, candidate.mesh.text())


def _candidate(spec: Spec, mesh: MeshSizes, memory_bytes: int, global_batch: int) -> Candidate:
    each = spec.plan.batch.micro_batch * mesh.data
    if global_batch % each:
        why = f"a batch of {global_batch} does not divide into micro-batches of {spec.plan.batch.micro_batch} for {mesh.data} ranks"
        return Candidate(mesh, None, None, None, None, why)
    try:
        plan = _plan(spec, mesh, global_batch // each)
        check(spec.shape, plan)
        result = estimate(spec.shape, plan, spec.hardware, spec.assumptions)
    except UsageError as error:
        return Candidate(mesh, global_batch // each, None, None, None, error.problem)
    return Candidate(
        mesh, global_batch // each, result.step.total, result.mfu, result.peak.memory.reserved, too_large(result, memory_bytes)
    )


def _plan(spec: Spec, mesh: MeshSizes, micro_batches: int) -> Plan:
    """The spec's plan on another mesh; one rank alone with its parameters needs no strategy, one stage no schedule."""
    virtual = spec.plan.virtual_stages if mesh.pp > 1 else 1
    schedule = spec.plan.schedule if mesh.pp > 1 else "1f1b"
    batch = replace(spec.plan.batch, micro_batches=micro_batches)
    strategy = _strategy(spec) if mesh.dense_ranks > 1 else Strategy("none")
    return replace(spec.plan, mesh=mesh, strategy=strategy, batch=batch, schedule=schedule, virtual_stages=virtual)


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
