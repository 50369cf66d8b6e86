"""What the merged trace needs of one window, put aside where its file is read: slices on tracks, and what launched what.

The columns stay in a scratch file until the job is joined and every clock is known; only the list of tracks goes on with the window. Times
are the window's own. Within a track slices nest: what overlaps the slice before it without ending inside it moves to a track of its own.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tracekit.compiled import late
from tracekit.job.activity import Activity, Work
from tracekit.trace.events import BoolArray, Category, Int64Array, RankTables
from tracekit.units import NULL

#: Categories of the host's side that are slices; the profiler's own span is none.
HOST = (Category.OPERATOR, Category.USER_ANNOTATION, Category.RUNTIME, Category.OVERHEAD, Category.PYTHON, Category.SYNC, Category.OTHER)
#: Tracks that overlapping slices of one lane are spread over; what does not fit even then is left out and counted.
MOST_LEVELS = 8


@dataclass(frozen=True)
class Track:
    """A row of the merged trace. ``kind``: host, annotation, compute, communication or copy; ``level`` > 0: what overlaps level 0."""

    kind: str
    device: int
    stream: int
    name: str
    level: int


@dataclass(frozen=True)
class Spooled:
    """Where a window's slices lie: ``path`` (Arrow IPC), its tracks, the first start [ns], and slices that fitted on no track."""

    path: str
    tracks: list[Track]
    first_ns: int | None
    left_out: int


@dataclass(frozen=True)
class Spool:
    """A reducer that writes into ``folder``, which outlives the reading."""

    folder: str
    scratch: ClassVar[bool] = True

    def __call__(self, activity: Activity) -> Spooled:
        """Put the window's slices aside."""
        tables, device = activity.tables, activity.device
        host, device_rows = _host_rows(tables), np.zeros(0, np.int64)
        if not activity.on_cpu:
            device_rows = np.arange(len(device), dtype=np.int64)
        start = np.concatenate([tables.ts[host], device.start[device_rows]])
        end = np.concatenate([tables.ts[host] + tables.dur[host], device.end[device_rows]])
        group, tracks = _grouped(activity, host, device_rows)
        level = levels(start, end, group)
        kept = level < MOST_LEVELS
        track, tracks = _with_levels(group, level, tracks)
        operation = np.full(len(start), -1, np.int64)
        operation[len(host) :] = device.operation[device_rows]
        if activity.on_cpu:
            _mark_operations(activity, host, operation)
        launch_ts, launch_track = _launches(activity, host, device_rows, track)
        path = self._write(tables, np.concatenate([tables.name[host], device.name[device_rows]]), kept, {
            "start": start,
            "dur": np.maximum(end - start, 0),
            "track": track,
            "category": np.concatenate([tables.category[host], tables.category[device.row[device_rows]]]).astype(np.int64),
            "operation": operation,
            "launch_ts": launch_ts,
            "launch_track": launch_track,
        })  # fmt: skip
        return Spooled(path, tracks, int(start[kept].min()) if kept.any() else None, int((~kept).sum()))

    def _write(self, tables: RankTables, name: npt.NDArray[Any], kept: BoolArray, columns: dict[str, Int64Array]) -> str:
        codes, used = np.unique(name[kept], return_inverse=True)
        words = pa.array([tables.text(int(code)) for code in codes], pa.string())
        names = pa.DictionaryArray.from_arrays(pa.array(used.astype(np.int32)), words)
        batch = pa.table({"name": names, **{key: pa.array(values[kept]) for key, values in columns.items()}})
        handle, path = tempfile.mkstemp(".arrow", "window-", self.folder)
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with os.fdopen(handle, "wb") as stream, pa.ipc.new_file(stream, batch.schema, options=options) as file:
            file.write_table(batch)
        return path


def _host_rows(tables: RankTables) -> Int64Array:
    """Rows of the host's slices and of annotations on the device that have both ends."""
    rows = tables.rows(*HOST, Category.GPU_ANNOTATION)
    kept: Int64Array = rows[(tables.ts[rows] != NULL) & (tables.dur[rows] >= 0)]
    return kept


def _grouped(activity: Activity, host: Int64Array, device_rows: Int64Array) -> tuple[Int64Array, list[Track]]:
    """(index of each slice's track, tracks) before overlaps are looked at: host lanes, then streams by kind of work."""
    tables, device = activity.tables, activity.device
    lanes, lane_of = np.unique(tables.lane[host], return_inverse=True)
    tracks = [_lane_track(tables, int(lane), host[lane_of == place]) for place, lane in enumerate(lanes)]
    kinds = {int(Work.COMPUTE): "compute", int(Work.COMMUNICATION): "communication", int(Work.COPY): "copy"}
    work = device.work[device_rows].astype(np.int64)
    work[work == int(Work.COPY)] = int(Work.COMPUTE)  # a stream's copies stand among its kernels
    keys = np.stack([device.device[device_rows].astype(np.int64), device.stream[device_rows].astype(np.int64), work], axis=1)
    streams, stream_of = np.unique(keys, axis=0, return_inverse=True)
    tracks += [Track(kinds[int(kind)], int(number), int(stream), f"stream {int(stream)}", 0) for number, stream, kind in streams]
    return np.concatenate([lane_of.reshape(-1), stream_of.reshape(-1) + len(lanes)]).astype(np.int64), tracks


def _lane_track(tables: RankTables, lane: int, rows: Int64Array) -> Track:
    found = tables.lanes[lane]
    name, number = found.thread_name.strip(), str(found.tid)
    if len(rows) and (tables.category[rows] == Category.GPU_ANNOTATION).all():
        return Track("annotation", -1, -1, f"annotations, {name or f'stream {number}'}", 0)
    return Track("host", -1, -1, name if number in name else f"{name} ({number})" if name else f"thread {number}", 0)


def _with_levels(group: Int64Array, level: Int64Array, tracks: list[Track]) -> tuple[Int64Array, list[Track]]:
    """Tracks for every level that occurs."""
    pairs, track = np.unique(np.stack([group, level], axis=1), axis=0, return_inverse=True)
    found = []
    for index, at in pairs.tolist():
        base = tracks[index]
        found.append(Track(base.kind, base.device, base.stream, base.name, at))
    return track.reshape(-1).astype(np.int64), found


def _mark_operations(activity: Activity, host: Int64Array, operation: Int64Array) -> None:
    """On CPU jobs the backend's ranges are slices of the host already: say which operation each is."""
    device = activity.device
    communication = np.flatnonzero(device.operation >= 0)
    order = np.argsort(host)
    place = np.searchsorted(host[order], device.row[communication])
    there = (place < len(host)) & (host[order][np.minimum(place, len(host) - 1)] == device.row[communication]) if len(host) else place < 0
    operation[order[place[there]]] = device.operation[communication[there]]


def _launches(activity: Activity, host: Int64Array, device_rows: Int64Array, track: Int64Array) -> tuple[Int64Array, Int64Array]:
    """(start, track) of the host call that launched each slice of the device; NULL and -1 where none is known."""
    device = activity.device
    ts, at = np.full(len(track), NULL, np.int64), np.full(len(track), -1, np.int64)
    if not len(device_rows) or not len(host):
        return ts, at
    order = np.argsort(host)
    row = device.launch_row[device_rows]
    place = np.minimum(np.searchsorted(host[order], row), len(host) - 1)
    there = (row >= 0) & (host[order][place] == row)
    found = len(host) + np.flatnonzero(there)
    ts[found] = device.launch_ts[device_rows][there]
    at[found] = track[order[place[there]]]
    return ts, at


def levels(start: Int64Array, end: Int64Array, group: Int64Array) -> Int64Array:
    """The lowest level on which each slice nests with its group's others there; of two that begin together the longer comes first."""
    order = np.lexsort((-end, start, group))
    found = np.zeros(len(start), np.int64)
    if len(start):
        found[order] = _levels(start[order], end[order], group[order], MOST_LEVELS)
    return found


@late
def _levels(start: Int64Array, end: Int64Array, group: Int64Array, most: int) -> Int64Array:
    """``levels`` of slices sorted by group, start and falling end. A stack of open ends a level."""
    level = np.zeros(len(start), np.int64)
    room = 512
    open_ends = np.zeros((most, room), np.int64)
    depth = np.zeros(most, np.int64)
    for i in range(len(start)):
        if i == 0 or group[i] != group[i - 1]:
            depth[:] = 0
        at = 0
        while at < most:
            while depth[at] > 0 and open_ends[at, depth[at] - 1] <= start[i]:
                depth[at] -= 1
            if depth[at] < room and (depth[at] == 0 or open_ends[at, depth[at] - 1] >= end[i]):
                break
            at += 1
        level[i] = at
        if at < most:
            open_ends[at, depth[at]] = end[i]
            depth[at] += 1
    return level
