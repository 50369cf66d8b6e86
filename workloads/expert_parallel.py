"""Expert parallelism: every block's MLP is a mixture of experts, which are shared out over axis ``ep``; tokens travel to them and back.

    torchrun --nproc-per-node 2 -m tracekit.workloads.expert_parallel -o traces/expert_parallel

Each of the R ranks of ``ep`` works on its own samples with all dense weights and E/R of the E experts of each layer. n tokens a micro-batch
and rank, k choices a token, H hidden size, L layers, M micro-batches, e bytes an element (4, or 2 in bf16 and fp16).
Collectives a rank and step:
    all-to-all   counts      L M   8 E bytes: how many rows go to each expert (forward)
    all-to-all   dispatch   2 L M  forward: the n k rows of H e bytes that the router chose, less what was dropped, with uneven splits;
                                   backward: the gradients of the rows that came, whose number the other ranks' routers decide
    all-to-all   combine    2 L M  the same two exchanges the other way round: results in forward, their gradients in backward
    all-reduce   one a bucket of gradients of the dense weights, when the last micro-batch is over; those of the experts need none, unless
                 there is a data axis beside ``ep``
With --padding every exchange is even, E C rows of H e bytes with C = ceil(capacity_factor n k / E), and no counts are told.
A rank's loss is the mean over its own tokens. An expert's gradient is a sum over the tokens of all ranks, so it is divided by their number
as the dense gradients are. --auxiliary-loss adds how unevenly the rank's own choices fall on the experts, for which it asks nobody.
The manifest tells, for each layer and step, the tokens for every expert, those that were dropped, and the capacity.
Numerics: after one step the parameters equal those of one process with the same mixture within float rounding, if nothing is dropped.
Sources: GShard, arXiv:2006.16668; Switch, arXiv:2101.03961; dropless exchanges, arXiv:2211.15841.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tracekit.errors import UsageError
from tracekit.manifest import Expected, ExpertLoad

from .common import experts, gradients, loop
from .common.context import element_bytes
from .common.job import Job, Training
from .common.planned import Planned, by_hand
from .common.reference import adam, train
from .common.settings import option
from .common.transformer import Transformer, initialize, loss_of

MESH = {"ep": 2}


@dataclass(frozen=True)
class Options:
    """Options of expert parallelism."""

    experts: int = option(8, "experts of each layer, of all ranks together")
    top_k: int = option(2, "experts that a token chooses")
    capacity_factor: float = option(0.0, "rows an expert takes from a rank, in units of an even share; 0: no limit, nothing is dropped")
    padding: bool = option(False, "fill every expert up to its capacity: even exchanges of fixed size")
    auxiliary_loss: float = option(0.0, "coefficient of the loss that keeps experts evenly busy; 0: none, 0.01 is usual")


def routing_of(options: Options) -> experts.Routing:
    """The options as the mixture takes them."""
    return experts.Routing(options.experts, options.top_k, options.capacity_factor, options.padding, options.auxiliary_loss)


def build(job: Job, options: Options) -> Training:
    """The model with this rank's experts."""
    routing = routing_of(options)
    routing.check(job.size("ep"))
    model = Transformer(job.shape, mlp=experts.mixture(routing, job.group("ep")))
    initialize(model, job.settings.seed)
    model.to(job.device)
    loads: list[ExpertLoad] = []
    result = Training(
        models=[model],
        optimizer=adam(model.parameters(), job.settings.learning_rate),
        gathered=lambda: gathered(job, model, loads),
        before_optimizer=functools.partial(synchronize, job, model),
        loss=lambda logits, targets: loss_of(logits, targets) + experts.balance(model, options.auxiliary_loss),
        scaler=loop.scaler(job),
        reference=functools.partial(reference, job, options),
        describe={"model_shape": model_shape(job, routing)},
    )
    numbers = iter(range(job.settings.steps))

    def step(ids: Tensor, targets: Tensor, recorder: Any) -> None:
        loop.step(job, result, ids, targets, recorder)
        loads.extend(experts.take_loads([model], next(numbers)))
        recorder.describe(experts=loads)

    result.step = step
    return result


def synchronize(job: Job, model: nn.Module) -> None:
    """Average the dense gradients over everyone and each expert's over the ranks that hold it; divide both by the number of ranks."""
    everyone, holders = groups(job)
    named = list(model.named_parameters())
    gradients.average([(name, p) for name, p in named if not experts.is_expert(name)], everyone)
    gradients.average([(name, p) for name, p in named if experts.is_expert(name)], holders, everyone.size)


def groups(job: Job) -> tuple[gradients.Replicas, gradients.Replicas]:
    """(ranks that hold the same dense weights, ranks that hold the same experts)."""
    everyone = gradients.replicas(job, "ep")
    return everyone, gradients.along(job, [axis for axis, size in job.sizes.items() if size > 1 and axis != "ep"])


def gathered(job: Job, model: nn.Module, loads: list[ExpertLoad]) -> dict[str, Tensor]:
    """Parameters of all experts and the dense ones. UsageError where tokens were dropped: one process would have dropped others."""
    dropped = sum(load.dropped for load in loads) or sum(module.load.dropped for _, module in experts.mixtures([model]))
    if dropped:
        raise UsageError(f"{dropped} choices were dropped, so this training is not that of one process", "use a larger --capacity-factor")
    found = {name: p.detach() for name, p in model.named_parameters()}
    shares: list[Any] = [None] * job.size("ep")
    dist.all_gather_object(shares, {n: p.cpu() for n, p in found.items() if experts.is_expert(n)}, group=job.group("ep"))
    for share in shares:
        found.update({name: tensor.to(job.device) for name, tensor in share.items()})
    return found


def reference(job: Job, options: Options | None = None) -> dict[str, Tensor]:
    """One process with the same mixture, all experts in it. The auxiliary loss is that of every rank's micro-batches, one by one."""
    settings, options = job.settings, options or Options()
    pieces = job.data_size * settings.micro_batches if options.auxiliary_loss else 1
    extra = functools.partial(experts.balance, coefficient=options.auxiliary_loss)
    mixture = experts.mixture(routing_of(options))
    return train(job.shape, job.global_batch, settings.seed, 1, settings.learning_rate, mlp=mixture, pieces=pieces, extra=extra)


def model_shape(job: Job, routing: experts.Routing) -> dict[str, Any]:
    """For the manifest: the transformer with its mixtures."""
    shape = job.shape
    extra = routing.experts * shape.hidden + (routing.experts - 1) * shape.mlp_elements()
    return {
        **shape.describe(),
        "parameters": shape.elements() + shape.layers * extra,
        "experts": routing.experts,
        "experts_per_token": routing.top_k,
        "capacity_factor": routing.capacity_factor or None,
    }


def expected(job: Job, options: Options) -> list[Expected]:
    """Of one rank and step."""
    routing = routing_of(options)
    routing.check(job.size("ep"))
    with torch.device("meta"):
        named = list(Transformer(job.shape, mlp=experts.mixture(routing, job.group("ep"))).named_parameters())
    everyone, holders = groups(job)
    found = gradients.expected([(n, p) for n, p in named if not experts.is_expert(n)], everyone)
    found += gradients.expected([(n, p) for n, p in named if experts.is_expert(n)], holders)
    if job.size("ep") > 1:
        pieces = job.settings.micro_batches
        tokens = job.local_batch // pieces * job.shape.sequence
        found += experts.exchanges(routing, tokens, job.shape.layers * pieces, job.shape.hidden * element_bytes(job))
    return found


def planned(job: Job, options: Options) -> Planned:  # noqa: ARG001
    """What the analytical model is told."""
    model = {"experts": options.experts, "top_k": options.top_k}
    if not options.padding:
        return by_hand(model=model)
    habits = {"averages_after": True, "expert_counts": False}
    return {**by_hand(model=model), "implementation": habits, "expert_padding": options.capacity_factor}


if __name__ == "__main__":
    loop.main(__name__)
