"""Minimum, median and maximum of groups of numbers, without a loop over groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.trace.events import Int64Array


@dataclass(frozen=True)
class Spread:
    """One entry a group; NaN where the group has no value. ``total`` is 0 there."""

    count: Int64Array
    total: Int64Array
    least: npt.NDArray[np.float64]
    median: npt.NDArray[np.float64]
    most: npt.NDArray[np.float64]

    def json(self, group: int, scale: float) -> dict[str, Any] | None:
        """``{"min", "p50", "max"}`` of one group, divided by ``scale``; None where it has no value."""
        if not self.count[group]:
            return None
        return {"min": self.least[group] / scale, "p50": self.median[group] / scale, "max": self.most[group] / scale}


def spread(group: Int64Array, values: Int64Array, count: int) -> Spread:
    """Spread of ``values`` by ``group`` (0 <= group < count). The median of an even number is the mean of the middle two."""
    order = np.lexsort((values, group))
    ordered = values[order]
    size = np.bincount(group, minlength=count).astype(np.int64)
    first = np.concatenate([[0], np.cumsum(size)[:-1]]).astype(np.int64)
    total = np.zeros(count, np.int64)
    np.add.at(total, group, values)

    def at(index: Int64Array) -> npt.NDArray[np.float64]:
        if not len(ordered):
            return np.full(count, np.nan)
        return np.where(size > 0, ordered[np.clip(index, 0, len(ordered) - 1)], np.nan).astype(np.float64)

    median = (at(first + (size - 1) // 2) + at(first + size // 2)) / 2
    return Spread(size, total, at(first), median, at(first + size - 1))
