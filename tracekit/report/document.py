"""The JSON of ``tracekit analyze``: the job, what was read of it, and every analysis' figures, as one plain dictionary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from math import isfinite
from typing import Any

import numpy as np
import pandas as pd

from tracekit import __version__
from tracekit.findings import Finding, Result, of_job
from tracekit.job.model import Job
from tracekit.job.runs import Run
from tracekit.notes import sentence, sentences
from tracekit.report.operations import operations_json, time_zero
from tracekit.report.places import Places, chapters_of
from tracekit.report.text import encodable
from tracekit.trace.events import Coverage
from tracekit.units import NULL, microseconds

SCHEMA_VERSION = 1

#: Keys that are always there, in this order; null, with the reason under ``not_measured``, where no analysis gave them.
ANALYSIS_KEYS = (
    "process_groups",
    "collectives",
    "breakdown",
    "exposed_by_axis",
    "stragglers",
    "memory",
    "pipeline",
    "experts",
    "comparison",
    "what_if",
    "critical_path",
)


def document(job: Job, results: Mapping[str, Result], *, operations: bool = False) -> dict[str, Any]:
    """Everything known about the job as plain, finite, UTF-8 values. ``operations`` adds every matched operation.

    Raises ValueError when two analyses give one key: that is a mistake in tracekit.
    """
    given: dict[str, Any] = {}
    not_measured: dict[str, str] = {}
    for name, result in results.items():
        for key, value in result.json().items():
            if key == "not_measured":
                not_measured.update(value)
            elif key in given or key in ("schema_version", "tracekit_version", "job", "coverage", "notes", "runs", "findings"):
                raise ValueError(f"analysis {name} gives the key {key!r}, which is taken")
            else:
                given[key] = clean(value)
    for key in ANALYSIS_KEYS:
        if key not in given:
            not_measured.setdefault(key, "no analysis measured it in this run")
    if operations:
        given["operations"] = operations_json(job)
    return {
        "schema_version": SCHEMA_VERSION,
        "tracekit_version": __version__,
        "job": clean(_job(job)),
        "coverage": [clean(_coverage(entry)) for entry in job.coverage],
        "notes": clean(sentences(job.notes)),
        "runs": [clean(_run(run)) for run in job.runs] or None,
        **{key: given.pop(key, None) for key in ANALYSIS_KEYS},
        **given,
        "not_measured": clean(not_measured),
        "findings": _findings(results),
    }


def clean(value: Any) -> Any:
    """``value`` in JSON's terms: numbers that are not finite or not recorded become None, text becomes encodable, numpy is unpacked."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, (int, np.integer)):
        return None if value == NULL else int(value)
    if isinstance(value, (float, np.floating)):
        return float(value) if isfinite(value) else None
    if isinstance(value, Mapping):
        return {encodable(str(key)): clean(item) for key, item in value.items()}
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.ndarray):
        return clean(value.tolist())
    if value is pd.NA or value is pd.NaT:
        return None
    if isinstance(value, Iterable):
        return [clean(item) for item in value]
    raise TypeError(f"a {type(value).__name__} cannot stand in JSON")


def _job(job: Job) -> dict[str, Any]:
    mesh = job.mesh
    return {
        "world_size": job.world_size,
        "ranks": job.ranks,
        "missing_ranks": job.missing_ranks,
        "backend": job.backend or None,
        "device": job.device or None,
        "nodes": _nodes(job),
        "steps": job.steps,
        "mesh": {
            "axes": [{"name": axis.name, "size": axis.size} for axis in mesh.axes],
            "source": mesh.source,
            "coordinates": {rank: list(place) for rank, place in sorted(mesh.coordinates.items())},
        },
        "clock": {
            "aligned": job.clock.aligned,
            "offset_us": {rank: microseconds(ns) for rank, ns in sorted(job.clock.offset_ns.items())},
            "drift_ppm": {rank: faster * 1e6 for rank, faster in sorted(job.clock.drift.items())},
            "residual_us": microseconds(job.clock.residual_ns),
            "note": sentence(job.clock.note) if job.clock.note else None,
        },
        "time_zero_unix_ns": time_zero(job),
    }


def _nodes(job: Job) -> int | None:
    """Hosts of the ranks that were read; None where a file does not name its host."""
    hosts = {window.identity.host for window in job.windows}
    return len(hosts) if hosts and all(hosts) else None


def _run(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "paths": list(run.paths),
        "ranks": list(run.ranks),
        "world_size": run.world_size,
        "steps": list(run.steps),
        "start": run.start,
        "size_bytes": run.size,
    }


def _coverage(entry: Coverage) -> dict[str, Any]:
    return {
        "file": entry.file,
        "rank": entry.rank,
        "status": entry.status,
        "events": entry.events,
        "arrows": entry.arrows,
        "problems": entry.problems,
    }


def _findings(results: Mapping[str, Result]) -> list[dict[str, Any]]:
    """All findings in order, each with the place of the report that shows it."""
    places = Places(chapters_of(results))
    entries = [(finding, clean(_finding(finding))) for finding in of_job(results)]
    return [{**entry, "evidence_at": clean(places.of({**entry, "row": finding.row}))} for finding, entry in entries]


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.id,
        "severity": finding.severity,
        "text": finding.text,
        "value": finding.value,
        "unit": finding.unit,
        "evidence": finding.evidence,
        "advice": finding.advice,
        "weight_us": finding.weight_ns / 1000,
        "gain_us": microseconds(finding.gain_ns),
        "subject": asdict(finding.subject),
        "consequences": finding.consequences,
    }
