"""One merged trace of the whole job for Perfetto: every rank a process on the job's clock.

    processes   a rank each, named by its coordinate; tracks: host threads, annotations, and streams by what they do: compute, or
                communication by mesh axis
    flows       from the host call to what it launched; from rank to rank of a matched collective, in the order of arrival; from a send
                to its recv
    counters    memory of each device by owner, as far as it was recorded
    findings    instants on a process of their own, above the ranks, and on the ranks that they are about

Slices of the device have the ends that the analysis counts with. The file opens in ui.perfetto.dev; what it leaves out is in ``otherData``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from isal import igzip

from tracekit import __version__
from tracekit.analyses.memory.rows import rows_of
from tracekit.export import chrome
from tracekit.export.spool import Spooled, Track
from tracekit.files import write_by
from tracekit.findings import Result, of_job
from tracekit.job.model import Job
from tracekit.trace.events import Category, Int64Array
from tracekit.units import NULL

#: The reducer's name among those of the analyses.
REDUCER = "export_spool"
_gzip: Any = igzip.open
_WORDS = {category.value: category.name.lower() for category in Category}


@dataclass
class _Merge:
    """The tracks of the merged trace. ``tid_of[rank]``: thread number of each track by what it is called."""

    job: Job
    base: int
    tid_of: dict[int, dict[tuple[str, str, int], int]]
    #: A frame a window: its operations' first slice (``tid``, ``start``) and last one (``last_tid``, ``end``).
    operations: list[pd.DataFrame]
    flows: int = 0

    def tid(self, rank: int, group: str, name: str, level: int) -> int:
        """The number of a track, given when it is first seen."""
        known = self.tid_of.setdefault(rank, {})
        return known.setdefault((group, name, level), len(known) + 1)


def write(path: str, job: Job, results: Mapping[str, Result]) -> dict[str, int]:
    """Write the merged trace (gzip where the name ends in .gz); counts of what it holds. The job was read with the reducer ``REDUCER``."""
    counts: dict[str, int] = {}

    def write_to(name: str) -> None:
        with _gzip(name, "wb", compresslevel=2) if path.endswith(".gz") else Path(name).open("wb") as stream:
            stream.writelines(_parts(job, results, counts))

    write_by(Path(path), write_to)
    return counts


def _parts(job: Job, results: Mapping[str, Result], counts: dict[str, int]) -> Iterator[bytes]:
    spools = [(rank, index, spooled) for rank, index, spooled in job.reduced(REDUCER)]
    firsts = [job.aligned(index, spooled.first_ns) for _, index, spooled in spools if spooled.first_ns is not None]
    # A rank of which there is only a snapshot has counters alone.
    curves = [row.memory.curve for row in rows_of(job, "memory") if row.memory.curve is not None and row.memory.timed]
    firsts = firsts or [int(curve.time[0]) for curve in curves if len(curve.time)]
    merge = _Merge(job, int(min(firsts, default=0)), {rank: {} for rank in job.ranks}, [])
    counts.update(slices=0, launches=0, left_out=sum(spooled.left_out for _, _, spooled in spools))
    yield b'{"displayTimeUnit":"ns","traceEvents":[\n'
    for rank, index, spooled in spools:
        yield from _window(merge, rank, index, spooled, counts)
    counts["flows"], counts["counters"], counts["findings"] = 0, 0, 0
    yield from _matches(merge, counts)
    yield from _counters(merge, counts)
    yield from _findings(merge, results, counts)
    yield from _names(merge)
    other = {"tracekit_version": __version__, "base_unix_ns": str(merge.base), "clock_aligned": job.clock.aligned} | counts
    other["clock_residual_ns"] = job.clock.residual_ns
    yield b'{"ph":"M","pid":0,"tid":0,"name":"tracekit"}\n],"otherData":' + json.dumps(other).encode() + b"}\n"


def _window(merge: _Merge, rank: int, index: int, spooled: Spooled, counts: dict[str, int]) -> Iterator[bytes]:
    """Slices of one window, and arrows from what launched them."""
    with pa.memory_map(spooled.path) as source:
        frame = pa.ipc.open_file(source).read_all()
    if not len(frame):
        return
    columns = {name: frame[name].to_numpy() for name in frame.column_names if name != "name"}
    start = merge.job.aligned(index, columns["start"]) - merge.base
    axes, axis_of = _axes(merge.job, index)
    tid = _tids(merge, rank, spooled.tracks, columns, axes, axis_of)
    merge.operations.append(_of_operations(index, columns["operation"], tid, start, start + columns["dur"]))
    counts["slices"] += len(frame)
    yield from chrome.lines(
        '{"ph":"X","pid":' + str(rank) + ',"tid":', chrome.numbers(tid), ',"ts":', chrome.microseconds(start),
        ',"dur":', chrome.microseconds(columns["dur"]), ',"cat":"', chrome.chosen([_WORDS[n] for n in sorted(_WORDS)], columns["category"]),
        '","name":', chrome.names(frame["name"]), _arguments(merge.job, index, columns["operation"]), "}",
    )  # fmt: skip
    yield from _launches(merge, rank, index, spooled, columns, (start, tid, axes), counts)


def _of_operations(window: int, operation: Int64Array, tid: Int64Array, start: Int64Array, end: Int64Array) -> pd.DataFrame:
    """Where an operation begins and where it ends: it may have several slices."""
    frame = pd.DataFrame({"window": window, "local": operation, "tid": tid, "start": start, "last_tid": tid, "end": end})
    frame = frame[frame["local"] >= 0].sort_values("start", kind="stable")
    first, last = frame.drop_duplicates("local"), frame.sort_values("end", kind="stable").drop_duplicates("local", keep="last")
    return first[["window", "local", "tid", "start"]].merge(last[["local", "last_tid", "end"]], on="local")


def _axes(job: Job, window: int) -> tuple[list[str], Int64Array]:
    """(axes, for each local operation of a window the index of its axis; the last for those of none)."""
    own = job.operations[job.operations["window"] == window]
    local = own["local"].to_numpy()
    names, codes = np.unique(own["axis"].astype(str).to_numpy(), return_inverse=True)
    found = np.full(int(local.max(initial=-1)) + 2, len(names), np.int64)
    found[local] = codes
    return [*names.tolist(), ""], found


def _tids(
    merge: _Merge, rank: int, tracks: Sequence[Track], columns: dict[str, Any], axes: Sequence[str], axis_of: Int64Array
) -> Int64Array:
    """Thread number of each slice: communication of the device stands on a track of its stream and axis."""
    tid = np.zeros(len(columns["track"]), np.int64)
    for number, track in enumerate(tracks):
        rows = np.flatnonzero(columns["track"] == number)
        if track.kind != "communication":
            tid[rows] = merge.tid(rank, track.kind, _track_name(track, ""), track.level)
            continue
        operation = columns["operation"][rows]
        axis = axis_of[np.where(operation >= 0, np.minimum(operation, len(axis_of) - 1), -1)]
        for code in np.unique(axis).tolist():
            tid[rows[axis == code]] = merge.tid(rank, track.kind, _track_name(track, axes[code]), track.level)
    return tid


def _track_name(track: Track, axis: str) -> str:
    if track.kind == "communication":
        return f"{track.name}: {axis or 'communication'}"
    return f"{track.name}: compute" if track.kind in ("compute", "copy") else track.name


def _arguments(job: Job, window: int, operation: Int64Array) -> pa.Array:
    """``,"args":{...}`` of what is a known operation: axis, purpose, bytes, sequence number, how long it waited."""
    own = job.operations[job.operations["window"] == window]
    texts = [""]
    place = np.zeros(int(own["local"].max() + 1 if len(own) else 0) + 1, np.int64)
    names = ("axis", "purpose", "kind", "full_bytes", "sent_bytes", "seq", "wait_ns", "step_number", "match")
    for row in zip(own["local"].tolist(), *(own[name].tolist() for name in names), strict=True):
        known = {name: value for name, value in zip(names, row[1:], strict=True) if value not in ("", NULL, -1)}
        place[row[0]] = len(texts)
        texts.append(',"args":' + json.dumps(known, separators=(",", ":")))
    codes = np.where((operation >= 0) & (operation < len(place)), place[np.clip(operation, 0, len(place) - 1)], 0)
    return chrome.chosen(texts, codes)


def _launches(
    merge: _Merge, rank: int, index: int, spooled: Spooled, columns: dict[str, Any], slices: tuple[Int64Array, Int64Array, Sequence[str]],
    counts: dict[str, int],
) -> Iterator[bytes]:  # fmt: skip
    """Arrows from host calls to the device."""
    start, tid, _ = slices
    rows = np.flatnonzero((columns["launch_ts"] != NULL) & (columns["launch_track"] >= 0))
    launch = merge.job.aligned(index, columns["launch_ts"][rows]) - merge.base
    rows, launch = rows[launch >= 0], launch[launch >= 0]
    if not len(rows):
        return
    by_track = np.array([merge.tid(rank, t.kind, _track_name(t, ""), t.level) if t.kind != "communication" else 0 for t in spooled.tracks])
    number = chrome.numbers(np.arange(len(rows), dtype=np.int64) + merge.flows)
    merge.flows += len(rows)
    counts["launches"] += len(rows)
    head, tail = f',"pid":{rank},"tid":', ',"cat":"launch","name":"launch","id":'
    late = np.maximum(start[rows], launch)  # an arrow never points back in time
    for phase, track, ts in (('"s"', by_track[columns["launch_track"][rows]], launch), ('"f","bp":"e"', tid[rows], late)):
        yield from chrome.lines('{"ph":' + phase + head, chrome.numbers(track), ',"ts":', chrome.microseconds(ts), tail, number, "}")


def _matches(merge: _Merge, counts: dict[str, int]) -> Iterator[bytes]:
    """Arrows between ranks: along a collective in the order of arrival, from each send to its recv."""
    frame = merge.job.operations
    frame = frame.loc[frame["match"] >= 0, ["window", "local", "rank", "match", "kind", "axis"]]
    if not len(frame) or not merge.operations:
        return
    frame = frame.merge(pd.concat(merge.operations), on=["window", "local"])
    receives = (frame["kind"] == "recv").to_numpy()
    # An arrow ends where a recv ends: it may have begun to wait before the send.
    frame["ts"] = np.where(receives, np.maximum(frame["start"], frame["end"] - 1), frame["start"])
    frame["tid"] = np.where(receives, frame["last_tid"], frame["tid"])
    frame = frame[frame["ts"] >= 0].sort_values(["match", "ts", "rank"], kind="stable")
    frame = frame[frame.groupby("match")["rank"].transform("nunique") > 1]
    if not len(frame):
        return
    match, ts, tids = (frame[name].to_numpy(np.int64) for name in ("match", "ts", "tid"))
    first, last = np.r_[True, match[1:] != match[:-1]], np.r_[match[1:] != match[:-1], True]
    phase = np.where(first, 0, np.where(last, 2, 1))
    label = pd.Categorical((frame["kind"].astype(str) + " " + frame["axis"].astype(str)).str.strip())
    words = [chrome.quoted(str(word)) for word in label.categories]
    counts["flows"] = int(first.sum())
    head = chrome.chosen(['{"ph":"s"', '{"ph":"t","bp":"e"', '{"ph":"f","bp":"e"'], phase)
    ranks, name = chrome.numbers(frame["rank"].to_numpy(np.int64)), chrome.chosen(words, np.asarray(label.codes, np.int64))
    at, number = chrome.microseconds(ts), chrome.numbers(match)
    yield from chrome.lines(
        head,
        ',"pid":',
        ranks,
        ',"tid":',
        chrome.numbers(tids),
        ',"ts":',
        at,
        ',"cat":"collective","name":',
        name,
        ',"id":"m',
        number,
        '"}',
    )


def _counters(merge: _Merge, counts: dict[str, int]) -> Iterator[bytes]:
    """Memory of every device by owner."""
    for row in rows_of(merge.job, "memory"):
        memory, curve = row.memory, row.memory.curve
        if curve is None or not memory.timed:
            continue
        parts = curve.categories or {"allocated": curve.allocated}
        label, seen = chrome.quoted(f"memory {memory.device}".strip()), curve.time >= merge.base
        values: list[chrome.Piece] = []
        for name, amounts in parts.items():
            values += [("," if values else "") + chrome.quoted(name) + ":", chrome.numbers(amounts[seen])]
        counts["counters"] += int(seen.sum())
        ts = chrome.microseconds(curve.time[seen] - merge.base)
        yield from chrome.lines(f'{{"ph":"C","pid":{row.rank},"tid":0,"name":{label},"ts":', ts, ',"args":{', *values, "}}")


def _findings(merge: _Merge, results: Mapping[str, Result], counts: dict[str, int]) -> Iterator[bytes]:
    """A process above the ranks: one track a finding, with its sentence at the beginning of the first step."""
    found = of_job(results)
    counts["findings"] = len(found)
    if not found:
        return
    pid = max(merge.tid_of, default=0) + 1
    starts = [merge.job.aligned(i, int(w.steps.start[0])) for i, w in enumerate(merge.job.windows) if len(w.steps)]
    at = max(0, (min(starts) if starts else merge.base) - merge.base)
    yield chrome.event(ph="M", pid=pid, tid=0, name="process_name", args={"name": "findings of tracekit"})
    yield chrome.event(ph="M", pid=pid, tid=0, name="process_sort_index", args={"sort_index": -1})
    for number, finding in enumerate(found, 1):
        told = {"severity": finding.severity, "evidence": finding.evidence, "advice": finding.advice}
        yield chrome.event(ph="M", pid=pid, tid=number, name="thread_name", args={"name": f"{finding.severity}: {finding.id}"})
        mark = {"ph": "i", "s": "t", "ts": at / 1000, "name": finding.text, "cat": "finding", "args": told}
        yield chrome.event(pid=pid, tid=number, **mark)
        for rank in finding.subject.ranks:  # and on the ranks that it is about
            if rank in merge.tid_of:
                yield chrome.event(pid=rank, tid=merge.tid(rank, "finding", "findings", 0), **mark)


def _names(merge: _Merge) -> Iterator[bytes]:
    """Names and order of processes and tracks."""
    order = {"finding": -1, "host": 0, "annotation": 1, "compute": 2, "copy": 2, "communication": 3}
    for rank, tracks in sorted(merge.tid_of.items()):
        yield chrome.event(ph="M", pid=rank, tid=0, name="process_name", args={"name": rank_name(merge.job, rank)})
        yield chrome.event(ph="M", pid=rank, tid=0, name="process_sort_index", args={"sort_index": rank})
        for (kind, name, level), tid in tracks.items():
            shown = f"{name} (overlapping {level})" if level else name
            yield chrome.event(ph="M", pid=rank, tid=tid, name="thread_name", args={"name": shown})
            yield chrome.event(ph="M", pid=rank, tid=tid, name="thread_sort_index", args={"sort_index": order[kind] * 1000 + tid})


def rank_name(job: Job, rank: int) -> str:
    """``rank 5 (pp 1, tp 0) on host``."""
    place = ""
    if rank in job.mesh.coordinates:
        pairs = zip(job.mesh.axes, job.mesh.coordinates[rank], strict=True)
        place = ", ".join(f"{axis.name} {index}" for axis, index in pairs)
    host = next((window.identity.host for window in job.windows if window.rank == rank), "")
    return f"rank {rank}" + (f" ({place})" if place else "") + (f" on {host}" if host else "")
