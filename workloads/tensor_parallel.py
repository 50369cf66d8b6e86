"""Tensor parallelism: the matrices of every block split over axis ``tp``, by columns, then by rows.

    torchrun --nproc-per-node 2 -m tracekit.workloads.tensor_parallel -o traces/tensor_parallel

Column-parallel q, k, v and up need no communication in forward, row-parallel o and down leave partial sums. All ranks work on the same
samples. Collectives a rank and step, L blocks, each of b T h elements (samples, tokens, hidden):
    all-reduce   2L   in forward: the outputs of attention and of the MLP
    all-reduce   2L   in backward: the gradients of their inputs
Embedding, norms and head are replicated; their gradients are equal on all ranks without communication. ``--divide-vocabulary``
divides that of embedding and head, V tokens, as well:
    all-reduce   2    of b T h elements: the embedding's output in forward, the gradient of the head's input in backward
    all-gather   1    gather: the logits, b T V elements, in forward
    all-reduce   3    loss: b T numbers each: every token's largest logit, the sum of its exponentials, its target's logit
Numerics: after one step the gathered parameters equal the single-process reference within float rounding.
Sources: Megatron-LM, arXiv:1909.08053; torch.distributed.tensor.parallel.loss_parallel.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

from torch.distributed.tensor.parallel import loss_parallel

from tracekit.errors import UsageError
from tracekit.manifest import Expected

from .common import loop, sharding, tensor
from .common.job import Job, Training
from .common.planned import Planned, by_hand
from .common.reference import adam
from .common.settings import option
from .common.transformer import Transformer, initialize, loss_of

MESH = {"tp": 2}
DIVIDE = ("no", "gather", "loss")


@dataclass(frozen=True)
class Options:
    """Options of tensor parallelism."""

    divide_vocabulary: str = option("no", "embedding and head: no; gather: divided, logits gathered; loss: divided, loss too", DIVIDE)


def build(job: Job, options: Options) -> Training:
    """The split model."""
    check(job, options)
    divided = options.divide_vocabulary == "loss"
    model = Transformer(job.shape)
    initialize(model, job.settings.seed)
    model.to(job.device)
    tensor.tensor_parallel(model, job.mesh["tp"])
    if options.divide_vocabulary != "no":
        tensor.vocabulary_parallel(model, job.mesh["tp"], gather=not divided)
    return Training(
        models=[model],
        optimizer=adam(model.parameters(), job.settings.learning_rate),
        gathered=lambda: sharding.gathered(model),
        scaler=loop.scaler(job),
        accumulating=lambda last: loss_parallel() if divided else nullcontext(),  # noqa: ARG005
        loss=tensor.loss_on_shards if divided else loss_of,
    )


def check(job: Job, options: Options) -> None:
    """UsageError where sizes do not divide."""
    job.refuse_data_axes()
    tensor.check(job)
    vocabulary, ranks = job.shape.vocabulary, job.size("tp")
    if options.divide_vocabulary != "no" and vocabulary % ranks:
        raise UsageError(f"--vocabulary {vocabulary} does not divide among tp={ranks} ranks", f"make it a multiple of {ranks}")


def expected(job: Job, options: Options) -> list[Expected]:
    """Collectives of one rank and step."""
    check(job, options)
    tokens = job.local_batch * job.shape.sequence
    lines = tensor.expected_tensor_parallel(job, list(range(job.shape.layers)), tokens)
    if options.divide_vocabulary != "no":
        lines += tensor.expected_vocabulary_parallel(job, tokens, gather=options.divide_vocabulary == "gather")
    return lines


def planned(job: Job, options: Options) -> Planned:  # noqa: ARG001
    """What the analytical model is told."""
    return by_hand(vocabulary_parallel=options.divide_vocabulary != "no", vocabulary_parallel_loss=options.divide_vocabulary == "loss")


if __name__ == "__main__":
    loop.main(__name__)
