"""A Kineto trace file to RankTables: any layout, any packing, exact times, everything odd counted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit.errors import InputError
from tracekit.readers import tolerant
from tracekit.readers.sources import Source, clean
from tracekit.trace.events import SIDE_COLUMNS, Category, Coverage, Lane, RankTables, SideTable, side_dtype
from tracekit.units import NULL, NULL32

if TYPE_CHECKING:
    from tracekit.readers.stream import Outcome
    from tracekit.readers.worker import Block, Worker

_DEVICE = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)
#: Events that say nothing of the program: names of threads, the profiler's own span and its instants.
_NOTHING_HAPPENED = [int(c) for c in (Category.METADATA, Category.TRACE, Category.OTHER)]
_REMEDY = "give a trace written by torch.profiler (export_chrome_trace or tensorboard_trace_handler)"


def read_trace(
    source: Source, *, threads: int = 2, progress: Callable[[int], None] | None = None, chunk: int | None = None
) -> RankTables:
    """Tables of one trace file; repairs and losses are noted in ``coverage``.

    ``progress`` gets the number of stored bytes read since its last call. Raises InputError when nothing of the file can be used.
    """
    from tracekit.readers import keys, stream
    from tracekit.readers.compressed import TextStream
    from tracekit.readers.recognise import read_errors, reason
    from tracekit.readers.worker import Worker

    size = stream.CHUNK if chunk is None else chunk
    spec = keys.Spec()
    workers = [Worker(spec, size) for _ in range(max(1, threads))]
    table = _Assembly(workers, spec)
    try:
        with source.open() as raw:
            text = TextStream(raw, progress)
            events = stream.EventStream(text, workers, size)
            for worker, block in events.blocks():
                table.add(worker, block)
            text.close()
    except read_errors() as error:
        raise InputError(f"{clean(source.name)}: cannot be read ({reason(error)})", "check the file and its permissions") from error
    coverage = Coverage(source.url)
    _refuse_useless(source, events.outcome, text.damage, len(table))
    metadata, problems = tolerant.parse_metadata(events.outcome.head, events.outcome.tail)
    for problem in problems:
        coverage.note(problem, "repaired")
    tables = table.finish(metadata, coverage)
    _note(coverage, events.outcome, text.damage, table)
    if np.isin(tables.category, _NOTHING_HAPPENED).all() and not (tables.phase == ord("X")).any():
        raise InputError(f"{clean(source.name)} holds no events, only their metadata", "profile at least one active step")
    if events.outcome.bare_list:
        _read_as_autograd(tables)
    return tables


def warm_up() -> None:
    """Compile the scanner (a few seconds, once a machine) so that the first trace does not wait for it."""
    from tracekit.readers import keys, scan
    from tracekit.readers.worker import Worker, padded

    text = b'{"ph":"X","ts":1.5,"args":{"stream":7,"dtype":"x","Input Dims":[[1]]}}]'
    scan.find_events(padded(b'{"traceEvents":['), 0, 16)
    Worker(keys.Spec(), 1 << 12).parse(padded(text), 0, len(text))


def _refuse_useless(source: Source, outcome: Outcome, damage: str, rows: int) -> None:
    name = clean(source.name)
    if outcome.bytes_read == 0:
        what = f"is damaged: {damage}" if damage else "is empty"
        raise InputError(f"{name} {what}", "profile again, or copy the file anew")
    if not outcome.found:
        if outcome.head.strip(b" \t\r\n\x00") in (b"{}", b""):
            raise InputError(f"{name} is empty: it holds no events", _REMEDY)
        if outcome.head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
            raise InputError(f"{name} holds no events (JSON without traceEvents)", _REMEDY)
        raise InputError(f"{name} is not a trace (neither JSON nor packed JSON)", _REMEDY)
    if rows == 0:
        cut = ": it is truncated before its first event" if outcome.truncated else ""
        raise InputError(f"{name} holds no events{cut}", "profile at least one active step")


def _note(coverage: Coverage, outcome: Outcome, damage: str, table: _Assembly) -> None:
    from tracekit.compiled import KEPT
    from tracekit.readers import keys

    if not KEPT:
        coverage.note("the compiled reader cannot be kept on disk, so every run compiles it anew: set NUMBA_CACHE_DIR to a writable folder")
    counts = outcome.counts
    coverage.arrows = int(counts[keys.ARROWS])
    repairs = dict(outcome.repairs)
    cut = repairs.pop("truncated", 0)
    for sentence in tolerant.sentences(repairs):
        coverage.note(sentence, "repaired")
    commas, twice = int(counts[keys.COMMAS]), int(counts[keys.DUPLICATES])
    if commas:
        coverage.note(f"{commas} trailing {_plural(commas, 'comma was', 'commas were')} ignored (before a closing bracket)", "repaired")
    if twice:
        events = _plural(twice, "event has", "events have")
        coverage.note(f"{twice} {events} a key twice: the last value is used, for a stream the row's tid", "repaired")
    for key in ("utf8", "literal"):
        if table.odd_strings[key]:
            coverage.note(tolerant.sentence(key, table.odd_strings[key]), "repaired")
    if outcome.too_long:
        coverage.note("an event is longer than 256 MB: reading stopped there", "truncated")
    elif outcome.truncated or cut:
        why = f" ({damage})" if damage else ""
        coverage.note(f"the file is truncated{why}: the {coverage.events + coverage.arrows} events before the cut are used", "truncated")
    elif damage:
        coverage.note(f"{damage} after the end of the trace", "repaired")


def _plural(count: int, one: str, many: str) -> str:
    return one if count == 1 else many


class _Assembly:
    """Collects blocks, translates each worker's codes to common ones, and joins the columns."""

    def __init__(self, workers: list[Worker], spec: Any) -> None:
        self._workers = workers
        self._spec = spec
        self._blocks: list[Block] = []
        self._codes: dict[tuple[int, bytes], int] = {}
        self._maps = [np.empty(0, np.int32) for _ in workers]
        self._lanes: dict[tuple[int, int], int] = {}
        self._lane_maps = [np.empty(0, np.int32) for _ in workers]
        self._rows = 0
        self.odd_strings = {"utf8": 0, "literal": 0}

    def __len__(self) -> int:
        return self._rows

    def add(self, number: int, block: Block) -> None:
        """Take over a block; its codes become common codes in place."""
        from tracekit.readers import keys

        codes, lanes = self._translation(number)
        block.narrow[keys.NAME] = codes[block.narrow[keys.NAME]]
        block.narrow[keys.LANE] = lanes[block.narrow[keys.LANE]]
        for index, (rows, columns) in enumerate(block.side):
            rows += self._rows
            for column, kind in enumerate(_kinds(self._spec.side_tables[index])):
                if kind in ("str", "json"):
                    values = columns[column]
                    columns[column] = np.where(values == NULL, 0, codes[np.maximum(values, 0)])
        self._rows += len(block)
        self._blocks.append(block)

    def _translation(self, number: int) -> tuple[Any, Any]:

        worker = self._workers[number]
        codes, lanes = self._maps[number], self._lane_maps[number]
        if len(codes) < int(worker.pool.used[0]):
            new = [self._codes.setdefault(entry, len(self._codes)) for entry in worker.pool.since(len(codes))]
            codes = self._maps[number] = np.concatenate([codes, np.array(new, np.int32)])
        if len(lanes) < worker.lane_count:
            pairs = worker.lanes[:, len(lanes) : worker.lane_count].T.tolist()
            common = [tuple(_lane_key(v, codes) for v in pair) for pair in pairs]
            new = [self._lanes.setdefault(key, len(self._lanes)) for key in common]  # type: ignore[arg-type]
            lanes = self._lane_maps[number] = np.concatenate([lanes, np.array(new, np.int32)])
        return codes, lanes

    def finish(self, metadata: dict[str, Any], coverage: Coverage) -> RankTables:
        """Join everything; the blocks are given back column by column, so no column is held twice for long."""
        from tracekit.readers import keys

        strings, remap = self._strings()
        base = metadata.get("baseTimeNanoseconds", 0)
        wide = [self._column("wide", i) for i in range(4)]
        kind = self._column("narrow", keys.KIND)
        narrow = {i: self._column("narrow", i) for i in (keys.NAME, keys.LANE, keys.STREAM, keys.DEVICE)}
        side = {table: self._side(index, table) for index, table in enumerate(self._spec.side_tables)}
        self._blocks.clear()
        if isinstance(base, int) and base:
            np.add(wide[keys.TS], base, out=wide[keys.TS], where=wide[keys.TS] != NULL)
        if remap is not None:
            narrow[keys.NAME] = remap[narrow[keys.NAME]]
            side = {name: _remapped(table, name, remap) for name, table in side.items()}
        names = side.pop(keys.NAMES_TABLE)
        coverage.events = self._rows
        tables = RankTables(
            ts=wide[keys.TS],
            dur=wide[keys.DUR],
            name=narrow[keys.NAME],
            category=(kind & 0xFF).astype(np.int8),
            phase=((kind >> 8) & 0xFF).astype(np.uint8),
            lane=narrow[keys.LANE],
            correlation=wide[keys.CORRELATION],
            external_id=wide[keys.EXTERNAL_ID],
            stream=narrow[keys.STREAM],
            device=narrow[keys.DEVICE],
            side=side,
            strings=strings,
            lanes=(),
            metadata=metadata,
            coverage=coverage,
        )
        tables.lanes = self._named_lanes(tables, names, remap)
        _streams_from_lanes(tables, (kind & keys.FLAG_DUPLICATE) != 0)
        return tables

    def _column(self, part: str, index: int) -> Any:
        columns = [getattr(block, part)[index] for block in self._blocks]
        dtype = np.int64 if part == "wide" else np.int32
        joined = np.concatenate(columns) if columns else np.empty(0, dtype)
        for block in self._blocks:
            getattr(block, part)[index] = columns[0][:0]
        return joined

    def _side(self, index: int, table: str) -> SideTable:
        parts = [block.side[index] for block in self._blocks if len(block.side[index][0])]
        kinds = _kinds(table)
        names = list(SIDE_COLUMNS.get(table, {"name": "str"}))
        if not parts:
            return SideTable(np.empty(0, np.int64), {n: np.empty(0, side_dtype(k)) for n, k in zip(names, kinds, strict=True)})
        columns = {
            name: np.concatenate([p[1][i] for p in parts]).astype(side_dtype(kind), copy=False)
            for i, (name, kind) in enumerate(zip(names, kinds, strict=True))
        }
        return SideTable(np.concatenate([p[0] for p in parts]), columns)

    def _strings(self) -> tuple[list[str], Any]:
        """Decoded strings, and the translation of codes when two raw spellings are one string (else None)."""
        from tracekit.readers.pool import ESCAPED

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
                raw = text.encode()
            decoded.append(tolerant.decode_string(raw, literal) if kind == ESCAPED else text)
        distinct = dict.fromkeys(decoded)
        if len(distinct) == len(decoded):
            return decoded, None
        places = {text: i for i, text in enumerate(distinct)}
        return list(distinct), np.array([places[text] for text in decoded], np.int32)

    def _named_lanes(self, tables: RankTables, names: SideTable, remap: Any) -> list[Lane]:
        process, thread = tables_names(tables, names)
        places = [tuple(_lane_value(v, tables.strings, remap) for v in pair) for pair in self._lanes]
        by_pid = {places[lane][0]: text for lane, text in process.items()}
        return [
            Lane(pid, tid, process.get(i, by_pid.get(pid, "")), thread.get(i, ""))  # type: ignore[arg-type]
            for i, (pid, tid) in enumerate(places)
        ]


def _kinds(table: str) -> list[str]:
    return list(SIDE_COLUMNS.get(table, {"name": "str"}).values())


def _remapped(table: SideTable, name: str, remap: Any) -> SideTable:
    kinds = SIDE_COLUMNS.get(name, {"name": "str"})
    return SideTable(table.rows, {c: remap[v] if kinds[c] in ("str", "json") else v for c, v in table.columns.items()})


def _lane_key(value: int, codes: Any) -> int:
    """A pid or tid as the pass stores it, with a string's code made common."""
    from tracekit.readers import keys

    return value if value < keys.STRING_KEY else keys.STRING_KEY + int(codes[value - keys.STRING_KEY])


def _lane_value(value: int, strings: Any, remap: Any) -> int | str | None:
    from tracekit.readers import keys

    if value == NULL:
        return None
    if value < keys.STRING_KEY:
        return value
    code = value - keys.STRING_KEY
    text: str = strings[code if remap is None else int(remap[code])]
    return text


def tables_names(tables: RankTables, names: SideTable) -> tuple[dict[int, str], dict[int, str]]:
    """Names that metadata events give: (lane -> process name, lane -> thread name); the last one counts."""
    rows = names.rows[tables.category[names.rows] == Category.METADATA]
    codes = names.columns["name"][tables.category[names.rows] == Category.METADATA]
    found: tuple[dict[int, str], dict[int, str]] = ({}, {})
    for row, code in zip(rows.tolist(), codes.tolist(), strict=True):
        kind = tables.text(int(tables.name[row]))
        if kind in ("process_name", "thread_name"):
            found[kind == "thread_name"][int(tables.lane[row])] = tables.text(code)
    return found


def _streams_from_lanes(tables: RankTables, duplicate: Any) -> None:
    """Device events whose stream is missing, or was given twice, run on the stream that their row is named after (tid 20, 'stream 7');
    those without a device on the one that their row's pid names.
    """
    on_device = np.isin(tables.category, [int(c) for c in _DEVICE])
    streams = np.array([_stream_number(lane.tid) for lane in tables.lanes], np.int32)
    rows = np.flatnonzero(on_device & ((tables.stream == NULL32) | duplicate))
    named = streams[tables.lane[rows]]
    tables.stream[rows] = np.where(named != NULL32, named, tables.stream[rows])
    devices = np.array([lane.pid if isinstance(lane.pid, int) and 0 <= lane.pid < 1024 else NULL32 for lane in tables.lanes], np.int32)
    rows = np.flatnonzero(on_device & (tables.device == NULL32))
    tables.device[rows] = devices[tables.lane[rows]]


def _stream_number(tid: int | str) -> int:
    if isinstance(tid, int):
        return tid if 0 <= tid < 2**31 - 1 else NULL32
    found = re.fullmatch(r"(?:stream )?(\d{1,9})", tid or "")
    return int(found.group(1)) if found else NULL32


def _read_as_autograd(tables: RankTables) -> None:
    """A bare list may be the old autograd profiler's export: no categories, a process called 'CPU functions'."""
    functions = np.array([str(lane.pid).startswith("CPU functions") for lane in tables.lanes], np.bool_)
    if not functions.any():
        return
    rows = functions[tables.lane] & (tables.category == Category.OTHER)
    tables.category[rows] = Category.OPERATOR
    tables.coverage.note("this is an export of the old autograd profiler: operators only, no kernel or rank information")
