"""Which operations of different ranks are one collective, and what that says about waiting.

    collectives with a sequence number       (group, seq)                                                       matched_by seq
    point-to-point                           n-th send with n-th receive of (group, source, destination, step)  order
    group known, no sequence number          n-th with n-th of (group, kind, step)                              order
    group not known                          n-th with n-th of equal sequences of kinds in a step               order

A match by order is a fallback and labelled so: it never crosses a step, needs all sides to agree on how many there are (``_order``), and is
given up where the clocks contradict it. What is not matched is said in ``notes``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import pandas as pd

from tracekit import schema
from tracekit.collectives import _order
from tracekit.collectives._columns import Columns, columns_of, distinct_of, extremes, nth_of, numbered
from tracekit.mesh.process_groups import ProcessGroups
from tracekit.notes import Note, note
from tracekit.trace.events import Int32Array, Int64Array
from tracekit.units import NULL
from tracekit.vocabulary import KINDS

#: No more than this many sentences of one sort.
_MOST_NOTES = 8


@dataclass(frozen=True)
class Matched:
    """``match``: index of the match of each operation, -1 none; ``by``: 'seq' or 'order' of each match; ``notes`` for the user."""

    match: Int32Array
    by: list[str]
    notes: list[Note]


def match(operations: pd.DataFrame, groups: ProcessGroups, hosts: Mapping[int, str] | None = None) -> Matched:
    """Match the operations of all ranks; every match holds at least two ranks, and each rank once.

    ``operations`` has rank, group (index into ``groups``, -1 unknown), kind, seq, source_rank, destination_rank, start_ns, end_ns (each
    rank's own clock), step_number, stream; launch_ns and launch_step_number are used where present. ``hosts``: rank -> host name, so that
    clocks of different hosts are not held against each other.
    """
    if not len(operations):
        return Matched(np.empty(0, np.int32), [], [])
    work = columns_of(operations)
    notes: list[Note] = []
    key = np.full(len(operations), -1, np.int64)
    by_order = np.ones(len(operations), np.bool_)
    p2p = work.of_kind("send", "recv")
    # A send_recv's sequence number may be one of the group's point-to-point calls, which every rank counts for itself.
    counted = ~p2p & ~work.of_kind("send_recv") & (work.group >= 0) & (work.seq != NULL)
    rest = ~p2p & ~counted
    by_order[counted] = False
    for chosen, matcher in (
        (counted, partial(_by_seq, work, groups=groups)),
        (p2p, partial(_order.pairs, work)),
        (rest & (work.group >= 0), partial(_order.known_groups, work, groups=groups)),
        (rest & (work.group < 0), partial(_order.unknown_groups, work)),
    ):
        rows = np.flatnonzero(chosen)
        if len(rows):
            numbers, unmatched = matcher(rows=rows)
            notes += unmatched
            key[rows] = np.where(numbers >= 0, numbers + int(key.max()) + 1, -1)
    _drop_unmatched(key, work.rank)
    notes += _order.drop_implausible(key, by_order, work, hosts or {}, groups)
    found = key >= 0
    result = np.full(len(key), -1, np.int32)
    _, first, result[found] = np.unique(key[found], return_index=True, return_inverse=True)
    by = ["order" if ordered else "seq" for ordered in by_order[found][first].tolist()]
    return Matched(result, by, list(dict.fromkeys(notes)))


def _by_seq(work: Columns, rows: Int64Array, groups: ProcessGroups) -> tuple[Int64Array, list[Note]]:
    """(group, seq). A number that one rank shows several times (a call that ran as several kernels): n-th with n-th."""
    pair = numbered(work.group[rows], work.seq[rows])
    actor = numbered(pair, work.rank[rows])
    nth = nth_of(actor, work.order[rows], work.start[rows])
    repeats = np.bincount(actor)[actor]
    least, most = extremes(pair, repeats)
    agreed = (least == most)[pair]
    shared = {"seq_shared": agreed & (repeats > 1), "seq_shared_unevenly": ~agreed}
    notes = [note(code, chosen.sum()) for code, chosen in shared.items() if chosen.any()]
    found = np.where(agreed, numbered(pair, nth), -1)
    notes += _split_kinds(work, rows, found, groups)
    return found, notes + _edges(work, rows, pair, groups)


def _split_kinds(work: Columns, rows: Int64Array, found: Int64Array, groups: ProcessGroups) -> list[Note]:
    """Ranks that call different collectives under one sequence number are out of step with each other: no match, but worth a note."""
    certain = work.certain[rows] & (found >= 0)
    least, most = extremes(found, work.kind[rows].astype(np.int64), certain)
    odd = np.flatnonzero(least < most)
    notes = []
    for number in odd[:_MOST_NOTES].tolist():
        own = rows[found == number]
        called = tuple((int(work.rank[r]), KINDS[work.kind[r]]) for r in own.tolist())
        group = groups[int(work.group[own[0]])].id
        notes.append(note("ranks_out_of_step", len(own), group=group, seq=int(work.seq[own[0]]), called=called))
    if len(odd) > _MOST_NOTES:
        notes.append(note("more_out_of_step", len(odd) - _MOST_NOTES))
    found[np.isin(found, odd)] = -1
    return notes


def _edges(work: Columns, rows: Int64Array, pair: Int64Array, groups: ProcessGroups) -> list[Note]:
    """Sequence numbers that one member shows and another, whose trace was read, does not: their windows begin or end at other times."""
    group, rank = work.group[rows], work.rank[rows]
    seen = distinct_of(pair, rank)[pair]
    of_group = numbered(group)
    present = distinct_of(of_group, rank)[of_group]
    alone = np.flatnonzero(seen < present)
    owner = numbered(group[alone], rank[alone])
    _, first = np.unique(owner, return_index=True)
    notes = []
    for number, at in enumerate(alone[np.sort(first)][:_MOST_NOTES].tolist()):
        numbers = np.unique(work.seq[rows[alone[owner == number]]]).tolist()
        notes.append(note("seq_not_everywhere", len(numbers), group=groups[int(group[at])].id, seq=tuple(numbers), rank=int(rank[at])))
    if len(first) > _MOST_NOTES:
        notes.append(note("more_seq_not_everywhere", len(first) - _MOST_NOTES))
    return notes


def _drop_unmatched(key: Int64Array, rank: Int32Array) -> None:
    """A match needs two ranks."""
    found = np.flatnonzero(key >= 0)
    if len(found):
        match_of = numbered(key[found])
        key[found[distinct_of(match_of, rank[found])[match_of] < 2]] = -1


def measure(operations: pd.DataFrame, matched: Matched, groups: ProcessGroups) -> tuple[pd.DataFrame, Int64Array]:
    """schema.MATCHES and the wait [ns] of each operation (NULL where it is not matched), from ALIGNED times.

    wait = last arrival - own start; transfer = latest end - last arrival, never below 0: the time in which bytes can have moved. Before the
    last arrival a rank only waits, but for one whose call had ended by then (the root of a broadcast, a buffered send): its wait is 0, and
    where it leaves only one rank behind, there is no transfer either. Of a send with its receive, whichever came first waited for the
    other; the pair is a 'send', and its end is that of the receive: a host backend's send lasts until somebody asks whether it is done.
    """
    wait = np.full(len(operations), NULL, np.int64)
    rows = np.flatnonzero(matched.match >= 0)
    if not len(rows):
        return schema.MATCHES.empty(), wait
    rows = rows[np.argsort(matched.match[rows], kind="stable")]
    number = matched.match[rows].astype(np.int64)
    work = columns_of(operations.iloc[rows])
    first = np.flatnonzero(np.append(True, number[1:] != number[:-1]))
    first_start, last_start = extremes(number, work.start)
    left = work.end < last_start[number]  # nobody waits in a call that he has left
    wait[rows] = np.where(left, 0, last_start[number] - work.start)
    earliest = _first_where(number, work.start == first_start[number])
    last_rank = extremes(number, work.rank.astype(np.int64), work.start == last_start[number])[0]
    ranks = distinct_of(number, work.rank)
    kind = _kind_of_match(work, number, first)
    expected = np.array([g.size for g in groups.groups] + [0], np.int64)[work.group[first]]
    expected = np.where(kind == KINDS.index("send"), 2, expected)
    received, end = (extremes(number, work.end, chosen)[1] for chosen in (work.of_kind("recv"), None))
    end = np.where(received != NULL, received, end)
    present = np.bincount(number[~left], minlength=len(ranks))
    by = np.array([name == "order" for name in matched.by], np.int64)
    step = operations["step_number"].to_numpy()[rows]
    frame = schema.MATCHES.frame(
        {
            "group": work.group[first],
            "kind": schema.categorical(kind, KINDS),
            "seq": np.where(by == 0, work.seq[first], NULL),
            "step_number": step[earliest],
            "ranks": ranks,
            "expected": expected,
            "complete": (ranks == expected) & (expected > 0),
            "first_start_ns": first_start,
            "last_start_ns": last_start,
            "end_ns": end,
            "last_rank": last_rank,
            "transfer_ns": np.where(present > 1, np.maximum(end - last_start, 0), NULL),
            "matched_by": schema.categorical(by, ("seq", "order")),
            "full_bytes": _full_of_match(operations["full_bytes"].to_numpy()[rows], number, kind, ranks, expected),
        }
    )
    return schema.MATCHES.check(frame), wait


def _first_where(number: Int64Array, chosen: npt.NDArray[np.bool_]) -> Int64Array:
    """Position of the first chosen entry of each number."""
    return extremes(number, np.arange(len(number)), chosen)[0]


def _kind_of_match(work: Columns, number: Int64Array, first: Int64Array) -> Int64Array:
    """The kind that a member knows for sure, else the first member's; a pair is a send."""
    certain = extremes(number, work.kind.astype(np.int64), work.certain)[0]
    kind = np.where(certain < len(KINDS), certain, work.kind[first])
    pair = np.isin(kind, [KINDS.index("send"), KINDS.index("recv")])
    return np.where(pair, KINDS.index("send"), kind).astype(np.int64)


def _full_of_match(full: Int64Array, number: Int64Array, kind: Int64Array, ranks: Int64Array, expected: Int64Array) -> Int64Array:
    """The full tensor of each match [bytes]: what its members say; of several sizes the largest.

    Except where all members of an uneven all_gather or reduce_scatter were seen and each took its own shard times the ranks for the full
    tensor (as torch's list versions write it): the shards together are the sum of what they say, divided by the ranks.
    """
    least, most = extremes(number, full)
    shares = np.isin(kind, [KINDS.index("all_gather"), KINDS.index("reduce_scatter")])
    uneven = shares & (least < most) & (least != NULL) & (ranks == expected)
    total = np.zeros(len(most), np.int64)
    np.add.at(total, number[uneven[number]], full[uneven[number]])
    return np.where(uneven, total // np.maximum(ranks, 1), most)
