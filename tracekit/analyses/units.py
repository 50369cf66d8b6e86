"""What data parallelism moves at once: FSDP's units, ZeRO's and DDP's buckets, in order, with what is in them.

    elements     of all parameters in the unit, before it is divided over ranks
    padding      elements that travel beside them, so that every rank has as many
    share        of all parameters of the model on this rank
    begins       DDP: when the bucket's all-reduce is called, behind that of the first bucket, mean over the steps [ns]

Units that are too coarse need memory: a rank holds a whole unit while it works on it. Units that are too fine need time: an all-gather of
a few bytes takes as long as its latency, and there is nothing long enough to hide it behind. The source is the manifest of the lowest rank
that has one; the times are of its calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tracekit.analyses import _thresholds as thresholds
from tracekit.findings import Finding, Section, Severity, Table
from tracekit.graph.gathers import SMALL, gain_of_larger
from tracekit.graph.study import Study, study_of
from tracekit.job.model import Job
from tracekit.manifest import Unit
from tracekit.schema import Column, table
from tracekit.trace.events import Int64Array
from tracekit.units import NULL, format_bytes, format_ns, plural

ORDER = 32

#: Kind of a unit in the manifest -> what it is called.
_KINDS = {"fsdp1": "FSDP1 unit", "fsdp2": "FSDP2 unit", "ddp_bucket": "DDP bucket", "zero_bucket": "ZeRO bucket"}
_FSDP = ("fsdp1", "fsdp2")
_NOTHING = "no manifest tells of units that are gathered, or of buckets that are reduced"
_BEGINS = "when its all-reduce is called, behind that of the first bucket, mean over steps"
_UNKNOWN, _NO_TIMES = "the recorder was not told", "not a DDP bucket, or its all-reduce cannot be told from others"

UNITS = table(
    "sharding_units",
    Column("unit", "str", "", "as the recorder names it; modules that were sharded together are joined by commas", "Unit", "unit", "", ""),
    Column("kind", "str", "", "`fsdp1`, `fsdp2`, `ddp_bucket` or `zero_bucket`", "Kind", "kind"),
    Column("root", "object", "", "the unit of what no other one wraps: it usually stays gathered", "", "root"),
    Column("parameters", "int64", "", "how many it holds", "Parameters", "parameters", _UNKNOWN),
    Column("first", "str", "", "the first of them; of a bucket the one whose gradient comes first", "First", "first", _UNKNOWN),
    Column("last", "str", "", "the last", "Last", "last", _UNKNOWN),
    Column("elements", "int64", "elements", "of its parameters, before they are divided", "Elements", "elements"),
    Column("padding", "int64", "elements", "that travel beside them", "Padding", "padding"),
    Column("share", "float64", "share", "of the elements of all units", "Of all", "share"),
    Column("begins_ns", "int64", "ns", _BEGINS, "Reduced after", "begins_us", _NO_TIMES),
)


@dataclass(frozen=True)
class Units:
    """``rows`` has schema UNITS. ``small``: all-gathers of small units, None where nothing is to be said. ``alone``: a job of one rank."""

    rows: pd.DataFrame
    rank: int = 0
    small: Small | None = None
    alone: bool = False

    def findings(self) -> list[Finding]:
        """Units that are too coarse, and too fine."""
        return [*self._coarse(), *(self.small.finding(len(self.rows)) if self.small is not None else [])]

    def sections(self) -> list[Section]:
        """The table."""
        if self.rows.empty:
            return []
        lead = (
            "What is gathered or reduced at once. A rank holds a whole unit while it works on it, so that large units need memory; small "
            f"ones need time, as every call has its latency. As rank {self.rank} has them."
        )
        names = [name for name in UNITS.names if name not in ("kind", "root") and (name != "begins_ns" or self._timed)]
        title = " and ".join(dict.fromkeys(f"{_KINDS[kind]}s" for kind in self.rows["kind"]))
        return [Section("Units of data parallelism", lead, (Table.of(title, UNITS, self.rows, tuple(names)),), name="units-moved")]

    def json(self) -> dict[str, Any]:
        """``sharding_units``: one entry a unit, in order; null where no manifest tells of any."""
        if self.rows.empty:
            return {"sharding_units": None, "not_measured": {"sharding_units": _NOTHING}}
        return {"sharding_units": UNITS.records(self.rows)}

    @property
    def _timed(self) -> bool:
        return bool((self.rows["begins_ns"] != NULL).any())

    def _coarse(self) -> list[Finding]:
        """One unit that holds most of the model."""
        fsdp = self.rows[self.rows["kind"].isin(_FSDP) & (self.rows["elements"] > 0)]
        if self.alone or fsdp.empty or fsdp["share"].max() < thresholds.COARSE_UNIT:
            return []
        largest = fsdp.iloc[int(fsdp["share"].to_numpy().argmax())]
        share, name = float(largest["share"]), largest["unit"] or "the root"
        held = "the whole model is one unit" if len(fsdp) == 1 else f"unit {name} holds {share:.0%} of the parameters"
        text = f"FSDP gathers {largest['elements']:,} parameters at once: {held}, and every rank holds all of it while it works on it"
        text += ". What finer units would hide behind compute does not show in a trace of this one."
        advice = "Shard every block before the model (fully_shard on each; FSDP1: an auto_wrap_policy), so that one is whole at a time."
        severity: Severity = "warning" if largest["elements"] >= thresholds.COARSE_ELEMENTS else "info"
        return [Finding("units.coarse", severity, text, share, "share", "units in the manifest", advice, row={"Unit": largest["unit"]})]


@dataclass(frozen=True)
class Small:
    """All-gathers of units far below the largest, on one rank: ``calls`` of ``of`` a step, their share of bytes, of time, and that time.

    ``gain_ns``: what a step would win if they were as fast as large ones, ``step_share`` the same of the step; None where it cannot be
    replayed.
    """

    calls: float
    of: float
    bytes_share: float
    time_share: float
    step_ns: int
    largest: int
    gain_ns: float | None = None
    step_share: float = 0.0

    def finding(self, units: int) -> list[Finding]:
        """A sentence where they take more time than they move bytes."""
        if self.time_share < thresholds.FINE_UNITS_TIME or self.time_share < 2 * self.bytes_share:
            return []
        text = (
            f"{self.calls:.0f} of {self.of:.0f} FSDP all-gathers a step move less than a twentieth of the largest "
            f"({format_bytes(self.largest)}): "
            f"{self.bytes_share:.1%} of the bytes, {self.time_share:.0%} of the time ({format_ns(self.step_ns)} a step on this rank)."
        )
        advice = f"Shard whole blocks and not single layers, {plural(units, 'unit')} now: every call has its latency."
        evidence, gain = "all-gathers of parameters in the trace", None if self.gain_ns is None else max(0, round(self.gain_ns))
        if gain is not None:
            text += f" As fast as large ones they would make a step {format_ns(gain)} shorter, by replay." if gain else (
                " Compute hides them: as fast as large ones they would make a step no shorter."
            )  # fmt: skip
        severity = (thresholds.GAIN.of(self.step_share) if gain else None) or "info"
        return [Finding("units.fine", severity, text, self.time_share, "share", evidence, advice, weight_ns=self.step_ns, gain_ns=gain)]


def analyze(job: Job) -> Units:
    """The units of the lowest rank whose manifest tells them."""
    told = [(w.rank, w.manifest.units) for w in job.windows if w.manifest is not None and w.rank is not None]
    found = [(rank, [u for u in units if u.kind in _KINDS]) for rank, units in told]
    rank, units = min(((rank, units) for rank, units in found if units), key=lambda one: one[0], default=(0, []))
    if not units:
        return Units(UNITS.empty())
    own = job.operations[(job.operations["rank"] == rank) & (job.operations["launch_step_number"] != NULL)]
    if job.world_size == 1:
        return Units(_rows(units, own), rank, alone=True)
    return Units(_rows(units, own), rank, _small(job, own) if len(units) > thresholds.FINE_UNITS else None)


def _rows(units: list[Unit], own: pd.DataFrame) -> pd.DataFrame:
    elements = np.array([unit.elements for unit in units], np.int64)
    return UNITS.frame(
        {
            "unit": [unit.name for unit in units],
            "kind": [unit.kind for unit in units],
            "root": pd.Series([unit.root for unit in units], dtype=object),
            "parameters": [len(unit.parameters) or NULL for unit in units],
            "first": [unit.parameters[0] if unit.parameters else "" for unit in units],
            "last": [unit.parameters[-1] if unit.parameters else "" for unit in units],
            "elements": elements,
            "padding": np.maximum(0, np.array([unit.padded_elements for unit in units], np.int64) - elements),
            "share": elements / max(1, int(elements.sum())),
            "begins_ns": _begins(units, own),
        }
    )


def _begins(units: list[Unit], own: pd.DataFrame) -> Int64Array:
    """When each of DDP's buckets is reduced, behind the first, where every step reduces each of them once."""
    nothing = np.full(len(units), NULL, np.int64)
    reduced = own[(own["purpose"] == "gradient_sync") & (own["kind"] == "all_reduce")]
    if any(unit.kind != "ddp_bucket" for unit in units) or reduced.empty:
        return nothing
    starts = [np.sort(group.to_numpy()) for _, group in reduced.groupby("launch_step_number")["start_ns"]]
    if any(len(start) != len(units) for start in starts):
        return nothing
    behind: Int64Array = np.rint(np.mean([start - start[0] for start in starts], axis=0)).astype(np.int64)
    return behind


def _small(job: Job, own: pd.DataFrame) -> Small | None:
    """All-gathers below a twentieth of the largest."""
    gathers = own[(own["purpose"] == "parameter_gather") & (own["kind"] == "all_gather") & (own["full_bytes"] > 0)]
    if gathers.empty:
        return None
    sizes = gathers["full_bytes"].to_numpy()
    times = (gathers["end_ns"] - gathers["start_ns"] - gathers["wait_ns"].clip(lower=0)).clip(lower=0)
    small, steps = sizes < sizes.max() * SMALL, gathers["launch_step_number"].nunique()
    spent, total = int(times.to_numpy()[small].sum()), int(times.sum())
    if not small.any() or not total:
        return None
    study = study_of(job)
    gain = gain_of_larger(study) if isinstance(study, Study) else None
    shares = (sizes[small].sum() / sizes.sum(), spent / total)
    of_step = gain / study.step_ns if gain is not None and isinstance(study, Study) else 0.0
    return Small(small.sum() / steps, len(sizes) / steps, *shares, spent // steps, int(sizes.max()), gain, of_step)
