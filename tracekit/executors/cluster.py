"""A Dask cluster behind the same ``map``: one that runs already, or one on this machine for this command alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, TypeVar

from tracekit.errors import UsageError
from tracekit.executors.base import Lost

T = TypeVar("T")
R = TypeVar("R")


class DaskExecutor:
    """Items run on the workers of a scheduler, which must see the same paths and have tracekit installed.

    ``address``: of a scheduler (tcp://host:8786); None starts ``workers`` processes on this machine.
    """

    def __init__(self, address: str | None, workers: int = 1) -> None:
        try:
            self._dask: Any = import_module("distributed")  # untyped, and not installed by default
        except ImportError as error:
            raise UsageError("--scheduler and --executor dask need Dask", "install tracekit[cluster]") from error
        try:
            if address is None:
                self._client = self._dask.Client(n_workers=workers, threads_per_worker=1, dashboard_address=None)
            else:
                self._client = self._dask.Client(address, timeout="10s")
        except (OSError, ValueError, TimeoutError) as error:
            where = "could be started on this machine" if address is None else f"answers at {address}"
            raise UsageError(f"no Dask scheduler {where}", "check the address (tcp://host:8786)") from error

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R | Lost]]:
        """See Executor.map. Results are fetched one at a time and released on the cluster.

        Dask blames everything that a worker had in hand for its death: what it gave up is tried again, each item alone.
        """
        futures = self._client.map(function, list(items), pure=False)
        places = {future.key: index for index, future in enumerate(futures)}
        finished = self._dask.as_completed(futures)
        del futures
        suspects = []
        try:
            for future in finished:
                if self._killed(future):
                    suspects.append(places[future.key])
                else:
                    yield places[future.key], future.result()
                future.release()
            for index in suspects:
                future = self._client.submit(function, items[index], pure=False)
                yield index, Lost("every worker that read it died") if self._killed(future) else future.result()
        finally:
            self._client.close()

    def _killed(self, future: Any) -> bool:
        return isinstance(future.exception(), self._dask.scheduler.KilledWorker)
