"""Hugging Face Accelerate around a job whose process group stands already, and the training step in its words."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tracekit.errors import UsageError

from .job import Job
from .transformer import loss_of


def library() -> Any:
    """The package accelerate. UsageError where it is not installed."""
    if importlib.util.find_spec("accelerate") is None:
        raise UsageError("Accelerate is not installed", "pip install 'tracekit[accelerate]'")
    return importlib.import_module("accelerate")


def accelerator(job: Job, axis: str, **options: Any) -> Any:
    """An Accelerator over all ranks of the job. UsageError for ranks along another axis, or a precision that it does not have."""
    accelerate = library()
    if not 1 < job.size(axis) == job.mesh.size():
        raise UsageError("Accelerate works over all ranks of the job, at least 2", f"give the mesh the axis {axis} only")
    cpu = job.device.type == "cpu"
    if job.settings.precision == "fp8" or (job.settings.precision == "fp16" and cpu):
        raise UsageError(f"--precision {job.settings.precision} is not offered with Accelerate on this device", "use --precision bf16")
    places = {"RANK": job.rank, "WORLD_SIZE": job.mesh.size(), "LOCAL_RANK": job.device.index or 0, "LOCAL_WORLD_SIZE": job.mesh.size()}
    for name, value in places.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("OMP_NUM_THREADS", str(job.settings.threads))
    return accelerate.Accelerator(
        cpu=cpu,
        mixed_precision={"fp32": "no"}.get(job.settings.precision, job.settings.precision),
        gradient_accumulation_steps=job.settings.micro_batches,
        **options,
    )


def shard(accelerator: Any, plugin: Any) -> None:
    """Let Accelerate shard by ``plugin`` on a CPU too.

    On GPUs it does so by itself; on CPUs it would leave the plugin aside without a word and take DDP, though what it does with the plugin
    runs on gloo as well. So it is told the kind of job, as its own state does for GPUs.
    """
    state = accelerator.state
    if not accelerator.is_fsdp2:
        for told in (library().PartialState(), state):
            told.distributed_type = library().DistributedType.FSDP
        state.fsdp_plugin = plugin
        if state.mixed_precision != "no":
            plugin.set_mixed_precision(state.mixed_precision)
    assert accelerator.is_fsdp2


def training_step(job: Job, accelerator: Any, model: nn.Module, optimizer: Any) -> Callable[[Tensor, Tensor, Any], Tensor]:
    """The step of a training loop: Accelerate divides the loss, and synchronises and steps only in the last micro-batch."""
    pieces = job.settings.micro_batches

    def step(ids_BT: Tensor, targets_BT: Tensor, recorder: Any) -> Tensor:
        total = torch.zeros((), device=job.device)
        for index, (ids, targets) in enumerate(zip(ids_BT.chunk(pieces), targets_BT.chunk(pieces), strict=True)):
            with recorder.micro_batch(index) if pieces > 1 else nullcontext(), accelerator.accumulate(model):
                loss = loss_of(model(ids), targets)
                with recorder.phase("backward"):
                    accelerator.backward(loss)
                total += loss.detach() / pieces
                with recorder.phase("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
        return total

    return step
