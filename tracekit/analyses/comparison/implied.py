"""What a trace without a manifest implies of itself: the traffic of a sharded group follows from its own reductions.

Of an axis that scatters gradients U times a step, in R bytes, FSDP gathers parameters 2U-1 times (every unit in forward, all but the root
again in backward) or U times (reshard_after_forward=False). All-reduces of gradients (DDP, HSDP) are the same in every step and rank.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd

from tracekit.analyses.comparison.lines import UNSIZED, Line, line
from tracekit.job.model import Job
from tracekit.trace.codes import distinct_rows


def lines(job: Job) -> list[Line]:
    """One pair of lines a sharded axis; [] where no axis gathers parameters and scatters gradients."""
    operations = job.operations
    inside = operations[operations["step_number"] >= 0]
    result = []
    for axis in sorted({str(a) for a in inside["axis"].unique()} - {""}):
        own = inside[inside["axis"] == axis]
        gathers = own[own["purpose"] == "parameter_gather"]
        scatters = own[own["purpose"] == "gradient_scatter"]
        if len(gathers) and len(scatters):
            result += _sharded(axis, _a_step(gathers), _a_step(scatters))
        reductions = own[(own["purpose"] == "gradient_sync") & (own["kind"] == "all_reduce")]
        if len(reductions):
            result += _alike(axis, _by_step(reductions))
    return result


def _by_step(rows: pd.DataFrame) -> Counter[tuple[int, int | None]]:
    """(calls, full bytes) -> how many ranks and steps have so many; None where bytes are not recorded."""
    sizes = rows["full_bytes"].to_numpy()
    _, which = distinct_rows(rows["rank"].to_numpy(), rows["step_number"].to_numpy())
    order = np.argsort(which, kind="stable")
    first = np.flatnonzero(np.append(True, np.diff(which[order]) > 0))
    calls = np.diff(np.append(first, len(order)))
    known = np.minimum.reduceat(sizes[order], first) >= 0
    total = np.add.reduceat(sizes[order], first)
    groups = zip(calls.tolist(), total.tolist(), known.tolist(), strict=True)
    return Counter((n, size if is_known else None) for n, size, is_known in groups)


def _a_step(rows: pd.DataFrame) -> tuple[int, int | None]:
    """(calls, full bytes) of the commonest rank and step."""
    return _by_step(rows).most_common(1)[0][0]


def _alike(axis: str, found: Counter[tuple[int, int | None]]) -> list[Line]:
    """The rank and step that differs most from the commonest; none where there is only one."""
    if sum(found.values()) < 2:
        return []
    usual = found.most_common(1)[0][0]
    odd = max(found, key=lambda each: (abs((each[1] or 0) - (usual[1] or 0)), abs(each[0] - usual[0])))
    name = f"collectives.{axis}.all_reduce.gradient_sync"
    why = "not every step and rank reduces the same gradients: unused parameters, accumulation, or buckets that were cut anew"
    return [
        line(f"{name}.calls", None, usual[0], odd[0], "calls", why),
        line(f"{name}.bytes", None, usual[1], odd[1], "bytes", why if odd[1] is not None else UNSIZED),
    ]


def _sharded(axis: str, gathers: tuple[int, int | None], scatters: tuple[int, int | None]) -> list[Line]:
    units = scatters[0]
    kept = gathers[0] <= units
    expected = units if kept else 2 * units - 1
    name = f"collectives.{axis}.all_gather.parameter_gather"
    why = "units are gathered more than once in each direction: several micro-batches, a root that is gathered again, or recomputation"
    result = [line(f"{name}.calls", None, expected, gathers[0], "calls", why)]
    if scatters[1] and gathers[1]:
        ratio = scatters[1] * gathers[0] / units / gathers[1]
        why = "gradients are reduced in an element type twice as wide as parameters are gathered in (fp32 against 16 bits)"
        other = "units of unequal size, or padding"
        cause = why if 1.8 < ratio < 2.2 else other
        result.append(line(f"{name}.bytes_a_call", None, scatters[1] // units, gathers[1] // gathers[0], "bytes", cause))
    return result
