"""What an executor is: one ``map`` whose results come back as they are done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Lost:
    """What stands in the place of a result when the worker of an item died, and died again when the item was tried alone."""

    reason: str


class Executor(Protocol):
    """Runs one function over many items, each on its own."""

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R | Lost]]:
        """Yield (index of the item, result), in the order in which they are done, every item once.

        An exception of ``function`` is raised here; a worker that dies costs no other item its result.
        """
