"""What was read, matched and known, for the last chapter of the report and for the terminal."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from tracekit.findings import Table
from tracekit.job.model import Job
from tracekit.units import NULL

_WORST_FIRST = ("skipped", "truncated", "duplicate", "repaired", "complete")


def common_folder(files: Sequence[str]) -> str:
    """The folder that holds all files, with its separator; '' when they share none."""
    folders = [posixpath.dirname(file.replace("\\", "/")) for file in files]
    if not folders:
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
        "arrows": "Arrows, not needed",
        "problems": "What was found",
    }
    frame = pd.DataFrame(rows, columns=list(headings), dtype=object)
    return Table("Files", frame, headings, missing={"rank": "the file names no rank"})


def known_table(job: Job) -> Table:
    """How many communication operations were matched, and with which of their facts known."""
    operations = job.operations
    total = len(operations)
    match = operations["match"].to_numpy()
    by = job.matches["matched_by"].astype("str").iloc[match[match >= 0]].value_counts()
    rows = [
        ("matched with other ranks by group and sequence number", int(by.get("seq", 0))),
        ("matched with other ranks by order only", int(by.get("order", 0))),
        ("on one rank only: no wait or transfer can be told", int((match < 0).sum())),
        ("process group known", int((operations["group"] >= 0).sum())),
        ("mesh axis known", int((operations["axis"].astype("str") != "").sum())),
        ("size in bytes known", int((operations["full_bytes"] != NULL).sum())),
    ]
    frame = pd.DataFrame(
        [{"what": what, "count": count, "share": count / total if total else None} for what, count in rows]
    )
    title = f"Communication operations: {total:,}"
    return Table(title, frame, {"what": "Of these", "count": "Operations", "share": "Share [share]"})
