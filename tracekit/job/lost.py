"""Time of which a trace does not tell what its device did: work that was launched and never recorded, and time outside the profiler's span.

CUPTI and its kin hand kernels over in buffers; a buffer that is lost takes its kernels with it, while the launches stay. Between the last
recorded work that was launched before such a launch and the first that was launched after it the device may have run anything:

    unknown = [end of the work of the launch before, start of the work of the launch behind], for each run of launches without kernels

Time in it in which recorded work runs is known all the same. Host calls that a capture swallows launch nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracekit.notes import note
from tracekit.readers.oddities import unread
from tracekit.trace import correlate, intervals
from tracekit.trace.events import DEVICE_WORK, BoolArray, Category, Int64Array, RankTables
from tracekit.trace.steps import Steps
from tracekit.units import NS_PER_MS, NULL

#: Calls that put a kernel, or a graph of them, on a device. Copies and fills of nothing leave no trace, so theirs are not looked at.
_KERNEL_LAUNCH = re.compile(r"launch\w*kernel|kernel\w*launch|graphlaunch|launchcooperative|enqueue\w*kernel", re.I)
_CAPTURE_BEGINS, _CAPTURE_ENDS = re.compile(r"StreamBeginCapture"), re.compile(r"StreamEndCapture")
_SPAN = re.compile(r"PyTorch Profiler")
#: Parts of a step outside the profiler's span that are shorter than this share of it are not worth a word.
_OUTSIDE_SHARE = 0.01
#: The device's clock is laid on the host's: work may seem to begin a little outside the span.
_CLOCK_NS = NS_PER_MS
_OUT_OF_RANGE = re.compile(r"out[- ]of[- ]range\s*[=:]\s*(\d{1,12})", re.I)


@dataclass(frozen=True)
class Lost:
    """``unknown``: time [ns] of which it is not known what the device did, if nothing is recorded to run in it."""

    launches: int  # kernel launches without a kernel
    unknown: intervals.IntervalSet
    device: bool  # False: nothing at all of the device was recorded, though work was launched on it


#: Of a rank without a device, or one of which everything was recorded.
NOTHING_LOST = Lost(0, intervals.empty(), True)


def has_launches(tables: RankTables) -> bool:
    """Whether the program launched kernels on a device, recorded or not."""
    return bool(len(_launches(tables)))


def lost_work(tables: RankTables, steps: Steps, span: tuple[int, int], start: Int64Array, end: Int64Array, launch: Int64Array) -> Lost:
    """What is lost of a rank with a device; ``start``, ``end`` and ``launch`` (events row, -1 unknown) are of its recorded work.

    Noted in ``tables.coverage``.
    """
    launches = _launches(tables)
    known = launch[launch >= 0]
    recorded = tables.rows(*DEVICE_WORK)
    missing = launches[~np.isin(tables.correlation[launches], tables.correlation[recorded])]
    if not len(start):
        if len(missing):
            tables.coverage.note(note("device_lost", len(missing)))
        _note_unread(tables)
        whole = intervals.union(np.array([span[0]], np.int64), np.array([span[1]], np.int64))
        return Lost(len(missing), whole, False)
    if not len(known) or int((~correlate.usable(tables.correlation[recorded])).sum()) >= len(missing):
        missing = missing[:0]  # kernels that cannot be linked may be theirs
    parts = [_gaps(tables, missing, start, end, launch, span[1]), _outside_profiler(tables, steps, start)]
    unknown = intervals.union(*(np.concatenate(pair) for pair in zip(*parts, strict=True)))
    if len(missing):
        hit = steps.number[intervals.covered(steps.start, steps.end, parts[0]) > 0]
        dropped = _out_of_range(tables.metadata)
        tables.coverage.note(
            note("kernels_lost", len(missing), total=len(launches), steps=tuple(int(n) for n in hit), out_of_range=dropped)
        )
    return Lost(len(missing), unknown, True)


def _note_unread(tables: RankTables) -> None:
    rows = unread(tables)
    if len(rows):
        names = tuple(sorted({tables.text(int(code)) for code in np.unique(tables.name[rows])[:20]}))
        tables.coverage.note(note("device_not_read", len(rows), names=names))


def _launches(tables: RankTables) -> Int64Array:
    """Calls that launch kernels, outside captures, whose correlation can be looked for."""
    rows = tables.rows(Category.RUNTIME)
    rows = rows[(tables.correlation[rows] > 0) & (tables.ts[rows] != NULL)]
    rows = rows[tables.each_text(tables.name[rows], lambda text: _KERNEL_LAUNCH.search(text) is not None)]
    found: Int64Array = rows[~_captured(tables, rows)]
    return found


def _captured(tables: RankTables, rows: Int64Array) -> BoolArray:
    """Whether each call stands between the begin and the end of a capture on its thread."""
    runtime = tables.rows(Category.RUNTIME)
    begins = runtime[tables.each_text(tables.name[runtime], lambda text: _CAPTURE_BEGINS.search(text) is not None)]
    result = np.zeros(len(rows), np.bool_)
    if not len(begins):
        return result
    ends = runtime[tables.each_text(tables.name[runtime], lambda text: _CAPTURE_ENDS.search(text) is not None)]
    for lane in np.unique(tables.lane[begins]).tolist():
        own = np.flatnonzero(tables.lane[rows] == lane)
        begun = np.sort(tables.ts[begins[tables.lane[begins] == lane]])
        ended = np.sort(tables.ts[ends[tables.lane[ends] == lane]])
        times = tables.ts[rows[own]]
        result[own] = np.searchsorted(begun, times, side="right") > np.searchsorted(ended, times, side="right")
    return result


def _gaps(
    tables: RankTables, missing: Int64Array, start: Int64Array, end: Int64Array, launch: Int64Array, window_end: int
) -> intervals.IntervalSet:
    """For each launch without a kernel the time in which its kernel may have run."""
    if not len(missing):
        return intervals.empty()
    known = launch >= 0
    called = tables.ts[launch[known]]
    order = np.argsort(called, kind="stable")
    called = called[order]
    ended = np.maximum.accumulate(end[known][order])
    begun = np.minimum.accumulate(start[known][order][::-1])[::-1]
    times = np.sort(tables.ts[missing])
    at = np.searchsorted(called, times, side="right")
    low = np.maximum(np.where(at > 0, ended[np.maximum(at - 1, 0)], times), times)
    high = np.where(at < len(called), begun[np.minimum(at, len(called) - 1)], max(window_end, int(end.max())))
    return intervals.union(low, np.maximum(high, low))


def _outside_profiler(tables: RankTables, steps: Steps, start: Int64Array) -> intervals.IntervalSet:
    """What of the steps lies outside the profiler's own span, where all recorded work lies inside it."""
    rows = tables.rows(Category.TRACE)
    rows = rows[tables.each_text(tables.name[rows], lambda text: _SPAN.match(text) is not None)]
    rows = rows[(tables.dur[rows] > 0) & (tables.ts[rows] != NULL)]
    if not len(rows) or not len(steps):
        return intervals.empty()
    low, high = int(tables.ts[rows].min()), int((tables.ts[rows] + tables.dur[rows]).max())
    if start.min() < low - _CLOCK_NS or start.max() > high + _CLOCK_NS:
        return intervals.empty()
    before, behind = np.clip(low - steps.start, 0, None), np.clip(steps.end - high, 0, None)
    length = steps.end - steps.start
    early, late = before > _OUTSIDE_SHARE * length, behind > _OUTSIDE_SHARE * length
    starts = np.concatenate([steps.start[early], np.maximum(steps.start, high)[late]])
    ends = np.concatenate([np.minimum(steps.end, low)[early], steps.end[late]])
    if len(starts):
        tables.coverage.note(note("outside_profiler", len(np.union1d(np.flatnonzero(early), np.flatnonzero(late)))))
    return intervals.union(starts, ends)


def _out_of_range(metadata: dict[str, Any]) -> int:
    """How many activities the profiler's own log in the file says it left out; those before and behind its window are among them."""
    found = 0
    for value in metadata.values():
        for text in value[:1000] if isinstance(value, list) else [value]:
            if isinstance(text, str):
                found += sum(int(number) for number in _OUT_OF_RANGE.findall(text[:10_000]))
    return found
