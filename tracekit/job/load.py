"""Files to Job: find the files, map over them, join what came back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from tracekit.errors import InputError, UsageError
from tracekit.executors import local
from tracekit.executors.base import Executor, Lost
from tracekit.executors.memory import give_back, machine_memory
from tracekit.job.activity import Window
from tracekit.job.join import join
from tracekit.job.model import Job
from tracekit.job.options import LoadOptions
from tracekit.job.packed import PACKED_FROM
from tracekit.job.runs import one_run
from tracekit.job.standstill import Standstill, standstill
from tracekit.job.window import Reducers, Task, read_window
from tracekit.mesh.process_groups import interned
from tracekit.notes import Note, note, text_note
from tracekit.readers.archives import as_folders
from tracekit.readers.hang_files import Dump, HangFile, Stacks
from tracekit.readers.sources import Found, Source, find_sources
from tracekit.trace.events import Coverage

Progress = Callable[[int, int], None]
#: Of the machine's memory, for reading memory snapshots where no limit is given.
SNAPSHOT_SHARE = 0.5
#: Notes of files that another --memory-limit would read further.
_NOT_ALL = ("steps_kept", "kept_without_steps")
#: What the program takes without any events, and each event with all that is worked out of it at a time [bytes], by measurement.
PROGRAM_BYTES, ROW_BYTES, LEAST_ROWS = 300_000_000, 200, 500_000
_TOO_LARGE = "needs more memory than there is: raise --memory-limit, or read it on a machine with more"


def load_job(
    paths: Sequence[str],
    options: LoadOptions,
    reducers: Reducers | None = None,
    progress: Progress | None = None,
    found: Found | None = None,
) -> Job:
    """Read every rank under ``paths`` and join them. ``found``: what ``find_sources`` has said of these paths, if it was asked.

    ``progress`` gets (bytes read, bytes in all) from any thread. Raises InputError when nothing at all could be read.
    """
    if found is not None:
        return _load(found, options, reducers or {}, progress)
    with as_folders(paths) as (folders, archives):
        job = _load(find_sources(folders), options, reducers or {}, progress)
    for entry in job.coverage:  # files are called by where the user has them
        for folder, archive in archives.items():
            entry.file = entry.file.replace(folder, archive)
    return job


def _load(found: Found, options: LoadOptions, reducers: Reducers, progress: Progress | None) -> Job:
    windows: list[Window] = []
    hang: list[HangFile] = []
    coverage: list[Coverage] = list(found.skipped)
    for result in _read_all(found.sources, options, reducers, progress):
        if isinstance(result, Window):
            windows.append(result)
        elif isinstance(result, Coverage):
            coverage.append(result)
        else:
            hang.append(result)
            coverage.append(_told(result))
    if not windows and not hang:
        raise InputError(_nothing_readable(coverage), "nothing is left to analyze")
    windows, runs = one_run(windows, {source.url: source.size for source in found.sources}, options.run)
    job = join(windows, coverage, options.mesh, options.gpus_per_node, options.ranks)
    if (still := standstill(job)) is not None:
        job = _before(found.sources, options, reducers, job, still)
        job.standstill = still
    job.runs = runs
    job.settled = not any(entry.passing or any(found.code in _NOT_ALL for found in entry.notes) for entry in job.coverage)
    _add_hang(job, hang)
    if options.steps is not None and job.traced and not any(len(w.steps) for w in windows):
        raise UsageError("no step of --steps is in the traces", "leave --steps out to see which there are")
    if options.steps is not None:
        job.notes += _beyond(windows, options.steps)
    return job


def _before(sources: Sequence[Source], options: LoadOptions, reducers: Reducers, job: Job, still: Standstill) -> Job:
    """The job until it stood still: figures of a step that never ends say nothing. As it is where no step ended before."""
    if still.step is None or not any((window.steps.number < still.step).any() for window in job.windows):
        return job
    kept = {window.coverage.file for window in job.windows}
    chosen = replace(options, steps=(None, still.step))
    results = [result for result in _read_all(sources, chosen, reducers, None) if isinstance(result, Window)]
    windows = [window for window in results if window.coverage.file in kept]
    skipped = [entry for entry in job.coverage if entry.file not in kept]
    earlier = join(windows, skipped, options.mesh, options.gpus_per_node, options.ranks)
    earlier.notes.append(note("steps_before_hang", first=still.step))
    return earlier


def _told(file: HangFile) -> Coverage:
    """The entry of a file that tells of a hang: its events are the entries of a dump, the threads of a text."""
    count = len(file.calls) if isinstance(file, Dump) else len(file.threads) if isinstance(file, Stacks) else len(file.communicators)
    return Coverage(file.file, file.rank, events=count)


def _add_hang(job: Job, hang: list[HangFile]) -> None:
    """Dumps beside the traces, or alone: then the job is what they say of it."""
    job.hang_files = hang
    if not hang or job.traced:
        return
    job.ranks = sorted({*job.ranks, *(file.rank for file in hang if file.rank is not None)})
    worlds = [g.ranks for file in hang if isinstance(file, Dump) for g in file.groups if g.ranks and g.description == "default_pg"]
    job.world_size = job.world_size or max((len(ranks) for ranks in worlds), default=None)
    job.notes = [entry for entry in job.notes if entry.code != "world_size_not_recorded" or job.world_size is None]
    job.missing_ranks = [rank for rank in range(job.world_size or 0) if rank not in job.ranks] if (job.world_size or 0) <= 1 << 20 else []


def _beyond(windows: Sequence[Window], wanted: tuple[int | None, int | None]) -> list[Note]:
    """A note where ``--steps`` asks for more than the traces hold."""
    there = [int(number) for window in windows for number in window.steps.number]
    if not there:
        return []
    first, last = wanted
    before = first is not None and first < min(there)
    behind = last is not None and last - 1 > max(there)
    return [note("steps_beyond", first=min(there), last=max(there))] if before or behind else []


def _nothing_readable(coverage: Sequence[Coverage]) -> str:
    tells = [entry for entry in coverage if not any("JSON without a list traceEvents" in problem for problem in entry.problems)]
    first = (tells or coverage)[0]
    more = f" (and {len(coverage) - 1} more files)" if len(coverage) > 1 else ""
    reason = first.problems[0] if first.problems else "not readable"
    return reason + more if first.file in reason else f"{first.file}: {reason}{more}"


def _read_all(
    sources: Sequence[Source], options: LoadOptions, reducers: Reducers, progress: Progress | None
) -> list[Window | HangFile | Coverage]:
    total = sum(source.size for source in sources)
    executor, shared, workers = _executor(options, len(sources), total)
    report = _Counter(total, progress) if progress is not None else None
    task = Task(
        reducers=reducers,
        steps=options.steps,
        cache=options.cache,
        named=options.named,
        threads=max(1, local.available_cores() // workers),
        progress=report.add if report is not None and shared else None,
        memory_limit=_snapshot_limit(options) // workers,
        most_rows=_most_rows(options, reducers, workers),
        pack=len(sources) >= PACKED_FROM,
    )
    results: dict[int, Window | HangFile | Coverage] = {}
    too_large: list[int] = []
    for index, result in executor.map(partial(_read_one, task=task), sources):
        if result is None:
            too_large.append(index)
            continue
        results[index] = _lost(sources[index], result.reason) if isinstance(result, Lost) else result
        if isinstance(result, Window):
            result.groups = interned(result.groups)  # those of another process are copies
        if report is not None and not shared:
            report.add(sources[index].size)
    for index in too_large:  # beside others there was not memory enough: one at a time, when all others are done
        try:
            results[index] = read_window(sources[index], replace(task, memory_limit=_snapshot_limit(options)))
        except MemoryError as error:
            results[index] = _lost(sources[index], str(error) if "--memory-limit" in str(error) else _TOO_LARGE)
    if task.pack:
        give_back()
    return [results[index] for index in sorted(results)]


def _executor(options: LoadOptions, items: int, total: int) -> tuple[Executor, bool, int]:
    """(where files are read, whether in this process, how many at a time)."""
    if options.scheduler is None and options.executor != "dask":
        chosen = local.choose(options.jobs, items, total, options.executor, options.memory_limit)
        return chosen, chosen.kind == "threads", chosen.jobs
    from tracekit.executors.cluster import DaskExecutor

    workers = options.jobs or local.available_cores()
    return DaskExecutor(options.scheduler, workers), False, workers if options.scheduler is None else 1


def _most_rows(options: LoadOptions, reducers: Reducers, workers: int) -> int | None:
    """Events of one file that may be held at a time; None without a limit, and where every event is to be written again."""
    if options.memory_limit is None or any(getattr(reducer, "scratch", False) for reducer in reducers.values()):
        return None
    return max(LEAST_ROWS, (options.memory_limit - PROGRAM_BYTES) // (workers * ROW_BYTES))


def _snapshot_limit(options: LoadOptions) -> int:
    """Bytes that reading memory snapshots may take in all."""
    return int(machine_memory() * SNAPSHOT_SHARE) if options.memory_limit is None else options.memory_limit


def _lost(source: Source, reason: str) -> Coverage:
    return Coverage(source.url, status="skipped", notes=[text_note(reason)], passing=True)


def _read_one(source: Source, task: Task) -> Window | HangFile | Coverage | None:
    """What one file gives; None where memory did not suffice."""
    try:
        return read_window(source, task)
    except MemoryError:
        return None


class _Counter:
    """Bytes read so far, added up from all threads."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._lock = threading.Lock()
        self._done = 0
        self._total = total
        self._progress = progress

    def add(self, size: int) -> None:
        with self._lock:
            self._done += size
            self._progress(self._done, self._total)


__all__ = ["LoadOptions", "Progress", "load_job"]
