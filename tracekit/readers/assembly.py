"""Blocks of many workers to the tables of one trace: common codes, joined columns, decoded strings, named lanes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tracekit.readers import tolerant
from tracekit.readers.keys import NAMES_TABLE, SIDE_TABLES
from tracekit.readers.pool import ESCAPED, RAW
from tracekit.readers.scan import (
    NARROW_DEVICE,
    NARROW_LANE,
    NARROW_NAME,
    NARROW_STREAM,
    SMALL_CATEGORY,
    SMALL_PHASE,
    TEXT_KEY,
    TWICE_BIT,
    WIDE_CORRELATION,
    WIDE_DUR,
    WIDE_EXTERNAL_ID,
    WIDE_TS,
)
from tracekit.readers.worker import Block, Worker
from tracekit.trace.events import Category, Coverage, Int32Array, Int64Array, Lane, RankTables, SideTable, side_dtype
from tracekit.units import NULL, NULL32

_ON_DEVICE = [int(c) for c in (Category.KERNEL, Category.MEMCPY, Category.MEMSET)]
_MOST_DEVICES = 1024  # a pid of a device event below this is the device's number
_TEXT = ("str", "json")


class Assembly:
    """Takes blocks in the order of the file; ``finish`` makes tables of them, once."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers
        self._blocks: list[Block] = []
        self._codes: dict[tuple[int, bytes], int] = {}
        self._code_maps = [np.empty(0, np.int32) for _ in workers]
        self._lanes: dict[tuple[int, int], int] = {}
        self._lane_maps = [np.empty(0, np.int32) for _ in workers]
        self._rows = 0
        #: How many names needed what: ``utf8`` bytes replaced, ``literal`` backslashes kept.
        self.odd_strings = {"utf8": 0, "literal": 0}

    def __len__(self) -> int:
        return self._rows

    def add(self, number: int, block: Block) -> None:
        """Take over a block of worker ``number``; its codes become common codes, in place."""
        codes, lanes = self._translation(number)
        block.narrow[NARROW_NAME] = codes[block.narrow[NARROW_NAME]]
        block.narrow[NARROW_LANE] = lanes[block.narrow[NARROW_LANE]]
        for (rows, columns), kinds in zip(block.side, SIDE_TABLES.values(), strict=True):
            rows += self._rows
            for values, kind in zip(columns, kinds.values(), strict=True):
                if kind in _TEXT and len(values):
                    values[:] = codes[np.where(values == NULL, 0, values)]
        self._rows += len(block)
        self._blocks.append(block)

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
        """Join everything. The blocks give back each column when it is joined, so that no column is held twice for long."""
        strings, remap = self._strings()
        wide = [self._joined("wide", i) for i in range(4)]
        base = metadata.get("baseTimeNanoseconds", 0)
        if base:
            np.add(wide[WIDE_TS], base, out=wide[WIDE_TS], where=wide[WIDE_TS] != NULL)
        narrow = [self._joined("narrow", i) for i in range(4)]
        small = [self._joined("small", i) for i in range(2)]
        if remap is not None:
            narrow[NARROW_NAME] = remap[narrow[NARROW_NAME]]
        side = {name: self._side(i, kinds, remap) for i, (name, kinds) in enumerate(SIDE_TABLES.items())}
        names = side.pop(NAMES_TABLE)
        coverage.events = self._rows
        tables = RankTables(
            ts=wide[WIDE_TS],
            dur=wide[WIDE_DUR],
            name=narrow[NARROW_NAME],
            category=small[SMALL_CATEGORY].view(np.int8),
            phase=small[SMALL_PHASE] & (TWICE_BIT - 1),
            lane=narrow[NARROW_LANE],
            correlation=wide[WIDE_CORRELATION],
            external_id=wide[WIDE_EXTERNAL_ID],
            stream=narrow[NARROW_STREAM],
            device=narrow[NARROW_DEVICE],
            side=side,
            strings=strings,
            lanes=(),
            metadata=metadata,
            coverage=coverage,
        )
        tables.lanes = self._named_lanes(tables, names, remap)
        _streams_from_lanes(tables, small[SMALL_PHASE] >= TWICE_BIT)
        return tables

    def _joined(self, part: str, index: int) -> Any:
        """One column of all blocks, which lose it."""
        columns = [getattr(block, part)[index] for block in self._blocks]
        for block in self._blocks:
            getattr(block, part)[index] = columns[0][:0]
        return np.concatenate(columns) if columns else np.empty(0)

    def _side(self, index: int, kinds: dict[str, Any], remap: Any) -> SideTable:
        parts = [block.side[index] for block in self._blocks if len(block.side[index][0])]
        for block in self._blocks:
            block.side[index] = _NO_SIDE
        columns = {}
        for column, (name, kind) in enumerate(kinds.items()):
            joined = np.empty(sum(len(rows) for rows, _ in parts), side_dtype(kind))
            at = 0
            for rows, values in parts:
                joined[at : at + len(rows)] = values[column]
                at += len(rows)
            columns[name] = remap[joined] if remap is not None and kind in _TEXT else joined
        return SideTable(np.concatenate([rows for rows, _ in parts]) if parts else np.empty(0, np.int64), columns)

    def _strings(self) -> tuple[list[str], Any]:
        """Decoded strings, and the translation of codes when two raw spellings are one string (else None)."""
        escaped = [raw for kind, raw in self._codes if kind == ESCAPED]
        literal = any(tolerant.has_literal_backslash(raw) for raw in escaped)
        self.odd_strings["literal"] = len(escaped) if literal else 0
        decoded = []
        for kind, raw in self._codes:
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                self.odd_strings["utf8"] += 1
                text = raw.decode("utf-8", "replace")
            decoded.append(tolerant.decode_string(raw, literal) if kind == ESCAPED else text)
        distinct = dict.fromkeys(decoded)
        if len(distinct) == len(decoded):
            return decoded, None
        places = {text: i for i, text in enumerate(distinct)}
        return list(distinct), np.array([places[text] for text in decoded], np.int32)

    def _named_lanes(self, tables: RankTables, names: SideTable, remap: Any) -> list[Lane]:
        process, thread = _lane_names(tables, names)
        raws = list(self._codes)
        keys = [tuple(_lane_value(value, raws, tables.strings, remap) for value in pair) for pair in self._lanes]
        of_process = {keys[lane][0]: text for lane, text in process.items()}
        return [
            Lane(pid, tid, process.get(i, of_process.get(pid, "")), thread.get(i, ""))  # type: ignore[arg-type]
            for i, (pid, tid) in enumerate(keys)
        ]


_NO_SIDE: tuple[Int64Array, Int64Array] = (np.empty(0, np.int64), np.empty((0, 0), np.int64))


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
    on_device = np.isin(tables.category, _ON_DEVICE)
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
