"""4D: pipeline, FSDP2, context and tensor parallelism over axes ``pp``, ``dp_shard``, ``cp``, ``tp``; with ``dp_replicate`` HSDP as well.

    torchrun --nproc-per-node 16 -m tracekit.workloads.hybrid_4d -o traces/hybrid_4d

As hybrid_3d, and every rank of ``cp`` holds a slice of each sequence. Ranks along dp_shard and cp hold the same part of the model, so
parameters are sharded over both together. Collectives a rank and step, l layers on its stage, m micro-batches, U units:
    send, recv       m    over pp for every neighbour, the hidden states [b, T/c, h] and their gradients
    all-reduce     4 l m  over tp, each of b T/c h elements
    all-gather     2 l m  over cp: keys and values, in forward and again in backward
    reduce-scatter   l m  over cp: the gradients of keys and values
    all-gather       U    over dp_shard_cp
    reduce-scatter   U    over dp_shard_cp
    all-reduce       U    over dp_replicate where there is one
Numerics: after one step every stage's gathered parameters equal the single-process reference within float rounding.
Sources: TorchTitan, arXiv:2410.06511; The Llama 3 Herd of Models, arXiv:2407.21783 (section 3.3.2).
"""

from __future__ import annotations

from tracekit.manifest import Expected

from .common import hybrid, loop
from .common.hybrid import Options
from .common.job import Job, Training
from .common.planned import Planned

MESH = {"pp": 2, "dp_shard": 2, "cp": 2, "tp": 2}
DEFAULTS = {"batch": 4, "micro_batches": 2}

__all__ = ["DEFAULTS", "MESH", "Options", "build", "expected", "planned"]


def build(job: Job, options: Options) -> Training:
    """This rank's stage."""
    return hybrid.training(job, options)


def expected(job: Job, options: Options) -> list[Expected]:
    """Of one rank and step."""
    return hybrid.expected(job, options)


def planned(job: Job, options: Options) -> Planned:  # noqa: ARG001
    """What the analytical model is told."""
    return hybrid.planned()


if __name__ == "__main__":
    loop.main(__name__)
