"""Files appear whole or not at all: written beside their place and moved there."""

from __future__ import annotations

import os
from pathlib import Path

from torch.profiler import profile


def write_bytes(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``. Raises OSError."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_trace(profiler: profile, path: Path) -> None:
    """Export the profiler's window to ``path``, compressed (its name ends in ``.json.gz``). Raises OSError, RuntimeError."""
    part = path.with_name(f".{os.getpid()}.{path.name}")  # the ending tells torch to compress
    try:
        profiler.export_chrome_trace(str(part))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
