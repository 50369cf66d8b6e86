"""What waits for what where no trace of it is recorded: torch's habits, and what the times themselves show.

    call      a communication waits for the work that its thread launched last before it, and for what the caller itself waits for
    wait      a communication whose record says "not asynchronous" is waited for by the next work of the calling stream
    message   a piece of a pipeline's stage waits for the receive of its own name (PP:1F2 for PP:1RECV_F2)
    data      the first work launched behind a receive or an all-gather waits for it
    just then work that still has a gap before it, though it was launched long before, waits for what ended on another stream just then

    host      the first work launched behind a call that waits for the device waits for what that call waited for. Where a trace records no
              such call, work whose launch came late waits for the last communication that ended before its launch

A habit that the times contradict (its source ends more than OVERLAP_NS after its target began) on more than CONTRADICTED of a stream is
not that stream's. A send is never waited for.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from tracekit.graph.nodes import WAITED_FOR, Nodes
from tracekit.graph.script import HOLD, NODE, RECORD, Script, waits_of
from tracekit.trace.events import BoolArray, Int64Array
from tracekit.units import NS_PER_US, NULL

#: By so much the times of what follows each other may overlap (timers, launches ahead of the end).
OVERLAP_NS = 10 * NS_PER_US
#: ... and by so much on streams where a habit holds otherwise.
TIMER_NS = 100 * NS_PER_US
#: A gap that is no more than this needs no explanation; a stream that waits starts no later than this behind what it waited for.
GAP_NS, LATENCY_NS = 3 * NS_PER_US, 50 * NS_PER_US
#: The same for operators on the threads of a CPU job, between which Python runs.
HOST_LATENCY_NS = 1_000 * NS_PER_US
CONTRADICTED = 0.05
#: So many ends just before a start are looked at.
_TRIES = 8
Pairs = tuple[Int64Array, Int64Array]


def around_calls(nodes: Nodes) -> tuple[Pairs, Pairs]:
    """(edges into communications, edges from them to other work) that their calls imply, as far as the times allow.

    The calling stream is that of the last other work that the same thread launched.
    """
    calling = _calling_stream(nodes)
    calls = np.flatnonzero(calling >= 0)
    back = calls[nodes.told[calls] == WAITED_FOR]
    first, second = np.arange(len(calls)), len(calls) + np.arange(len(back))
    script = Script.of(
        (nodes.called[calls], RECORD, calling[calls], first),
        (nodes.called[calls], HOLD, nodes.stream[calls], first),
        (nodes.called, NODE, nodes.stream, np.arange(len(nodes))),
        (nodes.called[back], RECORD, nodes.stream[back], second),
        (nodes.called[back], HOLD, calling[back], second),
    )
    source, target = waits_of(script, int(nodes.stream.max()) + 1, len(calls) + len(back))
    into = nodes.comm[target]
    return (
        _believed(nodes, (source[into], target[into]), nodes.stream[target[into]]),
        _believed(nodes, (source[~into], target[~into]), nodes.stream[source[~into]]),
    )


def _calling_stream(nodes: Nodes) -> Int64Array:
    """For each communication whose call is recorded the stream from which it was called; -1 elsewhere."""
    calling = np.full(len(nodes), -1, np.int64)
    launched = (nodes.launch != NULL) & ~nodes.comm
    for thread in np.unique(nodes.thread[nodes.comm & (nodes.thread >= 0)]).tolist():
        same = nodes.thread == thread
        last = np.maximum.accumulate(np.where(launched & same, np.arange(len(nodes)), -1))
        mine = same & nodes.comm & (last >= 0)
        calling[mine] = nodes.stream[last[mine]]
    return calling


def _fits(nodes: Nodes, source: Int64Array, target: Int64Array, overlap: int = OVERLAP_NS) -> BoolArray:
    fits: BoolArray = (nodes.end[source] <= nodes.start[target] + overlap) & (nodes.start[source] <= nodes.start[target])
    fits &= source != target
    return fits


def _believed(nodes: Nodes, pairs: Pairs, stream: Int64Array) -> Pairs:
    """The edges that the times allow; none of a stream on which many are contradicted."""
    count = int(nodes.stream.max()) + 1
    wrong, every = np.bincount(stream, ~_fits(nodes, *pairs), count), np.bincount(stream, minlength=count)
    keep = _fits(nodes, *pairs, TIMER_NS) & (wrong <= CONTRADICTED * every)[stream]
    return pairs[0][keep], pairs[1][keep]


def named_messages(nodes: Nodes) -> Pairs:
    """(receive, first work) of pieces of one name in one step."""
    receives = np.flatnonzero((nodes.kind == "recv") & (nodes.piece >= 0))
    receives = receives[[("RECV_" in context) for context in nodes.context[receives]]] if len(receives) else receives
    works = np.flatnonzero(~nodes.comm & (nodes.piece >= 0))
    if not len(receives) or not len(works):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    works = works[np.append(True, nodes.piece[works][1:] != nodes.piece[works][:-1])]
    frames = [
        pd.DataFrame({"step": nodes.step[rows], "piece": _one_backward(nodes.piece[rows]), "row": rows}) for rows in (receives, works)
    ]
    for frame in frames:
        frame["turn"] = frame.groupby(["step", "piece"]).cumcount()
    both = frames[0].merge(frames[1], on=["step", "piece", "turn"])
    source, target = both["row_x"].to_numpy(np.int64), both["row_y"].to_numpy(np.int64)
    fits = nodes.start[source] <= nodes.start[target] + TIMER_NS  # the name is certain: that times overlap a little is the timers'
    return source[fits], target[fits]


def _one_backward(piece: Int64Array) -> Int64Array:
    """Pieces with the backward for the input under the name of a whole backward: both need the gradient that a receive brings."""
    kind = piece // 10**6 % 4
    return np.where(kind == 2, piece - 10**6, piece)


def first_use(nodes: Nodes, without: Int64Array) -> Pairs:
    """Receives and all-gathers (but for those ``without``) with the first other work called behind them, where the times allow it."""
    chosen = np.isin(nodes.kind, ("recv", "send_recv", "all_gather"))
    chosen[without] = False
    source = np.flatnonzero(chosen)
    works = np.flatnonzero(~nodes.comm)
    at = np.searchsorted(works, source)
    source, at = source[at < len(works)], at[at < len(works)]
    target = works[at]
    fits = _fits(nodes, source, target) & (nodes.step[source] == nodes.step[target])
    return source[fits], target[fits]


def just_then(nodes: Nodes, ready: Int64Array, called: Int64Array) -> Pairs:
    """(what ended just before, node) for each node that has an unexplained gap before it; of several ends the latest.

    A node that was launched later than that end waited for its host, and for nothing else. Communications ``called`` behind known work
    wait for that alone: that they begin late shows when the device or the peer had room for them.
    """
    latency = HOST_LATENCY_NS if nodes.on_cpu else LATENCY_NS
    gap = (ready == NULL) | (nodes.start - np.where(ready == NULL, nodes.start, ready) > GAP_NS)
    gap[called[nodes.comm[called]]] = False
    targets = np.flatnonzero(gap)
    order = np.argsort(nodes.end, kind="stable")
    ends = nodes.end[order]
    position = np.searchsorted(ends, nodes.start[targets] + OVERLAP_NS, side="right") - 1
    chosen = np.full(len(targets), -1, np.int64)
    for _ in range(_TRIES):
        candidate = order[np.maximum(position, 0)]
        end = nodes.end[candidate]
        good = (position >= 0) & (chosen < 0) & (end >= nodes.start[targets] - latency)
        good &= (nodes.stream[candidate] != nodes.stream[targets]) & (nodes.kind[candidate] != "send")
        good &= (nodes.start[candidate] < nodes.start[targets]) & ((ready[targets] == NULL) | (end > ready[targets]))
        good &= nodes.on_cpu | (nodes.launch[targets] == NULL) | (nodes.launch[targets] < end)
        chosen[good] = candidate[good]
        position -= 1
    found = chosen >= 0
    return chosen[found], targets[found]


def behind_host_waits(nodes: Nodes, ready: Int64Array) -> Pairs:
    """(what the host waited for, first work that it launched then)."""
    if len(nodes.blocked[0]):
        return _behind_calls(nodes)
    late = (ready == NULL) | (nodes.called > np.maximum(ready, NULL + GAP_NS))
    late &= nodes.on_cpu | (nodes.launch != NULL)
    targets = np.flatnonzero(late)
    sources = np.flatnonzero(nodes.comm)
    if not len(sources) or not len(targets):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    sources = sources[np.argsort(nodes.end[sources], kind="stable")]
    at = np.searchsorted(nodes.end[sources], nodes.called[targets] + OVERLAP_NS, side="right") - 1
    source = sources[np.maximum(at, 0)]
    good = (at >= 0) & (nodes.end[source] > ready[targets]) & (nodes.start[source] < nodes.start[targets]) & (source != targets)
    return source[good], targets[good]


def _behind_calls(nodes: Nodes) -> Pairs:
    begun, done = nodes.blocked
    order = np.argsort(nodes.end, kind="stable")
    at = np.searchsorted(nodes.end[order], done + OVERLAP_NS, side="right") - 1
    source = order[np.maximum(at, 0)]
    called = nodes.called
    by_call = np.argsort(called, kind="stable")
    behind = np.searchsorted(called[by_call], done)
    target = by_call[np.minimum(behind, len(nodes) - 1)]
    good = (
        (at >= 0) & (nodes.end[source] > begun) & (behind < len(nodes)) & (source != target) & (nodes.start[source] < nodes.start[target])
    )
    return source[good], target[good]
