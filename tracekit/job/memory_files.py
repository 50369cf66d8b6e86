"""Files about memory alone beside the traces: CUDA snapshots and torch's raw memory timelines, each paired with its rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tracekit.errors import InputError, UsageError
from tracekit.memory.raw_timeline import of_rows
from tracekit.memory.summary import DeviceMemory, of_snapshot
from tracekit.readers.evidence import rank_of_name
from tracekit.readers.manifest import read_manifest
from tracekit.readers.memory_timeline import read_timeline
from tracekit.readers.recognise import is_snapshot_name
from tracekit.readers.sources import Source
from tracekit.trace.events import Coverage

if TYPE_CHECKING:
    from tracekit.job.model import Job


@dataclass
class MemoryFile:
    """What one such file tells; picklable and small. ``rank``: by the file's name or its manifest until the job knows better."""

    coverage: Coverage
    rank: int | None
    devices: list[DeviceMemory] = field(default_factory=list)


def read_memory_file(source: Source, progress: Callable[[int], None] | None = None) -> MemoryFile | Coverage:
    """The memory of one rank as a snapshot or a raw timeline tells it; its Coverage alone where the file cannot be used.

    ``progress`` gets the number of stored bytes read of a snapshot since its last call.
    """
    coverage = Coverage(source.url)
    rank = rank_of_name(source.name)
    try:
        if is_snapshot_name(source.name):
            manifest, problem = read_manifest(source)
            if problem:
                coverage.note(problem)
            from tracekit.readers.memory_snapshot import read_snapshot  # compiled code that few jobs need

            snapshot = read_snapshot(source, progress)
            devices = of_snapshot(snapshot, manifest.owners if manifest is not None else None)
            rank = manifest.rank if manifest is not None else rank
            coverage.events = sum(len(device.entries) for device in snapshot.devices)
        else:
            rows = read_timeline(source)
            devices = [of_rows(rows, "cuda" if "cuda" in source.name.lower() else "")]
            coverage.events = len(rows)
    except InputError as error:
        return Coverage(source.url, status="skipped", problems=[str(error)])
    for note in dict.fromkeys(note for device in devices for note in device.notes):
        coverage.note(note)
    coverage.rank = rank
    return MemoryFile(coverage, rank, devices)


def add_memory(job: Job, files: Sequence[MemoryFile], wanted: frozenset[int] | None = None) -> None:
    """Put files about memory into a job. ``wanted``: the ranks a user wants to see."""
    job.coverage = sorted([*job.coverage, *(file.coverage for file in files)], key=lambda entry: entry.file)
    job.notes += [note for note in give_ranks(files, job.ranks) if note not in job.notes]
    used = [file for file in files if file.rank is not None and (wanted is None or file.rank in wanted)]
    job.memory_files = sorted(used, key=lambda file: (file.rank, file.coverage.file))
    if not job.windows and not used:
        there = ", ".join(str(rank) for rank in sorted({file.rank for file in files if file.rank is not None})[:20])
        raise UsageError("no rank of --ranks is in the snapshots", f"there are {there}")
    if not job.windows:
        job.ranks = sorted({file.rank for file in used if file.rank is not None})


def give_ranks(files: Sequence[MemoryFile], ranks: Sequence[int]) -> list[str]:
    """Give every file a rank; returns what has to be said about it. ``ranks`` are those of the traces.

    A file that names none is of the only rank there is, else of the rank that is the number of the one device it speaks of (one node).
    """
    notes = []
    lost = [file for file in files if file.rank is None]
    taken = {file.rank for file in files}
    for file in lost:
        used = {device.device for device in file.devices if device.peak is not None} or {device.device for device in file.devices}
        number = next(iter(used)).rpartition(":")[2] if len(used) == 1 else ""
        if len(lost) == 1 and len(ranks) <= 1 and len(files) == 1:
            file.rank = ranks[0] if ranks else (int(number) if number.isdigit() else 0)
        elif number.isdigit() and int(number) not in taken:
            file.rank = int(number)
        if file.rank is None:
            file.coverage.note("tells no rank: put it into the file's name (rank3_snapshot.pickle)", "skipped")
            continue
        taken.add(file.rank)
        file.coverage.note(f"its name tells no rank: it is taken for rank {file.rank}")
        notes.append(f"{file.coverage.file}: the rank is not in the name; {file.rank} is taken")
    for file in files:
        file.coverage.rank = file.rank
    return notes
