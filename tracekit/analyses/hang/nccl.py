"""NCCL's logs of all processes side by side: which communicator is which group, and whose count of calls is behind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tracekit.analyses.hang.gather import Evidence
from tracekit.analyses.hang.words import ranges, ranks_text
from tracekit.findings import Table
from tracekit.readers.hang_files import NcclCommunicator, NcclLate, NcclLog
from tracekit.units import capitalized, plural

#: Communicators that the report lists.
MOST_ROWS = 2000


@dataclass(frozen=True)
class Behind:
    """``ranks`` have made ``count`` calls on a communicator, others more, the last a ``kind``; or they do not answer (``gone``).

    RAS may tell only how many ranks there are: ``number`` of them, ``ahead`` others.
    """

    ranks: list[int]
    count: int
    others: list[int]
    most: int
    kind: str
    label: str
    number: int = 0
    ahead: int = 0
    gone: str = ""
    ras: bool = False

    @property
    def text(self) -> str:
        """The finding."""
        source = "by NCCL's RAS" if self.ras else "by NCCL's logs"
        if self.gone:
            who = capitalized(ranks_text(self.ranks) if self.ranks else "a rank") + (f" of {self.label}" if self.label else "")
            return f"{who} {'is' if len(self.ranks) < 2 else 'are'} {self.gone}, {source}."
        several = max(len(self.others), self.ahead) > 1
        others = ranks_text(self.others) if self.others else plural(self.ahead, "rank")
        late = ranks_text(self.ranks) if self.ranks else plural(self.number, "rank")
        own = "has" if max(len(self.ranks), self.number) == 1 else "have"
        call = f"call {self.most} of {self.label}"
        call = f"{self.kind} ({call})" if self.kind else call
        made = f"{'launched' if self.ras else 'made'} {self.count}"
        return f"{capitalized(others)} {'wait' if several else 'waits'} in {call} for {late}, which {own} {made}, {source}."


def global_ranks(logs: Sequence[NcclLog]) -> dict[str, int]:
    """Process -> its rank in the job: that in its largest communicator, else the log's."""
    found: dict[str, tuple[int, int]] = {}
    for log in logs:
        for one in log.communicators:
            found[one.process] = max(found.get(one.process, (0, 0)), (one.ranks, one.rank))
    largest = max((ranks for ranks, _ in found.values()), default=0)
    alone = [log for log in logs if log.rank is not None and len({one.process for one in log.communicators}) == 1]
    told = {log.communicators[0].process: log.rank for log in alone if log.rank is not None}
    return {process: rank if ranks == largest else told.get(process, rank) for process, (ranks, rank) in found.items()}


def _together(logs: Sequence[NcclLog]) -> dict[tuple[str, int], list[NcclCommunicator]]:
    found: dict[tuple[str, int], list[NcclCommunicator]] = {}
    for log in logs:
        for one in log.communicators:
            found.setdefault((one.name, one.ranks), []).append(one)
    return found


def behind(evidence: Evidence) -> list[Behind]:
    """Ranks that do not answer, then communicators whose members have made different numbers of calls; those that all wait for are few."""
    rank_of = global_ranks(evidence.logs)
    of_ras = {(one.name, one.ranks) for log in evidence.logs if log.ras for one in log.communicators}
    found = [told for log in evidence.logs for told in map(_told_late, log.late)]
    for (name, ranks), members in _together(evidence.logs).items():
        counts = {rank_of[one.process]: one.count + 1 for one in members}
        if len(counts) < 2 or len(set(counts.values())) != 2 or min(counts.values()) < 0:
            continue
        least, most = min(counts.values()), max(counts.values())
        late = sorted(rank for rank, count in counts.items() if count == least)
        kind = next(one.kind for one in members if one.count + 1 == most)
        label = _group(evidence, sorted(counts)) if len(counts) == ranks else ""
        others = sorted(set(counts) - set(late))
        label = label or f"communicator {name} of {ranks} ranks"
        found.append(Behind(late, least, others, most, kind, label, ras=(name, ranks) in of_ras))
    return sorted(found, key=lambda one: (not one.gone, not one.ranks, -max(len(one.others), one.ahead)))


def _told_late(late: NcclLate) -> Behind:
    label = f"communicator {late.communicator}" if late.communicator else ""
    return Behind(late.ranks, late.operation, [], late.most, late.kind, label, late.number, late.ahead, late.gone, ras=True)


def communicators(evidence: Evidence) -> Table | None:
    """One row a communicator: what its ranks say of it; None where no log tells any."""
    rank_of = global_ranks(evidence.logs)
    rows = []
    for (name, ranks), found in sorted(_together(evidence.logs).items(), key=lambda item: -item[0][1]):
        members = sorted({rank_of[one.process] for one in found})
        counts = {rank_of[one.process]: one.count + 1 for one in found if one.count >= 0}
        least, most = min(counts.values(), default=0), max(counts.values(), default=0)
        rows.append(
            {
                "group": (_group(evidence, members) if len(members) == ranks else "") or f"communicator {name}",
                "ranks": ranks,
                "seen": ranges(members),
                "made": sum(one.complete for one in found),
                "nodes": max(one.nodes for one in found) or math.nan,
                "channels": max(one.channels for one in found) or math.nan,
                "calls": (f"{most:,}" if least == most else f"{least:,} to {most:,}") if counts else "",
                "last": next((one.kind for one in found if one.kind and one.count + 1 == most), ""),
                "fewest": ranges([rank for rank, count in counts.items() if count == least]) if least < most else "–",
            }
        )
    if not rows:
        return None
    rows.sort(key=lambda row: row["fewest"] == "–")
    headings = {
        "group": "Group", "ranks": "Ranks", "seen": "Ranks in the logs", "made": "Complete on", "nodes": "Nodes", "channels": "Channels",
        "calls": "Calls", "last": "Last call", "fewest": "Fewest calls: ranks",
    }  # fmt: skip
    missing = {
        "nodes": "not in the log", "channels": "not in the log", "calls": "NCCL_DEBUG_SUBSYS=COLL was not set",
        "last": "NCCL_DEBUG_SUBSYS=COLL was not set",
    }  # fmt: skip
    note = " · ".join(dict.fromkeys(text for log in evidence.logs for text in _facts(log)))
    return Table("NCCL's communicators", pd.DataFrame(rows[:MOST_ROWS]), headings, note=note, missing=missing, preview=8)


def _facts(log: NcclLog) -> list[str]:
    return [text for text in (f"NCCL {log.version}" if log.version else "", f"network {log.network}" if log.network else "") if text]


def _group(evidence: Evidence, ranks: Sequence[int]) -> str:
    return next((group.label for group in evidence.groups if list(group.ranks) == list(ranks)), "")


def logs_json(evidence: Evidence) -> list[dict[str, Any]] | None:
    """``nccl``; None without a log."""
    rank_of = global_ranks(evidence.logs)
    members = {key: sorted({rank_of[one.process] for one in found}) for key, found in _together(evidence.logs).items()}

    def told(one: NcclCommunicator) -> dict[str, Any]:
        whole = members[one.name, one.ranks]
        return {
            "rank": one.rank, "ranks": one.ranks, "id": one.name, "global_rank": rank_of[one.process], "members": whole,
            "group": (_group(evidence, whole) or None) if len(whole) == one.ranks else None, "complete": one.complete,
            "last_call": one.kind or None, "calls": one.count + 1 if one.count >= 0 else None, "channels": one.channels or None,
            "nodes": one.nodes or None,
        }  # fmt: skip

    return [
        {
            "file": log.file,
            "version": log.version or None,
            "network": log.network or None,
            "communicators": [told(one) for one in log.communicators],
            "warnings": log.warnings,
        }
        for log in evidence.logs
    ] or None
