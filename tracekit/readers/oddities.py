"""What events of some writers mean, once they are columns: pairs of begin and end, marks on a device that are no work."""

from __future__ import annotations

import numpy as np

from tracekit.notes import note
from tracekit.trace.events import Category, Int64Array, RankTables
from tracekit.units import NULL

_BEGIN, _END, _COMPLETE = ord("B"), ord("E"), ord("X")
#: Events on a device in which it waits or leaves a mark (MTIA's command processor writes them among its work), and those that copy.
_MARKS = frozenset({"event_wait", "event_record", "wait_event", "record_event", "stream_wait_event"})
_COPIES = frozenset({"dma_request"})


def settle(tables: RankTables) -> None:
    """Change the tables in place."""
    _pair(tables)
    kernels = np.flatnonzero(tables.category == Category.KERNEL)
    marks = kernels[tables.each_text(tables.name[kernels], lambda text: text in _MARKS)]
    tables.category[marks] = Category.SYNC
    copies = kernels[tables.each_text(tables.name[kernels], lambda text: text in _COPIES)]
    tables.category[copies] = Category.MEMCPY


def _pair(tables: RankTables) -> None:
    """``ph`` B and E on one thread are one complete event: an end closes the latest begin that is still open.

    Along a thread in order of time a begin goes one level down and an end one up, so a begin at a level belongs to the next end there.
    """
    rows = np.flatnonzero((tables.phase == _BEGIN) | (tables.phase == _END))
    rows = rows[tables.ts[rows] != NULL].astype(np.int64)
    if not len(rows):
        return
    begins = tables.phase[rows] == _BEGIN
    order = np.lexsort((rows, tables.ts[rows], tables.lane[rows]))
    rows, begins, lane = rows[order], begins[order], tables.lane[rows][order]
    level = _levels(begins, lane)
    by_level = np.lexsort((np.arange(len(rows)), level, lane))
    first, second = by_level[:-1], by_level[1:]
    pair = (lane[first] == lane[second]) & (level[first] == level[second]) & begins[first] & ~begins[second]
    opened, closed = rows[first[pair]], rows[second[pair]]
    tables.dur[opened] = tables.ts[closed] - tables.ts[opened]
    tables.phase[opened] = _COMPLETE
    lone = len(rows) - 2 * len(opened)
    if lone:
        tables.coverage.note(note("lone_begins_and_ends", lone))


def _levels(begins: np.ndarray[tuple[int], np.dtype[np.bool_]], lane: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Int64Array:
    """Nesting level of each begin and of the end that may close it, counted from the start of its thread."""
    change = np.where(begins, 1, -1)
    depth = np.cumsum(change)
    opens = np.append(True, lane[1:] != lane[:-1])
    before = np.where(opens, depth - change, 0)[np.maximum.accumulate(np.where(opens, np.arange(len(lane)), 0))]
    level: Int64Array = depth - before - begins  # of a begin: before it; of an end: behind it
    return level
