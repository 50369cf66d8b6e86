"""Communication that nothing recognises: long kernels on a stream of their own, in a job of several ranks that seems not to communicate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tracekit.findings import Finding
from tracekit.job.activity import Activity, Work
from tracekit.trace.codes import distinct_rows
from tracekit.trace.steps import StepTimes
from tracekit.units import NS_PER_US, format_ns, shortened

#: Communication that covers less than this share of the steps is little.
LITTLE = 0.02
#: A stream of its own is busy for this share of the steps, with kernels at least this long in the mean.
_BUSY_SHARE, _LONG_NS = 0.05, 100 * NS_PER_US
_MOST_NAMES = 3

Suspects = tuple[tuple[str, int], ...]


def suspects(activity: Activity, times: StepTimes, comm_ns: int) -> Suspects:
    """(name, time [ns]) of the kernels that may be communication, longest first; none where enough communication is recognised."""
    device = activity.device
    length = int((times.end - times.start).sum())
    if activity.on_cpu or length <= 0 or comm_ns >= LITTLE * length:
        return ()
    kernels = device.where((device.work == Work.COMPUTE) & ~device.suspicious)
    if not len(kernels):
        return ()
    stream = distinct_rows(kernels.device, kernels.stream)[1]
    duration = (kernels.end - kernels.start).astype(np.float64)
    busy, count = np.bincount(stream, duration), np.bincount(stream)
    own = (np.arange(len(busy)) != int(busy.argmax())) & (busy >= _BUSY_SHARE * length) & (busy >= _LONG_NS * count)
    chosen = np.flatnonzero(own[stream])
    names, inverse = np.unique(kernels.name[chosen], return_inverse=True)
    total = np.bincount(inverse, duration[chosen], minlength=len(names)) if len(chosen) else np.zeros(0)
    order = np.argsort(-total, kind="stable")[:_MOST_NAMES]
    return tuple((activity.tables.text(int(names[i])), int(total[i])) for i in order)


def finding(found: Sequence[Suspects], world_size: int | None, comm_ns: int, step_ns: int) -> Finding | None:
    """What to say of the suspects of all windows; None where there are none, or where the job is one rank's."""
    total: dict[str, int] = {}
    for name, ns in (pair for of_window in found for pair in of_window):
        total[name] = total.get(name, 0) + ns
    if not total or (world_size or 1) < 2 or step_ns <= 0 or comm_ns >= LITTLE * step_ns:
        return None
    names = sorted(total, key=lambda name: -total[name])[:_MOST_NAMES]
    listed = ", ".join(f"{shortened(name.partition('(')[0])} ({format_ns(total[name])})" for name in names)
    little = "no communication is" if not comm_ns else f"communication is only {comm_ns / step_ns:.1%} of a step as"
    return Finding(
        "breakdown.communication_not_recognised",
        "critical",
        f"In this job of {world_size} ranks {little} recognised, while long kernels run on a stream of their own: {listed}. "
        "They may be communication; they count as compute until they are named.",
        value=sum(total.values()) / NS_PER_US,
        unit="us",
        evidence="the kernel table; streams of the timeline",
        advice="Name them, for example --communication 'my_exchange.*=all_to_all:ep', or put the pattern under [communication] in a "
        "tracekit.toml.",
        weight_ns=max(step_ns, 1),
    )
