"""Pipeline parallelism with ``torch.distributed.pipelining``: which layers a stage has, where it lives, what passes between stages.

A rank of axis ``pp`` builds only the layers of its stages. The hidden states of a micro-batch go from stage to stage in forward, their
gradients come back in backward; on one rank they are handed over without a message. ``training`` makes the whole training of one rank
from a ``Plan``; what shards a stage further (FSDP, tensor parallelism) is given to it as a function of the stage's module.

Every stage is told the shape of its input and output, so stages neither exchange shapes nor vote on whether they have to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from tracekit.errors import UsageError
from tracekit.manifest import Expected

from . import float8
from .job import Job, Training
from .reference import adam
from .transformer import Mlp, Shape, Transformer, initialize, loss_of

AXIS = "pp"
#: One stage a rank.
SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
#: Several stages a rank.
MULTI = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}

#: (a stage's module, its number) -> the module that runs: sharded, wrapped, or as it was.
Parallelize = Callable[[Transformer, int], nn.Module]


@dataclass(frozen=True)
class Plan:
    """Layers on stages, stages on ranks: ``ranks`` along axis ``pp``, ``virtual`` stages on each, ``micro_batches`` a step."""

    schedule: str
    ranks: int
    virtual: int
    micro_batches: int
    layers: int

    @property
    def stages(self) -> int:
        """Stages in all."""
        return self.ranks * self.virtual

    def rank_of(self, stage: int) -> int:
        """Place on axis ``pp`` of a stage: round and round (0 1 0 1), or as a V (0 1 1 0)."""
        turn, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.schedule == "zbv" and turn % 2 else place

    def stages_of(self, place: int) -> list[int]:
        """Stages on one rank, the earliest first."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == place]

    def layers_of(self, stage: int) -> range:
        """Layers of a stage."""
        each = self.layers // self.stages
        return range(stage * each, (stage + 1) * each)

    def describe(self) -> dict[str, Any]:
        """For the manifest. Ranks are places on axis ``pp``."""
        return {
            "schedule": self.schedule,
            "axis": AXIS,
            "ranks": self.ranks,
            "stages": self.stages,
            "virtual_stages": self.virtual,
            "microbatches": self.micro_batches,
            "stage_of_rank": {str(place): self.stages_of(place) for place in range(self.ranks)},
            "layers_of_stage": {str(stage): list(self.layers_of(stage)) for stage in range(self.stages)},
        }


def plan(job: Job, schedule: str, virtual: int = 1) -> Plan:
    """How this job's layers are laid out. UsageError where the schedule cannot run them."""
    ranks, pieces, layers = job.size(AXIS), job.settings.micro_batches, job.shape.layers
    stages = ranks * virtual
    if virtual < 1 or layers % stages:
        problem = f"{layers} layers do not divide into {ranks} ranks x {virtual} stages"
        raise UsageError(problem, "change --layers, the mesh or the stages a rank")
    if schedule in SINGLE and virtual != 1:
        raise UsageError(f"{schedule} has one stage a rank, not {virtual}", "take an interleaved schedule")
    if schedule == "1f1b" and pieces < stages:
        raise UsageError(f"1f1b needs as many micro-batches as stages: {stages}, not {pieces}", f"--micro-batches {stages} or more")
    rounds = max(1, pieces // ranks)
    if schedule.startswith("interleaved") and pieces % rounds:
        raise UsageError(
            f"{schedule} runs {rounds} rounds over {ranks} ranks, into which {pieces} micro-batches do not divide",
            f"a --micro-batches that is a multiple of {ranks}, or below it",
        )
    if schedule == "zbv" and virtual != 2:
        raise UsageError(f"zbv has two stages a rank, not {virtual}", "--virtual-stages 2")
    return Plan(schedule, ranks, virtual, pieces, layers)


class Stage(PipelineStage):
    """A stage that knows the shapes of all it gets and gives: nothing to vote on, so one rank can also run alone on ``fake``."""

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return torch.ones(1, dtype=torch.int32)


def stages(
    job: Job, plan: Plan, parallelize: Parallelize, tokens: int, dtype: torch.dtype, mlp: Callable[[Shape], nn.Module] = Mlp
) -> list[Stage]:
    """This rank's stages, their parameters as everywhere. ``tokens`` a sample and ``dtype``: of the hidden states between stages."""
    samples = job.local_batch // plan.micro_batches

    def sample(width: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(samples, tokens, width, dtype=kind, device="meta", requires_grad=True)

    result = []
    for number in plan.stages_of(job.place(AXIS)):
        model = Transformer(job.shape, layers=plan.layers_of(number), mlp=mlp)
        initialize(model, job.settings.seed)
        if job.settings.precision == "fp8":
            float8.convert(model)
        module = parallelize(model.to(job.device), number)
        ids = torch.empty(samples, tokens, dtype=torch.int64, device="meta")
        comes = ids if number == 0 else sample(job.shape.hidden)
        goes = sample(job.shape.vocabulary if number == plan.stages - 1 else job.shape.hidden)
        result.append(Stage(module, number, plan.stages, job.device, input_args=comes, output_args=goes, group=job.group(AXIS)))
    return result


def as_it_is(model: Transformer, stage: int) -> nn.Module:  # noqa: ARG001
    """A stage that nothing else shards."""
    return model


def training(
    job: Job,
    plan: Plan,
    *,
    parallelize: Parallelize = as_it_is,
    loss: Callable[[Tensor, Tensor], Tensor] = loss_of,
    gathered: Callable[[Sequence[nn.Module]], dict[str, Tensor]] | None = None,
    tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    mlp: Callable[[Shape], nn.Module] = Mlp,
    autocast: bool = True,
    scaler_group: dist.ProcessGroup | None = None,
) -> Training:
    """Training of one rank under a schedule: its stages, one optimizer over them, a step that runs all micro-batches.

    Args:
        parallelize: applies FSDP, tensor parallelism... to each stage's module; see ``Parallelize``.
        loss: (output of the last stage, targets) -> mean loss of one micro-batch.
        gathered: (modules) -> full parameters by plain names; without it those of the modules as they are.
        tokens: tokens a sample of the hidden states that pass between stages; without it the whole sequence.
        dtype: their element type.
        mlp: makes the MLP of every block.
        autocast: run every stage's forward in 16 bits where ``--precision`` says so; False where ``parallelize`` has seen to it.
        scaler_group: ranks that must skip a step together under fp16: all that hold another part of one model; without it those of ``pp``.
    """
    own = stages(job, plan, parallelize, tokens or job.shape.sequence, dtype, mlp)
    modules = [stage.submod for stage in own]
    for module in modules if autocast else ():
        _with_autocast(job, module)
    _connect(job)
    optimizer = adam([p for module in modules for p in module.parameters()], job.settings.learning_rate)
    scaler = _scaler(job, scaler_group or job.group(AXIS))
    schedule = _schedule(plan, own, (lambda out, goal: scaler.scale(loss(out, goal))) if scaler is not None else loss)
    first, last = own[0].is_first, any(stage.is_last for stage in own)

    def step(ids_BT: Tensor, targets_BT: Tensor, recorder: Any) -> Tensor | None:
        losses: list[Tensor] = []
        given = (ids_BT,) if first else ()
        schedule.step(*given, target=targets_BT if last else None, losses=losses if last else None, return_outputs=False)
        mean = torch.stack(losses).detach().mean() / (scaler.get_scale() if scaler is not None else 1) if last else None
        with recorder.phase("optimizer"):
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
        return mean

    return Training(
        models=modules,
        optimizer=optimizer,
        gathered=lambda: gathered(modules) if gathered is not None else parameters(modules),
        step=step,
        scaler=scaler,
        describe={"pipeline": plan.describe()},
    )


def parameters(modules: Iterable[nn.Module]) -> dict[str, Tensor]:
    """The parameters of a rank's stages by name; stages number their layers as the whole model does."""
    return {name: p.detach() for module in modules for name, p in module.named_parameters()}


def _with_autocast(job: Job, module: nn.Module) -> None:
    """Only forward runs in 16 bits: a schedule's step has backward and the loss within."""
    forward = module.forward

    def call(*args: Any) -> Any:
        with job.autocast():
            return forward(*args)

    module.forward = call  # type: ignore[method-assign]


def _connect(job: Job) -> None:
    """Let NCCL make the communicator of all stages now: in a step not all of them would be there at once."""
    if dist.get_backend(job.group(AXIS)) == "nccl":
        dist.all_reduce(torch.zeros(1, device=job.device), group=job.group(AXIS))


def _scaler(job: Job, group: dist.ProcessGroup) -> ShardedGradScaler | None:
    """A gradient scaler for fp16 that skips a step on all ranks of ``group`` if the gradients overflow on one; else None."""
    if job.settings.precision != "fp16":
        return None
    scaler = ShardedGradScaler(job.device.type, init_scale=job.settings.loss_scale, process_group=group)
    scaler.scale(torch.zeros((), device=job.device))  # only the last stage scales a loss, but all have to know the scale
    return scaler


def _schedule(plan: Plan, own: list[Stage], loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """torch's schedule. It adds up the gradients of the micro-batches' mean losses and divides them by their number."""
    if plan.schedule in SINGLE:
        return SINGLE[plan.schedule](own[0], plan.micro_batches, loss_fn=loss, scale_grads=True)
    return MULTI[plan.schedule](own, plan.micro_batches, loss_fn=loss, scale_grads=True)


def expected(job: Job, plan: Plan, tokens: int | None = None, element_bytes: int = 4) -> list[Expected]:
    """Sends and receives of this rank a step: for every boundary to another rank one message each way a micro-batch, s b h elements.

    Under fp16 one all-reduce more: a flag that says whether gradients overflowed on any stage. ``tokens`` and ``element_bytes`` as in
    ``training``.
    """
    place, m = job.place(AXIS), plan.micro_batches
    size = (tokens or job.shape.sequence) * (job.local_batch // m) * job.shape.hidden * element_bytes
    apart = [(a, a + 1) for a in range(plan.stages - 1) if plan.rank_of(a) != plan.rank_of(a + 1)]
    ends = sum((plan.rank_of(a) == place) + (plan.rank_of(b) == place) for a, b in apart)
    result = [Expected(kind, AXIS, "pipeline", m * ends, m * ends * size) for kind in ("send", "recv")]
    if job.settings.precision == "fp16" and plan.ranks > 1:
        result.append(Expected("all_reduce", AXIS, "metrics", 1, 4))
    return [line for line in result if line.count]
