"""Pieces of pipeline work of one window that no range names: what lies between its messages and the changes of phase.

    block   compute of one phase (forward, backward) and step whose calls follow each other without a message of the pipeline between them

Which stage and micro-batch a block belongs to shows only beside the other ranks: ``graph.stages``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.collectives.purpose import role_of_axis
from tracekit.job.activity import Activity, DeviceWork, Work
from tracekit.mesh.names import axis_of_description
from tracekit.trace.codes import distinct_rows
from tracekit.trace.events import BoolArray, Int8Array, Int64Array
from tracekit.trace.steps import PHASE_NAMES
from tracekit.units import NULL

FORWARD, BACKWARD = PHASE_NAMES.index("forward"), PHASE_NAMES.index("backward")
#: Sends and receives of such axes are not the pipeline's (a ring of context parallelism runs inside a stage's forward).
OTHER_ROLES = ("tensor", "context", "expert", "sharding", "data")
MESSAGES = ("send", "recv", "send_recv")
#: What computes for less than this share of the usual time is no piece of work, though a message is sent behind it.
SHORT = 0.1
#: So much of a piece's compute may come before the wait for its message without being its beginning.
UNPACKED = 0.25


@dataclass(frozen=True)
class Blocks:
    """One entry a block, in the order of calls. ``of_node`` is the block of each node, -1 for none; ``step`` is as the nodes have it.

    ``forward``: forward, else backward; ``start`` and ``end`` on the device, on the window's own clock; ``sends``: how many messages the
    rank sends behind it, before its next block.
    """

    of_node: Int64Array
    step: Int64Array
    forward: BoolArray
    start: Int64Array
    end: Int64Array
    sends: Int64Array


def blocks_of(activity: Activity, rows: Int64Array, step: Int64Array, phase: Int8Array) -> Blocks | None:
    """Blocks among the device work ``rows`` (in the order of calls); None where no message of a pipeline or no phase was recorded."""
    device = activity.device
    sent, called_at = _messages(activity)
    called = np.where(device.launch_ts[rows] == NULL, device.start[rows] if activity.on_cpu else NULL, device.launch_ts[rows])
    computes = (device.work[rows] == Work.COMPUTE) & (activity.on_cpu | on_main_stream(device)[rows])
    inside = (device.work[rows] == Work.COMMUNICATION) & ~_carries_message(activity, device.operation[rows])
    nodes = np.flatnonzero((computes | inside) & (called != NULL) & np.isin(phase, (FORWARD, BACKWARD)))
    if not len(called_at) or not computes[nodes].any():
        return None
    before = np.searchsorted(called_at, called[nodes], side="right")
    keys = np.stack([before, phase[nodes].astype(np.int64), step[nodes]])
    opens = np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0))
    number, first = np.cumsum(opens) - 1, nodes[opens]
    forward, opened = phase[first] == FORWARD, (called[first], step[first])
    works = computes[nodes]
    busy = np.bincount(number[works], (device.end - device.start)[rows[nodes[works]]], len(first))
    size = np.bincount(number[works], minlength=len(first))
    sends = _sends(opened[0], called_at[sent])
    kept = (size > 0) & _long(busy, size, sends > 0, forward) & ~_behind_backward(forward, opened[1])
    number = np.where(kept, np.cumsum(kept) - 1, -1)[number]
    of_node = np.full(len(rows), -1, np.int64)
    of_node[nodes] = number
    opened = (opened[0][kept], opened[1][kept])
    start, end = np.full(kept.sum(), np.iinfo(np.int64).max), np.full(kept.sum(), NULL)
    chosen = works & (number >= 0)
    number, times = number[chosen], (device.start[rows[nodes[chosen]]], device.end[rows[nodes[chosen]]])
    begins = np.ones(len(number), np.bool_) if activity.on_cpu else behind_message(activity, number, *times)
    np.minimum.at(start, number[begins], times[0][begins])
    np.maximum.at(end, number, times[1])
    if not activity.on_cpu:
        tail = exchanged_inside(activity)[rows[nodes]] & (of_node[nodes] >= 0)
        np.maximum.at(end, of_node[nodes[tail]], device.end[rows[nodes[tail]]])
    return Blocks(of_node, opened[1], forward[kept], start, end, _sends(opened[0], called_at[sent]))


def _carries_message(activity: Activity, operation: npt.NDArray[np.int32]) -> BoolArray:
    """Which communications carry a message of the pipeline (of a batch: its first one)."""
    ours = of_pipeline(activity, MESSAGES)
    found: BoolArray = (operation >= 0) & np.append(ours, False)[operation]
    return found


def _sends(called: Int64Array, sent: Int64Array) -> Int64Array:
    """How many messages are sent behind each block and before the next, by when they are called for."""
    behind = np.searchsorted(called, sent, side="left") - 1
    return np.bincount(behind[behind >= 0], minlength=len(called))


def _long(busy: Int64Array, size: Int64Array, sends: BoolArray, forward: BoolArray) -> BoolArray:
    """Blocks that are a stage's work: the rest slices inputs, scales gradients, counts. Compared with the usual one of many operators."""
    kept = np.zeros(len(busy), np.bool_)
    for own in (forward, ~forward):
        if own.any():
            large = own & (size >= np.quantile(size[own], 0.75) / 2)  # several pieces without a message between them are one block
            usual = float(np.median(busy[large]))
            kept |= large | (own & (busy >= np.where(sends, SHORT, 0.5) * usual))
    return kept


def _behind_backward(forward: BoolArray, step: Int64Array) -> BoolArray:
    """Forward blocks behind the last backward of their step: what is done with gradients and losses there is no piece of work."""
    last = np.full(int(step.max()) + 1, len(step))
    backward = np.flatnonzero(~forward)
    last[step[backward]] = backward  # the last one of each step stays
    found: BoolArray = forward & (np.arange(len(step)) > last[step])
    return found


def _messages(activity: Activity) -> tuple[BoolArray, Int64Array]:
    """(whether it is sent, when it was called for) of each message of the pipeline, by the latter."""
    operations = activity.operations
    chosen = of_pipeline(activity, MESSAGES)
    start, called = (operations[name].to_numpy(np.int64)[chosen] for name in ("start_ns", "launch_ns"))
    called = np.where(called == NULL, start, called)
    order = np.argsort(called, kind="stable")
    return (operations["kind"] != "recv").to_numpy()[chosen][order], called[order]


def of_pipeline(activity: Activity, kinds: tuple[str, ...]) -> BoolArray:
    """Which operations are of these kinds, and along no axis that is not the pipeline's."""
    operations = activity.operations
    other = [role_of_axis(axis_of_description(group.description)) in OTHER_ROLES for group in activity.groups]
    group = operations["group"].to_numpy()
    ours: BoolArray = operations["kind"].isin(kinds).to_numpy()
    if other:
        ours = ours & ~((group >= 0) & np.array(other, np.bool_)[np.maximum(group, 0)])
    return ours


def exchanged_inside(activity: Activity) -> BoolArray:
    """Device work that is communication along an axis inside a stage: what a piece of work ends with, it has not done before."""
    roles = [role_of_axis(axis_of_description(group.description)) for group in activity.groups]
    inside = np.array([role in ("tensor", "context", "expert") for role in roles] + [False], np.bool_)
    group = activity.operations["group"].to_numpy(np.int64)
    ours = np.append(inside[np.where(group >= 0, group, -1)], False)
    operation = activity.device.operation
    found: BoolArray = (operation >= 0) & ours[operation]
    return found


def on_main_stream(device: DeviceWork) -> BoolArray:
    """Work on the stream of each device that computes longest: sharding packs and unpacks its parameters on streams of its own."""
    lane = distinct_rows(device.device, device.stream)[1]
    busy = np.bincount(lane, np.where(device.work == Work.COMPUTE, device.end - device.start, 0))
    owner = np.zeros(len(busy), np.int64)
    owner[lane] = device.device
    longest = {number: int(np.argmax(np.where(owner == number, busy, -1))) for number in np.unique(owner).tolist()}
    return np.isin(lane, list(longest.values()))


def behind_message(activity: Activity, piece: Int64Array, start: Int64Array, end: Int64Array) -> BoolArray:
    """Kernels of one stream (with the piece of each) that do not lie before their piece's wait for its message.

    Such a wait is a pause of the stream during which a receive ends, and behind that no other communication. What was done before it is a
    little (less than UNPACKED of the piece's compute), else it is no preparation but half of the piece.
    """
    order = np.lexsort((start, piece))
    piece, start, end = piece[order], start[order], end[order]
    ends, received = _ends_of_communication(activity)
    at = np.searchsorted(ends, start, side="right") - 1
    pause = np.append(NULL, np.where(piece[1:] == piece[:-1], end[:-1], np.iinfo(np.int64).max))[: len(piece)]
    waits = (at >= 0) & (pause != NULL) & (ends[np.maximum(at, 0)] > pause) & received[np.maximum(at, 0)] if len(ends) else pause != pause
    if not waits.any():
        return np.ones(len(piece), np.bool_)
    total = np.bincount(piece, end - start)
    before = np.cumsum(end - start) - (end - start)
    opens = np.flatnonzero(np.append(True, piece[1:] != piece[:-1]))
    before = before - np.repeat(before[opens], np.diff(np.append(opens, len(piece))))
    waits &= before < UNPACKED * total[piece]
    from_row = np.full(len(total), -1)
    np.maximum.at(from_row, piece[waits], np.flatnonzero(waits))
    kept = np.empty(len(piece), np.bool_)
    kept[order] = np.arange(len(piece)) >= from_row[piece]
    return kept


def _ends_of_communication(activity: Activity) -> tuple[Int64Array, BoolArray]:
    """(end of each communication in order, whether it is a receive of the pipeline)."""
    end = activity.operations["end_ns"].to_numpy(np.int64)
    order = np.argsort(end, kind="stable")
    return end[order], of_pipeline(activity, ("recv", "send_recv"))[order]
