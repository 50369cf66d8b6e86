"""What is known of whole devices: the allocators of all ranks on one, and everything else that takes its memory.

At the end of a recording the recorder asks the driver, and NVML where it answers:

    used = total - free                               by the driver
    outside = used - sum of reserved of its ranks     what is in no allocator
    contexts = sum of (process - reserved)            CUDA contexts, libraries and NCCL of its ranks
    other processes = outside - contexts              what is left

Without that a request that failed tells what was free then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tracekit.analyses import _thresholds as thresholds
from tracekit.analyses.memory.rows import RankMemory
from tracekit.findings import Finding, Table
from tracekit.manifest import PINNED, DeviceUse
from tracekit.schema import Column, table
from tracekit.units import NULL, format_bytes, listed

_UNSEEN = (
    "not recorded: the CUDA context, libraries (cuBLAS, cuDNN), NCCL's buffers and other processes are outside of torch's allocator; "
    "only the recorder's manifest, or what a device had free when a request failed, tells their sum"
)
_UNSPLIT = "not recorded: NVML did not tell what each process holds, so contexts, libraries, NCCL and other processes are one sum"
_NOT_TOLD = "not recorded"
DEVICES = table(
    "memory_devices",
    Column("host", "str", "", "host", "Host", missing=_NOT_TOLD),
    Column("device", "str", "", "`cuda:0`, ...", "Device"),
    Column("ranks", "str", "", "ranks that hold memory there", "Ranks"),
    Column("total", "int64", "bytes", "what the device has", "Has", missing=_NOT_TOLD),
    Column("allocators", "int64", "bytes", "the most that the allocators of its ranks held", "Allocators", missing=_NOT_TOLD),
    Column("outside", "int64", "bytes", "in use outside of them", "Outside", missing=_NOT_TOLD),
    Column("contexts", "int64", "bytes", "of it the ranks' own CUDA contexts, libraries and NCCL", "Contexts, NCCL", missing=_NOT_TOLD),
    Column("others", "int64", "bytes", "of it other processes", "Other processes", missing=_NOT_TOLD),
    Column("free", "int64", "bytes", "free at the end of the recording", "Free", missing=_NOT_TOLD),
)


def device_records(
    rows: Sequence[RankMemory], hosts: Mapping[int, str], uses: Mapping[int, Sequence[DeviceUse]] | None = None
) -> list[dict[str, Any]]:
    """One entry a host and device, for JSON; devices without a number (the host's own memory) are left out.

    ``uses``: what the recorder of each rank saw of the devices that it has memory on.
    """
    members: dict[tuple[str, str], list[RankMemory]] = {}
    seen: dict[tuple[str, str], list[DeviceUse]] = {}
    pinned: dict[str, dict[str, int]] = {}
    for row in rows:
        if ":" in row.memory.device:
            members.setdefault((hosts.get(row.rank, ""), row.memory.device), []).append(row)
    for rank, found in (uses or {}).items():
        host = hosts.get(rank, "")
        pinned.setdefault(host, {}).update({str(rank): use.reserved for use in found if use.device == PINNED})
        for use in found:
            if use.device == PINNED:
                continue
            seen.setdefault((host, use.device), []).append(use)
    devices = [_record(*place, members.get(place, []), seen.get(place, [])) for place in sorted({**members, **seen})]
    return devices + [_pinned(host, held) for host, held in sorted(pinned.items()) if held]


def _pinned(host: str, held: Mapping[str, int]) -> dict[str, Any]:
    """Host memory that the ranks of one host have pinned: no device, so that nothing else is known of it."""
    return {**_record(host, PINNED, [], []), "ranks": dict(held), "allocators_bytes": sum(held.values()), "outside": None}


def _record(host: str, device: str, rows: Sequence[RankMemory], uses: Sequence[DeviceUse]) -> dict[str, Any]:
    held = {str(row.rank): _held(row) for row in rows}
    known = [size for size in held.values() if size is not None]
    listed_total = next((row.memory.total for row in rows if row.memory.total is not None), None)
    total = max((use.total for use in uses), default=listed_total)
    free, outside, contexts = _by_driver(uses, len(rows))
    if outside is None:
        outside = _when_it_failed(rows, total)
    why = _UNSEEN if outside is None else _UNSPLIT if contexts is None else None
    return {
        "host": host or None,
        "device": device,
        "total_bytes": total,
        "allocators_bytes": sum(known) if known and len(known) == len(held) else None,
        "ranks": held,
        "free_bytes": free,
        "outside_bytes": outside,
        "contexts_bytes": contexts,
        "other_processes_bytes": None if contexts is None or outside is None else max(outside - contexts, 0),
        "outside": why,
    }


def _by_driver(uses: Sequence[DeviceUse], ranks: int) -> tuple[int | None, int | None, int | None]:
    """(free, outside of the allocators, of it the ranks' own contexts) [bytes]; None where not every rank there has told it."""
    if not uses:
        return None, None, None
    fullest = min(uses, key=lambda use: use.free)
    if len(uses) < ranks:
        return fullest.free, None, None
    outside = max(fullest.total - fullest.free - sum(use.reserved for use in uses), 0)
    own = [use.process - use.reserved for use in uses if use.process is not None]
    return fullest.free, outside, min(sum(max(size, 0) for size in own), outside) if len(own) == len(uses) else None


def _held(row: RankMemory) -> int | None:
    """The most that a rank's allocator held: reserved, or allocated where that is not recorded."""
    memory = row.memory
    return memory.reserved_peak if memory.reserved_peak is not None else memory.peak if memory.peak is not None else memory.reserved_end


def _when_it_failed(rows: Sequence[RankMemory], total: int | None) -> int | None:
    """Total - free - reserved of the one rank on the device when a request last failed."""
    if total is None or len(rows) != 1:
        return None
    known = [failure for failure in rows[0].memory.failures if failure.free >= 0 and failure.reserved >= 0]
    return max(total - known[-1].free - known[-1].reserved, 0) if known else None


def devices_table(records: Sequence[Mapping[str, Any]]) -> list[Table]:
    """The table of whole devices; none where nothing beyond the allocators is known."""
    if not any(record["total_bytes"] is not None or record["device"] == PINNED for record in records):
        return []

    def sizes(key: str) -> list[int]:
        return [NULL if record[key] is None else record[key] for record in records]

    keys = ("total", "allocators", "outside", "contexts", "free")
    columns: dict[str, object] = {
        "host": [record["host"] or "" for record in records],
        "device": [record["device"] for record in records],
        "ranks": [", ".join(record["ranks"]) for record in records],
        "others": sizes("other_processes_bytes"),
    }
    columns.update({key: sizes(f"{key}_bytes") for key in keys})
    return [Table.of("Whole devices", DEVICES, DEVICES.frame(columns))]


def outside(records: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """The device with most memory in use that no allocator of the job holds."""
    known = [record for record in records if record["outside_bytes"] is not None and record["total_bytes"]]
    if not known:
        return
    worst = max(known, key=lambda record: record["outside_bytes"])
    size, total = worst["outside_bytes"], worst["total_bytes"]
    severity = thresholds.OUTSIDE.of(size / total)
    if severity is None:
        return
    parts = [("CUDA contexts, libraries and NCCL of the job", "contexts_bytes"), ("other processes", "other_processes_bytes")]
    told = [f"{format_bytes(worst[key])} for {what}" for what, key in parts if worst[key] is not None]
    where = f" of {worst['host']}" if worst["host"] else ""
    what = listed(told) if told else "CUDA contexts, libraries, NCCL and other processes; which of them is not recorded"
    text = f"{format_bytes(size)} of {format_bytes(total)} on {worst['device']}{where} are in use outside of torch's allocator: {what}."
    advice = "Look at nvidia-smi for other processes; fewer process groups, or smaller NCCL_BUFFSIZE, take less for NCCL."
    row = {"Host": worst["host"] or "", "Device": worst["device"]}
    yield Finding("memory.outside", severity, text, size / total, "share of the device", "memory of whole devices", advice, row=row)
