"""What all kinds of context parallelism share: the cut of the sequence, attention to a part of the keys, averaging over ``cp``.

Shapes: B samples, A heads of queries, G heads of keys and values, T queries, S keys, D head size. A rank holds ``sequence / cp`` tokens in
a row, the first of them number ``place * sequence / cp``. Weights are replicated over ``cp``: every rank's loss is the mean over its own
tokens, so the mean of the ranks' gradients is the gradient of the mean over all tokens.

Attention to some of the keys gives an output and the log of its softmax's denominator (``lse``, log-sum-exp), with which outputs of
different parts can be put together exactly (arXiv:1805.02867, arXiv:2205.14135). Statistics and sums are kept in fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tracekit.errors import UsageError
from tracekit.manifest import Expected

from . import gradients, loop
from .job import Job, Training
from .reference import adam
from .transformer import Attention, Embedding, Transformer, initialize

#: Attention over a group: queries [B, A, T, D], keys and values [B, G, T, D], the group -> the heads' outputs [B, A, T, D].
Mix = Callable[[Tensor, Tensor, Tensor, dist.ProcessGroup], Tensor]


def tokens_of(job: Job) -> int:
    """Tokens of a sample that one rank holds. UsageError where the ranks cannot share them out evenly."""
    ranks = job.size("cp")
    if job.shape.sequence % ranks:
        raise UsageError(f"{job.shape.sequence} tokens a sample do not divide into {ranks} ranks of axis cp", "change --sequence or --mesh")
    return job.shape.sequence // ranks


def own_tokens(job: Job, tensor_BT: Tensor) -> Tensor:
    """This rank's part of the sequence."""
    tokens = tokens_of(job)
    return tensor_BT[:, job.place("cp") * tokens :][:, :tokens].contiguous()


def distribute(model: nn.Module, group: dist.ProcessGroup, tokens: int, mix: Mix) -> None:
    """Let a transformer (or a stage of one) work on ``tokens`` tokens a rank of ``group``.

    ``Attention`` hands over keys and values repeated to the number of query heads; the repetition is taken back, so that each travels once.
    """
    for module in model.modules():
        if isinstance(module, Embedding):
            module.first_position = group.rank() * tokens
        if isinstance(module, Attention):
            groups = module.q.out_features // module.k.out_features
            module.mix = lambda q, k, v, groups=groups: mix(q, k[:, ::groups], v[:, ::groups], group)  # type: ignore[misc]


def training(job: Job, mix: Mix) -> Training:
    """The replicated model with its attention spread over ``cp``, and the usual step on this rank's tokens."""
    tokens = tokens_of(job)
    model = Transformer(job.shape)
    initialize(model, job.settings.seed)
    model.to(job.device)
    if job.size("cp") > 1:
        distribute(model, job.group("cp"), tokens, mix)
    named, over = list(model.named_parameters()), gradients.replicas(job, "cp")
    result = Training(
        models=[model],
        optimizer=adam(model.parameters(), job.settings.learning_rate),
        gathered=lambda: {name: p.detach() for name, p in named},
        before_optimizer=lambda: gradients.average(named, over),
        scaler=loop.scaler(job),
    )
    result.step = lambda ids, targets, recorder: loop.step(job, result, own_tokens(job, ids), own_tokens(job, targets), recorder)
    return result


def expected(job: Job, *attention: tuple[str, int, int]) -> list[Expected]:
    """``attention``: (kind, calls a layer, full bytes a layer and sample); with them the averaging of the gradients."""
    tokens_of(job)
    found = gradients.expected(Transformer(job.shape).named_parameters(), gradients.replicas(job, "cp"))
    if job.size("cp") == 1:
        return found
    calls, samples = job.shape.layers * job.settings.micro_batches, job.shape.layers * job.local_batch
    return [Expected(kind, "cp", "context_parallel", calls * count, samples * size) for kind, count, size in attention] + found


def element_bytes(job: Job) -> int:
    """Bytes of one element of queries, keys, values and outputs."""
    return 2 if job.settings.precision in ("bf16", "fp16") else 4


# Attention to a part of the keys --------------------------------------------------------------------------------------


def attend_part(q_BATD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, first_query: int, first_key: int) -> tuple[Tensor, Tensor]:
    """(output [B, A, T, D], lse [B, A, T]) in fp32 of causal attention. ``first_query``, ``first_key``: places in the whole sequence.

    Every query must see at least one of the keys.
    """
    with torch.autocast(q_BATD.device.type, enabled=False):
        scores = _scores(q_BATD, k_BGSD, first_query, first_key)
        lse = scores.logsumexp(-1)
        output = (scores - lse[..., None]).exp() @ v_BGSD.float()[:, :, None]
    return output.flatten(1, 2), lse.flatten(1, 2)


def part_gradients(
    q_BATD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, grad_BATD: Tensor, lse_BAT: Tensor, delta_BAT: Tensor, first_query: int, first_key: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (queries, keys, values), in fp32, of one part. ``lse``: of all parts together; ``delta``: see ``delta_of``.

    With the probabilities P of the whole softmax: dV = P^T dO, dP = dO V^T, dS = P (dP - delta), dQ = dS K, dK = dS^T Q.
    """
    heads = k_BGSD.shape[1]
    with torch.autocast(q_BATD.device.type, enabled=False):
        grad, lse, delta = (t.float().unflatten(1, (heads, -1)) for t in (grad_BATD, lse_BAT, delta_BAT))
        probability = (_scores(q_BATD, k_BGSD, first_query, first_key) - lse[..., None]).exp()
        d_v = (probability.mT @ grad).sum(2)
        d_scores = probability * (grad @ v_BGSD.float()[:, :, None].mT - delta[..., None]) * q_BATD.shape[-1] ** -0.5
        d_q = (d_scores @ k_BGSD.float()[:, :, None]).flatten(1, 2)
        d_k = (d_scores.mT @ q_BATD.float().unflatten(1, (heads, -1))).sum(2)
    return d_q, d_k, d_v


def _scores(q_BATD: Tensor, k_BGSD: Tensor, first_query: int, first_key: int) -> Tensor:
    """[B, G, A/G, T, S]: scaled products, minus infinity for keys behind their query."""
    scores = q_BATD.float().unflatten(1, (k_BGSD.shape[1], -1)) @ k_BGSD.float()[:, :, None].mT * q_BATD.shape[-1] ** -0.5
    queries = torch.arange(first_query, first_query + q_BATD.shape[2], device=scores.device)
    keys = torch.arange(first_key, first_key + k_BGSD.shape[2], device=scores.device)
    return scores.masked_fill(keys > queries[:, None], -torch.inf)


def delta_of(output_BATD: Tensor, grad_BATD: Tensor) -> Tensor:
    """[B, A, T]: what the softmax's backward subtracts."""
    return (output_BATD.float() * grad_BATD.float()).sum(-1)


# Collectives on the sequence ------------------------------------------------------------------------------------------


def gather_sequence(x_BATD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather: [..., T/c, D] of every rank -> [..., T, D]."""
    parts = x_BATD.new_zeros((group.size() * x_BATD.shape[0], *x_BATD.shape[1:]))
    dist.all_gather_into_tensor(parts, x_BATD.contiguous(), group=group)
    return parts.unflatten(0, (group.size(), -1)).movedim(0, -3).flatten(-3, -2)


def scatter_sequence(x_BATD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter: a summand [..., T, D] on every rank -> this rank's [..., T/c, D] of the sum."""
    parts = x_BATD.unflatten(-2, (group.size(), -1)).movedim(-3, 0).contiguous()
    own = torch.zeros_like(parts[0])
    dist.reduce_scatter_tensor(own, parts.flatten(0, 1), group=group)
    return own
