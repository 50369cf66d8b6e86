"""Owners without a manifest: by what a block was born in, what it died in, and how long it lived. What no rule explains stays unattributed.

born before the recording                                            before recording, unless its stack tells more
born inside a collective or an all-gather's buffers                  communication buffers
born where a sharded unit is gathered                                gathered parameters
born in backward and given back where a sharded unit is reduced      unsharded gradients
born in a reduce-scatter: kept / not kept                            gradients / communication buffers
born in DDP's forward and kept, or kept and given back there         communication buffers (buckets); gradients if backward keeps none
born in the optimizer's step: kept behind it / not                   optimizer state / temporaries
born in backward: kept behind it / not                               gradients / temporaries
born in forward: still needed behind it / not                        activations / temporaries
born before the first forward, or where modules are built, and kept  parameters
... and given back in an optimizer's step                            parameters, and so is what the step put in its place
born between forward and backward, freed in backward                 activations (what the loss saved)
born between steps, freed in or behind the forward that follows      inputs
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tracekit.memory.blocks import Blocks
from tracekit.memory.moments import BACKWARD, FORWARD, OPTIMIZER, Context, Hint, Moments
from tracekit.memory.ownership import (
    ACTIVATIONS,
    BUFFERS,
    GATHERED,
    GRADIENTS,
    INPUTS,
    OLDER,
    OPTIMIZER_STATE,
    PARAMETERS,
    TEMPORARIES,
    UNKNOWN,
    UNSHARDED,
    Owner,
)
from tracekit.trace.events import BoolArray, Int8Array, Int64Array
from tracekit.trace.steps import Phases

#: Gives a category to the chosen blocks that have none yet.
Give = Callable[[BoolArray, int], None]


@dataclass(frozen=True)
class _Lives:
    """Blocks with birth and death, and what of that the rules ask for."""

    birth: Moments
    death: Moments
    alive: BoolArray  # never freed in the log
    older: BoolArray
    leaves: BoolArray  # lives on behind the stretch of the phase it was born in
    unsure: BoolArray  # alive, and the stretch it was born in is where the log ends
    first: BoolArray  # born before the first forward: before the first gather where units are sharded
    next_forward: Int64Array  # start of the first forward behind its birth; the far future where there is none


def categorize(blocks: Blocks, birth: Moments, death: Moments, context: Context) -> Owner:
    """Owner of each block; ``birth`` and ``death`` have one entry a block."""
    lives = _lives(blocks, birth, death, context)
    category = np.full(len(blocks), UNKNOWN, np.int8)
    open_ = np.ones(len(blocks), np.bool_)

    def give(chosen: BoolArray, code: int) -> None:
        category[chosen & open_] = code
        open_[chosen] = False

    # Older than the log, but a stack that the end of a snapshot keeps says from where.
    give(lives.older & lives.alive & (birth.hint == Hint.OPTIMIZER), OPTIMIZER_STATE)
    give(lives.older & lives.alive & (birth.hint == Hint.BUILDING), PARAMETERS)
    give(lives.older, OLDER)
    give(~birth.known, UNKNOWN)
    _by_ranges(lives, give)
    _by_phase(lives, give)
    _outside_phases(lives, context, give)
    _buckets_are_gradients(lives, category)
    _replaced_parameters(blocks, lives, category)
    return Owner(category, birth.name, np.where(birth.unit > 0, birth.unit, np.where(death.known, death.unit, 0)).astype(np.int32))


def _lives(blocks: Blocks, birth: Moments, death: Moments, context: Context) -> _Lives:
    alive = ~death.known & ~blocks.lost
    phases = context.phases
    ends = _run_ends(phases)[np.maximum(birth.interval, 0)] if len(phases.start) else np.zeros(len(blocks), np.int64)
    inside = birth.interval >= 0
    unsure = alive & inside & (ends >= context.end)
    forward = phases.start[phases.kind == FORWARD]
    at = np.searchsorted(forward, birth.time, side="right")
    far = np.iinfo(np.int64).max
    following = np.where(at < len(forward), forward[np.minimum(at, len(forward) - 1)], far) if len(forward) else np.full(len(blocks), far)
    begin = _begin(birth, death, phases, int(forward.min(initial=far)))
    return _Lives(
        birth,
        death,
        alive,
        blocks.born_before,
        inside & ~unsure & (alive | (death.known & (death.time >= ends))),
        unsure,
        birth.known & (birth.time < begin),
        np.asarray(following, np.int64),
    )


def _begin(birth: Moments, death: Moments, phases: Phases, forward: int) -> int:
    """Start of the first forward [ns]: of the first stretch that saves something for backward, or the first gather of a sharded unit.

    What builds a model may run operators that autograd tracks, which look like a ``forward`` of their own.
    """
    gathers = birth.time[birth.known & (birth.hint == Hint.GATHER)]
    if len(gathers):
        return int(gathers.min())
    saved = birth.interval[birth.known & death.known & (birth.phase == FORWARD) & (death.phase == BACKWARD)]
    return int(phases.start[saved.min()]) if len(saved) else forward


def _run_ends(phases: Phases) -> Int64Array:
    """End of each stretch [ns]; of backward, that of the last one before another phase: engine threads may pause between two stretches."""
    last = np.append((phases.kind[1:] != phases.kind[:-1]) | (phases.kind[:-1] != BACKWARD), True)
    places = np.flatnonzero(last)
    ends: Int64Array = phases.end[places[np.searchsorted(places, np.arange(len(last)))]]
    return ends


def _by_ranges(lives: _Lives, give: Give) -> None:
    hint, gone = lives.birth.hint, lives.death.hint
    kept = lives.leaves & ~lives.unsure
    give(hint == Hint.COMMUNICATION, BUFFERS)
    give(hint == Hint.GATHER, GATHERED)
    give(hint == Hint.ACCUMULATE, UNSHARDED)
    give((hint == Hint.REDUCE) & kept, GRADIENTS)
    give((hint == Hint.REDUCE) & ~lives.unsure, BUFFERS)
    give(hint == Hint.LOADING, INPUTS)
    give((hint == Hint.BUILDING) & lives.alive, PARAMETERS)
    give(lives.first & _stays_or_is_replaced(lives) & (lives.birth.phase == FORWARD), PARAMETERS)
    long_kept = lives.alive & (lives.next_forward != np.iinfo(np.int64).max)
    give((hint == Hint.DDP) & (lives.birth.unit == 0) & (long_kept | (gone == Hint.DDP)) & kept, BUFFERS)
    give((gone == Hint.DDP) & (lives.birth.phase == 0) & (lives.death.interval != lives.birth.interval), BUFFERS)


def _stays_or_is_replaced(lives: _Lives) -> BoolArray:
    """Blocks that are never freed, or given back within a step of the optimizer."""
    result: BoolArray = lives.alive | (lives.death.known & (lives.death.phase == OPTIMIZER))
    return result


def _buckets_are_gradients(lives: _Lives, category: Int8Array) -> None:
    """DDP's buckets ARE the gradients (gradient_as_bucket_view) where, with the buckets there, backward keeps none of its own."""
    buckets = (category == BUFFERS) & (lives.birth.hint == Hint.DDP)
    if buckets.any():
        since = lives.birth.time >= int(lives.birth.time[buckets].max())
        backward = since & (lives.birth.phase == BACKWARD)
        if backward.any() and not (backward & (category == GRADIENTS)).any():
            category[buckets] = GRADIENTS


def _replaced_parameters(blocks: Blocks, lives: _Lives, category: Int8Array) -> None:
    """What an optimizer puts in the place of a parameter (``p.data = ...``): of its steps' blocks of that size the last before it goes."""
    birth, death = lives.birth, lives.death
    made = np.flatnonzero(birth.known & (birth.phase == OPTIMIZER) & (category == OPTIMIZER_STATE))
    made = made[np.lexsort((blocks.birth[made], blocks.bytes[made]))]
    if not len(made):
        return
    scale = int(blocks.death.max()) + 2
    keys = blocks.bytes[made] * scale + blocks.birth[made]
    gone = np.flatnonzero((category == PARAMETERS) & death.known & (death.phase == OPTIMIZER))
    while len(gone):
        at = np.searchsorted(keys, blocks.bytes[gone] * scale + blocks.death[gone]) - 1
        found = made[np.maximum(at, 0)]
        same = (at >= 0) & (blocks.bytes[found] == blocks.bytes[gone]) & (blocks.birth[found] > blocks.birth[gone])
        same &= (category[found] == OPTIMIZER_STATE) & (death.interval[gone] == birth.interval[found])
        following = np.unique(found[same])
        category[following] = PARAMETERS
        gone = following[death.known[following] & (death.phase[following] == OPTIMIZER)]


def _by_phase(lives: _Lives, give: Give) -> None:
    phase, hint, gone = lives.birth.phase, lives.birth.hint, lives.death.hint
    # A step with a closure (Lightning's always, LBFGS) has forward and backward inside of its range.
    optimizer = (phase == OPTIMIZER) | ((hint == Hint.OPTIMIZER) & (phase != FORWARD) & (phase != BACKWARD))
    give(lives.unsure & optimizer & _many_of_a_kind(lives), OPTIMIZER_STATE)
    give(lives.unsure & (phase != FORWARD), UNKNOWN)
    give(optimizer & lives.leaves, OPTIMIZER_STATE)
    give(optimizer, TEMPORARIES)
    backward = phase == BACKWARD
    sharded = bool((hint == Hint.REDUCE).any())
    give(backward & ((gone == Hint.REDUCE) | (gone == Hint.ACCUMULATE) | (sharded & (gone == Hint.ACCUMULATED))), UNSHARDED)
    # Work between pieces of one backward (inside the range of a closure, or a pause) makes it several stretches.
    within = lives.death.known & (lives.death.phase == BACKWARD) & (lives.death.time < lives.next_forward)
    give(backward & lives.leaves & ~within, GRADIENTS)
    give(backward, TEMPORARIES)
    forward = phase == FORWARD
    stays = lives.alive & (lives.next_forward != np.iinfo(np.int64).max)
    give(forward & stays, UNKNOWN)
    give(forward & (lives.leaves | lives.unsure), ACTIVATIONS)
    give(forward, TEMPORARIES)


def _many_of_a_kind(lives: _Lives) -> BoolArray:
    """Blocks that are alive together with others of their name: one a parameter. Of a temporary there is one at a time."""
    counts = np.bincount(lives.birth.name[lives.alive], minlength=int(lives.birth.name.max(initial=0)) + 1)
    many: BoolArray = lives.alive & (lives.birth.name > 0) & (counts[lives.birth.name] > 1)
    return many


def _outside_phases(lives: _Lives, context: Context, give: Give) -> None:
    phases = context.phases
    forward = phases.start[phases.kind == FORWARD]
    if not len(forward):
        return
    give(_of_the_loss(lives, context), ACTIVATIONS)
    outlives = lives.alive | (lives.death.time >= lives.next_forward)
    give(lives.first & _stays_or_is_replaced(lives), PARAMETERS)
    give(lives.alive, UNKNOWN)
    give(outlives & (lives.next_forward != np.iinfo(np.int64).max), INPUTS)
    give(~outlives, TEMPORARIES)


def _of_the_loss(lives: _Lives, context: Context) -> BoolArray:
    """Made between a forward and the backward that follows it, and still there when that has begun: what the loss saved."""
    phases, time = context.phases, lives.birth.time
    last = np.searchsorted(phases.start, time, side="right") - 1
    before, after = np.maximum(last, 0), np.minimum(last + 1, len(phases.start) - 1)
    between = (last >= 0) & (last + 1 < len(phases.start)) & (time >= phases.end[before])
    between &= (phases.kind[before] == FORWARD) & (phases.kind[after] == BACKWARD)
    found: BoolArray = between & lives.death.known & (lives.death.time >= phases.start[after])
    return found
