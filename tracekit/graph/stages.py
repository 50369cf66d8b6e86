"""Stage and micro-batch of pipeline work that no range names, from the order of compute and messages on all ranks of a pipeline.

With p places in the pipeline, v stages a rank and m micro-batches a rank runs v m forwards and as many backwards in a step; the first place
sends v m activations and (v-1) m gradients, so that

    m = 2 (forwards) - (sends of the first place)

Micro-batches pass in order: n-th forward with n-th micro-batch where v = 1. With several stages a rank, rounds of p micro-batches pass
through one stage after the other (interleaved), or all of them where every forward comes before the first backward (looped). What is found
has to agree with the clock: no piece may begin before the stage beside it is done. A backward in two parts shows no border between
them, and a rank that sends activations both ways has its stages in a V: these are named, not numbered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from tracekit.collectives.purpose import role_of_axis
from tracekit.graph.blocks import Blocks
from tracekit.job.model import Job
from tracekit.trace.events import Int64Array
from tracekit.units import NS_PER_US

#: Codes of ``graph.local.LocalWork.piece``.
_FORWARD, _BACKWARD, _KINDS, _BATCHES = 0, 1, 4, 10**6
#: What begins before what it needs is done, by more than this, contradicts the numbers; more than this share of all.
_EARLY_NS, _CONTRADICTED = 100 * NS_PER_US, 0.02

#: Under this name of an analysis each window keeps its part of the graph; under that the job what was found here.
ANALYSIS, _HELD = "what_if", "stages"

Part = tuple[int, int, Blocks]  # rank, window, its blocks


@dataclass(frozen=True)
class Numbered:
    """``codes``: window -> the piece of each of its blocks, as ``LocalWork.piece`` has it; empty where they cannot be told: ``reason``.

    ``parts``: the blocks, with the number of the step in place of its index.
    """

    codes: dict[int, Int64Array]
    reason: str = ""
    parts: Sequence[Part] = ()


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
        found = [(rank, index, work) for rank, index, work in job.reduced(ANALYSIS) if work is not None]
        named = any((work.piece >= 0).any() for _, _, work in found)
        kept = [(rank, index, work.blocks, work.numbers) for rank, index, work in found if work.blocks is not None]
        parts = [(rank, index, replace(blocks, step=numbers[blocks.step])) for rank, index, blocks, numbers in kept]
        job.held[_HELD] = replace(_number(job, parts), parts=parts) if parts and not named else Numbered({})
    held: Numbered = job.held[_HELD]
    return held


def _number(job: Job, parts: Sequence[Part]) -> Numbered:
    place = places(job, axis_of(job))
    parts = [part for part in parts if part[0] in place]
    size = len({place[rank] for rank, _, _ in parts})
    if size < 2 or {place[rank] for rank, _, _ in parts} != set(range(size)):
        return Numbered({}, "the place of each rank in its pipeline is not known" if size < 2 else "ranks of the pipeline were not read")
    first = [b for rank, _, own in parts if place[rank] == 0 for b in _each_step(own)]
    if all(_in_a_v(b) for b in first):
        return Numbered(
            {}, "activations go both ways, so the stages of a rank lie in a V (ZBV, DualPipeV), and nothing marks which works when"
        )
    counts = {(int(b.forward.sum()), int((~b.forward).sum())) for _, _, own in parts for b in _each_step(own)}
    if any(backwards > forwards > 0 for forwards, backwards in counts):
        return Numbered({}, "the backward runs in two parts (a zero-bubble schedule), and nothing marks where the second begins")
    forwards, backwards = next(iter(counts))
    if len(counts) > 1 or forwards != backwards or not forwards:
        return Numbered({}, "between their messages the ranks run unlike numbers of forwards and backwards")
    return _numbered(job, parts, place, size, forwards)


def _in_a_v(first: Blocks) -> bool:
    """Whether the first rank of a pipeline sends as many gradients as activations, each for half of what it runs forward."""
    activations, gradients = int(first.sends[first.forward].sum()), int(first.sends[~first.forward].sum())
    return 0 < gradients == activations


def _numbered(job: Job, parts: Sequence[Part], place: dict[int, int], size: int, count: int) -> Numbered:
    first = [b for rank, _, own in parts if place[rank] == 0 for b in _each_step(own)]
    sent = {(int(b.sends[b.forward].sum()), int(b.sends[~b.forward].sum())) for b in first}
    if len({sum(pair) for pair in sent}) > 1:
        return Numbered({}, "the first rank of a pipeline sends more messages in some steps than in others")
    activations, gradients = next(iter(sent))
    batches = 2 * count - activations - gradients
    if batches < 1 or count % batches:
        return Numbered({}, "the number of messages is that of no schedule known here")
    codes = {}
    for rank, window, own in parts:
        codes[window] = np.concatenate([_codes(b, place[rank], size, batches) for b in _each_step(own)])
    if _contradicted(job, parts, place, codes):
        return Numbered({}, "the times of messages contradict the order of work of the schedules known here")
    return Numbered(codes)


def _each_step(own: Blocks) -> list[Blocks]:
    """The blocks of each step."""
    bounds = np.flatnonzero(np.append(True, own.step[1:] != own.step[:-1])).tolist()
    cut = [slice(low, high) for low, high in zip(bounds, [*bounds[1:], len(own.step)], strict=True)]
    return [Blocks(own.of_node, own.step[s], own.forward[s], own.start[s], own.end[s], own.sends[s]) for s in cut]


def _codes(own: Blocks, place: int, size: int, batches: int) -> Int64Array:
    """Pieces of one step."""
    held = int(own.forward.sum()) // batches
    looped = held > 1 and not (~own.forward[: int(own.forward.sum())]).any()
    turn = batches if looped else batches // max(1, batches // size)
    chunk, batch = _rounds(turn, batches, held)
    codes = np.empty(len(own.forward), np.int64)
    codes[own.forward] = ((chunk * size + place) * _KINDS + _FORWARD) * _BATCHES + batch
    codes[~own.forward] = (((held - 1 - chunk) * size + place) * _KINDS + _BACKWARD) * _BATCHES + batch
    return codes


def _rounds(turn: int, batches: int, held: int) -> tuple[Int64Array, Int64Array]:
    """(stage of the rank, micro-batch) in order: ``turn`` micro-batches through one stage, the same through the next."""
    pairs = [(c, j) for begin in range(0, batches, turn) for c in range(held) for j in range(begin, min(begin + turn, batches))]
    both = np.array(pairs, np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _contradicted(job: Job, parts: Sequence[Part], place: dict[int, int], codes: dict[int, Int64Array]) -> bool:
    """Whether pieces begin before what they need from the stage beside theirs is done."""
    if not job.clock.aligned:
        return False
    seen: dict[int, int] = {}
    frames = []
    for rank, window, own in sorted(parts, key=lambda part: part[0]):
        replica = seen[place[rank]] = seen.get(place[rank], -1) + 1
        stage, rest = np.divmod(codes[window], _KINDS * _BATCHES)
        columns = {"replica": replica, "step": own.step, "stage": stage, "rest": rest}
        frames.append(pd.DataFrame({**columns, "start": job.aligned(window, own.start), "end": job.aligned(window, own.end)}))
    frame = pd.concat(frames, ignore_index=True)
    needs = frame.assign(stage=frame["stage"] + np.where(frame["rest"] < _BATCHES, -1, 1))
    both = needs.merge(frame, on=["replica", "step", "stage", "rest"], suffixes=("", "_needed"))
    early = (both["end_needed"] > both["start"] + _EARLY_NS).sum()
    return bool(early > _CONTRADICTED * len(both))
