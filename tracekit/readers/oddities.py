"""What events of some writers mean, once they are columns: pairs of begin and end, marks on a device that are no work."""

from __future__ import annotations

import re

import numpy as np

from tracekit.notes import note
from tracekit.trace.codes import distinct, distinct_rows
from tracekit.trace.events import DEVICE_WORK, Category, Int64Array, RankTables
from tracekit.units import NULL, NULL32

_BEGIN, _END, _COMPLETE = ord("B"), ord("E"), ord("X")
#: Events on a device in which it waits or leaves a mark (MTIA's command processor writes them among its work), and those that copy.
_MARKS = frozenset({"event_wait", "event_record", "wait_event", "record_event", "stream_wait_event"})
#: What each rank's own process shows: it launches kernels, and marks its steps.
_OF_A_RANK = re.compile(r"launch\w*kernel|kernel\w*launch|graphlaunch|^ProfilerStep[#*]\d", re.I)
_COPIES = frozenset({"dma_request"})
#: Processes under which other profilers list what a device did: JAX (``/device:GPU:0``), Ascend, Nsight (``Device 0``).
_DEVICE = re.compile(r"/device:(?!CPU)|^(?:GPU|NPU|HPU|TPU|XPU|MLU|DCU|Device|Ascend Hardware|Habana|Gaudi)\b", re.I)


def settle(tables: RankTables) -> None:
    """Change the tables in place."""
    _without_phase(tables)
    _pair(tables)
    kernels = np.flatnonzero(tables.category == Category.KERNEL)
    marks = kernels[tables.each_text(tables.name[kernels], lambda text: text in _MARKS)]
    tables.category[marks] = Category.SYNC
    copies = kernels[tables.each_text(tables.name[kernels], lambda text: text in _COPIES)]
    tables.category[copies] = Category.MEMCPY
    tables.forget()


def unread(tables: RankTables) -> Int64Array:
    """Events that ran on a device, by what they or their process' name tell, of a kind that no table knows."""
    lanes = np.array([_DEVICE.search(lane.process_name or str(lane.pid)) is not None for lane in tables.lanes], np.bool_)
    on_device = (tables.stream != NULL32) | (tables.device != NULL32)
    if lanes.any():
        on_device = on_device | lanes[tables.lane]
    complete = (tables.category == Category.OTHER) & (tables.phase == _COMPLETE) & (tables.dur > 0)
    return np.flatnonzero(complete & on_device).astype(np.int64)


def _without_phase(tables: RankTables) -> None:
    """An event of a known kind that lasts some time is complete, also where its writer left out ``ph``."""
    rows = np.flatnonzero((tables.phase == 0) & (tables.category != Category.OTHER) & (tables.ts != NULL) & (tables.dur != NULL))
    if len(rows):
        tables.phase[rows] = _COMPLETE
        tables.coverage.note(note("without_phase", len(rows)))


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


def processes(tables: RankTables) -> list[str]:
    """The processes of a file that holds several ranks (of TraceFuse, of merged servers); [] where it holds one.

    A profiler writes one process. Several are told by launches or step marks in each of them, or by kernels of one device under several
    names.
    """
    lanes = [str(lane.pid) for lane in tables.lanes]
    names = sorted(set(lanes))
    number = np.array([names.index(lane) for lane in lanes] or [0], np.int64)
    host = tables.rows(Category.RUNTIME, Category.USER_ANNOTATION)
    host = host[tables.each_text(tables.name[host], lambda text: _OF_A_RANK.search(text) is not None)]
    steps = tables.category[host] == Category.USER_ANNOTATION
    device = tables.rows(*DEVICE_WORK)
    several = [distinct(number[tables.lane[rows]])[0] for rows in (host[~steps], host[steps])]
    devices, of = distinct_rows(tables.device[device], number[tables.lane[device]])[0]
    if (np.diff(devices) == 0).any() and not any(name.lstrip("-").isdigit() for name in np.array(names)[of]):
        several.append(distinct(of)[0])
    found = max(several, key=len)
    return [names[i] for i in found.tolist()] if len(found) > 1 else []
