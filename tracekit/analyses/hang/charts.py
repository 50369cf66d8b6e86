"""A hang as charts: the wait chain, every rank in every group, the calls that stand still, the stacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from tracekit.analyses.hang.gather import Group, standing
from tracekit.analyses.hang.words import call_text, ranges, ranks_text
from tracekit.findings import Graph, GraphEdge, Heatmap, Table
from tracekit.readers.hang_files import Frame

if TYPE_CHECKING:
    from tracekit.analyses.hang import Hang

#: Rows and columns of the matrix, frames of a stack, edges of the chain that are shown.
MOST_RANKS, MOST_GROUPS, MOST_FRAMES, MOST_EDGES = 256, 40, 25, 60
#: States of the matrix, in the order of their numbers.
STATES = ("idle", "completed", "waiting", "missing", "no dump", "differs")


def graph(hang: Hang) -> Graph:
    """Ranks as nodes, the root marked; who waits for whom as edges. Ranks that wait for the same at one place are one node."""
    assert hang.root is not None
    node_of: dict[int, str] = dict.fromkeys(hang.root.ranks, "root")
    together: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for wait in hang.waits:
        for call in wait.waiting:
            if call.rank not in node_of:
                together.setdefault((id(wait), tuple(wait.blamed)), []).append(call.rank)
    labels = {"root": f"{ranks_text(hang.root.ranks)}: {hang.root.doing}"}
    for number, ranks in enumerate(together.values()):
        own = [rank for rank in dict.fromkeys(ranks) if rank not in node_of]
        if own:
            labels[f"n{number}"] = ranks_text(sorted(own))
            node_of.update(dict.fromkeys(own, f"n{number}"))
    found: dict[tuple[str, str], str] = {}
    for edge in hang.edges:
        if edge.waits_for not in node_of:
            node_of[edge.waits_for] = f"r{edge.waits_for}"
            labels[f"r{edge.waits_for}"] = f"rank {edge.waits_for}"
        pair = node_of[edge.rank], node_of[edge.waits_for]
        if pair[0] != pair[1] and len(found) < MOST_EDGES:
            found.setdefault(pair, call_text(edge.wait))
    edges = [GraphEdge(source, target, label) for (source, target), label in found.items()]
    return Graph("Who waits for whom", labels, edges, marked="root", note="An arrow points at the one that is waited for.")


def matrix(hang: Hang) -> Heatmap:
    """Ranks x groups: the state of each, with its last call as text."""
    evidence = hang.evidence
    assert evidence is not None
    involved = {rank for wait in hang.waits for rank in wait.group.ranks}
    ranks = sorted(evidence.ranks, key=lambda rank: (rank not in involved, rank))[:MOST_RANKS]
    groups = sorted(evidence.groups, key=lambda group: not any(wait.group is group for wait in hang.waits))[:MOST_GROUPS]
    cells = [[_cell(hang, group, rank) for group in groups] for rank in sorted(ranks)]
    values = [[None if cell is None else float(cell[0]) for cell in row] for row in cells]
    texts = [["not a member" if cell is None else cell[1] for cell in row] for row in cells]
    note = " · ".join(f"{number} {name}" for number, name in enumerate((*STATES[:4], f"no {evidence.left}", STATES[5])))
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
        return 4, f"no {evidence.left}"
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
                return state, f"{call.label} {call.state_name}, {call.what} {call.site}"
    return (1 if found.called >= 0 else 0), text


def waits_table(hang: Hang) -> Table:
    """One row a collective or message that stands still."""
    calls = [wait.waiting[0] if wait.waiting else wait.call for wait in hang.waits]
    frame = pd.DataFrame(
        {
            "group": [wait.group.label for wait in hang.waits],
            "call": [call.label for call in calls],
            "sizes": [call.what for call in calls],
            "state": [call.state_name for call in calls],
            "site": [call.site for call in calls],
            "ranks": [ranges([call.rank for call in wait.waiting]) for wait in hang.waits],
            "for": [ranges(wait.blamed) or "–" for wait in hang.waits],
            "last": [float("nan") if wait.last_completed < 0 else wait.last_completed for wait in hang.waits],
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
    return Table(
        "Collectives and messages that stand still",
        frame,
        headings,
        missing={"last": f"not in the {hang.evidence.left if hang.evidence else 'dump'}s"},
        preview=8,
    )


def stacks_table(hang: Hang) -> Table | None:
    """The stacks of the root, then of those that wait; None without any."""
    evidence, root = hang.evidence, hang.root
    assert evidence is not None and root is not None
    waiting = [call for wait in hang.waits for call in wait.waiting]
    stacks: list[tuple[int, str, list[Frame]]] = [(rank, "root", evidence.stack_of(rank)) for rank in root.ranks[:8]]
    if root.stack and not stacks[0][2]:
        stacks[0] = (root.ranks[0], "root, its last call", root.stack)
    stacks += [(call.rank, call.label, evidence.stack_of(call.rank, call.place)) for call in waiting]
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
