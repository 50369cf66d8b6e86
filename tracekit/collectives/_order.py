"""Matching without a sequence number: n-th with n-th, where all sides agree on how many there are; and what speaks against it.

Nothing here crosses a step where steps are known. Results are labelled ``order`` and given up where the clocks contradict them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tracekit.collectives._columns import Columns, distinct_of, extremes, nth_of, numbered
from tracekit.collectives.kinds import BLOCKING
from tracekit.mesh.process_groups import ProcessGroups
from tracekit.notes import Note, note
from tracekit.trace.events import BoolArray, Int64Array
from tracekit.units import NS_PER_MS, NULL

#: A blocking collective whose last rank arrives this long after another has left is not one collective.
IMPLAUSIBLE_NS = NS_PER_MS
#: When more than this share of a group's matches by order are such, none of them is believed.
IMPLAUSIBLE_SHARE = 0.1


Numbered = tuple[Int64Array, list[Note]]
"""The number of the match of each row (-1: none), and what was not matched."""


def pairs(work: Columns, rows: Int64Array) -> Numbered:
    """Sends with receives: n-th with n-th of (group, source, destination, step), where both sides show equally many."""
    known = (work.source[rows] != NULL) & (work.destination[rows] != NULL)
    sends = work.of_kind("send")[rows]
    edge = numbered(work.group[rows], work.source[rows], work.destination[rows], work.step[rows])
    nth = nth_of(numbered(edge, sends), work.order[rows], work.start[rows])
    sent, received = np.bincount(edge, sends)[edge], np.bincount(edge, ~sends)[edge]
    usable = known & _comparable(work, rows)
    peer = np.where(sends, work.destination[rows], work.source[rows])
    lost = {
        "messages_uneven": usable & (sent != received) & np.isin(peer, work.rank),
        "messages_without_peer": ~known,
        "messages_outside_steps": known & ~usable,
    }
    notes = [note(code, chosen.sum()) for code, chosen in lost.items() if chosen.any()]
    return np.where(usable & (sent == received), numbered(edge, nth), -1), notes


def known_groups(work: Columns, rows: Int64Array, groups: ProcessGroups) -> Numbered:
    """n-th with n-th of (group, kind, step), where every member that recorded the step shows equally many."""
    cell_of_step = numbered(work.group[rows], work.step[rows])
    cell = numbered(cell_of_step, work.kind[rows])
    actor = numbered(cell, work.rank[rows])
    nth = nth_of(actor, work.order[rows], work.start[rows])
    least, most = extremes(cell, np.bincount(actor)[actor] if len(actor) else actor)
    ranks = distinct_of(cell, work.rank[rows])
    agreed = (least == most)[cell] & (ranks[cell] == _members(work, rows, cell_of_step, groups)[cell_of_step]) & _comparable(work, rows)
    sizes = np.array([g.size for g in groups.groups], np.int64)[work.group[rows]]
    agreed &= ~work.of_kind("send_recv")[rows] | (sizes == 2)  # between more than two ranks nobody knows who sends to whom
    notes = [note("uneven_without_seq", (~agreed).sum())] if not agreed.all() else []
    return np.where(agreed, numbered(cell, nth), -1), notes


def _members(work: Columns, rows: Int64Array, cell_of_step: Int64Array, groups: ProcessGroups) -> Int64Array:
    """For each place (group and step) how many members recorded the step. Where members are unknown, they are those seen in the group."""
    count = int(cell_of_step.max(initial=-1)) + 1
    first = np.full(count, len(rows))
    np.minimum.at(first, cell_of_step, np.arange(len(rows)))
    ranks_of_step = _ranks_of_steps(work)
    result = np.zeros(count, np.int64)
    seen: dict[int, list[int]] = {}
    for number, row in enumerate(rows[first].tolist()):
        group = int(work.group[row])
        if group not in seen:
            members = groups[group].ranks
            seen[group] = list(members) if members is not None else np.unique(work.rank[work.group == group]).tolist()
        result[number] = np.isin(seen[group], ranks_of_step[int(work.step[row])]).sum()
    return result


def _ranks_of_steps(work: Columns) -> dict[int, Int64Array]:
    """Which ranks show any operation in each step (NULL: outside every step)."""
    seen = np.unique(np.stack([work.step, work.rank.astype(np.int64)], axis=1), axis=0)
    steps, begin = np.unique(seen[:, 0], return_index=True)
    return dict(zip(steps.tolist(), np.split(seen[:, 1], begin[1:]), strict=True))


def unknown_groups(work: Columns, rows: Int64Array) -> Numbered:
    """n-th with n-th among ranks that show the very same sequence of kinds in the step.

    The sequence is that of a whole rank where every call's time is known (the program's order); else that of each stream, for a device
    runs its streams against each other as it likes.
    """
    streams = np.where(_called_in_order(work, rows), 0, work.stream[rows])
    actor = numbered(work.rank[rows], work.step[rows], streams)
    nth = nth_of(actor, work.order[rows], work.start[rows])
    sequence = _sequences(actor, nth, work.kind[rows])
    # Several streams of one rank may show one sequence: they are told apart by their number's order.
    _, first = np.unique(actor, return_index=True)
    twin = nth_of(numbered(work.rank[rows], work.step[rows], sequence)[first], streams[first].astype(np.int64))
    cell = numbered(work.step[rows], sequence, twin[actor])
    usable = _comparable(work, rows) & ~work.of_kind("send_recv")[rows]
    alone = distinct_of(cell, work.rank[rows])[cell] < 2 if len(rows) else usable
    lost = alone | ~usable
    several = len(np.unique(work.rank)) > 1
    notes = [note("unmatched_without_group", lost.sum())] if several and lost.any() else []
    return np.where(usable & ~alone, numbered(cell, nth), -1), notes


def _called_in_order(work: Columns, rows: Int64Array) -> BoolArray:
    """Whether the calls of the operation's step have known and different times on every rank."""
    step = numbered(work.step[rows])
    call = numbered(work.rank[rows], step, work.launch[rows])
    clear = (work.launch[rows] != NULL) & (np.bincount(call)[call] == 1 if len(call) else True)
    everywhere: BoolArray = extremes(step, clear.astype(np.int64))[0][step] == 1
    return everywhere


def _sequences(actor: Int64Array, nth: Int64Array, kind: np.ndarray[tuple[int], np.dtype[np.int8]]) -> Int64Array:
    """A number for the sequence of kinds of the actor that each entry belongs to."""
    if not len(actor):
        return actor
    arranged = np.lexsort((nth, actor))
    ends = np.cumsum(np.bincount(actor)).tolist()
    text = kind[arranged].tobytes()
    numbers: dict[bytes, int] = {}
    begin, own = 0, []
    for end in ends:
        own.append(numbers.setdefault(text[begin:end], len(numbers)))
        begin = end
    return np.array(own, np.int64)[actor]


def _comparable(work: Columns, rows: Int64Array) -> BoolArray:
    """Operations outside every step can be ordered only where all ranks recorded the same steps, or none recorded any."""
    inside = work.step != NULL
    rank, step = work.rank[inside].astype(np.int64), work.step[inside]
    ranks_of_step = distinct_of(numbered(step), rank)
    same = not len(step) or bool((ranks_of_step == len(np.unique(work.rank))).all())
    comparable: BoolArray = (work.step[rows] != NULL) | same
    return comparable


def drop_implausible(key: Int64Array, by_order: BoolArray, work: Columns, hosts: Mapping[int, str], groups: ProcessGroups) -> list[Note]:
    """Takes back (in ``key``) matches by order that the clocks contradict; returns a note for each group."""
    notes: list[Note] = []
    rows = np.flatnonzero((key >= 0) & by_order & work.of_kind(*BLOCKING, "send", "recv"))
    if not len(rows):
        return notes
    match = numbered(key[rows])
    gap = _gap(work, rows, match, hosts)
    _, first = np.unique(match, return_index=True)
    group = work.group[rows[first]]
    for number in np.unique(group[gap > IMPLAUSIBLE_NS]).tolist():
        of_group = group == number
        wrong = of_group & (gap > IMPLAUSIBLE_NS)
        bad, matches = int(wrong.sum()), int(of_group.sum())
        hopeless = bad > IMPLAUSIBLE_SHARE * matches
        code = "order_not_believed" if hopeless else "matches_taken_back"
        name = f"group {groups[number].id}" if number >= 0 else "operations without a recorded group"
        notes.append(note(code, bad, group=name, matches=matches, ms=float(gap[wrong].max()) / NS_PER_MS))
        gone = rows[(of_group if hopeless else wrong)[match]]
        key[gone] = -1
        if hopeless:
            key[(work.group == number) & by_order] = -1
    return notes


def _gap(work: Columns, rows: Int64Array, match: Int64Array, hosts: Mapping[int, str]) -> Int64Array:
    """For each match how long after a member had left the one came that it had to wait for [ns]; negative where they overlap.

    A receive cannot end before its send is called; a send may (its message waits in a buffer). A host backend's own range of a send does
    not count: gloo opens it behind the call, when the message may have arrived.
    """
    shift = _host_offsets(work, rows, match, hosts)
    sends, receives = work.of_kind("send")[rows], work.of_kind("recv")[rows]
    start, end = np.where(sends, work.order[rows], work.start[rows]) - shift, work.end[rows] - shift
    last_start = extremes(match, start, ~receives)[1]
    first_end = extremes(match, end, ~sends)[0]
    return last_start - first_end


def _host_offsets(work: Columns, rows: Int64Array, match: Int64Array, hosts: Mapping[int, str]) -> Int64Array:
    """Roughly by how much each row's host is ahead of the first host: the median difference of ends, as collectives end together."""
    result = np.zeros(len(rows), np.int64)
    ranks, cell_of_step = np.unique(work.rank[rows], return_inverse=True)
    names = {name: i for i, name in enumerate(dict.fromkeys(hosts.get(int(r), "") for r in ranks))}
    if len(names) < 2:
        return result
    host = np.array([names[hosts.get(int(r), "")] for r in ranks])[cell_of_step]
    reference = extremes(match, work.end[rows], host == 0)[0][match]
    there = reference != np.iinfo(np.int64).max
    for number in range(1, int(host.max()) + 1):
        own = host == number
        if (own & there).any():
            result[own] = int(np.median(work.end[rows][own & there] - reference[own & there]))
    return result
