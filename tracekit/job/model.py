"""A whole job: the compact tables of all ranks, joined. This is what an analysis gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

from tracekit.job.activity import Window
from tracekit.job.packed import unpacked
from tracekit.job.runs import Run
from tracekit.mesh.mesh import Mesh
from tracekit.mesh.process_groups import ProcessGroups
from tracekit.notes import Note
from tracekit.readers.hang_files import HangFile
from tracekit.trace.clock import Clock
from tracekit.trace.events import Coverage

if TYPE_CHECKING:
    from tracekit.job.standstill import Standstill


@dataclass
class Job:
    """All ranks of one training job.

    ``windows`` are the files that could be used, sorted by (rank, start); a rank has several where the profiler ran several times.
    Ranks of which there is only a memory snapshot have a window without events; these are the last ones.
    ``operations`` and ``matches`` have the schemas of the same name. ``steps`` are step numbers that every present rank recorded whole.
    ``notes`` are what is to be told of the job as a whole ("2 of 4 ranks were read ...").
    ``hang_files`` are flight recorder dumps, Python stacks and NCCL logs beside the traces.
    ``standstill``: what the traces alone tell of a job that hangs, None where nothing does.
    ``held`` keeps results of analyses that others build on; ``what_if`` are the scenarios that a user asked for. ``settled``: reading the
    same files again would give the same job; not where a file was lost to too little memory or a killed worker.
    """

    world_size: int | None
    ranks: list[int]
    missing_ranks: list[int]
    backend: str
    device: str
    steps: list[int]
    windows: list[Window]
    groups: ProcessGroups
    mesh: Mesh
    clock: Clock
    operations: pd.DataFrame
    matches: pd.DataFrame
    coverage: list[Coverage]
    notes: list[Note] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)  # all that were found, where this job was chosen among several
    hang_files: list[HangFile] = field(default_factory=list)
    standstill: Standstill | None = None
    held: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    what_if: tuple[str, ...] = ()
    node_of: Mapping[int, str] | None = None  # node of each rank, as far as known
    settled: bool = True

    @property
    def traced(self) -> list[Window]:
        """The windows that hold events."""
        return [window for window in self.windows if window.has_events]

    @property
    def unread(self) -> int:
        """How many ranks of the job are not known: missing, not chosen (``--ranks``), or without anything of their device."""
        known = {window.rank for window in self.traced if window.device_read}
        return max(len(self.missing_ranks), (self.world_size or len(self.ranks)) - len(known))

    def reduced(self, analysis: str) -> Iterator[tuple[int, int, Any]]:
        """(rank, window index, what reduce() returned) of one analysis, in order of the windows."""
        for index, window in enumerate(self.windows):
            if analysis in window.reduced and window.rank is not None:
                yield window.rank, index, unpacked(window.reduced[analysis])

    def aligned(self, window: int, times: Any) -> Any:
        """Times [ns] of a window's own clock on the job's clock."""
        rank = self.windows[window].rank
        return self.clock.of(-1 if rank is None else rank, times)
