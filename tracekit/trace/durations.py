"""Times that cannot be true: events without an end, kernels at time 0, kernels that outlast everything around them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekit.trace.events import BoolArray, Category, Int64Array, RankTables
from tracekit.units import NS_PER_MS, NS_PER_S, NULL

#: Kernels of one stream overlap legally by microseconds (programmatic dependent launch); this is far beyond.
ILLEGAL_OVERLAP_NS = NS_PER_MS
#: ... and it must run over this many kernels that start after it.
ILLEGAL_FOLLOWERS = 3
#: Times further than this from the bulk of the trace belong to another epoch (a stamp that was never set).
FOREIGN_NS = 86_400 * NS_PER_S

_HOST = (Category.OPERATOR, Category.USER_ANNOTATION, Category.RUNTIME, Category.PYTHON)
_DEVICE = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)


@dataclass(frozen=True)
class Cleaned:
    """One entry a device row. ``timeless`` rows have no usable start or end and must be left out."""

    end: Int64Array
    suspicious: BoolArray
    timeless: BoolArray


def span(tables: RankTables) -> tuple[int, int]:
    """First start and last end [ns] of what happened on host and device; (0, 0) when nothing has a time.

    Unfinished events count with their start, device work only as far as it can be true (see ``clean``).
    """
    low, high = _host_window(tables)
    rows = tables.rows(*_DEVICE)
    rows = rows[_in_epoch(tables, rows, low, high) & (tables.dur[rows] >= 0)]
    if not len(rows):
        return low, high
    start = tables.ts[rows]
    end = start + tables.dur[rows]
    suspicious, _ = _impossible(tables, rows, start, end, (low, high))
    end = np.where(suspicious, start, end)
    return (min(low, int(start.min())) if high else int(start.min())), max(high, int(end.max()))


def clean(tables: RankTables, rows: Int64Array, span: tuple[int, int]) -> Cleaned:
    """Ends of device rows that can be true. Notes in ``tables.coverage`` how many could not.

    Suspicious: a duration longer than the whole window that runs into the next work of its stream, or one that runs over several kernels
    of its stream by more than overlap at launch explains. Such work ends where the next of its stream starts.
    """
    low, high = _host_window(tables) if any(span) else span
    timeless = ~_in_epoch(tables, rows, low, high)
    unfinished = ~timeless & (tables.dur[rows] < 0)
    usable = ~timeless & ~unfinished
    end = np.full(len(rows), NULL, np.int64)
    suspicious = np.zeros(len(rows), np.bool_)
    chosen = rows[usable]
    start = tables.ts[chosen]
    ends = start + tables.dur[chosen]
    odd, following = _impossible(tables, chosen, start, ends, span)
    end[usable] = np.where(odd, np.minimum(following, max(span[1], int(start.max()) if len(start) else 0)), ends)
    suspicious[usable] = odd
    _note(tables, rows, timeless, suspicious)
    return Cleaned(end, suspicious, timeless | unfinished)


def _note(tables: RankTables, rows: Int64Array, timeless: BoolArray, suspicious: BoolArray) -> None:
    count = int(timeless.sum())
    if count:
        zero = " (ts 0)" if (tables.ts[rows[timeless]] <= 0).any() or _at_base(tables, rows[timeless]) else ""
        tables.coverage.note(f"{_kernels(count)} without a time{zero}: counted, left out of every sum")
    count = int(suspicious.sum())
    if count:
        tables.coverage.note(
            f"{_kernels(count)} with an impossible duration (longer than the window, or over the next kernels of the stream): "
            "cut where the next work of the stream starts"
        )
    complete = (tables.phase == ord("X")) & (tables.dur < 0) & (tables.category != Category.METADATA)
    count = int(complete.sum())
    if count:
        events = "events have" if count > 1 else "event has"
        tables.coverage.note(f"{count} {events} no end (negative or missing duration): left out of every sum")


def _kernels(count: int) -> str:
    return f"{count} kernel{'s' if count > 1 else ''}"


def _at_base(tables: RankTables, rows: Int64Array) -> bool:
    base = int(tables.metadata.get("baseTimeNanoseconds") or 0) if str(tables.metadata.get("baseTimeNanoseconds", "")).isdigit() else 0
    return bool(len(rows)) and bool((tables.ts[rows] == base).any())


def _host_window(tables: RankTables) -> tuple[int, int]:
    """(first start, last end) of host events near the bulk of them; (0, 0) when there are none."""
    rows = tables.rows(*_HOST)
    rows = rows[tables.ts[rows] != NULL]
    if not len(rows):
        rows = tables.rows(*_DEVICE)
        rows = rows[tables.ts[rows] != NULL]
        if not len(rows):
            return 0, 0
    start = tables.ts[rows]
    near = np.abs(start - np.int64(np.partition(start, len(start) // 2)[len(start) // 2])) < FOREIGN_NS
    start = start[near]
    duration = tables.dur[rows][near]
    duration = np.where((duration < 0) | (duration > FOREIGN_NS), 0, duration)
    return int(start.min()), int((start + duration).max())


def _in_epoch(tables: RankTables, rows: Int64Array, low: int, high: int) -> BoolArray:
    start = tables.ts[rows]
    inside: BoolArray = (start != NULL) & (start > low - FOREIGN_NS) & (start < high + FOREIGN_NS)
    return inside


def _impossible(
    tables: RankTables, rows: Int64Array, start: Int64Array, end: Int64Array, window: tuple[int, int]
) -> tuple[BoolArray, Int64Array]:
    """(flag, start of the next work of the same stream) of each row; a very late time where nothing follows."""
    late = np.iinfo(np.int64).max
    following = np.full(len(rows), late, np.int64)
    third = np.full(len(rows), late, np.int64)
    order = np.lexsort((start, tables.stream[rows], tables.device[rows]))
    same = (np.diff(tables.stream[rows][order]) == 0) & (np.diff(tables.device[rows][order]) == 0)
    following[order[:-1][same]] = start[order[1:][same]]
    if len(rows) > ILLEGAL_FOLLOWERS:
        n = ILLEGAL_FOLLOWERS
        all_same = np.lib.stride_tricks.sliding_window_view(same, n).all(axis=1)
        third[order[:-n][all_same]] = start[order[n:][all_same]]
    length = window[1] - window[0]
    beyond = (end - start > length) & (end > following)
    covers = (end > third) & (third < late) & (end - np.minimum(following, end) > ILLEGAL_OVERLAP_NS)
    covers &= ~_shares_launch(tables, rows)
    absurd = end - start > FOREIGN_NS
    return beyond | covers | absurd, following


def _shares_launch(tables: RankTables, rows: Int64Array) -> BoolArray:
    """Kernels of one graph launch may run side by side though they report one stream."""
    correlation = tables.correlation[rows]
    _, inverse, count = np.unique(correlation, return_inverse=True, return_counts=True)
    return (count[inverse] > 1) & (correlation > 0)
