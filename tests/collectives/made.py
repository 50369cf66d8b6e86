"""Operations of several ranks in a few words: what matching and purposes see."""

from __future__ import annotations

from typing import Any

import pandas as pd

from tracekit.mesh.process_groups import ProcessGroup, ProcessGroups
from tracekit.units import NULL

US = 1000
TEXT = {"phase": "", "context": "", "axis": "", "dtype": "float32"}


def operation(rank: int, kind: str, start: int, end: int, **more: Any) -> dict[str, Any]:
    """One operation; times in microseconds, of group 0, in step 1, called just before it starts."""
    row: dict[str, Any] = {
        "rank": rank,
        "window": rank,
        "kind": kind,
        "group": 0,
        "seq": NULL,
        "source_rank": NULL,
        "destination_rank": NULL,
        "start_ns": start * US,
        "end_ns": end * US,
        "launch_ns": start * US - 10,
        "step_number": 1,
        "stream": 20,
        "full_bytes": NULL,
        **TEXT,
    }
    row |= more
    row.setdefault("launch_step_number", row["step_number"])
    return row


def table(*rows: dict[str, Any]) -> pd.DataFrame:
    """The table that job.join hands to matching and purposes."""
    frame = pd.DataFrame(list(rows))
    for name in ("rank", "window", "group", "stream"):
        frame[name] = frame[name].astype("int32")
    for name in ("kind", *TEXT):
        frame[name] = frame[name].astype("category")
    return frame


def groups(*members: tuple[int, ...], size: int | None = None) -> ProcessGroups:
    """Groups named 0, 1, ... of these ranks; with ``size`` their lists were cut."""
    made = [
        ProcessGroup(str(i), str(i), "", ranks if size is None else None, ranks if size is not None else (), size or len(ranks))
        for i, ranks in enumerate(members)
    ]
    return ProcessGroups(made, [])
