"""tracekit reads the profiler traces of a distributed PyTorch job and explains where time and bytes went."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracekit.api import load as load
    from tracekit.recorder.record import record as record

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``tracekit.load`` reads a job. ``tracekit.record`` is the recorder: torch is imported for it alone, never by the analyzer."""
    if name == "load":
        from tracekit.api import load

        return load
    if name == "record":
        from tracekit.recorder.record import record

        return record
    raise AttributeError(f"module 'tracekit' has no attribute {name!r}")
