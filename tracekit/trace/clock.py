"""Clocks of different hosts, brought together through the collectives that all of them left at the same moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.notes import Note, note
from tracekit.trace.events import BoolArray, Int32Array, Int64Array
from tracekit.units import NS_PER_US

#: Clocks are called aligned when no more than this share of the collectives is still contradicted by more than this much.
CONTRADICTED_SHARE = 0.1
CONTRADICTED_NS = 100 * NS_PER_US


@dataclass(frozen=True)
class Clock:
    """``offset_ns[rank]`` is what the rank's clock is ahead of the first rank's: aligned time = own time - offset.

    ``residual_ns`` is the largest contradiction that remains ("latest start <= earliest end" of a matched collective),
    0 when there is none, ``None`` where nothing could be compared. ``aligned``: all ranks share one time line (one
    host, or enough matched collectives). Drift of a clock within the trace is not modelled; it shows in the residual.
    """

    aligned: bool
    offset_ns: Mapping[int, int]
    residual_ns: int | None
    note: Note | None = None


@dataclass(frozen=True)
class _Tie:
    """Two clocks (places in the list of clocks) that share ``weight`` collectives: ``second`` is ``offset`` [ns] ahead of ``first``."""

    first: int
    second: int
    offset: int
    weight: int


def align(hosts: Mapping[int, str], rank: Int32Array, match: Int32Array, start: Int64Array, end: Int64Array) -> Clock:
    """Offsets of the hosts' clocks from matched blocking collectives (one array entry an operation on one rank, own clocks).

    Nobody leaves such a collective before the last has come, and all leave it together. So for two hosts the median difference of
    the ends estimates the offset, and "latest start <= earliest end" of every collective bounds it. Ranks of one host share a clock.
    A rank without a host name shares the clock of the others unless two hosts are known or a collective contradicts that; then it has
    its own. Clocks that no collective ties to the first rank's are not aligned: the first of each such set keeps offset 0.
    """
    used, rank_index = np.unique(rank, return_inverse=True)
    ranks = sorted({*hosts, *used.tolist()})
    named = {r: hosts.get(r, "") for r in ranks}
    gaps = _gaps(match, start, end)
    residual = _residual(gaps)
    known = set(named.values()) - {""}
    if len(known) < 2 and (all(named.values()) or not residual):
        return Clock(True, dict.fromkeys(ranks, 0), residual, note("clock_contradicted", us=residual / NS_PER_US) if residual else None)
    domains = {r: f"host {named[r]}" if named[r] else f"rank {r}" for r in ranks}
    names = list(dict.fromkeys(domains.values()))
    index = {name: i for i, name in enumerate(names)}
    domain = np.array([index[domains[int(r)]] for r in used], np.int64)[rank_index]
    offset, anchor = _spread(len(names), _ties(domain, match, start, end))
    gaps = _gaps(match, start - offset[domain], end - offset[domain])
    sound = not len(gaps) or float((gaps > CONTRADICTED_NS).mean()) <= CONTRADICTED_SHARE
    offsets = {r: int(offset[index[domains[r]]]) for r in ranks}
    found = _note(names, offset, anchor, _residual(gaps) or 0, "" in named.values())
    return Clock(sound and not anchor.any(), offsets, _residual(gaps), found)


def _note(names: list[str], offset: Int64Array, anchor: Int64Array, residual: int, unnamed: bool) -> Note | None:
    """Which clocks were moved, by how much against the first one's, and which could not be compared with it."""
    clocks = list(zip(names, offset.tolist(), anchor.tolist(), strict=True))
    moved = tuple((name, ahead / NS_PER_US) for name, ahead, apart in clocks if ahead and not apart)
    alone = tuple(name for name, _, apart in clocks if apart)
    if not (moved or alone or residual):
        return None
    return note("clocks_aligned", len(moved), moved=moved, alone=alone, against=names[0], unnamed=unnamed, residual_us=residual / NS_PER_US)


def _gaps(match: Int32Array, start: Int64Array, end: Int64Array) -> Int64Array:
    """Latest start - earliest end [ns] of each matched collective: above 0 its ranks cannot have been in it together."""
    order = np.argsort(match, kind="stable")
    first = _openings(match[order].astype(np.int64))
    if not len(first):
        return np.empty(0, np.int64)
    gaps: Int64Array = np.maximum.reduceat(start[order], first) - np.minimum.reduceat(end[order], first)
    return gaps


def _residual(gaps: Int64Array) -> int | None:
    """The largest contradiction, 0 at least; None when there is no collective."""
    return max(0, int(gaps.max())) if len(gaps) else None


def _openings(ordered: Int64Array) -> npt.NDArray[np.intp]:
    """Where a new value begins."""
    return np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)])


def _ties(domain: Int64Array, match: Int32Array, start: Int64Array, end: Int64Array) -> list[_Tie]:
    """What the collectives say of each two clocks. Each collective ties its clocks to the first of them: enough for a tree, and linear."""
    order = np.lexsort((domain, match))
    domain, match, start, end = domain[order], match[order].astype(np.int64), start[order], end[order]
    width = int(domain.max(initial=0)) + 1
    first = _openings(match * width + domain)
    if not len(first):
        return []
    latest_start, latest_end = np.maximum.reduceat(start, first), np.maximum.reduceat(end, first)
    earliest_end = np.minimum.reduceat(end, first)
    opens: BoolArray = np.append(True, match[first][1:] != match[first][:-1])
    anchor = np.maximum.accumulate(np.where(opens, np.arange(len(first)), 0))[~opens]
    other = np.flatnonzero(~opens)
    # Latest start of one <= earliest end of the other, both ways, on the first one's clock.
    lower, upper = latest_start[other] - earliest_end[anchor], earliest_end[other] - latest_start[anchor]
    difference = latest_end[other] - latest_end[anchor]
    pair = domain[first][anchor] * width + domain[first][other]
    order = np.argsort(pair, kind="stable")
    cuts = _openings(pair[order])
    return [
        _Tie(*divmod(int(pair[rows[0]]), width), _bounded(difference[rows], lower[rows], upper[rows]), len(rows))
        for rows in np.split(order, cuts[1:])
        if len(rows)
    ]


def _bounded(difference: Int64Array, lower: Int64Array, upper: Int64Array) -> int:
    """The median difference, moved into the bounds that all collectives agree on (if they agree)."""
    low, high = int(lower.max()), int(upper.min())
    ordered = np.sort(difference)
    below, above = int(ordered[(len(ordered) - 1) // 2]), int(ordered[len(ordered) // 2])
    estimate = (below + above) // 2  # integers: times near 10^18 ns don't fit a float
    return min(max(estimate, low), high) if low <= high else estimate


def _spread(count: int, ties: list[_Tie]) -> tuple[Int64Array, Int64Array]:
    """(offset of each clock, the clock it is relative to: 0 for all that can be reached from the first), along the strongest ties."""
    neighbours: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    root = list(range(count))

    def find(clock: int) -> int:
        while root[clock] != clock:
            root[clock] = root[root[clock]]
            clock = root[clock]
        return clock

    for tie in sorted(ties, key=lambda t: -t.weight):
        one, two = find(tie.first), find(tie.second)
        if one != two:
            root[max(one, two)] = min(one, two)
            neighbours[tie.first].append((tie.second, tie.offset))
            neighbours[tie.second].append((tie.first, -tie.offset))
    total = np.zeros(count, np.int64)
    anchor = np.full(count, -1, np.int64)
    for begin in range(count):
        waiting = [begin] if anchor[begin] < 0 else []
        anchor[waiting] = begin
        while waiting:
            clock = waiting.pop()
            for other, offset in neighbours[clock]:
                if anchor[other] < 0:
                    total[other], anchor[other] = total[clock] + offset, begin
                    waiting.append(other)
    return total, anchor
