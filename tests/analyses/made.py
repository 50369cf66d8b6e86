"""Jobs and activities of a few lines, for tests of analyses: no file is written or read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests import oracle
from tests.builder import BASE, Trace, group
from tracekit import analyses, schema
from tracekit.job.activity import Activity, DeviceWork
from tracekit.job.join import join
from tracekit.job.model import Job
from tracekit.job.window import Task, build_activity, reduce_window
from tracekit.notes import text_note
from tracekit.trace.events import Category
from tracekit.trace.steps import Phases, Steps
from tracekit.units import NULL

US = 1000


def activity_of(trace: Trace) -> Activity:
    """One rank's trace, linked."""
    return build_activity(oracle.tables(trace.text()))


def job_of(*traces: Trace, mesh: str | None = None, gpus_per_node: int | None = None, status: dict[int, str] | None = None) -> Job:
    """The job of these traces with everything reduced. ``status`` sets the coverage status of a trace by its place."""
    windows = []
    for place, trace in enumerate(traces):
        tables = oracle.tables(trace.text())
        tables.coverage.file = f"rank{trace.rank}.json"
        if status and place in status:
            tables.coverage.note(text_note("made so by the test"), status[place])
        windows.append(reduce_window(tables, f"rank{trace.rank}.json", Task(reducers=analyses.reducers())))
    return join(windows, [], mesh, gpus_per_node)


def work(pieces: Sequence[tuple[Any, ...]], steps: Sequence[tuple[int, int, int]] = (), window: tuple[int, int] | None = None) -> Activity:
    """An activity of (start, end, work, stream, launch or None) in ns without host events. ``steps`` are (number, start, end)."""
    rows = sorted(pieces, key=lambda piece: piece[0])
    start, end, kind, stream = (np.array([row[i] for row in rows], np.int64) for i in range(4))
    launch = np.array([NULL if row[4] is None else row[4] for row in rows], np.int64)
    number, low, high = (np.array([step[i] for step in steps], np.int64) for i in range(3))
    marks = Steps(number, low, high, "ProfilerStep" if len(steps) else "none")
    document = {
        "traceEvents": [{"ph": "X", "cat": "kernel", "name": f"k{i}", "pid": 0, "tid": 0, "ts": 0, "dur": 0} for i in range(len(rows))]
    }
    tables = oracle.tables_from_document(document)
    communicates = kind == 1
    operation = np.where(communicates, np.cumsum(communicates) - 1, -1).astype(np.int32)
    count = len(rows)
    nothing = np.full(count, -1, np.int64)
    device = DeviceWork(
        row=np.arange(count, dtype=np.int64),
        start=start,
        end=end,
        work=kind.astype(np.int8),
        name=tables.name,
        stream=stream.astype(np.int32),
        device=np.zeros(count, np.int32),
        launch_row=np.where(launch != NULL, 0, -1),
        launch_ts=launch,
        operator_row=nothing,
        step=marks.index_at(start),
        launch_step=np.where(launch != NULL, marks.index_at(launch), -1).astype(np.int32),
        operation=operation,
        suspicious=np.zeros(count, np.bool_),
    )
    if window is None:
        window = (int(min([*start, *low])), int(max([*end, *high])))
    no_phases = Phases(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int8))
    operations = schema.LOCAL_OPERATIONS.empty().reindex(range(int(communicates.sum())))
    operations["kind"] = "all_reduce"
    assert (tables.category == Category.KERNEL).all()
    return Activity(tables, marks, no_phases, device, operations, [], False, window)


def mesh_groups(rank: int) -> list[dict[str, Any]]:
    """Groups of a 2 x 2 mesh of axes dp (outer) and tp: ranks 0-1 and 2-3 are tensor parallel, 0-2 and 1-3 data parallel."""
    tp = [rank - rank % 2, rank - rank % 2 + 1]
    dp = [rank % 2, rank % 2 + 2]
    return [group("0", "default_pg", [0, 1, 2, 3]), group("3", "mesh_tp", tp), group("5", "mesh_dp", dp)]


__all__ = ["BASE", "US", "Trace", "activity_of", "group", "job_of", "mesh_groups", "work"]
