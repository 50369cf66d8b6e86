"""Memory of every rank over time, its peak, and who owns each byte of it.

Sources, the best one there is for a device: the recorder's manifest with the trace's ``[memory]`` events (or a CUDA snapshot), a snapshot
alone, the events alone, a raw memory timeline of torch. Categories at the peak add up to it exactly; what nobody claims is unattributed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tracekit.analyses._common import once
from tracekit.analyses.memory.devices import device_records, devices_table, outside
from tracekit.analyses.memory.findings import category_label, findings
from tracekit.analyses.memory.rows import RankMemory, main_devices, rows_of
from tracekit.analyses.memory.table import MEMORY, SHOWN, frame_of, growth_record
from tracekit.analyses.memory.units import lifecycle_sections
from tracekit.findings import Chart, Finding, Section, StackedArea, StackedBars, Table, Treemap
from tracekit.job.activity import Activity
from tracekit.job.model import Job
from tracekit.manifest import DeviceUse
from tracekit.memory.growth import LEAST_STEPS
from tracekit.memory.summary import DeviceMemory, of_trace
from tracekit.notes import text_note
from tracekit.schema import Column, table
from tracekit.units import NS_PER_US, NULL
from tracekit.vocabulary import CATEGORIES

ORDER = 60

#: So many ranks get a curve of their own; of more, the one with the highest and the one with the lowest peak.
MOST_CURVES = 4
_SOURCES = {
    "manifest+events": "owners as the recorder registered them; lifetimes and ranges for the rest",
    "manifest+snapshot": "owners as the recorder registered them; stacks for the rest",
    "snapshot": "owners by Python stacks and annotations of the snapshot",
    "events": "owners by enclosing operators and annotations, and by lifetime",
    "timeline": "categories as torch's memory timeline has them",
}
OWNERS = table(
    "owners_at_the_peak",
    Column("category", "str", "", "category of memory", "Category"),
    Column("unit", "str", "", "unit of the model", "Unit"),
    Column("name", "str", "", "parameter, bucket or place", "Name"),
    Column("bytes", "int64", "bytes", "size", "Size"),
    Column("share", "float64", "share", "of the peak", "Of the peak"),
    Column("blocks", "int64", "", "blocks of memory", "Blocks"),
)


def reduce(activity: Activity) -> list[DeviceMemory] | None:
    """Memory of each device of one window; None where the trace holds no ``[memory]`` events."""
    if not len(activity.tables.side["memory"]):
        return None
    manifest, steps = activity.manifest, activity.steps
    span = (int(steps.start[0]), int(steps.end[-1])) if activity.chosen else None  # the peak of these steps is wanted
    found = of_trace(activity.tables, activity.phases, steps, manifest.owners if manifest is not None else None, span)
    for device in found:
        for note in device.notes:
            activity.coverage.note(text_note(note))
    return found


@dataclass(frozen=True)
class Memory:
    """``rows``: one a rank and device.

    ``units``: sharded units of the job, 0 unknown; ``reshards``: whether forward gives them back; ``hosts``: host of each rank; ``uses``:
    what the recorder of each rank saw of whole devices.
    """

    rows: list[RankMemory]
    units: int = 0
    reshards: bool | None = None
    hosts: dict[int, str] = field(default_factory=dict)
    uses: dict[int, list[DeviceUse]] = field(default_factory=dict)

    def findings(self) -> list[Finding]:
        """What sets the peak, and what to do about it."""
        return [*findings(self.rows, self.units, self.reshards, self.hosts), *outside(self._devices())]

    def _devices(self) -> list[dict[str, Any]]:
        return device_records(self.rows, self.hosts, self.uses)

    def sections(self) -> list[Section]:
        """Memory over time, the peak down to names, the peaks of all ranks side by side."""
        ranks = main_devices(self.rows)
        if not ranks:
            return [Section("Memory", "Only the state at the end is known.", (_table(self.rows),), name="memory")] if self.rows else []
        highest = max(ranks, key=lambda row: row.memory.peak or 0)
        lead = f"Live memory of each rank by owner: {_SOURCES[highest.memory.source]}. Areas add up to what is allocated."
        charts: list[Chart] = [_area(row) for row in _shown(ranks) if row.memory.curve is not None]
        if len(ranks) > 1:
            charts.append(_peaks(ranks))
        charts += [_tree(highest), _owners(highest), _table(self.rows), *devices_table(self._devices())]
        return [Section("Memory", lead, tuple(charts), name="memory"), *lifecycle_sections(highest)]

    def json(self) -> dict[str, Any]:
        """``memory``: one entry a rank and device; null, with the reason, where nothing was recorded."""
        if not self.rows:
            return {"not_measured": {"memory": "the traces hold no memory events (profile_memory=True), and there is no memory snapshot"}}
        known = [row for row in self.rows if row.memory.growing is not None]
        found = {"memory": MEMORY.records(frame_of(self.rows)), "memory_devices": self._devices()}
        if not known:
            return {**found, "memory_growth": None, "not_measured": {"memory_growth": f"fewer than {LEAST_STEPS} steps are recorded"}}
        return {
            **found,
            "memory_growth": [growth_record(row.rank, row.memory.device, one) for row in known for one in row.memory.growing or ()],
        }


@once
def analyze(job: Job) -> Memory:
    """Bring together what is known of the memory of every rank."""
    kinds = [[unit for unit in window.manifest.units if unit.kind in ("fsdp1", "fsdp2")] for window in job.windows if window.manifest]
    sharded = max(kinds, key=len, default=[])
    told = {unit.reshard_after_forward for unit in sharded if not unit.root} - {None}
    hosts = {window.rank: window.identity.host for window in job.windows if window.rank is not None}
    uses = {w.rank: w.manifest.devices for w in job.windows if w.rank is not None and w.manifest is not None and w.manifest.devices}
    return Memory(rows_of(job, "memory"), len(sharded), bool(told.pop()) if len(told) == 1 else None, hosts, uses)


def _shown(ranks: list[RankMemory]) -> list[RankMemory]:
    if len(ranks) <= MOST_CURVES:
        return ranks
    order = sorted(ranks, key=lambda row: -(row.memory.peak or 0))
    return [order[0], order[-1]]


def _area(row: RankMemory) -> StackedArea:
    curve = row.memory.curve
    assert curve is not None
    zero = int(curve.time[0]) if len(curve.time) else 0
    x = ((curve.time - zero) / NS_PER_US).tolist()
    lines = {}
    if len(curve.reserved) and (curve.reserved != NULL).all():
        lines["reserved"] = curve.reserved.astype(np.float64).tolist()
    series = {category_label(name): values.astype(np.float64).tolist() for name, values in curve.categories.items()}
    peak = row.memory.peak_ns
    marks = [((peak - zero) / NS_PER_US, "peak")] if peak is not None else []
    note = "Every extreme of the recording is in the picture, however many events it has."
    if row.memory.least:
        note += " What is older than the recording is not known: amounts are lower bounds."
    unit = "us" if row.memory.timed else "entries of the history"
    return StackedArea(f"Memory of {row.label} over time", x, series, "bytes", lines, marks, note, unit)


def _peaks(ranks: list[RankMemory]) -> StackedBars:
    series = {
        category_label(name): [float(row.memory.categories.get(name, 0)) for row in ranks]
        for name in CATEGORIES
        if any(row.memory.categories.get(name) for row in ranks)
    }
    return StackedBars("Peak of every rank by owner", [row.label for row in ranks], series, "bytes")


def _tree(row: RankMemory) -> Treemap:
    amounts: dict[tuple[str, ...], float] = {}
    for holding in row.memory.holdings:
        path = (category_label(holding.category), *(part for part in (holding.unit, holding.name) if part))
        amounts[path] = amounts.get(path, 0.0) + holding.bytes
    return Treemap(f"Peak of {row.label}", list(amounts), list(amounts.values()), "bytes")


def _owners(row: RankMemory) -> Table:
    holdings, peak = row.memory.holdings, row.memory.peak or 1
    frame = OWNERS.frame(
        {
            "category": [category_label(h.category) for h in holdings],
            "unit": [h.unit for h in holdings],
            "name": [h.name for h in holdings],
            "bytes": [h.bytes for h in holdings],
            "share": [h.bytes / peak for h in holdings],
            "blocks": [h.blocks for h in holdings],
        }
    )
    return Table.of(f"Who owns the peak of {row.label}", OWNERS, frame, preview=8)


def _table(rows: list[RankMemory]) -> Table:
    return Table.of("Every rank and device", MEMORY, frame_of(rows), SHOWN)
