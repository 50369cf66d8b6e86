"""Tensor and sequence parallelism of the transformer's blocks by DTensor, and the collectives that this makes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tracekit.errors import UsageError
from tracekit.manifest import Expected

from .job import Job
from .transformer import Mlp, Transformer, loss_of


def check(job: Job) -> None:
    """UsageError where the sizes of the model do not divide among the ranks of axis tp."""
    ranks, shape = job.size("tp"), job.shape
    for name, size in (("heads", shape.heads), ("kv-heads", shape.kv_heads), ("ffn", shape.ffn)):
        if size % ranks:
            raise UsageError(f"--{name} {size} does not divide among tp={ranks} ranks", f"make --{name} a multiple of {ranks}")


def check_sequence(job: Job) -> None:
    """UsageError where the tokens of this rank do not divide among the ranks of axis tp."""
    tokens = job.shape.sequence // job.size("cp")
    if tokens % job.size("tp"):
        raise UsageError(f"{tokens} tokens do not divide among tp={job.size('tp')} ranks", "change --sequence")


def tensor_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    """Split every block over ``mesh`` as Megatron does: q, k, v and up by columns, o and down by rows; the rest is replicated.

    Inputs are made DTensors once in front of attention and of the MLP, so that their gradients are summed over ranks once and not once a
    linear layer. What stands in place of the MLP (experts) stays whole.
    """
    for block in model.layers.values():
        plan = {
            "attention": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.o": RowwiseParallel(),
        }
        if isinstance(block.mlp, Mlp):
            plan |= {
                "mlp": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
                **_columns(block.mlp),
                "mlp.down": RowwiseParallel(),
            }
        parallelize_module(block, mesh, plan)


def _columns(mlp: nn.Module) -> dict[str, ColwiseParallel]:
    """The matrices of an MLP that are split by columns."""
    return {f"mlp.{name}": ColwiseParallel() for name in ("gate", "up") if getattr(mlp, name, None) is not None}


def vocabulary_parallel(model: Transformer, mesh: DeviceMesh, *, gather: bool) -> None:
    """Divide the vocabulary of embedding and head over ``mesh``. ``gather``: put the logits together behind the head.

    A rank looks up the tokens that it has, zeros for the others, and the sum over ranks is the embedding; the head is column-parallel.
    """
    logits = Replicate() if gather else Shard(-1)
    plan = {
        "embedding.tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=logits, use_local_output=gather),
    }
    parallelize_module(model, mesh, plan)


def loss_on_shards(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """The loss of logits that are divided over ranks: they agree on each token's largest logit, on the sum, and on the target's."""
    with torch.profiler.record_function("loss"):
        loss = loss_of(logits_BTV, targets_BT)
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def expected_vocabulary_parallel(job: Job, tokens: int, *, gather: bool) -> list[Expected]:
    """Collectives of embedding, head and loss for so many tokens a step."""
    if job.size("tp") == 1:
        return []
    rounds, size = job.settings.micro_batches, 4 * tokens * job.shape.hidden
    output = 2 if job.settings.precision in ("bf16", "fp16") else 4
    ends = Expected("all_reduce", "tp", "tensor_parallel", 2 * rounds, 2 * size)
    if gather:
        return [ends, Expected("all_gather", "tp", "tensor_parallel", rounds, output * tokens * job.shape.vocabulary)]
    return [ends, Expected("all_reduce", "tp", "loss", 3 * rounds, 3 * 4 * tokens)]


def sequence_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    """The same, and between attention and MLP a rank holds only its share of the tokens: all-reduce becomes reduce-scatter + all-gather.

    The embedding's output is cut, the head's input gathered; norms work on their share, so their gradients are summed at the end.
    """
    sequence = Shard(1)
    if model.embedding is not None:
        cut = PrepareModuleOutput(output_layouts=(Replicate(),), desired_output_layouts=(sequence,))
        parallelize_module(model, mesh, {"embedding": cut})
    for block in model.layers.values():
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(Replicate(),)),
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.o": RowwiseParallel(output_layouts=sequence),
            "mlp_norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(Replicate(),)),
            **_columns(block.mlp),
            "mlp.down": RowwiseParallel(output_layouts=sequence),
        }
        parallelize_module(block, mesh, plan)
    if model.norm is not None:
        whole = PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(Replicate(),), use_local_output=True)
        parallelize_module(model, mesh, {"norm": SequenceParallel(), "head": whole})


def expected_tensor_parallel(job: Job, layers: list[int], tokens: int) -> list[Expected]:
    """All-reduces over tp for so many layers and tokens a step: two in forward, two in backward, each of tokens x hidden elements."""
    if job.size("tp") == 1:
        return []
    # Under autocast outputs are 16-bit, while the inputs (from a norm) and so their gradients stay fp32.
    forward = 2 if job.settings.precision in ("bf16", "fp16") else 4
    calls = 4 * len(layers) * job.settings.micro_batches
    size = 2 * len(layers) * tokens * job.shape.hidden * (forward + 4)
    return [Expected("all_reduce", "tp", "tensor_parallel", calls, size)]


def reduce_norm_gradients(model: nn.Module) -> None:
    """Sum the gradients of norms over the ranks that each saw their own tokens, once, before the optimizer uses them several times."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
            parameter.grad = gradient.redistribute(placements=[Replicate() if p.is_partial() else p for p in gradient.placements])


def expected_sequence_parallel(job: Job, layers: list[int], tokens: int) -> list[Expected]:
    """Collectives over tp for so many layers and tokens a step; the embedding and the head are there where layer 0 and the last are."""
    if job.size("tp") == 1:
        return []
    first, last = int(0 in layers), int(job.shape.layers - 1 in layers)
    rounds, size = job.settings.micro_batches, tokens * job.shape.hidden
    # Under autocast what comes out of a matrix is 16-bit, and so is its gradient; what goes in comes from a norm and is fp32.
    output = 2 if job.settings.precision in ("bf16", "fp16") else 4
    outer, inputs, outputs, norms = first + last, 2 * len(layers), 2 * len(layers), 2 * len(layers) + last
    both = 4 * inputs + output * outputs
    return [
        Expected("all_gather", "tp", "sequence_parallel", rounds * (inputs + outputs + outer), (both + 4 * outer) * size),
        Expected("reduce_scatter", "tp", "sequence_parallel", rounds * (inputs + outputs), both * size),
        Expected("all_reduce", "tp", "gradient_sync", norms, 4 * norms * job.shape.hidden),
    ]
