"""NCCL's logs of all processes side by side: which communicator is which group, and whose count of calls is behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tracekit.analyses.hang.gather import Evidence
from tracekit.analyses.hang.words import ranks_text
from tracekit.readers.hang_files import NcclCommunicator, NcclLog


@dataclass(frozen=True)
class Behind:
    """``ranks`` have made ``count`` calls on a communicator, the others more, the last of them a ``kind``."""

    ranks: list[int]
    count: int
    others: list[int]
    most: int
    kind: str
    label: str

    @property
    def text(self) -> str:
        """The finding."""
        wait = "waits" if len(self.others) == 1 else "wait"
        own = "has" if len(self.ranks) == 1 else "have"
        call = f"{self.kind} (call {self.most} of {self.label})"
        text = f"{ranks_text(self.others)} {wait} in {call} for {ranks_text(self.ranks)}, which {own} made {self.count}"
        return f"{text[0].upper()}{text[1:]}, by NCCL's logs."


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
    """Communicators whose members have made different numbers of calls; those that all wait for are few."""
    rank_of = global_ranks(evidence.logs)
    found = []
    for (name, ranks), members in _together(evidence.logs).items():
        counts = {rank_of[one.process]: one.count + 1 for one in members}
        if len(counts) < 2 or len(set(counts.values())) != 2 or min(counts.values()) < 0:
            continue
        least, most = min(counts.values()), max(counts.values())
        late = sorted(rank for rank, count in counts.items() if count == least)
        kind = next(one.kind for one in members if one.count + 1 == most)
        label = _group(evidence, sorted(counts)) if len(counts) == ranks else ""
        found.append(Behind(late, least, sorted(set(counts) - set(late)), most, kind, label or f"communicator {name} of {ranks} ranks"))
    return sorted(found, key=lambda one: -len(one.others))


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
