"""Pipeline, interleaved 1F1B: every rank of axis ``pp`` has several stages, far apart in the model, so that the pipeline fills sooner.

    torchrun --nproc-per-node 2 -m tracekit.workloads.pipeline_interleaved -o traces/pipeline_interleaved

Collectives a rank and step, p ranks, v stages on each, m micro-batches, s tokens, b samples a micro-batch, h hidden size:
    send, recv   m each for every boundary between a stage of this rank and one of another rank, of s b h elements; over all ranks that
                 is 2 m (p v - 1) messages, v times those of 1F1B. On one rank a stage hands over to the next without a message.
Nothing else: the loss stays with the last stage, and shapes are agreed on beforehand. Under fp16 one all-reduce of a flag.
The bubble is (p-1)/(v m) of the ideal time. ``--zero-bubble`` cuts backward into the part that other stages wait for (gradients of the
input, I) and the one that nobody does (of the weights, W), which fills the bubble: ``interleaved`` (ZB1P) with stages laid out as before,
``zbv`` with two stages a rank laid out as a V, so that the rank with the first stage has the last one as well and the innermost rank
hands over to itself: 2 m (2 p - 2) messages in all.
Numerics: after one step every stage's parameters equal those of the single-process reference within float rounding.
Sources: PTD-P, arXiv:2104.04473 (section 2.2); zero bubble, arXiv:2401.10241 (sections 2 and 6).
"""

from __future__ import annotations

from dataclasses import dataclass

from tracekit.manifest import Expected

from .common import loop, pipeline
from .common.job import Job, Training
from .common.planned import Planned, by_hand
from .common.settings import option

MESH = {"pp": 2}
DEFAULTS = {"batch": 8, "micro_batches": 4}

_SCHEDULE = {"no": "interleaved_1f1b", "interleaved": "interleaved_zero_bubble", "zbv": "zbv"}


@dataclass(frozen=True)
class Options:
    """Options of the interleaved pipeline."""

    virtual_stages: int = option(2, "stages v on each rank")
    zero_bubble: str = option("no", "run backward for input and weights apart: no; interleaved (ZB1P); zbv", tuple(_SCHEDULE))


def plan(job: Job, options: Options) -> pipeline.Plan:
    """Which layers lie where."""
    return pipeline.plan(job, _SCHEDULE[options.zero_bubble], options.virtual_stages)


def build(job: Job, options: Options) -> Training:
    """This rank's stages under the chosen schedule."""
    job.refuse_data_axes()
    return pipeline.training(job, plan(job, options))


def expected(job: Job, options: Options) -> list[Expected]:
    """Messages of one rank and step."""
    return pipeline.expected(job, plan(job, options))


def planned(job: Job, options: Options) -> Planned:  # noqa: ARG001
    """What the analytical model is told."""
    return by_hand()


if __name__ == "__main__":
    loop.main(__name__)
