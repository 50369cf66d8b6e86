"""Sequence parallelism on top of tensor parallelism: between the split matrices every rank of axis ``tp`` holds its share of the tokens.

    torchrun --nproc-per-node 2 -m tracekit.workloads.sequence_parallel -o traces/sequence_parallel

Each all-reduce of tensor parallelism becomes a reduce-scatter and an all-gather of the same bytes; activations between them (norms,
residuals) shrink by the number of ranks. Collectives a rank and step, L blocks, each of b T h elements:
    all-gather       4L + 2   in forward the inputs of attention and MLP and of the head; in backward the gradients of their outputs, and
                              of the embedding's output
    reduce-scatter   4L       in forward the outputs of attention and MLP; in backward the gradients of their inputs
    all-reduce       2L + 1   the gradients of the norms, h elements each, which every rank has for its own tokens only
Numerics: after one step the gathered parameters equal the single-process reference within float rounding.
Sources: Korthikanti et al., arXiv:2205.05198.
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
    tensor.check_sequence(job)
    model = Transformer(job.shape)
    initialize(model, job.settings.seed)
    model.to(job.device)
    tensor.sequence_parallel(model, job.mesh["tp"])
    return Training(
        models=[model],
        optimizer=adam(model.parameters(), job.settings.learning_rate),
        gathered=lambda: sharding.gathered(model),
        scaler=loop.scaler(job),
        before_optimizer=lambda: tensor.reduce_norm_gradients(model),
    )


def expected(job: Job, options: object) -> list[Expected]:  # noqa: ARG001
    """Collectives of one rank and step."""
    return tensor.expected_sequence_parallel(job, list(range(job.shape.layers)), job.local_batch * job.shape.sequence)


def planned(job: Job, options: object) -> Planned:  # noqa: ARG001
    """What the analytical model is told."""
    return by_hand(sequence_parallel=True)


if __name__ == "__main__":
    loop.main(__name__)
