"""What is known of whole devices: the allocators of all ranks on one, and everything else that takes its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracekit.analyses.memory.rows import RankMemory

_UNSEEN = (
    "not recorded: the CUDA context, libraries (cuBLAS, cuDNN), NCCL's buffers and other processes are outside of torch's allocator; "
    "only what a device had free when a request failed tells their sum"
)


def device_records(rows: Sequence[RankMemory], hosts: dict[int, str]) -> list[dict[str, Any]]:
    """One entry a host and device, for JSON; devices without a number (the host's own memory) are left out."""
    found: dict[tuple[str, str], list[RankMemory]] = {}
    for row in rows:
        if ":" in row.memory.device:
            found.setdefault((hosts.get(row.rank, ""), row.memory.device), []).append(row)
    return [_record(host, device, members) for (host, device), members in sorted(found.items())]


def _record(host: str, device: str, rows: Sequence[RankMemory]) -> dict[str, Any]:
    held = {str(row.rank): _held(row) for row in rows}
    known = [size for size in held.values() if size is not None]
    total = next((row.memory.total for row in rows if row.memory.total is not None), None)
    other = _outside(rows, total)
    return {
        "host": host or None,
        "device": device,
        "total_bytes": total,
        "allocators_bytes": sum(known) if len(known) == len(held) else None,
        "ranks": held,
        "outside_bytes": other,
        "outside": None if other is not None else _UNSEEN,
    }


def _held(row: RankMemory) -> int | None:
    """The most that a rank's allocator held: reserved, or allocated where that is not recorded."""
    memory = row.memory
    return memory.reserved_peak if memory.reserved_peak is not None else memory.peak if memory.peak is not None else memory.reserved_end


def _outside(rows: Sequence[RankMemory], total: int | None) -> int | None:
    """Total - free - reserved of the one rank on the device when a request last failed."""
    if total is None or len(rows) != 1:
        return None
    known = [failure for failure in rows[0].memory.failures if failure.free >= 0 and failure.reserved >= 0]
    return max(total - known[-1].free - known[-1].reserved, 0) if known else None
