"""What the devices of this process hold as a whole, when the window ends: what is free, the allocator's part, processes by NVML."""

from __future__ import annotations

import os

import torch

from tracekit.manifest import PINNED, DeviceUse
from tracekit.recorder import private


def devices_in_use() -> list[DeviceUse]:
    """One entry a CUDA (or ROCm) device on which this process' allocator holds memory, one for pinned host memory; [] without any."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        reserved = torch.cuda.memory_reserved(index)
        if not reserved:
            continue  # to ask a device that is not in use would make a context there
        free, total = torch.cuda.mem_get_info(index)
        processes = private.processes_on(index)
        own = processes.get(os.getpid())
        others = sum(processes.values()) - own if own is not None else None
        found.append(DeviceUse(f"cuda:{index}", total, free, reserved, own, others))
    pinned = private.pinned_host_bytes()
    return [*found, DeviceUse(PINNED, reserved=pinned)] if pinned else found
