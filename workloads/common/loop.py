"""How a workload runs on one rank: process group, mesh, model, steps under the recorder, comparison with the reference.

A workload is a module with
    MESH      axis -> size, outermost first: what it runs on by default,
    Options   a frozen dataclass of its own options (may be missing),
    DATA_AXES axes over which ranks work on different samples (may be missing: dp_replicate and dp_shard),
    DEFAULTS  field of Settings -> value, where the usual default makes no sense for it (may be missing),
    build     (Job, Options) -> Training,
    expected  (Job, Options) -> list[Expected]: the collectives of one rank and step as formulas of its sizes,
    planned   (Job, Options) -> what the analytical model is told of it, in the keys of a plan file (may be missing: nothing is trained),
    reference (Job) -> parameters after one step on one process (may be missing: the plain transformer's).
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tracekit.errors import TracekitError, UsageError
from tracekit.manifest import Batch, Precision
from tracekit.recorder.record import record

from . import launch, planned, reference
from .job import DATA_AXES, Job, Training
from .settings import Settings, defaults, mesh_sizes, parse
from .transformer import Shape

#: Largest difference of a parameter from the reference after one step, in units of the learning rate.
TOLERANCE = 0.02


def main(workload: ModuleType | str, arguments: Sequence[str] | None = None) -> None:
    """The command line of a workload: one rank under torchrun, else the launcher of all ranks."""
    module = sys.modules[workload] if isinstance(workload, str) else workload
    name = module.__spec__.name if module.__name__ == "__main__" and module.__spec__ else module.__name__
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if "RANK" in os.environ:
            run(module, given, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
        else:
            launch.launch(name, given)
    except TracekitError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error


def run(workload: ModuleType, arguments: Sequence[str], rank: int, world: int, init_method: str) -> None:
    """Train as rank ``rank`` of ``world``. Raises UsageError, and whatever training raises."""
    settings, options = parse(workload, arguments)
    sizes = mesh_sizes(workload, settings)
    total = 1
    for size in sizes.values():
        total *= size
    fake = settings.backend == "fake"
    if not fake and total != world:
        raise UsageError(f"the mesh has {total} ranks, {world} were started", "start as many, or say another --mesh")
    device = join_job(settings, settings.rank if fake else rank, total, init_method)
    try:
        mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        shape = Shape(**{f.name: getattr(settings, f.name) for f in dataclasses.fields(Shape)})
        job = Job(settings, shape, sizes, mesh, device, dist.get_rank(), getattr(workload, "DATA_AXES", DATA_AXES))
        check_precision(job)
        train(workload, job, options)
    finally:
        dist.destroy_process_group()


def join_job(settings: Settings, rank: int, world: int, init_method: str) -> torch.device:
    """Join the process group; the device this rank works on. UsageError where the backend cannot be had."""
    torch.set_num_threads(settings.threads)
    backend = settings.backend
    if backend == "auto":
        backend = "nccl" if torch.cuda.device_count() >= world or (settings.share_gpu and torch.cuda.is_available()) else "gloo"
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if backend == "nccl":
        if not torch.cuda.is_available():
            raise UsageError("--backend nccl: this machine has no GPU that torch can use", "use --backend gloo or fake")
        if settings.share_gpu:
            os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        torch.cuda.set_device(0 if settings.share_gpu else rank % torch.cuda.device_count())
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world)
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def check_precision(job: Job) -> None:
    """UsageError for a precision that the hardware does not have."""
    if job.settings.precision != "fp8":
        return
    if job.device.type != "cuda" or torch.cuda.get_device_capability(job.device) < (8, 9):
        raise UsageError("--precision fp8 needs a GPU of compute capability 8.9 or newer (H100, L40S)", "use bf16")
    from . import float8

    float8.require()


def train(workload: ModuleType, job: Job, options: Any) -> None:
    """All steps, recorded where ``--output`` says so."""
    settings = job.settings
    training: Training = workload.build(job, options)
    name = re.sub(r".*\.", "", workload.__spec__.name if workload.__spec__ else workload.__name__)
    scales: list[float] = []
    with _recorder(job, options, training, name, workload) as recorder:
        for number in range(settings.steps):
            scales += [training.scaler.get_scale()] if training.scaler is not None else []
            batch = reference.batch_of(job.shape, job.global_batch, settings.seed, number)
            own = (training.share(number, tensor) if training.share is not None else job.share(tensor) for tensor in batch)
            ids_BT, targets_BT = (tensor.to(job.device) for tensor in own)
            for tensor in (*batch, ids_BT, targets_BT):
                recorder.own(tensor, "inputs", "batch")
            if settings.die == f"{job.rank}:{number}":
                os.kill(os.getpid(), signal.SIGKILL)
            if training.step is not None:
                training.step(ids_BT, targets_BT, recorder)
            else:
                step(job, training, ids_BT, targets_BT, recorder)
            if number == 0 and settings.verify:
                recorder.note(verify(workload, job, training))
            if scales and number == settings.steps - 1:
                recorder.note(scaling([*scales, training.scaler.get_scale()]))
            recorder.step()
    if training.finish is not None:
        training.finish()


def step(job: Job, training: Training, ids_BT: Tensor, targets_BT: Tensor, recorder: Any) -> Tensor:
    """The usual training step: forward and backward of every micro-batch, then the optimizer."""
    model, pieces = training.models[0], job.settings.micro_batches
    total = torch.zeros((), device=job.device)
    for index, (ids, targets) in enumerate(zip(ids_BT.chunk(pieces), targets_BT.chunk(pieces), strict=True)):
        around = recorder.micro_batch(index) if pieces > 1 else nullcontext()
        with around, training.accumulating(index == pieces - 1):
            with job.autocast() if training.autocast else nullcontext():
                loss = training.loss(model(ids), targets) / pieces
            with recorder.phase("backward"):
                (training.scaler.scale(loss) if training.scaler is not None else loss).backward()
        total += loss.detach()
    if training.before_optimizer is not None:
        with recorder.phase("backward"):
            training.before_optimizer()
    with recorder.phase("optimizer"):
        if training.scaler is not None:
            training.scaler.step(training.optimizer)
            training.scaler.update()
        else:
            training.optimizer.step()
        training.optimizer.zero_grad()
    return total


def scaler(job: Job) -> Any:
    """A gradient scaler for fp16, None for every other precision."""
    return torch.amp.GradScaler(job.device.type, init_scale=job.settings.loss_scale) if job.settings.precision == "fp16" else None


def scaling(scales: Sequence[float]) -> str:
    """What a gradient scaler did: ``scales`` before each step and behind the last. It halves its scale where it leaves a step out."""
    skipped = [str(number) for number, (before, after) in enumerate(pairwise(scales)) if after < before]
    steps = f"step{'s' if len(skipped) > 1 else ''} {', '.join(skipped)}"
    done = f"skipped the update of {steps}, whose gradients overflowed" if skipped else "no step was skipped"
    return f"loss scale {scales[0]:,.0f} at the start, {scales[-1]:,.0f} behind step {len(scales) - 2}: {done}"


class NoRecorder:
    """Stands in for a Recorder where nothing is recorded."""

    def step(self) -> None:
        """Nothing."""

    def phase(self, name: str) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Nothing."""
        return nullcontext()

    def micro_batch(self, index: int) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Nothing."""
        return nullcontext()

    def own(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def describe(self, **said: Any) -> None:
        """Nothing."""

    def note(self, sentence: str) -> None:
        """Say it: there is no manifest to write it into."""
        print(sentence, flush=True)


def _recorder(job: Job, options: Any, training: Training, name: str, workload: ModuleType) -> AbstractContextManager[Any]:
    settings = job.settings
    if not settings.output:
        return nullcontext(NoRecorder())
    labels = settings.labels
    if labels == "auto":
        labels = "dispatch" if settings.backend == "fake" else "flight_recorder"
    shown = {**dataclasses.asdict(options), "precision": settings.precision}
    return record(
        settings.output,
        mesh=job.mesh,
        model=training.models,
        optimizer=training.optimizer,
        wait=settings.wait,
        warmup=settings.warmup,
        active=settings.active,
        labels=labels,  # type: ignore[arg-type]
        memory=settings.memory,
        stacks=settings.stacks,
        saved_tensors=settings.saved_tensors,
        strategy=name,
        options=shown,
        command=f"tracekit record {name} {launch.shown(sys_arguments(settings, options, defaults(workload)))}".strip(),
        **{
            "batch": batch_sizes(job),
            "model_shape": {**job.shape.describe(), "parameters": job.shape.elements()},
            "precision": precision_of(settings),
            "expected": workload.expected(job, options),
            "plan": planned.of(workload, job, options),
            **training.describe,
        },
    )


def batch_sizes(job: Job) -> Batch:
    """Samples a step, of all ranks, of this one and of one micro-batch."""
    pieces = job.settings.micro_batches
    return Batch(job.global_batch, job.local_batch, job.local_batch // pieces, pieces, job.shape.sequence)


def precision_of(settings: Settings) -> Precision:
    """What the settings mean for parameters, arithmetic and reduction, unless the workload says otherwise."""
    compute = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}.get(settings.precision, "float32")
    scaled = settings.precision == "fp16"
    return Precision(parameters="float32", compute=compute, reduce="float32", gradients="float32", loss_scaling=scaled)


def sys_arguments(settings: Settings, options: Any, changed: Mapping[str, Any]) -> list[str]:
    """The options that differ from their defaults (``changed``: those of the workload), as one would type them."""
    words = []
    for values, own in ((settings, changed), (options, {})):
        for item in dataclasses.fields(values):
            value = getattr(values, item.name)
            if value != own.get(item.name, item.default) and item.name not in ("output", "replace"):
                flag = item.name.replace("_", "-")
                words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return words


def verify(workload: ModuleType, job: Job, training: Training) -> str:
    """Compare this rank's gathered parameters with the reference after one step: a sentence, or AssertionError where they differ."""
    if job.settings.precision != "fp32" or job.settings.backend == "fake":
        raise UsageError("--verify compares fp32 training of all ranks", "leave out --precision and --backend fake")
    if training.verified is not None:
        return training.verified()
    rate = job.settings.learning_rate
    wanted = getattr(workload, "reference", lambda job: reference.train(job.shape, job.global_batch, job.settings.seed, 1, rate))
    expected = training.reference() if training.reference is not None else wanted(job)
    found = training.gathered()
    strange = sorted(set(found) - set(expected))
    if strange or not found:
        raise AssertionError(f"gathered parameters that the reference does not have: {strange[:3]}")
    worst = max(((found[n].float() - expected[n]).abs().max().item(), n) for n in found)
    if not worst[0] <= TOLERANCE * rate:
        off = f"{worst[0]:.3g}, {worst[0] / rate:.3g} learning rates"
        raise AssertionError(f"after one step {worst[1]} differs from the reference by {off}")
    return f"verified: after one step {len(found)} gathered parameters equal the single-process reference within {worst[0]:.2g}"
