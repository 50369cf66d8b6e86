"""Device work of one rank: kernels and copies, what launched them, and what they are for the device: compute, communication or a copy.

CPU jobs have no device. There the host's threads take its place: top-level operators compute, the backend's ``gloo:*`` ranges communicate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekit.collectives.kinds import kind_of_annotation, kind_of_operator
from tracekit.collectives.named import Named
from tracekit.job.activity import DeviceWork, Work
from tracekit.job.communication import HOST_BACKENDS, LABEL, host_ranges, is_communication
from tracekit.job.lost import NOTHING_LOST, Lost, has_launches, lost_work
from tracekit.notes import note
from tracekit.readers.oddities import unread
from tracekit.trace import correlate, durations, intervals
from tracekit.trace.events import DEVICE_WORK, BoolArray, Category, Int8Array, Int64Array, RankTables
from tracekit.trace.steps import Steps
from tracekit.units import NULL

_COPIES = (Category.MEMCPY, Category.MEMSET)
_GRAPH_LAUNCHES = ("cudaGraphLaunch", "hipGraphLaunch", "cuGraphLaunch")


@dataclass(frozen=True)
class Unlinked:
    """Work before it is linked: parallel arrays, not sorted."""

    row: Int64Array
    start: Int64Array
    end: Int64Array
    work: Int8Array
    suspicious: BoolArray
    launch: Int64Array


def device_work(tables: RankTables, steps: Steps, span: tuple[int, int], named: Named = ()) -> tuple[DeviceWork, bool, Lost]:
    """All work of the rank, linked and sorted by start; whether it is a CPU job (nothing was launched on a device); what was lost."""
    rows = tables.rows(*DEVICE_WORK)
    on_cpu = not len(rows) and not has_launches(tables) and not len(unread(tables))
    device = _host_compute(tables) if on_cpu else _device_work(tables, rows, span, named)
    work = _link(tables, _joined(device, _host_communication(tables, on_cpu)), steps, on_cpu)
    if on_cpu:
        tables.coverage.note(note("no_device_work"))
        return work, on_cpu, NOTHING_LOST
    _note_launches(tables, work)
    return work, on_cpu, lost_work(tables, steps, span, device.start, device.end, device.launch)


def _device_work(tables: RankTables, rows: Int64Array, span: tuple[int, int], named: Named) -> Unlinked:
    cleaned = durations.clean(tables, rows, span)
    usable = ~cleaned.timeless & (cleaned.end >= tables.ts[rows])
    rows = rows[usable]
    work = np.where(np.isin(tables.category[rows], [int(c) for c in _COPIES]), int(Work.COPY), int(Work.COMPUTE)).astype(np.int8)
    launch = correlate.launches(tables, rows)
    work[is_communication(tables, rows, launch, named)] = Work.COMMUNICATION
    return Unlinked(rows, tables.ts[rows], cleaned.end[usable], work, cleaned.suspicious[usable], launch)


def _host_communication(tables: RankTables, on_cpu: bool) -> Unlinked:
    """The ranges in which a host backend moves bytes (``gloo:all_reduce``); of a backend without any (fake) the recorder's labels."""
    everything = host_ranges(tables)
    names = tables.name[everything]
    rows = everything[tables.each_text(names, lambda text: text.startswith(HOST_BACKENDS) and kind_of_annotation(text) is not None)]
    if not len(rows) and on_cpu:
        rows = everything[tables.each_text(names, lambda text: text == LABEL)]
    start = tables.ts[rows]
    work = np.full(len(rows), int(Work.COMMUNICATION), np.int8)
    return Unlinked(rows, start, start + tables.dur[rows], work, np.zeros(len(rows), np.bool_), np.full(len(rows), -1, np.int64))


def _host_compute(tables: RankTables) -> Unlinked:
    """Top-level operators of each thread, without the collectives called (and waited for) inside them."""
    rows = tables.rows(Category.OPERATOR)
    rows = rows[(tables.dur[rows] >= 0) & (tables.ts[rows] != NULL)]
    collective = tables.each_text(tables.name[rows], _is_collective_call)
    calls, operators = rows[collective], rows[~collective]
    operators = operators[correlate.enclosing(tables, operators, operators) < 0]
    index, start, end = _outside_calls(tables, operators, calls)
    work = np.full(len(index), int(Work.COMPUTE), np.int8)
    return Unlinked(operators[index], start, end, work, np.zeros(len(index), np.bool_), np.full(len(index), -1, np.int64))


def _is_collective_call(text: str) -> bool:
    prefixes = ("c10d::", "_c10d_functional", "record_param_comms", LABEL, *HOST_BACKENDS)
    return text.startswith(prefixes) or kind_of_operator(text) is not None


def _outside_calls(tables: RankTables, operators: Int64Array, calls: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Pieces of each operator in which its own thread is not inside a collective call: (operator index, start, end)."""
    index, starts, ends = [], [], []
    for lane in np.unique(tables.lane[operators]):
        own = np.flatnonzero(tables.lane[operators] == lane)
        inside = calls[tables.lane[calls] == lane]
        start = tables.ts[operators[own]]
        busy = intervals.union(tables.ts[inside], tables.ts[inside] + tables.dur[inside])
        which, piece_start, piece_end = intervals.segments_outside(start, start + tables.dur[operators[own]], busy)
        index.append(own[which])
        starts.append(piece_start)
        ends.append(piece_end)
    if not index:
        nothing = np.empty(0, np.int64)
        return nothing, nothing, nothing
    return np.concatenate(index), np.concatenate(starts), np.concatenate(ends)


def _joined(first: Unlinked, second: Unlinked) -> Unlinked:
    if not len(second.row):
        return first
    return Unlinked(
        np.concatenate([first.row, second.row]),
        np.concatenate([first.start, second.start]),
        np.concatenate([first.end, second.end]),
        np.concatenate([first.work, second.work]),
        np.concatenate([first.suspicious, second.suspicious]),
        np.concatenate([first.launch, second.launch]),
    )


def _link(tables: RankTables, pieces: Unlinked, steps: Steps, on_cpu: bool) -> DeviceWork:
    order = np.argsort(pieces.start, kind="stable")
    row, start = pieces.row[order], pieces.start[order]
    launch_row = pieces.launch[order]
    known = launch_row >= 0
    launch_ts = np.full(len(row), NULL, np.int64)
    launch_ts[known] = tables.ts[launch_row[known]]
    launch_step = np.full(len(row), -1, np.int32)
    launch_step[known] = steps.index_at(launch_ts[known])
    operator_row = np.full(len(row), -1, np.int64)
    if on_cpu:
        is_operator = tables.category[row] == Category.OPERATOR
        operator_row[is_operator] = row[is_operator]
    elif known.any():
        launches, inverse = np.unique(launch_row[known], return_inverse=True)
        operator_row[known] = correlate.enclosing(tables, launches, tables.rows(Category.OPERATOR))[inverse]
    host = ~np.isin(tables.category[row], [int(c) for c in DEVICE_WORK])
    return DeviceWork(
        row=row,
        start=start,
        end=pieces.end[order],
        work=pieces.work[order],
        name=tables.name[row],
        stream=np.where(host, tables.lane[row], tables.stream[row]).astype(np.int32),
        device=tables.device[row],
        launch_row=launch_row,
        launch_ts=launch_ts,
        operator_row=operator_row,
        step=steps.index_at(start),
        launch_step=launch_step,
        operation=np.full(len(row), -1, np.int32),
        suspicious=pieces.suspicious[order],
    )


def _note_launches(tables: RankTables, work: DeviceWork) -> None:
    missing = work.launch_row < 0
    if missing.any():
        uncorrelated = int((missing & ~correlate.usable(tables.correlation[work.row])).sum())
        if uncorrelated:
            tables.coverage.note(note("work_without_correlation", uncorrelated, total=len(work)))
        if uncorrelated < missing.sum():
            tables.coverage.note(note("work_without_launch", int(missing.sum()) - uncorrelated, total=len(work)))
    known = work.launch_row[work.launch_row >= 0]
    replayed = tables.each_text(tables.name[known], lambda text: text.startswith(_GRAPH_LAUNCHES))
    if replayed.any():
        tables.coverage.note(note("graph_replays", replayed.sum(), calls=len(np.unique(known[replayed]))))
