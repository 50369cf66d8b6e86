"""This machine: one after the other, threads (a reader's scan runs without the GIL), or processes."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Literal, TypeVar

from tracekit.executors.base import Lost
from tracekit.executors.memory import LEAST_BYTES, limit_memory

T = TypeVar("T")
R = TypeVar("R")

#: Starting processes costs about a second; threads share the GIL in everything but the scan and the large numpy calls.
PROCESSES_FROM_BYTES = 2_000_000_000

#: Another item may have broken the pool: only what kills a worker of its own, this often, is given up.
TRIES_ALONE = 2


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class LocalExecutor:
    """``jobs`` items at a time; ``memory_limit`` [bytes] of each process that it starts."""

    jobs: int
    kind: Literal["threads", "processes"] = "threads"
    memory_limit: int | None = None

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R | Lost]]:
        """See Executor.map. At most ``jobs`` items are in work, so memory follows ``jobs``, not the number of items."""
        if self.kind == "processes":
            yield from self._in_processes(function, items)
        elif self.jobs <= 1 or len(items) <= 1:
            for index, item in enumerate(items):
                yield index, function(item)
        else:
            with ThreadPoolExecutor(self.jobs) as pool:
                yield from _bounded(pool, function, items, range(len(items)), self.jobs)

    def _in_processes(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R | Lost]]:
        """A killed worker breaks its pool: what was in work is tried again, each item alone, and a new pool goes on with the rest."""
        left = dict.fromkeys(range(len(items)))
        while left:
            suspects: list[int] = []
            with self._processes(self.jobs) as pool:
                for index, result in _bounded(pool, function, items, list(left), self.jobs, suspects):
                    del left[index]
                    yield index, result
            for index in suspects:
                del left[index]
                yield index, self._alone(function, items[index])

    def _alone(self, function: Callable[[T], R], item: T) -> R | Lost:
        for _ in range(TRIES_ALONE):
            with self._processes(1) as pool:
                try:
                    return pool.submit(function, item).result()
                except BrokenProcessPool:
                    continue
        return Lost("the process that read it was killed, and again when it read nothing else (out of memory?)")

    def _processes(self, jobs: int) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(self.memory_limit,))


def _begin(memory_limit: int | None) -> None:
    """First of all in a worker: its limit, and to end with its parent (it would wait for work for ever)."""
    if memory_limit is not None:
        limit_memory(memory_limit)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_wait_for, args=(parent.sentinel,), daemon=True).start()


def _wait_for(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def _bounded(
    pool: Executor, function: Callable[[T], R], items: Sequence[T], order: Sequence[int], limit: int, suspects: list[int] | None = None
) -> Iterator[tuple[int, R]]:
    """Results of ``items`` at ``order``. ``suspects`` gets those that were in work when a worker died, which ends the iteration."""
    waiting = iter(order)
    running: dict[Future[R], int] = {}
    try:
        while True:
            while len(running) < limit and (following := next(waiting, None)) is not None:
                running[pool.submit(function, items[following])] = following
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                result = future.result()
                yield running.pop(future), result
    except BrokenProcessPool:
        if suspects is None or not running:
            raise
        suspects += running.values()
    except BaseException:
        for child in multiprocessing.active_children():
            child.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def choose(
    jobs: int | None, items: int, total_bytes: int, kind: Literal["threads", "processes"] | None = None, memory_limit: int | None = None
) -> LocalExecutor:
    """Threads for small input, processes where the start-up of a pool is small beside the work, unless ``kind`` says which.

    ``memory_limit`` [bytes] is shared by the processes.
    """
    workers = max(1, min(available_cores() if jobs is None else jobs, items))
    if kind is None:
        kind = "processes" if workers > 1 and total_bytes >= PROCESSES_FROM_BYTES else "threads"
    return LocalExecutor(workers, kind, None if memory_limit is None else max(LEAST_BYTES, memory_limit // workers))
