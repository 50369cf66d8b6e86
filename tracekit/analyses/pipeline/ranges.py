"""The pieces of pipeline work that one window's ranges mark, and when each of them really worked.

Ranges named ``PP:0F3`` (stage 0, forward, micro-batch 3) are written by torch for schedules of several stages a rank, and by the recorder
for all. torch's GPipe schedule writes ``Forward 3`` and ``Backward 3``, which name no stage; they count where there is no ``PP:`` range.

A range also holds time in which its rank does not work. On a GPU a piece lasts from the start of the first to the end of the last compute
kernel that was launched inside its range, on the stream that computes most: what FSDP packs and gathers beside it is not the stage's, a
collective inside the stage (tensor, context, expert parallel) that ends later is. What the stream does before it waits for the piece's
message (parameters unpacked ahead) does not begin the piece. On the CPU the range is cut at both ends: before its first operator by the
time in which a receive is open, behind its last operator by the time in which a send is open.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from tracekit.graph.blocks import behind_message, exchanged_inside, of_pipeline, on_main_stream
from tracekit.job.activity import Activity, Work
from tracekit.notes import note
from tracekit.trace import intervals
from tracekit.trace.durations import FOREIGN_NS
from tracekit.trace.events import BoolArray, Category, Int64Array, RankTables
from tracekit.units import NULL

#: What a piece does, as ranges spell it: forward, full backward, backward for the input, backward for the weights. Codes are indices.
KINDS = "FBIW"
FORWARD, BACKWARD, INPUT, WEIGHT = range(4)
#: The stage of a range that names none.
NO_STAGE = -1

_NAMED = re.compile(r"PP:(\d{1,6})([FBIW])(\d{1,6})")
_TORCHS = re.compile(r"(Forward|Backward) (\d{1,6})")


@dataclass(frozen=True)
class Pieces:
    """One entry a piece of work, in the order in which the host began them; times on the window's own clock.

    ``step`` is the number of the step, NULL where the trace marks none. ``turn`` counts how often the same piece came before in its step
    (in the trace, where no step is marked): a schedule that runs twice in one step has turns 0 and 1. ``start`` and ``end`` are NULL for a
    piece without any work on the device. ``on_device``: they are times of kernels.
    """

    stage: Int64Array
    kind: Int64Array
    micro_batch: Int64Array
    step: Int64Array
    turn: Int64Array
    start: Int64Array
    end: Int64Array
    on_device: bool

    def where(self, chosen: BoolArray) -> Pieces:
        """Only the chosen pieces."""
        names = ("stage", "kind", "micro_batch", "step", "turn", "start", "end")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})


def find(activity: Activity) -> Pieces | None:
    """Pieces of work inside the steps of one window; None where no range marks any."""
    found = _ranges(activity.tables, _named)
    if not len(found):
        found = _ranges(activity.tables, _torchs)
    if not len(found):
        return None
    steps = activity.steps
    if len(steps) or steps.source != "none":
        index = steps.index_at(found["start"].to_numpy())
        found = found[index >= 0].assign(step=steps.number[index[index >= 0]])
    else:
        found = found.assign(step=NULL)
    if not len(found):
        return None
    turn = found.groupby(["step", "stage", "kind", "micro_batch"]).cumcount().to_numpy().astype(np.int64)
    columns = {name: found[name].to_numpy(np.int64) for name in ("stage", "kind", "micro_batch", "step", "start", "end")}
    pieces = Pieces(**columns, turn=turn, on_device=False)
    return _on_host(activity, pieces) if activity.on_cpu else _on_device(activity, pieces)


def _named(text: str) -> int:
    """Stage, kind and micro-batch in one number; -1 where ``text`` is no such range."""
    found = _NAMED.fullmatch(text)
    return (int(found[1]) * len(KINDS) + KINDS.index(found[2])) * 10**6 + int(found[3]) if found else -1


def _torchs(text: str) -> int:
    found = _TORCHS.fullmatch(text)
    return ((FORWARD if found[1] == "Forward" else BACKWARD) * 10**6) + int(found[2]) if found else -1


def _ranges(tables: RankTables, code_of: Callable[[str], int]) -> pd.DataFrame:
    """Ranges with a code, by start; one that lies inside another of its name is the same piece and left out."""
    rows = tables.rows(Category.USER_ANNOTATION, Category.OPERATOR)
    rows = rows[(tables.dur[rows] > 0) & (tables.dur[rows] < FOREIGN_NS) & (tables.ts[rows] != NULL)]
    code = tables.each_text(tables.name[rows], code_of, np.int64)
    rows, code = rows[code >= 0], code[code >= 0]
    start, end = tables.ts[rows], tables.ts[rows] + tables.dur[rows]
    order = np.lexsort((-end, start, code))
    code, start, end = code[order], start[order], end[order]
    outer = np.append(True, (code[1:] != code[:-1]) | (start[1:] >= end[:-1]))[: len(code)]
    stage, kind = np.divmod(code // 10**6, len(KINDS))
    if code_of is _torchs:
        stage = np.full(len(code), NO_STAGE)
    frame = pd.DataFrame({"stage": stage, "kind": kind, "micro_batch": code % 10**6, "start": start, "end": end})[outer]
    return frame.sort_values("start", kind="stable")


def _on_device(activity: Activity, pieces: Pieces) -> Pieces:
    """Pieces with the times of what was launched inside them; by the host's clock where most of them launched nothing."""
    device = activity.device
    works = (device.work == Work.COMPUTE) & (device.launch_ts != NULL) & on_main_stream(device)
    piece, inside = _around(pieces, device.launch_ts[works])
    start = np.full(len(pieces.start), np.iinfo(np.int64).max)
    end = np.full(len(pieces.start), NULL)
    kernels = (piece[inside], device.start[works][inside], device.end[works][inside])
    chosen = behind_message(activity, *kernels)
    np.minimum.at(start, kernels[0][chosen], kernels[1][chosen])
    np.maximum.at(end, kernels[0], kernels[2])
    exchanged = exchanged_inside(activity) & (device.launch_ts != NULL)
    piece, inside = _around(pieces, device.launch_ts[exchanged])
    inside &= end[np.maximum(piece, 0)] != NULL
    np.maximum.at(end, piece[inside], device.end[exchanged][inside])
    worked = end != NULL
    if worked.sum() * 2 <= len(worked):
        activity.coverage.note(note("stages_on_host"))
        return pieces
    return replace(pieces, start=np.where(worked, start, NULL), end=end, on_device=True)


def _around(pieces: Pieces, called: Int64Array) -> tuple[Int64Array, BoolArray]:
    """(the piece that began last before each call, whether the call lies inside it)."""
    piece = np.searchsorted(pieces.start, called, side="right") - 1
    inside: BoolArray = (piece >= 0) & (called < pieces.end[np.maximum(piece, 0)])
    return piece, inside


def _on_host(activity: Activity, pieces: Pieces) -> Pieces:
    """Pieces without the waiting for messages at their two ends."""
    first, last = _first_and_last(*activity.device.of(Work.COMPUTE), pieces)
    received, sent = _open_messages(activity, ("recv", "send_recv")), _open_messages(activity, ("send", "send_recv"))
    head = intervals.covered(pieces.start, np.minimum(first, pieces.end), received)
    tail = intervals.covered(np.maximum(last, pieces.start), pieces.end, sent)
    return replace(pieces, start=pieces.start + head, end=np.maximum(pieces.end - tail, pieces.start + head))


def _first_and_last(start: Int64Array, end: Int64Array, pieces: Pieces) -> tuple[Int64Array, Int64Array]:
    """(start of the first, end of the last operator that begins in each piece); the piece's own end where none does."""
    low, high = np.searchsorted(start, pieces.start), np.searchsorted(start, pieces.end)
    some = high > low
    first, last = pieces.end.copy(), pieces.end.copy()
    first[some] = start[low[some]]
    for i in np.flatnonzero(some).tolist():  # pieces are few, operators many
        last[i] = end[low[i] : high[i]].max()
    return first, last


def _open_messages(activity: Activity, kinds: tuple[str, ...]) -> intervals.IntervalSet:
    """When at least one message of the pipeline was on its way, from the call on."""
    ours = of_pipeline(activity, kinds)
    start, called, end = (activity.operations[name].to_numpy(np.int64)[ours] for name in ("start_ns", "launch_ns", "end_ns"))
    begun: npt.NDArray[np.int64] = np.where(called == NULL, start, np.minimum(called, start))
    return intervals.union(begun, end)
