"""All ranks' work in one graph: nodes one under the other on the job's clock, collectives and messages that join ranks, what each waits for.

Costs are measured: of work its duration; of a member of a collective or message its transfer, own end - latest start of all members that
were recorded. A member that left before the last one came (the root of a broadcast, a send that was buffered) waited for nobody and has
its own duration. ``delay`` is what lies between the end of all that a node waited for and its start: the host, the queue, the unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tracekit.graph.edges import GUESSED
from tracekit.graph.local import LocalWork
from tracekit.graph.replay import causal_order
from tracekit.graph.replay import replay as compiled_replay
from tracekit.job.activity import Work
from tracekit.job.model import Job
from tracekit.trace.events import BoolArray, Int8Array, Int32Array, Int64Array
from tracekit.units import NS_PER_MS, NS_PER_US, NULL

#: Kinds of which a member may leave before the last one has come.
_ROOTED = ("broadcast", "reduce", "scatter", "gather")
#: A member that ended this long before the last one came was not held by it (of symmetric collectives: its times are wrong).
EARLY_NS, WRONG_NS = 100 * NS_PER_US, 10 * NS_PER_MS
#: A launch that returned no earlier than this before the node began held it back.
LAUNCH_NS = 50 * NS_PER_US
_SHORT_GAP_NS = 3 * NS_PER_US


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
        cut = replace(
            self, first=first.astype(np.int64), source=self.source[same], kind=self.kind[same], host_source=host.astype(np.int32)
        )
        begin = np.full(self.steps, np.iinfo(np.int64).max)
        np.minimum.at(begin, self.step, self.start)
        return replace(cut, delay=_delays(cut, begin[self.step]))

    def each_step_ns(self, times: tuple[Int64Array, Int64Array]) -> Int64Array:
        """Length of each step [ns] from its first start to its last end on any rank."""
        low, high = np.full(self.steps, np.iinfo(np.int64).max), np.full(self.steps, NULL)
        np.minimum.at(low, self.step, times[0])
        np.maximum.at(high, self.step, times[1])
        return high - low


@dataclass(frozen=True)
class NoGraph:
    """Why there is none."""

    reason: str


def graph_of(job: Job, analysis: str) -> StepGraph | NoGraph:
    """The graph of the steps that all ranks with work recorded, from what ``local.reduce_window`` left under ``analysis``."""
    found = [(rank, index, work) for rank, index, work in job.reduced(analysis) if work is not None]
    whole = [part for part in found if job.windows[part[1]].coverage.status != "truncated"]
    if not whole:
        return NoGraph("the traces are truncated" if found else "no device did anything inside a step")
    if not job.clock.aligned and len({rank for rank, _, _ in whole}) > 1:
        return NoGraph("the clocks of the ranks could not be aligned: nothing between ranks can be replayed")
    numbers = _common_steps(whole)
    if not len(numbers):
        return NoGraph("no step was recorded whole by every rank")
    return _joined(job, whole, numbers, _notes(job, found, whole))


def _common_steps(parts: list[tuple[int, int, LocalWork]]) -> Int64Array:
    by_rank: dict[int, set[int]] = {}
    for rank, _, work in parts:
        by_rank.setdefault(rank, set()).update(np.unique(work.numbers[work.step]).tolist())
    return np.array(sorted(set.intersection(*by_rank.values())), np.int64)


def _notes(job: Job, found: list[tuple[int, int, LocalWork]], whole: list[tuple[int, int, LocalWork]]) -> tuple[str, ...]:
    notes = []
    there = {rank for rank, _, _ in whole}
    if len(found) > len(whole):
        notes.append(f"{len(found) - len(whole)} truncated traces are left out")
    idle = sorted(set(job.ranks) - there)
    if idle:
        notes.append(f"{len(idle)} of {len(job.ranks)} ranks recorded no device work in a whole step")
    if job.missing_ranks:
        notes.append(f"{len(job.missing_ranks)} ranks are missing: what they hold back counts as transfer")
    if any(work.kept_steps < work.all_steps for _, _, work in whole):
        notes.append("only the first steps are replayed: the others are too many")
    return tuple(notes)


def _joined(job: Job, parts: list[tuple[int, int, LocalWork]], numbers: Int64Array, notes: tuple[str, ...]) -> StepGraph:
    columns: dict[str, list[np.ndarray]] = {}  # type: ignore[type-arg]
    pairs: list[tuple[Int64Array, Int64Array, Int8Array]] = []
    names: dict[str, int] = {}
    offset, rows_of = 0, _OperationRows(job)
    for rank, index, work in parts:
        step = np.searchsorted(numbers, work.numbers)
        there = (step < len(numbers)) & (numbers[np.minimum(step, len(numbers) - 1)] == work.numbers)
        keep = there[work.step]
        place = np.where(keep, np.cumsum(keep) - 1 + offset, -1)
        size = int(keep.sum())
        codes = np.array([names.setdefault(name, len(names)) for name in work.names] or [0], np.int32)
        operation = np.where(work.operation >= 0, rows_of.of(index, work.operation), -1)
        own = {
            "rank": np.full(len(work), rank, np.int32),
            "window": np.full(len(work), index, np.int32),
            "step": step[work.step].astype(np.int32),
            "start": job.aligned(index, work.start),
            "end": job.aligned(index, work.end),
            "returned": np.where(work.returned == NULL, NULL, job.aligned(index, work.returned)),
            "stream": work.stream,
            "work": work.work,
            "phase": work.phase,
            "piece": work.piece,
            "name": codes[work.name],
            "operation": operation.astype(np.int32),
        }
        for name, column in own.items():
            columns.setdefault(name, []).append(column[keep])
        source, target = place[work.edges.source], place[work.edges.target]
        both = (source >= 0) & (target >= 0)
        pairs.append((source[both], target[both], work.edges.kind[both]))
        offset += size
    table = {name: np.concatenate(arrays) for name, arrays in columns.items()}
    source, target, kind = (np.concatenate([pair[i] for pair in pairs]) for i in range(3))
    begin = min([int(table["start"].min()), *_begins(job, parts, int(numbers[0]))])
    return _graph(job, table, (source, target, kind), begin, numbers, list(names), all(work.synced for _, _, work in parts), notes)


def _begins(job: Job, parts: list[tuple[int, int, LocalWork]], number: int) -> list[int]:
    """When each rank's host begins the step of this number, aligned."""
    found = [(index, work.begins[work.numbers == number]) for _, index, work in parts]
    return [int(job.aligned(index, begins[0])) for index, begins in found if len(begins) and begins[0] != NULL]


class _OperationRows:
    """Rows of job.operations of each window's local operations."""

    def __init__(self, job: Job) -> None:
        window, local = job.operations["window"].to_numpy(), job.operations["local"].to_numpy()
        self._order = np.lexsort((local, window))
        self._bounds = np.searchsorted(window[self._order], np.arange(len(job.windows) + 1))
        self._local = local

    def of(self, window: int, local: Int32Array) -> Int64Array:
        """The row of each local operation of one window; -1 where it is none."""
        own = self._order[self._bounds[window] : self._bounds[window + 1]]
        found = np.full(int(local.max(initial=-1)) + 2, -1, np.int64)
        inside = self._local[own] < len(found) - 1
        found[self._local[own][inside]] = own[inside]
        return found[local]


def _graph(
    job: Job,
    table: dict[str, np.ndarray],  # type: ignore[type-arg]
    edges: tuple[Int64Array, Int64Array, Int8Array],
    begin: int,
    numbers: Int64Array,
    names: list[str],
    synced: bool,
    notes: tuple[str, ...],
) -> StepGraph:
    source, target, kind = edges
    order = np.argsort(target, kind="stable")
    count = len(table["start"])
    first = np.searchsorted(target[order], np.arange(count + 1)).astype(np.int64)
    join, cost = _joins(job, table)
    nothing = np.full(count, -1, np.int32)
    graph = StepGraph(
        **table,
        join=join,
        cost=cost,
        first=first,
        source=source[order].astype(np.int32),
        kind=kind[order],
        host_source=nothing,
        host_lag=np.zeros(count, np.int64),
        delay=np.zeros(count, np.int64),
        gap=np.zeros(count, np.int64),
        order=nothing,
        begin=begin,
        numbers=numbers,
        names=names,
        synced=synced,
        notes=notes,
    )
    graph = _host_chain(graph)
    graph = _in_order(graph)
    some = np.diff(graph.first) > 0
    gap = graph.start - np.where(some, _modelled_ready(graph), begin)
    return replace(graph, delay=_delays(graph, np.full(count, begin)), gap=gap)


def _joins(job: Job, table: dict[str, np.ndarray]) -> tuple[Int32Array, Int64Array]:  # type: ignore[type-arg]
    """(join of each node, its cost)."""
    start, end, operation = table["start"], table["end"], table["operation"]
    cost = (end - start).astype(np.int64)
    join = np.full(len(start), -1, np.int32)
    rows = np.flatnonzero(operation >= 0)
    # Of an operation that runs as several kernels the last one ends it.
    last = np.full(len(job.operations) + 1, -1, np.int64)
    np.maximum.at(last, operation[rows], rows)
    rows = rows[last[operation[rows]] == rows]
    match = job.operations["match"].to_numpy()[operation[rows]]
    rows, match = rows[match >= 0], match[match >= 0]
    if not len(rows):
        return join, cost
    latest = np.full(len(job.matches), NULL, np.int64)
    np.maximum.at(latest, match, start[rows])
    behind = end[rows] - latest[match]
    kinds = job.matches["kind"].astype("str").isin(_ROOTED).to_numpy()[match]
    held = behind > np.where(kinds, -EARLY_NS, NULL + 1)
    rows, match, behind = rows[held], match[held], behind[held]
    members = np.bincount(match, minlength=len(job.matches))[match]
    rows, match, behind = rows[members > 1], match[members > 1], behind[members > 1]
    join[rows] = np.unique(match, return_inverse=True)[1].reshape(-1)
    cost[rows] = np.where(behind <= -WRONG_NS, 0, behind)
    return join, cost


def _ready(graph: StepGraph) -> Int64Array:
    """The latest end of what each node waits for; NULL for nothing."""
    result = np.full(len(graph), NULL, np.int64)
    counts = np.diff(graph.first)
    some = counts > 0
    if some.any():
        result[some] = np.maximum.reduceat(graph.end[graph.source], graph.first[:-1][some])
    return result


def _host_chain(graph: StepGraph) -> StepGraph:
    """Neighbours in the order of calls that both began as soon as their launch returned: the host paces them, not the device."""
    ready = _ready(graph)
    bound = launch_bound(graph, ready)
    before = np.append(False, bound[:-1] & bound[1:] & (graph.window[1:] == graph.window[:-1]))
    own = np.arange(len(graph))
    source = np.where(before, own - 1, -1).astype(np.int32)
    lag = np.where(before, graph.start - graph.start[np.maximum(own - 1, 0)], 0)
    usable = before & (lag >= 0)
    return replace(graph, host_source=np.where(usable, source, -1).astype(np.int32), host_lag=np.where(usable, lag, 0))


def launch_bound(graph: StepGraph, ready: Int64Array | None = None) -> BoolArray:
    """Nodes that all they waited for would have let begin earlier, but whose launch had not returned."""
    ready = _ready(graph) if ready is None else ready
    late = (graph.returned != NULL) & (graph.start - graph.returned <= LAUNCH_NS)
    bound: BoolArray = late & ((ready == NULL) | (graph.returned > ready + _SHORT_GAP_NS))
    return bound


def _in_order(graph: StepGraph) -> StepGraph:
    """The graph with a causal order, without edges that contradict it."""
    members = np.flatnonzero(graph.join >= 0)
    members = members[np.argsort(graph.join[members], kind="stable")].astype(np.int32)
    join_first = np.searchsorted(graph.join[members], np.arange(graph.joins + 1)).astype(np.int64)
    by_start = np.argsort(graph.start, kind="stable").astype(np.int32)
    order, lacks = causal_order(graph.first, graph.source, graph.join, join_first, members, graph.host_source, by_start)
    circles = int((lacks > 0).sum())
    if not circles:
        return replace(graph, order=order)
    turn = np.empty(len(graph), np.int64)
    turn[order] = np.arange(len(graph))
    done = turn.copy()
    complete = np.full(graph.joins, -1, np.int64)
    np.maximum.at(complete, graph.join[members], turn[members])
    done[members] = complete[graph.join[members]]
    target = np.repeat(np.arange(len(graph)), np.diff(graph.first))
    keep = done[graph.source] < turn[target]
    first = np.concatenate([[0], np.cumsum(np.bincount(target[keep], minlength=len(graph)))]).astype(np.int64)
    host = graph.host_source
    host = np.where((host >= 0) & (turn[np.maximum(host, 0)] < turn), host, -1).astype(np.int32)
    note = f"{circles} pieces of work seem to wait for each other in a circle: their times contradict what is known of their order"
    return replace(graph, order=order, first=first, source=graph.source[keep], kind=graph.kind[keep], host_source=host,
                   notes=(*graph.notes, note))


def _delays(graph: StepGraph, begin: Int64Array) -> Int64Array:
    """Start - what a replay knows of it; below 0 where times overlap. ``begin`` is when the world of a node without causes begins."""
    ready = np.where(np.diff(graph.first) > 0, _modelled_ready(graph), begin)
    host = graph.host_source
    ready = np.where(host >= 0, np.maximum(ready, graph.start[np.maximum(host, 0)] + graph.host_lag), ready)
    return graph.start - ready


def _modelled_ready(graph: StepGraph) -> Int64Array:
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
