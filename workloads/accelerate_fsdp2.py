"""FSDP2 driven by Hugging Face Accelerate: the job of ``fsdp2``, cut into units as Accelerate does it.

    torchrun --nproc-per-node 2 -m tracekit.workloads.accelerate_fsdp2 -o traces/accelerate_fsdp2

Accelerate makes a unit of every block, one of the last norm, and leaves the rest (embedding, head) to the root; norm and root stay gathered
between forward and backward. Collectives a rank and step, L blocks, m rounds of gradient accumulation:
    all-gather      m (2L + 2)   every unit in forward; blocks again in backward
                    m (L + 2)    with --no-reshard-after-forward
    reduce-scatter  L + 2        every unit in backward of the last round: ``Accelerator.accumulate`` leaves the others unsynchronised
Each moves the parameters of its unit, padded to a multiple of the ranks along their first dimension; in bf16 under mixed precision.
Numerics: after one step the gathered parameters equal the single-process reference within float rounding.
Needs the extra ``accelerate``; the units are those of its version 1.15.
Sources: PyTorch FSDP, arXiv:2304.11277; huggingface.co/docs/accelerate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tracekit.manifest import Expected, Precision

from .common import accelerated, loop, sharding
from .common.job import Job, Training
from .common.planned import Planned
from .common.reference import adam
from .common.settings import option
from .common.transformer import Transformer, initialize

MESH = {"dp_shard": 2}


@dataclass(frozen=True)
class Options:
    """Options of FSDP2 under Accelerate."""

    reshard_after_forward: bool = option(True, "free a block's parameters after its forward and gather them again in backward")


def build(job: Job, options: Options) -> Training:
    """Model and optimizer as Accelerate prepares them."""
    model = Transformer(job.shape)
    initialize(model, job.settings.seed)
    plugin = accelerated.library().FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=options.reshard_after_forward,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = accelerated.accelerator(job, "dp_shard", fsdp_plugin=plugin)
    accelerated.shard(accelerator, plugin)
    sharded, optimizer = accelerator.prepare(model, adam(model.parameters(), job.settings.learning_rate))
    low = {"bf16": "bfloat16", "fp16": "float16"}.get(job.settings.precision, "float32")
    return Training(
        models=[sharded],
        optimizer=optimizer,
        gathered=lambda: sharding.gathered(sharded),
        step=accelerated.training_step(job, accelerator, sharded, optimizer),
        describe={"precision": Precision("float32", low, low, "float32", job.settings.precision == "fp16")},
    )


def expected(job: Job, options: Options) -> list[Expected]:
    """All-gathers and reduce-scatters of one rank and step."""
    with torch.device("meta"):
        units = sharding.padded_elements(Transformer(job.shape), job.size("dp_shard"))
    rounds, layers, width = job.settings.micro_batches, job.shape.layers, 4 if job.settings.precision == "fp32" else 2
    everything, blocks = sum(units.values()), sum(size for name, size in units.items() if name)
    gathers, gathered = layers + 2, everything
    if options.reshard_after_forward:
        gathers, gathered = gathers + layers, gathered + blocks
    return [
        Expected("all_gather", "dp_shard", "parameter_gather", rounds * gathers, rounds * width * gathered),
        Expected("reduce_scatter", "dp_shard", "gradient_scatter", layers + 2, width * everything),
    ]


def planned(job: Job, options: Options) -> Planned:  # noqa: ARG001
    """The last unit, the norm, stays gathered; only the last of several micro-batches reduces."""
    strategy = {"name": "fsdp2", "reshard_after_forward": options.reshard_after_forward, "sync_every_micro_batch": False}
    return {"strategy": strategy, "implementation": {"last_stays": True}}


if __name__ == "__main__":
    loop.main(__name__)
