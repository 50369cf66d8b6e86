"""The chain of work that sets the length of a step: from its last end back to its begin, over all ranks.

From a node the chain goes on to whatever let it begin last: what it waited for, for a collective the member that came last. What lies
between is a piece of its own: ``host`` where the launch came late, else ``idle``. The pieces of a step follow each other without a gap or
an overlap and add up to its length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekit.compiled import late
from tracekit.graph.step_graph import StepGraph, launch_bound
from tracekit.job.activity import Work
from tracekit.trace.events import Int32Array, Int64Array

COMPUTE, COMMUNICATION, COPY, HOST, IDLE = range(5)
KINDS = ("compute", "communication", "copy", "host", "idle")
#: What a piece is while the chain is followed: its node ran, or was not let to.
_RAN, _LACKED = 0, 1


@dataclass(frozen=True)
class CriticalPath:
    """Pieces in order of time; ``node`` is the node that ran, or that was waited for. Times are aligned, ns."""

    node: Int64Array
    kind: Int64Array
    start: Int64Array
    end: Int64Array


def critical_path(graph: StepGraph) -> CriticalPath:
    """The chain from the last end of the recorded steps back to their begin."""
    joined = np.flatnonzero(graph.join >= 0)
    order = joined[np.lexsort((graph.start[joined], graph.join[joined]))]
    latest = np.full(graph.joins, -1, np.int64)
    latest[graph.join[order]] = order  # of equal numbers the last one stays
    opens = np.arange(len(graph), dtype=np.int64)
    opens[joined] = latest[graph.join[joined]]
    pieces = _chain(int(np.argmax(graph.end)), graph.begin, graph.first, graph.source, opens, graph.start, graph.end)[::-1]
    pieces = pieces[pieces[:, 3] > pieces[:, 2]]
    node = pieces[:, 0]
    of_work = np.zeros(int(max(Work)) + 1, np.int64)
    of_work[[Work.COMPUTE, Work.COMMUNICATION, Work.COPY]] = COMPUTE, COMMUNICATION, COPY
    kind = np.where(pieces[:, 1] == _RAN, of_work[graph.work[node]], np.where(launch_bound(graph)[node], HOST, IDLE))
    return CriticalPath(node, kind, pieces[:, 2], pieces[:, 3])


@late
def _chain(
    node: int, begin: int, first: Int64Array, source: Int32Array, opens: Int64Array, start: Int64Array, end: Int64Array
) -> Int64Array:
    """Pieces (node, _RAN or _LACKED, start, end) from the end of ``node`` back to ``begin``. ``opens``: the member of each node's join that
    came last, the node itself where it is in none.
    """
    pieces = np.empty((2 * len(start), 4), np.int64)
    count = 0
    until = end[node]
    for _ in range(len(start)):
        at = opens[node]
        if start[at] < until:
            pieces[count, 0], pieces[count, 1], pieces[count, 2], pieces[count, 3] = node, _RAN, start[at], until
            count += 1
            until = start[at]
        before = -1
        for k in range(first[at], first[at + 1]):
            cause = source[k]
            if start[cause] < start[at] and (before < 0 or end[cause] > end[before]):
                before = cause
        ready = begin if before < 0 else max(end[before], begin)
        if ready < until:
            pieces[count, 0], pieces[count, 1], pieces[count, 2], pieces[count, 3] = at, _LACKED, ready, until
            count += 1
            until = ready
        if before < 0:
            break
        node = before
    return pieces[:count]
