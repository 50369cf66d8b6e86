"""Compute time by module and layer: forward, backward, recomputed.

Work of a module is what ran for its calls and those of the modules within it (see ``_module_calls``), over all ranks and the whole trace.
A module's time is the sum of durations [ns] of its kernels (on CPU jobs, of its operators); ``self`` leaves out the modules within it, so
that ``self`` of all modules and what belongs to none add up to all compute, exactly. FLOP are those of ``_counted``, where sizes are known;

    share of peak = FLOP of the module / (its device time x the device's peak for the element type)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tracekit.analyses._counted import counted
from tracekit.analyses._module_calls import BACKWARD, FORWARD, RECOMPUTED, ModuleCalls, assign, module_calls
from tracekit.estimate.hardware import hardware_of
from tracekit.findings import Finding, Section, Table
from tracekit.job.activity import Activity, Work
from tracekit.job.model import Job
from tracekit.readers.evidence import device_name
from tracekit.schema import Column, table
from tracekit.trace.events import Int64Array
from tracekit.units import NULL, microseconds

ORDER = 66
IN_JSON = 200
#: Modules that one window keeps: those with most time.
_KEPT = 2000

_NO_MODULES = "the traces name no modules: record with with_modules=True (or with_stack=True), or with tracekit's recorder"
_NO_FLOP = "no call within it has a known number of FLOP (record_shapes=True)"
_NO_PEAK = "FLOP or the device's peak are not known"

MODULES = table(
    "modules",
    Column("module", "str", "", "names of the modules around it, then its own, as the trace gives them", "Module", "module"),
    Column("forward_ns", "int64", "ns", "its forward, modules within it included", "Forward", "forward_us"),
    Column("backward_ns", "int64", "ns", "its backward", "Backward", "backward_us"),
    Column("recomputed_ns", "int64", "ns", "its forward once more, within backward", "Recomputed", "recomputed_us"),
    Column("self_ns", "int64", "ns", "all of it, without the modules within it", "Self", "self_us"),
    Column("calls", "int64", "", "calls of its forward, over all ranks", "Calls", "calls"),
    Column("flop", "int64", "", "matrix products, convolutions and attention within it", "FLOP", "flop", _NO_FLOP),
    Column("share_of_peak", "float64", "", "of the device's peak over its time", "Of peak", "share_of_peak", _NO_PEAK),
    Column("ranks", "int64", "", "ranks that call it", "Ranks", "ranks"),
)
_SUMS = ("forward_ns", "backward_ns", "recomputed_ns", "self_ns", "calls", "flop", "peak_ns")


@dataclass(frozen=True)
class ModuleSums:
    """One entry a module of one window. ``sums`` has a row for each of _SUMS; ``peak_ns``: what its FLOP would take at the peak.

    ``compute_ns``: all compute; ``outside_ns``: of it in no module.
    """

    paths: list[str]
    sums: Int64Array
    compute_ns: int
    outside_ns: int


def reduce(activity: Activity) -> ModuleSums | None:
    """Sums of one window by module; None where the trace names none."""
    calls = module_calls(activity.tables)
    if calls is None:
        return None
    device = activity.device
    compute = np.flatnonzero(device.work == Work.COMPUTE)
    spent = (device.end - device.start)[compute]
    call, pass_ = assign(activity, calls, (device.row if activity.on_cpu else device.launch_row)[compute])
    sums = np.zeros((len(_SUMS), len(calls.names)), np.int64)
    inside = call >= 0
    np.add.at(sums[3], calls.label[call[inside]], spent[inside])
    for row, kind in enumerate((FORWARD, BACKWARD, RECOMPUTED)):
        chosen = inside & (pass_ == kind)
        _add_up(sums[row], calls, call[chosen], spent[chosen])
    sums[4] = np.bincount(calls.label[~calls.backward], minlength=len(calls.names))
    _add_flop(sums, activity, calls)
    total, outside = int(spent.sum()), int(spent[~inside].sum())
    paths = calls.paths()
    kept = np.argsort(-sums[:4].sum(axis=0), kind="stable")[:_KEPT]
    return ModuleSums([paths[label] for label in kept.tolist()], sums[:, kept], total, outside)


def _add_flop(sums: Int64Array, activity: Activity, calls: ModuleCalls) -> None:
    """FLOP of every module, and the time they would take at the peak; the peak is the device's of the window's own name."""
    found = counted(activity)
    if not len(found.row):
        return
    flop = np.array([max(case.flop, 0) for case in found.cases], np.int64)[found.case]
    hardware = hardware_of(device_name(activity.tables))
    widths = {} if hardware is None else hardware.tflops
    rate = np.array([widths.get(case.element_bytes, 0.0) for case in found.cases])[found.case]
    at_peak = np.where(rate > 0, flop / np.maximum(rate, 1e-9) / 1e3, 0).astype(np.int64)
    call, _ = assign(activity, calls, found.row)
    inside = call >= 0
    _add_up(sums[5], calls, call[inside], flop[inside])
    _add_up(sums[6], calls, call[inside], at_peak[inside])


def _add_up(total: Int64Array, calls: ModuleCalls, call: Int64Array, values: Int64Array) -> None:
    """Add values to the module of each call and to all around it; a module within itself counts once."""
    seen = np.full((len(call), 0), -1, np.int64)
    while len(call):
        label = calls.label[call]
        new = ~(seen == label[:, None]).any(axis=1)
        np.add.at(total, label[new], values[new])
        seen = np.column_stack([seen, label])
        call = calls.parent[call]
        going = call >= 0
        call, values, seen = call[going], values[going], seen[going]


@dataclass(frozen=True)
class Modules:
    """``rows`` has schema MODULES, in order of their time. ``outside_ns`` of ``compute_ns`` belongs to no module."""

    rows: pd.DataFrame
    compute_ns: int
    outside_ns: int

    def findings(self) -> list[Finding]:
        """Nothing: the table speaks for itself."""
        return []

    def sections(self) -> list[Section]:
        """The table of modules."""
        if not len(self.rows):
            return []
        lead = "Compute of each module, of those within it too, over all ranks and the whole trace."
        if self.compute_ns:
            outside = f"{self.outside_ns / self.compute_ns:.0%} of all compute"
            lead += f" {outside} is in no module (optimizer, loss, gradients whose module is not recorded)."
        return [Section("Time by module", lead, (Table.of("Modules", MODULES, self.rows),), name="modules")]

    def json(self) -> dict[str, Any]:
        """``modules``, and what is in none of them."""
        if not len(self.rows):
            return {"modules": None, "not_measured": {"modules": _NO_MODULES}}
        return {"modules": MODULES.records(self.rows.head(IN_JSON)), "outside_modules_us": microseconds(self.outside_ns)}


def analyze(job: Job) -> Modules:
    """Sum up over all ranks by name."""
    parts = [(rank, found) for rank, _, found in job.reduced("module_time") if found is not None]
    if not parts:
        return Modules(MODULES.empty(), 0, 0)
    frame = pd.DataFrame(
        {
            "rank": np.repeat([rank for rank, _ in parts], [len(found.paths) for _, found in parts]),
            "module": [path for _, found in parts for path in found.paths],
            **{name: np.concatenate([found.sums[row] for _, found in parts]) for row, name in enumerate(_SUMS)},
        }
    )
    grouped = frame.groupby("module", sort=False)
    sums = grouped[list(_SUMS)].sum().assign(ranks=grouped["rank"].nunique()).reset_index()
    spent = sums[["forward_ns", "backward_ns", "recomputed_ns"]].sum(axis=1)
    known = (sums["peak_ns"] > 0) & (spent > 0)
    sums["share_of_peak"] = (sums["peak_ns"] / spent.where(spent > 0)).where(known)
    sums["flop"] = sums["flop"].where(sums["flop"] > 0, NULL)
    order = np.argsort(-spent.to_numpy(), kind="stable")
    rows = MODULES.frame({name: sums[name].to_numpy()[order] for name in MODULES.names})
    return Modules(rows, sum(found.compute_ns for _, found in parts), sum(found.outside_ns for _, found in parts))
