"""The moments at which most was reserved, and at which most of it was unused: not those of the peak, where a job's memory is fragmented."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tracekit.memory.attribution import Attributed
from tracekit.memory.fragmentation import Fragmentation
from tracekit.memory.peak import Holding, composition, holdings, shortened
from tracekit.memory.pins import Unused
from tracekit.trace.steps import PHASE_NAMES, Phases, Steps
from tracekit.units import NULL

#: Owners that are kept of such a moment.
MOST_OWNERS = 20


@dataclass(frozen=True)
class Extreme:
    """One moment. Bytes; ``time_ns`` is None for an empty log, ``step`` outside every step; ``phase`` '' where not known.

    ``owners`` add up to ``allocated``, as ``categories`` do. ``unused``: where it lies; only a snapshot tells.
    """

    time_ns: int | None
    step: int | None
    phase: str
    allocated: int
    fragmentation: Fragmentation
    categories: dict[str, int] = field(default_factory=dict)
    owners: list[Holding] = field(default_factory=list)
    unused: Unused = field(default_factory=Unused)


def extremes(
    found: Attributed,
    phases: Phases,
    steps: Steps,
    fragments_at: Callable[[int], Fragmentation | None],
    unused_at: Callable[[int], Unused] | None = None,
) -> tuple[Extreme | None, Extreme | None]:
    """(most reserved, most of it unused); None where reserved memory is not recorded.

    Of the moments at which most was reserved the one with most in use: what is unused even then is fragmentation.
    """
    timeline = found.timeline
    if not len(timeline.log) or (timeline.reserved == NULL).any():
        return None, None
    active = np.where(timeline.active == NULL, timeline.allocated, timeline.active)
    moments = []
    highest = np.flatnonzero(timeline.reserved == timeline.reserved.max())
    fullest = int(highest[active[highest].argmax()])
    for position in (fullest - 1, int((timeline.reserved - active).argmax()) - 1):
        fragments = fragments_at(position)
        moment = timeline.time_of(position)
        if fragments is None or moment is None:
            return None, None
        at = np.array([moment], np.int64)
        step = int(steps.index_at(at)[0])
        moments.append(
            Extreme(
                moment,
                int(steps.number[step]) if step >= 0 else None,
                PHASE_NAMES[int(phases.at(at)[0])],
                int(timeline.allocated[position + 1]),
                fragments,
                composition(found, position),
                shortened(holdings(found, position), MOST_OWNERS),
                Unused() if unused_at is None else unused_at(position),
            )
        )
    return moments[0], moments[1]
