"""All ranks' work in one graph: nodes on the job's clock, and the collectives and messages that join ranks.

A member that left before the last one came (the root of a broadcast) waited for nobody and has its own duration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.executors.memory import give_back
from tracekit.graph.blocks import Blocks
from tracekit.graph.local import NO_PIECE, LocalWork
from tracekit.graph.replay import causal_order
from tracekit.graph.stages import stages_of
from tracekit.graph.step_graph import StepGraph, delays, launch_bound, modelled_ready, ready_of
from tracekit.job.model import Job
from tracekit.job.packed import PACKED_FROM
from tracekit.trace.events import Int8Array, Int32Array, Int64Array
from tracekit.trace.steps import FAR_OFF
from tracekit.units import NS_PER_MS, NS_PER_US, NULL, listed, plural

#: Kinds of which a member may leave before the last one has come.
_ROOTED = ("broadcast", "reduce", "scatter", "gather")
#: A member that ended this long before the last one came was not held by it (of symmetric collectives: its times are wrong).
EARLY_NS, WRONG_NS = 100 * NS_PER_US, 10 * NS_PER_MS
#: Columns of all nodes by name.
_Table = dict[str, npt.NDArray[Any]]


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
    common, cut = _common_steps(whole), _cut_steps(job, whole)
    numbers = np.setdiff1d(common, cut)
    if not len(numbers):
        lost = "every step lacks work that the profiler lost on one rank or another"
        return NoGraph(lost if len(common) else "no step was recorded whole by every rank")
    first = _first_steps(job, whole, numbers)
    notes = _notes(job, found, whole, np.intersect1d(common, cut).tolist())
    if first:
        which = "the first step is" if first == 1 else f"the first {first} steps are"
        notes += (f"{which} left out: more than {FAR_OFF:g} times as long as the median step",)
    large = len(found) >= PACKED_FROM
    del found
    graph = _joined(job, whole, numbers[first:], notes)
    if large:
        give_back()
    return graph


def _common_steps(parts: list[tuple[int, int, LocalWork]]) -> Int64Array:
    by_rank: dict[int, set[int]] = {}
    for rank, _, work in parts:
        by_rank.setdefault(rank, set()).update(np.unique(work.numbers[work.step]).tolist())
    return np.array(sorted(set.intersection(*by_rank.values())), np.int64)


def _first_steps(job: Job, parts: list[tuple[int, int, LocalWork]], numbers: Int64Array) -> int:
    """How many steps at the beginning only warm up: of three or more, those that take FAR_OFF times as long as the median step.

    A long step further on stays: what stopped there is a cause that is looked for.
    """
    if len(numbers) < 3:
        return 0
    total = np.zeros(len(numbers))
    for _, index, _ in parts:
        steps = job.windows[index].steps
        at = np.searchsorted(steps.number, numbers)
        if not len(steps) or at.max() >= len(steps) or (steps.number[at] != numbers).any():
            return 0
        total += steps.end[at] - steps.start[at]
    usual = total <= FAR_OFF * np.median(total)
    return int(np.argmax(usual))


def _cut_steps(job: Job, parts: list[tuple[int, int, LocalWork]]) -> Int64Array:
    """Numbers of the steps of which a rank's trace lost work: beside them the other ranks would seem to be late."""
    cut: set[int] = set()
    for _, index, work in parts:
        partial = job.windows[index].partial
        if len(partial) and len(job.windows[index].steps):
            cut.update(job.windows[index].steps.number[partial].tolist())
        elif partial.any():
            cut.update(work.numbers.tolist())
    return np.array(sorted(cut), np.int64)


def _notes(job: Job, found: list[tuple[int, int, LocalWork]], whole: list[tuple[int, int, LocalWork]], cut: list[int]) -> tuple[str, ...]:
    notes = []
    if cut:
        notes.append(f"{plural(len(cut), 'step')} ({listed(cut, 4)}) left out: the profiler lost work in {'them' if cut[1:] else 'it'}")
    there = {rank for rank, _, _ in whole}
    if len(found) > len(whole):
        notes.append(f"{len(found) - len(whole)} truncated traces are left out")
    idle = sorted(set(job.ranks) - there)
    if idle:
        notes.append(f"{len(idle)} of {len(job.ranks)} ranks recorded no device work in a whole step")
    if job.unread:
        verb, whose = ("were", "they hold") if job.unread > 1 else ("was", "it holds")
        notes.append(f"{plural(job.unread, 'rank')} of the job {verb} not read: what {whose} back counts as transfer")
    if any(work.kept_steps < work.all_steps for _, _, work in whole):
        notes.append("only the first steps are replayed: the others are too many")
    return tuple(notes)


def _joined(job: Job, parts: list[tuple[int, int, LocalWork]], numbers: Int64Array, notes: tuple[str, ...]) -> StepGraph:
    """One graph of all parts, which are taken out of their list."""
    columns: dict[str, list[npt.NDArray[Any]]] = {}
    pairs: list[tuple[Int32Array, Int32Array, Int8Array]] = []
    names: dict[str, int] = {}
    offset, rows_of, numbered = 0, _OperationRows(job), stages_of(job)
    begins, synced = _begins(job, parts, int(numbers[0])), all(work.synced for _, _, work in parts)
    parts.reverse()
    while parts:  # what is in the table already is not kept beside it: thousands of ranks
        rank, index, work = parts.pop()
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
            "piece": _pieces(work, numbered.blocks.get(index), numbered.codes.get(index)),
            "name": codes[work.name],
            "operation": operation.astype(np.int32),
            "doing": np.where(work.doing >= 0, codes[np.maximum(work.doing, 0)], -1).astype(np.int32),
        }
        for name, column in own.items():
            columns.setdefault(name, []).append(column[keep])
        source, target = place[work.edges.source].astype(np.int32), place[work.edges.target].astype(np.int32)
        both = (source >= 0) & (target >= 0)
        pairs.append((source[both], target[both], work.edges.kind[both]))
        offset += size
    table = {name: np.concatenate(columns.pop(name)) for name in list(columns)}
    source, target, kind = (np.concatenate([pair[i] for pair in pairs]) for i in range(3))
    pairs.clear()
    begin = min([int(table["start"].min()), *begins])
    return _graph(job, table, (source, target, kind), begin, numbers, list(names), synced, notes)


def _pieces(work: LocalWork, blocks: Blocks | None, codes: Int64Array | None) -> Int64Array:
    """The piece of each node, by the ranges around it, else by its block."""
    if codes is None or blocks is None:
        return work.piece
    return np.where(blocks.of_node >= 0, np.append(codes, NO_PIECE)[blocks.of_node], NO_PIECE)


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
    table: _Table,
    edges: tuple[Int32Array, Int32Array, Int8Array],
    begin: int,
    numbers: Int64Array,
    names: list[str],
    synced: bool,
    notes: tuple[str, ...],
) -> StepGraph:
    source, target, kind = edges
    order = np.argsort(target, kind="stable")
    count = len(table["start"])
    first = np.concatenate([[0], np.cumsum(np.bincount(target, minlength=count))]).astype(np.int64)
    join, cost = _joins(job, table)
    nothing = np.full(count, -1, np.int32)
    graph = StepGraph(
        **table,
        join=join,
        cost=cost,
        first=first,
        source=source[order],
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
    gap = graph.start - np.where(some, modelled_ready(graph), begin)
    return replace(graph, delay=delays(graph, np.full(count, begin)), gap=gap)


def _joins(job: Job, table: _Table) -> tuple[Int32Array, Int64Array]:
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


def _host_chain(graph: StepGraph) -> StepGraph:
    """Neighbours in the order of calls that both began as soon as their launch returned: the host paces them, not the device."""
    ready = ready_of(graph)
    bound = launch_bound(graph, ready)
    before = np.append(False, bound[:-1] & bound[1:] & (graph.window[1:] == graph.window[:-1]))
    own = np.arange(len(graph))
    source = np.where(before, own - 1, -1).astype(np.int32)
    lag = np.where(before, graph.start - graph.start[np.maximum(own - 1, 0)], 0)
    usable = before & (lag >= 0)
    return replace(graph, host_source=np.where(usable, source, -1).astype(np.int32), host_lag=np.where(usable, lag, 0))


def _in_order(graph: StepGraph) -> StepGraph:
    """The graph with a causal order, without edges that contradict it."""
    members = np.flatnonzero(graph.join >= 0)
    members = members[np.argsort(graph.join[members], kind="stable")].astype(np.int32)
    join_first = np.searchsorted(graph.join[members], np.arange(graph.joins + 1)).astype(np.int64)
    by_start = np.argsort(graph.start, kind="stable").astype(np.int32)
    order, lacks = causal_order(
        graph.first, graph.source, graph.join, join_first, np.asarray(members, np.int32), graph.host_source, by_start
    )
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
    return replace(
        graph, order=order, first=first, source=graph.source[keep], kind=graph.kind[keep], host_source=host, notes=(*graph.notes, note)
    )
