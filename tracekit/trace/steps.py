"""Training steps and phases of one rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekit.trace.events import Int8Array, Int32Array, Int64Array

#: Values of ``Phases.kind``; index 0 is "not known".
PHASE_NAMES = ("", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Steps:
    """Steps of one window, sorted by start, not overlapping.

    ``source``: 'ProfilerStep', 'iteration' or 'none' (no step marks: length 0).
    """

    number: Int64Array
    start: Int64Array
    end: Int64Array
    source: str

    def __len__(self) -> int:
        return len(self.number)

    def index_at(self, times: Int64Array) -> Int32Array:
        """Index of the step that holds each time (start <= t < end); -1 outside every step."""
        if not len(self.number):
            return np.full(len(times), -1, np.int32)
        index = np.searchsorted(self.start, times, side="right") - 1
        inside = (index >= 0) & (times < self.end[np.maximum(index, 0)])
        return np.where(inside, index, -1).astype(np.int32)


@dataclass(frozen=True)
class Phases:
    """Host intervals of known phase, sorted by start, not overlapping; ``kind`` indexes PHASE_NAMES."""

    start: Int64Array
    end: Int64Array
    kind: Int8Array

    def at(self, times: Int64Array) -> Int8Array:
        """Phase of each host time; 0 where not known."""
        if not len(self.start):
            return np.zeros(len(times), np.int8)
        index = np.searchsorted(self.start, times, side="right") - 1
        inside = (index >= 0) & (times < self.end[np.maximum(index, 0)])
        return np.where(inside, self.kind[np.maximum(index, 0)], 0).astype(np.int8)
