"""Memory of every rank and device: what traces, manifests, snapshots and raw timelines tell of one device, brought together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tracekit.job.model import Job
from tracekit.memory.extremes import Extreme
from tracekit.memory.lifecycle import UnitSpan
from tracekit.memory.summary import DeviceMemory
from tracekit.units import NULL, format_bytes, listed

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

    @property
    def place(self) -> dict[str, int | str]:
        """Its row in the table of every rank and device."""
        return {"Rank": self.rank, **({"Device": self.memory.device} if self.memory.device else {})}


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
    """The one that knows most, of equals the highest peak; with what only another one knows added to it, and a note on other dumps."""
    order = sorted(devices, key=lambda d: (d.peak is None, _SOURCES.index(d.source), -(d.peak or 0)))
    best = order[0]
    for other in order[1:]:
        best = replace(best, failures=best.failures or other.failures, pools=best.pools or other.pools)
        if best.reserved_peak is None:
            best = replace(
                best,
                reserved_peak=other.reserved_peak,
                fragmentation=other.fragmentation,
                most_reserved=other.most_reserved,
                most_unused=other.most_unused,
            )
        best = replace(
            best,
            retries=best.retries or other.retries,
            growing=other.growing if best.growing is None else best.growing,
            total=best.total or other.total,
        )
    return replace(best, notes=[*best.notes, *_other_dumps(best, order[1:])])


def _other_dumps(best: DeviceMemory, others: Sequence[DeviceMemory]) -> list[str]:
    """A sentence where there are several dumps of one device: which is shown, and the peaks of the others."""
    dumps = [other for other in others if other.file]
    if not best.file or not dumps:
        return []
    peaks = listed([f"{other.file}: {format_bytes(other.peak) if other.peak is not None else 'peak not known'}" for other in dumps])
    return [f"{len(dumps) + 1} dumps of {best.device or 'this rank'}: {best.file} is shown, whose peak is the highest; {peaks}"]


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
        retries=[replace(retry, time_ns=retry.time_ns + shift) for retry in memory.retries],
        most_reserved=_moved_extreme(memory.most_reserved, shift),
        most_unused=_moved_extreme(memory.most_unused, shift),
        lifecycle=None if memory.lifecycle is None else replace(memory.lifecycle, spans=_moved(memory.lifecycle.spans, shift)),
    )


def _moved_extreme(found: Extreme | None, shift: int) -> Extreme | None:
    return None if found is None or found.time_ns is None else replace(found, time_ns=found.time_ns + shift)


def _moved(spans: Sequence[UnitSpan], shift: int) -> list[UnitSpan]:
    return [replace(s, start_ns=s.start_ns + shift, end_ns=s.end_ns if s.end_ns == NULL else s.end_ns + shift) for s in spans]


def main_devices(rows: Sequence[RankMemory]) -> list[RankMemory]:
    """One row a rank: its device with the highest peak; ranks whose peak is not known are left out."""
    best: dict[int, RankMemory] = {}
    for row in rows:
        if row.memory.peak is not None and (row.rank not in best or row.memory.peak > (best[row.rank].memory.peak or 0)):
            best[row.rank] = row
    return [best[rank] for rank in sorted(best)]
