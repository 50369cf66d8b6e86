"""The whole estimate of a model on a mesh: memory by rank role, communication, FLOP and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tracekit.errors import UsageError
from tracekit.estimate import flops
from tracekit.estimate.activations import Activations, stage_activations
from tracekit.estimate.communication import model_parallel
from tracekit.estimate.hardware import Hardware
from tracekit.estimate.memory import RankMemory, rank_memory
from tracekit.estimate.parameters import (
    Parameter,
    elements_of,
    expert_parallel,
    stage_chunks,
    stage_parameters,
    tensor_parallel,
)
from tracekit.estimate.pipeline import bubble_share
from tracekit.estimate.plan import Plan
from tracekit.estimate.saved import computed_again
from tracekit.estimate.shape import ModelShape, parameters
from tracekit.estimate.time import Assumptions, StageTime, StepTime, stage_time, step_time
from tracekit.estimate.traffic import Traffic, data_parallel, merged


@dataclass(frozen=True)
class Role:
    """What all ranks of one pipeline stage have in common. Stages of equal figures are one role."""

    name: str  # only, first, middle or last
    stages: tuple[int, ...]  # their numbers
    elements: int  # of the parameters that a rank holds before data-parallel sharding
    memory: RankMemory
    traffic: tuple[Traffic, ...]  # what a rank sends in a step
    time: StageTime

    @property
    def peak_bytes(self) -> int:
        """Most that is allocated at once."""
        return self.memory.peak.total


@dataclass(frozen=True)
class Estimate:
    """Everything the model says about one plan."""

    shape: ModelShape
    plan: Plan
    hardware: Hardware
    assumptions: Assumptions
    parameters: int  # elements of the whole model
    roles: tuple[Role, ...]  # in the order of their stages
    step: StepTime
    model_flops: float  # of a step over all ranks [FLOP]
    hardware_flops: float  # with what is computed again [FLOP]

    @property
    def peak(self) -> Role:
        """The role with the most memory."""
        return max(self.roles, key=lambda role: role.peak_bytes)

    @property
    def tokens(self) -> int:
        """Tokens a step over all ranks."""
        return self.plan.global_batch * self.shape.sequence

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilization of the predicted step; None without a time."""
        return flops.utilization(self.model_flops, self.step.total, self.plan.mesh.world, self._peak_flops)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOP utilization: recomputation counts as well."""
        return flops.utilization(self.hardware_flops, self.step.total, self.plan.mesh.world, self._peak_flops)

    @property
    def _peak_flops(self) -> float:
        return self.hardware.peak_flops(self.plan.recipe.compute)

    @property
    def bubble_shares(self) -> tuple[float, float] | None:
        """(bubble over ideal time, bubble over wall time) for equal stages; None without a pipeline."""
        p, m, v = self.plan.mesh.pp, self.plan.batch.micro_batches, self.plan.virtual_stages
        if p == 1:
            return None
        wall = float(bubble_share(self.plan.schedule, p, m, 1, 1, 1, v))
        return wall / (1 - wall), wall

    @property
    def fits(self) -> bool:
        """Whether every role's reserved memory is within the device's."""
        return all(role.memory.reserved <= self.hardware.memory_bytes for role in self.roles)


def check(shape: ModelShape, plan: Plan) -> None:
    """Refuse meshes that cannot divide the model: UsageError that says why."""
    mesh = plan.mesh
    if shape.heads % mesh.tp or shape.attention_width % mesh.tp:
        raise UsageError(f"tp={mesh.tp} does not divide {shape.heads} heads", "choose a tp that divides the heads")
    if not shape.latent and shape.kv_heads % mesh.tp and mesh.tp % shape.kv_heads:
        raise UsageError(f"tp={mesh.tp} does not go with {shape.kv_heads} kv_heads", "choose a tp that divides them, or is a multiple")
    if mesh.pp * plan.virtual_stages > shape.layers:
        raise UsageError(
            f"{mesh.pp} stages of {plan.virtual_stages} chunks need more than {shape.layers} layers",
            "choose fewer stages or virtual stages",
        )
    if mesh.ep > 1 and not shape.experts:
        raise UsageError(f"ep={mesh.ep}, and the model has no experts", "leave ep out")
    if shape.experts and shape.experts % mesh.ep:
        raise UsageError(f"ep={mesh.ep} does not divide {shape.experts} experts", "choose an ep that divides them")
    if shape.sequence % mesh.cp:
        raise UsageError(f"cp={mesh.cp} does not divide a sequence of {shape.sequence}", "choose a cp that divides it")
    if plan.context_parallel == "ulysses" and mesh.cp > 1 and (shape.heads // mesh.tp) % mesh.cp:
        raise UsageError(f"ulysses over cp={mesh.cp} cannot divide {shape.heads // mesh.tp} heads", "choose ring, or a smaller cp")
    if plan.sequence_parallel and mesh.tp > 1 and (shape.sequence // mesh.cp) % mesh.tp:
        raise UsageError(f"tp={mesh.tp} does not divide {shape.sequence // mesh.cp} tokens", "choose another tp")


def local_parameters(shape: ModelShape, plan: Plan, stage: int) -> tuple[Parameter, ...]:
    """Parameters of a rank of a stage before data-parallel sharding."""
    chunks = plan.virtual_stages if plan.mesh.pp > 1 else 1
    mesh = plan.mesh
    division = (mesh.pp, chunks, stage, mesh.tp, mesh.ep, mesh.etp)
    return _local(shape, plan.recipe.parameter, plan.wrap, plan.vocabulary_parallel, division, plan.vee)


@lru_cache(maxsize=512)
def _whole(shape: ModelShape, element_bytes: int, wrap: str, divided: bool = True) -> tuple[Parameter, ...]:
    return tuple(parameters(shape, element_bytes, wrap, divided))


@lru_cache(maxsize=512)
def _local(
    shape: ModelShape, element_bytes: int, wrap: str, divided: bool, division: tuple[int, int, int, int, int, int], vee: bool
) -> tuple[Parameter, ...]:
    """``division``: stages, chunks a stage, the stage, and sizes of tp, ep and etp. A search asks for the same ones again and again."""
    pp, chunks, stage, tp, ep, etp = division
    whole = _whole(shape, element_bytes, wrap, divided)
    held = stage_parameters(whole, shape.layers, pp, chunks, stage, shape.tied_embeddings, vee)
    return tuple(tensor_parallel(expert_parallel(held, ep), tp, etp))


def estimate(shape: ModelShape, plan: Plan, device: Hardware, how: Assumptions = Assumptions()) -> Estimate:  # noqa: B008 - frozen
    """Memory, communication and time of ``shape`` trained as ``plan`` says. UsageError where the mesh cannot divide the model."""
    check(shape, plan)
    whole = _whole(shape, plan.recipe.parameter, plan.wrap)
    roles = tuple(_role(shape, plan, device, how, name, stages) for name, stages in distinct_stages(shape, plan))
    tokens = plan.global_batch * shape.sequence
    model = flops.step_flops(shape, whole, tokens, plan.batch.causal)
    again = flops.recomputed_flops(shape, whole, tokens, plan.batch.causal, plan.batch.recompute)
    step = step_time([role.time for role in roles], plan)
    return Estimate(shape, plan, device, how, elements_of(whole), roles, step, model, model + again)


def distinct_stages(shape: ModelShape, plan: Plan) -> list[tuple[str, tuple[int, ...]]]:
    """(role, its stages): first, last, and those between by their layers without and with experts; the first has the most in flight."""
    p, v = plan.mesh.pp, plan.virtual_stages
    if p == 1:
        return [("only", (0,))]
    between: dict[tuple[int, int], list[int]] = {}
    for stage in range(1, p - 1):
        layers = [layer for chunk in stage_chunks(shape.layers, p, v, stage, plan.vee) for layer in chunk]
        experts = sum(shape.has_experts(layer) for layer in layers)
        between.setdefault((len(layers) - experts, experts), []).append(stage)
    middle = [("middle", tuple(stages)) for stages in sorted(between.values())]
    return [("first", (0,)), *middle, ("last", (p - 1,))]


def _role(shape: ModelShape, plan: Plan, device: Hardware, how: Assumptions, name: str, stages: tuple[int, ...]) -> Role:
    stage = stages[0]
    held = local_parameters(shape, plan, stage)
    memory = rank_memory(held, chunk_activations(shape, plan, stage), plan, stage)
    layers = [layer for chunk in stage_chunks(shape.layers, plan.mesh.pp, plan.virtual_stages, stage, plan.vee) for layer in chunk]
    traffic = merged([*data_parallel(held, plan), *model_parallel(shape, plan, layers, stage, held)])
    forward, again = _stage_flops(shape, plan, held, len(layers), stage)
    time = stage_time(traffic, plan, device, how, forward, again, memory.state.total)
    return Role(name, stages, elements_of(held), memory, tuple(traffic), time)


def chunk_activations(shape: ModelShape, plan: Plan, stage: int) -> list[Activations]:
    """Activations of each chunk of a stage; the first chunk of stage 0 has the embedding, the last chunk of the last stage the head."""
    p, v = plan.mesh.pp, plan.virtual_stages
    return [
        stage_activations(shape, plan, list(layers), stage == 0 and turn == 0, stage == plan.last_stage and turn == v - 1)
        for turn, layers in enumerate(stage_chunks(shape.layers, p, v, stage, plan.vee))
    ]


def _stage_flops(shape: ModelShape, plan: Plan, held: Sequence[Parameter], layers: int, stage: int) -> tuple[float, float]:
    """(forward FLOP of this rank in a step, FLOP it computes again).

    Balanced experts: a rank meets the tokens of ep ranks with k/E of them for each expert; where experts are not divided over tp, its
    tensor-parallel ranks share those tokens.
    """
    mesh, batch = plan.mesh, plan.batch
    tokens = batch.micro_batch * batch.micro_batches * (shape.sequence // mesh.cp)
    inside = outside = 0.0
    for parameter in held:
        if len(parameter.shape) < 2 or parameter.role in ("embedding", "norm"):
            continue
        parts = mesh.etp / mesh.tp if not mesh.expert_copies else 1
        share = shape.top_k / shape.experts * mesh.ep * parts if parameter.experts else 1.0
        if parameter.layer is None:
            outside += parameter.elements
        else:
            inside += parameter.elements * share
    if shape.tied_embeddings and stage == mesh.pp - 1:
        outside += shape.vocabulary * shape.hidden / (mesh.tp if plan.vocabulary_parallel else 1)
    attention = layers * flops.attention_flops_a_token(shape, batch.causal) / mesh.tp
    again = {"none": 0.0, "full": 2 * inside + attention, "selective-torchtitan": 2 * inside * computed_again(shape)}
    return tokens * (2 * (inside + outside) + attention), tokens * again.get(batch.recompute, attention)


def estimate_parameters(
    held: Sequence[Parameter], plan: Plan, device: Hardware, activations: Sequence[Activations] = (), shard_rank: int = 0
) -> Role:
    """Memory and data-parallel communication of a rank that holds ``held``: any model, recorded or built on the meta device.

    Without ``activations`` there are none in the figures. Times hold communication only, as FLOP are not known.
    """
    memory = rank_memory(held, activations or [Activations({})] * plan.virtual_stages, plan, 0, shard_rank)
    traffic = data_parallel(held, plan)
    time = stage_time(traffic, plan, device, Assumptions(overlap=0.0), 0.0, 0.0, memory.state.total)
    return Role("only", (0,), elements_of(held), memory, tuple(traffic), time)
