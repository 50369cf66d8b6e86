"""What was read and what was not, for the last chapter of the report and for the terminal."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracekit.findings import Table

_WORST_FIRST = ("skipped", "truncated", "duplicate", "repaired", "complete")


def common_folder(files: Sequence[str]) -> str:
    """The folder that holds all files, with its separator; '' when they share none."""
    folders = [posixpath.dirname(file.replace("\\", "/")) for file in files]
    if not all(folders):
        return ""
    parts = [folder.split("/") for folder in folders]
    shared = 0
    while all(len(p) > shared for p in parts) and len({p[shared] for p in parts}) == 1:
        shared += 1
    return "/".join(parts[0][:shared]) + "/" if shared else ""


def short_names(document: Mapping[str, Any]) -> list[str]:
    """Each covered file's name without the folder that all of them share."""
    files = [entry["file"] for entry in document["coverage"]]
    folder = common_folder(files)
    return [file[len(folder) :] for file in files]


def incomplete(document: Mapping[str, Any]) -> bool:
    """True where something of the job was not read: a file that is not complete, or a missing rank."""
    return bool(document["job"]["missing_ranks"]) or any(entry["status"] != "complete" for entry in document["coverage"])


def files_table(document: Mapping[str, Any]) -> Table:
    """One row a file, the least readable first."""
    import pandas as pd  # the terminal, which needs the names above, does not wait for it

    from tracekit.findings import Table

    rows = [
        {
            "file": name,
            "rank": entry["rank"],
            "status": entry["status"],
            "events": entry["events"],
            "arrows": entry["arrows"],
            "problems": " · ".join(entry["problems"]),
        }
        for name, entry in zip(short_names(document), document["coverage"], strict=True)
    ]
    rows.sort(key=lambda row: (_WORST_FIRST.index(row["status"]), not row["problems"]))
    headings = {
        "file": "File",
        "rank": "Rank",
        "status": "Read",
        "events": "Events",
        "arrows": "Arrows",
        "problems": "What was found",
    }
    frame = pd.DataFrame(rows, columns=list(headings), dtype=object)
    return Table("Files", frame, headings, missing={"rank": "the file names no rank"})
