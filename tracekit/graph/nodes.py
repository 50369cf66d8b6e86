"""The nodes of one window while their edges are sought."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.job.activity import Activity, Work
from tracekit.trace.events import BoolArray, Category, Int8Array, Int32Array, Int64Array
from tracekit.units import NULL

#: Synchronize calls, and copies that return when they are done; a copy that is called Async may still wait (pageable memory).
_WAITS = re.compile(
    r"^(?:cuda|hip|cu|musa|xpu|ze)\w*[Ss]ynchronize\w*$|^(?:cuda|hip)Memcpy(?:WithStream|DtoH\w*|HtoD\w*)?$|^cuMemcpy(?:DtoH|HtoD)?(?:_v2)?$"
)

Words = npt.NDArray[np.object_]
#: Whether the next work of the calling stream waits for a communication, as its record says.
NOT_TOLD, WAITED_FOR, NOT_WAITED_FOR = 0, 1, 2


@dataclass(frozen=True)
class Nodes:
    """Pieces of device work in the order of their calls, one entry a node."""

    start: Int64Array
    end: Int64Array
    launch: Int64Array  # NULL unknown
    stream: Int64Array  # a number for each stream of each device
    raw_stream: Int64Array  # as the trace has it
    thread: Int32Array  # host lane of the launch; -1 unknown
    comm: BoolArray
    kind: Words  # kind of the communication; '' for other work
    context: Words  # innermost annotation around a communication's call
    told: Int8Array  # NOT_TOLD, ...
    piece: Int64Array  # local.piece_of the range around the call; NO_PIECE
    step: Int64Array
    on_cpu: bool
    blocked: tuple[Int64Array, Int64Array]  # (start, end) of the host's calls that wait for the device

    def __len__(self) -> int:
        return len(self.start)

    @property
    def called(self) -> Int64Array:
        """When the host called for each node; its start where no call is recorded."""
        return np.where(self.launch == NULL, self.start, self.launch)


def nodes_of(activity: Activity, rows: Int64Array, stream: Int32Array, step: Int64Array, told: Int8Array, piece: Int64Array) -> Nodes:
    """Nodes of these rows of the device work."""
    device = activity.device
    comm = device.work[rows] == Work.COMMUNICATION
    launch = device.launch_row[rows]

    def words(column: str) -> Words:
        values = np.array(activity.operations[column], dtype=object)
        return np.where(comm, values[np.maximum(device.operation[rows], 0)], "") if len(values) else np.full(len(rows), "", dtype=object)

    return Nodes(
        start=device.start[rows],
        end=device.end[rows],
        launch=device.launch_ts[rows],
        stream=stream.astype(np.int64),
        raw_stream=device.stream[rows].astype(np.int64),
        thread=np.where(launch >= 0, activity.tables.lane[np.maximum(launch, 0)], -1).astype(np.int32),
        comm=comm,
        kind=np.where(_receives(activity, rows), "recv", words("kind")),
        context=words("context"),
        told=told,
        piece=piece,
        step=step,
        on_cpu=activity.on_cpu,
        blocked=_blocking_calls(activity),
    )


def _receives(activity: Activity, rows: Int64Array) -> BoolArray:
    """Kernels that carry a batch of messages with a receive among them: the calling stream waits for those."""
    named = np.unique(activity.device.operation[activity.device.operation >= 0])
    received = np.append(0, np.cumsum(activity.operations["kind"].to_numpy() == "recv"))
    if not len(named) or len(named) == len(activity.operations):
        return np.zeros(len(rows), np.bool_)
    upto = np.append(named[1:], len(activity.operations))
    some = (received[upto] > received[named]) & (upto - named > 1)
    operation = activity.device.operation[rows]
    at = np.minimum(np.searchsorted(named, np.maximum(operation, 0)), len(named) - 1)
    found: BoolArray = some[at] & (operation >= 0)
    return found


def _blocking_calls(activity: Activity) -> tuple[Int64Array, Int64Array]:
    tables = activity.tables
    rows = tables.rows(Category.RUNTIME)
    rows = rows[tables.each_text(tables.name[rows], waits_for_device) & (tables.dur[rows] > 0) & (tables.ts[rows] != NULL)]
    rows = rows[np.argsort(tables.ts[rows], kind="stable")]
    return tables.ts[rows], tables.ts[rows] + tables.dur[rows]


def waits_for_device(name: str) -> bool:
    """Whether a runtime call returns only when the device has done what it was given."""
    return _WAITS.match(name) is not None
