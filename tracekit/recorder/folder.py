"""The folder that a recording goes to: two recordings are never merged, and one is replaced only when that was asked for. No torch here."""

from __future__ import annotations

import os
from pathlib import Path

from tracekit.errors import UsageError

#: What the recorder leaves in a folder, beside folders ``steps_10_12`` of recordings on demand.
_OURS = (
    "rank_*.pt.trace.json.gz",
    "rank_*.manifest.json",
    "rank_*.memory_snapshot.pickle",
    "collectives.jsonl",
    ".tracekit-recording.json",
    "record",
)


def empty_folder(folder: Path, *, replace: bool) -> None:
    """Make the folder, and take the recording out of it that is there if ``replace``. Raises UsageError where it cannot be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}", "give a folder that can be made") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{folder} cannot be written", "give another folder")
    there = [path for pattern in _OURS for path in folder.glob(pattern)]
    if any(path.name.startswith("rank_") for path in there) and not replace:
        raise UsageError(f"{folder} holds a recording", "give another folder, or --replace")
    for path in there:
        path.unlink(missing_ok=True)
