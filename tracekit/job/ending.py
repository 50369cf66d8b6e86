"""How one trace ends: calls of collectives that were never seen to run, or not to their end, and what the host does at that moment.

A trace of a job that hangs ends in the middle of a collective. What that looks like depends on who wrote it: a kernel of ten minutes that
the watchdog ended; one without an end; a call whose kernel is not there, because only finished kernels are written; on the host a backend's
range until the end, or none at all. Here all of that is kept, judged by nobody: only all ranks together can tell (``standstill``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from tracekit.collectives.kinds import POINT_TO_POINT, kind_of_collective_name, kind_of_operator
from tracekit.job.communication import HOST_BACKENDS
from tracekit.readers.flight_recorder import is_library
from tracekit.readers.hang_files import Frame
from tracekit.trace.codes import distinct
from tracekit.trace.events import BoolArray, Category, Int32Array, Int64Array, RankTables
from tracekit.units import NULL

if TYPE_CHECKING:
    from tracekit.job.activity import DeviceWork

#: Calls that never ran, and last calls whose line of code is looked up, of one window; frames of a stack.
MOST_CALLS, MOST_SITES, MOST_FRAMES = 256, 32, 64
_FRAME = re.compile(r"^(?P<file>[^()]{1,500})\((?P<line>\d{1,9})\): (?P<name>.{1,300})$")
_LONGEST_NS = 1 << 60


@dataclass(frozen=True)
class OpenCall:
    """A collective, send or receive that was called and never seen to run. ``group`` is one of the window's; time on the rank's clock."""

    group: int
    seq: int
    kind: str
    called_ns: int
    source: int
    destination: int
    site: str = ""


@dataclass(frozen=True)
class Ending:
    """``ends``: operation -> its end as it stands in the file, where the window was not given it. ``sites``: operation -> line of code.

    ``stack``: what the main thread does at the end, innermost first: Python's frames where the trace has them, else ranges of the host.
    """

    calls: list[OpenCall] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    sites: dict[int, str] = field(default_factory=dict)
    stack: list[Frame] = field(default_factory=list)
    on_device: bool = True  # something ran: without that, that a call did not says nothing


def ending(tables: RankTables, work: DeviceWork, operations: pd.DataFrame, group_of: Int32Array, end: int, on_cpu: bool) -> Ending:
    """How the trace ends; ``end`` is the last moment at which something happened."""
    calls = _without_kernel(tables, operations, group_of) if not on_cpu else _without_range(tables, operations)
    calls = sorted(calls, key=lambda call: call.called_ns)[:MOST_CALLS]
    last = _last_of_groups(operations)
    main = _MainThread(tables, min([end - 1, *last.values(), *(call.called_ns for call in calls)]))
    calls = [replace(call, site=main.site(call.called_ns)) if n < MOST_SITES else call for n, call in enumerate(calls)]
    sites = {place: site for place, time in last.items() if (site := main.site(time))}
    return Ending(calls, _raw_ends(tables, work), sites, main.at(end - 1), len(work) > 0)


def _raw_ends(tables: RankTables, work: DeviceWork) -> dict[int, int]:
    """Ends of operations whose duration could not be true beside everything else."""
    odd = np.flatnonzero(work.suspicious & (work.operation >= 0))
    rows = work.row[odd]
    ends = tables.ts[rows] + np.clip(tables.dur[rows], 0, _LONGEST_NS)
    found: dict[int, int] = {}
    for operation, end in zip(work.operation[odd].tolist(), ends.tolist(), strict=True):
        found[operation] = max(end, found.get(operation, end))
    return found if len(found) <= MOST_CALLS else {}


def _without_kernel(tables: RankTables, operations: pd.DataFrame, group_of: Int32Array) -> list[OpenCall]:
    """Records of calls, and kernels without an end, whose number no operation of the group has."""
    side = tables.side["communication"]
    if not len(side):
        return []
    columns = side.columns
    kinds = tables.each_text(columns["Collective name"], lambda text: kind_of_collective_name(text) or "", object)
    seq, group, at = columns["Seq"], group_of[: len(side)], tables.ts[side.rows]
    p2p = np.isin(kinds, POINT_TO_POINT)
    chosen = (seq != NULL) & (group >= 0) & (kinds != "") & (at != NULL)
    done = _keys(operations["group"], operations["seq"], operations["kind"].isin(POINT_TO_POINT))
    own = _keys(group, seq, p2p)
    last = _last_called(operations)
    chosen &= ~np.isin(own, done) & (at > np.array([last.get(int(g), NULL) for g in range(int(group.max(initial=0)) + 1)])[group])
    _, first = np.unique(own[chosen], return_index=True)
    rows = np.flatnonzero(chosen)[np.sort(first)][: MOST_CALLS * 4].tolist()
    numbers = [columns[name] for name in ("Src Rank", "Dst Rank")]
    return [OpenCall(int(group[r]), int(seq[r]), str(kinds[r]), int(at[r]), int(numbers[0][r]), int(numbers[1][r])) for r in rows]


def _keys(group: object, seq: object, p2p: object) -> Int64Array:
    """One number for a group, a sequence number, and whether that counts messages."""
    parts = [np.asarray(part, np.int64) for part in (group, seq, p2p)]
    return np.asarray((parts[1] * 2 + parts[2]) * 8192 + parts[0], np.int64)


def _last_called(operations: pd.DataFrame) -> dict[int, int]:
    """Group -> when its last operation that ran was called."""
    launch = operations["launch_ns"].to_numpy()
    called = np.where(launch != NULL, launch, operations["start_ns"].to_numpy())
    groups, which = distinct(operations["group"].to_numpy())
    last = np.full(len(groups), np.iinfo(np.int64).min)
    np.maximum.at(last, which, called)
    return dict(zip(groups.tolist(), last.tolist(), strict=True))


def _without_range(tables: RankTables, operations: pd.DataFrame) -> list[OpenCall]:
    """Calls of c10d on the host, behind the last one that ran, that no range of the backend belongs to."""
    if not operations["kernel"].astype("str").str.startswith(HOST_BACKENDS).any():
        return []
    rows = tables.rows(Category.OPERATOR, Category.USER_ANNOTATION)
    kinds = tables.each_text(tables.name[rows], _kind_of_call, object)
    known = np.flatnonzero((kinds != "") & (tables.ts[rows] != NULL))
    at = tables.ts[rows[known]]
    launch = operations["launch_ns"].to_numpy()
    behind = at > max(launch.max(initial=NULL), NULL)
    started: BoolArray = np.isin(at, operations["start_ns"].to_numpy())
    chosen = known[behind & ~started & ~np.isin(at, launch)]
    groups = np.unique(operations["group"].to_numpy())
    group = int(groups[0]) if len(groups) == 1 else -1
    found = [OpenCall(group, NULL, str(kinds[r]), int(tables.ts[rows[r]]), NULL, NULL) for r in chosen[:MOST_CALLS].tolist()]
    return [call for number, call in enumerate(found) if not number or call.kind != found[number - 1].kind]


def _kind_of_call(text: str) -> str:
    if not text.startswith("c10d::"):
        return ""
    return (kind_of_operator(text) or "") if "barrier" not in text else ""


def _last_of_groups(operations: pd.DataFrame) -> dict[int, int]:
    """The last operation of each group, and when it was called."""
    launch = operations["launch_ns"].to_numpy()
    groups, which = distinct(operations["group"].to_numpy())
    order = np.argsort(operations["start_ns"].to_numpy(), kind="stable")
    last = np.zeros(len(groups), np.int64)
    last[which[order]] = order  # of each group the last one stays
    return {int(place): int(launch[place]) for place in last[:MOST_SITES].tolist() if launch[place] != NULL}


class _MainThread:
    """What the main thread does at a moment: the thread with the most Python functions, else with the most ranges."""

    def __init__(self, tables: RankTables, since: int) -> None:
        """``since``: nobody will ask for a moment before."""
        rows = tables.rows(Category.PYTHON)
        if not len(rows):
            rows = tables.rows(Category.USER_ANNOTATION, Category.OPERATOR)
        rows = rows[(tables.dur[rows] > 0) & (tables.ts[rows] != NULL)]
        lanes = tables.lane[rows]
        main = np.bincount(lanes).argmax() if len(rows) else 0
        end = tables.ts[rows] + np.minimum(tables.dur[rows], _LONGEST_NS)
        chosen = (lanes == main) & (end > since)
        self._tables, self._rows, self._end = tables, rows[chosen], end[chosen]
        self._start = tables.ts[self._rows]

    def at(self, time: int) -> list[Frame]:
        """The stack at a moment, innermost frame first."""
        inside = np.flatnonzero((self._start <= time) & (time < self._end))
        order = inside[np.lexsort((self._end[inside], -self._start[inside]))]
        return [_frame(self._tables.text(int(code))) for code in self._tables.name[self._rows[order[:MOST_FRAMES]]].tolist()]

    def site(self, time: int) -> str:
        """The line of code outside of libraries; '' where the trace has no Python functions."""
        own = next((frame for frame in self.at(time) if frame.file and not is_library(frame.file)), None)
        return f"{own.file}:{own.line}" if own is not None else ""


def _frame(text: str) -> Frame:
    match = _FRAME.match(text)
    return Frame(match["name"], match["file"], int(match["line"])) if match else Frame(text[:300], "", 0)
