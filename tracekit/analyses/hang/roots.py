"""From those who wait to those they wait for: the wait chain over groups, and its root.

an edge   rank a waits in a collective (or message) for rank b
a root    somebody waits for it and it waits for nobody: it is busy elsewhere, raised an exception, or is gone
a circle  without a root: the ranks of the circle entered their groups in another order, or called what does not fit
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tracekit.analyses.hang.gather import Call, Evidence, Group, is_secondhand, standing
from tracekit.analyses.hang.waits import Skipped, Wait, call_at
from tracekit.readers.flight_recorder import is_library
from tracekit.readers.hang_files import Frame

Why = Literal["raised", "mismatch", "skipped", "order", "died", "busy", "stuck"]

#: Functions of torch that wait for another rank, in a stack.
_WAITS = re.compile(
    r"^(?:recv|send|irecv|isend|wait|barrier|all_|reduce|broadcast|gather|scatter|batch_isend_irecv|recv_object_list|_wait)"
)


@dataclass(frozen=True)
class Edge:
    """``rank`` waits for ``waits_for`` in ``wait``."""

    rank: int
    waits_for: int
    wait: Wait


@dataclass(frozen=True)
class Root:
    """The cause. ``doing`` is what the ranks do, in words; ``stack`` of the first of them."""

    ranks: list[int]
    why: Why
    doing: str
    stack: list[Frame]
    wait: Wait | None


def edges_of(waits: Sequence[Wait]) -> list[Edge]:
    """Every rank that waits with everybody it waits for."""
    return [Edge(call.rank, other, wait) for wait in waits for call in wait.waiting for other in wait.blamed if other != call.rank]


def find_root(evidence: Evidence, waits: Sequence[Wait], left_out: Sequence[Skipped]) -> Root | None:
    """The root of the hang; None where nothing stands still."""
    raised = [r for r, found in sorted(evidence.stacks.items()) if found.error and not is_secondhand(found.error)]
    if raised:
        return Root(raised, "raised", _raised(evidence, raised[0]), evidence.stack_of(raised[0]), _wait_for(waits, raised[0]))
    for skip in left_out:
        text = f"left out the {skip.call.label} of {skip.group.label}" + (f" ({skip.call.site})" if skip.call.site else "")
        wait = next(w for w in waits if w.group is skip.group)
        return Root([skip.rank], "skipped", text, evidence.stack_of(skip.rank), wait)
    edges = edges_of(waits)
    circle = _circle(edges)
    for wait in waits:
        if wait.differ and (wait.other_kind or not circle):
            return _mismatch(evidence, wait)
    blocked = {edge.rank for edge in edges}
    ends = [edge for edge in edges if edge.waits_for not in blocked]
    if ends:
        return _end(evidence, ends)
    return _order(evidence, circle) if circle else _stuck(evidence, waits)


def _stuck(evidence: Evidence, waits: Sequence[Wait]) -> Root | None:
    """A collective that all of its members are in, and that does not end."""
    wait = next((wait for wait in waits if wait.all_in), None)
    if wait is None:
        return None
    call = wait.waiting[0]
    where = f" ({call.site})" if call.site else ""
    text = f"are all in {call.label} of {wait.group.label}{where}, and it does not end: nobody is missing"
    return Root([one.rank for one in wait.waiting], "stuck", text, evidence.stack_of(call.rank, call.place), wait)


def _wait_for(waits: Sequence[Wait], rank: int) -> Wait | None:
    return next((wait for wait in waits if rank in wait.blamed), waits[0] if waits else None)


def _raised(evidence: Evidence, rank: int) -> str:
    return f"raised {evidence.stacks[rank].error}{_at(evidence.stack_of(rank))}"


def _mismatch(evidence: Evidence, wait: Wait) -> Root:
    call = wait.differ[0]
    what = f"{call.kind} of {call.what}" if not wait.other_kind else call.kind
    usual = f"{wait.call.kind} of {wait.call.what}" if not wait.other_kind else wait.call.kind
    where = f" at {call.site}" if call.site else ""
    ranks = [one.rank for one in wait.differ]
    return Root(ranks, "mismatch", f"called {what}{where} where the others call {usual}", evidence.stack_of(call.rank, call.place), wait)


def _end(evidence: Evidence, ends: Sequence[Edge]) -> Root:
    """Of those at the end of the chain: who is gone before who is busy, who makes most ranks wait first."""
    wait = max((edge.wait for edge in ends), key=lambda wait: len(wait.waiting))
    blocked = {edge.rank for edge in ends}
    gone = sorted({edge.waits_for for edge in ends if edge.waits_for in wait.no_dump and edge.wait is wait})
    late = sorted({edge.waits_for for edge in ends if edge.waits_for in wait.missing and edge.waits_for not in blocked})
    if late:
        place = None if late[0] in evidence.stacks else _last_place(evidence, late[0])
        return Root(late, "busy", doing(evidence, late[0]), evidence.stack_of(late[0], place), wait)
    return Root(gone, "died", f"left no {evidence.left}: it died, or could not be asked{_last_with(evidence, gone)}", [], wait)


def _last_with(evidence: Evidence, gone: Sequence[int]) -> str:
    """The last call that a rank without a dump completed together with others, by the others' dumps."""
    found: list[tuple[int, str]] = []
    for group in evidence.groups:
        if not gone or gone[0] not in group.ranks:
            continue
        call = _completed_by_all(evidence, group)
        if call is not None:
            found.append((call.created_ns, f"{call.label} of {group.label}" + (f" at {call.site}" if call.site else "")))
    return f"; the last call that it completed with others is {max(found)[1]}" if found else ""


def _completed_by_all(evidence: Evidence, group: Group) -> Call | None:
    """The last collective that every member with a dump has completed."""
    asked = [rank for rank in group.ranks if rank in evidence.dumps]
    number = min((standing(evidence, group, rank).completed for rank in asked), default=-1)
    return call_at(evidence, group, asked[0], number) if number >= 0 else None


def doing(evidence: Evidence, rank: int) -> str:
    """What a rank that is in no collective does, by its stack, else by its last call."""
    ending = evidence.dumps[rank].ending if rank in evidence.dumps else ""
    if rank in evidence.stacks and not ending:
        stack = evidence.stack_of(rank)
        if any("dataloader" in frame.file or "DataLoader" in frame.name for frame in stack):
            return f"waits for its data loader{_at(stack)}"
        if (frame := _waiting_frame(stack)) is not None:
            return f"waits in {frame.name}{_at(stack)}"
        return f"is in {stack[0].name}{_at(stack)}" if stack else "does something that no stack shows"
    last = last_call(evidence, rank)
    text = f"made its last call{last}, and none since" if last else f"has called nothing that its {evidence.left} still holds"
    return f"{text}; {ending}" if ending else text


def _waiting_frame(stack: Sequence[Frame]) -> Frame | None:
    """The function of torch.distributed in which a stack waits."""
    return next((frame for frame in stack if "torch/distributed" in frame.file and _WAITS.match(frame.name)), None)


def idle_by_stack(evidence: Evidence, but: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Where ranks wait for others by their stacks alone (gloo's recorder leaves sends and receives out): (place, ranks)."""
    found: dict[str, list[int]] = {}
    for rank in sorted(evidence.stacks):
        stack = evidence.stack_of(rank)
        frame = _waiting_frame(stack)
        if frame is not None and rank not in but:
            found.setdefault(f"{frame.name}{_at(stack)}", []).append(rank)
    return list(found.items())


def _at(stack: Sequence[Frame]) -> str:
    own = next((frame for frame in stack if frame.file and not is_library(frame.file)), None)
    return f", at {own.file}:{own.line}" if own is not None else ""


def last_call(evidence: Evidence, rank: int) -> str:
    """``, all_reduce 4 of dp at train.py:31``; '' where the dump holds none."""
    place = _last_place(evidence, rank)
    if place is None:
        return ""
    group = next(group for group in evidence.groups if place in group.calls.get(rank, ()))
    call = evidence.call(group, rank, place)
    return f", {call.label} of {group.label}" + (f" at {call.site}" if call.site else "")


def _last_place(evidence: Evidence, rank: int) -> int | None:
    return len(evidence.dumps[rank].calls) - 1 if rank in evidence.dumps and len(evidence.dumps[rank].calls) else None


def _circle(edges: Sequence[Edge]) -> list[Edge]:
    """Edges that lead back to where they began; [] where there are none."""
    following: Mapping[int, list[Edge]] = {edge.rank: [] for edge in edges}
    for edge in edges:
        following[edge.rank].append(edge)
    done: set[int] = set()
    for start in sorted(following):
        path: list[Edge] = []
        at = start
        seen: dict[int, int] = {}
        while at in following and at not in seen and at not in done:
            seen[at] = len(path)
            path.append(following[at][0])
            at = path[-1].waits_for
        if at in seen:
            return path[seen[at] :]
        done.update(seen)
    return []


def _order(evidence: Evidence, circle: Sequence[Edge]) -> Root:
    ranks = sorted({edge.rank for edge in circle})
    places = [f"rank {edge.rank} in {edge.wait.call.label} of {edge.wait.group.label}{_site(edge)}" for edge in circle]
    groups = {id(edge.wait.group) for edge in circle}
    what = "entered these groups in another order" if len(groups) > 1 else "wait for each other"
    wait = circle[0].wait
    call = next(call for call in wait.waiting if call.rank == circle[0].rank)
    return Root(ranks, "order", f"{what}: {', '.join(places)}", evidence.stack_of(call.rank, call.place), wait)


def _site(edge: Edge) -> str:
    call = next(call for call in edge.wait.waiting if call.rank == edge.rank)
    return f" at {call.site}" if call.site else ""
