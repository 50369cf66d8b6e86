"""In which order a rank posts its sends and receives.

With one chunk a rank, a receive is posted right before the action that needs it, a send right after the action that made it. With several,
torch (``torch.distributed.pipelining``) works the order out ahead: ranks take one action after the other in turn; as soon as an action is
done its send goes to the end of its rank's program and the receive to the end of the other rank's: before the action that comes there next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from tracekit.simulate.pipeline.order import Action, Kind, StepTimes, needs_of


class Post(NamedTuple):
    """A send, or a receive. ``made_by`` is the action whose result travels: an activation after F, a gradient after a backward."""

    kind: Literal["send", "recv"]
    made_by: Action


def posts(timeline: StepTimes, chunks: int) -> list[list[Post]]:
    """The sends and receives of every rank, in order. ``chunks``: of all ranks together, chunk c on rank c mod p."""
    p = timeline.stages
    orders = [[timed.action for timed in timeline.of_rank(rank)] for rank in range(p)]
    backward: Kind = "BW" if any(action.kind == "BW" for action in orders[0]) else "B"
    if chunks == p:
        return [_beside_the_work(mine, chunks, backward) for mine in orders]
    return _ahead(orders, chunks, backward)


def target_of(action: Action, chunks: int) -> int | None:
    """The chunk that gets the result of ``action``; None at both ends, and for a W, which hands nothing on."""
    to = action.chunk + (1 if action.kind == "F" else -1)
    return to if action.kind != "W" and 0 <= to < chunks else None


def _beside_the_work(order: Sequence[Action], chunks: int, backward: Kind) -> list[Post]:
    posted = []
    for action in order:
        posted += [Post("recv", need) for need in needs_of(action, chunks, backward) if need.chunk != action.chunk]
        if target_of(action, chunks) is not None:
            posted.append(Post("send", action))
    return posted


def _ahead(orders: Sequence[Sequence[Action]], chunks: int, backward: Kind) -> list[list[Post]]:
    p = len(orders)
    posted: list[list[Post]] = [[] for _ in orders]
    there: list[set[Action]] = [set() for _ in orders]  # what a rank has done, or will have received before its next action
    nexts = [0] * p
    while any(done < len(mine) for done, mine in zip(nexts, orders, strict=True)):
        before = list(nexts)
        for rank, mine in enumerate(orders):
            action = mine[nexts[rank]] if nexts[rank] < len(mine) else None
            if action is None or not there[rank].issuperset(needs_of(action, chunks, backward)):
                continue
            there[rank].add(action)
            nexts[rank] += 1
            to = target_of(action, chunks)
            if to is None:
                continue
            there[to % p].add(action)
            if to % p != rank:
                posted[rank].append(Post("send", action))
                posted[to % p].append(Post("recv", action))
        assert nexts != before, "the ranks wait for each other for ever"
    return posted
