"""Tensor parallelism: the matrices of every block split over axis ``tp``, by columns, then by rows.

    torchrun --nproc-per-node 2 -m tracekit.workloads.tensor_parallel -o traces/tensor_parallel

Column-parallel q, k, v and up need no communication in forward, row-parallel o and down leave partial sums. All ranks work on the same
samples. Collectives a rank and step, L blocks, each of b T h elements (samples, tokens, hidden):
    all-reduce   2L   in forward: the outputs of attention and of the MLP
    all-reduce   2L   in backward: the gradients of their inputs
Embedding, norms and head are replicated; their gradients are equal on all ranks without communication.
Numerics: after one step the gathered parameters equal the single-process reference within float rounding.
Sources: Megatron-LM, arXiv:1909.08053.
"""

from __future__ import annotations

from tracekit.manifest import Expected

from .common import loop, sharding, tensor
from .common.job import Job, Training
from .common.planned import Planned, by_hand
from .common.reference import adam
from .common.transformer import Transformer, initialize

MESH = {"tp": 2}


def build(job: Job, options: object) -> Training:  # noqa: ARG001
    """The split model."""
    job.refuse_data_axes()
    tensor.check(job)
    model = Transformer(job.shape)
    initialize(model, job.settings.seed)
    model.to(job.device)
    tensor.tensor_parallel(model, job.mesh["tp"])
    return Training(
        models=[model],
        optimizer=adam(model.parameters(), job.settings.learning_rate),
        gathered=lambda: sharding.gathered(model),
        scaler=loop.scaler(job),
    )


def expected(job: Job, options: object) -> list[Expected]:  # noqa: ARG001
    """Collectives of one rank and step."""
    return tensor.expected_tensor_parallel(job, list(range(job.shape.layers)), job.local_batch * job.shape.sequence)


def planned(job: Job, options: object) -> Planned:  # noqa: ARG001
    """What the analytical model is told."""
    return by_hand()


if __name__ == "__main__":
    loop.main(__name__)
