"""A host's calls that order streams, run once: which node of a stream each later node of another one waits for. Compiled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tracekit.compiled import late
from tracekit.trace.events import Int64Array

#: What the host does, in the order in which it counts when it happens at one moment.
RECORD, HOLD, NODE = range(3)
#: More streams than this that one moment of a stream waits for are not followed.
MOST_SOURCES = 24


class Script(NamedTuple):
    """Calls in order: RECORD marks what ``stream`` has got so far under the number ``item``; HOLD makes ``stream`` wait for the mark
    ``item``; NODE gives ``stream`` the node ``item``.
    """

    what: Int64Array
    stream: Int64Array
    item: Int64Array

    @staticmethod
    def of(*parts: tuple[Int64Array, int, Int64Array, Int64Array]) -> Script:
        """The calls of several lists of (time, what, stream, item), by time; those of one moment in the order of the lists."""
        time = np.concatenate([part[0] for part in parts])
        what = np.repeat(np.array([part[1] for part in parts]), [len(part[0]) for part in parts])
        stream, item = (np.concatenate([part[i] for part in parts]).astype(np.int64) for i in (2, 3))
        order = np.argsort(time, kind="stable")
        return Script(what[order].astype(np.int64), stream[order], item[order])


def waits_of(script: Script, streams: int, marks: int) -> tuple[Int64Array, Int64Array]:
    """(source, target) of the waits between nodes that the script makes.

    A mark stands for the last node of its stream and for what that stream was itself told to wait for since; the first node behind a HOLD
    carries the wait for all that follow.
    """
    source, target = _run(script.what, script.stream, script.item, streams, marks)
    if not len(source):
        return source, target
    pairs = np.unique(np.stack([target, source]), axis=1)
    return pairs[1], pairs[0]


@late
def _run(what: Int64Array, stream: Int64Array, item: Int64Array, streams: int, marks: int) -> tuple[Int64Array, Int64Array]:
    last = np.full(streams, -1, np.int64)
    held = np.empty((streams, MOST_SOURCES), np.int64)
    holds = np.zeros(streams, np.int64)
    marked = np.empty((marks, MOST_SOURCES), np.int64)
    marked_count = np.zeros(marks, np.int64)
    source = np.empty(16, np.int64)
    target = np.empty(16, np.int64)
    count = 0
    for i in range(len(what)):
        s, number = stream[i], item[i]
        if what[i] == 0:
            n = 0
            if last[s] >= 0:
                marked[number, 0] = last[s]
                n = 1
            for k in range(holds[s]):
                if n < MOST_SOURCES:
                    marked[number, n] = held[s, k]
                    n += 1
            marked_count[number] = n
        elif what[i] == 1:
            for k in range(marked_count[number]):
                new = True
                for j in range(holds[s]):
                    if held[s, j] == marked[number, k]:
                        new = False
                if new and holds[s] < MOST_SOURCES:
                    held[s, holds[s]] = marked[number, k]
                    holds[s] += 1
        else:
            for k in range(holds[s]):
                if count == len(source):
                    source = np.append(source, np.empty(count, np.int64))
                    target = np.append(target, np.empty(count, np.int64))
                source[count] = held[s, k]
                target[count] = number
                count += 1
            holds[s] = 0
            last[s] = number
    return source[:count], target[:count]
