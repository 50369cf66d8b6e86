"""What an executor is: one ``map`` whose results come back as they are done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Executor(Protocol):
    """Runs one function over many items, each on its own."""

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R]]:
        """Yield (index of the item, result), in the order in which they are done. An exception of ``function`` is raised here."""
