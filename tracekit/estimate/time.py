"""Time of a step: compute at an assumed efficiency, communication by alpha-beta, what of it is exposed, and the pipeline's bubble.

Assumptions, all of them options and all written into the result:

    compute         FLOP of a rank / (peak * ``efficiency``)
    collectives     alpha-beta on the slowest link of the group, rings; alpha from the hardware preset, or NCCL's own latencies
    overlap         ``overlap`` of a phase's compute can hide gathers and reductions of parameters and gradients in that phase; the first
                    gather and the last reduction have nothing to hide behind
    expert_overlap  experts' exchanges hide in the same way, but for those of the first micro-batch (DualPipe, arXiv:2412.19437, section
                    3.2.1; Megatron Core does so in 1F1B)
    exposed whole   tensor, sequence, context and expert parallelism, loss, updated parameters, and a pipeline's messages
    bubble          closed form of the schedule for equal stages: times of the slowest one
    optimizer       model state read and written once by the device's memory: limited by its bandwidth
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tracekit.collectives.cost import ALGORITHMS, seconds
from tracekit.estimate import nccl
from tracekit.estimate.hardware import US, Hardware, exchange_gb_s, path_of
from tracekit.estimate.pipeline import bubble_time
from tracekit.estimate.plan import Plan
from tracekit.estimate.traffic import Traffic

#: Purposes that frameworks run beside compute.
OVERLAPPED = ("parameter_gather", "gradient_scatter", "gradient_sync")
_EXPERTS = ("expert_dispatch", "expert_combine")


@dataclass(frozen=True)
class Assumptions:
    """``efficiency`` of matrix products (0 to 1], ``overlap`` share of a phase that can hide communication [0 to 1], ``latency``
    preset (alpha of the hardware) or nccl (its tuner's)."""

    efficiency: float = 0.5
    overlap: float = 1.0
    latency: str = "preset"


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage in a step, all micro-batches together. ``exposed`` of ``communication`` is not hidden."""

    forward: float
    backward: float
    optimizer: float
    communication: float
    exposed: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. ``total`` = slowest stage's compute + exposed communication + bubble + optimizer."""

    total: float
    compute: float
    exposed: float
    communication: float
    bubble: float
    optimizer: float


def algorithm_of(kind: str) -> str:
    """The usual algorithm of a kind: ring where there is one."""
    known = ALGORITHMS.get(kind, ("direct",))
    return "ring" if "ring" in known else known[0]


def collective_seconds(row: Traffic, device: Hardware, latency: str = "preset") -> float:
    """Time of one call [s]: ``collectives.cost.seconds`` of the usual algorithm, on the group's slowest link.

    A recv costs nothing by itself: its time is that of the send. With ``latency`` nccl, alpha is NCCL's prediction for the whole
    collective instead of one latency a step.
    """
    if row.kind == "recv":
        return 0.0
    path = path_of(device, row.size, row.stride)
    algorithm = algorithm_of(row.kind)
    beta = 1e-9 / (exchange_gb_s(device, path, row.size) if algorithm == "pairwise" else path.gb_s)
    if latency == "nccl" and row.kind != "send":
        protocol = nccl.protocol_of(row.full_bytes)
        return nccl.latency_us(row.kind, row.size, path.nodes, protocol=protocol) * US + seconds(
            row.kind, algorithm, row.size, row.full_bytes, 0.0, beta
        )
    return seconds(row.kind, algorithm, row.size, row.full_bytes, path.latency_us * US, beta)


def row_seconds(row: Traffic, device: Hardware, latency: str = "preset") -> float:
    """Time of all calls of a row one after another [s]."""
    return row.calls * collective_seconds(row, device, latency)


def exposed_seconds(rows: Sequence[Traffic], plan: Plan, compute: dict[str, float], device: Hardware, how: Assumptions) -> float:
    """Communication that compute does not hide [s]. ``compute``: seconds of forward and backward, all micro-batches together."""
    overlapped = (*OVERLAPPED, *_EXPERTS) if plan.expert_overlap and plan.batch.micro_batches > 1 else OVERLAPPED
    total = 0.0
    for phase in ("forward", "backward", "optimizer"):
        own = [row for row in rows if row.phase == phase]
        beside = [row for row in own if row.purpose in overlapped and phase != "optimizer"]
        alone = sum(row_seconds(row, device, how.latency) for row in own if row not in beside)
        hidden = sum(row_seconds(row, device, how.latency) for row in beside)
        edge = max((_edge(row, plan) * collective_seconds(row, device, how.latency) for row in beside), default=0.0)
        room = max(0.0, how.overlap * compute.get(phase, 0.0))
        total += alone + min(hidden, max(edge, hidden - room))
    return total


def _edge(row: Traffic, plan: Plan) -> int:
    """Calls that nothing can hide: the first gather of every micro-batch; the last reduction; experts' exchanges of one micro-batch."""
    if row.purpose in _EXPERTS:
        return -(-row.calls // plan.batch.micro_batches)
    return min(row.calls, plan.batch.micro_batches) if row.purpose == "parameter_gather" else 1


def optimizer_seconds(state_bytes: int, device: Hardware) -> float:
    """Model state read and written once [s]: 2 bytes moved for each byte held."""
    return 2 * state_bytes / (device.memory_gb_s * 1e9)


def stage_time(
    rows: Sequence[Traffic], plan: Plan, device: Hardware, how: Assumptions, forward_flops: float, recomputed: float, state_bytes: int
) -> StageTime:
    """Time of one rank of a stage. FLOP are those of the rank in a whole step; backward costs twice the forward and what is recomputed."""
    rate = device.peak_flops(plan.recipe.compute) * how.efficiency
    forward = forward_flops / rate
    backward = (2 * forward_flops + recomputed) / rate
    communication = sum(row_seconds(row, device, how.latency) for row in rows)
    exposed = exposed_seconds(rows, plan, {"forward": forward, "backward": backward}, device, how)
    return StageTime(forward, backward, optimizer_seconds(state_bytes, device), communication, exposed)


def step_time(stages: Sequence[StageTime], plan: Plan) -> StepTime:
    """Time of a step from its stages: the slowest one, and the bubble of stages that all take that long."""
    slowest = max(stages, key=lambda stage: stage.forward + stage.backward + stage.exposed)
    work = slowest.forward + slowest.backward
    m, p = plan.batch.micro_batches, plan.mesh.pp
    share = slowest.exposed / work if work else 0.0
    forward = Fraction(slowest.forward * (1 + share) / m)
    backward = Fraction(slowest.backward * (1 + share) / m)
    bubble = float(bubble_time(plan.schedule, p, m, forward, backward / 2, backward / 2, plan.virtual_stages)) if p > 1 else 0.0
    optimizer = max(stage.optimizer for stage in stages)
    total = work + slowest.exposed + bubble + optimizer
    return StepTime(total, work, slowest.exposed, slowest.communication, bubble, optimizer)
