"""Kernels and copies by name: how often, how long, and how evenly over the ranks.

Per rank and name, over the whole trace (not only its steps):

    calls, total, min, max     of end - start, each kernel by itself: overlapping kernels both count [ns]

Per job: the sums over ranks, share = total / total of all names, and the least and the largest total of a rank. A rank keeps its KEPT names
with the largest totals and adds up the rest under ``other``, exactly. CPU jobs have no kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tracekit.analyses import _thresholds as thresholds
from tracekit.analyses._common import text_of, whole
from tracekit.findings import Finding, Section, Table
from tracekit.job.activity import Activity, Work
from tracekit.job.model import Job
from tracekit.schema import Column, table
from tracekit.trace.events import Category, Int64Array
from tracekit.units import format_ns, plural

ORDER = 60

#: Names that one rank keeps; names in the JSON.
KEPT, IN_JSON = 500, 100
OTHER = "other"
WORK_NAMES = ("compute", "communication", "copy")

KERNELS = table(
    "kernels",
    Column("name", "str", "", "name of the kernel; `other`: names beyond the largest of a rank", "Kernel", "name"),
    Column("work", "str", "", "`compute`, `communication` or `copy`", "Work", "work"),
    Column("calls", "int64", "", "over all ranks", "Calls", "calls"),
    Column("total_ns", "int64", "ns", "over all ranks", "Total", "total_us"),
    Column("mean_ns", "float64", "ns", "of one call", "Mean", "mean_us"),
    Column("min_ns", "int64", "ns", "shortest", "Min", "min_us"),
    Column("max_ns", "int64", "ns", "longest", "Max", "max_us"),
    Column("share", "float64", "share", "total, of the totals of all names", "Of all", "share"),
    Column("ranks", "int64", "", "ranks that run it", "Ranks", "ranks"),
    Column(
        "rank_min_ns", "int64", "ns", "least total of a rank that was read whole and ran a kernel", "Least total of a rank", "rank_min_us"
    ),
    Column("rank_max_ns", "int64", "ns", "largest total of a rank", "Largest total of a rank", "rank_max_us"),
    ("rank_max", "int64", "", "the rank with the largest total"),
    ("rank_mean_ns", "float64", "ns", "mean total of a rank"),
)
_SHOWN = ("name", "work", "share", "total_ns", "calls", "mean_ns", "min_ns", "max_ns", "ranks", "rank_min_ns", "rank_max_ns")
#: What can be said of many names together.
_OF_REST = ("name", "work", "calls", "total_ns", "mean_ns", "min_ns", "max_ns", "share")


@dataclass(frozen=True)
class KernelSums:
    """One entry a name and kind of work: sums of one window, the largest total first, then ``other``."""

    name: list[str]
    work: Int64Array
    calls: Int64Array
    total: Int64Array
    least: Int64Array
    most: Int64Array


def reduce(activity: Activity) -> KernelSums | None:
    """Sums of one window by name; None where it has no kernel and no copy (a CPU job)."""
    device, tables = activity.device, activity.tables
    if activity.on_cpu or not len(device):
        return None
    on_device = np.isin(tables.category[device.row], [int(Category.KERNEL), int(Category.MEMCPY), int(Category.MEMSET)])
    length = (device.end - device.start)[on_device]
    key = device.name[on_device].astype(np.int64) * len(Work) + device.work[on_device]
    size = (int(key.max()) + 1) if len(key) else 0
    calls = np.bincount(key, minlength=size)
    total = np.zeros(size, np.int64)
    least, most = np.full(size, np.iinfo(np.int64).max), np.zeros(size, np.int64)
    np.add.at(total, key, length)
    np.minimum.at(least, key, length)
    np.maximum.at(most, key, length)
    used = np.flatnonzero(calls)
    used = used[np.argsort(-total[used], kind="stable")]
    kept, rest = used[:KEPT], used[KEPT:]
    name = [text_of(tables, int(code)) for code in kept // len(Work)]
    parts = [(kept % len(Work), calls[kept], total[kept], least[kept], most[kept])]
    for work in Work:
        own = rest[rest % len(Work) == work]
        if len(own):
            name.append(OTHER)
            parts.append(
                tuple(np.array([v]) for v in (work, calls[own].sum(), total[own].sum(), least[own].min(), most[own].max()))  # type: ignore[arg-type]
            )
    return KernelSums(name, *(np.concatenate(columns).astype(np.int64) for columns in zip(*parts, strict=True)))


@dataclass(frozen=True)
class Kernels:
    """``rows`` has schema KERNELS, the largest total first. ``on_cpu``: the job has no device."""

    rows: pd.DataFrame
    ranks: int
    on_cpu: bool

    def findings(self) -> list[Finding]:
        """Compute kernels whose time differs between ranks."""
        total = float(self.rows["total_ns"].sum())
        if self.ranks < 2 or total <= 0:
            return []
        rows = self.rows[(self.rows["work"] == "compute") & (self.rows["name"] != OTHER) & (self.rows["rank_mean_ns"] > 0)]
        difference = (rows["rank_max_ns"] - rows["rank_mean_ns"]) / rows["rank_mean_ns"]
        uneven = rows[(difference > thresholds.KERNEL_SPREAD) & (rows["total_ns"] > thresholds.KERNEL_SHARE * total)]
        found = []
        for row in uneven.head(3).to_dict("records"):
            more = row["rank_max_ns"] / row["rank_mean_ns"] - 1
            text = f"Kernel {_short(row['name'])} takes {more:.0%} longer on rank {row['rank_max']} than on the mean rank"
            text += f" ({format_ns(row['rank_max_ns'])} against {format_ns(row['rank_mean_ns'])}, whole trace)."
            advice = "The ranks run unequal work, or run it at unequal speed: compare the calls of this kernel, then the devices' clocks."
            evidence = f"kernel table, {plural(self.ranks, 'rank')}"
            found.append(Finding("kernels.uneven", "info", text, more, "share", evidence, advice, row={"Kernel": row["name"]}))
        return found

    def sections(self) -> list[Section]:
        """The table of kernels."""
        if not len(self.rows):
            return []
        lead = "Time of kernels and copies by name, over all ranks and the whole trace. Kernels that overlap count each for itself."
        return [Section("Kernels", lead, (Table.of("Kernels by total time", KERNELS, self.rows, _SHOWN, preview=5),), name="kernels")]

    def json(self) -> dict[str, Any]:
        """``kernels``: the names with the largest totals, then ``other`` for the rest, so that the totals add up."""
        if not len(self.rows):
            reason = "the job ran on the CPU" if self.on_cpu else "the traces hold no kernel"
            return {"kernels": None, "not_measured": {"kernels": reason}}
        rest = self.rows.iloc[IN_JSON:].assign(name=OTHER, names=1).groupby(["name", "work"], observed=True, as_index=False)
        sums = rest.agg({"calls": "sum", "total_ns": "sum", "min_ns": "min", "max_ns": "max", "names": "sum"})
        others = KERNELS.records(_with_shares(sums, int(self.rows["total_ns"].sum())), _OF_REST)
        for row, names in zip(others, sums["names"].tolist(), strict=True):
            row["names"] = names
        return {"kernels": [*KERNELS.records(self.rows.head(IN_JSON)), *others]}


def _short(name: str) -> str:
    return name if len(name) <= 80 else name[:79] + "…"


def analyze(job: Job) -> Kernels:
    """Sum up the kernels of all ranks by name."""
    parts = [(rank, job.windows[index], sums) for rank, index, sums in job.reduced("kernels") if sums is not None]
    on_cpu = bool(job.traced) and all(window.on_cpu for window in job.traced)
    if not parts:
        return Kernels(KERNELS.empty(), 0, on_cpu)
    size = [len(sums.name) for _, _, sums in parts]
    frame = pd.DataFrame(
        {
            "rank": np.repeat([rank for rank, _, _ in parts], size),
            "whole": np.repeat([whole(window) for _, window, _ in parts], size),
            "name": pd.Categorical([name for _, _, sums in parts for name in sums.name]),
            "work": np.concatenate([sums.work for _, _, sums in parts]),
            **{column: np.concatenate([getattr(sums, column) for _, _, sums in parts]) for column in ("calls", "total", "least", "most")},
        }
    )
    ranks = sorted({rank for rank, window, _ in parts if whole(window)})
    return Kernels(_by_name(frame, ranks), len(ranks), on_cpu)


def _by_name(frame: pd.DataFrame, ranks: list[int]) -> pd.DataFrame:
    """Table KERNELS; ``ranks`` were read whole."""
    keys = ["name", "work"]
    sums = frame.groupby(keys, observed=True).agg(
        calls=("calls", "sum"), total_ns=("total", "sum"), min_ns=("least", "min"), max_ns=("most", "max"), ranks=("rank", "nunique")
    )
    per_rank = frame[frame["whole"]].groupby([*keys, "rank"], observed=True)["total"].sum()
    per_name = per_rank.groupby(level=keys, observed=True)
    own = pd.DataFrame({"low": per_name.min(), "high": per_name.max(), "sum": per_name.sum(), "seen": per_name.size()}).reindex(sums.index)
    seen = own["seen"].fillna(0).to_numpy()
    low = np.where(seen == len(ranks), own["low"].fillna(0).to_numpy(), 0)  # a rank that does not run it has a total of 0
    most = per_rank.reset_index().sort_values("total", kind="stable").drop_duplicates(keys, keep="last").set_index(keys)["rank"]
    sums = _with_shares(sums, int(sums["total_ns"].sum()))
    rows = KERNELS.frame(
        {
            "name": sums.index.get_level_values(0).astype("str"),
            "work": np.array(WORK_NAMES)[sums.index.get_level_values(1)],
            **{column: sums[column].to_numpy() for column in ("calls", "total_ns", "mean_ns", "min_ns", "max_ns", "share", "ranks")},
            "rank_min_ns": low,
            "rank_max_ns": own["high"].fillna(0).to_numpy(),
            "rank_max": most.reindex(sums.index).fillna(-1).to_numpy(),
            "rank_mean_ns": own["sum"].fillna(0).to_numpy() / max(1, len(ranks)),
        }
    )
    return rows.sort_values("total_ns", ascending=False, kind="stable", ignore_index=True)


def _with_shares(sums: pd.DataFrame, total: int) -> pd.DataFrame:
    """With the columns ``mean_ns`` and ``share``."""
    return sums.assign(mean_ns=sums["total_ns"] / sums["calls"], share=sums["total_ns"] / total if total else np.nan)
