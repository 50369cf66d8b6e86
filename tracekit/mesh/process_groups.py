"""Process groups: what each rank says of its own, and the union over all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


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

#: A list of more members than this is not built from start and stride.
LARGEST_WORLD = 1_000_000
#: torch writes ``undefined`` where a group was made without a description.
NO_DESCRIPTION = ("", "undefined")


def unite(windows: Sequence[tuple[int, Sequence[LocalGroup]]], world_size: int | None) -> tuple[ProcessGroups, list[str]]:
    """All groups of the job from what each window's rank knows: ``windows`` are (rank, its groups).

    A group is its name and its members: mesh groups of one axis often share a name. A cut list is completed by another rank's whole list
    of the same name, size and visible members. The result does not depend on the order of the windows.
    """
    notes: list[str] = []
    whole = {(g.name, g.ranks): g for _, groups in windows for g in groups if g.ranks is not None}
    by_name: dict[str, list[LocalGroup]] = {}
    for group in whole.values():
        by_name.setdefault(group.name, []).append(group)
    keys: dict[tuple[Any, ...], list[LocalGroup]] = {}
    places: list[list[tuple[Any, ...]]] = []
    for rank, groups in windows:
        own = []
        for group in groups:
            key = _key(_completed(group, rank, by_name.get(group.name, [])))
            keys.setdefault(key, []).append(group)
            own.append(key)
        places.append(own)
    ordered = sorted(keys, key=lambda key: (not key[0].isdigit(), int(key[0]) if key[0].isdigit() else 0, key[0], key[1] or key[2], key[3]))
    named = _identifiers(ordered)
    united = []
    for key, identifier in zip(ordered, named, strict=True):
        name, ranks, known, size = key
        described = sorted({g.description for g in keys[key]} - set(NO_DESCRIPTION)) or sorted({g.description for g in keys[key]})
        if len(described) > 1:
            notes.append(f"process group {identifier} has several descriptions: {', '.join(described)}")
        if ranks is not None and world_size and ranks and ranks[-1] >= world_size:
            notes.append(f"process group {identifier} names rank {max(ranks)}, the world has {world_size}")
        united.append(ProcessGroup(identifier, name, described[0], ranks, known, size))
    index = {key: i for i, key in enumerate(ordered)}
    return ProcessGroups(united, [[index[key] for key in own] for own in places]), notes


def _completed(group: LocalGroup, rank: int, whole: Sequence[LocalGroup]) -> LocalGroup:
    if group.ranks is not None:
        return group
    fits = [
        other
        for other in whole
        if other.ranks is not None
        and group.size in (0, other.size)
        and other.ranks[: len(group.known)] == group.known
        and rank in other.ranks
    ]
    return fits[0] if len({f.ranks for f in fits}) == 1 else group


def _key(group: LocalGroup) -> tuple[str, tuple[int, ...] | None, tuple[int, ...], int]:
    return group.name, group.ranks, () if group.ranks is not None else group.known, group.size


def _identifiers(keys: Sequence[tuple[Any, ...]]) -> list[str]:
    """The name where it is unique, else name and members, else a number behind it."""
    names = [key[0] for key in keys]
    result: list[str] = []
    for name, ranks, known, _size in keys:
        text = name if name and names.count(name) == 1 else f"{name}@{short_ranks(ranks if ranks is not None else known)}"
        while text in result:
            text += "'"
        result.append(text)
    return result


def short_ranks(ranks: Sequence[int]) -> str:
    """``0-7``, ``1-63:2`` (every second), or the first members of an irregular list."""
    if not ranks:
        return "?"
    if len(ranks) == 1:
        return str(ranks[0])
    steps = {b - a for a, b in itertools.pairwise(ranks)}
    if len(steps) == 1 and len(ranks) > 2:
        step = steps.pop()
        return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step != 1 else "")
    return ",".join(str(r) for r in ranks[:8]) + (f",...({len(ranks)})" if len(ranks) > 8 else "")
