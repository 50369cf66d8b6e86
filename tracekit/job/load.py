"""Files to Job: find the files, map over them, join what came back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tracekit.errors import InputError, UsageError
from tracekit.executors import local
from tracekit.executors.base import Executor
from tracekit.job.activity import Window
from tracekit.job.join import join
from tracekit.job.memory_files import MemoryFile, add_memory
from tracekit.job.model import Job
from tracekit.job.window import Reducers, Task, read_window
from tracekit.readers.sources import Source, find_sources
from tracekit.trace.events import Coverage

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class LoadOptions:
    """What a user can say about the input. ``steps`` is half open; ``cache`` a folder, None for no cache."""

    mesh: str | None = None
    gpus_per_node: int | None = None
    ranks: frozenset[int] | None = None
    steps: tuple[int | None, int | None] | None = None
    jobs: int | None = None
    scheduler: str | None = None
    cache: str | None = None


def load_job(paths: Sequence[str], options: LoadOptions, reducers: Reducers | None = None, progress: Progress | None = None) -> Job:
    """Read every rank under ``paths`` and join them.

    ``progress`` gets (bytes read, bytes in all) from any thread. Raises InputError when nothing at all could be read.
    """
    found = find_sources(paths)
    windows: list[Window] = []
    memory: list[MemoryFile] = []
    coverage: list[Coverage] = list(found.skipped)
    for result in _read_all(found.sources, options, reducers or {}, progress):
        if isinstance(result, Window):
            windows.append(result)
        elif isinstance(result, MemoryFile):
            memory.append(result)
        else:
            coverage.append(result)
    if not windows and not memory:
        raise InputError(_nothing_readable(coverage), "nothing is left to analyze")
    job = join(windows, coverage, options.mesh, options.gpus_per_node, options.ranks if windows else None)
    add_memory(job, memory, options.ranks)
    if options.steps is not None and windows and not any(len(w.steps) for w in windows):
        raise UsageError("no step of --steps is in the traces", "leave --steps out to see which there are")
    return job


def _nothing_readable(coverage: Sequence[Coverage]) -> str:
    first = coverage[0]
    more = f" (and {len(coverage) - 1} more files)" if len(coverage) > 1 else ""
    reason = first.problems[0] if first.problems else "not readable"
    return reason + more if first.file in reason else f"{first.file}: {reason}{more}"


def _read_all(
    sources: Sequence[Source], options: LoadOptions, reducers: Reducers, progress: Progress | None
) -> list[Window | MemoryFile | Coverage]:
    total = sum(source.size for source in sources)
    executor: Executor
    if options.scheduler is not None:
        from tracekit.executors.cluster import DaskExecutor

        executor, shared, workers = DaskExecutor(options.scheduler), False, 1
    else:
        chosen = local.choose(options.jobs, len(sources), total)
        executor, shared, workers = chosen, chosen.kind == "threads", chosen.jobs
    report = _Counter(total, progress) if progress is not None else None
    task = Task(
        reducers=reducers,
        steps=options.steps,
        cache=options.cache,
        threads=max(1, local.available_cores() // workers),
        progress=report.add if report is not None and shared else None,
    )
    results: dict[int, Window | MemoryFile | Coverage] = {}
    for index, result in executor.map(partial(_read_one, task=task), sources):
        results[index] = result
        if report is not None and not shared:
            report.add(sources[index].size)
    return [results[index] for index in sorted(results)]


def _read_one(source: Source, task: Task) -> Window | MemoryFile | Coverage:
    return read_window(source, task)


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
