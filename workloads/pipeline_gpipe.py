"""Pipeline, GPipe: layers divided over axis ``pp``; all micro-batches forward, then all backward.

    torchrun --nproc-per-node 2 -m tracekit.workloads.pipeline_gpipe -o traces/pipeline_gpipe

Collectives a rank and step, p stages, m micro-batches, s tokens, b samples a micro-batch, h hidden size:
    send, recv   m each for every neighbour (the first and the last stage have one, all others two), of s b h elements:
                 hidden states to the next stage, their gradients to the one before
Nothing else: the loss stays on the last stage, and shapes are agreed on beforehand. Under fp16 one all-reduce of a flag.
The bubble is (p-1)/m of the ideal time, and every stage keeps the activations of all m micro-batches.
Numerics: the mean over the micro-batches' losses is the loss of the whole batch, so after one step every stage's parameters equal those
of the single-process reference within float rounding.
Sources: GPipe, arXiv:1811.06965.
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
    """GPipe has no options of its own: ``--micro-batches`` are those of the pipeline."""


def build(job: Job, options: Options) -> Training:  # noqa: ARG001
    """This rank's stage under the GPipe schedule."""
    job.refuse_data_axes()
    return pipeline.training(job, pipeline.plan(job, "gpipe"))


def expected(job: Job, options: Options) -> list[Expected]:  # noqa: ARG001
    """Messages of one rank and step."""
    return pipeline.expected(job, pipeline.plan(job, "gpipe"))


def planned(job: Job, options: Options) -> Planned:  # noqa: ARG001
    """What the analytical model is told."""
    return by_hand()


if __name__ == "__main__":
    loop.main(__name__)
