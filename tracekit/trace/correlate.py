"""Links between events of one rank: kernel to the host call that launched it, host call to what encloses it on its thread.

A kernel's ``External id`` is not used: in old traces it equals the correlation and names an unrelated operator.
"""

from __future__ import annotations

import numpy as np

from tracekit.trace.events import BoolArray, Category, Int32Array, Int64Array, RankTables
from tracekit.units import NULL

#: Host calls that put work on a device (CUDA, HIP, Level Zero); cudaEventQuery, cudaGraphInstantiate, ... can carry a correlation too.
_LAUNCHES = ("launch", "memcpy", "memset", "memorycopy", "memoryfill", "membuffer")


#: A correlation beyond this is an unsigned -1, or nonsense.
_LARGEST = 2**32 - 2


def usable(correlation: Int64Array) -> BoolArray:
    """Whether each correlation can link anything: 0, negative and out of range are what writers leave where they know none."""
    good: BoolArray = (correlation > 0) & (correlation <= _LARGEST)
    return good


def launches(tables: RankTables, rows: Int64Array) -> Int64Array:
    """The events row of the runtime call with the same correlation as each device row; -1 where there is none.

    Where several calls share a correlation, one whose name says that it launches is preferred, then the first in the file. Work and calls
    without a usable correlation are linked n-th with n-th, if there are equally many and no work begins before its call.
    """
    result = np.full(len(rows), -1, np.int64)
    calls = tables.rows(Category.RUNTIME)
    linked = usable(tables.correlation[calls])
    _by_order(tables, rows, calls[~linked], result)
    calls = calls[linked]
    if not len(calls) or not len(rows):
        return result
    keys = tables.correlation[calls]
    order = np.lexsort((tables.each_text(tables.name[calls], _rank_of, np.int8), keys))
    keys, calls = keys[order], calls[order]
    wanted = tables.correlation[rows]
    at = np.minimum(np.searchsorted(keys, wanted, side="left"), len(keys) - 1)
    found = (keys[at] == wanted) & usable(wanted)
    result[found] = calls[at[found]]
    return result


def _by_order(tables: RankTables, rows: Int64Array, calls: Int64Array, result: Int64Array) -> None:
    """Link device rows without a correlation to calls without one, in place."""
    lone = np.flatnonzero(~usable(tables.correlation[rows]))
    if not len(lone) or not len(calls):
        return
    calls = calls[tables.each_text(tables.name[calls], _rank_of, np.int8) == 0]
    if len(calls) != len(lone):
        return
    lone, calls = lone[np.argsort(tables.ts[rows[lone]], kind="stable")], calls[np.argsort(tables.ts[calls], kind="stable")]
    if (tables.ts[calls] <= tables.ts[rows[lone]]).all():
        result[lone] = calls


def _rank_of(name: str) -> int:
    lower = name.lower()
    return 0 if any(word in lower for word in _LAUNCHES) else 1


def enclosing(tables: RankTables, inner_rows: Int64Array, outer_rows: Int64Array) -> Int64Array:
    """For each inner row the innermost of ``outer_rows`` on the same lane whose [ts, ts + dur) holds the inner's ts; -1 for none.

    A row never encloses itself; of two identical intervals the earlier in the file is the outer one.
    """
    from tracekit.trace.sweep import innermost

    result = np.full(len(inner_rows), -1, np.int64)
    outer_rows = outer_rows[(tables.dur[outer_rows] > 0) & (tables.ts[outer_rows] != NULL)]
    if not len(outer_rows) or not len(inner_rows):
        return result
    start = tables.ts[outer_rows]
    end = start + tables.dur[outer_rows]
    order = nesting_order(tables.lane[outer_rows], start, end)
    own = _places(outer_rows, order, inner_rows)
    outer_rows, start, end = outer_rows[order], start[order], end[order]
    lane, time = tables.lane[inner_rows].astype(np.int64), tables.ts[inner_rows]
    queries = nesting_order(lane, time, -own)
    found = innermost(tables.lane[outer_rows].astype(np.int64), start, end, lane[queries], time[queries], own[queries])
    result[queries] = np.where(found >= 0, outer_rows[np.maximum(found, 0)], -1)
    return result


def _places(rows: Int64Array, order: Int64Array, wanted: Int64Array) -> Int64Array:
    """Where each wanted row stands in ``rows[order]``; their number for those that do not."""
    if (rows[1:] < rows[:-1]).any():
        by_row = np.argsort(rows, kind="stable")
        rows, order = rows[by_row], np.argsort(by_row, kind="stable")[order]
    place = np.empty(len(rows), np.int64)
    place[order] = np.arange(len(rows))
    at = np.minimum(np.searchsorted(rows, wanted), len(rows) - 1)
    found: Int64Array = np.where(rows[at] == wanted, place[at], len(rows))
    return found


def nesting_order(lane: Int64Array | Int32Array, start: Int64Array, end: Int64Array) -> Int64Array:
    """Order by (lane, start, end descending): a stable sort by lane of a sort by start, with only the ties sorted by end."""
    order = np.argsort(start, kind="stable")
    order = order[np.argsort(lane[order].astype(np.int32), kind="stable")]
    same = (start[order][1:] == start[order][:-1]) & (lane[order][1:] == lane[order][:-1])
    if same.any():
        tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
        part = order[tied]
        order[tied] = part[np.lexsort((-end[part], start[part], lane[part]))]
    return order.astype(np.int64)
