"""Pipeline, 1F1B: layers divided over axis ``pp``; a stage that is filled does one micro-batch forward, one backward, in turn.

    torchrun --nproc-per-node 2 -m tracekit.workloads.pipeline_1f1b -o traces/pipeline_1f1b

Collectives a rank and step, p stages, m micro-batches, s tokens, b samples a micro-batch, h hidden size:
    send, recv   m each for every neighbour (the first and the last stage have one, all others two), of s b h elements:
                 hidden states to the next stage, their gradients to the one before
Nothing else: the loss stays on the last stage, and shapes are agreed on beforehand. Under fp16 one all-reduce of a flag.
The bubble is GPipe's, (p-1)/m of the ideal time, but stage i keeps the activations of only min(m, p-i) micro-batches. m is at least p.
Numerics: the mean over the micro-batches' losses is the loss of the whole batch, so after one step every stage's parameters equal those
of the single-process reference within float rounding.
Sources: PipeDream, arXiv:1806.03377; PTD-P, arXiv:2104.04473 (section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from tracekit.manifest import Expected

from .common import loop, pipeline
from .common.job import Job, Training
from .common.planned import Planned, by_hand

MESH = {"pp": 2}
DEFAULTS = {"batch": 8, "micro_batches": 4}


@dataclass(frozen=True)
class Options:
    """1F1B has no options of its own: ``--micro-batches`` are those of the pipeline."""


def build(job: Job, options: Options) -> Training:  # noqa: ARG001
    """This rank's stage under the 1F1B schedule."""
    job.refuse_data_axes()
    return pipeline.training(job, pipeline.plan(job, "1f1b"))


def expected(job: Job, options: Options) -> list[Expected]:  # noqa: ARG001
    """Messages of one rank and step."""
    return pipeline.expected(job, pipeline.plan(job, "1f1b"))


def planned(job: Job, options: Options) -> Planned:  # noqa: ARG001
    """What the analytical model is told."""
    return by_hand()


if __name__ == "__main__":
    loop.main(__name__)
