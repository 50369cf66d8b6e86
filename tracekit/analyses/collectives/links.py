"""What a message costs on each mesh axis: alpha and beta fitted from the job's own collectives and messages.

Of a matched call of kind k over x ranks with S bytes, transfer is the time from the last arrival to the end. The model
(alpha-beta, ring) is

    transfer = alpha * n + beta * B      n logical steps, B bytes that one rank sends

Alpha (a step's latency) and beta (seconds a byte) are the non-negative least squares over the calls of an axis: those of one kind
and size are one point, their median, which late threads and busy links move least. Each point is weighed by its number and by 1/transfer,
so that small ones count as much as large ones. A fit that ends at its border (alpha 0: time is proportional to size; beta 0: it does not
grow with it) does not tell that figure. The residual is the median of |predicted - measured| / measured over all calls.

Which link an axis uses: between nodes where one of its groups or pairs of ranks leaves a node, the others left aside; else inside one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from tracekit.analyses.collectives.moved import ALGORITHM, moved, sent_by_ring
from tracekit.collectives.cost import logical_steps
from tracekit.job.model import Job
from tracekit.units import NS_PER_US

#: Fewer collectives than this say nothing of a line.
FEWEST = 4
#: Smaller messages say nothing of a bandwidth, on whatever link.
LARGE_BYTES = 2**20


@dataclass(frozen=True)
class Link:
    """One axis. ``latency_us`` alpha, ``gb_s`` 1/beta in 10^9 bytes a second (None: the fit does not tell), ``residual`` a share.

    ``best_gb_s``: the highest bus bandwidth that a call reached; ``operations``: how many were fitted; ``sizes`` different bytes.
    ``crosses``: whether the calls behind ``large`` leave a node (None: not known); ``large``: (bus bandwidth [GB/s], bytes a rank sends,
    logical steps, ranks of the group on one node) of the calls that may show bandwidth, the fastest first.
    """

    axis: str
    operations: int
    sizes: int
    latency_us: float | None
    gb_s: float | None
    residual: float | None
    best_gb_s: float | None
    problem: str = ""
    crosses: bool | None = None
    large: Sequence[tuple[float, float, int, int]] = ()


def links(job: Job) -> list[Link]:
    """A line for every axis on which complete calls were matched, in order of the mesh's axes, then by name."""
    rows = moved(job)
    order = {axis.name: i for i, axis in enumerate(job.mesh.axes)}
    by_axis = {str(axis): part for axis, part in rows.groupby("axis")}
    return [_fit(job, axis, by_axis[axis]) for axis in sorted(by_axis, key=lambda name: (order.get(name, len(order)), name))]


def cost(link: Link, kind: str, size: int, full: int) -> float | None:
    """What the fitted line says of one collective of ``full`` bytes over ``size`` ranks [us]; None without a line, or for another kind."""
    if (link.latency_us is None and link.gb_s is None) or kind not in ALGORITHM or kind == "send":
        return None
    bandwidth_us = sent_by_ring(kind, size, full) / link.gb_s / 1000 if link.gb_s is not None else 0.0
    return (link.latency_us or 0.0) * logical_steps(kind, ALGORITHM[kind], size) + bandwidth_us


def _fit(job: Job, axis: str, rows: pd.DataFrame) -> Link:
    steps, sent, taken = (rows[name].to_numpy(np.float64) for name in ("steps", "sent", "transfer_ns"))
    best = float(np.max(sent / taken))
    sizes = rows["full_bytes"].nunique()
    crosses, large = _large(job, rows)
    if len(rows) < FEWEST or sizes < 2:
        why = "too few collectives, or all of one size: latency and bandwidth cannot be told apart"
        return Link(axis, len(rows), sizes, None, None, None, best, why, crosses, large)
    alpha, beta = _non_negative(*_points(rows))
    residual = float(np.median(np.abs(alpha * steps + beta * sent - taken) / taken))
    why = "" if alpha > 0 else "time is proportional to size: these messages are too large to show a latency"
    why = why if beta > 0 else "time does not grow with size: these messages are too small to show a bandwidth"
    latency, gb_s = (alpha / NS_PER_US if alpha > 0 else None), (1 / beta if beta > 0 else None)
    return Link(axis, len(rows), sizes, latency, gb_s, residual, best, why, crosses, large)


def _large(job: Job, rows: pd.DataFrame) -> tuple[bool | None, list[tuple[float, float, int, int]]]:
    """(whether they leave a node, the calls that may show bandwidth): those between nodes, where there are such."""
    outside = rows[rows["crosses"] == True]  # noqa: E712 - None is neither
    chosen = outside if len(outside) else rows
    known = None if chosen["crosses"].isna().any() else bool(len(outside))
    chosen = chosen[chosen["sent"] >= LARGE_BYTES]
    chosen = chosen.assign(rate=chosen["sent"] / chosen["transfer_ns"]).sort_values("rate", ascending=False).head(100)
    inside = {number: _on_one_node(job, number) for number in chosen["group"].unique().tolist()}
    columns = zip(chosen["rate"].tolist(), chosen["sent"].tolist(), chosen["steps"].tolist(), chosen["kind"], chosen["group"], strict=True)
    return known, [(rate, sent, int(steps), 1 if kind == "send" else inside[group]) for rate, sent, steps, kind, group in columns]


def _on_one_node(job: Job, number: int) -> int:
    """The fewest ranks that a group has on one of its nodes; 1 where nothing is known of them."""
    nodes, group = job.node_of or {}, job.groups[number]
    there: dict[Any, int] = {}
    for rank in group.ranks or ():
        if rank in nodes:
            there[nodes[rank]] = there.get(nodes[rank], 0) + 1
    return min(there.values(), default=1)


def _points(rows: pd.DataFrame) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(steps, bytes) over the median transfer of calls of one kind and size, each as often as there are such."""
    alike = rows.groupby(["kind", "size", "full_bytes"], sort=False)
    points = alike.agg(steps=("steps", "first"), sent=("sent", "mean"), taken=("transfer_ns", "median"), count=("steps", "size"))
    steps, sent = (points[name].to_numpy(np.float64) / points["taken"].to_numpy(np.float64) for name in ("steps", "sent"))
    count = points["count"].to_numpy()
    return np.repeat(steps, count), np.repeat(sent, count)


def _non_negative(steps: npt.NDArray[np.float64], sent: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The least squares of ``alpha * steps + beta * sent = 1`` with both at least 0: inside, or on one of the two edges."""
    aa, ab, bb = float(steps @ steps), float(steps @ sent), float(sent @ sent)
    a, b = float(steps.sum()), float(sent.sum())
    determinant = aa * bb - ab * ab
    if determinant > 0:
        alpha, beta = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if alpha >= 0 and beta >= 0:
            return alpha, beta
    edges = [(a / aa if aa else 0.0, 0.0), (0.0, b / bb if bb else 0.0)]
    return min(edges, key=lambda edge: float(np.sum((edge[0] * steps + edge[1] * sent - 1) ** 2)))
