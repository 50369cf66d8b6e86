"""An existing Dask cluster behind the same ``map``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, TypeVar

from tracekit.errors import UsageError

T = TypeVar("T")
R = TypeVar("R")


class DaskExecutor:
    """Items run on the workers of the scheduler at ``address``; the workers must see the same paths and have tracekit installed."""

    def __init__(self, address: str) -> None:
        try:
            self._dask: Any = import_module("distributed")  # untyped, and not installed by default
        except ImportError as error:
            raise UsageError("--scheduler needs Dask", "install tracekit[cluster]") from error
        try:
            self._client = self._dask.Client(address, timeout="10s")
        except (OSError, ValueError, TimeoutError) as error:
            raise UsageError(f"no Dask scheduler answers at {address}", "check the address (tcp://host:8786)") from error

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R]]:
        """See Executor.map. Results are fetched one at a time and released on the cluster."""
        futures = self._client.map(function, list(items), pure=False)
        places = {future.key: index for index, future in enumerate(futures)}
        finished = self._dask.as_completed(futures, with_results=True)
        del futures
        try:
            for future, result in finished:
                yield places[future.key], result
                future.release()
        finally:
            self._client.close()
