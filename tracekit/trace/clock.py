"""Clocks of different hosts, brought together through the collectives that all of them left at the same moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tracekit.notes import Note, note
from tracekit.trace.events import BoolArray, Int32Array, Int64Array
from tracekit.units import NS_PER_US

#: Clocks are called aligned when no more than this share of the collectives is still contradicted by more than this much.
CONTRADICTED_SHARE = 0.1
CONTRADICTED_NS = 100 * NS_PER_US
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Clock:
    """``offset_ns[rank]`` is what the rank's clock is ahead of the first rank's, ``drift[rank]`` by how much faster it runs (a share),
    where the window shows it: with t = own time - offset, aligned time = t - drift (t - ``reference_ns``).

    ``residual_ns`` is the largest contradiction that remains ("latest start <= earliest end" of a matched collective),
    0 when there is none, ``None`` where nothing could be compared. ``aligned``: all ranks share one time line (one
    host, or enough matched collectives). ``apart[rank]``: ranks with one number share a time line even where not all do; empty: all do.
    """

    aligned: bool
    offset_ns: Mapping[int, int]
    residual_ns: int | None
    note: Note | None = None
    drift: Mapping[int, float] = field(default_factory=dict)
    reference_ns: int = 0
    apart: Mapping[int, int] = field(default_factory=dict)

    def of(self, rank: int, times: Any) -> Any:
        """Times [ns] of a rank's own clock on the job's clock."""
        shifted = times - self.offset_ns.get(rank, 0)
        faster = self.drift.get(rank, 0.0)
        return shifted - _drifted(faster, shifted - self.reference_ns) if faster else shifted


#: Drift: no crystal is off by more (a share); what moves a clock by less over the window (and is not this many times the scatter) is none.
MOST_DRIFT, LEAST_DRIFT_NS, CLEAR_DRIFT, FEWEST_FOR_DRIFT = 5e-4, 20 * NS_PER_US, 4.0, 8
#: Drift is handed from clock to clock as integers: parts of this.
_PARTS = 10**12
#: Host pairs that only messages tie are aligned if these bound the offset to no more than this on either side.
BOUND_NS = CONTRADICTED_NS


class Messages(NamedTuple):
    """Sends with their receives: when the sender began and when the receiver had it, each on its own clock [ns]."""

    sender: Int32Array
    receiver: Int32Array
    sent: Int64Array
    received: Int64Array


@dataclass(frozen=True)
class _Tie:
    """Two clocks (places in the list of clocks) that share ``weight`` collectives: ``second`` is ``offset`` [ns] ahead of ``first``."""

    first: int
    second: int
    offset: int
    weight: int


def align(
    hosts: Mapping[int, str],
    rank: Int32Array,
    match: Int32Array,
    start: Int64Array,
    end: Int64Array,
    messages: Messages | None = None,
) -> Clock:
    """Offsets of the hosts' clocks from matched blocking collectives (one array entry an operation on one rank, own clocks).

    Nobody leaves such a collective before the last has come, and all leave it together. So for two hosts the median difference of
    the ends estimates the offset, and "latest start <= earliest end" of every collective bounds it. Ranks of one host share a clock.
    A rank without a host name shares the clock of the others unless two hosts are known or a collective contradicts that; then it has
    its own. Clocks that no collective ties to the first rank's are not aligned: the first of each such set keeps offset 0. Where
    ``messages`` go both ways between two of these, nothing arrives before it is sent: that bounds the offset from both sides.
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
    ties = _ties(domain, match, start, end)
    bounds = _bounds(messages, {r: index[name] for r, name in domains.items()})
    narrow = [tie for tie, half in bounds if half <= BOUND_NS]
    offset, anchor = _spread(len(names), [*ties, *narrow])
    reference = int(np.median(end - offset[domain])) if len(end) else 0
    faster = _faster(len(names), domain, match, (start - offset[domain], end - offset[domain]), reference)
    if faster.any():
        shift = _drifted(faster[domain], end - offset[domain] - reference)
        again, _ = _spread(len(names), [*_ties(domain, match, start - offset[domain] - shift, end - offset[domain] - shift)])
        offset = offset + again
    shift = offset[domain] + _drifted(faster[domain], end - offset[domain] - reference)
    gaps = _gaps(match, start - shift, end - shift)
    sound = not len(gaps) or float((gaps > CONTRADICTED_NS).mean()) <= CONTRADICTED_SHARE
    if anchor.any() and bounds:  # a rough offset is better than none, but no ground for figures
        rough, _ = _spread(len(names), [*ties, *(tie for tie, _ in bounds)])
        offset = np.where(anchor > 0, rough, offset)
    sets = anchor if sound else np.arange(len(names))
    found = _note(names, offset, anchor, _residual(gaps) or 0, "" in named.values(), float(np.abs(faster).max()))
    return Clock(
        sound and not anchor.any(),
        {r: int(offset[index[domains[r]]]) for r in ranks},
        _residual(gaps),
        found,
        {r: float(faster[index[domains[r]]]) for r in ranks if faster[index[domains[r]]]},
        reference,
        {r: int(sets[index[domains[r]]]) for r in ranks} if sets.any() else {},
    )


def _drifted(faster: Any, since: Any) -> Any:
    """By how much a clock that runs so much faster is ahead after so long [ns]."""
    return np.rint(faster * np.asarray(since, np.float64)).astype(np.int64)


def _note(names: list[str], offset: Int64Array, anchor: Int64Array, residual: int, unnamed: bool, faster: float) -> Note | None:
    """Which clocks were moved, by how much against the first one's, and which could not be compared with it."""
    clocks = list(zip(names, offset.tolist(), anchor.tolist(), strict=True))
    moved = tuple((name, ahead / NS_PER_US) for name, ahead, apart in clocks if ahead and not apart)
    alone = tuple(name for name, _, apart in clocks if apart)
    if not (moved or alone or residual):
        return None
    drift_ppm, residual_us = faster * 1e6, residual / NS_PER_US
    return note(
        "clocks_aligned",
        len(moved),
        moved=moved,
        alone=alone,
        against=names[0],
        unnamed=unnamed,
        residual_us=residual_us,
        drift_ppm=drift_ppm,
    )


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


class _Both(NamedTuple):
    """Collectives of two clocks, one entry each: when it ended on the first's, by how much later on the second's, bounds of that."""

    first: int
    second: int
    at: Int64Array
    difference: Int64Array
    lower: Int64Array
    upper: Int64Array


def _ties(domain: Int64Array, match: Int32Array, start: Int64Array, end: Int64Array) -> list[_Tie]:
    """What the collectives say of each two clocks."""
    pairs = _pairs(domain, match, start, end)
    return [_Tie(one.first, one.second, _bounded(one.difference, one.lower, one.upper), len(one.at)) for one in pairs]


def _faster(count: int, domain: Int64Array, match: Int32Array, times: tuple[Int64Array, Int64Array], reference: int) -> Floats:
    """By how much each clock runs faster than the first of its set (a share), where the window shows it; ``times`` without offsets."""
    ties = []
    for one in _pairs(domain, match, *times):
        slope = _slope((one.at - reference).astype(np.float64), one.difference.astype(np.float64))
        ties.append(_Tie(one.first, one.second, round(slope * _PARTS), len(one.at)))
    parts, _ = _spread(count, ties)
    return parts / _PARTS


def _slope(at: Floats, difference: Floats) -> float:
    """The slope of the differences over time; 0 where they scatter more than they move."""
    third = len(at) // 3
    if len(at) < FEWEST_FOR_DRIFT:
        return 0.0
    order = np.argsort(at, kind="stable")
    early, late = order[:third], order[-third:]
    far = float(np.median(at[late]) - np.median(at[early]))
    slope = float(np.median(difference[late]) - np.median(difference[early])) / far if far > 0 else 0.0
    rest = difference - slope * at
    scatter = float(np.median(np.abs(rest - np.median(rest))))
    moved = abs(slope) * float(at.max() - at.min())
    return slope if abs(slope) <= MOST_DRIFT and moved > max(LEAST_DRIFT_NS, CLEAR_DRIFT * scatter) else 0.0


def _bounds(messages: Messages | None, clock_of: Mapping[int, int]) -> list[tuple[_Tie, int]]:
    """(tie, how far off it may be [ns]) of each two clocks between which messages go both ways.

    Of a message from clock a to clock b: offset of b - offset of a <= received - sent.
    """
    least: dict[tuple[int, int], int] = {}
    if messages is not None and len(messages.sent):
        width = len(clock_of) + 1
        ranks, place = np.unique(np.concatenate([messages.sender, messages.receiver]), return_inverse=True)
        one, other = np.split(np.array([clock_of[int(rank)] for rank in ranks], np.int64)[place.reshape(-1)], 2)
        took, pair = messages.received - messages.sent, one * width + other
        order = np.argsort(pair, kind="stable")
        opens = _openings(pair[order])
        shortest = np.minimum.reduceat(took[order], opens)
        least = {divmod(int(p), width): int(ns) for p, ns in zip(pair[order][opens], shortest, strict=True)}
    both = [(a, b, -least[b, a], most) for (a, b), most in least.items() if a < b and (b, a) in least]
    return [(_Tie(a, b, (low + high) // 2, 0), (high - low) // 2) for a, b, low, high in both if low <= high]


def _pairs(domain: Int64Array, match: Int32Array, start: Int64Array, end: Int64Array) -> list[_Both]:
    """The collectives of each two clocks. Each collective ties its clocks to the first of them: enough for a tree, and linear."""
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
    at = latest_end[anchor]
    return [
        _Both(*divmod(int(pair[rows[0]]), width), at[rows], difference[rows], lower[rows], upper[rows])
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
