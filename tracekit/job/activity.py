"""What one window of one rank did, linked: the tables that a per-rank analysis looks at.

``Activity`` lives only where its file is read (one worker holds one at a time); what goes on to the job is ``Window``, which is small.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

import numpy as np
import pandas as pd

from tracekit.job.ending import Ending
from tracekit.job.lost import NOTHING_LOST, Lost
from tracekit.manifest import Manifest
from tracekit.memory.summary import DeviceMemory
from tracekit.mesh.process_groups import LocalGroup
from tracekit.readers.identity import Identity
from tracekit.trace.events import BoolArray, Coverage, Int8Array, Int32Array, Int64Array, RankTables
from tracekit.trace.steps import Phases, Steps


class Work(IntEnum):
    """What a device (on CPU jobs: a host thread) is busy with."""

    COMPUTE = 0
    COMMUNICATION = 1
    COPY = 2  # memcpy and memset


@dataclass(frozen=True)
class DeviceWork:
    """Work on the device, sorted by start. All arrays have one entry a piece of work; times are Unix ns on the rank's clock.

    Accelerator jobs: one row a kernel, memcpy or memset. CPU jobs (``on_cpu``): one row a top-level operator (COMPUTE) or a backend's
    communication (COMMUNICATION). ``end`` is cleaned: an impossible duration
    ends after the usual one of its name, or where the next work of its stream starts.
    """

    row: Int64Array  # row in the events table
    start: Int64Array
    end: Int64Array
    work: Int8Array  # Work
    name: Int32Array  # code into tables.strings
    stream: Int32Array
    device: Int32Array
    launch_row: Int64Array  # events row of the launching host call; -1 unknown
    launch_ts: Int64Array  # its start; NULL unknown
    operator_row: Int64Array  # events row of the innermost operator around the launch; -1
    step: Int32Array  # index into steps by start; -1 outside
    launch_step: Int32Array  # index into steps by launch; -1 unknown or outside
    operation: Int32Array  # row of Activity.operations for COMMUNICATION; -1
    suspicious: BoolArray  # the duration in the file was impossible

    def __len__(self) -> int:
        return len(self.row)

    def where(self, chosen: BoolArray) -> DeviceWork:
        """Only the chosen pieces of work."""
        return DeviceWork(**{field_.name: getattr(self, field_.name)[chosen] for field_ in fields(self)})

    def of(self, work: Work) -> tuple[Int64Array, Int64Array]:
        """(start, end) of one kind of work, sorted by start."""
        chosen = self.work == work
        return self.start[chosen], self.end[chosen]


@dataclass(frozen=True)
class Activity:
    """One window of one rank, linked.

    ``operations`` has schema.LOCAL_OPERATIONS; ``groups`` are what this rank knows of its process groups.
    """

    tables: RankTables
    steps: Steps
    phases: Phases
    device: DeviceWork
    operations: pd.DataFrame
    groups: list[LocalGroup]
    on_cpu: bool
    window: tuple[int, int]  # first start and last end of what happened, ns
    manifest: Manifest | None = None  # what the recorder wrote beside the trace
    chosen: bool = False  # ``steps`` are some of the trace's steps, as the user wanted
    lost: Lost = NOTHING_LOST  # what of the device's work is not in the trace
    ending: Ending | None = None  # how the trace ends; None where only some steps were chosen

    @property
    def coverage(self) -> Coverage:
        """Where problems with this file are noted."""
        return self.tables.coverage


@dataclass
class Window:
    """The compact result of reading one file: picklable, a few MB at most whatever the size of the trace.

    A window may hold events, what a snapshot or a raw memory timeline of its rank tells, or both.
    """

    coverage: Coverage
    identity: Identity  # what the file itself says: rank and where that stands, world size, backend, device, host, process
    rank: int | None  # the rank that the whole job gives it
    on_cpu: bool
    span: tuple[int, int]
    steps: Steps
    groups: list[LocalGroup]
    operations: pd.DataFrame
    reduced: dict[str, Any] = field(default_factory=dict)  # analysis name -> what its reduce() returned, ``Packed`` in large jobs
    manifest: Manifest | None = None  # without the columns of single storages and collectives, which stay where the file was read
    memory: list[DeviceMemory] = field(default_factory=list)  # by snapshots and raw timelines of this rank
    has_events: bool = True
    partial: BoolArray = field(default_factory=lambda: np.empty(0, np.bool_))  # of each step: work of it was lost; empty: of none
    device_read: bool = True  # False: the job ran on a device of which nothing was recorded or read
    ending: Ending | None = None  # how the trace ends; None where only some steps were chosen
