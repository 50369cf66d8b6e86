"""What each matched collective or message moved, how fast, and between which places."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pandas as pd

from tracekit.analyses import _thresholds as thresholds
from tracekit.collectives.cost import logical_steps
from tracekit.job.model import Job
from tracekit.trace.codes import distinct_rows
from tracekit.units import NULL

#: The algorithm whose steps and bytes are counted; a matched send with its receive is a 'send'.
ALGORITHM = {
    "all_gather": "ring", "reduce_scatter": "ring", "all_reduce": "ring", "all_to_all": "pairwise", "broadcast": "tree", "send": "direct",
}  # fmt: skip


_HELD = "collectives.moved"


def moved(job: Job) -> pd.DataFrame:
    """What ``_moved`` finds, once for all who ask; not to be written to."""
    if _HELD not in job.held:
        job.held[_HELD] = _moved(job)
    found: pd.DataFrame = job.held[_HELD]
    return found


def _moved(job: Job) -> pd.DataFrame:
    """One row a match with a transfer on an aligned clock: axis, group, kind, size, full_bytes, steps (logical), sent (bytes, by the rank
    that sends most), transfer_ns, low and high (lowest and highest rank), crosses (whether it leaves a node; None unknown).

    What an uneven all-to-all sends follows from its splits, where they are recorded.
    """
    matches = job.matches
    usable = matches["complete"] & (matches["transfer_ns"] > 0) & (matches["full_bytes"] > 0) & matches["kind"].isin(ALGORITHM)
    rows = matches[usable & (matches["group"] >= 0)]
    if not len(rows) or not job.clock.aligned:
        columns = ("axis", "group", "kind", "size", "full_bytes", "steps", "sent", "transfer_ns", "low", "high", "crosses")
        return pd.DataFrame({name: [] for name in columns})
    operations = job.operations[job.operations["match"] >= 0]
    of_match = operations.groupby("match").agg(low=("rank", "min"), high=("rank", "max"), sent=("sent_bytes", "max")).reindex(rows.index)
    kind = rows["kind"].astype("str").to_numpy()
    groups = [job.groups[number] for number in rows["group"].tolist()]
    size = np.where(kind == "send", 2, [group.size for group in groups])
    full = rows["full_bytes"].to_numpy()
    known = (kind == "all_to_all") & (of_match["sent"].to_numpy() != NULL)
    sent = np.where(known, of_match["sent"].to_numpy(), [sent_by_ring(k, s, f) for k, s, f in zip(kind, size, full.tolist(), strict=True)])
    pairs = zip(kind.tolist(), groups, of_match["low"].tolist(), of_match["high"].tolist(), strict=True)
    frame = pd.DataFrame(
        {
            "axis": [group.axis for group in groups],
            "group": rows["group"].to_numpy().astype(np.int64),
            "kind": kind,
            "size": size,
            "full_bytes": full,
            "steps": _by_kind_and_size(kind, size, lambda k, s: logical_steps(k, ALGORITHM[k], s)),
            "sent": sent.astype(np.float64),
            "transfer_ns": rows["transfer_ns"].to_numpy(),
            "low": of_match["low"].to_numpy(),
            "high": of_match["high"].to_numpy(),
            "crosses": [_crosses(job, low, high) if k == "send" else group.spans_nodes for k, group, low, high in pairs],
        }
    )
    possible = frame["sent"] <= thresholds.IMPOSSIBLE_GB_S * frame["transfer_ns"]
    return frame[(frame["size"] > 1) & (frame["sent"] > 0) & possible]


def _by_kind_and_size(
    kind: npt.NDArray[np.object_], size: npt.NDArray[np.int64], ask: Callable[[str, int], float]
) -> npt.NDArray[np.float64] | npt.NDArray[np.int64]:
    """``ask`` of each row's kind and size of its group, called once for each two that occur."""
    names = sorted(set(kind.tolist()))
    (number, sizes), which = distinct_rows(np.searchsorted(np.array(names, dtype=object), kind), size)
    found: npt.NDArray[np.float64] | npt.NDArray[np.int64]
    found = np.array([ask(names[n], s) for n, s in zip(number.tolist(), sizes.tolist(), strict=True)])[which]
    return found


def sent_by_ring(kind: str, size: int, full: float) -> float:
    """Bytes that one rank sends of a collective of ``full`` bytes."""
    share = (size - 1) / size
    return full * {"all_reduce": 2 * share, "broadcast": 1.0, "send": 1.0}.get(kind, share)


def _crosses(job: Job, one: int, other: int) -> bool | None:
    """Whether two ranks lie on different nodes."""
    nodes = job.node_of or {}
    return nodes[one] != nodes[other] if one in nodes and other in nodes else None
