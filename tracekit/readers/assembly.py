"""Blocks of many workers to the tables of one trace: common codes, growing columns, decoded strings, named lanes."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np

from tracekit.readers import tolerant
from tracekit.readers.columns import Column
from tracekit.readers.keys import NAMES_TABLE, SIDE_TABLES
from tracekit.readers.pool import ESCAPED, RAW
from tracekit.readers.scan import NARROW_NAME, TEXT_KEY, TWICE_BIT, WIDE_TS
from tracekit.readers.worker import Block, Worker
from tracekit.trace.events import (
    DEVICE_WORK,
    BoolArray,
    Category,
    Coverage,
    Int32Array,
    Int64Array,
    Lane,
    RankTables,
    SideTable,
    side_dtype,
)
from tracekit.trace.steps import is_step_mark
from tracekit.units import NULL, NULL32

_MOST_DEVICES = 1024  # a pid of a device event below this is the device's number
_TEXT = ("str", "json")


class Assembly:
    """Takes blocks in the order of the file; ``finish`` makes tables of them, once. Columns are in the order that scan.py numbers them."""

    def __init__(self, workers: list[Worker], most_rows: int | None = None) -> None:
        """``most_rows``: whenever there are more, the later half (by start) is left out, and of what follows all that begins as late."""
        self._workers = workers
        self._most_rows = most_rows
        self._until: int | None = None  # raw time from which on events are left out
        self._marks = np.empty(0, np.bool_)  # of each common code: whether it names a step, all of which are kept
        self._wide = [Column(np.int64) for _ in range(4)]
        self._narrow = [Column(np.int32) for _ in range(4)]
        self._small = [Column(np.uint8) for _ in range(2)]
        self._side = [_SideBuilder(kinds) for kinds in SIDE_TABLES.values()]
        self._codes: dict[tuple[int, bytes], int] = {}
        self._code_maps = [np.empty(0, np.int32) for _ in workers]
        self._lanes: dict[tuple[int, int], int] = {}
        self._lane_maps = [np.empty(0, np.int32) for _ in workers]
        self._rows = 0  # in the columns
        self._read = 0
        #: How many names needed what: ``utf8`` bytes replaced, ``literal`` backslashes kept.
        self.odd_strings = {"utf8": 0, "literal": 0}

    def __len__(self) -> int:
        return self._rows

    def add(self, number: int, block: Block) -> None:
        """Copy a block of worker ``number``, with common codes for its own."""
        codes, lanes = self._translation(number)
        self._read += len(block)
        if self._until is not None:
            block = _chosen(block, (block.wide[WIDE_TS] < self._until) | self._marked(codes[block.narrow[NARROW_NAME]]))
        for column, values in zip(self._wide, block.wide, strict=True):
            column.append(values)
        for column, values, common in zip(self._narrow, block.narrow, (codes, lanes, None, None), strict=True):
            column.append(values if common is None else common[values])
        for column, values in zip(self._small, block.small, strict=True):
            column.append(values)
        for table, (rows, columns) in zip(self._side, block.side, strict=True):
            if len(rows):
                table.append(rows + len(self), columns, codes)
        self._rows += len(block)
        while self._most_rows is not None and self._rows > self._most_rows:
            self._cut()

    def _marked(self, names: Int32Array) -> BoolArray:
        """Which events mark a step."""
        if len(self._marks) < len(self._codes):
            new = itertools.islice(self._codes, len(self._marks), None)
            self._marks = np.append(self._marks, [is_step_mark(raw.decode(errors="replace")) for _, raw in new])
        marked: BoolArray = self._marks[names]
        return marked

    def _cut(self) -> None:
        """Leave out the later half of what is kept. MemoryError where that helps nothing: a hostile file."""
        ts, marked = self._wide[WIDE_TS].filled(), self._marked(self._narrow[NARROW_NAME].filled())
        timed = ts[(ts != NULL) & ~marked]
        self._until = int(np.partition(timed, len(timed) // 2)[len(timed) // 2]) if len(timed) else NULL + 1
        keep = (ts < self._until) | marked  # without a time it is less
        for column in (*self._wide, *self._narrow, *self._small):
            column.keep(keep)
        for table in self._side:
            table.keep(keep)
        self._rows = int(keep.sum())
        if self._rows > 0.9 * len(keep):
            raise MemoryError("its events have no times by which some could be left out: raise --memory-limit")

    def _translation(self, number: int) -> tuple[Int32Array, Int32Array]:
        """Common codes of a worker's codes, and common lanes of its lanes."""
        worker = self._workers[number]
        codes, lanes = self._code_maps[number], self._lane_maps[number]
        if len(codes) < len(worker.pool):
            new = [self._codes.setdefault(entry, len(self._codes)) for entry in worker.pool.since(len(codes))]
            codes = self._code_maps[number] = np.concatenate([codes, np.array(new, np.int32)])
        if len(lanes) < worker.lane_count:
            pairs = [_common_pair(pair, codes) for pair in worker.lanes[len(lanes) : worker.lane_count].tolist()]
            new = [self._lanes.setdefault(pair, len(self._lanes)) for pair in pairs]
            lanes = self._lane_maps[number] = np.concatenate([lanes, np.array(new, np.int32)])
        return codes, lanes

    def finish(self, metadata: dict[str, Any], coverage: Coverage) -> RankTables:
        """The tables; to be called once."""
        ts, dur, correlation, external_id = (column.finish() for column in self._wide)
        base = metadata.get("baseTimeNanoseconds", 0)
        _shift(ts, base)
        name, lane, stream, device = (column.finish() for column in self._narrow)
        self._drop_unused_lanes(lane)
        category, phase = (column.finish() for column in self._small)
        tables_of_side = [builder.finish() for builder in self._side]
        strings, remap = self._strings(self._used_codes(name, tables_of_side))
        if remap is not None:
            name[:] = remap[name]
            for table, kinds in zip(tables_of_side, SIDE_TABLES.values(), strict=True):
                _translate(table, kinds, remap)
        side = dict(zip(SIDE_TABLES, tables_of_side, strict=True))
        names = side.pop(NAMES_TABLE)
        coverage.events = self._read
        tables = RankTables(
            ts=ts,
            dur=dur,
            name=name,
            category=category.view(np.int8),
            phase=phase & np.uint8(TWICE_BIT - 1),
            lane=lane,
            correlation=correlation,
            external_id=external_id,
            stream=stream,
            device=device,
            side=side,
            strings=strings,
            lanes=(),
            metadata=metadata,
            coverage=coverage,
            kept_until=None if self._until is None else self._until + base,
        )
        tables.lanes = self._named_lanes(tables, names, remap)
        _streams_from_lanes(tables, phase >= TWICE_BIT)
        return tables

    def _strings(self, used: Any) -> tuple[list[str], Any]:
        """Decoded strings, and the translation of codes when two raw spellings are one string (else None).

        ``used``: which codes stand in a row or lane. The others come from categories, from text that was not JSON, and from buffers that
        were cut in the wrong place: they say nothing about the file.
        """
        escaped = [raw for (kind, raw), is_used in zip(self._codes, used, strict=True) if kind == ESCAPED and is_used]
        literal = any(tolerant.has_literal_backslash(raw) for raw in escaped)
        self.odd_strings["literal"] = len(escaped) if literal else 0
        decoded = []
        for (kind, raw), is_used in zip(self._codes, used, strict=True):
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                self.odd_strings["utf8"] += is_used
                text = raw.decode("utf-8", "replace")
            decoded.append(tolerant.decode_string(raw, literal) if kind == ESCAPED else text)
        distinct = dict.fromkeys(decoded)
        if len(distinct) == len(decoded):
            return decoded, None
        indices = {text: i for i, text in enumerate(distinct)}
        return list(distinct), np.array([indices[text] for text in decoded], np.int32)

    def _drop_unused_lanes(self, lane: Int32Array) -> None:
        """Forget lanes of no row (see ``_strings``), and number the others anew in ``lane``."""
        used = np.bincount(lane, minlength=len(self._lanes)) > 0
        if not used.all():
            lane[:] = (np.cumsum(used, dtype=np.int32) - 1)[lane]
            self._lanes = {pair: lane for lane, pair in enumerate(pair for pair, is_used in zip(self._lanes, used, strict=True) if is_used)}

    def _used_codes(self, name: Int32Array, side: list[SideTable]) -> list[bool]:
        """Of every common code, whether a row or a lane has it."""
        used = np.zeros(len(self._codes), np.bool_)
        used[name] = True
        for table, kinds in zip(side, SIDE_TABLES.values(), strict=True):
            for column, kind in kinds.items():
                if kind in _TEXT:
                    used[table.columns[column]] = True
        used[[value - TEXT_KEY for pair in self._lanes for value in pair if value >= TEXT_KEY]] = True
        flags: list[bool] = used.tolist()
        return flags

    def _named_lanes(self, tables: RankTables, names: SideTable, remap: Any) -> list[Lane]:
        process, thread = _lane_names(tables, names)
        raws = list(self._codes)
        keys = [tuple(_lane_value(value, raws, tables.strings, remap) for value in pair) for pair in self._lanes]
        of_process = {keys[lane][0]: text for lane, text in process.items()}
        return [
            Lane(pid, tid, process.get(i, of_process.get(pid, "")), thread.get(i, ""))  # type: ignore[arg-type]
            for i, (pid, tid) in enumerate(keys)
        ]


class _SideBuilder:
    """A growing side table."""

    def __init__(self, kinds: dict[str, Any]) -> None:
        self._kinds = kinds
        self._rows = Column(np.int64)
        self._columns = {name: Column(side_dtype(kind)) for name, kind in kinds.items()}

    def append(self, rows: Int64Array, columns: Int64Array, codes: Int32Array) -> None:
        """More rows, with a worker's codes in the columns of text."""
        self._rows.append(rows)
        for values, (name, kind) in zip(columns, self._kinds.items(), strict=True):
            self._columns[name].append(codes[np.where(values == NULL, 0, values)] if kind in _TEXT else values)

    def keep(self, chosen: BoolArray) -> None:
        """Only what belongs to the chosen rows of the events, numbered anew."""
        inside = chosen[self._rows.filled()]
        for column in (self._rows, *self._columns.values()):
            column.keep(inside)
        rows = self._rows.filled()
        rows[:] = (np.cumsum(chosen) - 1)[rows]

    def finish(self) -> SideTable:
        """The table."""
        return SideTable(self._rows.finish(), {name: column.finish() for name, column in self._columns.items()})


def _chosen(block: Block, chosen: BoolArray) -> Block:
    """The chosen rows of a block."""
    if chosen.all():
        return block
    place = np.cumsum(chosen) - 1
    side = [(place[rows[chosen[rows]]], columns[:, chosen[rows]]) for rows, columns in block.side]
    return Block(block.wide[:, chosen], block.narrow[:, chosen], block.small[:, chosen], side)


def _shift(ts: Int64Array, base: int) -> None:
    """Add a base to times, in place; a sum beyond 64 bits is as good as missing."""
    if base:
        lost = ts > 2**63 - 1 - base if base > 0 else ts <= NULL - base
        np.add(ts, base, out=ts, where=ts != NULL)
        ts[lost] = NULL


def _translate(table: SideTable, kinds: dict[str, Any], remap: Int32Array) -> None:
    """Translate the codes of a table's texts, in place."""
    for name, kind in kinds.items():
        if kind in _TEXT:
            table.columns[name][:] = remap[table.columns[name]]


def _common_pair(pair: list[int], codes: Int32Array) -> tuple[int, int]:
    """A (pid, tid) as the pass stores it, with the codes of texts made common."""
    pid, tid = (value if value < TEXT_KEY else TEXT_KEY + int(codes[value - TEXT_KEY]) for value in pair)
    return pid, tid


def _lane_value(value: int, raws: list[tuple[int, bytes]], strings: Any, remap: Any) -> int | str | None:
    """A pid or tid: a number, a text, None where it is missing. What is no text in the file is a number of 64 bits, or no name at all."""
    if value == NULL:
        return None
    if value < TEXT_KEY:
        return value
    code = value - TEXT_KEY
    text: str = strings[code if remap is None else int(remap[code])]
    if text.isascii() and text.isdigit() and len(text) <= 20:
        return int(text)
    return None if raws[code] == (RAW, b"null") else text


def _lane_names(tables: RankTables, names: SideTable) -> tuple[dict[int, str], dict[int, str]]:
    """Names that metadata events give: (lane -> process name, lane -> thread name); the last one counts."""
    metadata = tables.category[names.rows] == Category.METADATA
    found: tuple[dict[int, str], dict[int, str]] = ({}, {})
    for row, code in zip(names.rows[metadata].tolist(), names.columns["name"][metadata].tolist(), strict=True):
        kind = tables.text(int(tables.name[row]))
        if kind in ("process_name", "thread_name"):
            found[kind == "thread_name"][int(tables.lane[row])] = tables.text(code)
    return found


def _streams_from_lanes(tables: RankTables, twice: Any) -> None:
    """Device events whose stream is missing, or was given twice, run on the stream that their row is named after (tid 20, 'stream 7');
    those without a device on the one that their row's pid names.
    """
    on_device = np.isin(tables.category, [int(c) for c in DEVICE_WORK])
    streams = np.array([_stream_number(lane.tid) for lane in tables.lanes], np.int32)
    rows = np.flatnonzero(on_device & ((tables.stream == NULL32) | twice))
    named = streams[tables.lane[rows]]
    tables.stream[rows] = np.where(named != NULL32, named, tables.stream[rows])
    devices = np.array([_device_number(lane.pid) for lane in tables.lanes], np.int32)
    rows = np.flatnonzero(on_device & (tables.device == NULL32))
    tables.device[rows] = devices[tables.lane[rows]]


def _stream_number(tid: int | str | None) -> int:
    if isinstance(tid, int):
        return tid if 0 <= tid < 2**31 - 1 else NULL32
    found = re.fullmatch(r"(?:stream )?(\d{1,9})", tid or "")
    return int(found.group(1)) if found else NULL32


def _device_number(pid: int | str | None) -> int:
    return pid if isinstance(pid, int) and 0 <= pid < _MOST_DEVICES else NULL32
