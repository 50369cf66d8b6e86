"""Files appear whole or not at all: written beside their place and moved there."""

from __future__ import annotations

from pathlib import Path

from torch.profiler import profile

from tracekit.files import write_by


def write_trace(profiler: profile, path: Path) -> None:
    """Export the profiler's window to ``path``, compressed (its name ends in ``.json.gz``). Raises OSError, RuntimeError."""
    write_by(path, profiler.export_chrome_trace, suffix=".json.gz")  # the ending tells torch to compress
