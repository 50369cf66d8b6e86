"""Operations of the job gathered into the rows of the collective table (collectives.py defines the quantities)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from tracekit.analyses._common import UNKNOWN_AXIS, codes
from tracekit.analyses._groups import Spread, spread
from tracekit.collectives.cost import busbw_factor
from tracekit.collectives.kinds import POINT_TO_POINT
from tracekit.job.model import Job
from tracekit.schema import Column, table
from tracekit.trace.events import BoolArray, Int64Array
from tracekit.units import NULL

Floats = npt.NDArray[np.float64]
#: More sizes than this of one group, kind, purpose and element type are put into one row.
MOST_SIZES = 64

COLLECTIVES = table(
    "collectives",
    ("group", "int64", "", "index into job.groups; -1 unknown"),
    ("stream", "int64", "", "device stream where the group is unknown; NULL elsewhere"),
    ("axis", "str", "", "mesh axis; '' unknown"),
    ("kind", "str", "", "collectives.kinds vocabulary"),
    ("purpose", "str", "", "collectives.purpose vocabulary"),
    ("dtype", "str", "", "element type; '' unknown"),
    ("full_bytes", "int64", "bytes", "full tensor; NULL where not recorded, or where sizes differ too much"),
    ("sizes", "int64", "", "different sizes in this row"),
    ("sent_bytes", "int64", "bytes", "what one rank sends in one call; NULL unknown"),
    ("count", "int64", "", "distinct collectives"),
    ("operations", "int64", "", "operations of all ranks"),
    ("matched", "int64", "", "of them, matched with other ranks"),
    ("complete", "bool", "", "transfer comes from collectives seen on all their ranks"),
    ("total_ns", "int64", "ns", "durations of all operations"),
    ("transfer_ns", "float64", "ns", "median transfer; NaN unknown"),
    ("transfer_total_ns", "int64", "ns", "transfer of all matches; 0 where none is known"),
    ("algbw_gb_s", "float64", "GB/s", "NaN unknown"),
    ("busbw_gb_s", "float64", "GB/s", "NaN unknown"),
    ("matched_by", "str", "", "seq, order (also where some are matched by order) or none"),
)


_ALONE, _NO_SPEED = "not matched with another rank", "size or transfer not known"
#: The same rows as they leave the house.
REPORTED = table(
    "collectives",
    Column("label", "str", "", "the group, or the stream where it is not known", "Group"),
    Column("group", "str", "", "id of a process group", "", "group", "not recorded: `stream` tells rows apart"),
    Column("stream", "int64", "", "device stream, where the group is not known", "", "stream", "the group is known"),
    Column("axis", "str", "", "mesh axis", "Axis", "axis", "not known", UNKNOWN_AXIS),
    Column("kind", "str", "", "see the glossary", "Kind", "kind"),
    Column("purpose", "str", "", "see the glossary", "Purpose", "purpose"),
    Column("dtype", "str", "", "element type", "Type", "dtype", "not recorded"),
    Column("full_bytes", "int64", "bytes", "the full tensor", "Full size", "full_bytes", "not recorded, or too many sizes for one row"),
    Column("sizes", "int64", "", "different sizes in this row", "", "sizes"),
    Column("sent_bytes", "int64", "bytes", "what one rank sends in one call, ring algorithm", "", "sent_bytes", "size not known"),
    Column("count", "int64", "", "distinct collectives", "Count", "count"),
    Column("operations", "int64", "", "operations of all ranks", "", "rank_operations"),
    Column("matched", "int64", "", "of them, matched with another rank's", "", "matched_operations"),
    Column("least_ns", "float64", "ns", "what a rank spent in the call, waiting included", "", "duration_us.min"),
    Column("duration_ns", "float64", "ns", "median of it", "Duration p50", "duration_us.p50"),
    Column("longest_ns", "float64", "ns", "most of it", "Duration max", "duration_us.max"),
    Column("transfer_least_ns", "float64", "ns", "from the last arrival to the end", "", "transfer_us.min", _ALONE),
    Column("transfer_ns", "float64", "ns", "median of it", "Transfer p50", "transfer_us.p50", _ALONE),
    Column("transfer_longest_ns", "float64", "ns", "most of it", "", "transfer_us.max", _ALONE),
    Column("waits", "object", "us", "rank -> sum of its waits", "", "wait_us"),
    Column("wait_ns", "float64", "ns", "mean of the ranks' waits", "Wait, mean rank", "", _ALONE),
    Column("algbw_gb_s", "float64", "GB/s", "full bytes / median transfer", "algbw", "algbw_gb_s", _NO_SPEED),
    Column("busbw_gb_s", "float64", "GB/s", "algbw x factor", "busbw", "busbw_gb_s", _NO_SPEED),
    Column("matched_by", "str", "", "`seq` (group and sequence number), `order` (a fallback), `none`", "Matched by", "matched_by"),
    Column("complete", "bool", "", "seen on all ranks; if not, transfer is an upper bound and bandwidths are lower bounds", "", "complete"),
    Column("not_measured", "object", "", "why `busbw_gb_s` is `null`", "", "not_measured"),
)
#: The rows of all groups of one axis and size together.
BY_AXIS = table(
    "collectives_by_axis",
    REPORTED.column("axis"),
    Column("groups", "int64", "", "process groups summed up here", "Groups", "groups"),
    Column("size", "int64", "", "ranks of each of them", "Ranks", "size", "the groups are not known"),
    *(column for column in REPORTED.columns if column.name not in ("label", "group", "stream", "axis")),
)
AXIS_SHOWN = ("axis", "kind", "purpose", "dtype", "full_bytes", "groups", "size", "count", "duration_ns", "longest_ns", "transfer_ns",
              "wait_ns", "algbw_gb_s", "busbw_gb_s", "matched_by")  # fmt: skip
SHOWN = ("axis", "label", "kind", "purpose", "dtype", "full_bytes", "count", "duration_ns", "longest_ns", "transfer_ns", "wait_ns",
         "algbw_gb_s", "busbw_gb_s", "matched_by")  # fmt: skip


@dataclass(frozen=True)
class Keyed:
    """Operations with the row each belongs to, and the first operation of each row."""

    key: Int64Array
    first: Int64Array
    full: Int64Array
    folded: BoolArray  # a row
    sizes: Int64Array  # a row


def _leaders(job: Job) -> Int64Array:
    """For each operation the row that speaks for its match: the first in the table; itself where it is not matched."""
    match = job.operations["match"].to_numpy()
    own = np.arange(len(match), dtype=np.int64)
    first = np.full(len(job.matches), len(match), np.int64)
    np.minimum.at(first, match[match >= 0], own[match >= 0])
    return np.where(match >= 0, first[np.maximum(match, 0)] if len(first) else own, own)


def keys(job: Job) -> Keyed:
    """Members of one match share a row even where ranks spell its size, type or purpose differently."""
    operations = job.operations
    leader = _leaders(job)
    match = operations["match"].to_numpy()
    full = operations["full_bytes"].to_numpy().copy()
    if len(job.matches):
        full[match >= 0] = job.matches["full_bytes"].to_numpy()[match[match >= 0]]
    kind, kinds = codes(operations["kind"])
    p2p = np.isin(kind, [i for i, text in enumerate(kinds) if text in ("send", "recv")])
    kind = np.where(p2p, kind, kind[leader])
    group = operations["group"].to_numpy()[leader].astype(np.int64)
    stream = np.where(group < 0, operations["stream"].to_numpy()[leader].astype(np.int64), NULL)
    columns = [group, stream, kind, codes(operations["purpose"])[0][leader], codes(operations["dtype"])[0][leader]]
    coarse = _distinct(*columns)
    sizes = pd.DataFrame({"key": coarse, "full": full}).groupby("key")["full"].nunique().to_numpy().astype(np.int64)
    folded = sizes > MOST_SIZES
    shown = np.where(folded[coarse], NULL, full) if len(full) else full
    key = _distinct(coarse, shown)
    _, first = np.unique(key, return_index=True)
    return Keyed(key, first.astype(np.int64), full, folded[coarse[first]], np.where(folded[coarse[first]], sizes[coarse[first]], 1))


def by_axis(job: Job, keyed: Keyed) -> Keyed:
    """The same rows with those of one axis, group size and kind of call in one; groups that are not known stay together."""
    head = job.operations.iloc[keyed.first]
    group = head["group"].to_numpy().astype(np.int64)
    size = np.array([job.groups[int(g)].size if g >= 0 else 0 for g in group], np.int64)
    full = np.where(keyed.folded, NULL, keyed.full[keyed.first])
    names = [codes(head[name])[0] for name in ("axis", "kind", "purpose", "dtype")]
    coarse = _distinct(*names, size, full, keyed.folded.astype(np.int64))
    _, first = np.unique(coarse, return_index=True)
    most = np.zeros(len(first), np.int64)
    np.maximum.at(most, coarse, keyed.sizes)
    return Keyed(coarse[keyed.key], keyed.first[first], keyed.full, keyed.folded[first], most)


def _distinct(*columns: Int64Array) -> Int64Array:
    """A number for each distinct combination of the columns."""
    frame = pd.DataFrame({str(i): column for i, column in enumerate(columns)})
    return frame.groupby(list(frame.columns), sort=False).ngroup().to_numpy().astype(np.int64)


def _pairs(job: Job, key: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Each (match, row) once: a send and its recv are one match in two rows."""
    match = job.operations["match"].to_numpy().astype(np.int64)
    found = match >= 0
    width = int(key.max(initial=0)) + 1
    pairs = np.unique(match[found] * width + key[found])
    return pairs // width, pairs % width


def transfers(job: Job, keyed: Keyed, count: int) -> tuple[Spread, BoolArray, Int64Array]:
    """(transfer of each row, whether it comes from complete matches, bytes moved in those matches or NULL)."""
    match, key = _pairs(job, keyed.key)
    transfer = job.matches["transfer_ns"].to_numpy()[match]
    # Of a group that is not recorded, the whole job is the most that can take part.
    everybody = (job.matches["expected"] == 0) & (job.matches["ranks"] == (job.world_size or 0))
    whole = (job.matches["complete"] | everybody).to_numpy()[match]
    measured = transfer != NULL
    complete = np.zeros(count, np.bool_)
    complete[key[measured & whole]] = True
    chosen = measured & (whole | ~complete[key])
    full = job.matches["full_bytes"].to_numpy()[match]
    moved = np.zeros(count, np.int64)
    np.add.at(moved, key[chosen & (full != NULL)], full[chosen & (full != NULL)])
    moved[key[chosen & (full == NULL)]] = NULL
    return spread(key[chosen], transfer[chosen], count), complete, moved


def _counts(job: Job, keyed: Keyed, count: int) -> Int64Array:
    """Distinct collectives of each row (see the module)."""
    operations = job.operations
    _, key = _pairs(job, keyed.key)
    result = np.bincount(key, minlength=count).astype(np.int64)
    alone = operations["match"].to_numpy() < 0
    own = (operations["seq"].to_numpy() != NULL) | operations["kind"].isin(POINT_TO_POINT).to_numpy()
    result += np.bincount(keyed.key[alone & own], minlength=count)
    rest = pd.DataFrame({"key": keyed.key, "rank": operations["rank"].to_numpy()})[alone & ~own]
    most = rest.groupby(["key", "rank"]).size().groupby("key").max()
    result[most.index.to_numpy(np.int64)] += most.to_numpy()
    return result


def rows(job: Job, keyed: Keyed, duration: Spread, transfer: Spread, complete: BoolArray, moved: Int64Array) -> pd.DataFrame:
    """The table COLLECTIVES."""
    operations = job.operations
    count = len(keyed.first)
    if not count:
        return COLLECTIVES.empty()
    head = operations.iloc[keyed.first]
    group = head["group"].to_numpy().astype(np.int64)
    sent = np.full(count, NULL, np.int64)
    np.maximum.at(sent, keyed.key, operations["sent_bytes"].to_numpy())
    match = operations["match"].to_numpy()
    matched = np.bincount(keyed.key[match >= 0], minlength=count)
    by_order = np.zeros(count, np.bool_)
    if len(job.matches):
        weak = (job.matches["matched_by"] == "order").to_numpy()
        by_order[keyed.key[match >= 0][weak[match[match >= 0]]]] = True
    full = np.where(keyed.folded, NULL, keyed.full[keyed.first])
    with np.errstate(divide="ignore", invalid="ignore"):
        single = np.where((full != NULL) & (transfer.median > 0), full / transfer.median, np.nan)
        several = np.where((moved != NULL) & (moved > 0) & (transfer.total > 0), moved / transfer.total, np.nan)
    algbw = np.where(keyed.folded, several, single)
    uneven = _uneven(job, keyed, count, transfer)
    sizes = [2 if k in ("send", "recv") else job.groups[int(g)].size if g >= 0 else 0 for k, g in zip(head["kind"], group, strict=True)]
    factors = [busbw_factor(str(kind), size) if size > 1 else None for kind, size in zip(head["kind"], sizes, strict=True)]
    factor = np.array([np.nan if value is None else value for value in factors])
    return COLLECTIVES.frame(
        {
            "group": group,
            "stream": np.where(group < 0, head["stream"].to_numpy().astype(np.int64), NULL),
            "axis": head["axis"].astype("str").to_numpy(),
            "kind": head["kind"].astype("str").to_numpy(),
            "purpose": head["purpose"].astype("str").to_numpy(),
            "dtype": head["dtype"].astype("str").to_numpy(),
            "full_bytes": full,
            "sizes": keyed.sizes,
            "sent_bytes": np.where(keyed.folded, NULL, sent),
            "count": _counts(job, keyed, count),
            "operations": duration.count,
            "matched": matched,
            "complete": complete,
            "total_ns": duration.total,
            "transfer_ns": transfer.median,
            "transfer_total_ns": transfer.total,
            "algbw_gb_s": algbw,
            "busbw_gb_s": np.where(uneven > 0, uneven, algbw * factor),
            "matched_by": np.where(matched == 0, "none", np.where(by_order, "order", "seq")),
        }
    )


def _uneven(job: Job, keyed: Keyed, count: int, transfer: Spread) -> Floats:
    """Bus bandwidth [GB/s] of all-to-alls by what the rank that sends most really sent; NaN for everything else."""
    operations = job.operations
    chosen = (operations["match"].to_numpy() >= 0) & (operations["kind"] == "all_to_all").to_numpy()
    chosen &= operations["sent_bytes"].to_numpy() != NULL
    result = np.full(count, np.nan)
    if not chosen.any():
        return result
    frame = pd.DataFrame({"key": keyed.key, "match": operations["match"], "sent": operations["sent_bytes"]})[chosen]
    most = frame.groupby(["key", "match"])["sent"].max().groupby("key").agg(["median", "sum"])
    at = most.index.to_numpy(np.int64)
    single, several = (most[name].to_numpy(np.float64) for name in ("median", "sum"))
    with np.errstate(divide="ignore", invalid="ignore"):
        result[at] = np.where(keyed.folded[at], several / transfer.total[at], single / transfer.median[at])
    return np.where(np.isfinite(result), result, np.nan)


def waits(job: Job, key: Int64Array, count: int) -> list[dict[int, int]]:
    """rank -> sum of its waits, for each row."""
    wait = job.operations["wait_ns"].to_numpy()
    found = wait != NULL
    frame = pd.DataFrame({"key": key[found], "rank": job.operations["rank"].to_numpy()[found], "wait": wait[found]})
    result: list[dict[int, int]] = [{} for _ in range(count)]
    sums = frame.groupby(["key", "rank"], as_index=False)["wait"].sum()
    for row, rank, total in zip(sums["key"].tolist(), sums["rank"].tolist(), sums["wait"].tolist(), strict=True):
        result[row][rank] = total
    return result
