"""Who waits where, for whom: the collectives that stand still, and sends and receives without their other half.

In a group the collective that hangs is the one with the lowest number that some member has called and not completed. Of the members

    waiting   have called it and are not through
    missing   have a dump in which they have not come so far
    no dump   cannot be asked: they died, or nobody dumped them
    differ    have called something else under this number, or with sizes or types that do not fit

Sends and receives have no common number: the n-th send from s to d belongs to the n-th receive of d from s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tracekit.analyses.hang.gather import Call, Evidence, Group, Standing, standing
from tracekit.readers.hang_files import DONE

#: Kinds in which every rank has to bring tensors of the same size.
_ALIKE = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "reduce", "barrier")


@dataclass
class Wait:
    """One collective, or one send or receive, that stands still. ``differ``: rank -> its call instead of ``call``."""

    group: Group
    call: Call
    waiting: list[Call]
    missing: list[int]
    no_dump: list[int]
    differ: list[Call] = field(default_factory=list)
    last_completed: int = -1
    other_kind: bool = False
    left: str = "dump"  # what those who cannot be asked have not left
    all_in: bool = False  # all members have called it, and none is through

    @property
    def blamed(self) -> list[int]:
        """Those that the others wait for."""
        return sorted({*self.missing, *self.no_dump, *(call.rank for call in self.differ)})


def collective_wait(evidence: Evidence, group: Group) -> Wait | None:
    """The collective in which a group stands still; None where it does not."""
    asked = [rank for rank in group.ranks if rank in evidence.dumps]
    places = {rank: standing(evidence, group, rank) for rank in asked}
    blocked = {rank: _first_open(evidence, rank, found) for rank, found in places.items() if len(found.open)}
    if not blocked:
        return None
    number = min(blocked.values())
    calls = [call for rank in asked if (call := call_at(evidence, group, rank, number)) is not None]
    waiting = [call for call in calls if call.state != DONE]
    usual = _usual(calls)
    differ, other_kind = _different(calls, usual)
    missing = [rank for rank in asked if places[rank].called < number]
    no_dump = [rank for rank in group.ranks if rank not in evidence.dumps]
    if not (group.whole or missing or no_dump or differ):
        no_dump = [rank for rank in evidence.ranks if rank not in evidence.dumps]  # gloo lists no members: it can only be one of these
    last = min((places[rank].completed for rank in asked if places[rank].called >= 0), default=-1)
    stays = [call for call in waiting if call not in differ]
    all_in = group.whole and len(waiting) == len(group.ranks)
    return Wait(group, usual, stays or waiting, missing, no_dump, differ, min(last, number - 1), other_kind, evidence.left, all_in)


def _first_open(evidence: Evidence, rank: int, found: Standing) -> int:
    return int(evidence.dumps[rank].calls.seq[found.open].min())


def call_at(evidence: Evidence, group: Group, rank: int, number: int) -> Call | None:
    """The collective of this number of a rank; None where its dump has none."""
    calls = evidence.dumps[rank].calls
    places = group.calls.get(rank, np.empty(0, np.int64))
    places = places[(calls.seq[places] == number) & (calls.source[places] < 0)]
    return evidence.call(group, rank, int(places[-1])) if len(places) else None


def _usual(calls: Sequence[Call]) -> Call:
    """The call that most ranks made."""
    (kind, what), _ = Counter((call.kind, call.what) for call in calls).most_common(1)[0]
    return next(call for call in calls if (call.kind, call.what) == (kind, what))


def _different(calls: Sequence[Call], usual: Call) -> tuple[list[Call], bool]:
    """Calls that do not fit the usual one, and whether they are of another kind."""
    kinds = [call for call in calls if call.kind != usual.kind]
    if kinds:
        return kinds, True
    return ([call for call in calls if call.what != usual.what] if usual.kind in _ALIKE else []), False


def message_waits(evidence: Evidence, group: Group) -> list[Wait]:
    """Sends and receives of a group that are open and whose other half was never called, one a rank and peer."""
    calls = {rank: _messages(evidence, group, rank) for rank in group.calls if rank in evidence.dumps}
    posted: Counter[tuple[int, int, str]] = Counter()
    for rank, found in calls.items():
        for call in found:
            posted[_ends(rank, call)] += 1
    waits: dict[tuple[int, int], Wait] = {}
    for rank, found in calls.items():
        own: Counter[tuple[int, int, str]] = Counter()
        for call in found:
            source, destination, kind = _ends(rank, call)
            own[source, destination, kind] += 1
            if call.state == DONE:
                continue
            other = posted[source, destination, "recv" if kind == "send" else "send"]
            if call.peer not in evidence.dumps:
                waits.setdefault((rank, call.peer), Wait(group, call, [call], [], [call.peer], left=evidence.left))
            elif other < own[source, destination, kind]:
                waits.setdefault((rank, call.peer), Wait(group, call, [call], [call.peer], []))
    return list(waits.values())


def _messages(evidence: Evidence, group: Group, rank: int) -> list[Call]:
    calls = evidence.dumps[rank].calls
    places = group.calls[rank]
    return [evidence.call(group, rank, place) for place in places[calls.source[places] >= 0].tolist()]


def _ends(rank: int, call: Call) -> tuple[int, int, str]:
    return (rank, call.peer, "send") if call.kind == "send" else (call.peer, rank, "recv")


@dataclass(frozen=True)
class Skipped:
    """``rank`` left out the collective ``seq`` of a group: from there on it is one ahead of the others' program."""

    rank: int
    group: Group
    seq: int
    call: Call  # what the others called under that number


def skipped(evidence: Evidence, wait: Wait) -> list[Skipped]:
    """Collectives that a blamed rank left out: its calls are the others' calls of one number later.

    Told by kind, sizes and the line of code, over the numbers that all dumps still hold.
    """
    group = wait.group
    suspects = [rank for rank in wait.blamed if rank in evidence.dumps]
    others = [rank for rank in group.ranks if rank in evidence.dumps and rank not in suspects]
    if not others:
        return []
    told = _signatures(evidence, group, others[0])
    found = []
    for rank in suspects:
        own = _signatures(evidence, group, rank)
        first = next((number for number in sorted(own) if number in told and own[number] != told[number]), None)
        if first is None or not told[first][2]:
            continue
        behind = [number for number in sorted(own) if number >= first and number + 1 in told]
        if behind and all(own[number] == told[number + 1] for number in behind):
            call = call_at(evidence, group, others[0], first)
            if call is not None:
                found.append(Skipped(rank, group, first, call))
    return found


def _signatures(evidence: Evidence, group: Group, rank: int) -> dict[int, tuple[str, str, str]]:
    """Number -> (kind, sizes, line of code) of a rank's collectives."""
    dump = evidence.dumps[rank]
    calls, texts = dump.calls, dump.texts
    places = group.calls.get(rank, np.empty(0, np.int64))
    places = places[calls.source[places] < 0]
    columns = (calls.seq[places], calls.kind[places], calls.what[places], calls.site[places])
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return {seq: (texts[kind], texts[what], texts[site]) for seq, kind, what, site in rows}
