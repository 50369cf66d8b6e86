"""3D: pipeline over axis ``pp``, FSDP2 over ``dp_shard``, tensor parallelism over ``tp``; with ``dp_replicate`` HSDP as well.

    torchrun --nproc-per-node 8 -m tracekit.workloads.hybrid_3d -o traces/hybrid_3d

A rank of coordinate (p, d, t) holds the layers of stage p, of their matrices the t-th part by columns or rows, and of that the d-th shard.
Collectives a rank and step, l layers on its stage, m micro-batches of b samples, U units (l blocks, and one where the stage has embedding
or head):
    send, recv       m    over pp for every neighbour, the hidden states [b, T, h] and their gradients
    all-reduce     4 l m  over tp, as tensor_parallel
    all-gather       U    over dp_shard: gathered for the first micro-batch, kept until the last one's backward
    reduce-scatter   U    over dp_shard, in the last micro-batch's backward
    all-reduce       U    over dp_replicate where there is one
Numerics: after one step every stage's gathered parameters equal the single-process reference within float rounding.
Sources: PTD-P, arXiv:2104.04473; TorchTitan, arXiv:2410.06511.
"""

from __future__ import annotations

from tracekit.manifest import Expected

from .common import hybrid, loop
from .common.hybrid import Options
from .common.job import Job, Training
from .common.planned import Planned

MESH = {"pp": 2, "dp_shard": 2, "tp": 2}
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
