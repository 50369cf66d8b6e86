"""Allocations and frees of one step, as the model predicts them, and their running sums.

Every event has an owner (a category of ``tracekit analyze``, with ``logits`` and ``allocator_rounding`` beside them), bytes, and the moment
at which it has happened: moments are points of the program, in order. What is allocated at a moment is the sum of all events up to it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tracekit.errors import UsageError

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer_state",
    "buffers",
    "gathered_parameters",
    "unsharded_gradients",
    "communication_buffers",
    "activations",
    "logits",
    "inputs",
    "temporaries",
    "allocator_rounding",
)
#: No block is larger; sums of blocks stay exact.
MOST_BYTES = 2**52
#: Streams with segments of their own: that of compute, of gathers, of reductions.
STREAMS = 3
COMPUTE, GATHER, REDUCE = range(STREAMS)
_IDLE = len(CATEGORIES)
_Column = npt.NDArray[np.int64]
_INDEX = {name: index for index, name in enumerate(CATEGORIES)}


@dataclass(frozen=True)
class Moment:
    """What is allocated at one point of the step."""

    phase: str
    """forward, backward or optimizer"""
    unit: str
    """the unit at work; '' the root's, or none"""
    what: str
    """what goes on there: gather, compute, reduce, ..."""
    bytes: Mapping[str, int]
    """category -> bytes [bytes]"""

    @property
    def total(self) -> int:
        """Everything allocated [bytes]."""
        return sum(self.bytes.values())


class Tape:
    """Records allocations and frees while the step is gone through; ``held`` is what lives now."""

    def __init__(self) -> None:
        self.phase, self.unit = "forward", ""
        self._held: dict[Hashable, tuple[int, int, int]] = {}
        self._events: list[tuple[int, int, int, int]] = []
        self._marks: list[tuple[str, str, str]] = []

    def put(self, block: Hashable, owner: str, size: int, stream: int = 0) -> None:
        """From the next moment on ``block`` is alive with ``size`` bytes, in place of what it was; ``stream``: whose it is."""
        self.drop(block)
        if size > MOST_BYTES:
            raise UsageError("the sizes given are those of no job: a rank would hold petabytes", "give those of a real one")
        if size:
            self._held[block] = (_INDEX[owner], size, stream)
            self._events.append((_INDEX[owner], size, len(self._marks), stream))

    def idle(self, block: Hashable, size: int) -> None:
        """From the next moment on a segment of ``size`` bytes stands free: it is reserved, and too small for what is asked for."""
        self._held[block] = (_IDLE, size, COMPUTE)
        self._events.append((_IDLE, size, len(self._marks), COMPUTE))

    def drop(self, *blocks: Hashable) -> None:
        """Free ``blocks`` before the next moment; those that are not there stay free."""
        for block in blocks:
            owner, size, stream = self._held.pop(block, (0, 0, 0))
            if size:
                self._events.append((owner, -size, len(self._marks), stream))

    def size(self, block: Hashable) -> int:
        """Bytes of a block; 0 where it is not there."""
        return self._held.get(block, (0, 0, 0))[1]

    def mark(self, what: str) -> None:
        """All that was put and dropped since the moment before has happened: a moment."""
        self._marks.append((self.phase, self.unit, what))

    def sums(self) -> Sums:
        """The running sums behind all events."""
        events = np.array([event for event in self._events if event[2] < len(self._marks)], np.int64).reshape(-1, 4)
        owner, size, moment, stream = events.T
        return Sums(
            tuple(self._marks), self._running(moment, owner, size, _IDLE + 1)[:, :_IDLE], self._running(moment, stream, size, STREAMS)
        )

    def _running(self, moment: _Column, kind: _Column, size: _Column, kinds: int) -> npt.NDArray[np.int64]:
        """Running sums [moments, kinds] of what was allocated and freed."""
        changes = np.zeros((len(self._marks), kinds), np.int64)
        np.add.at(changes, (moment, kind), size)
        return np.cumsum(changes, axis=0)


@dataclass(frozen=True, eq=False)
class Sums:
    """Allocated bytes at each moment of a step."""

    marks: tuple[tuple[str, str, str], ...]
    """phase, unit and activity of each moment, in order"""
    bytes: npt.NDArray[np.int64]
    """[moments, categories], as ``CATEGORIES`` are ordered [bytes]"""
    streams: npt.NDArray[np.int64]
    """[moments, streams], the same by the stream whose memory it comes from, idle segments too [bytes]"""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sums) and self.marks == other.marks and bool((self.bytes == other.bytes).all())

    def __hash__(self) -> int:
        return hash((self.marks, self.bytes.tobytes()))

    @cached_property
    def totals(self) -> npt.NDArray[np.int64]:
        """Everything allocated at each moment [bytes]."""
        return np.asarray(self.bytes.sum(axis=1))

    def moment(self, index: int) -> Moment:
        """One of them."""
        return Moment(*self.marks[index], dict(zip(CATEGORIES, self.bytes[index].tolist(), strict=True)))

    def largest(self, phase: str = "") -> Moment | None:
        """The first of the largest moments, of one phase or of all; None where there is none."""
        places = [index for index, mark in enumerate(self.marks) if not phase or mark[0] == phase]
        return self.moment(places[int(self.totals[places].argmax())]) if places else None
