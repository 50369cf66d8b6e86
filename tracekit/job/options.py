"""What a user can say about the input. Apart from the loader, which imports much that a command may not need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tracekit.collectives.named import Named


@dataclass(frozen=True)
class LoadOptions:
    """What a user can say about the input.

    ``steps`` is half open; ``cache`` a folder, None for no cache; ``executor`` None leaves the choice to the size of the input;
    ``scheduler`` is the address of a Dask scheduler; ``memory_limit`` [bytes].
    """

    mesh: str | None = None
    gpus_per_node: int | None = None
    ranks: frozenset[int] | None = None
    steps: tuple[int | None, int | None] | None = None
    jobs: int | None = None
    scheduler: str | None = None
    executor: Literal["threads", "processes", "dask"] | None = None
    memory_limit: int | None = None
    cache: str | None = None
    named: Named = ()  # kernels that the user calls communication
    run: str | None = None  # the name of one of several runs
