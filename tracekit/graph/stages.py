"""Stage and micro-batch of pipeline work that no range names, from the order of compute and messages on all ranks of a pipeline.

With p places in the pipeline, v stages a rank and m micro-batches a rank runs v m forwards and as many backwards in a step; the first place
sends v m activations and (v-1) m gradients, so that

    m = (sends behind forwards) - (sends behind backwards)        of the first place

How blocks become pieces, and pieces numbers: ``graph.numbering``. What is found has to agree with the clock: no piece may begin before the
stage beside it is done. A first place that sends as many gradients as activations has its stages in a V (ZBV, DualPipeV). Where pieces
cannot be numbered they are still work of the pipeline: its bubble can be measured, and the number of micro-batches is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from tracekit.collectives.purpose import role_of_axis
from tracekit.graph.blocks import Blocks
from tracekit.graph.local import LocalWork
from tracekit.graph.numbering import BATCHES, KINDS, WEIGHT, Unnumbered, each_step, numbers_of
from tracekit.job.model import Job
from tracekit.trace.events import Int64Array
from tracekit.units import NS_PER_US

#: What begins before what it needs is done, by more than this, contradicts the numbers; more than this share of all.
_EARLY_NS, _CONTRADICTED = 100 * NS_PER_US, 0.02

#: Under this name of an analysis each window keeps its part of the graph; under that the job what was found here.
ANALYSIS, _HELD = "what_if", "stages"

Part = tuple[int, int, Blocks]  # rank, window, its blocks


@dataclass(frozen=True)
class Numbered:
    """``codes``: window -> the piece of each of its blocks, as ``LocalWork.piece`` has it; empty where they cannot be told: ``reason``.

    ``parts``: the blocks, with the number of the step in place of its index; ``blocks`` the same by window. Blocks without codes are work
    of a pipeline all the same where ``batches``, the micro-batches of a step, are known; ``schedule`` is what their messages show of it.
    """

    codes: dict[int, Int64Array]
    reason: str = ""
    parts: Sequence[Part] = ()
    batches: int = 0
    held: int = 1  # stages a rank
    schedule: str = ""
    blocks: Mapping[int, Blocks] = field(default_factory=dict)


def axis_of(job: Job) -> str:
    """The mesh axis of the pipeline; '' where none is known."""
    names = [a.name for a in job.mesh.axes]
    said = [str(w.manifest.pipeline.get("axis", "")) for w in job.windows if w.manifest is not None and w.manifest.pipeline]
    return next((name for name in [*said, *names] if name in names and (name in said or role_of_axis(name) == "pipeline")), "")


def places(job: Job, axis: str) -> dict[int, int]:
    """Each rank's place in its pipeline: on the mesh, else among the ranks that it exchanges messages with."""
    names = [a.name for a in job.mesh.axes]
    if axis in names:
        at = names.index(axis)
        return {rank: place[at] for rank, place in job.mesh.coordinates.items()}
    rows = job.operations[(job.operations["purpose"] == "pipeline") & (job.operations["group"] >= 0)]
    result = {}
    for rank, group in rows.groupby("rank")["group"].first().items():
        ranks = job.groups.groups[int(group)].ranks
        if ranks is not None and rank in ranks:
            result[int(str(rank))] = ranks.index(int(str(rank)))
    return result


def stages_of(job: Job) -> Numbered:
    """Stage and micro-batch of every block that the windows keep for the graph; worked out once."""
    if _HELD not in job.held:
        kept: list[tuple[int, int, LocalWork]] = []
        for rank, index, work in job.reduced(ANALYSIS):
            if work is not None and (work.piece >= 0).any():  # a range names the pieces
                kept.clear()
                break
            if work is not None and work.blocks is not None:
                kept.append((rank, index, work))
        job.held[_HELD] = _number(job, kept) if kept else Numbered({})
    held: Numbered = job.held[_HELD]
    return held


def _number(job: Job, found: Sequence[tuple[int, int, LocalWork]]) -> Numbered:
    parts = [
        (rank, index, replace(work.blocks, step=work.numbers[work.blocks.step])) for rank, index, work in found if work.blocks is not None
    ]
    place = places(job, axis_of(job))
    whole = [part for part in parts if part[0] in place]
    size = len({place[rank] for rank, _, _ in whole})
    if size < 2 or {place[rank] for rank, _, _ in whole} != set(range(size)):
        lost = "the place of each rank in its pipeline is not known" if size < 2 else "ranks of the pipeline were not read"
        return Numbered({}, lost, parts)
    sent = {
        (int(step.sends[step.forward].sum()), int(step.sends[~step.forward].sum()))
        for rank, _, own in whole
        if place[rank] == 0
        for step in each_step(own)
    }
    if len(sent) > 1:
        return Numbered({}, "the first rank of a pipeline sends more messages in some steps than in others", whole)
    return _of_messages(job, whole, {index: work for _, index, work in found}, place, *sent.pop())


def _of_messages(
    job: Job, parts: list[Part], works: Mapping[int, LocalWork], place: dict[int, int], activations: int, gradients: int
) -> Numbered:
    """By what the first place of a pipeline sends in a step."""
    if 0 < gradients == activations:
        why = "activations go both ways, so the stages of a rank lie in a V (ZBV, DualPipeV), and nothing marks which works when"
        return Numbered({}, why, parts, activations, 2, "zbv")
    batches = activations - gradients
    if batches < 1 or activations % batches:
        return Numbered({}, "the number of messages is that of no schedule known here", parts)
    held, size = activations // batches, 1 + max(place[rank] for rank, _, _ in parts)
    found = numbers_of([(place[rank], own, works[index]) for rank, index, own in parts], size, batches, held)
    if isinstance(found, Unnumbered):
        return Numbered({}, found.reason, parts, batches, held, found.schedule)
    cut = [(rank, index, blocks) for (rank, index, _), (blocks, _) in zip(parts, found, strict=True)]
    codes = {index: own for (_, index, _), (_, own) in zip(parts, found, strict=True)}
    if _contradicted(job, cut, place, codes):
        return Numbered({}, "the times of messages contradict the order of work of the schedules known here", parts, batches, held)
    return Numbered(codes, "", cut, batches, held, "", {index: blocks for _, index, blocks in cut})


def _contradicted(job: Job, parts: Sequence[Part], place: dict[int, int], codes: dict[int, Int64Array]) -> bool:
    """Whether pieces begin before what they need from the stage beside theirs is done."""
    if not job.clock.aligned:
        return False
    seen: dict[int, int] = {}
    frames = []
    for rank, window, own in sorted(parts, key=lambda part: part[0]):
        replica = seen[place[rank]] = seen.get(place[rank], -1) + 1
        stage, rest = np.divmod(codes[window], KINDS * BATCHES)
        columns = {"replica": replica, "step": own.step, "stage": stage, "rest": rest}
        frames.append(pd.DataFrame({**columns, "start": job.aligned(window, own.start), "end": job.aligned(window, own.end)}))
    frame = pd.concat(frames, ignore_index=True)
    frame = frame[frame["rest"] // BATCHES != WEIGHT]  # nobody waits for it
    needs = frame.assign(stage=frame["stage"] + np.where(frame["rest"] < BATCHES, -1, 1))
    both = needs.merge(frame, on=["replica", "step", "stage", "rest"], suffixes=("", "_needed"))
    early = (both["end_needed"] > both["start"] + _EARLY_NS).sum()
    return bool(early > _CONTRADICTED * len(both))
