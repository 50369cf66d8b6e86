"""Which stage and micro-batch each block of a pipeline's work is, where every rank's blocks and the number of micro-batches are known.

Micro-batches pass in order: n-th forward with n-th micro-batch where a rank holds one stage. With several (v), rounds of p micro-batches
pass through one stage after the other (interleaved), or all of them where every forward comes before the first backward (looped). A
backward in two parts (zero bubble) has m parts behind which the gradient of the input is sent; what no message follows is m parts for the
weights. The first place sends no gradient: each of its blocks begins with the part for the input, as long as on the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracekit.graph.blocks import Blocks
from tracekit.graph.cuts import Cut, alike, cut_at, sizes
from tracekit.graph.local import LocalWork
from tracekit.trace.events import Int64Array

#: Codes of ``graph.local.LocalWork.piece``: (stage * KINDS + kind) * BATCHES + micro-batch.
FORWARD, BACKWARD, INPUT, WEIGHT, KINDS, BATCHES = 0, 1, 2, 3, 4, 10**6


@dataclass(frozen=True)
class Unnumbered:
    """Why blocks cannot be numbered, and what schedule they show all the same ('' none)."""

    reason: str
    schedule: str = ""


@dataclass(frozen=True)
class _Step:
    """The blocks of one rank and step: ``at``, their numbers in the window; ``size`` their kernels."""

    place: int
    at: Int64Array
    blocks: Blocks
    size: Int64Array


#: Pieces of the blocks of one step in order: block (its number in the window), kind, kernels.
_Pieces = tuple[Int64Array, Int64Array, Int64Array]


def each_step(own: Blocks) -> list[Blocks]:
    """The blocks of each step."""
    bounds = np.flatnonzero(np.append(True, own.step[1:] != own.step[:-1])).tolist()
    cut = [slice(low, high) for low, high in zip(bounds, [*bounds[1:], len(own.step)], strict=True)]
    return [Blocks(own.of_node, own.step[s], own.forward[s], own.start[s], own.end[s], own.sends[s]) for s in cut]


def numbers_of(
    parts: Sequence[tuple[int, Blocks, LocalWork]], places: int, batches: int, held: int
) -> list[tuple[Blocks, Int64Array]] | Unnumbered:
    """(blocks cut into pieces, code of each) of every window; ``parts`` are (place in the pipeline, blocks, nodes)."""
    steps = [_steps(*part) for part in parts]
    every = [step for own in steps for step in own]
    split = any((~step.blocks.forward).sum() > batches * held for step in every)
    if split and held > 1:
        why = "the backward runs in two parts (a zero-bubble schedule) on ranks of several stages, and nothing marks which works when"
        return Unnumbered(why, "interleaved_zero_bubble")
    lengths = _lengths(every, batches) if split else None
    trains = any((~step.blocks.forward).any() for step in every)
    result = []
    for (place, blocks, work), own in zip(parts, steps, strict=True):
        found = [_pieces(step, batches * held, trains, split, lengths) for step in own]
        known = [pieces for pieces in found if pieces is not None]
        if len(known) < len(found):
            why = "the backward runs in two parts (a zero-bubble schedule), and nothing marks where the second begins"
            other = "between their messages the ranks run unlike numbers of forwards and backwards"
            return Unnumbered(why, "zero_bubble") if split else Unnumbered(other)
        block, _, kernels = (np.concatenate([pieces[i] for pieces in known]) for i in range(3))
        codes = np.concatenate([_codes(kind, place, places, batches, held) for _, kind, _ in known])
        result.append((cut_at(blocks, Cut(block, kernels), work.start, work.end, work.work), codes))
    return result


def _steps(place: int, blocks: Blocks, work: LocalWork) -> list[_Step]:
    size, found, begin = sizes(blocks, work.work), [], 0
    for own in each_step(blocks):
        at = np.arange(begin, begin + len(own.step))
        found.append(_Step(place, at, own, size[at]))
        begin += len(at)
    return found


def _lengths(steps: Sequence[_Step], batches: int) -> tuple[float, float] | None:
    """Kernels of the two parts of a backward, by the ranks that send a gradient behind the first; None where none does as expected."""
    inputs, weights = [], []
    for step in steps:
        own = ~step.blocks.forward & (step.blocks.sends > 0)
        if own.sum() == batches:
            inputs.append(float(step.size[own].mean()))
            weights.append(float(step.size[~step.blocks.forward & ~own].sum() / batches))
    return (float(np.median(inputs)), float(np.median(weights))) if inputs and min(weights) > 0 else None


def _pieces(step: _Step, total: int, trains: bool, split: bool, lengths: tuple[float, float] | None) -> _Pieces | None:
    """The pieces of one rank's step in order; None where no whole numbers of them fit its blocks."""
    forward = np.flatnonzero(step.blocks.forward)
    backward = np.flatnonzero(~step.blocks.forward)
    first = _like(step, forward, total, FORWARD)
    if not trains or first is None:
        return first
    second = _parts(step, backward, total, lengths) if split else _like(step, backward, total, BACKWARD)
    if second is None:
        return None
    block, kind, kernels = (np.concatenate(pair) for pair in zip(first, second, strict=True))
    order = np.argsort(block, kind="stable")
    return block[order], kind[order], kernels[order]


def _like(step: _Step, own: Int64Array, total: int, kind: int) -> _Pieces | None:
    """``total`` pieces of one kind in the blocks ``own``."""
    count = np.ones(len(own), np.int64) if len(own) == total else alike(step.size[own], total)
    if count is None:
        return None
    cut = Cut.even(count, step.size[own])
    return step.at[own][cut.block], np.full(total, kind), cut.kernels


def _parts(step: _Step, own: Int64Array, batches: int, lengths: tuple[float, float] | None) -> _Pieces | None:
    """``batches`` parts for the input and as many for the weights in the backward blocks ``own``."""
    sends = step.blocks.sends[own] > 0
    if sends.sum() == batches:
        inputs, weights = _like(step, own[sends], batches, INPUT), _like(step, own[~sends], batches, WEIGHT)
        if inputs is None or weights is None:
            return None
        block, kind, kernels = (np.concatenate(pair) for pair in zip(inputs, weights, strict=True))
        order = np.argsort(block, kind="stable")
        return block[order], kind[order], kernels[order]
    if lengths is None or sends.any() or len(own) != batches:
        return None
    return _begun_with_input(step, own, batches, lengths)


def _begun_with_input(step: _Step, own: Int64Array, batches: int, lengths: tuple[float, float]) -> _Pieces | None:
    """Of a rank that sends no gradient: each block is a part for the input and those for the weights that follow it."""
    size = step.size[own]
    scale = size.sum() / (batches * sum(lengths))  # its layers may be more or fewer than those of the others
    inputs, weights = lengths[0] * scale, lengths[1] * scale
    behind = np.maximum(np.rint((size - inputs) / weights), 0).astype(np.int64)
    if behind.sum() != batches or (size < 1 + behind).any():
        return None
    first = np.clip(np.rint(size * inputs / (inputs + behind * weights)).astype(np.int64), 1, size - behind)
    rest = Cut.even(behind[behind > 0], (size - first)[behind > 0])
    block = np.concatenate([np.arange(len(own)), np.flatnonzero(behind > 0)[rest.block]])
    kind = np.repeat([INPUT, WEIGHT], [len(own), batches])
    order = np.argsort(block, kind="stable")
    return step.at[own][block[order]], kind[order], np.concatenate([first, rest.kernels])[order]


def _codes(kind: Int64Array, place: int, size: int, batches: int, held: int) -> Int64Array:
    """Codes of the pieces of one step."""
    forward = kind == FORWARD
    count = int(forward.sum())
    looped = held > 1 and bool(forward[:count].all())
    turn = batches if looped else batches // max(1, batches // size)
    chunk, batch = _rounds(turn, batches, held)
    codes = np.empty(len(kind), np.int64)
    for which in range(KINDS):
        own = kind == which
        if own.any():
            stage = (chunk if which == FORWARD else held - 1 - chunk) * size + place
            codes[own] = (stage * KINDS + which) * BATCHES + batch
    return codes


def _rounds(turn: int, batches: int, held: int) -> tuple[Int64Array, Int64Array]:
    """(stage of the rank, micro-batch) in order: ``turn`` micro-batches through one stage, the same through the next."""
    pairs = [(c, j) for begin in range(0, batches, turn) for c in range(held) for j in range(begin, min(begin + turn, batches))]
    both = np.array(pairs, np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]
