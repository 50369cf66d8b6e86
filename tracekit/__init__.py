"""tracekit reads the profiler traces of a distributed PyTorch job and explains where time and bytes went."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracekit.recorder.record import record as record

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``tracekit.record``, the recorder: torch is imported when it is asked for, and never by the analyzer."""
    if name == "record":
        from tracekit.recorder.record import record

        return record
    raise AttributeError(f"module 'tracekit' has no attribute {name!r}")
