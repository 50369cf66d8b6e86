"""DeepSpeed's ZeRO, stage 1, 2 or 3: what zero1, zero2 and zero3 do, by an engine that many people train with.

    torchrun --nproc-per-node 2 -m tracekit.workloads.deepspeed_zero -o traces/deepspeed_zero --stage 3

Collectives a rank and step, N elements in P parameters, B buckets of gradients, W ranks, m micro-batches:
    stage 1  all-reduce      B, of N elements, behind the last backward
             all-gather      1, of N elements padded to a multiple of 2W, in the engine's step: the updated parameters
    stage 2  the same, but the all-reduces run in backward, and in every micro-batch: mB
    stage 3  all-gather      2mP, of N elements and padding 2m times: every parameter before forward and again before backward
             reduce-scatter  mB, of N elements and padding m times
    all      all-reduce      1 of one number, the norm of the gradients; under fp16, and bf16 in stages 1 and 2, 1 of one byte: whether all
                             gradients are finite
By default DeepSpeed all-reduces whole buckets in stages 1 and 2 and keeps its slice, twice what a reduce-scatter would send. In stage 3 it
is told to gather nothing ahead and to keep nothing gathered (its defaults would keep all of a model this small).
Numerics: after one step the gathered parameters equal the single-process reference within float rounding.
Needs the extra ``deepspeed``; stage 3 does not run on the fake group.
Sources: ZeRO, arXiv:1910.02054; DeepSpeed's configuration, deepspeed.ai/docs/config-json.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tracekit.errors import UsageError
from tracekit.manifest import Expected, Precision

from .common import loop, zero
from .common.job import Job, Training
from .common.planned import Planned
from .common.reference import adam
from .common.settings import option
from .common.transformer import Transformer, initialize, loss_of

MESH = {"dp_shard": 2}


@dataclass(frozen=True)
class Options:
    """Options of DeepSpeed."""

    stage: int = option(2, "1: optimizer state is sharded; 2: gradients as well; 3: parameters as well", (1, 2, 3))
    bucket_cap_mb: float = option(0.5, "largest bucket of gradients in MiB; a bucket holds at least the largest gradient")


def engine_of(job: Job, options: Options, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """DeepSpeed's engine around the model. UsageError where DeepSpeed is not installed or does not fit the mesh."""
    if importlib.util.find_spec("deepspeed") is None:
        raise UsageError("DeepSpeed is not installed", "pip install 'tracekit[deepspeed]'")
    if not 1 < job.size("dp_shard") == job.mesh.size():
        raise UsageError("DeepSpeed shards over all ranks of the job, at least 2", "give the mesh the axis dp_shard only")
    if job.settings.backend == "fake" and options.stage == 3:
        raise UsageError("stage 3 of DeepSpeed compares the ranks when it starts", "leave out --backend fake, or take --stage 1 or 2")
    if job.settings.precision == "fp8" or (job.settings.precision == "fp16" and job.device.type == "cpu"):
        raise UsageError(f"DeepSpeed has no {job.settings.precision} on this device", "use --precision bf16")
    if job.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_RANK", str(job.device.index or 0))
    deepspeed = importlib.import_module("deepspeed")

    # DeepSpeed would compile an extension for shared memory, which takes a minute and serves inference only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=torch.distributed.get_backend(), auto_mpi_discovery=False, dist_init_required=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(job, options, model), dist_init_required=False)
    return engine


def configuration(job: Job, options: Options, model: nn.Module) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    pieces = job.settings.micro_batches
    stage3 = {
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    }
    return {
        "train_micro_batch_size_per_gpu": job.local_batch // pieces,
        "gradient_accumulation_steps": pieces,
        "zero_optimization": {
            "stage": options.stage,
            "overlap_comm": False,
            "reduce_bucket_size": bucket_elements(options, [p.numel() for p in model.parameters()]),
            **(stage3 if options.stage == 3 else {}),
        },
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # the default clips the norm of all gradients to 1
        "bf16": {"enabled": job.settings.precision == "bf16"},
        "fp16": {"enabled": job.settings.precision == "fp16", "initial_scale_power": 12},
    }


def build(job: Job, options: Options) -> Training:
    """The engine and its loop: it scales the loss, accumulates, steps and clears gradients itself."""
    model = Transformer(job.shape)
    initialize(model, job.settings.seed)
    model.to(job.device)
    engine = engine_of(job, options, model, adam(model.parameters(), job.settings.learning_rate))
    optimizer, pieces = engine.optimizer.optimizer, job.settings.micro_batches
    owners = Owners(engine) if options.stage == 3 else None

    def step(ids_BT: Tensor, targets_BT: Tensor, recorder: Any) -> Tensor:
        for number, master in enumerate(optimizer.state):
            recorder.own(master, "optimizer_state", f"master parameters {number}")
        if owners is not None:
            owners.recorder = recorder
        total = torch.zeros((), device=job.device)
        for index, (ids, targets) in enumerate(zip(ids_BT.chunk(pieces), targets_BT.chunk(pieces), strict=True)):
            with recorder.micro_batch(index) if pieces > 1 else nullcontext():
                loss = loss_of(engine(ids), targets)
                with recorder.phase("backward"):
                    engine.backward(loss)
                total += loss.detach() / pieces
                with recorder.phase("optimizer"):
                    engine.step()
        return total

    low = {"bf16": "bfloat16", "fp16": "float16"}.get(job.settings.precision, "float32")
    return Training(
        models=[engine],
        optimizer=optimizer,
        gathered=lambda: gathered(engine, options),
        step=step,
        describe={"precision": Precision(low, low, low, low, job.settings.precision == "fp16")},
    )


class Owners:
    """Tells the recorder which memory stage 3 has gathered: before a module's forward, behind DeepSpeed's hook, and at its gradients."""

    def __init__(self, engine: nn.Module) -> None:
        self.recorder: Any = loop.NoRecorder()
        for name, module in engine.module.named_modules():
            for key, parameter in module.named_parameters(prefix=name, recurse=False):
                module.register_forward_pre_hook(lambda *_, key=key, parameter=parameter: self.say(key, parameter))
                parameter.register_hook(lambda _, key=key, parameter=parameter: self.say(key, parameter))

    def say(self, name: str, parameter: nn.Parameter) -> None:
        """This parameter is gathered now."""
        self.recorder.own(parameter.data, "gathered_parameters", name)


def gathered(engine: Any, options: Options) -> dict[str, Tensor]:
    """Full parameters by name (a collective in stage 3: every rank has to call it)."""
    deepspeed = importlib.import_module("deepspeed")

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=options.stage == 3):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def expected(job: Job, options: Options) -> list[Expected]:
    """Collectives of one rank and step."""
    stage, world, rounds = options.stage, job.size("dp_shard"), job.settings.micro_batches
    with torch.device("meta"):
        sizes = [p.numel() for p in Transformer(job.shape).parameters()]
    width = 4 if job.settings.precision == "fp32" else 2
    norm = Expected("all_reduce", "dp_shard", "metrics", 1, 8 if stage == 3 else 4)
    checked = ("fp16",) if stage == 3 else ("fp16", "bf16")
    checks = [Expected("all_reduce", "dp_shard", "metrics", 1, 1)] if job.settings.precision in checked else []
    if stage < 3:
        count = len(buckets_of(sizes if stage == 1 else sizes[::-1], bucket_elements(options, sizes)))
        reductions = rounds if stage == 2 else 1
        return [
            Expected("all_reduce", "dp_shard", "gradient_sync", reductions * count, reductions * width * sum(sizes)),
            norm,
            *checks,
            Expected("all_gather", "dp_shard", "parameter_sync", 1, width * zero.padded(sum(sizes), 2 * world)),
        ]
    count, whole = len(buckets_of(sizes[::-1], bucket_elements(options, sizes))), sum(zero.padded(size, world) for size in sizes)
    return [
        Expected("all_gather", "dp_shard", "parameter_gather", rounds * 2 * len(sizes), rounds * 2 * width * whole),
        Expected("reduce_scatter", "dp_shard", "gradient_scatter", rounds * count, rounds * width * whole),
        norm,
        *checks,
    ]


def bucket_elements(options: Options, sizes: list[int]) -> int:
    """The most elements of one bucket of gradients."""
    return max(int(options.bucket_cap_mb * 2**20 / 4), *sizes)


def buckets_of(sizes: list[int], most: int) -> list[int]:
    """Elements of every bucket: DeepSpeed closes one before a gradient that would not fit."""
    buckets = [0]
    for size in sizes:
        if buckets[-1] + size > most:
            buckets.append(0)
        buckets[-1] += size
    return buckets


def planned(job: Job, options: Options) -> Planned:  # noqa: ARG001
    """DeepSpeed gathers every parameter by itself."""
    strategy = {"name": f"zero{options.stage}", "bucket_cap_mb": options.bucket_cap_mb, "backward_prefetch": "none"}
    return {"strategy": strategy, "implementation": {"name": "deepspeed"}, "wrap": "parameters" if options.stage == 3 else "layers"}


if __name__ == "__main__":
    loop.main(__name__)
