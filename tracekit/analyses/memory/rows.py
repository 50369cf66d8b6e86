"""Memory of every rank and device: what traces, manifests, snapshots and raw timelines tell of one device, brought together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tracekit.job.model import Job
from tracekit.memory.lifecycle import UnitSpan
from tracekit.memory.peak import OTHERS, Holding
from tracekit.memory.summary import DeviceMemory
from tracekit.units import NULL

#: Lines of ``units`` in the JSON.
MOST_UNITS = 100
#: Better knowledge first. A snapshot without a history knows no peak and comes last.
_SOURCES = ("manifest+events", "manifest+snapshot", "snapshot", "events", "timeline")


@dataclass(frozen=True)
class RankMemory:
    """One device of one rank; times are on the job's clock."""

    rank: int
    memory: DeviceMemory

    @property
    def label(self) -> str:
        """``rank 3 (cuda:3)``."""
        return f"rank {self.rank} ({self.memory.device})" if self.memory.device else f"rank {self.rank}"


def rows_of(job: Job, analysis: str) -> list[RankMemory]:
    """One row a rank and device, in order of both."""
    found: dict[tuple[int, str], list[DeviceMemory]] = {}
    for rank, index, devices in job.reduced(analysis):
        for device in devices or []:
            shift = int(job.aligned(index, 0))
            found.setdefault((rank, device.device), []).append(_shifted(device, shift))
    for index, window in enumerate(job.windows):
        if window.rank is not None:
            for device in window.memory:
                found.setdefault((window.rank, device.device), []).append(_shifted(device, int(job.aligned(index, 0))))
    return [RankMemory(rank, _best(devices)) for (rank, _), devices in sorted(found.items())]


def _best(devices: Sequence[DeviceMemory]) -> DeviceMemory:
    """The one that knows most, of equals the highest peak; with what only another one knows added to it."""
    order = sorted(devices, key=lambda d: (d.peak is None, _SOURCES.index(d.source), -(d.peak or 0)))
    best = order[0]
    for other in order[1:]:
        best = replace(best, failures=best.failures or other.failures, pools=best.pools or other.pools)
        if best.reserved_peak is None:
            best = replace(best, reserved_peak=other.reserved_peak, fragmentation=other.fragmentation)
    return best


def _shifted(memory: DeviceMemory, shift: int) -> DeviceMemory:
    """The same on the job's clock."""
    if not shift:
        return memory
    curve = memory.curve
    return replace(
        memory,
        peak_ns=None if memory.peak_ns is None else memory.peak_ns + shift,
        curve=None if curve is None else replace(curve, time=curve.time + shift),
        steps=[replace(step, time_ns=step.time_ns + shift) for step in memory.steps],
        failures=[replace(failure, time_ns=failure.time_ns + shift) for failure in memory.failures],
        lifecycle=None if memory.lifecycle is None else replace(memory.lifecycle, spans=_moved(memory.lifecycle.spans, shift)),
    )


def _moved(spans: Sequence[UnitSpan], shift: int) -> list[UnitSpan]:
    return [replace(s, start_ns=s.start_ns + shift, end_ns=s.end_ns if s.end_ns == NULL else s.end_ns + shift) for s in spans]


def main_devices(rows: Sequence[RankMemory]) -> list[RankMemory]:
    """One row a rank: its device with the highest peak; ranks whose peak is not known are left out."""
    best: dict[int, RankMemory] = {}
    for row in rows:
        if row.memory.peak is not None and (row.rank not in best or row.memory.peak > (best[row.rank].memory.peak or 0)):
            best[row.rank] = row
    return [best[rank] for rank in sorted(best)]


def record(row: RankMemory) -> dict[str, Any]:
    """A row of the JSON."""
    memory = row.memory
    fragments = memory.fragmentation
    return {
        "rank": row.rank,
        "device": memory.device or None,
        "peak_bytes": memory.peak,
        "peak_time_unix_ns": memory.peak_ns,
        "peak_step": memory.peak_step,
        "peak_phase": memory.peak_phase or None,
        "peak_unit": memory.peak_unit or None,
        "reserved_peak_bytes": memory.reserved_peak,
        "start_bytes": memory.start,
        "end_bytes": memory.end,
        "reserved_end_bytes": memory.reserved_end,
        "recorded_peak_bytes": memory.recorded_peak,
        "lower_bound": memory.least,
        "categories": memory.categories or None,
        "units": units(memory.holdings),
        "steps": [{"step": step.step, "peak_bytes": step.bytes, "peak_time_unix_ns": step.time_ns} for step in memory.steps],
        "fragmentation": None
        if fragments is None
        else {
            "reserved_bytes": fragments.reserved,
            "active_bytes": fragments.active,
            "free_bytes": fragments.free,
            "private_pool_free_bytes": fragments.private,
            "largest_free_bytes": fragments.largest,
            "share": fragments.share,
        },
        "reserved_end_by_pool": memory.pools or None,
        "out_of_memory": [
            {
                "time_unix_ns": failure.time_ns,
                "requested_bytes": failure.requested,
                "device_free_bytes": failure.free,
                "allocated_bytes": failure.allocated,
                "reserved_bytes": failure.reserved,
                "largest_free_bytes": failure.largest,
                "frame": failure.frame or None,
                "reason": failure.reason(),
            }
            for failure in memory.failures
        ],
        **_lifecycle(memory),
        "source": memory.source,
        "notes": memory.notes,
    }


def _lifecycle(memory: DeviceMemory) -> dict[str, Any]:
    """How many sharded units were full at one time, and each stretch in which one was."""
    found = memory.lifecycle
    if found is None or not found.spans:
        return {"gathered_at_once": None, "unit_lifecycle": []}
    spans = [
        {
            "unit": span.unit,
            "state": span.state,
            "step": span.step,
            "phase": span.phase or None,
            "start_unix_ns": span.start_ns,
            "end_unix_ns": span.end_ns,
            "bytes": span.bytes,
        }
        for span in found.spans
    ]
    return {"gathered_at_once": {"units": found.most_units, "bytes": found.most_bytes}, "unit_lifecycle": spans}


def units(holdings: Sequence[Holding]) -> list[dict[str, Any]]:
    """Bytes by category and unit, or name where no unit is known; the largest first, the small ones added up."""
    amounts: dict[tuple[str, str], int] = {}
    for holding in holdings:
        key = (holding.unit or holding.name, holding.category)
        amounts[key] = amounts.get(key, 0) + holding.bytes
    order = sorted(amounts.items(), key=lambda item: (item[0][0] == OTHERS, -item[1]))
    rest: dict[str, int] = {}
    for (_, category), amount in order[MOST_UNITS:]:
        rest[category] = rest.get(category, 0) + amount
    rows = [{"name": name or None, "category": category, "bytes": amount} for (name, category), amount in order[:MOST_UNITS]]
    return [*rows, *({"name": OTHERS, "category": category, "bytes": amount} for category, amount in rest.items())]
