"""Process groups: what each rank says of its own, and the union over all ranks.

A group of the job is its name and its members. Names alone do not do: groups of one mesh axis often share one. Members alone do not either:
two groups over the same ranks are two communicators, and their collectives are counted apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tracekit.notes import Note, note


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


_met: dict[LocalGroup, LocalGroup] = {}
#: Groups that are remembered.
_MOST_MET = 1 << 16


def interned(groups: Sequence[LocalGroup]) -> list[LocalGroup]:
    """The groups, as the instances that were met first in this process: each rank of a job lists the members of all of it."""
    if len(_met) > _MOST_MET:
        _met.clear()
    return [_met.setdefault(group, group) for group in groups]


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


#: No rank list of more members than this is believed, or built from start and stride.
LARGEST_WORLD = 1_000_000
#: torch writes ``undefined`` where a group was made without a description.
NO_DESCRIPTION = ("", "undefined")
#: How torch describes the group of all ranks.
DEFAULT_GROUP = "default_pg"

_Key = tuple[str, tuple[int, ...], bool, int, int]


@dataclass
class _Claim:
    """That one window's rank is in a group: what it says of the group, and (once found) what the job knows of it."""

    rank: int
    group: LocalGroup
    ranks: tuple[int, ...] | None
    known: tuple[int, ...] = ()
    size: int = 0
    alone: bool = False  # the claim contradicts others of the same name: never one group with them

    @property
    def key(self) -> _Key:
        """Claims of one key are one group; its order is that of the job's groups."""
        members = self.ranks if self.ranks is not None else self.known
        return self.group.name, tuple(sorted(members)), self.ranks is None, self.size, self.rank if self.alone else -1


def unite(windows: Sequence[tuple[int, Sequence[LocalGroup]]], world_size: int | None) -> tuple[ProcessGroups, list[Note]]:
    """All groups of the job from what each window's rank knows: ``windows`` are (rank, its groups).

    A cut list is completed by another rank's whole list of the same name, size, description and visible members. Where no rank has the
    whole list, every rank that claims the group is known to be a member. Groups whose members and description agree are one although ranks
    number them differently. The result does not depend on the order of the windows.
    """
    claims = [[_claim(rank, group, world_size) for group in groups] for rank, groups in windows]
    every = [claim for own in claims for claim in own]
    _complete(every)
    notes = _gather_partial([claim for claim in every if claim.ranks is None], world_size)
    one_name = _renumbered(every)
    keys = [[one_name.get(claim.key, claim.key) for claim in own] for own in claims]
    by_key: dict[_Key, list[_Claim]] = {}
    for key, claim in zip((key for own in keys for key in own), every, strict=True):
        by_key.setdefault(key, []).append(claim)
    ordered = sorted(by_key, key=lambda key: (_natural(key[0]), key[1:]))
    united = [_united(key[0], by_key[key]) for key in ordered]
    notes += [found for key, group in zip(ordered, united, strict=True) for found in _contradictions(by_key[key], group, world_size)]
    united = [_renamed(group, identifier) for group, identifier in zip(united, _identifiers(united), strict=True)]
    index = {key: i for i, key in enumerate(ordered)}
    return ProcessGroups(united, [[index[key] for key in own] for own in keys]), notes


def _renumbered(claims: Sequence[_Claim]) -> dict[_Key, _Key]:
    """The key to use for groups that ranks call by different names (torch before 2.4 counts per rank) though all else agrees.

    Not where a rank knows both: these are two communicators over the same ranks.
    """
    described: dict[_Key, set[str]] = {}
    for claim in claims:
        described.setdefault(claim.key, set()).add(claim.group.description)
    alike: dict[tuple[tuple[int, ...], str], dict[_Key, set[int]]] = {}
    for claim in claims:
        named = claim.group.description not in (*NO_DESCRIPTION, DEFAULT_GROUP)
        if claim.ranks is not None and named and len(described[claim.key]) == 1:
            same = alike.setdefault((tuple(sorted(claim.ranks)), claim.group.description), {})
            same.setdefault(claim.key, set()).add(claim.rank)
    result: dict[_Key, _Key] = {}
    for same in alike.values():
        if len(same) > 1 and sum(map(len, same.values())) == len(set().union(*same.values())):
            first = min(same, key=lambda key: (_natural(key[0]), key[1:]))
            result.update(dict.fromkeys(same, first))
    return result


def _natural(name: str) -> tuple[int, int, str]:
    """Sort key: numbers first, by value."""
    number = name.isascii() and name.isdigit() and len(name) < 19
    return (0, int(name), name) if number else (1, 0, name)


def _claim(rank: int, group: LocalGroup, world_size: int | None) -> _Claim:
    if group.ranks is None and world_size == group.size > 0 and world_size <= LARGEST_WORLD and max(group.known, default=0) < world_size:
        return _Claim(rank, group, tuple(range(world_size)), size=group.size)  # as many members as there are ranks: all of them
    return _Claim(rank, group, group.ranks, group.known, group.size)


def _complete(claims: Sequence[_Claim]) -> None:
    """Give a claim without all members those that another rank has recorded, where just one group fits."""
    whole: dict[str, dict[tuple[int, ...], set[str]]] = {}
    for claim in claims:
        if claim.ranks is not None:
            whole.setdefault(claim.group.name, {}).setdefault(claim.ranks, set()).add(claim.group.description)
    for claim in claims:
        if claim.ranks is not None:
            continue
        fits = [
            ranks
            for ranks, described in whole.get(claim.group.name, {}).items()
            if claim.size in (0, len(ranks))
            and ranks[: len(claim.known)] == claim.known
            and claim.rank in ranks
            and any(same_description(claim.group.description, other) for other in described)
        ]
        if len(fits) == 1:
            claim.ranks, claim.size = fits[0], len(fits[0])


def same_description(one: str, other: str) -> bool:
    """Whether two descriptions can be of one group: equal, or one of them not given."""
    return one == other or one in NO_DESCRIPTION or other in NO_DESCRIPTION


def _gather_partial(claims: Sequence[_Claim], world_size: int | None) -> list[Note]:
    """Put claims of one group without a whole list together: its members are those recorded anywhere, and the ranks that claim it."""
    clusters: dict[str, list[list[_Claim]]] = {}
    ordered = sorted(claims, key=lambda c: (c.group.name, -c.size, -len(c.known), c.known, c.rank, c.group.description))
    for claim in ordered:
        same = clusters.setdefault(claim.group.name, [])
        fits = [cluster for cluster in same if _one_group(cluster[0], claim)]
        mine = [cluster for cluster in fits if claim.rank in cluster[0].known]
        fits = mine if len(mine) == 1 else fits
        if len(fits) == 1:
            fits[0].append(claim)
        else:
            claim.alone = len(fits) > 1
            same.append([claim])
    return [found for same in clusters.values() for cluster in same for found in _settle(cluster, world_size)]


def _one_group(first: _Claim, claim: _Claim) -> bool:
    """``first`` says the most of its group: the other must say the same, or less."""
    if first.alone or claim.size not in (0, first.size) or first.known[: len(claim.known)] != claim.known:
        return False
    return same_description(first.group.description, claim.group.description)


def _settle(cluster: Sequence[_Claim], world_size: int | None) -> list[Note]:
    notes = []
    known, size = cluster[0].known, cluster[0].size
    claimants = sorted({claim.rank for claim in cluster} - set(known))
    if size and len(known) + len(claimants) > size:
        outside = [claim for claim in cluster if claim.rank not in known]
        notes.append(note("too_many_members", len(known) + len(claimants), group=(cluster[0].group.name,), size=size))
        for claim in outside:
            claim.known, claim.alone = (claim.rank,), True
        cluster, claimants = [claim for claim in cluster if claim.rank in known], []
    everyone = (*known, *claimants)
    complete = len(everyone) == size > 0 and (world_size is None or max(everyone) < world_size)
    for claim in cluster:
        claim.known, claim.size = (() if complete else everyone), size
        claim.ranks = everyone if complete else None
    return notes


def _united(name: str, claims: Sequence[_Claim]) -> ProcessGroup:
    """The group of these claims; ``name`` is the one to use where ranks number it differently."""
    first = min(claims, key=lambda c: (c.ranks or (), c.known))
    descriptions = sorted({claim.group.description for claim in claims})
    described = [text for text in descriptions if text not in NO_DESCRIPTION]
    known = () if first.ranks is not None else first.known
    return ProcessGroup("", name, (described or descriptions)[0], first.ranks, known, first.size or len(first.ranks or ()))


def _contradictions(claims: Sequence[_Claim], group: ProcessGroup, world_size: int | None) -> list[Note]:
    """Several descriptions, members that the world does not have."""
    described = sorted({claim.group.description for claim in claims} - set(NO_DESCRIPTION))
    outside = [rank for rank in (group.ranks or group.known) if world_size is not None and rank >= world_size]
    notes = [note("several_descriptions", group=(group.name,), descriptions=tuple(described))] if len(described) > 1 else []
    return notes + ([note("rank_outside_world", group=(group.name,), rank=max(outside), world=world_size)] if outside else [])


def _renamed(group: ProcessGroup, identifier: str) -> ProcessGroup:
    return ProcessGroup(identifier, group.name, group.description, group.ranks, group.known, group.size)


def _identifiers(groups: Sequence[ProcessGroup]) -> list[str]:
    """The name where it is unique, else name and members (``3@0,1``), else quote marks behind it."""
    names = [group.name for group in groups]
    once = {name for name, same in itertools.groupby(sorted(names)) if len(list(same)) == 1 and name}
    result: list[str] = []
    used = set(once)
    for group in groups:
        text = group.name
        if text not in once:
            label = group.name or (group.description if group.description not in NO_DESCRIPTION else "group")
            text = f"{label}@{short_ranks(group.ranks if group.ranks is not None else group.known)}"
            while text in used:
                text += "'"
        used.add(text)
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
