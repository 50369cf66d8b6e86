"""Which operations of different ranks are one collective.

    collectives with a sequence number      (group, seq)                                    matched_by seq
    point-to-point                          n-th send with n-th recv of (group, source, destination, step)          order
    everything else                         n-th with n-th of (group, kind, step), if all ranks of the step agree on how many    order

An order match is a fallback and labelled so: it never crosses a step, and it is given up for a whole group when the clocks contradict it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from tracekit import schema
from tracekit.mesh.process_groups import ProcessGroup, ProcessGroups
from tracekit.trace.events import BoolArray, Int32Array, Int64Array
from tracekit.units import NS_PER_MS, NULL

#: An order match whose last rank arrives this long after the first has left is not one collective.
IMPLAUSIBLE_NS = NS_PER_MS
#: ... and when more than this share of a group's order matches are such, none of them is believed.
IMPLAUSIBLE_SHARE = 0.1
_ANY_KIND = ("send_recv", "unknown")


@dataclass(frozen=True)
class Matched:
    """``match``: index of the match of each operation, -1 none; ``by``: 'seq' or 'order' of each match."""

    match: Int32Array
    by: list[str]
    notes: list[str]


def match(operations: pd.DataFrame, groups: ProcessGroups) -> Matched:
    """Match the operations of all ranks (schema.OPERATIONS before matching, plus source_rank, destination_rank, launch columns)."""
    count = len(operations)
    if not count:
        return Matched(np.empty(0, np.int32), [], [])
    work = _Work(operations)
    key = np.full(count, -1, np.int64)
    by = np.zeros(count, np.int8)  # 0 seq, 1 order
    kind = work.kind
    p2p = kind.isin(["send", "recv"])
    numbered = ~p2p & (kind != "send_recv") & (work.group >= 0) & (work.seq != NULL)
    notes: list[str] = []
    found = _by_seq(work, np.flatnonzero(numbered), notes, groups.groups)
    key[numbered] = found
    pairs = np.flatnonzero(p2p)
    key[pairs] = _offset(_pairs(work, pairs, notes), key)
    by[pairs] = 1
    rest = np.flatnonzero(~p2p & ~numbered)
    key[rest] = _offset(_by_order(work, rest), key)
    by[rest] = 1
    _drop_lonely(key, work.rank)
    _drop_implausible(key, by, work, groups.groups, notes)
    return _numbered(key, by, notes)


class _Work:
    """The columns that matching looks at, as arrays."""

    def __init__(self, operations: pd.DataFrame) -> None:
        self.rank = operations["rank"].to_numpy()
        self.group = operations["group"].to_numpy()
        self.kind = operations["kind"].astype("str")
        self.kind_code = pd.factorize(self.kind)[0]
        self.seq = operations["seq"].to_numpy()
        self.source = operations["source_rank"].to_numpy()
        self.destination = operations["destination_rank"].to_numpy()
        self.start = operations["start_ns"].to_numpy()
        self.end = operations["end_ns"].to_numpy()
        launch_step, own_step = operations["launch_step_number"].to_numpy(), operations["step_number"].to_numpy()
        launch = operations["launch_ns"].to_numpy()
        self.step = np.where(launch != NULL, launch_step, own_step)
        self.order = np.where(launch != NULL, launch, self.start)


def _ids(*columns: npt.NDArray[np.generic]) -> Int64Array:
    """A number for each distinct combination of the columns."""
    frame = pd.DataFrame({str(i): column for i, column in enumerate(columns)})
    return frame.groupby(list(frame.columns), sort=False).ngroup().to_numpy().astype(np.int64)


def _nth(ids: Int64Array, order: Int64Array) -> Int64Array:
    """Place of each entry among those of the same id, in the given order."""
    arranged = np.lexsort((order, ids))
    sorted_ids = ids[arranged]
    opens = np.append(True, sorted_ids[1:] != sorted_ids[:-1])
    first = np.maximum.accumulate(np.where(opens, np.arange(len(ids)), 0))
    result = np.empty(len(ids), np.int64)
    result[arranged] = np.arange(len(ids)) - first
    return result


def _offset(found: Int64Array, taken: Int64Array) -> Int64Array:
    """The same match numbers, moved behind those already given."""
    start = int(taken.max(initial=-1)) + 1
    return np.where(found >= 0, found + start, -1)


def _by_seq(work: _Work, rows: Int64Array, notes: list[str], groups: Sequence[ProcessGroup]) -> Int64Array:
    if not len(rows):
        return np.empty(0, np.int64)
    pair = _ids(work.group[rows], work.seq[rows])
    nth = _nth(_ids(pair, work.rank[rows]), work.order[rows])
    if nth.any():
        notes.append(f"{int((nth > 0).sum())} operations repeat a sequence number of their group on one rank: n-th is matched with n-th")
    found = _ids(pair, nth)
    _note_kinds(work, rows, found, notes, groups)
    _note_edges(work, rows, found, notes, groups)
    return found


def _note_kinds(work: _Work, rows: Int64Array, found: Int64Array, notes: list[str], groups: Sequence[ProcessGroup]) -> None:
    """Ranks that call different collectives under one sequence number are out of step with each other."""
    certain = ~work.kind.iloc[rows].isin(_ANY_KIND).to_numpy()
    frame = pd.DataFrame({"match": found[certain], "kind": work.kind_code[rows][certain]})
    several = frame.groupby("match")["kind"].nunique()
    odd = several[several > 1].index.to_numpy()
    for number in odd[:3]:
        own = rows[found == number]
        said = ", ".join(f"rank {work.rank[r]}: {work.kind.iloc[r]}" for r in own[:4])
        group = groups[int(work.group[own[0]])]
        notes.append(f"group {group.id} seq {work.seq[own[0]]}: ranks call different collectives ({said}): the job may be out of step")
    if len(odd) > 3:
        notes.append(f"{len(odd) - 3} more collectives whose kind differs between ranks")


def _note_edges(work: _Work, rows: Int64Array, found: Int64Array, notes: list[str], groups: Sequence[ProcessGroup]) -> None:
    """Sequence numbers that one present member has and another, also present, has not (windows that start or end at other times)."""
    frame = pd.DataFrame({"group": work.group[rows], "rank": work.rank[rows], "match": found, "seq": work.seq[rows]})
    seen = frame.groupby("match")["rank"].transform("nunique")
    present = frame.groupby("group")["rank"].transform("nunique")
    lonely = frame[(seen < present) & (present > 1)]
    for number, rank in lonely[["group", "rank"]].drop_duplicates().head(8).to_numpy().tolist():
        numbers = sorted(lonely["seq"][(lonely["group"] == number) & (lonely["rank"] == rank)].unique())
        shown = ", ".join(str(s) for s in numbers[:6])
        more = f", ... ({len(numbers)} in all)" if len(numbers) > 6 else ""
        notes.append(f"group {groups[number].id}: seq {shown}{more} of rank {rank} is not seen on every other rank that was read")


def _pairs(work: _Work, rows: Int64Array, notes: list[str]) -> Int64Array:
    """Sends with recvs. Where both sides have steps the order counts inside a step; counts must agree."""
    if not len(rows):
        return np.empty(0, np.int64)
    known = (work.source[rows] != NULL) & (work.destination[rows] != NULL)
    side = (work.kind.iloc[rows] == "send").to_numpy()
    edge = _ids(work.group[rows], work.source[rows], work.destination[rows], work.step[rows])
    nth = _nth(_ids(edge, side), work.order[rows])
    total = pd.DataFrame({"edge": edge, "send": side, "recv": ~side}).groupby("edge")[["send", "recv"]].transform("sum")
    even = (total["send"] == total["recv"]).to_numpy()
    lost = int((known & ~even & (total["send"] > 0).to_numpy() & (total["recv"] > 0).to_numpy()).sum())
    if lost:
        notes.append(f"{lost} sends and receives are not matched: the two sides of their edge do not show equally many in the step")
    if not known.all():
        notes.append(f"{int((~known).sum())} sends and receives are not matched: the peer's rank is not recorded")
    return np.where(known & even, _ids(edge, nth), -1)


def _by_order(work: _Work, rows: Int64Array) -> Int64Array:
    """n-th with n-th of (group, kind, step); only where every rank that ran any of (group, step) ran equally many of the kind."""
    if not len(rows):
        return np.empty(0, np.int64)
    group, step, kind, rank = work.group[rows], work.step[rows], work.kind_code[rows], work.rank[rows]
    place = _ids(group, step)
    cell = _ids(place, kind)
    nth = _nth(_ids(cell, rank), work.order[rows])
    frame = pd.DataFrame({"place": place, "cell": cell, "rank": rank})
    ranks_of_place = frame.groupby("place")["rank"].transform("nunique").to_numpy()
    counts = frame.groupby(["cell", "rank"]).size()
    spread = counts.groupby("cell").agg(["min", "max", "size"])
    own = spread.loc[cell]
    agreed = (own["min"].to_numpy() == own["max"].to_numpy()) & (own["size"].to_numpy() == ranks_of_place)
    return np.where(agreed & _comparable(work, rows), _ids(cell, nth), -1)


def _comparable(work: _Work, rows: Int64Array) -> BoolArray:
    """Operations outside every step can only be ordered where all ranks recorded the same steps (or none has any)."""
    inside = work.step != NULL
    steps = pd.DataFrame({"rank": work.rank[inside], "step": work.step[inside]}).drop_duplicates()
    sets = steps.groupby("rank")["step"].apply(frozenset)
    same = len(set(sets)) <= 1 and len(sets) in (0, len(np.unique(work.rank)))
    inside_or_same: BoolArray = (work.step[rows] != NULL) | same
    return inside_or_same


def _drop_lonely(key: Int64Array, rank: Int32Array) -> None:
    """A match needs two ranks."""
    found = key >= 0
    if found.any():
        seen = pd.DataFrame({"key": key[found], "rank": rank[found]}).groupby("key")["rank"].transform("nunique").to_numpy()
        key[np.flatnonzero(found)[seen < 2]] = -1


def _drop_implausible(key: Int64Array, by: npt.NDArray[np.int8], work: _Work, groups: Sequence[ProcessGroup], notes: list[str]) -> None:
    """Order matches that the clocks contradict: the last rank came long after the first had left."""
    rows = np.flatnonzero((key >= 0) & (by == 1) & ~work.kind.isin(["send", "recv"]).to_numpy())
    if not len(rows):
        return
    frame = pd.DataFrame({"key": key[rows], "group": work.group[rows], "start": work.start[rows], "end": work.end[rows]})
    matches = frame.groupby("key").agg(group=("group", "first"), start=("start", "max"), end=("end", "min"))
    gap = matches["start"] - matches["end"]
    for number in matches["group"].unique().tolist():
        part = gap[matches["group"] == number]
        bad = int((part > IMPLAUSIBLE_NS).sum())
        if bad > IMPLAUSIBLE_SHARE * len(part):
            name = groups[number].id if number >= 0 else "of unrecorded operations"
            notes.append(
                f"group {name}: {bad} of {len(part)} matches by order contradict the clocks (by up to {part.max() / NS_PER_MS:.1f} ms), "
                "so its operations are left unmatched"
            )
            key[rows[(frame["group"] == number).to_numpy()]] = -1


def _numbered(key: Int64Array, by: npt.NDArray[np.int8], notes: list[str]) -> Matched:
    found = key >= 0
    result = np.full(len(key), -1, np.int32)
    _, first, inverse = np.unique(key[found], return_index=True, return_inverse=True)
    result[found] = inverse
    names = ("seq", "order")
    return Matched(result, [names[by[np.flatnonzero(found)[i]]] for i in first], list(dict.fromkeys(notes)))


def measure(operations: pd.DataFrame, matched: Matched, groups: ProcessGroups) -> tuple[pd.DataFrame, Int64Array]:
    """schema.MATCHES and the wait [ns] of each operation, from ALIGNED times.

    wait = last arrival - own start; transfer = latest end - last arrival, never below 0. In a send/recv pair both may wait for the other.
    """
    wait = np.full(len(operations), NULL, np.int64)
    rows = np.flatnonzero(matched.match >= 0)
    if not len(rows):
        return schema.MATCHES.empty(), wait
    rows = rows[np.argsort(matched.match[rows], kind="stable")]
    number = matched.match[rows]
    begin = np.flatnonzero(np.append(True, number[1:] != number[:-1]))
    start, end = operations["start_ns"].to_numpy()[rows], operations["end_ns"].to_numpy()[rows]
    rank = operations["rank"].to_numpy()[rows]
    last_start = np.maximum.reduceat(start, begin)
    latest = np.maximum.reduceat(end, begin)
    size = np.diff(np.append(begin, len(rows)))
    wait[rows] = np.repeat(last_start, size) - start
    is_last = start == np.repeat(last_start, size)
    last_rank = np.minimum.reduceat(np.where(is_last, rank, np.iinfo(np.int32).max), begin)
    first_row = rows[begin]
    group = operations["group"].to_numpy()[first_row]
    expected = np.array([g.size for g in groups.groups] + [0], np.int32)[group]
    kind = operations["kind"].astype("str").to_numpy(dtype=object)[first_row]
    kind = np.where((kind == "send") | (kind == "recv"), "send", kind)
    expected = np.where(kind == "send", 2, expected)
    by = np.array(matched.by, dtype=object)
    frame = schema.MATCHES.frame(
        {
            "group": group,
            "kind": pd.Categorical(kind),
            "seq": np.where(by == "seq", operations["seq"].to_numpy()[first_row], NULL),
            "step_number": operations["step_number"].to_numpy()[rows[_argmin(start, begin, size)]],
            "ranks": _distinct(rank, begin, size),
            "expected": expected,
            "complete": (_distinct(rank, begin, size) == expected) & (expected > 0),
            "first_start_ns": np.minimum.reduceat(start, begin),
            "last_start_ns": last_start,
            "end_ns": latest,
            "last_rank": last_rank,
            "transfer_ns": np.maximum(latest - last_start, 0),
            "matched_by": pd.Categorical(by),
            "full_bytes": np.maximum.reduceat(operations["full_bytes"].to_numpy()[rows], begin),
        }
    )
    return schema.MATCHES.check(frame), wait


def _argmin(values: Int64Array, begin: Int64Array, size: Int64Array) -> Int64Array:
    """Position of the first smallest value of each run."""
    least = np.repeat(np.minimum.reduceat(values, begin), size)
    place = np.where(values == least, np.arange(len(values)), len(values))
    return np.minimum.reduceat(place, begin).astype(np.int64)


def _distinct(rank: Int32Array, begin: Int64Array, size: Int64Array) -> Int32Array:
    """How many different ranks each run holds."""
    run = np.repeat(np.arange(len(begin)), size)
    order = np.lexsort((rank, run))
    new = np.append(True, (np.diff(run[order]) != 0) | (np.diff(rank[order]) != 0))
    return np.add.reduceat(new.astype(np.int32), begin).astype(np.int32)
