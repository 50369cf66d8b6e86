"""``--memory-limit``: what this process and its workers may allocate."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from pathlib import Path

from tracekit.errors import UsageError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
#: The program itself with its libraries: below it nothing can be read at all.
LEAST_BYTES = 500_000_000
#: Where Linux says what a container may have.
_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def parse_size(text: str) -> int:
    """``8GB``, ``500 MiB`` or a number of bytes. Raises UsageError."""
    found = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].lower() not in _UNITS:
        raise UsageError(f"{text!r} is no amount of memory", "write it as 8GB or 500MB")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def limit_memory(size: int) -> None:
    """Let allocations of this process beyond ``size`` bytes fail (MemoryError). Raises UsageError where the system has no such limit.

    The limit is the system's on private writable memory (RLIMIT_DATA): files that are mapped, such as cache entries, do not count.
    """
    if size < LEAST_BYTES:
        raise UsageError(
            f"--memory-limit of {size:,} bytes is less than the program itself needs", f"give {LEAST_BYTES // 10**6} MB or more"
        )
    try:
        import resource
    except ImportError as error:
        raise UsageError(
            "--memory-limit needs a limit of the system, which this one has not", "leave it out; --jobs 1 uses least"
        ) from error
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


def machine_memory() -> int:
    """Bytes of memory that this machine, or its container, has."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")] if hasattr(os, "sysconf") else [16 << 30]
    for path in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(Path(path).read_text()))
    return min(sizes)


def give_back() -> None:
    """Give memory that is free back to the system; glibc keeps what lies between pieces in use, hundreds of MB after thousands of files."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
