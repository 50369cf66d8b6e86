"""One parsing thread: its own pool, lanes and output arrays; what it read leaves as a Block of trimmed copies."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tracekit.readers import keys, scan, tolerant
from tracekit.readers.lex import PAD
from tracekit.readers.pool import Pool
from tracekit.trace.events import Int32Array, Int64Array

#: Room that the pool is given when it is full: the longest string of a buffer fits.
_LEAST_ROOM = 1 << 20


@dataclass(frozen=True)
class Block:
    """Rows of one piece of text, with the worker's own codes: ``wide``, ``narrow`` and for each side table (rows, columns)."""

    wide: list[Int64Array]
    narrow: list[Int32Array]
    side: list[tuple[Int64Array, Int64Array]]

    def __len__(self) -> int:
        return len(self.wide[0])


@dataclass
class Piece:
    """What came of one buffer: blocks, where it stopped and why, and what was repaired on the way."""

    blocks: list[Block] = field(default_factory=list)
    stopped: int = scan.MORE
    position: int = 0
    repairs: Counter[str] = field(default_factory=Counter)
    counts: Int64Array = field(default_factory=lambda: np.zeros(keys.COUNTERS, np.int64))


class Worker:
    """Parses buffers one after the other."""

    def __init__(self, spec: keys.Spec, buffer_bytes: int) -> None:
        self._spec = spec
        self._capacity = max(1024, buffer_bytes // 96)
        capacity = self._capacity
        self._wide = np.empty((4, capacity), np.int64)
        self._narrow = np.empty((5, capacity), np.int32)
        self._side = np.empty((spec.side_columns, capacity), np.int64)
        self._side_rows = np.empty((len(spec.side_tables), capacity), np.int64)
        self._side_used = np.zeros(len(spec.side_tables), np.int64)
        self._counters = np.zeros(keys.COUNTERS, np.int64)
        self._category = keys.category_table()
        self.pool = Pool(keys.KNOWN)
        self.lanes = np.zeros((2, 1024), np.int64)
        self._lane_table = np.full(4096, -1, np.int32)

    @property
    def lane_count(self) -> int:
        """Lanes seen so far."""
        return int(self._counters[keys.LANES])

    def parse(self, buffer: Any, position: int, end: int) -> Piece:
        """Read ``buffer[position:end]`` (padded) until it ends, the list ends, or something is no JSON."""
        piece = Piece(position=position)
        lanes = self._counters[keys.LANES]
        self._counters[:] = 0
        self._counters[keys.LANES] = lanes
        while True:
            self._counters[keys.ROW] = 0
            self._side_used[:] = 0
            piece.stopped, piece.position = self._scan(buffer, piece.position, end)
            if self._counters[keys.ROW]:
                piece.blocks.append(self._block(int(self._counters[keys.ROW])))
            if piece.stopped == scan.POOL_FULL:
                self.pool.grow(max(_LEAST_ROOM, end - piece.position))
            elif piece.stopped == scan.ROWS_FULL:
                self._grow_lanes()
            else:
                piece.counts[:] = self._counters
                return piece

    def _scan(self, buffer: Any, position: int, end: int) -> tuple[int, int]:
        spec = self._spec
        stopped, at = scan.scan_events(
            buffer,
            position,
            end,
            spec.top,
            spec.arguments,
            spec.target,
            spec.first,
            spec.width,
            self._wide,
            self._narrow,
            self._side,
            self._side_rows,
            self._side_used,
            self.lanes,
            self._lane_table,
            self._counters,
            *self.pool.arrays,
            self._category,
        )
        return int(stopped), int(at)

    def _block(self, rows: int) -> Block:
        spec = self._spec
        side = []
        for number, first in enumerate(spec.side_first):
            used = int(self._side_used[number])
            last = first + spec.side_width[number]
            side.append((self._side_rows[number, :used].copy(), self._side[first:last, :used].copy()))
        return Block([c[:rows].copy() for c in self._wide], [c[:rows].copy() for c in self._narrow], side)

    def _grow_lanes(self) -> None:
        """More room for lanes when half of it is taken."""
        if 2 * self.lane_count < self.lanes.shape[1]:
            return
        lanes = np.zeros((2, 2 * self.lanes.shape[1]), np.int64)
        lanes[:, : self.lanes.shape[1]] = self.lanes
        self.lanes = lanes
        self._lane_table = np.full(4 * lanes.shape[1], -1, np.int32)
        scan.rehash_lanes(self.lanes, self._lane_table, self.lane_count)

    def parse_tolerant(self, data: bytes, final: bool) -> Piece:
        """Like ``parse``, but events that are no JSON are repaired or skipped, one by one. ``final``: the file ends with ``data``.

        ``position`` of the result counts in ``data``; it is less than its length only when more bytes are needed.
        """
        whole = Piece()
        buffer = padded(data)
        position = 0
        while True:
            part = self.parse(buffer, position, len(data))
            _add(whole, part)
            position = part.position
            if part.stopped != scan.SYNTAX:
                break
            near = data[position : position + 2 * tolerant.LOOK_AHEAD]
            repair = tolerant.repair_event(near, 0, final and position + len(near) == len(data))
            if repair is None:
                whole.stopped = scan.MORE
                break
            whole.repairs[repair.problem] += 1
            if repair.event is not None:
                _add(whole, self.parse(padded(repair.event), 0, len(repair.event)))
            position += max(1, repair.next)
            while data[position : position + 1] in (b",", b" ", b"\n", b"\r", b"\t"):
                position += 1
            if position >= len(data):
                whole.stopped = scan.MORE
                break
        whole.position = position
        return whole


def _add(whole: Piece, part: Piece) -> None:
    whole.blocks.extend(part.blocks)
    whole.counts += part.counts
    whole.stopped = part.stopped


def padded(data: bytes | memoryview) -> Any:
    """The bytes in a new array, with PAD zeros behind them."""
    buffer = np.zeros(len(data) + PAD, np.uint8)
    buffer[: len(data)] = np.frombuffer(data, np.uint8)
    return buffer
