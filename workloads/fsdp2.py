"""FSDP2: parameters, gradients and optimizer state sharded over axis ``dp_shard``, parameter by parameter.

    torchrun --nproc-per-node 2 -m tracekit.workloads.fsdp2 -o traces/fsdp2

``fully_shard`` goes bottom-up: every block is a unit, what is left (embedding, last norm, head) is the root's. Collectives a rank and step,
L blocks, m rounds of gradient accumulation:
    all-gather      m (2L + 1)   every unit in forward; blocks again in backward (the root stays gathered)
                    m (L + 1)    with reshard_after_forward=false
    reduce-scatter  L + 1        every unit in backward; only in the last round under accumulation without synchronisation
An all-gather moves the unit's parameters, each padded to a multiple of the ranks along its first dimension; in bf16 under the
mixed-precision policy. Gradients travel in ``reduce_dtype``. ``--recompute`` sends nothing more: backward has gathered the block already.
``--wrap`` makes other units, U in all: ``ends`` (embedding, and last norm with head, are units too: U = L + 2), ``whole`` (one unit, the
root's: nothing is freed before backward is over), ``modules`` (every linear layer, norm and embedding by itself). Those of the last kind
are too small for a network, the one of the kind before needs memory for the whole model:
    all-gather      m (2U - r)   r = 1 if the root holds parameters (``layers``, ``whole``), else 0
    reduce-scatter  U
``--checkpoint-every 1`` saves within every step: all-gather 2, gather 2, broadcast 3, scatter 2 of Python objects (their sizes, then their
bytes), which say who writes what; the shards themselves go from each rank to its own file. ``--deferred-init`` sends nothing.
Numerics: after one step the gathered parameters equal the single-process reference within float rounding.
Sources: ZeRO, arXiv:1910.02054; PyTorch FSDP, arXiv:2304.11277; torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tracekit.manifest import Expected

from .common import loop, sharding
from .common.job import Job, Training
from .common.planned import Planned
from .common.recompute import IN_THE_MODEL, recompute, recompute_option
from .common.reference import adam
from .common.settings import option
from .common.transformer import Transformer, initialize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MESH = {"dp_shard": 2}
#: Collectives of Python objects of one ``torch.distributed.checkpoint.save``: plans to rank 0, their parts back, what was written, the end.
OBJECTS = (("all_gather", 2), ("gather", 2), ("broadcast", 3), ("scatter", 2))


@dataclass(frozen=True)
class Options:
    """Options of FSDP2."""

    reshard_after_forward: str = option("true", "true, false, or the number of ranks over which parameters stay sharded in between")
    sync_every_round: bool = option(True, "under gradient accumulation, reduce gradients in every round; otherwise only in the last")
    reduce_dtype: str = option("fp32", "element type in which gradients are reduced under bf16", ("fp32", "bf16"))
    wrap: str = option("layers", "units: blocks; blocks and ends; the whole model; every module with parameters", sharding.WRAPS)
    recompute: str = recompute_option()
    deferred_init: bool = option(False, "build the model on the meta device: no rank ever holds more than its shards and one parameter")
    checkpoint: str = option("", "folder: save a sharded checkpoint after the last step, or resume from the one that is there")
    checkpoint_every: int = option(0, "with --checkpoint: save within every so many steps as well")


def build(job: Job, options: Options) -> Training:
    """The sharded model."""
    with torch.device("meta") if options.deferred_init else job.device:
        model = Transformer(job.shape)
    if not options.deferred_init:
        initialize(model, job.settings.seed)
    reshard = sharding.reshard_of(options.reshard_after_forward, job.size("dp_shard"))
    recompute(model, options.recompute)
    sharding.shard(model, job.mesh["dp_shard"], sharding.policy(job, options.reduce_dtype), reshard, options.wrap)
    if options.deferred_init:
        sharding.initialize_shards(model, job.device, job.settings.seed)
    optimizer = adam(model.parameters(), job.settings.learning_rate)
    if options.checkpoint:
        sharding.resume(model, optimizer, options.checkpoint)

    @contextmanager
    def accumulating(last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last or options.sync_every_round)
        model.set_is_last_backward(last)
        yield

    training = Training(
        models=[model],
        optimizer=optimizer,
        gathered=lambda: sharding.gathered(model),
        accumulating=accumulating,
        autocast=False,
        scaler=loop.scaler(job),
        finish=(lambda: sharding.save(model, optimizer, options.checkpoint)) if options.checkpoint else None,
        describe={"precision": sharding.precision(job, options.reduce_dtype)},
    )
    if options.checkpoint and options.checkpoint_every:
        training.step = saving(job, options, training)
    return training


def saving(job: Job, options: Options, training: Training) -> Callable[[Tensor, Tensor, Any], Tensor]:
    """The usual step, and behind some a checkpoint: every rank writes its shards, rank 0 says who writes what."""
    numbers = count(1)

    def step(ids_BT: Tensor, targets_BT: Tensor, recorder: Any) -> Tensor:
        loss = loop.step(job, training, ids_BT, targets_BT, recorder)
        if next(numbers) % options.checkpoint_every == 0:
            with torch.profiler.record_function("save checkpoint"):
                sharding.save(training.models[0], training.optimizer, options.checkpoint)
        return loss

    return step


def expected(job: Job, options: Options) -> list[Expected]:
    """Collectives of one rank and step."""
    reshard = sharding.reshard_of(options.reshard_after_forward, job.size("dp_shard"))
    with torch.device("meta"):
        units = sharding.padded_elements(Transformer(job.shape), job.size("dp_shard"), options.wrap)
    rounds = job.settings.micro_batches
    objects = OBJECTS if options.checkpoint and options.checkpoint_every == 1 else ()
    reductions = rounds if options.sync_every_round else 1
    lines = sharding.expected(job, units, reshard, options.reduce_dtype, rounds=rounds, reductions=reductions)
    return [*lines, *(Expected(kind, "dp_shard", "setup", calls, -1) for kind, calls in objects)]


def planned(job: Job, options: Options) -> Planned:
    """What the analytical model is told."""
    strategy = {
        "name": "fsdp2",
        "reshard_after_forward": sharding.reshard_of(options.reshard_after_forward, job.size("dp_shard")),
        "sync_every_micro_batch": options.sync_every_round,
    }
    habits = {"marks_last_backward": True}
    wrap = {"modules": "parameters"}.get(options.wrap, options.wrap)
    return {"strategy": strategy, "implementation": habits, "wrap": wrap, "recompute": IN_THE_MODEL[options.recompute]}


if __name__ == "__main__":
    loop.main(__name__)
