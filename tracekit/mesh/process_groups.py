"""Process groups: what each rank says of its own, and the union over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LocalGroup:
    """A process group as one rank's trace describes it. Equal instances are one group.

    ``ranks`` are global ranks in group order, ``None`` where the list was cut or not recorded; then ``known`` holds the members that were
    readable and ``size`` still tells how many there are (0: unknown).
    """

    name: str
    description: str
    ranks: tuple[int, ...] | None
    size: int
    known: tuple[int, ...] = ()
    backend: str = ""


@dataclass(frozen=True)
class ProcessGroup:
    """A process group of the job. ``id`` is unique and stable (name and members); ``axis`` is '' where no mesh axis is known."""

    id: str
    name: str
    description: str
    ranks: tuple[int, ...] | None
    known: tuple[int, ...]
    size: int
    axis: str = ""
    spans_nodes: bool | None = None


@dataclass(frozen=True)
class ProcessGroups:
    """All groups of a job, and for each window the translation from its local groups: ``index[window][local] -> groups``."""

    groups: Sequence[ProcessGroup]
    index: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, number: int) -> ProcessGroup:
        return self.groups[number]
