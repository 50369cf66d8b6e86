"""Record a workload with the command a user types, and count what its trace shows, as ``tracekit analyze`` reads it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tracekit import analyses
from tracekit.analyses import comparison
from tracekit.analyses.comparison.lines import MATCH
from tracekit.job.load import LoadOptions, load_job
from tracekit.job.model import Job
from tracekit.manifest import Expected, Manifest

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: pip install 'tracekit[record]'")

#: (kind, axis, purpose) -> (calls, full bytes) of one rank and step.
Counted = dict[tuple[str, str, str], tuple[int, int]]


@dataclass(frozen=True)
class Recording:
    """A recorded job, read by the analyzer."""

    folder: Path
    job: Job
    output: str

    @property
    def manifests(self) -> dict[int, Manifest]:
        """Manifest of each rank."""
        return {w.rank: w.manifest for w in self.job.windows if w.rank is not None and w.manifest is not None}

    def counted(self, rank: int, step: int) -> Counted:
        """What one rank called in one step."""
        operations = self.job.operations
        own = operations[(operations["rank"] == rank) & (operations["launch_step_number"] == step)]
        calls: Counter[tuple[str, str, str]] = Counter()
        sizes: Counter[tuple[str, str, str]] = Counter()
        for kind, group, purpose, full in zip(own["kind"], own["group"], own["purpose"], own["full_bytes"], strict=True):
            key = (str(kind), self.job.groups[group].axis if group >= 0 else "", str(purpose))
            calls[key] += 1
            sizes[key] += int(full)
        return {key: (calls[key], sizes[key]) for key in calls}


def run(*arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """``tracekit`` with these arguments in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "tracekit", *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def record(folder: Path, workload: str, *arguments: str) -> Recording:
    """Run a workload under the recorder and read what it left."""
    done = run("record", workload, "-o", str(folder), *arguments)
    return Recording(folder, load_job([str(folder)], LoadOptions()), done.stdout + done.stderr)


def job_of(workload: ModuleType, arguments: Sequence[str], rank: int = 0) -> tuple[Any, Any]:
    """(Job, options) of one rank as the command line makes them, without a process group: what formulas of sizes need."""
    import torch
    from tracekit.workloads.common.job import Job
    from tracekit.workloads.common.settings import mesh_sizes, parse
    from tracekit.workloads.common.transformer import Shape

    settings, options = parse(workload, arguments)
    sizes, device = mesh_sizes(workload, settings), torch.device("cpu")
    shape = Shape(**{f.name: getattr(settings, f.name) for f in fields(Shape)})
    mesh = _Place(sizes, rank)
    return Job(settings, shape, sizes, mesh, device, rank), options  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Place:
    """Knows the coordinates of a rank, as a DeviceMesh would."""

    sizes: dict[str, int]
    rank: int

    def get_local_rank(self, axis: str) -> int:
        rank = self.rank
        for name, size in reversed(self.sizes.items()):
            rank, place = divmod(rank, size)
            if name == axis:
                return place
        raise KeyError(axis)


def as_counted(expected: list[Expected]) -> Counted:
    """A workload's own statement in the form of ``Recording.counted``; -1 bytes where one of its lines does not state them."""
    calls: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    for line in expected:
        if line.count:
            calls[line.kind, line.axis, line.purpose] += line.count
            sizes[line.kind, line.axis, line.purpose] += line.full_bytes
    unstated = {(line.kind, line.axis, line.purpose) for line in expected if line.full_bytes < 0}
    return {key: (calls[key], -1 if key in unstated else sizes[key]) for key in calls}


def as_stated(seen: Counted, stated: Counted) -> Counted:
    """``seen`` without the bytes that are not stated."""
    return {key: (calls, -1 if stated.get(key, (0, 0))[1] == -1 else size) for key, (calls, size) in seen.items()}


def check(recording: Recording) -> None:
    """Every rank shows in every recorded step exactly the collectives that the workload states; nothing is unmatched or without purpose."""
    assert recording.manifests, "no manifest was read"
    for rank, manifest in recording.manifests.items():
        for step in manifest.steps:
            stated = as_counted(manifest.expected)
            assert as_stated(recording.counted(rank, step), stated) == stated, f"rank {rank}, step {step}"
    operations = recording.job.operations
    in_steps = operations[operations["launch_step_number"] >= 0]
    assert not (in_steps["purpose"] == "unknown").any()
    assert all(group.axis for group in recording.job.groups.groups if group.size > 1)


def check_model(recording: Recording) -> None:
    """The analytical model predicts calls and bytes of every class exactly, and the peak of every rank within what counts as a match."""
    job = load_job([str(recording.folder)], LoadOptions(), analyses.reducers())
    lines = comparison.analyze(job).lines
    found = {line.quantity: line for line in lines if line.rank == 0}
    assert "memory.peak" in found and any(name.endswith(".calls") for name in found)
    exact = [line for line in lines if line.quantity.endswith((".calls", ".bytes"))]
    assert [(line.quantity, line.rank, line.predicted, line.measured) for line in exact if line.predicted != line.measured] == []
    assert [(line.rank, line.predicted, line.measured) for line in lines if line.quantity == "memory.peak" and line.verdict != MATCH] == []


def check_matches(recording: Recording) -> None:
    """All ranks were recorded, and every collective of theirs found its others."""
    operations = recording.job.operations
    in_steps = operations[operations["launch_step_number"] >= 0]
    assert (in_steps["match"] >= 0).all()
    assert recording.job.matches["complete"].all()
