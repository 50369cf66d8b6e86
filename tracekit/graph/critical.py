"""The chain of work that sets the length of a step: from its last end back to its begin, over all ranks.

From a node the chain goes on to whatever let it begin last: what it waited for, for a collective the member that came last. What lies
between is a piece of its own: ``host`` where the launch came late, else ``idle``. The pieces of a step follow each other without a gap or
an overlap and add up to its length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekit.graph.step_graph import StepGraph, launch_bound
from tracekit.job.activity import Work
from tracekit.trace.events import Int64Array

COMPUTE, COMMUNICATION, COPY, HOST, IDLE = range(5)
KINDS = ("compute", "communication", "copy", "host", "idle")


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
    bound = launch_bound(graph)
    of_work = {Work.COMPUTE: COMPUTE, Work.COMMUNICATION: COMMUNICATION, Work.COPY: COPY}
    pieces: list[tuple[int, int, int, int]] = []
    node, until = int(np.argmax(graph.end)), int(graph.end.max())
    first, source, start, end = graph.first.tolist(), graph.source, graph.start, graph.end
    for _ in range(len(graph)):
        at = node if graph.join[node] < 0 else int(latest[graph.join[node]])
        begin = int(start[at])
        if begin < until:
            pieces.append((node, of_work[Work(int(graph.work[node]))], begin, until))
            until = begin
        causes = source[first[at] : first[at + 1]]
        causes = causes[start[causes] < start[at]]
        before = int(causes[np.argmax(end[causes])]) if len(causes) else -1
        ready = int(end[before]) if before >= 0 else graph.begin
        if ready < until:
            pieces.append((at, HOST if bound[at] else IDLE, max(ready, graph.begin), until))
            until = max(ready, graph.begin)
        if before < 0:
            break
        node = before
    columns = np.array([piece for piece in reversed(pieces) if piece[3] > piece[2]], np.int64).reshape(-1, 4)
    return CriticalPath(columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3])
