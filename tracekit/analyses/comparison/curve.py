"""Memory over one step, predicted beside measured: the model's allocations by category as areas, what was allocated as a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tracekit.analyses.comparison.memory import moment_like
from tracekit.analyses.comparison.predicted import Prediction
from tracekit.estimate.timeline import CATEGORIES
from tracekit.findings import StackedArea
from tracekit.job.model import Job
from tracekit.memory.summary import Curve, DeviceMemory
from tracekit.units import NS_PER_US

_NOTE = "The model has no clock: its moments stand evenly before and behind the one that is most like the measured peak."


def over_one_step(job: Job, predictions: Sequence[Prediction], memory: Mapping[int, DeviceMemory]) -> StackedArea | None:
    """The step of the peak, of the rank with the highest measured peak; None where a step, a curve or the model's moments are missing."""
    known = [p for p in predictions if p.moments and p.rank in memory and memory[p.rank].timed and memory[p.rank].curve is not None]
    if not known:
        return None
    chosen = max(known, key=lambda p: memory[p.rank].peak or 0)
    found = memory[chosen.rank]
    span = _span(job, chosen.rank, found.peak_step)
    moment = moment_like(chosen, found.categories)
    assert found.curve is not None
    if span is None or found.peak_ns is None or moment is None or not span[0] <= found.peak_ns < span[1]:
        return None
    times = moment_times(len(chosen.moments), chosen.moments.index(moment), span, found.peak_ns)
    series = {
        name.replace("_", " "): [float(each.bytes[name]) for each in chosen.moments]
        for name in CATEGORIES
        if any(each.bytes[name] for each in chosen.moments)
    }
    measured: list[float | None] = [float(size) for size in most_allocated(found.curve, times, span[1])]
    x = ((times - span[0]) / NS_PER_US).tolist()
    title = f"Memory of rank {chosen.rank} over step {found.peak_step}: predicted (areas) and measured (line)"
    return StackedArea(title, x, series, "bytes", {"measured": measured}, [((found.peak_ns - span[0]) / NS_PER_US, "peak")], _NOTE)


def _span(job: Job, rank: int, step: int | None) -> tuple[int, int] | None:
    """Begin and end of a step of a rank on the job's clock [ns]."""
    for index, window in enumerate(job.windows):
        if window.rank == rank and step is not None:
            for position in np.flatnonzero(window.steps.number == step)[:1]:
                begin, end = (int(job.aligned(index, column[position])) for column in (window.steps.start, window.steps.end))
                return begin, end
    return None


def moment_times(count: int, anchor: int, span: tuple[int, int], peak: int) -> npt.NDArray[np.int64]:
    """Times of ``count`` moments [ns]: evenly from the begin of ``span`` to moment ``anchor`` at ``peak``, and from there to its end."""
    top, end = peak - span[0], span[1] - span[0]  # small enough to be exact as floating-point numbers
    before = np.linspace(0, top, anchor + 1)[:-1] if anchor else np.array([])
    behind = np.linspace(top, end, count - anchor + 1)[:-1]
    return span[0] + np.concatenate([before, behind]).astype(np.int64)


def most_allocated(curve: Curve, times: npt.NDArray[np.int64], end: int) -> npt.NDArray[np.int64]:
    """The most that was allocated from each time until the next one [bytes]; what stands when the time begins included."""
    edges = np.searchsorted(curve.time, np.append(times, end), side="right")
    starts = np.maximum(edges[:-1] - 1, 0)
    return np.array([curve.allocated[low : max(low + 1, high)].max() for low, high in zip(starts, edges[1:], strict=True)], np.int64)
