"""Clocks of different hosts, brought together through the collectives that all of them left at the same moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tracekit.trace.events import Int32Array, Int64Array


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
    note: str = ""


def align(hosts: Mapping[int, str], rank: Int32Array, match: Int32Array, start: Int64Array, end: Int64Array) -> Clock:
    """Offsets of the hosts' clocks from matched blocking collectives (one array entry an operation on one rank, own clocks).

    Nobody leaves such a collective before the last has come, and all leave it together. So for two hosts the median difference of
    the ends estimates the offset, and "latest start <= earliest end" of every collective bounds it. Ranks of one host share a clock.
    Without host names all ranks are taken to share one, unless the collectives contradict that.
    """
    ranks = sorted(hosts)
    known = all(hosts[r] for r in ranks)
    domain = {r: hosts[r] for r in ranks} if known else dict.fromkeys(ranks, "")
    residual = _residual(match, start, end)
    if len(set(domain.values())) <= 1 and (known or not residual):
        note = f"the clocks of one host contradict its collectives by {residual / 1000:.0f} us" if residual else ""
        return Clock(True, dict.fromkeys(ranks, 0), residual, note)
    if not known:
        domain = {r: str(r) for r in ranks}
    names = list(dict.fromkeys(domain[r] for r in ranks))
    place = {r: names.index(domain[r]) for r in ranks}
    host = np.array([place[int(r)] for r in rank], np.int64)
    offset, reached = _spread(len(names), *_pairs(host, match, start, end))
    offsets = {r: int(offset[place[r]]) for r in ranks}
    residual = _residual(match, start - offset[host], end - offset[host])
    return Clock(bool(reached.all()), offsets, residual, _note(names, offset, reached, residual, known))


def _note(names: list[str], offset: Int64Array, reached: np.ndarray, residual: int | None, known: bool) -> str:
    parts = []
    moved = [(n, int(o)) for n, o in zip(names, offset, strict=True) if o]
    what = "host" if known else "rank"
    if moved:
        shown = ", ".join(f"{what} {n} by {o / 1000:+.0f} us" for n, o in moved[:8])
        more = f" and {len(moved) - 8} more" if len(moved) > 8 else ""
        parts.append(f"clocks were aligned through matched collectives: {shown}{more} against {what} {names[0]}")
    if not reached.all():
        lost = [n for n, ok in zip(names, reached, strict=True) if not ok]
        which = ", ".join(lost[:8])
        parts.append(f"the clock of {what} {which} could not be compared (no matched collective): its times stand apart")
    if residual:
        parts.append(f"the aligned clock still contradicts a collective by {residual / 1000:.1f} us")
    return "; ".join(parts)


def _residual(match: Int32Array, start: Int64Array, end: Int64Array) -> int | None:
    """Largest (latest start - earliest end) over the matched collectives, 0 at least; None when there is none."""
    if not len(match):
        return None
    _, inverse = np.unique(match, return_inverse=True)
    count = int(inverse.max()) + 1
    latest = np.full(count, np.iinfo(np.int64).min)
    earliest = np.full(count, np.iinfo(np.int64).max)
    np.maximum.at(latest, inverse, start)
    np.minimum.at(earliest, inverse, end)
    return max(0, int((latest - earliest).max()))


def _pairs(
    host: Int64Array, match: Int32Array, start: Int64Array, end: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """For each two hosts that share collectives: (host a, host b, offset of b against a, how many collectives)."""
    key = match.astype(np.int64) * (int(host.max(initial=0)) + 1) + host
    keys, inverse = np.unique(key, return_inverse=True)
    low = np.full(len(keys), np.iinfo(np.int64).min)
    first_end = np.full(len(keys), np.iinfo(np.int64).max)
    last_end = np.full(len(keys), np.iinfo(np.int64).min)
    np.maximum.at(low, inverse, start)
    np.minimum.at(first_end, inverse, end)
    np.maximum.at(last_end, inverse, end)
    width = int(host.max(initial=0)) + 1
    by_match, of_host = keys // width, keys % width
    # Each collective ties its hosts to the first of them: enough for a spanning tree, and linear in the operations.
    opens = np.append(True, np.diff(by_match) > 0)
    anchor = np.maximum.accumulate(np.where(opens, np.arange(len(keys)), 0))
    other = np.flatnonzero(~opens)
    anchor = anchor[other]
    # start_b - o <= end_a and start_a <= end_b - o
    lower, upper = low[other] - first_end[anchor], first_end[other] - low[anchor]
    difference = last_end[other] - last_end[anchor]
    pairs, of_pair, weight = np.unique(of_host[anchor] * width + of_host[other], return_inverse=True, return_counts=True)
    offset = np.array([_bounded(difference[of_pair == i], lower[of_pair == i], upper[of_pair == i]) for i in range(len(pairs))], np.int64)
    return pairs // width, pairs % width, offset, weight


def _bounded(difference: Int64Array, lower: Int64Array, upper: Int64Array) -> int:
    """The median difference, moved into the bounds that all collectives agree on (if they agree)."""
    low, high = int(lower.max()), int(upper.min())
    estimate = int(np.median(difference))
    return min(max(estimate, low), high) if low <= high else estimate


def _spread(count: int, a: Int64Array, b: Int64Array, offset: Int64Array, weight: Int64Array) -> tuple[Int64Array, np.ndarray]:
    """Offsets of all hosts against host 0, along the heaviest spanning tree; and which hosts could be reached."""
    total = np.zeros(count, np.int64)
    reached = np.zeros(count, np.bool_)
    reached[0] = True
    order = np.argsort(-weight, kind="stable")
    grown = True
    while grown:
        grown = False
        for i in order:
            one, two = int(a[i]), int(b[i])
            if reached[one] != reached[two]:
                if reached[one]:
                    total[two] = total[one] + offset[i]
                else:
                    total[one] = total[two] - offset[i]
                reached[one] = reached[two] = grown = True
                break
    return total, reached
