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
from tracekit.analyses._common import text_of, us, us_column, whole
from tracekit.findings import Finding, Section, Table
from tracekit.job.activity import Activity, Work
from tracekit.job.model import Job
from tracekit.schema import table
from tracekit.trace.events import Category, Int64Array
from tracekit.units import NS_PER_US, format_ns, plural

ORDER = 60

#: Names that one rank keeps; names in the JSON.
KEPT, IN_JSON = 500, 100
OTHER = "other"
WORK_NAMES = ("compute", "communication", "copy")

KERNELS = table(
    "kernels",
    ("name", "str", "", "name of the kernel; 'other': names beyond the largest of a rank"),
    ("work", "str", "", "compute, communication or copy"),
    ("calls", "int64", "", "over all ranks"),
    ("total_ns", "int64", "ns", "over all ranks"),
    ("min_ns", "int64", "ns", "shortest"),
    ("max_ns", "int64", "ns", "longest"),
    ("ranks", "int64", "", "ranks that run it"),
    ("rank_min_ns", "int64", "ns", "least total of a rank that was read whole and ran any kernel"),
    ("rank_max_ns", "int64", "ns", "largest total of a rank"),
    ("rank_max", "int64", "", "the rank with the largest total"),
    ("rank_mean_ns", "float64", "ns", "mean total of a rank"),
)


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
            found.append(Finding("kernels.uneven", "info", text, more, "share", f"kernel table, {plural(self.ranks, 'rank')}", advice))
        return found

    def sections(self) -> list[Section]:
        """The table of kernels."""
        if not len(self.rows):
            return []
        lead = "Time of kernels and copies by name, over all ranks and the whole trace. Kernels that overlap count each for itself."
        return [Section("Kernels", lead, (self._table(),))]

    def json(self) -> dict[str, Any]:
        """``kernels``: the names with the largest totals, then ``other`` for the rest, so that the totals add up."""
        if not len(self.rows):
            reason = "the job ran on the CPU" if self.on_cpu else "the traces hold no kernel"
            return {"kernels": None, "not_measured": {"kernels": reason}}
        total = int(self.rows["total_ns"].sum())
        top, rest = self.rows.head(IN_JSON), self.rows.iloc[IN_JSON:]
        rows = [_record(row, total) for row in top.to_dict("records")]
        for work, part in rest.groupby("work", observed=True):
            calls, least, most = int(part["calls"].sum()), int(part["min_ns"].min()), int(part["max_ns"].max())
            entry = _entry(OTHER, str(work), calls, int(part["total_ns"].sum()), least, most, total)
            rows.append(entry | {"names": len(part)})
        return {"kernels": rows}

    def _table(self) -> Table:
        rows, total = self.rows, max(1, int(self.rows["total_ns"].sum()))
        frame = pd.DataFrame(
            {
                "name": rows["name"].astype("str"),
                "work": rows["work"].astype("str"),
                "share": rows["total_ns"] / total,
                "total": us_column(rows["total_ns"]),
                "calls": rows["calls"],
                "mean": rows["total_ns"] / rows["calls"] / NS_PER_US,
                "min": us_column(rows["min_ns"]),
                "max": us_column(rows["max_ns"]),
                "ranks": rows["ranks"],
                "low": us_column(rows["rank_min_ns"]),
                "high": us_column(rows["rank_max_ns"]),
            }
        )
        headings = {
            "name": "Kernel",
            "work": "Work",
            "share": "Of all [share]",
            "total": "Total [us]",
            "calls": "Calls",
            "mean": "Mean [us]",
            "min": "Min [us]",
            "max": "Max [us]",
            "ranks": "Ranks",
            "low": "Least total of a rank [us]",
            "high": "Largest total of a rank [us]",
        }
        return Table("Kernels by total time", frame, headings, preview=5)


def _short(name: str) -> str:
    return name if len(name) <= 80 else name[:79] + "…"


def _entry(name: str, work: str, calls: int, total: int, least: int, most: int, of_all: int) -> dict[str, Any]:
    return {
        "name": name,
        "work": work,
        "calls": calls,
        "total_us": us(total),
        "mean_us": us(total / calls),
        "min_us": us(least),
        "max_us": us(most),
        "share": total / of_all if of_all else None,
    }


def _record(row: dict[Any, Any], of_all: int) -> dict[str, Any]:
    entry = _entry(row["name"], row["work"], row["calls"], row["total_ns"], row["min_ns"], row["max_ns"], of_all)
    return entry | {"ranks": row["ranks"], "rank_min_us": us(row["rank_min_ns"]), "rank_max_us": us(row["rank_max_ns"])}


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
    rows = KERNELS.frame(
        {
            "name": sums.index.get_level_values(0).astype("str"),
            "work": np.array(WORK_NAMES)[sums.index.get_level_values(1)],
            **{column: sums[column].to_numpy() for column in ("calls", "total_ns", "min_ns", "max_ns", "ranks")},
            "rank_min_ns": low,
            "rank_max_ns": own["high"].fillna(0).to_numpy(),
            "rank_max": most.reindex(sums.index).fillna(-1).to_numpy(),
            "rank_mean_ns": own["sum"].fillna(0).to_numpy() / max(1, len(ranks)),
        }
    )
    return rows.sort_values("total_ns", ascending=False, kind="stable", ignore_index=True)
