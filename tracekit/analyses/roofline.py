"""How near matrix products, convolutions and attention come to what the device can do, by operator and shape.

Of all calls of one operator with the same shapes, over all ranks and the whole trace, with the device's peak rate P [FLOP/s] for the
element type and its memory's rate M [byte/s] (``estimate.hardware``):

    rate            = FLOP / device time
    share of peak   = rate / P
    intensity       = FLOP / least traffic             [FLOP/byte]  each input and output once
    limit           = max(FLOP / P, least traffic / M)  [s]         the roofline: Williams, Waterman, Patterson, CACM 52(4), 2009
    share of limit  = limit / device time

A call whose sizes were not recorded, and every other operator, is not counted; how much of compute that is stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tracekit.analyses._counted import Case, counted
from tracekit.estimate.hardware import hardware_of
from tracekit.findings import Finding, Section, Table
from tracekit.job.activity import Activity, Work
from tracekit.job.model import Job
from tracekit.schema import Column, table
from tracekit.trace.events import Int64Array
from tracekit.units import NULL, microseconds

ORDER = 68
IN_JSON = 100
_KEPT = 1000  # cases that one window keeps, the longest times first

_NO_SIZES = "the trace has no sizes (record_shapes=True)"
_NO_PEAK = "the device's peak is not known, or not for this type"

ROOFLINE = table(
    "operator_shapes",
    Column("operator", "str", "", "name of the operator", "Operator", "operator"),
    Column("shapes", "str", "", "sizes of its tensors", "Shapes", "shapes", _NO_SIZES),
    Column("dtype", "str", "", "element type of the first tensor", "Type", "dtype", _NO_SIZES),
    Column("calls", "int64", "", "over all ranks", "Calls", "calls"),
    Column("device_ns", "int64", "ns", "of the kernels launched within; on CPU jobs of the operator itself", "Time", "device_us"),
    Column("flop", "int64", "", "FLOP of one call", "FLOP a call", "flop", _NO_SIZES),
    Column("tflops", "float64", "TFLOP/s", "rate reached", "Rate", "tflop_s", _NO_SIZES),
    Column("share_of_peak", "float64", "", "of the device's peak for this type", "Of peak", "share_of_peak", _NO_PEAK),
    Column("intensity", "float64", "FLOP/byte", "FLOP over least traffic", "Intensity", "intensity_flop_byte", _NO_SIZES),
    Column("bound", "str", "", "`compute` or `memory`: which side of the roofline", "Bound by", "bound", _NO_PEAK),
    Column("share_of_limit", "float64", "", "the roofline's time over the time taken", "Of limit", "share_of_limit", _NO_PEAK),
    Column("ranks", "int64", "", "ranks that call it", "Ranks", "ranks"),
)


@dataclass(frozen=True)
class CaseSums:
    """One entry a case of one window; ``compute_ns`` is all compute of its device, summed over kernels."""

    cases: list[Case]
    calls: Int64Array
    device_ns: Int64Array
    compute_ns: int


def reduce(activity: Activity) -> CaseSums | None:
    """Calls and times of each operator and shape in one window; None where none is counted."""
    found = counted(activity)
    if not len(found.row):
        return None
    calls = np.bincount(found.case, minlength=len(found.cases)).astype(np.int64)
    device_ns = np.zeros(len(found.cases), np.int64)
    np.add.at(device_ns, found.case, found.device_ns)
    kept = np.argsort(-device_ns, kind="stable")[:_KEPT]
    compute = activity.device.work == Work.COMPUTE
    total = int((activity.device.end - activity.device.start)[compute].sum())
    return CaseSums([found.cases[i] for i in kept.tolist()], calls[kept], device_ns[kept], total)


@dataclass(frozen=True)
class Roofline:
    """``rows`` has schema ROOFLINE, the longest time first. ``compute_ns``: all compute of the ranks; ``device``: its name, '' unknown."""

    rows: pd.DataFrame
    compute_ns: int
    device: str

    def findings(self) -> list[Finding]:
        """Nothing: the table speaks for itself."""
        return []

    def sections(self) -> list[Section]:
        """The table of operators and shapes."""
        if not len(self.rows):
            return []
        share, limit = _percent(self.counted_share()), f"the limit of {self.device}"
        lead = (
            f"Matrix products, convolutions and attention, {share} of all compute time, beside {limit}. "
            "Rates are of the device's dense peak; attention counts in full, masked or not."
        )
        return [
            Section(
                "Operators beside the device's limit", lead, (Table.of("Operators and shapes", ROOFLINE, self.rows, preview=0),), "roofline"
            )
        ]

    def counted_share(self) -> float | None:
        """Of all compute time, what the counted operators take."""
        known = self.rows[self.rows["flop"] != NULL]
        return float(known["device_ns"].sum()) / self.compute_ns if self.compute_ns else None

    def json(self) -> dict[str, Any]:
        """``operator_shapes`` and their sum, ``counted_flops``."""
        if not len(self.rows):
            reason = "no matrix product, convolution or attention is in the traces"
            return {"operator_shapes": None, "counted_flops": None, "not_measured": {"operator_shapes": reason, "counted_flops": reason}}
        known = self.rows[self.rows["flop"] != NULL]
        flop, time = int((known["flop"] * known["calls"]).sum()), int(known["device_ns"].sum())
        total = {
            "flop": flop,
            "device_us": microseconds(time),
            "share_of_compute": self.counted_share(),
            "tflop_s": flop / time / 1000 if time else None,
            "cases": len(self.rows),
        }
        missing = {} if len(known) else {"counted_flops": _NO_SIZES}
        return {
            "operator_shapes": ROOFLINE.records(self.rows.head(IN_JSON)),
            "counted_flops": total if len(known) else None,
            **({"not_measured": missing} if missing else {}),
        }


def _percent(share: float | None) -> str:
    return "an unknown part" if share is None else f"{share:.0%}"


def analyze(job: Job) -> Roofline:
    """Sum up over all ranks, and hold against the device."""
    sums: dict[tuple[str, str, str], list[Any]] = {}
    compute = 0
    for rank, _, found in job.reduced("roofline"):
        if found is None:
            continue
        compute += found.compute_ns
        for case, calls, ns in zip(found.cases, found.calls.tolist(), found.device_ns.tolist(), strict=True):
            entry = sums.setdefault((case.name, case.shapes, case.dtype), [case, 0, 0, set()])
            entry[1] += calls
            entry[2] += ns
            entry[3].add(rank)
    rows = [_row(case, calls, ns, len(ranks), job.device) for case, calls, ns, ranks in sums.values()]
    frame = ROOFLINE.frame({name: [row[name] for row in rows] for name in ROOFLINE.names} if rows else {})
    frame = frame.sort_values("device_ns", ascending=False, kind="stable", ignore_index=True)
    return Roofline(frame, compute, job.device or "the device")


def _row(case: Case, calls: int, device_ns: int, ranks: int, device: str) -> dict[str, Any]:
    flop, nan = case.flop, float("nan")
    known = flop != NULL and device_ns > 0
    rate = flop * calls / device_ns * 1e9 if known else nan
    limits = _limits(case, device)
    limit = max(limits) if limits else None
    return {
        "operator": case.name,
        "shapes": case.shapes,
        "dtype": case.dtype,
        "calls": calls,
        "device_ns": device_ns,
        "flop": flop,
        "tflops": rate / 1e12,
        "share_of_peak": limits[0] * calls * 1e9 / device_ns if limits and known else nan,
        "intensity": flop / case.moved_bytes if flop != NULL and case.moved_bytes > 0 else nan,
        "bound": "" if limits is None else "compute" if limits[0] >= limits[1] else "memory",
        "share_of_limit": limit * calls * 1e9 / device_ns if limit is not None and known else nan,
        "ranks": ranks,
    }


def _limits(case: Case, device: str) -> tuple[float, float] | None:
    """Seconds of one call (at the peak rate, at the memory's rate); None where either is not known."""
    hardware = hardware_of(device)
    if hardware is None or case.element_bytes not in hardware.tflops or NULL in (case.flop, case.moved_bytes):
        return None
    return case.flop / hardware.peak_flops(case.element_bytes), case.moved_bytes / (1e9 * hardware.memory_gb_s)
