"""Times that cannot be true: events without an end, kernels at time 0, kernels that outlast everything around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tracekit.notes import note
from tracekit.trace.events import DEVICE_WORK, BoolArray, Category, Int64Array, RankTables
from tracekit.units import NS_PER_MS, NS_PER_S, NULL

#: Kernels of one stream overlap legally by microseconds (programmatic dependent launch); this is far beyond.
ILLEGAL_OVERLAP_NS = NS_PER_MS
#: ... and, where the duration itself could be true, it must run over this many kernels that start after it.
ILLEGAL_FOLLOWERS = 3
#: A duration this long, this many times the host's window and past its end is not believed even where nothing follows.
LONG_NS = NS_PER_S
LONG_WINDOWS = 10
#: Times further than this from the bulk of the trace belong to another epoch (a stamp that was never set).
FOREIGN_NS = 86_400 * NS_PER_S
#: An empty event with the stamp 0 this long before everything else was never stamped.
UNSET_NS = NS_PER_S

_HOST = (Category.OPERATOR, Category.USER_ANNOTATION, Category.RUNTIME, Category.PYTHON)
_LATE = int(np.iinfo(np.int64).max)


@dataclass(frozen=True)
class Cleaned:
    """One entry a device row. ``timeless`` rows have no usable start or end and must be left out."""

    end: Int64Array
    suspicious: BoolArray
    timeless: BoolArray


class HostWindow(NamedTuple):
    """First start and last end [ns] of the host's events; without any (``hosted`` false) first and last start on the device."""

    low: int
    high: int
    hosted: bool


def span(tables: RankTables) -> tuple[int, int]:
    """First start and last end [ns] of what happened on host and device; (0, 0) when nothing has a time.

    Unfinished events count with their start and are noted in ``tables.coverage``; device work counts only as far as it can be true.
    """
    _note_unfinished(tables)
    window = host_window(tables)
    rows = tables.rows(*DEVICE_WORK)
    rows = rows[~_foreign(tables, rows, window) & (tables.dur[rows] >= 0)]
    if not len(rows):
        return window.low, window.high
    start = tables.ts[rows]
    impossible, _ = _impossible(tables, rows, window)
    end = np.where(impossible, start, start + tables.dur[rows])
    return min(window.low, int(start.min())), max(window.high, int(end.max()))


def clean(tables: RankTables, rows: Int64Array, span: tuple[int, int]) -> Cleaned:
    """Ends of device rows that can be true. Notes in ``tables.coverage`` how many could not.

    Suspicious: a duration longer than the whole window that runs far into the next work of its stream, or one that runs over several
    kernels of its stream by more than overlap at launch explains. Such work gets the median duration of its name, if others of that name
    are sound, and ends where the next of its stream starts at the latest.
    """
    window = host_window(tables)
    timeless = _foreign(tables, rows, window)
    usable = ~timeless & (tables.dur[rows] >= 0)
    end = np.full(len(rows), NULL, np.int64)
    suspicious = np.zeros(len(rows), np.bool_)
    chosen = rows[usable]
    impossible, following = _impossible(tables, chosen, window)
    ends = tables.ts[chosen] + tables.dur[chosen]
    if impossible.any():
        likely = _likely_end(tables, chosen, impossible, following)
        ends[impossible] = np.minimum(likely, np.maximum(tables.ts[chosen[impossible]], span[1]))
    end[usable] = ends
    suspicious[usable] = impossible
    _note(tables, rows[timeless], rows[suspicious])
    return Cleaned(end, suspicious, ~usable)


def host_window(tables: RankTables) -> HostWindow:
    """When the host's events happened: those near the bulk of them, with durations of less than a day."""
    return tables.held("host_window", lambda: _host_window(tables))


def _host_window(tables: RankTables) -> HostWindow:
    rows = tables.rows(*_HOST)
    rows = rows[tables.ts[rows] != NULL]
    hosted = bool(len(rows))
    if not hosted:
        rows = tables.rows(*DEVICE_WORK)
        rows = rows[tables.ts[rows] != NULL]
    stamped = rows[~((tables.ts[rows] == _zero(tables)) & (tables.dur[rows] <= 0))]
    rows = stamped if len(stamped) else rows
    if not len(rows):
        return HostWindow(0, 0, False)
    start = tables.ts[rows]
    near = np.abs(start - np.partition(start, len(start) // 2)[len(start) // 2]) < FOREIGN_NS
    start, duration = start[near], tables.dur[rows[near]]
    if not hosted:
        return HostWindow(int(start.min()), int(start.max()), False)
    duration = np.where((duration < 0) | (duration > FOREIGN_NS), 0, duration)
    return HostWindow(int(start.min()), int((start + duration).max()), True)


def _zero(tables: RankTables) -> int:
    """What the stamp 0 became when the reader added the file's base."""
    text = str(tables.metadata.get("baseTimeNanoseconds"))
    zero = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
    return zero if zero < _LATE else 0


def _foreign(tables: RankTables, rows: Int64Array, window: HostWindow) -> BoolArray:
    """Rows whose time is missing, of another epoch, or was never set."""
    start = tables.ts[rows]
    unset = (start == _zero(tables)) & (tables.dur[rows] == 0) & (start < window.low - UNSET_NS)
    inside = (start != NULL) & (start > window.low - FOREIGN_NS) & (start < window.high + FOREIGN_NS)
    foreign: BoolArray = unset | ~inside
    return foreign


def _impossible(tables: RankTables, rows: Int64Array, window: HostWindow) -> tuple[BoolArray, Int64Array]:
    """(flag, start of the next work of the same stream) of each row of known start and duration; a very late time where nothing follows."""
    start, duration = tables.ts[rows], tables.dur[rows]
    end = start + duration
    following = np.full(len(rows), _LATE, np.int64)
    order = np.lexsort((start, tables.stream[rows], tables.device[rows]))
    same = (np.diff(tables.stream[rows][order]) == 0) & (np.diff(tables.device[rows][order]) == 0)
    following[order[:-1][same]] = start[order[1:][same]]
    length = window.high - window.low
    impossible: BoolArray = duration > FOREIGN_NS
    if window.hosted:
        impossible |= (duration > max(LONG_NS, LONG_WINDOWS * length)) & (end > window.high)
    over = (following < _LATE) & (end > following) & (end - following > ILLEGAL_OVERLAP_NS)
    if over.any():
        impossible |= over & (duration > length)
        impossible |= over & _runs_over(tables, rows, start, end, order, same)
    return impossible, following


def _runs_over(tables: RankTables, rows: Int64Array, start: Int64Array, end: Int64Array, order: Int64Array, same: BoolArray) -> BoolArray:
    """Work that outlasts the start of several that follow it on its stream, though neither a graph nor other devices explain it."""
    nth = np.full(len(rows), _LATE, np.int64)
    if len(rows) > ILLEGAL_FOLLOWERS:
        n = ILLEGAL_FOLLOWERS
        all_same = np.lib.stride_tricks.sliding_window_view(same, n).all(axis=1)
        nth[order[:-n][all_same]] = start[order[n:][all_same]]
    over: BoolArray = end > nth
    return over & ~_shares_launch(tables, rows) & ~_waits_for_others(tables, rows)


def _shares_launch(tables: RankTables, rows: Int64Array) -> BoolArray:
    """Kernels of one graph launch may run side by side though they report one stream."""
    correlation = tables.correlation[rows]
    _, inverse, count = np.unique(correlation, return_inverse=True, return_counts=True)
    return (count[inverse] > 1) & (correlation > 0)


def _waits_for_others(tables: RankTables, rows: Int64Array) -> BoolArray:
    """Communication lasts as long as the slowest rank lets it; where queues share a stream's number it may run beside compute."""
    codes = np.unique(tables.name[rows])
    named = codes[["ccl" in tables.text(int(code)).lower() for code in codes]]
    waits: BoolArray = np.isin(tables.name[rows], named) | (tables.side["communication"].at(rows) >= 0)
    return waits


def _likely_end(tables: RankTables, rows: Int64Array, impossible: BoolArray, following: Int64Array) -> Int64Array:
    """A believable end of each impossible row: its start where nothing is known."""
    start, name = tables.ts[rows[impossible]], tables.name[rows[impossible]]
    limit = following[impossible]
    sound = rows[~impossible & np.isin(tables.name[rows], name)]
    sound = sound[np.lexsort((tables.dur[sound], tables.name[sound]))]
    first = np.searchsorted(tables.name[sound], name, side="left")
    count = np.searchsorted(tables.name[sound], name, side="right") - first
    end = np.where(limit < _LATE, limit, start)
    known = count > 0
    median = tables.dur[sound[first[known] + count[known] // 2]]
    end[known] = np.minimum(start[known] + median, limit[known])
    return end


def _note(tables: RankTables, timeless: Int64Array, suspicious: Int64Array) -> None:
    if len(timeless):
        unset = bool(np.isin(tables.ts[timeless], [0, _zero(tables)]).any())
        tables.coverage.note(note("work_without_time", len(timeless), kernels=_kernels(tables, timeless), unset=unset))
    if len(suspicious):
        tables.coverage.note(note("impossible_durations", len(suspicious), kernels=_kernels(tables, suspicious)))


def _note_unfinished(tables: RankTables) -> None:
    unfinished = (tables.phase == ord("X")) & (tables.dur < 0) & (tables.category != Category.METADATA)
    count = int(unfinished.sum())
    if count:
        tables.coverage.note(note("events_without_end", count))


def _kernels(tables: RankTables, rows: Int64Array) -> int:
    """How many of the rows are kernels; the others are copies."""
    return int((tables.category[rows] == Category.KERNEL).sum())
