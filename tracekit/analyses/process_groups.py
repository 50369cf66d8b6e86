"""Every process group of the job: who is in it, along which mesh axis, how much it communicates and how much of that is exposed.

Per group, over the whole trace (not only its steps):

    operations   communication operations of its ranks: one collective over 8 ranks is 8 operations [count]
    sent_bytes   sum of what each rank sends under the ring algorithm, over the operations whose size is known [bytes]
    busy         per rank the union of the group's operations, summed over ranks [ns]
    exposed      of busy, what no compute on the same rank covers [ns]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from tracekit.analyses import _exposed
from tracekit.analyses._common import UNKNOWN_AXIS
from tracekit.analyses._group_maps import LARGEST_MAP, maps, members_of, ranks_of
from tracekit.findings import Chart, Finding, Section, Table
from tracekit.job.model import Job
from tracekit.mesh.process_groups import ProcessGroup
from tracekit.schema import Column, table
from tracekit.trace import intervals
from tracekit.trace.codes import distinct_rows
from tracekit.trace.events import Int64Array
from tracekit.units import NULL

ORDER = 30

_NO_SIZE, _NOT = "no size is recorded", "not measured in this run"
_NO_HOSTS = "hosts are not recorded; --gpus-per-node tells"

PROCESS_GROUPS = table(
    "process_group_use",
    ("group", "int32", "", "index into job.groups"),
    Column("operations", "int64", "", "of all its ranks that were read: a collective over 8 ranks counts 8", "Operations", "operations"),
    ("ranks_seen", "int64", "", "ranks on which it communicates"),
    Column("sent_bytes", "int64", "bytes", "sum over ranks and operations of known size", "Sent, all ranks", "sent_bytes", _NO_SIZE),
    Column("unknown_bytes", "int64", "", "operations that `sent_bytes` lacks", "", "operations_of_unknown_size"),
    Column("step_operations", "int64", "", "operations that start inside a step (all where no steps are marked)", "", "step_operations"),
    Column("step_sent_bytes", "int64", "bytes", "what those of known size send", "", "step_sent_bytes", _NO_SIZE),
    Column("busy_ns", "int64", "ns", "time in which the group communicates, each rank's, summed", "Busy, all ranks", "busy_us", _NOT),
    Column("exposed_ns", "int64", "ns", "of it, what no compute covers", "Exposed, all ranks", "exposed_us", _NOT),
)
#: The same beside what the group is.
REPORTED = table(
    "process_groups",
    Column("id", "str", "", "identifies the group in this document", "Group", "id"),
    Column("name", "str", "", "as torch has it; several groups may share a name", "", "name"),
    Column("description", "str", "", "as torch has it", "Description", "description"),
    Column("ranks", "object", "", "global ranks", "", "ranks", "the list was cut and could not be rebuilt"),
    Column("known_ranks", "object", "", "the members that are known, the whole list where `ranks` is", "", "known_ranks"),
    Column("size", "int64", "", "how many members", "Size", "size", "not recorded"),
    Column("axis", "str", "", "mesh axis, several joined by `_`, or `world`", "Axis", "axis", "not known", UNKNOWN_AXIS),
    Column("members", "str", "", "the members in short", "Ranks"),
    Column("spans_nodes", "object", "", "members on several hosts", "Spans nodes", "spans_nodes", _NO_HOSTS),
    *PROCESS_GROUPS.columns[1:],
)
_SHOWN = ("id", "description", "axis", "size", "members", "spans_nodes", "operations", "sent_bytes", "busy_ns", "exposed_ns")


@dataclass(frozen=True)
class GroupUse:
    """``groups`` are the job's; ``use`` has schema PROCESS_GROUPS, one row a group in the same order; ``world`` ranks of the maps."""

    groups: list[ProcessGroup]
    use: pd.DataFrame
    world: list[int]

    def findings(self) -> list[Finding]:
        """Groups that carry most of the exposed communication across nodes."""
        crossing = [i for i, group in enumerate(self.groups) if group.spans_nodes and group.axis in ("tp", "etp")]
        if not crossing:
            return []
        group = self.groups[crossing[0]]
        text = f"Tensor-parallel groups span nodes (process group {group.id}, ranks {members_of(group)})."
        advice = "Place this axis innermost so that its ranks share a node: it communicates in every layer."
        return [
            Finding(
                "process_groups.placement",
                "warning",
                text,
                float(len(crossing)),
                "groups",
                "hosts in the traces",
                advice,
                row={"Group": group.id},
            )
        ]

    def sections(self) -> list[Section]:
        """Who is in which group, and what each group costs."""
        if not self.groups:
            return []
        charts: list[Chart] = [self._table(), *maps(self.groups, self.world)]
        lead = "A process group is a set of ranks that communicate with each other; groups along one mesh axis do the same side by side."
        return [Section("Process groups and mesh", lead, charts, name="groups")]

    def json(self) -> dict[str, Any]:
        """``process_groups``: one entry a group, also for groups that were never used."""
        return {"process_groups": REPORTED.records(self._reported)}

    @cached_property
    def _reported(self) -> pd.DataFrame:
        """Schema REPORTED."""
        groups = self.groups
        columns: dict[str, Any] = {
            "id": [group.id for group in groups],
            "name": [group.name for group in groups],
            "description": [group.description for group in groups],
            "ranks": [None if group.ranks is None else list(group.ranks) for group in groups],
            "known_ranks": [list(ranks_of(group)) for group in groups],
            "size": np.array([group.size or NULL for group in groups], np.int64),
            "axis": [group.axis for group in groups],
            "members": [members_of(group) for group in groups],
            "spans_nodes": pd.Series([group.spans_nodes for group in groups], dtype=object),
        }
        return self.use.assign(**columns)

    def _table(self) -> Table:
        return Table.of("Groups", REPORTED, self._reported.sort_values("busy_ns", ascending=False, kind="stable"), _SHOWN)


def _inside_steps(job: Job, size: int) -> dict[str, Int64Array]:
    """Operations of each group that start inside a step, and the bytes that they send."""
    part = job.operations[job.operations["group"] >= 0]
    if (job.operations["step_number"] != NULL).any():
        part = part[part["step_number"] != NULL]
    group, sent = part["group"].to_numpy().astype(np.int64), part["sent_bytes"].to_numpy()
    count = np.bincount(group, minlength=size)
    recorded = sent != NULL
    sums = np.zeros(size, np.int64)
    np.add.at(sums, group[recorded], sent[recorded])
    unknown = (np.bincount(group[recorded], minlength=size) == 0) & (count > 0)
    return {"step_operations": count.astype(np.int64), "step_sent_bytes": np.where(unknown, NULL, sums)}


def analyze(job: Job) -> GroupUse:
    """Count and measure the communication of every process group."""
    operations = job.operations
    size = len(job.groups)
    inside = operations["group"].to_numpy() >= 0
    group = operations["group"].to_numpy()[inside].astype(np.int64)
    sent = operations["sent_bytes"].to_numpy()[inside]
    recorded = sent != NULL
    sums = np.zeros(size, np.int64)
    np.add.at(sums, group[recorded], sent[recorded])
    count = np.bincount(group, minlength=size)
    of_known = np.bincount(group[recorded], minlength=size)
    pairs = distinct_rows(group, operations["rank"].to_numpy()[inside])[0]
    busy, exposed = _times(job)
    use = PROCESS_GROUPS.frame(
        {
            "group": np.arange(size),
            "operations": count,
            "ranks_seen": np.bincount(pairs[0], minlength=size),
            "sent_bytes": np.where((of_known > 0) | (count == 0), sums, NULL),
            "unknown_bytes": count - of_known,
            **_inside_steps(job, size),
            "busy_ns": busy,
            "exposed_ns": exposed,
        }
    )
    world = list(range(job.world_size)) if job.world_size and job.world_size <= LARGEST_MAP else job.ranks
    return GroupUse(list(job.groups.groups), use, world)


def _times(job: Job) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int64]]]:
    """(busy, exposed) of each group; exposed is NULL for a group none of whose windows was measured."""
    size = len(job.groups)
    busy, exposed, measured = np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(size, np.bool_)
    for seen in _exposed.windows(job):
        group = job.operations["group"].to_numpy()[seen.rows]
        for number in np.unique(group[group >= 0]):
            own = group == number
            busy[number] += intervals.measure(*seen.busy.where(own).union())
            exposed[number] += intervals.measure(*seen.exposed.where(own).union())
            measured[number] = True
    used = np.bincount(job.operations["group"][job.operations["group"] >= 0], minlength=size) > 0
    return np.where(measured | ~used, busy, NULL), np.where(measured | ~used, exposed, NULL)
