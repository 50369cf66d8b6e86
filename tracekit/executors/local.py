"""This machine: one after the other, threads (a reader's scan runs without the GIL), or processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

T = TypeVar("T")
R = TypeVar("R")

#: Starting processes costs about a second; threads share the GIL in everything but the scan and the large numpy calls.
PROCESSES_FROM_BYTES = 2_000_000_000


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class LocalExecutor:
    """``jobs`` items at a time."""

    jobs: int
    kind: Literal["threads", "processes"] = "threads"

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R]]:
        """See Executor.map. At most ``jobs`` items are in work, so memory follows ``jobs``, not the number of items."""
        if self.jobs <= 1 or len(items) <= 1:
            for index, item in enumerate(items):
                yield index, function(item)
            return
        pool: ThreadPoolExecutor | ProcessPoolExecutor
        if self.kind == "threads":
            pool = ThreadPoolExecutor(self.jobs)
        else:
            pool = ProcessPoolExecutor(self.jobs, mp_context=multiprocessing.get_context("spawn"))
        with pool:
            try:
                yield from _bounded(pool.submit, function, items, self.jobs)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _bounded(submit: Callable[..., Future[R]], function: Callable[[T], R], items: Sequence[T], limit: int) -> Iterator[tuple[int, R]]:
    waiting = iter(enumerate(items))
    running: dict[Future[R], int] = {}
    while True:
        while len(running) < limit and (following := next(waiting, None)) is not None:
            running[submit(partial(function, following[1]))] = following[0]
        if not running:
            return
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            yield running.pop(future), future.result()


def choose(jobs: int | None, items: int, total_bytes: int) -> LocalExecutor:
    """Threads for small input, processes where the start-up of a pool is small beside the work."""
    workers = max(1, min(available_cores() if jobs is None else jobs, items))
    return LocalExecutor(workers, "processes" if workers > 1 and total_bytes >= PROCESSES_FROM_BYTES else "threads")
