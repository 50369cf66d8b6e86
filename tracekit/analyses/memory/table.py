"""The table of memory, one row a rank and device, as JSON and reader get it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from tracekit.analyses.memory.rows import RankMemory
from tracekit.memory.extremes import Extreme
from tracekit.memory.growth import Growing
from tracekit.memory.oom import OutOfMemory
from tracekit.memory.peak import OTHERS, Holding
from tracekit.memory.summary import DeviceMemory
from tracekit.schema import Column, table
from tracekit.units import NULL

#: Lines of ``units`` in the JSON.
MOST_UNITS = 100
_NO_HISTORY, _NOT_KEPT = "the history was not recorded", "the allocator's reserved memory is not recorded"
_UNTIMED = "no step or phase is marked there"
MEMORY = table(
    "memory",
    Column("rank", "int64", "", "global rank", "Rank", "rank"),
    Column("device", "str", "", "`cpu`, `cuda:0`, ...", "Device", "device", "the file does not say"),
    Column("peak", "int64", "bytes", "the most that was allocated; with `--steps` within these steps", "Peak", "peak_bytes", _NO_HISTORY),
    Column("peak_time", "int64", "unix_ns", "when that was", "", "peak_time_unix_ns", _NO_HISTORY),
    Column("step", "int64", "", "number of the step", "Step", "peak_step", "the trace marks no step there"),
    Column("phase", "str", "", "`forward`, `backward` or `optimizer`", "Phase", "peak_phase", _UNTIMED),
    Column("unit", "str", "", "the unit at work then", "Unit", "peak_unit", _UNTIMED),
    Column("reserved", "int64", "bytes", "most that the allocator held", "Reserved, most", "reserved_peak_bytes", _NOT_KEPT),
    Column("start", "int64", "bytes", "allocated before the first event", "Start", "start_bytes", _NO_HISTORY),
    Column("end", "int64", "bytes", "allocated behind the last event", "End", "end_bytes"),
    Column("reserved_end", "int64", "bytes", "what the allocator held then", "", "reserved_end_bytes", _NOT_KEPT),
    Column("recorded_peak", "int64", "bytes", "the highest Total Allocated in the trace; differs from `peak_bytes` where frees were lost "
           "or memory is older than the trace", "", "recorded_peak_bytes", "the trace does not hold it"),
    Column("least", "bool", "", "amounts are at least so much: the trace has no Total Allocated, a host's trace began after the job, or "
           "older history of a snapshot was overwritten", "At least", "lower_bound"),
    Column("categories", "object", "bytes", "owners at the peak: they add up to `peak_bytes` exactly", "", "categories", _NO_HISTORY),
    Column("units", "object", "bytes", "the same by unit (or name, where no unit is known): `name`, `category`, `bytes`; small ones "
           "together as `others`", "", "units"),
    Column("steps", "object", "", "`step`, `peak_bytes`, `peak_time_unix_ns` of each step", "", "steps"),
    Column("held", "int64", "bytes", "at the peak, by the allocator", "", "fragmentation.reserved_bytes", _NOT_KEPT),
    Column("active", "int64", "bytes", "of it in use", "", "fragmentation.active_bytes", _NOT_KEPT),
    Column("free", "int64", "bytes", "their difference", "", "fragmentation.free_bytes", _NOT_KEPT),
    Column("private", "int64", "bytes", "of it in pools of CUDA graphs and users, not reusable", "",
           "fragmentation.private_pool_free_bytes", "only a memory snapshot tells it"),
    Column("largest", "int64", "bytes", "largest free piece", "Largest free piece", "fragmentation.largest_free_bytes",
           "only a memory snapshot tells it"),
    Column("unused", "float64", "share", "of reserved that is free and reusable", "Unused at the peak", "fragmentation.share", _NOT_KEPT),
    Column("pieces", "int64", "", "free pieces", "", "fragmentation.free_pieces", "only a memory snapshot tells it"),
    Column("most_reserved", "object", "", "the moment at which most was reserved: `time_unix_ns`, `step`, `phase`, `allocated_bytes`, "
           "`reserved_bytes`, `free_bytes` (without private pools), `largest_free_bytes`, `free_pieces`, `categories`, `owners` "
           "(`category`, `unit`, `name`, `bytes`), `empty_segments` and "
           "`empty_segments_bytes` (of which no byte is used), `pinned_by` (who keeps half-empty segments: `category`, `name`, `segments`, "
           "`bytes`, `free_bytes`)", "", "reserved_peak", _NOT_KEPT),
    Column("most_unused", "object", "", "the same of the moment at which most of it was not in use", "", "unused_peak", _NOT_KEPT),
    Column("pools", "object", "bytes", "pool -> what the allocator held; `(0, 0)` is the default one", "", "reserved_end_by_pool",
           "only a memory snapshot tells it"),
    Column("failures", "object", "", "requests that failed: `time_unix_ns`, `requested_bytes`, `device_free_bytes`, `allocated_bytes`, "
           "`reserved_bytes`, `unused_bytes`, `free_pieces`, `largest_free_bytes`, `frame`, `reason`, `remedy`", "", "out_of_memory"),
    Column("retries", "object", "", "requests that only fitted when the allocator had given segments back: the same, with "
           "`given_back_bytes` and `segments`", "", "allocation_retries"),
    Column("end_owners", "object", "", "who owns what is allocated behind the last event, the largest first: `category`, `unit`, `name`, "
           "`bytes`, `blocks`; they add up to `end_bytes`", "", "end_owners", "only a memory snapshot tells it"),
    Column("file", "str", "", "the snapshot or timeline that is shown", "", "file", "the trace itself tells it"),
    Column("gathered", "object", "", "`units` and `bytes` of full parameters at one time, at their highest", "", "gathered_at_once",
           "no unit was gathered"),
    Column("lifecycle", "object", "", "each stretch in which a sharded unit had `full parameters` or a `full gradient`: `unit`, `state`, "
           "`step`, `phase`, `start_unix_ns`, `end_unix_ns`, `bytes`", "", "unit_lifecycle"),
    Column("source", "str", "", "how owners were found: `manifest+events`, `manifest+snapshot`, `snapshot` (stacks and annotations), "
           "`events` (enclosing ranges and lifetime), `timeline` (torch's raw memory timeline)", "Source", "source"),
    Column("notes", "object", "", "sentences: frees that were lost, contradictions, what is older than the recording", "", "notes"),
)  # fmt: skip
SHOWN = ("rank", "device", "peak", "step", "phase", "unit", "start", "end", "reserved", "unused", "largest", "least", "source")


def frame_of(rows: Sequence[RankMemory]) -> pd.DataFrame:
    """Table MEMORY."""
    cells = [_cells(row) for row in rows]
    columns: dict[str, object] = {}
    for column in MEMORY.columns:
        values = [row[column.name] for row in cells]
        columns[column.name] = [NULL if value is None else value for value in values] if column.dtype == "int64" else values
    return MEMORY.frame(columns)


def _cells(row: RankMemory) -> dict[str, Any]:
    """A row of MEMORY; None where an integer is not known."""
    memory, f = row.memory, row.memory.fragmentation
    return {
        "rank": row.rank,
        "device": memory.device,
        "peak": memory.peak,
        "peak_time": memory.peak_ns,
        "step": memory.peak_step,
        "phase": memory.peak_phase,
        "unit": memory.peak_unit,
        "reserved": memory.reserved_peak,
        "start": memory.start,
        "end": memory.end,
        "reserved_end": memory.reserved_end,
        "recorded_peak": memory.recorded_peak,
        "least": memory.least,
        "categories": memory.categories or None,
        "units": units(memory.holdings),
        "steps": [{"step": step.step, "peak_bytes": step.bytes, "peak_time_unix_ns": step.time_ns} for step in memory.steps],
        "held": f and f.reserved,
        "active": f and f.active,
        "free": f and f.free,
        "private": f and f.private,
        "largest": f and f.largest,
        "unused": f.share if f else np.nan,
        "pieces": f and f.pieces,
        "most_reserved": _extreme(memory.most_reserved),
        "most_unused": _extreme(memory.most_unused),
        "pools": memory.pools or None,
        "failures": [_failure(failure) for failure in memory.failures],
        "retries": [{**_failure(retry), "given_back_bytes": retry.given_back, "segments": retry.segments} for retry in memory.retries],
        "end_owners": [_owner(owner) | {"blocks": owner.blocks} for owner in memory.end_owners] or None,
        "file": memory.file,
        **_lifecycle(memory),
        "source": memory.source,
        "notes": memory.notes,
    }


def _failure(failure: OutOfMemory) -> dict[str, Any]:
    return {
        "time_unix_ns": failure.time_ns,
        "requested_bytes": failure.requested,
        "device_free_bytes": failure.free,
        "allocated_bytes": failure.allocated,
        "reserved_bytes": failure.reserved,
        "unused_bytes": failure.unused,
        "free_pieces": failure.pieces,
        "largest_free_bytes": failure.largest,
        "frame": failure.frame or None,
        "reason": failure.reason(),
        "remedy": failure.remedy(),
    }


def _extreme(found: Extreme | None) -> dict[str, Any] | None:
    if found is None:
        return None
    f = found.fragmentation
    return {
        "time_unix_ns": found.time_ns,
        "step": found.step,
        "phase": found.phase or None,
        "allocated_bytes": found.allocated,
        "reserved_bytes": f.reserved,
        "free_bytes": f.unused,
        "largest_free_bytes": f.largest,
        "free_pieces": f.pieces,
        "categories": found.categories,
        "owners": [_owner(owner) for owner in found.owners],
        "empty_segments": found.unused.empty_segments,
        "empty_segments_bytes": found.unused.empty_bytes,
        "pinned_by": [
            {"category": pin.category, "name": pin.name or None, "segments": pin.segments, "bytes": pin.bytes, "free_bytes": pin.free}
            for pin in found.unused.pins
        ],
    }


def _owner(owner: Holding) -> dict[str, Any]:
    return {"category": owner.category, "unit": owner.unit or None, "name": owner.name or None, "bytes": owner.bytes}


def growth_record(rank: int, device: str, one: Growing) -> dict[str, Any]:
    """An entry of ``memory_growth``."""
    return {
        "rank": rank,
        "device": device or None,
        "owner": one.category,
        "unit": one.unit or None,
        "name": one.name or None,
        "stack": one.stack,
        "bytes_per_step": one.bytes_per_step,
        "steps": one.steps,
    }


def _lifecycle(memory: DeviceMemory) -> dict[str, Any]:
    """How many sharded units were full at one time, and each stretch in which one was."""
    found = memory.lifecycle
    if found is None or not found.spans:
        return {"gathered": None, "lifecycle": []}
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
    return {"gathered": {"units": found.most_units, "bytes": found.most_bytes}, "lifecycle": spans}


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
