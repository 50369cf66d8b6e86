"""Lines of time: what collectives of a class cost by their axis' fitted line; step, exposed communication and MFU by the device's figures.

Of a device that is no preset (a CPU) no bandwidth and no peak FLOP/s are known: its lines are not measured, and say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tracekit.analyses import breakdown
from tracekit.analyses.collectives.links import Link, cost
from tracekit.analyses.comparison.lines import NOT_MEASURED, TIME, Line, line
from tracekit.analyses.comparison.predicted import Prediction
from tracekit.errors import UsageError
from tracekit.estimate.estimate import Estimate, estimate
from tracekit.estimate.hardware import Hardware
from tracekit.job.model import Job
from tracekit.units import NS_PER_US, microseconds

#: Microseconds of a second.
_US = 1e6
_NO_LINE = "the axis has no fitted line: messages between two ranks, or too few collectives"
_ASSUMED = "the model assumes that half the peak FLOP/s are reached while computing, and that compute hides gathers and reductions"


def class_times(job: Job, found: Sequence[Link]) -> list[Line]:
    """Median transfer of the calls of every class of matched collectives, beside what its axis' line says of calls of that size."""
    by_axis = {link.axis: link for link in found}
    matches = job.matches[job.matches["complete"] & (job.matches["transfer_ns"] > 0)]
    purposes = _purposes(job)
    classes: dict[tuple[str, str, str], list[tuple[int, int, int]]] = {}
    columns = (matches.index, matches["group"], matches["kind"], matches["full_bytes"], matches["transfer_ns"])
    for index, group, kind, full, transfer in zip(*columns, strict=True):
        if group >= 0 and full > 0 and index in purposes:
            key = (job.groups[group].axis, str(kind), purposes[index])
            classes.setdefault(key, []).append((job.groups[group].size, int(full), int(transfer)))
    lines = []
    for (axis, kind, purpose), calls in sorted(classes.items()):
        name, link = f"collectives.{axis or 'unknown'}.{kind}.{purpose}.time", by_axis.get(axis)
        transfers = np.array([transfer for *_, transfer in calls], np.float64) / NS_PER_US
        measured = float(np.median(transfers))
        costs = [cost(link, kind, size, full) for size, full, _ in calls] if link is not None else [None]
        if any(each is None for each in costs):
            why = link.problem if link is not None and link.problem else _NO_LINE
            lines.append(Line(name, None, None, measured, "us", NOT_MEASURED, why, TIME))
        else:
            why = f"calls of this class took {transfers.min():.0f} to {transfers.max():.0f} us: the axis' line is that of all its classes"
            lines.append(line(name, None, float(np.median([each for each in costs if each is not None])), measured, "us", why, TIME))
    return lines


def _purposes(job: Job) -> dict[int, str]:
    """Match -> purpose of its collective."""
    rows = job.operations[job.operations["match"] >= 0].drop_duplicates("match")
    return {int(match): str(purpose) for match, purpose in zip(rows["match"], rows["purpose"], strict=True)}


def step_times(job: Job, predictions: Sequence[Prediction], hardware: Hardware | None) -> list[Line]:
    """Time of a step, communication that nothing hides, and model FLOP utilisation, of the whole job."""
    if not predictions:
        return []
    step_us, exposed_us = _measured(job)
    predicted, why = _estimate(predictions, hardware, job)
    if predicted is None or hardware is None:
        measured: Mapping[str, tuple[float | None, str]] = {"step.time": (step_us, "us"), "step.exposed_comm": (exposed_us, "us")}
        lines = [Line(name, None, None, value, unit, NOT_MEASURED, why, TIME) for name, (value, unit) in measured.items()]
        return [*lines, Line("step.mfu", None, None, None, "share", NOT_MEASURED, why, TIME)]
    peak = hardware.peak_flops(predicted.plan.recipe.compute) * predicted.plan.mesh.world
    reached = predicted.model_flops / (step_us / _US * peak) if step_us else None
    return [
        line("step.time", None, predicted.step.total * _US, step_us, "us", _ASSUMED, TIME),
        line("step.exposed_comm", None, predicted.step.exposed * _US, exposed_us, "us", _ASSUMED, TIME),
        line("step.mfu", None, predicted.model_flops / (predicted.step.total * peak), reached, "share", _ASSUMED, TIME),
    ]


def _estimate(predictions: Sequence[Prediction], hardware: Hardware | None, job: Job) -> tuple[Estimate | None, str]:
    """(the whole job's estimate, '') or (None, why there is none)."""
    if hardware is None:
        device = job.device or predictions[0].manifest.device or "unknown"
        return None, f"neither peak FLOP/s nor bandwidth of the device ({device}) is known to the model"
    found = predictions[0].found
    if found is None or found.shape is None:
        return None, "the model's FLOP are not known: its manifest describes no transformer"
    try:
        return estimate(found.shape, found.plan, hardware), ""
    except UsageError as error:
        return None, error.problem


def _measured(job: Job) -> tuple[float | None, float | None]:
    """(mean length of a step, mean communication a step that no compute covers) over ranks and steps [us]."""
    mean = breakdown.analyze(job).mean_step.iloc[0]
    return microseconds(mean["step_ns"]), microseconds(mean["exposed_comm_ns"])
