"""The dumps of all ranks side by side: which groups there are, and where every rank stands in each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tracekit.readers.hang_files import DONE, FROM_TRACE, STARTED, STATES, Dump, Frame, GroupInfo, NcclLog, Stacks
from tracekit.trace.events import Int64Array

#: Errors by which a rank only says that another one has gone.
_SECONDHAND = re.compile(
    r"Connection (?:closed|reset)|Broken pipe|[Tt]imed? ?out|remote process|communicator was aborted|[Ss]ocket|TCPStore|watchdog"
)


@dataclass(frozen=True)
class Call:
    """One entry of one rank's dump. ``peer`` is the other rank (global) of a send or recv, -1 for a collective."""

    rank: int
    kind: str
    seq: int
    state: int
    what: str
    site: str
    created_ns: int
    peer: int
    place: int

    @property
    def label(self) -> str:
        """``all_reduce seq 5``; a message has no number."""
        return f"{self.kind} seq {self.seq}" if self.seq >= 0 else self.kind

    @property
    def state_name(self) -> str:
        """scheduled, started or completed."""
        return STATES[self.state]


@dataclass
class Group:
    """A process group over all dumps. ``whole``: a dump lists its members; otherwise ``ranks`` are those that were seen in it."""

    name: str
    description: str
    ranks: tuple[int, ...]
    whole: bool
    axis: str = ""
    calls: dict[int, Int64Array] = field(default_factory=dict)  # rank -> places of its calls in its dump, in order

    @property
    def label(self) -> str:
        """``dp (axis dp_shard)``: as a reader knows it."""
        called = self.description if self.description not in ("", "undefined", "default_pg") else ""
        shown = called or ("the default group" if self.description == "default_pg" else f"group {self.name}")
        return f"{shown} (axis {self.axis})" if self.axis and self.axis not in (called, "world") else shown


@dataclass
class Evidence:
    """Everything that is left of the job. ``notes`` say what is missing or odd."""

    dumps: dict[int, Dump]
    stacks: dict[int, Stacks]
    logs: list[NcclLog]
    groups: list[Group]
    notes: list[str]

    @property
    def left(self) -> str:
        """What a rank should have left: a dump, or a trace."""
        return "trace" if any(dump.version == FROM_TRACE for dump in self.dumps.values()) else "dump"

    @property
    def ranks(self) -> list[int]:
        """Ranks of the job that are known: those with a dump, and members of their groups."""
        return sorted({*self.dumps, *self.stacks, *(rank for group in self.groups for rank in group.ranks)})

    def call(self, group: Group, rank: int, place: int) -> Call:
        """One call as a record."""
        dump = self.dumps[rank]
        calls = dump.calls
        source, destination = int(calls.source[place]), int(calls.destination[place])
        kind = dump.texts[int(calls.kind[place])]
        peer = -1
        if source >= 0:
            other = destination if kind == "send" else source
            peer = group.ranks[other] if group.whole and other < len(group.ranks) else other
        what, site = dump.texts[int(calls.what[place])], dump.texts[int(calls.site[place])]
        state, seq, created = int(calls.state[place]), int(calls.seq[place]), int(calls.created_ns[place])
        return Call(rank, kind, seq, state, what, site, created, peer, place)

    def stack_of(self, rank: int, place: int | None = None) -> list[Frame]:
        """The stack of a call where the dump kept it, else of the rank's main thread."""
        if place is not None and (found := self.dumps[rank].stacks.get(place)):
            return found
        return self.stacks[rank].threads[0] if rank in self.stacks else []


def gather(files: Sequence[Dump | Stacks | NcclLog], axes: Mapping[tuple[int, ...], str]) -> Evidence:
    """Lay the files side by side. ``axes``: mesh axis by the members of a group, where traces beside them tell."""
    notes: list[str] = []
    dumps: dict[int, Dump] = {}
    stacks: dict[int, Stacks] = {}
    for file in files:
        if isinstance(file, NcclLog):
            continue
        if file.rank is None:
            notes.append(f"{file.file}: which rank this is stands neither in the file nor in its name")
        elif isinstance(file, Stacks):
            stacks[file.rank] = file
        elif file.rank not in dumps or len(file.calls) > len(dumps[file.rank].calls):
            dumps[file.rank] = file
    for rank in dumps.keys() & stacks.keys():
        dumps[rank] = _as_it_failed(dumps[rank], stacks[rank])
    logs = [file for file in files if isinstance(file, NcclLog)]
    return Evidence(dumps, stacks, logs, _groups(dumps, axes), notes)


def is_secondhand(error: str) -> bool:
    """Whether an error only says that another rank, or the connection to it, has gone."""
    return _SECONDHAND.search(error) is not None


def _as_it_failed(dump: Dump, stacks: Stacks) -> Dump:
    """A call that ended in an error about another rank stands in the dump as over; the rank was waiting in it."""
    if not (stacks.error and is_secondhand(stacks.error) and len(dump.calls)):
        return dump
    site = dump.texts[int(dump.calls.site[-1])]
    if site and not any(f"{frame.file}:{frame.line}" == site for frame in stacks.threads[0]):
        return dump  # it waited in something that the recorder leaves out: a send or receive of gloo
    state = dump.calls.state.copy()
    state[-1] = min(state[-1], STARTED)
    return replace(dump, calls=replace(dump.calls, state=state))


def _groups(dumps: Mapping[int, Dump], axes: Mapping[tuple[int, ...], str]) -> list[Group]:
    """Groups of one name with one list of members are one. Without a list a rank is in the only group of that name that has one.

    The default group is one, whatever its lists say: gloo keeps there the members of whichever group was made last.
    """
    lists: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for rank, dump in dumps.items():
        for info in dump.groups:
            if info.ranks and rank in info.ranks:
                lists.setdefault((info.name, info.description), set()).add(tuple(sorted(info.ranks)))
    found: dict[tuple[str, str, tuple[int, ...]], Group] = {}
    for rank, dump in sorted(dumps.items()):
        for number, info in enumerate(dump.groups):
            ranks = _members(info, rank, lists.get((info.name, info.description), set()))
            group = found.setdefault((info.name, info.description, ranks), Group(info.name, info.description, ranks, bool(ranks)))
            group.calls[rank] = np.flatnonzero(dump.calls.group == number).astype(np.int64)
    for group in found.values():
        group.ranks = group.ranks or tuple(sorted(group.calls))
        group.axis = axes.get(group.ranks, "world" if group.description == "default_pg" else "")
    return list(found.values())


def _members(info: GroupInfo, rank: int, lists: set[tuple[int, ...]]) -> tuple[int, ...]:
    """The members of a rank's group by its own list or the others'; () where none tells."""
    if info.description == "default_pg" and lists:
        return max(lists, key=len)
    if info.ranks and rank in info.ranks:
        return tuple(sorted(info.ranks))
    fitting = [ranks for ranks in lists if rank in ranks]
    return fitting[0] if len(fitting) == 1 else ()


@dataclass(frozen=True)
class Standing:
    """One rank in one group's collectives: the last number it has called, the last it has completed before its first open one."""

    called: int
    completed: int
    open: Int64Array  # places of calls that are not done, sends and receives not among them


def standing(evidence: Evidence, group: Group, rank: int) -> Standing:
    """Where a rank stands. -1: nothing that the dump still holds."""
    dump = evidence.dumps[rank]
    places = group.calls.get(rank, np.empty(0, np.int64))
    places = places[dump.calls.source[places] < 0]
    seq, done = dump.calls.seq[places], dump.calls.state[places] == DONE
    called = max(int(seq.max(initial=-1)), dump.enqueued.get(group.name, -1) if len(places) else -1)
    return Standing(called, int(seq[done].max(initial=-1)), places[~done])
