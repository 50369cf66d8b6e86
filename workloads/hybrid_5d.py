"""5D: pipeline, expert, FSDP2, context and tensor parallelism over axes ``pp``, ``ep``, ``dp_shard``, ``cp``, ``tp``.

    tracekit record hybrid_5d --backend fake --rank 13 -o traces/hybrid_5d          one rank of 32, alone
    torchrun --nproc-per-node 8 -m tracekit.workloads.hybrid_5d --mesh pp=2,ep=2,dp_shard=2,cp=1,tp=1 -o traces/hybrid_5d

As hybrid_4d, with a mixture of experts in place of every MLP. Ranks along ``ep`` hold different experts and see different samples; dense
parameters are sharded over ep, dp_shard and cp together, experts over dp_shard and cp. Experts are whole on every rank of ``tp``.
Collectives a rank and step, l layers on its stage, m micro-batches, U dense units (l blocks, one more with embedding or head):
    send, recv       m    over pp for every neighbour
    all-reduce     2 l m  over tp, behind attention only
    all-gather     2 l m  over cp, reduce-scatter l m: keys and values
    all-to-all     3 l m  over ep to dispatch: how many rows come, the rows, and in backward their gradients
    all-to-all     2 l m  over ep to combine: the outputs, and in backward their gradients
    all-gather       U    over ep_dp_shard_cp, l over dp_shard_cp for the experts; as many reduce-scatters
Numerics: after one step every stage's gathered parameters equal the single-process reference within float rounding (experts without limit
of capacity).
Sources: TorchTitan, arXiv:2410.06511; MoE Parallel Folding, arXiv:2504.14960.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tracekit.manifest import Expected, ExpertLoad

from .common import hybrid, loop, reference
from .common.experts import Routing, mixture, take_loads
from .common.hybrid import DATA_AXES
from .common.job import Job, Training
from .common.planned import Planned
from .common.settings import option

MESH = {"pp": 2, "ep": 2, "dp_shard": 2, "cp": 2, "tp": 2}
DEFAULTS = {"batch": 4, "micro_batches": 2}

__all__ = ["DATA_AXES", "DEFAULTS", "MESH", "Options", "build", "expected", "planned"]


@dataclass(frozen=True)
class Options(hybrid.Options):
    """Options of the 5D job."""

    experts: int = option(4, "experts of every layer, over all ranks of ep")
    top_k: int = option(2, "experts that a token chooses")


def build(job: Job, options: Options) -> Training:
    """This rank's stage."""
    result = hybrid.training(job, options, _routing(options))
    result.reference = lambda: _reference(job, options)
    train, numbers = result.step, iter(range(job.settings.steps))
    assert train is not None
    loads: list[ExpertLoad] = []

    def step(ids: Tensor, targets: Tensor, recorder: Any) -> Tensor | None:
        loss = train(ids, targets, recorder)
        loads.extend(take_loads(result.models, next(numbers)))
        recorder.describe(experts=loads)
        return loss

    result.step = step
    return result


def expected(job: Job, options: Options) -> list[Expected]:
    """Of one rank and step."""
    return hybrid.expected(job, options, _routing(options))


def _reference(job: Job, options: Options) -> dict[str, Tensor]:
    """The same mixture of experts on one process."""
    settings = job.settings
    return reference.train(job.shape, job.global_batch, settings.seed, 1, settings.learning_rate, mixture(_routing(options)))


def _routing(options: Options) -> Routing:
    return Routing(options.experts, options.top_k)


def planned(job: Job, options: Options) -> Planned:  # noqa: ARG001
    """What the analytical model is told."""
    return {**hybrid.planned(), "model": {"experts": options.experts, "top_k": options.top_k}}


if __name__ == "__main__":
    loop.main(__name__)
