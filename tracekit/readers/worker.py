"""One parsing thread: its own pool, lanes and output arrays; what it read leaves as a Block of trimmed copies."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tracekit.readers import scan, tolerant
from tracekit.readers.entry import entries
from tracekit.readers.keys import Spec
from tracekit.readers.lex import PAD
from tracekit.readers.pool import Pool
from tracekit.trace.events import Int32Array, Int64Array, UInt8Array

#: What a worker begins with: rows of the output arrays (which stay as they are), lanes, entries and bytes of the pool (which grow).
LEAST_ROWS, LANES, ENTRIES, ARENA = 1 << 10, 1 << 10, 1 << 13, 1 << 20
#: Room that the pool is given when it is full, if the rest of the buffer does not ask for more: the longest string of the buffer fits.
LEAST_ROOM = 1 << 20
_BETWEEN = (b",", b" ", b"\n", b"\r", b"\t")
#: What a pass counts: ARROWS, COMMAS, DUPLICATES, BAD_TIMES, as words of the control block and, without COUNTS.start, of ``Parsed.counts``.
COUNTS = slice(scan.ARROWS, scan.BAD_TIMES + 1)


@dataclass(frozen=True)
class Block:
    """Rows of one piece of text, with the worker's own codes: the columns of scan.py, and for each side table (rows, columns).

    The arrays of a piece's last block are the worker's own: they hold until it parses again.
    """

    wide: Int64Array
    narrow: Int32Array
    small: UInt8Array
    side: list[tuple[Int64Array, Int64Array]]

    def __len__(self) -> int:
        return len(self.wide[0])


@dataclass
class Parsed:
    """What came of one buffer: blocks, where it stopped and why, and what was repaired on the way."""

    blocks: list[Block] = field(default_factory=list)
    stopped: int = scan.MORE
    position: int = 0
    repairs: Counter[str] = field(default_factory=Counter)
    counts: Int64Array = field(default_factory=lambda: np.zeros(COUNTS.stop - COUNTS.start, np.int64))


#: Text of broken events [bytes] that is repaired whatever the file, and the share of the text up to there that may be broken beyond it.
#: A megabyte takes one to three seconds, the kinds of damage that were met and those that were made up.
LEAST_WORK, BROKEN_SHARE = 16 << 20, 8
_EACH_REPAIR = 32  # bytes of text that beginning a repair is worth


@dataclass
class RepairWork:
    """What repairs of one file have cost. It follows from the text alone, not from the buffers that it came in."""

    done: int = 0  # [bytes]

    def is_too_much(self, offset: int) -> bool:
        """Whether nothing more is repaired, with the next broken event at ``offset``."""
        return self.done > max(LEAST_WORK, offset // BROKEN_SHARE)

    def add(self, consumed: int) -> None:
        """A repair is done that took this many bytes of text."""
        self.done += consumed + _EACH_REPAIR


class Worker:
    """Parses buffers one after the other."""

    def __init__(self, spec: Spec, buffer_bytes: int) -> None:
        self._spec = spec
        self._code = entries()
        capacity = max(LEAST_ROWS, buffer_bytes // 96)
        tables = len(spec.first)
        self._wide = np.empty((4, capacity), np.int64)
        self._narrow = np.empty((4, capacity), np.int32)
        self._small = np.empty((2, capacity), np.uint8)
        self._side = np.empty((spec.columns, capacity), np.int64)
        self._side_rows = np.empty((tables, capacity), np.int64)
        self._side_used = np.zeros(tables, np.int64)
        self._record = np.zeros(scan.RECORD_WORDS, np.int64)
        self._first, self._width = np.array(spec.first, np.int64), np.array(spec.width, np.int64)
        self._control = np.zeros(scan.CONTROL_WORDS, np.int64)
        self.pool = Pool(scan.KNOWN, self._code.intern, self._code.rehash, ENTRIES, ARENA)
        for number, array in (
            (scan.TOP, spec.top),
            (scan.ARGUMENTS, spec.arguments),
            (scan.TARGETS, spec.targets),
            (scan.POOL, self.pool.control),
            (scan.RECORD_AT, self._record),
            (scan.CATEGORIES, scan.CATEGORY_OF_CODE),
            (scan.WIDE, self._wide),
            (scan.NARROW, self._narrow),
            (scan.SMALL, self._small),
            (scan.SIDE, self._side),
            (scan.SIDE_ROWS, self._side_rows),
            (scan.SIDE_USED, self._side_used),
            (scan.SIDE_FIRST, self._first),
            (scan.SIDE_WIDTH, self._width),
        ):
            self._control[number] = array.ctypes.data
        self._control[[scan.CAPACITY, scan.SIDE_TABLES]] = capacity, tables
        self.lanes = np.zeros((0, 2), np.int64)
        self._room_for_lanes(LANES)

    @property
    def lane_count(self) -> int:
        """Lanes seen so far."""
        return int(self._control[scan.LANES])

    def parse(self, buffer: Any, position: int, end: int) -> Parsed:
        """Read ``buffer[position:end]`` (padded) until it ends, the list ends, or something is no JSON."""
        parsed = Parsed()
        self._begin()
        self._scan(parsed, buffer, position, end)
        return self._finished(parsed)

    def parse_tolerant(self, data: bytes, final: bool, work: RepairWork, offset: int) -> Parsed:
        """Like ``parse``, but events that are no JSON are repaired or skipped, one by one, as long as that is not too much ``work``.

        ``final``: the file ends with ``data``, which begins at ``offset``. ``position`` of the result counts in ``data``; it is less than
        its length only when more bytes are needed (MORE) or repairing became too much work (SYNTAX).
        """
        parsed = Parsed()
        buffer = padded(data)
        position = 0
        self._begin()
        while position < len(data):
            self._scan(parsed, buffer, position, len(data))
            position = parsed.position
            if parsed.stopped != scan.SYNTAX or work.is_too_much(offset + position):
                break
            parsed.stopped = scan.MORE
            repair = tolerant.repair_event(data, position, final)
            if repair is None:
                break
            parsed.repairs[repair.problem] += 1
            if repair.event is not None:
                self._scan(parsed, padded(repair.event), 0, len(repair.event))
            begun, position = position, max(position + 1, repair.next)
            work.add(position - begun)
            while data[position : position + 1] in _BETWEEN:
                position += 1
        parsed.position = position
        return self._finished(parsed)

    def _begin(self) -> None:
        self._control[COUNTS] = 0
        self._control[scan.ROW] = 0
        self._side_used[:] = 0

    def _scan(self, parsed: Parsed, buffer: Any, position: int, end: int) -> None:
        """One run of the pass over a padded buffer. Rows stay in the output arrays until those are full."""
        text, control = int(buffer.ctypes.data), int(self._control.ctypes.data)
        while True:
            stopped, position = self._code.scan_events(text, position, end, control)
            if stopped == scan.POOL_FULL:
                self.pool.grow(max(LEAST_ROOM, end - position))
            elif stopped == scan.LANES_FULL:
                self._room_for_lanes(2 * len(self.lanes))
            elif stopped == scan.ROWS_FULL:
                self._take_rows(parsed, copy=True)
            else:
                parsed.stopped, parsed.position = stopped, position
                return

    def _finished(self, parsed: Parsed) -> Parsed:
        self._take_rows(parsed, copy=False)
        parsed.counts[:] = self._control[COUNTS]
        return parsed

    def _take_rows(self, parsed: Parsed, copy: bool) -> None:
        """Make a block of the rows that there are, and begin again at row 0."""
        rows = int(self._control[scan.ROW])
        if not rows:
            return
        side = []
        for table, (first, width) in enumerate(zip(self._spec.first, self._spec.width, strict=True)):
            used = int(self._side_used[table])
            side.append((self._side_rows[table, :used], self._side[first : first + width, :used]))
        block = Block(self._wide[:, :rows], self._narrow[:, :rows], self._small[:, :rows], side)
        parsed.blocks.append(deepcopy(block) if copy else block)
        self._control[scan.ROW] = 0
        self._side_used[:] = 0

    def _room_for_lanes(self, capacity: int) -> None:
        lanes = np.zeros((capacity, 2), np.int64)
        lanes[: self.lane_count] = self.lanes[: self.lane_count]
        self.lanes = lanes
        self._lane_table = np.full(4 * capacity, -1, np.int32)
        self._control[[scan.LANE_KEYS, scan.LANE_TABLE]] = lanes.ctypes.data, self._lane_table.ctypes.data
        self._control[[scan.LANE_MASK, scan.LANE_CAPACITY]] = len(self._lane_table) - 1, capacity
        self._code.rehash_lanes(int(self._control.ctypes.data))


def padded(data: bytes | memoryview) -> Any:
    """The bytes in a new array, with PAD zeros behind them."""
    buffer = np.zeros(len(data) + PAD, np.uint8)
    buffer[: len(data)] = np.frombuffer(data, np.uint8)
    return buffer
