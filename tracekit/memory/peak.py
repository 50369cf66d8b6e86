"""The highest point of a timeline: what it consists of, exactly; and the same for any other moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracekit.memory.attribution import Attributed
from tracekit.memory.ownership import OLDER, UNKNOWN, Ownership
from tracekit.trace.events import Int64Array
from tracekit.vocabulary import CATEGORIES

#: Lines of a list of owners; what is smaller is added up a category.
MOST_HOLDINGS = 200
OTHERS = "others"


@dataclass(frozen=True)
class Holding:
    """Bytes of one owner at one moment, in so many blocks. ``unit`` and ``name`` are '' where not known."""

    category: str
    unit: str
    name: str
    bytes: int
    blocks: int


def composition(found: Attributed, position: int) -> dict[str, int]:
    """Bytes of every category behind an event (-1: before the first). They add up to what is allocated there."""
    ownership = found.ownership
    live = ownership.live(position)
    amounts = np.zeros(len(CATEGORIES), np.int64)
    np.add.at(amounts, ownership.category[live], ownership.bytes[live])
    older, unknown = _unexplained(found.timeline.unexplained, np.array([position + 1]))
    amounts[OLDER] += older[0]
    amounts[UNKNOWN] += unknown[0]
    return {name: int(amount) for name, amount in zip(CATEGORIES, amounts.tolist(), strict=True)}


def category_curves(found: Attributed, places: Int64Array) -> dict[str, Int64Array]:
    """Bytes of each category at these places of the timeline's curves; categories that are never there are left out."""
    ownership, length = found.ownership, len(found.timeline.log)
    older, unknown = _unexplained(found.timeline.unexplained, places)
    curves: dict[str, Int64Array] = {}
    for code, name in enumerate(CATEGORIES):
        curve = _live_curve(ownership, code, length)[places]
        curve = curve + older if code == OLDER else curve + unknown if code == UNKNOWN else curve
        if curve.any():
            curves[name] = curve
    return curves


def holdings(found: Attributed, position: int) -> list[Holding]:
    """Owners behind an event, the largest first: (category, unit, name) with bytes and blocks. They add up to the composition."""
    ownership = found.ownership
    live = ownership.live(position)
    keys = np.stack([ownership.category[live].astype(np.int64), ownership.unit[live], ownership.name[live]])
    groups, inverse, blocks = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
    amounts = np.zeros(groups.shape[1], np.int64)
    np.add.at(amounts, inverse.reshape(-1), ownership.bytes[live])
    rows = [
        Holding(CATEGORIES[category], found.texts[unit], found.texts[name], amount, count)
        for (category, unit, name), amount, count in zip(groups.T.tolist(), amounts.tolist(), blocks.tolist(), strict=True)
    ]
    older, unknown = _unexplained(found.timeline.unexplained, np.array([position + 1]))
    for code, amount in ((OLDER, int(older[0])), (UNKNOWN, int(unknown[0]))):
        if amount:
            rows.append(Holding(CATEGORIES[code], "", "", amount, 0))
    return shortened(sorted(rows, key=lambda row: -row.bytes))


def shortened(rows: Sequence[Holding], most: int = MOST_HOLDINGS) -> list[Holding]:
    """The first ``most`` rows; the others added up a category."""
    kept = list(rows[:most])
    for category in CATEGORIES:
        rest = [row for row in rows[most:] if row.category == category]
        if rest:
            kept.append(Holding(category, "", OTHERS, sum(row.bytes for row in rest), sum(row.blocks for row in rest)))
    return kept


def _unexplained(unexplained: Int64Array, places: Int64Array) -> tuple[Int64Array, Int64Array]:
    """(older than the log, unknown): what was unexplained at the beginning is older, what came on top is not known."""
    there = unexplained[places]
    older = np.minimum(there, unexplained[0])
    return older, there - older


def _live_curve(ownership: Ownership, code: int, length: int) -> Int64Array:
    mine = ownership.category == code
    change = np.zeros(length + 2, np.int64)
    np.add.at(change, ownership.start[mine] + 1, ownership.bytes[mine])
    np.subtract.at(change, ownership.end[mine] + 1, ownership.bytes[mine])
    return np.cumsum(change[: length + 1], dtype=np.int64)
