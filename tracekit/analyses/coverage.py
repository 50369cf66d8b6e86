"""What was not read, not matched and not known, said as findings, and how much is known of each kind of communication.

The sentences themselves come from where a problem was met (Coverage.problems of each file, Job.notes). Here those that differ only in
their numbers, from many files, become one finding. Per axis and kind, shares are of the operations of all ranks:

    matched      with another rank's operation
    group known, bytes known
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pandas as pd

from tracekit.analyses import _thresholds as thresholds
from tracekit.analyses._common import UNKNOWN_AXIS
from tracekit.findings import Finding, Section, Severity, Table
from tracekit.job.model import Job
from tracekit.notes import Note, sentence
from tracekit.schema import table
from tracekit.trace.events import Coverage
from tracekit.units import NULL, listed, plural

ORDER = 90

KNOWN = table(
    "known_communication",
    ("axis", "str", "", "mesh axis, or 'unknown'"),
    ("kind", "str", "", "kind of the operations"),
    ("operations", "int64", "", "of all ranks"),
    ("matched", "int64", "", "matched with another rank's"),
    ("by_order", "int64", "", "of them by order only"),
    ("group_known", "int64", "", "whose process group is recorded"),
    ("bytes_known", "int64", "", "whose size is recorded"),
)
_NUMBERS = re.compile(r"\d+")
_MOST = 12
_STATUS: dict[str, tuple[Severity, str, str]] = {
    "truncated": ("warning", "end in the middle (truncated)", "Record them again, or let the profiler finish writing before the job ends."),
    "skipped": ("warning", "could not be used", "See the reason of each file under coverage."),
    "repaired": ("info", "needed repairs while they were read", ""),
    "duplicate": ("info", "stand for a rank and time that another file already covers", "Remove the copies, or analyze one run at a time."),
}


@dataclass(frozen=True)
class Known:
    """``known`` has schema KNOWN; ``files`` and ``notes`` are the job's, ``missing`` its missing ranks."""

    known: pd.DataFrame
    files: list[Coverage]
    notes: list[Note]
    missing: list[int]
    world_size: int | None

    def findings(self) -> list[Finding]:
        """Ranks and files that are missing, then everything else that was noted."""
        found = [*self._missing(), *self._files(), *self._unmatched(), *self._notes(), *self._problems()]
        return found[:_MOST]

    def sections(self) -> list[Section]:
        """How much is known of each kind of communication."""
        if not len(self.known):
            return []
        rows = self.known
        share = {name: rows[name] / rows["operations"] for name in ("matched", "by_order", "group_known", "bytes_known")}
        frame = rows[["axis", "kind", "operations"]].assign(**share)
        headings = {
            "axis": "Axis",
            "kind": "Kind",
            "operations": "Operations",
            "matched": "Matched [share]",
            "by_order": "By order only [share]",
            "group_known": "Group known [share]",
            "bytes_known": "Size known [share]",
        }
        lead = "Waits, transfers and bandwidths exist only for operations that were matched with other ranks' and whose size is known."
        return [Section("What is known of the communication", lead, (Table("By axis and kind", frame, headings),), name="known")]

    def json(self) -> dict[str, Any]:
        """Nothing: the document writes ``coverage`` itself."""
        return {}

    def _missing(self) -> list[Finding]:
        if not self.missing or self.world_size is None:
            return []
        text = f"{len(self.missing)} of {self.world_size} ranks are missing: {listed(self.missing, 8)}."
        advice = "Put the traces of all ranks into one folder: waits, transfers and stragglers need every rank."
        return [Finding("coverage.missing_ranks", "warning", text, float(len(self.missing)), "ranks", "world size in the traces", advice)]

    def _files(self) -> list[Finding]:
        found = []
        for status, (severity, what, advice) in _STATUS.items():
            names = [PurePosixPath(entry.file.replace("\\", "/")).name for entry in self.files if entry.status == status]
            if names:
                text = f"{plural(len(names), 'file')} {what}: {listed(names)}."
                if len(names) == 1:
                    text = text.replace(" end in", " ends in").replace(" stand for", " stands for")
                found.append(Finding(f"coverage.{status}", severity, text, float(len(names)), "files", "coverage", advice))
        return found

    def _unmatched(self) -> list[Finding]:
        total, matched = int(self.known["operations"].sum()), int(self.known["matched"].sum())
        severity = thresholds.UNMATCHED.of((total - matched) / total) if total else None
        if severity is None:
            return []
        text = f"{total - matched:,} of {total:,} communication operations are not matched with another rank's: "
        text += "they have no wait, transfer or bandwidth."
        advice = "Record all ranks over the same steps, with a torch that writes sequence numbers (the key Seq) into the traces."
        if self.missing:  # said above, with what to do
            severity, advice = "info", "Add the traces of the missing ranks."
        share = (total - matched) / total
        return [Finding("coverage.unmatched", severity, text, share, "share", "what is known of the communication", advice)]

    def _notes(self) -> list[Finding]:
        notes = [found for found in self.notes if found.code != "ranks_missing"]  # said above
        return [Finding("coverage.note", "info", _sentence(sentence(found)), evidence="notes of the job") for found in notes]

    def _problems(self) -> list[Finding]:
        """Problems of files, those that differ only in numbers together, most frequent first."""
        alike: dict[str, list[tuple[str, str]]] = {}
        for entry in self.files:
            if entry.status in ("complete", "repaired"):
                for problem in entry.problems:
                    alike.setdefault(_NUMBERS.sub("#", problem), []).append((entry.file, problem))
        found = []
        for cases in sorted(alike.values(), key=len, reverse=True):
            text = cases[0][1]
            if len(cases) > 1:
                text += f" (and alike in {plural(len(cases) - 1, 'more file')})"
            names = [PurePosixPath(file.replace("\\", "/")).name for file, _ in cases]
            found.append(Finding("coverage.problem", "info", _sentence(text), float(len(cases)), "files", listed(names, 3)))
        return found


def _sentence(text: str) -> str:
    """With a capital, unless it begins with a name (``pg_count``), and a full stop."""
    word = text.split(" ", 1)[0]
    first = text[:1].upper() if word.isalpha() and word.islower() else text[:1]
    return first + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def analyze(job: Job) -> Known:
    """Count what is known of the communication, and gather what was noted."""
    return Known(_known(job), list(job.coverage), list(job.notes), list(job.missing_ranks), job.world_size)


def _known(job: Job) -> pd.DataFrame:
    operations = job.operations
    if not len(operations):
        return KNOWN.empty()
    match = operations["match"].to_numpy()
    weak = np.append((job.matches["matched_by"].astype("str") == "order").to_numpy(), False)
    frame = pd.DataFrame(
        {
            "axis": operations["axis"].astype("str").replace("", UNKNOWN_AXIS),
            "kind": operations["kind"].astype("str"),
            "operations": np.ones(len(operations), np.int64),
            "matched": (match >= 0).astype(np.int64),
            "by_order": weak[match].astype(np.int64),
            "group_known": (operations["group"] >= 0).astype(np.int64),
            "bytes_known": (operations["full_bytes"] != NULL).astype(np.int64),
        }
    )
    sums = frame.groupby(["axis", "kind"], as_index=False, sort=True).sum()
    return KNOWN.check(sums[KNOWN.names])
