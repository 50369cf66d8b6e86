"""What models, optimizers and schedules say of themselves where the training loop says nothing: pipeline, batch, plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from tracekit.manifest import Batch
from tracekit.recorder import found, private

#: Classes of ``torch.distributed.pipelining`` -> the schedule's name in a manifest.
_SCHEDULES = {
    "ScheduleGPipe": "gpipe",
    "Schedule1F1B": "1f1b",
    "ScheduleInterleaved1F1B": "interleaved_1f1b",
    "ScheduleInterleavedZeroBubble": "interleaved_zero_bubble",
    "ScheduleZBVZeroBubble": "zbv",
    "ScheduleLoopedBFS": "looped_bfs",
    "ScheduleDualPipeV": "dual_pipe_v",
}


def pipeline(models: Sequence[nn.Module]) -> tuple[dict[str, Any], Batch | None]:
    """(what is known of the schedule that runs these modules, its micro-batches); ({}, None) where none does."""
    stages = found.stages(models)
    for schedule in found.instances(private.pipeline_schedule_type()) if stages else []:
        own = private.stages_of_schedule(schedule)
        if not any(stage is other for stage in stages for other in own):
            continue
        name, pieces = _SCHEDULES.get(type(schedule).__name__, type(schedule).__name__), private.micro_batches_of(schedule)
        total, each = int(getattr(own[0], "num_stages", len(own))), max(1, len(own))
        told = {"schedule": name, "ranks": total // each, "stages": total, "virtual_stages": each, "microbatches": pieces}
        return {key: value for key, value in told.items() if value}, Batch(micro_batches=pieces) if pieces else None
    return {}, None


def plan(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> dict[str, Any]:
    """The strategy as a plan file of ``tracekit estimate`` has it, where units do not show it: DeepSpeed's ZeRO, torch's ZeRO-1."""
    for model in models:
        stage = private.deepspeed_stage(model) if found.is_engine(model) else 0
        if stage:
            strategy = {"name": f"zero{stage}", "backward_prefetch": "none"}
            return {"strategy": strategy, "implementation": {"name": "deepspeed"}, "wrap": "parameters" if stage == 3 else "layers"}
    replicas = found.replicas(models)
    if replicas and any(private.shards_state(optimizer) for optimizer in optimizers):
        cap = private.ddp_bucket_cap(replicas[0])
        return {"strategy": {"name": "zero1", **({"bucket_cap_mb": cap} if cap else {})}, "implementation": {"padding": "torch_zero"}}
    return {}
