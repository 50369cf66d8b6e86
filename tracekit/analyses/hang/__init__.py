"""A job that hangs: who waits where, for whom, and what the one does that all wait for.

Taken from flight recorder dumps, Python stacks and NCCL's log beside the traces, or from these alone. ``gather`` lays them side by side,
``waits`` finds the collectives and messages that stand still, ``roots`` follows the chain to its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tracekit.analyses.hang.gather import Evidence, Group, gather, standing
from tracekit.analyses.hang.roots import Edge, Root, edges_of, find_root, idle_by_stack
from tracekit.analyses.hang.waits import Skipped, Wait, collective_wait, message_waits, skipped
from tracekit.findings import Chart, Finding, Graph, GraphEdge, Heatmap, Section, Table
from tracekit.job.model import Job
from tracekit.readers.hang_files import Frame
from tracekit.units import listed, plural

ORDER = 1

#: Rows and columns of the matrix, frames of a stack, edges of the chain that are shown.
MOST_RANKS, MOST_GROUPS, MOST_FRAMES, MOST_EDGES = 256, 40, 25, 60
#: States of the matrix, in the order of their numbers.
_STATES = ("idle", "completed", "waiting", "missing", "no dump", "differs")


@dataclass(frozen=True)
class Hang:
    """``evidence`` is None without any file that tells of a hang. ``root`` is None where nothing stands still."""

    evidence: Evidence | None
    waits: list[Wait]
    skipped: list[Skipped]
    edges: list[Edge]
    root: Root | None

    def findings(self) -> list[Finding]:
        """The hang, before anything else; that nothing hangs, where dumps were read."""
        if self.evidence is None or not (self.evidence.dumps or self.evidence.stacks):
            return []
        if self.root is None:
            if not self.evidence.dumps:
                return []
            count = plural(len(self.evidence.dumps), "flight recorder dump")
            text = f"Nothing hangs in {count}: every collective that a rank has called is complete."
            return [Finding("hang.none", "info", text, evidence="the dumps of all ranks")]
        evidence = "; ".join(wait_text(wait) for wait in self.waits[:4]) + (
            f"; and {len(self.waits) - 4} more" if len(self.waits) > 4 else ""
        )
        return [Finding("hang.root", "critical", sentence(self), evidence=evidence or "Python stacks", advice=_ADVICE[self.root.why])]

    def sections(self) -> list[Section]:
        """Where every rank stands in every group, the wait chain, and the stacks."""
        if self.evidence is None or self.root is None:
            return []
        lead = "What every rank has called last in each of its process groups, and who waits for whom. " + sentence(self)
        charts: list[Chart] = [_graph(self), _matrix(self), _waits_table(self)]
        if stacks := _stacks_table(self):
            charts.append(stacks)
        return [Section("The job hangs", lead, charts)]

    def json(self) -> dict[str, Any]:
        """``hang``."""
        if self.evidence is None:
            return {"hang": None, "not_measured": {"hang": "no flight recorder dump, Python stack or NCCL log beside the traces"}}
        if self.root is None:
            return {"hang": None, "not_measured": {"hang": "nothing stands still in the dumps"}}
        return {
            "hang": {
                "text": sentence(self),
                "waiting": [_waiting(wait) for wait in self.waits],
                "root": {
                    "ranks": self.root.ranks,
                    "why": self.root.why,
                    "doing": self.root.doing,
                    "stack": [str(frame) for frame in self.root.stack[:MOST_FRAMES]],
                },
                "chain": [_edge(edge) for edge in self.edges[:MOST_EDGES]],
                "ranks_with_dump": sorted(self.evidence.dumps),
                "nccl": [_log(log) for log in self.evidence.logs] or None,
                "notes": self.evidence.notes,
            }
        }


_ADVICE = {
    "raised": "Look at this exception first; what the other ranks say follows from it.",
    "mismatch": "All ranks of a group have to call the same collective with tensors that fit: look for what depends on the rank here.",
    "skipped": "Look for a branch around this call that one rank does not take: every rank of the group has to make it.",
    "order": "Enter the groups in one order on all ranks.",
    "died": "Look at the log of that rank and of its host: out-of-memory killer, hardware error, preemption.",
    "busy": "Look at what this rank does there; if it is right, raise the timeout or let the others do it as well.",
}


def sentence(hang: Hang) -> str:
    """``Ranks 0, 1, 3 wait in all_reduce 5 of the default group (train.py:31) for rank 2, which is in sleep, at data.py:8.``"""
    root = hang.root
    assert root is not None
    who = f"rank {root.ranks[0]}" if len(root.ranks) == 1 else f"ranks {listed(root.ranks, 8)}"
    wait = root.wait
    if wait is None:
        others = idle_by_stack(hang.evidence, root.ranks) if hang.evidence is not None else []
        stand = "".join(f"; {_ranks(ranks)} wait{'s' if len(ranks) == 1 else ''} in {place}" for place, ranks in others[:4])
        return f"{who[0].upper()}{who[1:]} {root.doing}{stand}."
    waiting = sorted({call.rank for call in wait.waiting} - set(root.ranks))
    if root.why in ("mismatch", "order", "skipped") or not waiting:
        stand = (
            f"; {_ranks(waiting)} wait{'s' if len(waiting) == 1 else ''} in {_call(wait)}" if waiting else f"; {_call(wait)} stands still"
        )
        return f"{who[0].upper()}{who[1:]} {root.doing}{stand if root.why != 'order' else ''}."
    verb = "waits" if len(waiting) == 1 else "wait"
    text = f"{_ranks(waiting)} {verb} in {_call(wait)} for {who}, which {root.doing}."
    return text[0].upper() + text[1:]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks, 8)}"


def _call(wait: Wait) -> str:
    call = wait.waiting[0] if wait.waiting else wait.call
    number = f" {call.seq}" if call.seq >= 0 else ""
    return f"{call.kind}{number} of {wait.group.label}" + (f" ({call.site})" if call.site else "")


def wait_text(wait: Wait) -> str:
    """``tp: ranks 0, 1 in all_reduce 7, last completed 6, missing 2``."""
    parts = [f"{_ranks(sorted(call.rank for call in wait.waiting))} in {_call(wait)}" if wait.waiting else _call(wait)]
    if wait.call.peer < 0 and wait.last_completed >= 0:
        parts.append(f"last completed {wait.last_completed}")
    for name, ranks in (("missing", wait.missing), ("no dump of", wait.no_dump), ("different on", [call.rank for call in wait.differ])):
        if ranks:
            parts.append(f"{name} {listed(ranks, 8)}")
    return ", ".join(parts)


def _waiting(wait: Wait) -> dict[str, Any]:
    call = wait.waiting[0] if wait.waiting else wait.call
    return {
        "group": wait.group.name,
        "description": wait.group.description or None,
        "axis": wait.group.axis or None,
        "members": list(wait.group.ranks),
        "kind": call.kind,
        "seq": call.seq if call.seq >= 0 else None,
        "sizes": call.what or None,
        "state": call.state_name,
        "site": call.site or None,
        "ranks": sorted(one.rank for one in wait.waiting),
        "missing": wait.missing,
        "no_dump": wait.no_dump,
        "differ": [{"rank": one.rank, "kind": one.kind, "sizes": one.what, "site": one.site or None} for one in wait.differ],
        "last_completed": wait.last_completed if wait.last_completed >= 0 else None,
        "since_unix_ns": call.created_ns or None,
    }


def _edge(edge: Edge) -> dict[str, Any]:
    call = next(call for call in edge.wait.waiting if call.rank == edge.rank)
    return {"rank": edge.rank, "waits_for": edge.waits_for, "group": edge.wait.group.name, "kind": call.kind, "seq": call.seq}


def _log(log: Any) -> dict[str, Any]:
    communicators = [{"rank": rank, "ranks": ranks, "id": name} for rank, ranks, name in log.communicators]
    return {"file": log.file, "communicators": communicators, "warnings": log.warnings}


def _graph(hang: Hang) -> Graph:
    """Ranks as nodes, the root marked; who waits for whom as edges. Ranks that wait for the same at one place are one node."""
    assert hang.root is not None
    node_of: dict[int, str] = dict.fromkeys(hang.root.ranks, "root")
    together: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for wait in hang.waits:
        for call in wait.waiting:
            if call.rank not in node_of:
                together.setdefault((id(wait), tuple(wait.blamed)), []).append(call.rank)
    labels = {"root": f"{_ranks(hang.root.ranks)}: {hang.root.doing}"}
    for number, ranks in enumerate(together.values()):
        own = [rank for rank in dict.fromkeys(ranks) if rank not in node_of]
        if own:
            labels[f"n{number}"] = _ranks(sorted(own))
            node_of.update(dict.fromkeys(own, f"n{number}"))
    found: dict[tuple[str, str], str] = {}
    for edge in hang.edges:
        if edge.waits_for not in node_of:
            node_of[edge.waits_for] = f"r{edge.waits_for}"
            labels[f"r{edge.waits_for}"] = f"rank {edge.waits_for}"
        pair = node_of[edge.rank], node_of[edge.waits_for]
        if pair[0] != pair[1] and len(found) < MOST_EDGES:
            found.setdefault(pair, _call(edge.wait))
    edges = [GraphEdge(source, target, label) for (source, target), label in found.items()]
    return Graph("Who waits for whom", labels, edges, marked="root", note="An arrow points at the one that is waited for.")


def _matrix(hang: Hang) -> Heatmap:
    """Ranks x groups: the state of each, with its last call as text."""
    evidence = hang.evidence
    assert evidence is not None
    involved = {rank for wait in hang.waits for rank in wait.group.ranks}
    ranks = sorted(evidence.ranks, key=lambda rank: (rank not in involved, rank))[:MOST_RANKS]
    groups = sorted(evidence.groups, key=lambda group: not any(wait.group is group for wait in hang.waits))[:MOST_GROUPS]
    cells = [[_cell(hang, group, rank) for group in groups] for rank in sorted(ranks)]
    values = [[None if cell is None else float(cell[0]) for cell in row] for row in cells]
    texts = [["not a member" if cell is None else cell[1] for cell in row] for row in cells]
    note = " · ".join(f"{number} {name}" for number, name in enumerate(_STATES))
    left_out = len(evidence.ranks) - len(ranks)
    note += f". {left_out} ranks that are not in a group that hangs are left out." if left_out > 0 else ""
    return Heatmap(
        "Ranks and process groups", [g.label for g in groups], [f"rank {r}" for r in sorted(ranks)], values, "", texts, note=note
    )


def _cell(hang: Hang, group: Group, rank: int) -> tuple[int, str] | None:
    evidence = hang.evidence
    assert evidence is not None
    if rank not in group.ranks:
        return None
    if rank not in evidence.dumps:
        return 4, "no dump"
    found = standing(evidence, group, rank)
    text = f"called {found.called}, completed {found.completed}" if found.called >= 0 else "nothing called"
    for wait in hang.waits:
        if wait.group is not group:
            continue
        if rank in wait.missing:
            return 3, f"missing: {text}"
        for state, calls in ((5, wait.differ), (2, wait.waiting)):
            call = next((call for call in calls if call.rank == rank), None)
            if call is not None:
                return state, f"{call.kind} {call.seq} {call.state_name}, {call.what} {call.site}"
    return (1 if found.called >= 0 else 0), text


def _waits_table(hang: Hang) -> Table:
    rows = [_waiting(wait) for wait in hang.waits]
    frame = pd.DataFrame(
        {
            "group": [wait.group.label for wait in hang.waits],
            "call": [f"{row['kind']} {row['seq'] if row['seq'] is not None else ''}" for row in rows],
            "sizes": [row["sizes"] or "" for row in rows],
            "state": [row["state"] for row in rows],
            "site": [row["site"] or "" for row in rows],
            "ranks": [listed(row["ranks"], 8) for row in rows],
            "for": [listed(wait.blamed, 8) or "–" for wait in hang.waits],
            "last": [float("nan") if row["last_completed"] is None else row["last_completed"] for row in rows],
        }
    )
    headings = {
        "group": "Group",
        "call": "Waits in",
        "sizes": "Sizes and types",
        "state": "State",
        "site": "Line of code",
        "ranks": "Ranks",
        "for": "Wait for",
        "last": "Last completed by all",
    }
    return Table("Collectives and messages that stand still", frame, headings, missing={"last": "not in the dumps any more"}, preview=8)


def _stacks_table(hang: Hang) -> Table | None:
    evidence, root = hang.evidence, hang.root
    assert evidence is not None and root is not None
    waiting = [call for wait in hang.waits for call in wait.waiting]
    stacks: list[tuple[int, str, list[Frame]]] = [(rank, "root", evidence.stack_of(rank)) for rank in root.ranks[:8]]
    if root.stack and not stacks[0][2]:
        stacks[0] = (root.ranks[0], "root, its last call", root.stack)
    stacks += [(call.rank, f"{call.kind} {call.seq}", evidence.stack_of(call.rank, call.place)) for call in waiting]
    shown = [(rank, what, frames) for rank, what, frames in stacks if frames][:MOST_RANKS]
    if not shown:
        return None
    frame = pd.DataFrame(
        {
            "rank": [rank for rank, _, _ in shown],
            "what": [what for _, what, _ in shown],
            "stack": [" ← ".join(str(one) for one in frames[:MOST_FRAMES]) for _, _, frames in shown],
        }
    )
    return Table("Stacks", frame, {"rank": "Rank", "what": "Waits in", "stack": "Stack, innermost first"})


def analyze(job: Job) -> Hang:
    """Find who the job waits for."""
    if not job.hang_files:
        return Hang(None, [], [], [], None)
    evidence = gather(job.hang_files, _axes(job))
    waits = [wait for group in evidence.groups if (wait := collective_wait(evidence, group)) is not None]
    waits += [wait for group in evidence.groups for wait in message_waits(evidence, group)]
    left_out = [skip for wait in waits for skip in skipped(evidence, wait)]
    waits.sort(key=lambda wait: -len(wait.waiting))
    return Hang(evidence, waits, left_out, edges_of(waits), find_root(evidence, waits, left_out))


def _axes(job: Job) -> Mapping[tuple[int, ...], str]:
    """Mesh axis by members, from the traces."""
    return {tuple(sorted(group.ranks)): group.axis for group in job.groups.groups if group.ranks is not None and group.axis}


__all__ = ["Hang", "analyze", "sentence"]
