"""The folder that a recording goes to: two recordings are never merged, and one is replaced only when that was asked for. No torch here."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from tracekit.errors import UsageError
from tracekit.files import SCRATCH_PREFIX

#: What the recorder leaves in a folder; a process that was killed leaves what it was writing as well.
_OURS = (
    "rank_*.pt.trace.json.gz",
    "rank_*.manifest.json",
    "rank_*.memory_snapshot.pickle",
    "collectives.jsonl",
    f"{SCRATCH_PREFIX}*",
    ".record-*",
    "record",
)
#: Folders of recordings on demand.
_ON_DEMAND = re.compile(r"steps_\d+_\d+")


def empty_folder(folder: Path, *, replace: bool) -> None:
    """Make the folder, and take the recording out of it that is there if ``replace``. Raises UsageError where it cannot be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}", "give a folder that can be made") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{folder} cannot be written", "give another folder")
    parts = [folder, *(path for path in folder.iterdir() if _ON_DEMAND.fullmatch(path.name) and path.is_dir() and not path.is_symlink())]
    there = [path for part in parts for pattern in _OURS for path in part.glob(pattern) if not path.is_dir()]
    if any(path.name.startswith("rank_") for path in there) and not replace:
        raise UsageError(f"{folder} holds a recording", "give another folder, or --replace")
    for path in there:
        path.unlink(missing_ok=True)
    for part in parts[1:]:
        with contextlib.suppress(OSError):  # somebody else has left something in it
            part.rmdir()
