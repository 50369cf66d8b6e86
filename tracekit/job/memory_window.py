"""Files about memory alone: CUDA snapshots and torch's raw memory timelines become windows without events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tracekit import schema
from tracekit.errors import InputError, UsageError
from tracekit.job.activity import Window
from tracekit.memory.raw_timeline import of_rows
from tracekit.memory.summary import DeviceMemory, of_snapshot
from tracekit.notes import note, text_note
from tracekit.readers.evidence import rank_of_name
from tracekit.readers.identity import NAME, NONE, Identity
from tracekit.readers.manifest import read_manifest
from tracekit.readers.memory_timeline import read_timeline
from tracekit.readers.recognise import is_snapshot_name
from tracekit.readers.sources import Source, clean
from tracekit.trace.events import Coverage
from tracekit.trace.steps import Steps


def read_memory_window(source: Source, progress: Callable[[int], None] | None = None, memory_limit: int | None = None) -> Window | Coverage:
    """The memory of one rank as a snapshot or a raw timeline tells it; its Coverage alone where the file cannot be used.

    ``progress`` gets the number of stored bytes read of a snapshot since its last call. Raises MemoryError where a snapshot needs more than
    ``memory_limit`` [bytes] to be read.
    """
    coverage = Coverage(source.url)
    rank = rank_of_name(source.name)
    try:
        if is_snapshot_name(source.name):
            manifest, problem = read_manifest(source)
            if problem:
                coverage.note(text_note(problem))
            from tracekit.readers.memory_snapshot import read_snapshot  # few jobs need it

            snapshot = read_snapshot(source, progress, memory_limit)
            devices = of_snapshot(snapshot, manifest.owners if manifest is not None else None)
            rank = manifest.rank if manifest is not None else rank
            coverage.events = sum(len(device.entries) for device in snapshot.devices)
        else:
            rows = read_timeline(source)
            devices = [of_rows(rows, "cuda" if "cuda" in source.name.lower() else "")]
            coverage.events = len(rows)
    except InputError as error:
        return Coverage(source.url, status="skipped", notes=[text_note(str(error))])
    devices = [replace(device, file=clean(source.url)) for device in devices]
    for device in devices:
        for text in device.notes:
            coverage.note(text_note(text))
    coverage.rank = rank
    return _window(coverage, rank, devices)


def _window(coverage: Coverage, rank: int | None, devices: list[DeviceMemory]) -> Window:
    """``rank``: by the file's name or its manifest, until the job knows better."""
    none = np.empty(0, np.int64)
    return Window(
        coverage=coverage,
        identity=Identity(rank, NONE if rank is None else NAME, {}, None, "", "", "", ""),
        rank=rank,
        on_cpu=False,
        span=(0, 0),
        steps=Steps(none, none, none, "none"),
        groups=[],
        operations=schema.LOCAL_OPERATIONS.empty(),
        memory=devices,
        has_events=False,
    )


def pair(windows: Sequence[Window], traced: Sequence[Window], wanted: frozenset[int] | None = None) -> list[Window]:
    """Give what windows without events tell of memory to the windows of their ranks; those of ranks without any.

    ``traced`` are the job's windows with events, ``wanted`` the ranks a user wants to see. Raises UsageError where nothing at all is left.
    """
    ranks = sorted({window.rank for window in traced if window.rank is not None})
    _give_ranks(windows, ranks)
    used = [window for window in windows if window.rank is not None and (wanted is None or window.rank in wanted)]
    if windows and not traced and not used:
        there = ", ".join(str(rank) for rank in sorted({window.rank for window in windows if window.rank is not None})[:20])
        raise UsageError("no rank of --ranks is in the snapshots", f"there are {there}")
    alone: list[Window] = []
    first = {window.rank: window for window in reversed(traced)}
    for window in sorted(used, key=lambda window: (window.rank, window.coverage.file)):
        if window.rank in first:
            first[window.rank].memory += window.memory
        else:
            alone.append(window)
    return alone


def _give_ranks(windows: Sequence[Window], ranks: Sequence[int]) -> None:
    """Give every window a rank. ``ranks`` are those of the traces.

    A file that names none is of the only rank there is, else of the rank that is the number of the one device it speaks of (one node).
    """
    lost = [window for window in windows if window.rank is None]
    taken = {window.rank for window in windows}
    for window in lost:
        used = {device.device for device in window.memory if device.peak is not None} or {device.device for device in window.memory}
        number = next(iter(used)).rpartition(":")[2] if len(used) == 1 else ""
        if len(lost) == 1 and len(ranks) <= 1 and len(windows) == 1:
            window.rank = ranks[0] if ranks else (int(number) if number.isdigit() else 0)
        elif number.isdigit() and int(number) not in taken:
            window.rank = int(number)
        if window.rank is None:
            window.coverage.note(note("snapshot_without_rank"), "skipped")
            continue
        taken.add(window.rank)
        window.coverage.note(note("snapshot_rank_taken", rank=window.rank))
    for window in windows:
        window.coverage.rank = window.rank
