"""What one window gives to the graph: its device work as flat columns in the order of the host's calls, and what waits for what.

A node is a kernel, a copy, or a rank's part of a communication; on CPU jobs an operator or a piece of a backend's communication. Only
whole steps are kept, from the first on, as many as KEPT nodes hold.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from tracekit.graph.blocks import Blocks, blocks_of
from tracekit.graph.edges import Edges, find_edges
from tracekit.graph.host import doing_at
from tracekit.graph.nodes import NOT_TOLD, NOT_WAITED_FOR, WAITED_FOR, nodes_of, waits_for_device
from tracekit.job.activity import Activity, Work
from tracekit.job.communication import around, records
from tracekit.trace import correlate
from tracekit.trace.codes import distinct, distinct_rows
from tracekit.trace.events import BoolArray, Category, Int8Array, Int32Array, Int64Array
from tracekit.trace.steps import PHASE_NAMES
from tracekit.units import NULL

KEPT = 150_000
#: What a pipeline's ranges say of the work inside them: stage, kind and micro-batch; of a message also that it is one.
_PIECE = re.compile(r"PP:(\d{1,6})(SEND_|RECV_)?([FBIW])(\d{1,6})")
PIECE_KINDS = "FBIW"
NO_PIECE = -1
_LONGEST_NAME = 200
#: A pause between two launches of one thread that is worth a look at what the host does.
_LONG_PAUSE_NS = 50_000


@dataclass(frozen=True)
class LocalWork:
    """Nodes of one window in the order of their calls (without calls: of their starts); one entry a node unless said otherwise.

    ``step`` indexes ``numbers`` (NULL: the trace marks no steps); ``piece`` is ``((stage * 4 + kind) * 10**6 + micro_batch)`` of the
    pipeline's range around the call, NO_PIECE elsewhere; ``operation`` is the row of the window's operations, -1 for no communication.
    ``synced``: the trace records which stream waits for which. ``blocks``: pieces of a pipeline's work where no range names any.
    """

    start: Int64Array
    end: Int64Array
    returned: Int64Array  # when the call that launched it returned (the node's start, where that was earlier); NULL unknown
    stream: Int32Array  # a number for each stream of each device
    work: Int8Array  # Work
    name: Int32Array  # into names
    phase: Int8Array  # into PHASE_NAMES
    step: Int32Array
    piece: Int64Array
    operation: Int32Array
    doing: Int32Array  # into names: what the host did before it launched the node late; -1 where it was not late, or nothing says what
    edges: Edges
    numbers: Int64Array
    begins: Int64Array  # when the host begins each step; NULL where no step is marked
    names: list[str]
    on_cpu: bool
    synced: bool
    kept_steps: int
    all_steps: int
    blocks: Blocks | None = None

    def __len__(self) -> int:
        return len(self.start)


def reduce_window(activity: Activity) -> LocalWork | None:
    """The graph's part of one window; None where no device worked in a step."""
    device = activity.device
    step = np.where(device.launch_step >= 0, device.launch_step, device.step).astype(np.int64)
    marked = len(activity.steps) > 0
    if not marked:
        if activity.steps.source != "none":
            return None
        step = np.zeros(len(device), np.int64)
    rows = np.flatnonzero(step >= 0)
    if not len(rows):
        return None
    rows, kept, count = _within_budget(rows, step)
    launch = device.launch_ts[rows]
    rows = rows[np.lexsort((device.start[rows], np.where(launch == NULL, device.start[rows], launch)))]
    doing = _doing(activity, rows)
    names, name = distinct(np.concatenate([device.name[rows], doing[doing >= 0]]))
    piece = _pieces(activity, rows)
    stream = distinct_rows(device.device[rows], device.stream[rows])[1].astype(np.int32)
    told, phase = _told(activity, rows), _phases(activity, rows)
    edges, synced = find_edges(activity.tables, nodes_of(activity, rows, stream, step[rows], told, piece))
    return with_messages(
        LocalWork(
            start=device.start[rows],
            end=device.end[rows],
            returned=_returned(activity, rows),
            stream=stream,
            work=device.work[rows],
            name=name[: len(rows)].astype(np.int32),
            phase=phase,
            step=step[rows].astype(np.int32),
            piece=piece,
            operation=device.operation[rows].astype(np.int32),
            doing=_placed(name[len(rows) :], doing >= 0),
            edges=edges,
            numbers=activity.steps.number if marked else np.array([NULL], np.int64),
            begins=activity.steps.start if marked else np.array([NULL], np.int64),
            names=[activity.tables.text(int(code))[:_LONGEST_NAME] for code in names],
            on_cpu=activity.on_cpu,
            synced=synced,
            kept_steps=kept,
            all_steps=count,
            blocks=None if (piece >= 0).any() else blocks_of(activity, rows, step[rows], phase),
        ),
        len(activity.operations),
    )


def with_messages(work: LocalWork, operations: int) -> LocalWork:
    """A kernel that carries a batch of sends and receives becomes one node a message: each of them joins another rank.

    Only the first message of a batch is named by its kernel; the operations that no kernel names are those behind it.
    """
    named = np.unique(work.operation[work.operation >= 0])
    carried = np.diff(np.append(named, operations))
    if not len(named) or (carried == 1).all():
        return work
    at = np.searchsorted(named, np.maximum(work.operation, 0))
    count = np.where(work.operation >= 0, carried[np.minimum(at, len(named) - 1)], 1)
    node = np.repeat(np.arange(len(work)), count)
    first = np.cumsum(count) - count
    nth = np.arange(len(node)) - first[node]
    copied = {
        name: getattr(work, name)[node]
        for name in ("start", "end", "returned", "stream", "work", "name", "phase", "step", "piece", "doing")
    }
    return replace(
        work,
        **copied,
        operation=np.where(nth > 0, work.operation[node] + nth, work.operation[node]).astype(np.int32),
        edges=work.edges.repeated(first, count),
        blocks=None if work.blocks is None else replace(work.blocks, of_node=work.blocks.of_node[node]),
    )


def _within_budget(rows: Int64Array, step: Int64Array) -> tuple[Int64Array, int, int]:
    """(the rows of the steps that KEPT allows, how many steps these are, of how many)."""
    size = np.bincount(step[rows])
    present = np.flatnonzero(size)
    fits = np.cumsum(size[present]) <= KEPT
    fits[0] = True
    kept = present[fits]
    return rows[np.isin(step[rows], kept)], len(kept), len(present)


def _returned(activity: Activity, rows: Int64Array) -> Int64Array:
    """When each launching call returned, or the node's start where that is earlier: from then on the host holds nothing back."""
    device, tables = activity.device, activity.tables
    launch = device.launch_row[rows]
    known = launch >= 0
    result = np.full(len(rows), NULL, np.int64)
    end = tables.ts[launch[known]] + np.maximum(tables.dur[launch[known]], 0)
    result[known] = np.maximum(np.minimum(end, device.start[rows][known]), tables.ts[launch[known]])
    return result


def _phases(activity: Activity, rows: Int64Array) -> Int8Array:
    """Phase of each node by its call; on CPU jobs by its start."""
    launch = activity.device.launch_ts[rows]
    at = activity.device.start[rows] if activity.on_cpu else np.where(launch == NULL, 0, launch)
    return np.where((launch == NULL) & (not activity.on_cpu), 0, activity.phases.at(at)).astype(np.int8)


def _doing(activity: Activity, rows: Int64Array) -> Int32Array:
    """Name of what the host did in each long pause before a launch, since the runtime call before it on its thread; -1 elsewhere.

    Where that call itself was long, it is its name, unless it waited for the device.
    """
    tables, launch = activity.tables, activity.device.launch_row[rows]
    result = np.full(len(rows), -1, np.int32)
    calls = tables.rows(Category.RUNTIME)
    calls = calls[np.lexsort((tables.ts[calls], tables.lane[calls]))]
    place = np.full(len(tables), -1, np.int64)
    place[calls] = np.arange(len(calls))
    known = np.flatnonzero((launch >= 0) & (place[np.maximum(launch, 0)] > 0))
    before = calls[place[launch[known]] - 1]
    known, before = known[tables.lane[before] == tables.lane[launch[known]]], before[tables.lane[before] == tables.lane[launch[known]]]
    begun, done = tables.ts[launch[known]], tables.ts[before] + np.maximum(tables.dur[before], 0)
    waits = tables.each_text(tables.name[before], waits_for_device)
    long_call = (done - tables.ts[before] > _LONG_PAUSE_NS) & ~waits
    result[known[long_call]] = tables.name[before[long_call]]
    late = np.flatnonzero(begun - done > _LONG_PAUSE_NS)
    around = doing_at(tables, tables.lane[before[late]], (done[late] + begun[late]) // 2)
    result[known[late]] = np.where(around >= 0, tables.name[np.maximum(around, 0)], result[known[late]])
    return result


def _placed(values: Int64Array, where: BoolArray) -> Int32Array:
    result = np.full(len(where), -1, np.int32)
    result[where] = values
    return result


def _pieces(activity: Activity, rows: Int64Array) -> Int64Array:
    """The pipeline's range around each call, as LocalWork.piece has it."""
    tables, device = activity.tables, activity.device
    ranges = tables.rows(Category.USER_ANNOTATION, Category.OPERATOR)
    ranges = ranges[tables.each_text(tables.name[ranges], lambda text: piece_of(text) >= 0)]
    result = np.full(len(rows), NO_PIECE, np.int64)
    if not len(ranges):
        return result
    anchor = np.where(device.launch_row[rows] >= 0, device.launch_row[rows], device.row[rows] if activity.on_cpu else -1)
    known = anchor >= 0
    inner, inverse = np.unique(anchor[known], return_inverse=True)
    around = correlate.enclosing(tables, inner, ranges)
    # Autograd runs a backward on a thread of its own: its range stands on the thread that waits for it.
    order = ranges[np.argsort(tables.ts[ranges], kind="stable")]
    latest = order[np.maximum(np.searchsorted(tables.ts[order], tables.ts[inner], side="right") - 1, 0)]
    holds = (tables.ts[latest] <= tables.ts[inner]) & (tables.ts[inner] < tables.ts[latest] + tables.dur[latest])
    around = np.where((around < 0) & holds, latest, around)[inverse.reshape(-1)]
    code = tables.each_text(tables.name[np.maximum(around, 0)], piece_of, np.int64)
    result[known] = np.where(around >= 0, code, NO_PIECE)
    return result


def piece_of(text: str) -> int:
    """The number of a pipeline's range (of a message: that of the work it is for); NO_PIECE for any other text."""
    found = _PIECE.fullmatch(text)
    return (int(found[1]) * 4 + PIECE_KINDS.index(found[3])) * 10**6 + int(found[4]) if found else NO_PIECE


def _told(activity: Activity, rows: Int64Array) -> Int8Array:
    """What the record of each communication says: whether its caller waits for it."""
    tables, device = activity.tables, activity.device
    told = np.zeros(len(rows), np.int8)
    side = tables.side["communication"]
    comm = np.flatnonzero((device.work[rows] == Work.COMMUNICATION) & (device.launch_row[rows] >= 0))
    if not len(comm) or not len(side):
        return told
    recorded = records(tables)
    record = around(tables, device.launch_row[rows[comm]], recorded[side.at(recorded) >= 0])
    at = np.where(record >= 0, side.at(np.maximum(record, 0)), -1)
    text = np.where(at >= 0, side.columns["Is asynchronized op"][np.maximum(at, 0)], 0)
    answers = {"true": NOT_WAITED_FOR, "false": WAITED_FOR, "1": NOT_WAITED_FOR, "0": WAITED_FOR}
    told[comm] = tables.each_text(text, lambda word: answers.get(word.lower(), NOT_TOLD), np.int8)
    return told


def communicates(work: Int8Array) -> BoolArray:
    """Which nodes are communication."""
    found: BoolArray = work == Work.COMMUNICATION
    return found


__all__ = ["NO_PIECE", "PHASE_NAMES", "LocalWork", "communicates", "piece_of", "reduce_window"]
