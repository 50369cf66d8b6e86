"""One class of collectives of a rank: calls, bytes, the group's size and how far apart its ranks are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tracekit.estimate.plan import Plan

#: Mesh axes, outermost first: where their groups lie, how many ranks apart their members are.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind, size and purpose on one axis in a step of one rank. ``full_bytes`` of one call; ``size`` of the group."""

    axis: str
    purpose: str
    kind: str
    phase: str
    size: int
    stride: int
    calls: int
    full_bytes: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in all calls under the ring algorithm."""
        return self.calls * sent_bytes(self.kind, self.full_bytes, self.size)


def sent_bytes(kind: str, full: int, size: int) -> int:
    """Bytes one rank sends for one call (ring): AG, RS, A2A F(x) S; AR 2 F(x) S; broadcast, reduce, send S; a group of one nothing.

    A share S/x that is no whole number is rounded down: the most that a rank of the ring sends, as ``collectives.semantics`` counts.
    """
    if kind == "send":
        return full
    if size == 1 or kind in ("recv", "barrier"):
        return 0
    share = full - full // size
    return {"all_reduce": 2 * share, "broadcast": full, "reduce": full, "gather": -(-full // size)}.get(kind, share)


def stride_of(plan: Plan, axis: str) -> int:
    """Ranks between neighbours on a mesh axis."""
    sizes = [getattr(plan.mesh, name) for name in AXES]
    result = 1
    for size in sizes[AXES.index(axis) + 1 :]:
        result *= size
    return result


def axis_name(plan: Plan, *axes: str) -> str:
    """Name of the groups over several axes: those longer than 1, joined by ``_``; the first where none is."""
    long = [axis for axis in axes if getattr(plan.mesh, axis) > 1]
    return "_".join(long) or axes[0]


def merged(rows: Sequence[Traffic]) -> list[Traffic]:
    """Rows that differ only in calls put together, in order of first appearance; groups of one and rows without calls left out."""
    calls: dict[tuple[object, ...], int] = {}
    first: dict[tuple[object, ...], Traffic] = {}
    for row in rows:
        if row.calls and (row.size > 1 or row.kind in ("send", "recv")):
            key = (row.axis, row.purpose, row.kind, row.phase, row.size, row.full_bytes)
            calls[key] = calls.get(key, 0) + row.calls
            first.setdefault(key, row)
    return [_with_calls(first[key], count) for key, count in calls.items()]


def _with_calls(row: Traffic, calls: int) -> Traffic:
    return Traffic(row.axis, row.purpose, row.kind, row.phase, row.size, row.stride, calls, row.full_bytes)
