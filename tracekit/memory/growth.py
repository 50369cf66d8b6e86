"""Memory that grows from step to step: what is born in every step and never freed, by owner, with the line of code.

The first step allocates what stays (optimizer state, caches), and of the last one nobody knows yet what it will free: neither counts. What
all others leave behind grows, or some of them in even distances (who logs every tenth step). Where blocks do not explain it (their
addresses are not recorded), the levels at the ends of the steps do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tracekit.memory.attribution import Attributed
from tracekit.memory.ownership import BUFFERS
from tracekit.trace.events import Int64Array
from tracekit.trace.steps import Phases, Steps
from tracekit.vocabulary import CATEGORIES, MemoryCategory

#: Fewer steps tell nothing: the first and the last one do not count.
LEAST_STEPS = 4
#: Something that is left behind in some steps only is a habit from so many times on.
LEAST_TIMES = 3
MOST_GROWING = 20
_OPTIMIZER = 3


@dataclass(frozen=True)
class Growing:
    """One owner that grows. ``stack``: innermost first, [] where not recorded.

    ``bytes_per_step``: over ``steps`` steps the median, the mean of an owner that grows in some of them only.
    """

    category: MemoryCategory
    unit: str
    name: str
    stack: list[str]
    bytes_per_step: int
    steps: int


def growth(found: Attributed, steps: Steps, phases: Phases, stack_of: Callable[[int], list[str]]) -> list[Growing] | None:
    """What grows, the most first; None where there are too few steps. ``stack_of`` gives the stack of a row of the log's source.

    Steps end with the optimizer where none is marked.
    """
    starts = steps.start if len(steps) else _steps_by_optimizer(phases)
    timeline = found.timeline
    count = len(starts)
    if count < LEAST_STEPS or not len(timeline.log):
        return None
    rows = _kept(found, starts, stack_of)
    levels = timeline.allocated[np.searchsorted(timeline.log.time, starts[1:], side="left")]
    rise = np.diff(levels)[:-1] if count > LEAST_STEPS else np.diff(levels)
    known = sum(row.bytes_per_step for row in rows)
    if len(rise) and int(rise.min()) > 2 * known:
        rows.append(Growing("unattributed", "", "", [], int(np.median(rise)) - known, len(rise)))
    return sorted(rows, key=lambda row: -row.bytes_per_step)[:MOST_GROWING]


def _kept(found: Attributed, starts: Int64Array, stack_of: Callable[[int], list[str]]) -> list[Growing]:
    """By blocks: each owner that leaves some behind in every step but the first and the last one."""
    log, blocks, owned = found.timeline.log, found.timeline.blocks, found.ownership
    block = owned.block
    kept = np.flatnonzero((owned.end >= len(log)) & (blocks.birth[block] >= 0) & ~blocks.lost[block] & (owned.category != BUFFERS))
    born = blocks.birth[block[kept]]
    step = np.searchsorted(starts, log.time[born], side="right") - 1
    inner = (step > 0) & (step < len(starts) - 1)
    kept, step = kept[inner], step[inner]
    keys = np.stack([owned.category[kept].astype(np.int64), owned.unit[kept], owned.name[kept]])
    owners, first, owner = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    amounts = np.zeros((owners.shape[1], len(starts)), np.int64)
    np.add.at(amounts, (owner.reshape(-1), step), owned.bytes[kept])
    rows = []
    for (category, unit, name), place, amount in zip(owners.T.tolist(), first.tolist(), amounts[:, 1:-1], strict=True):
        if _recurs(amount):
            row = int(blocks.birth_row[block[kept[place]]])
            stack = stack_of(row) if row >= 0 else []
            size = int(np.median(amount) if amount.min() > 0 else amount.mean())
            rows.append(Growing(CATEGORIES[category], found.texts[unit], found.texts[name], stack, size, len(amount)))
    return rows


def _recurs(amount: Int64Array) -> bool:
    """Whether bytes are left behind in every step, or three times and more in even distances up to both ends."""
    places = np.flatnonzero(amount)
    if len(places) in (0, len(amount)):
        return len(places) > 0
    if len(places) < LEAST_TIMES:
        return False
    between = np.diff(places)
    longest = max(int(between.max()), int(places[0]) + 1, len(amount) - int(places[-1]))
    return longest <= 2 * float(np.median(between))


def _steps_by_optimizer(phases: Phases) -> Int64Array:
    """Starts of steps: what follows the optimizer is the next one."""
    ends = phases.end[phases.kind == _OPTIMIZER]
    return np.concatenate([phases.start[:1], ends[:-1]]).astype(np.int64) if len(ends) else np.empty(0, np.int64)
