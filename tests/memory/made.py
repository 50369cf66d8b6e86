"""Memory of a few lines, for tests: logs, traces with ``[memory]`` events, snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.builder import Trace
from tracekit.memory.blocks import Log
from tracekit.units import NULL

MB = 1_000_000


def log(*events: tuple[int, int | None, int], device: str = "cpu") -> Log:
    """A log of (time, address, change)."""
    time, change = (np.array([event[i] for event in events], np.int64) for i in (0, 2))
    address = np.array([NULL if event[1] is None else event[1] for event in events], np.int64)
    return Log(device, time, address, change, np.arange(len(events), dtype=np.int64))


class MemoryTrace(Trace):
    """A trace whose allocations and frees keep the device's counter as the profiler does."""

    def __init__(self, *args: Any, cuda: bool = False, older: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.total = older
        self._place = {"Device Type": 1, "Device Id": self.gpu} if cuda else {"Device Type": 0, "Device Id": -1}
        self._reserved = 0
        self._live: dict[int, int] = {}

    def reserve(self, size: int) -> None:
        """What the allocator holds from now on."""
        self._reserved = size

    def alloc(self, time: float, address: int, size: int) -> None:
        """``size`` bytes at ``address``."""
        self._live[address] = size
        self._memory(time, address, size)

    def free(self, time: float, address: int, size: int | None = None) -> None:
        """The block at ``address``; ``size`` where it is older than the trace."""
        self._memory(time, address, -(self._live.pop(address) if size is None else size))

    def _memory(self, time: float, address: int, change: int) -> None:
        self.total += change
        event = self.add("cpu_instant_event", "[memory]", time, Addr=address, Bytes=change, **{"Total Allocated": self.total})
        event["args"] |= {"Total Reserved": self._reserved, **self._place}
        event["ph"] = "i"
        event.pop("dur", None)


def entry(
    action: str, time: int, size: int = 0, addr: int | None = None, frames: Sequence[tuple[str, int, str]] = (), **more: Any
) -> dict[str, Any]:
    """An entry of a snapshot's history; frames are (file, line, function), innermost first."""
    found = {"action": action, "size": size, "stream": 0, "time_us": time, "frames": [frame(*f) for f in frames], **more}
    return found if addr is None else {**found, "addr": addr}


def frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


def segment(address: int, size: int, blocks: Sequence[tuple[int, str]], device: int = 0, pool: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    """A segment; blocks are (size, state) one behind the other."""
    parts, at, used = [], address, 0
    for extent, state in blocks:
        parts.append({"address": at, "size": extent, "requested_size": extent, "state": state, "frames": []})
        at += extent
        used += extent if state.startswith("active") else 0
    return {
        "device": device, "address": address, "total_size": size, "allocated_size": used, "active_size": used, "stream": 0,
        "segment_type": "large", "segment_pool_id": pool, "is_expandable": False, "frames": [], "blocks": parts,
    }  # fmt: skip


def snapshot(
    traces: Sequence[Sequence[dict[str, Any]]], segments: Sequence[dict[str, Any]] = (), annotations: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    return {
        "segments": list(segments), "device_traces": [list(trace) for trace in traces],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0},
        "external_annotations": list(annotations),
    }  # fmt: skip
