"""Hops of a ring of context parallelism: how many, how long, and how much of them compute hides.

hops    = receives of one rank and step along the axis
hop     = median transfer (latest start to end) of a receive with its send    [ns]
overlap = 1 - exposed / busy of the axis, mean step                           as in ``overlap``
"""

from __future__ import annotations

import pandas as pd

from tracekit.findings import Finding, Subject
from tracekit.job.model import Job
from tracekit.units import NULL, format_ns, plural


def ring_hops(job: Job) -> dict[str, tuple[float, float | None]]:
    """Axis -> (hops of a rank and step, median hop [ns]; None where none was seen on both sides)."""
    rows = job.operations
    rows = rows[(rows["purpose"] == "context_parallel") & (rows["kind"] == "recv") & (rows["step_number"] != NULL)]
    found: dict[str, tuple[float, float | None]] = {}
    for axis, own in rows.groupby("axis", observed=True):
        matched = own["match"][own["match"] >= 0].to_numpy()
        transfer = job.matches["transfer_ns"].to_numpy()[matched]
        transfer = transfer[transfer != NULL]
        steps = len(own[["rank", "window", "step_number"]].drop_duplicates())
        found[str(axis)] = (len(own) / steps, float(pd.Series(transfer).median()) if len(transfer) else None)
    return found


def ring_findings(hops: dict[str, tuple[float, float | None]], axes: pd.DataFrame, span: str) -> list[Finding]:
    """One sentence a ring. ``axes``: mean ``busy_ns`` and ``exposed_ns`` by axis."""
    found = []
    for axis, (count, hop) in hops.items():
        busy, exposed = (float(axes[name].get(axis, 0.0)) for name in ("busy_ns", "exposed_ns"))
        if busy <= 0:
            continue
        each = f", {format_ns(hop)} each once both sides are there" if hop is not None else ""
        text = f"Ring of context parallelism along {axis}: {plural(round(count), 'hop')} a rank and {span.removeprefix('a ')}{each}; "
        text += f"{1 - exposed / busy:.0%} of their time is overlapped."
        evidence = f"receives along {axis}, exposed_by_axis"
        found.append(Finding("overlap.ring", "info", text, 1 - exposed / busy, "share", evidence, subject=Subject(axis=axis)))
    return found
