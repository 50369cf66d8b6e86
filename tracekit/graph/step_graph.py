"""The graph of a job's steps: nodes of all ranks one under the other on the job's clock, what each waits for, and what each costs.

Costs are measured: of work its duration; of a member of a collective or message its transfer, own end - latest start of all members that
were recorded. ``delay`` is what lies between the end of all that a node waited for and its start: the host, the queue, the unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tracekit.graph.edges import GUESSED
from tracekit.graph.replay import replay as compiled_replay
from tracekit.job.activity import Work
from tracekit.trace.events import BoolArray, Int8Array, Int32Array, Int64Array
from tracekit.units import NS_PER_US, NULL

#: A launch that returned no earlier than this before the node began held it back; shorter gaps than the second say nothing.
LAUNCH_NS, SHORT_GAP_NS = 50 * NS_PER_US, 3 * NS_PER_US


@dataclass(frozen=True)
class StepGraph:
    """One entry a node, in the order of (window, call). Times are aligned, ns.

    ``step`` indexes ``numbers``; ``operation`` is a row of job.operations; ``join`` a number for each collective or message that was seen
    on two ranks or more, -1 for other work. ``host_source`` is the launch-bound node called just before a launch-bound node, else -1.
    """

    rank: Int32Array
    window: Int32Array
    step: Int32Array
    start: Int64Array
    end: Int64Array
    returned: Int64Array
    stream: Int32Array
    work: Int8Array
    phase: Int8Array
    piece: Int64Array
    name: Int32Array
    operation: Int32Array
    doing: Int32Array  # into names: what the host did before a late launch; -1
    join: Int32Array
    cost: Int64Array
    first: Int64Array
    source: Int32Array
    kind: Int8Array  # of each source, as in graph.edges
    host_source: Int32Array
    host_lag: Int64Array
    delay: Int64Array
    gap: Int64Array  # start - end of all that it waited for, the host's pace left out
    order: Int32Array
    begin: int  # when the first step begins on the first host
    numbers: Int64Array
    names: list[str]
    synced: bool
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.start)

    @property
    def steps(self) -> int:
        """How many steps the graph holds."""
        return len(self.numbers)

    @cached_property
    def joins(self) -> int:
        """How many collectives and messages join ranks."""
        return int(self.join.max(initial=-1)) + 1

    @cached_property
    def comm(self) -> BoolArray:
        """Which nodes are communication."""
        found: BoolArray = self.work == Work.COMMUNICATION
        return found

    @cached_property
    def guessed_share(self) -> float:
        """Edges that are no stream's order and not recorded, of all that are no stream's order."""
        other = int((self.kind > 0).sum())
        return float(np.isin(self.kind, GUESSED).sum()) / other if other else 0.0

    def replay(
        self, cost: Int64Array | None = None, delay: Int64Array | None = None, lag: Int64Array | None = None, no_host: bool = False
    ) -> tuple[Int64Array, Int64Array]:
        """(start, end) of each node [ns] with these costs, delays and host lags (None: as measured); ``no_host``: without the last."""
        host = np.full(len(self), -1, np.int32) if no_host else self.host_source
        started, ended = compiled_replay(
            self.order,
            self.first,
            self.source,
            self.join,
            self.joins,
            host,
            self.host_lag if lag is None else lag,
            self.cost if cost is None else cost,
            self.delay if delay is None else delay,
        )
        return started, ended

    def step_ns(self, times: tuple[Int64Array, Int64Array]) -> float:
        """Length of the mean step [ns] of a replay: from the begin of the first step to the last end of all, over the steps."""
        return float(times[1].max()) / self.steps

    def apart(self) -> StepGraph:
        """The same steps, each by itself: nothing waits for an earlier step, and each begins with the first work of any rank."""
        same = self.step[self.source] == np.repeat(self.step, np.diff(self.first))
        first = np.concatenate([[0], np.cumsum(np.add.reduceat(np.append(same, False), self.first[:-1]) * (np.diff(self.first) > 0))])
        host = np.where((self.host_source >= 0) & (self.step[np.maximum(self.host_source, 0)] == self.step), self.host_source, -1)
        cut = replace(self, first=first.astype(np.int64), source=self.source[same], kind=self.kind[same], host_source=host.astype(np.int32))
        begin = np.full(self.steps, np.iinfo(np.int64).max)
        np.minimum.at(begin, self.step, self.start)
        return replace(cut, delay=delays(cut, begin[self.step]))

    def each_step_ns(self, times: tuple[Int64Array, Int64Array]) -> Int64Array:
        """Length of each step [ns] from its first start to its last end on any rank."""
        low, high = np.full(self.steps, np.iinfo(np.int64).max), np.full(self.steps, NULL)
        first, numbers = self._runs
        np.minimum.at(low, numbers, np.minimum.reduceat(times[0], first))
        np.maximum.at(high, numbers, np.maximum.reduceat(times[1], first))
        length: Int64Array = high - low
        return length

    @cached_property
    def _runs(self) -> tuple[Int64Array, Int32Array]:
        """(first node of each run of nodes of one step, its step): nodes lie by window and call, so runs are few."""
        first = np.flatnonzero(np.append(True, self.step[1:] != self.step[:-1])).astype(np.int64)
        return first, self.step[first]


def ready_of(graph: StepGraph) -> Int64Array:
    """The latest end of what each node waits for; NULL for nothing."""
    result = np.full(len(graph), NULL, np.int64)
    counts = np.diff(graph.first)
    some = counts > 0
    if some.any():
        result[some] = np.maximum.reduceat(graph.end[graph.source], graph.first[:-1][some])
    return result


def launch_bound(graph: StepGraph, ready: Int64Array | None = None) -> BoolArray:
    """Nodes that all they waited for would have let begin earlier, but whose launch had not returned."""
    ready = ready_of(graph) if ready is None else ready
    late = (graph.returned != NULL) & (graph.start - graph.returned <= LAUNCH_NS)
    bound: BoolArray = late & ((ready == NULL) | (graph.returned > ready + SHORT_GAP_NS))
    return bound


def delays(graph: StepGraph, begin: Int64Array) -> Int64Array:
    """Start - what a replay knows of it; below 0 where times overlap. ``begin`` is when the world of a node without causes begins."""
    ready = np.where(np.diff(graph.first) > 0, modelled_ready(graph), begin)
    host = graph.host_source
    ready = np.where(host >= 0, np.maximum(ready, graph.start[np.maximum(host, 0)] + graph.host_lag), ready)
    return graph.start - ready


def modelled_ready(graph: StepGraph) -> Int64Array:
    """The latest end of what each node waits for, as the replay has it: of a join its latest start and the member's transfer."""
    end = graph.end.copy()
    members = graph.join >= 0
    latest = np.full(graph.joins, NULL, np.int64)
    np.maximum.at(latest, graph.join[members], graph.start[members])
    end[members] = latest[graph.join[members]] + graph.cost[members]
    some = np.diff(graph.first) > 0
    result = np.full(len(graph), NULL, np.int64)
    if some.any():
        result[some] = np.maximum.reduceat(end[graph.source], graph.first[:-1][some])
    return result
