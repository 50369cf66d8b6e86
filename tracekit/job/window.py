"""One file becomes one Window: read, link, reduce. Runs in a worker; only the small Window leaves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from tracekit.collectives.named import Named
from tracekit.errors import InputError
from tracekit.job import recorded, window_cache
from tracekit.job.activity import Activity, Window
from tracekit.job.communication import HOST_BACKENDS
from tracekit.job.device import device_work
from tracekit.job.ending import ending
from tracekit.job.memory_window import read_memory_window
from tracekit.job.operations import local_operations
from tracekit.job.packed import packed
from tracekit.manifest import Calls, Manifest, Owners
from tracekit.mesh.local_groups import local_groups
from tracekit.mesh.process_groups import LocalGroup, interned
from tracekit.notes import note, text_note
from tracekit.readers import cache
from tracekit.readers.hang import read_hang_file
from tracekit.readers.hang_files import HangFile
from tracekit.readers.identity import Identity, identify
from tracekit.readers.kineto import read_trace, refuse_foreign
from tracekit.readers.manifest import read_manifest
from tracekit.readers.memory_timeline import looks_like_timeline
from tracekit.readers.recognise import is_snapshot_name
from tracekit.readers.sources import Source
from tracekit.trace import durations, intervals
from tracekit.trace.events import DEVICE_WORK, BoolArray, Coverage, RankTables
from tracekit.trace.steps import Steps, find_phases, find_steps, is_step_mark, step_times

#: Who carries out the collectives of torch's process groups.
_OF_TORCH = (*(backend.rstrip(":") for backend in HOST_BACKENDS), "nccl", "rccl", "nccl_symmetric", "vendor_ccl", "oneccl", "hccl")

#: By the name of the analysis. One that writes files says so by an attribute ``scratch``: its answer is not kept for the next time.
Reducers = Mapping[str, Callable[[Activity], Any]]


@dataclass(frozen=True)
class Task:
    """How to read one file; picklable."""

    reducers: Reducers = field(default_factory=dict)
    steps: tuple[int | None, int | None] | None = None
    cache: str | None = None
    named: Named = ()  # kernels that the user calls communication
    threads: int = 2
    progress: Callable[[int], None] | None = None
    memory_limit: int | None = None  # of reading one memory snapshot [bytes]
    most_rows: int | None = None  # events of one file that are held at a time: of a longer one the first steps are looked at
    pack: bool = False  # the job has so many files that large results are kept as packed bytes


#: Parts of a Task that change how a file is read, not what is read of it.
_NO_MATTER = {"reducers", "cache", "threads", "progress", "memory_limit", "pack"}


def read_window(source: Source, task: Task) -> Window | HangFile | Coverage:
    """The window of one file; its Coverage where nothing of it could be used. Raises MemoryError where memory does not suffice."""
    # What a reducer left in a scratch file is gone the next time: such a window is read again.
    if task.cache is None or any(getattr(reducer, "scratch", False) for reducer in task.reducers.values()):
        return _read_afresh(source, task)
    settings = [sorted(task.reducers), *(getattr(task, part.name) for part in fields(task) if part.name not in _NO_MATTER)]
    window = window_cache.load(source, settings, task.cache)
    if window is not None:
        if task.progress is not None:
            task.progress(source.size)
        return window
    result = _read_afresh(source, task)
    if isinstance(result, Window):
        window_cache.store(source, settings, result, task.cache)
    return result


def _read_afresh(source: Source, task: Task) -> Window | HangFile | Coverage:
    try:
        if (told := read_hang_file(source)) is not None:
            return told
    except InputError as error:
        return Coverage(source.url, status="skipped", notes=[text_note(str(error))])
    if is_snapshot_name(source.name):
        return read_memory_window(source, task.progress, task.memory_limit)
    try:
        tables = read_tables(source, task)
        refuse_foreign(source, tables)
    except InputError as error:
        if looks_like_timeline(source):
            return read_memory_window(source)
        return Coverage(source.url, status="skipped", notes=[text_note(str(error))])
    manifest, problem = read_manifest(source)
    if problem:
        tables.coverage.note(text_note(problem))
    return reduce_window(tables, source.name, task, manifest)


def read_tables(source: Source, task: Task) -> RankTables:
    """Tables of one file, from the cache where it holds them."""
    if task.cache is None:
        return read_trace(source, threads=task.threads, progress=task.progress, most_rows=task.most_rows)
    tables = cache.load(source, task.cache)
    if tables is None:
        tables = read_trace(source, threads=task.threads, progress=task.progress, most_rows=task.most_rows)
        if tables.kept_until is None:
            cache.store(source, tables, task.cache)
    elif task.progress is not None:
        task.progress(source.size)
    return tables


def reduce_window(tables: RankTables, name: str, task: Task, manifest: Manifest | None = None) -> Window:
    """Link the tables of one file, with what the recorder says of it, and run every reducer on them."""
    identity = identify(tables, name)
    if manifest is not None and identity.rank is not None and identity.rank != manifest.rank:
        tables.coverage.note(note("manifest_of_other_rank", rank=identity.rank, manifest=manifest.rank))
        manifest = None
    if manifest is not None:
        identity = recorded.filled(identity, manifest)
    activity = build_activity(tables, _steps_kept(tables, task.steps), manifest, task.named)
    reduced = {analysis: reducer(activity) for analysis, reducer in task.reducers.items()}
    for found in identity.notes:
        tables.coverage.note(found)
    return _window(activity, identity, packed(reduced) if task.pack else reduced)


def _steps_kept(tables: RankTables, wanted: tuple[int | None, int | None] | None) -> tuple[int | None, int | None] | None:
    """The steps to look at: the wanted ones, of a trace that was not kept whole those that were, with all of the work they launched.

    A device works on a step after the host is through with it: the last step whose ranges are whole does not count, and what the host does
    behind the others is put aside, since what it launched may not have been kept. MemoryError where no step is left.
    """
    if tables.kept_until is None:
        return wanted
    steps = find_steps(tables)
    whole = int((steps.end <= tables.kept_until).sum())
    if len(steps) and whole < 2:
        raise MemoryError("one step alone needs more memory than --memory-limit leaves: raise it")
    if not len(steps):
        tables.coverage.note(note("kept_without_steps"))
        return wanted
    last = int(steps.number[whole - 1])
    tables.coverage.note(note("steps_kept", whole - 1, total=len(steps)))
    mark = tables.each_text(tables.name, is_step_mark)
    tables.phase[(tables.ts >= steps.end[whole - 2]) & ~np.isin(tables.category, [int(c) for c in DEVICE_WORK]) & ~mark] = 0
    tables.forget()
    first, before = wanted if wanted is not None else (None, None)
    return first, last if before is None else min(before, last)


def build_activity(
    tables: RankTables, steps: tuple[int | None, int | None] | None = None, manifest: Manifest | None = None, named: Named = ()
) -> Activity:
    """Everything a per-rank analysis looks at. ``steps``: numbers (from, to), half open, that are to be looked at."""
    span = durations.span(tables)
    found = find_steps(tables)
    phases = find_phases(tables)
    every = len(found)
    if steps is not None:
        found = _chosen_steps(found, steps)
    groups, group_of = local_groups(tables)
    work, on_cpu, lost = device_work(tables, found, span, named)
    if steps is not None:
        work = work.where((work.step >= 0) | (work.launch_step >= 0))
    operations, work = local_operations(tables, work, phases, group_of, found, named)
    if manifest is not None:
        recorded.add_groups(groups, manifest)
        recorded.add_calls(tables, operations, groups, manifest)
    _give_the_only_group(tables, operations, groups)
    ends = ending(tables, work, operations, group_of, span[1], on_cpu) if steps is None else None
    return Activity(tables, found, phases, work, operations, groups, on_cpu, span, manifest, 0 < len(found) < every, lost, ends)


def _give_the_only_group(tables: RankTables, operations: pd.DataFrame, groups: list[LocalGroup]) -> None:
    """Where the rank is in just one group of two ranks or more, its operations whose group is not recorded can only be there.

    Not for kernels that only their name tells: libraries have communicators of their own.
    """
    larger = [number for number, group in enumerate(groups) if group.size != 1]
    of_torch = (operations["evidence"] != "kernel_name").to_numpy() | operations["implementation"].isin(_OF_TORCH).to_numpy()
    lost = of_torch & (operations["group"] < 0).to_numpy()
    if len(larger) == 1 and lost.any():
        operations.loc[lost, "group"] = larger[0]
        name = groups[larger[0]].description or groups[larger[0]].name
        tables.coverage.note(note("only_group_taken", lost.sum(), group=name))


def _chosen_steps(steps: Steps, wanted: tuple[int | None, int | None]) -> Steps:
    first, last = wanted
    keep = np.ones(len(steps), np.bool_)
    if first is not None:
        keep &= steps.number >= first
    if last is not None:
        keep &= steps.number < last
    return replace(steps, number=steps.number[keep], start=steps.start[keep], end=steps.end[keep])


def _partial(activity: Activity) -> BoolArray:
    """Steps of which it is not known what the device did all the time."""
    times = step_times(activity.steps, activity.window)
    device = activity.device
    busy = intervals.union(device.start, device.end)
    return intervals.covered(times.start, times.end, intervals.subtract(activity.lost.unknown, busy)) > 0


def _window(activity: Activity, identity: Identity, reduced: dict[str, Any]) -> Window:
    tables = activity.tables
    tables.coverage.rank = identity.rank
    return Window(
        coverage=tables.coverage,
        identity=identity,
        rank=identity.rank,
        on_cpu=activity.on_cpu,
        span=activity.window,
        steps=activity.steps,
        groups=interned(activity.groups),
        operations=activity.operations,
        reduced=reduced,
        partial=_partial(activity),
        device_read=activity.lost.device,
        ending=activity.ending,
        manifest=None if activity.manifest is None else msgspec.structs.replace(activity.manifest, owners=Owners(), calls=Calls()),
    )
