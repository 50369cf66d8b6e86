"""In which order a rank posts its sends and receives.

With one chunk a rank, a receive is posted right before the piece that needs it, a send right after the piece that made it. With several,
torch (``torch.distributed.pipelining``) works the order out ahead: ranks take one piece after the other in turn, and as soon as a piece is
done its send goes to the end of its rank's program and the receive to the end of the other rank's: before the work that comes there next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from tracekit.simulate.pipeline.order import Kind, Timeline, Work, needs_of


class Post(NamedTuple):
    """A send, or a receive. ``made_by`` is the piece whose result travels: an activation after F, a gradient after a backward."""

    kind: Literal["send", "recv"]
    made_by: Work


def posts(timeline: Timeline, chunks: int) -> list[list[Post]]:
    """The sends and receives of every rank, in order. ``chunks``: of all ranks together, chunk c on rank c mod p."""
    p = timeline.stages
    orders = [[piece.work for piece in timeline.of_rank(rank)] for rank in range(p)]
    backward: Kind = "BW" if any(work.kind == "BW" for work in orders[0]) else "B"
    if chunks == p:
        return [_beside_the_work(mine, chunks, backward) for mine in orders]
    return _ahead(orders, chunks, backward)


def target_of(work: Work, chunks: int) -> int | None:
    """The chunk that gets the result of ``work``; None at both ends, and for a W, which hands nothing on."""
    to = work.chunk + (1 if work.kind == "F" else -1)
    return to if work.kind != "W" and 0 <= to < chunks else None


def _beside_the_work(order: Sequence[Work], chunks: int, backward: Kind) -> list[Post]:
    posted = []
    for work in order:
        posted += [Post("recv", need) for need in needs_of(work, chunks, backward) if need.chunk != work.chunk]
        if target_of(work, chunks) is not None:
            posted.append(Post("send", work))
    return posted


def _ahead(orders: Sequence[Sequence[Work]], chunks: int, backward: Kind) -> list[list[Post]]:
    p = len(orders)
    posted: list[list[Post]] = [[] for _ in orders]
    there: list[set[Work]] = [set() for _ in orders]  # what a rank has done, or will have received before its next piece
    nexts = [0] * p
    while any(done < len(mine) for done, mine in zip(nexts, orders, strict=True)):
        before = list(nexts)
        for rank, mine in enumerate(orders):
            work = mine[nexts[rank]] if nexts[rank] < len(mine) else None
            if work is None or not there[rank].issuperset(needs_of(work, chunks, backward)):
                continue
            there[rank].add(work)
            nexts[rank] += 1
            to = target_of(work, chunks)
            if to is None:
                continue
            there[to % p].add(work)
            if to % p != rank:
                posted[rank].append(Post("send", work))
                posted[to % p].append(Post("recv", work))
        assert nexts != before, "the ranks wait for each other for ever"
    return posted
