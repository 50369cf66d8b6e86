"""What a trace without a manifest implies of itself: the traffic of a sharded group follows from its own reductions.

Of an axis that scatters gradients U times a step, in R bytes, FSDP gathers parameters 2U-1 times (every unit in forward, all but the root
again in backward) or U times (reshard_after_forward=False). All ranks of an axis have the same traffic; DDP's and HSDP's all-reduces of
one step move the same bytes as those of the next.
"""

from __future__ import annotations

from collections import Counter

from tracekit.analyses._comparison_rows import Line, line
from tracekit.job.model import Job


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
    return result


def _a_step(rows: object) -> tuple[int, int | None]:
    """(calls, full bytes) of the commonest rank and step; None where bytes are not recorded."""
    found = Counter()  # type: ignore[var-annotated]
    for _, each in rows.groupby(["rank", "step_number"], observed=True):  # type: ignore[attr-defined]
        sizes = each["full_bytes"]
        found[len(each), int(sizes.sum()) if (sizes >= 0).all() else None] += 1
    usual: tuple[int, int | None] = found.most_common(1)[0][0]
    return usual


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
        told = why if 1.8 < ratio < 2.2 else other
        result.append(line(f"{name}.bytes_a_call", None, scatters[1] // units, gathers[1] // gathers[0], "bytes", told))
    return result
