"""What a message costs on each mesh axis: alpha and beta fitted from the job's own collectives.

Of a matched collective of kind k over x ranks with S bytes, transfer is the time from the last arrival to the end. The model
(alpha-beta, ring) is

    transfer = alpha * n + beta * B      n logical steps, B bytes that one rank sends

Alpha (a step's latency) and beta (seconds a byte) are the non-negative least squares over the collectives of an axis: those of one kind
and size are one point, their median, which late threads and busy links move least. Each point is weighed by its number and by 1/transfer,
so that small ones count as much as large ones. The residual is the median of |predicted - measured| / measured over all collectives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.collectives.cost import logical_steps
from tracekit.job.model import Job
from tracekit.units import NS_PER_US

#: Fewer collectives than this say nothing of a line.
FEWEST = 4
_RING = {"all_gather": "ring", "reduce_scatter": "ring", "all_reduce": "ring", "all_to_all": "pairwise", "broadcast": "tree"}


@dataclass(frozen=True)
class Link:
    """One axis. ``latency_us`` alpha, ``gb_s`` 1/beta in 10^9 bytes a second (None: time does not grow with size), ``residual`` a share.

    ``best_gb_s``: the highest bus bandwidth that a collective reached; ``operations``: how many were fitted; ``sizes`` different bytes.
    """

    axis: str
    operations: int
    sizes: int
    latency_us: float | None
    gb_s: float | None
    residual: float | None
    best_gb_s: float | None
    problem: str = ""


def links(job: Job) -> list[Link]:
    """A line for every axis on which complete collectives were matched, in order of the mesh's axes, then by name."""
    matches = job.matches
    usable = matches[matches["complete"] & (matches["transfer_ns"] > 0) & (matches["full_bytes"] > 0) & matches["kind"].isin(_RING)]
    by_axis: dict[str, list[tuple[str, int, int, int]]] = {}
    for group, kind, transfer, full in zip(usable["group"], usable["kind"], usable["transfer_ns"], usable["full_bytes"], strict=True):
        if group >= 0 and job.groups[group].size > 1:
            by_axis.setdefault(job.groups[group].axis, []).append((str(kind), job.groups[group].size, int(full), int(transfer)))
    order = {axis.name: i for i, axis in enumerate(job.mesh.axes)}
    return [_fit(axis, rows) for axis, rows in sorted(by_axis.items(), key=lambda item: (order.get(item[0], len(order)), item[0]))]


def cost(link: Link, kind: str, size: int, full: int) -> float | None:
    """What the fitted line says of one collective of ``full`` bytes over ``size`` ranks [us]; None without a line, or for another kind."""
    if link.latency_us is None or kind not in _RING:
        return None
    bandwidth_us = _sent(kind, size, full) / link.gb_s / 1000 if link.gb_s is not None else 0.0
    return link.latency_us * logical_steps(kind, _RING[kind], size) + bandwidth_us


def _fit(axis: str, rows: list[tuple[str, int, int, int]]) -> Link:
    steps = np.array([logical_steps(kind, _RING[kind], size) for kind, size, _, _ in rows], np.float64)
    sent = np.array([_sent(kind, size, full) for kind, size, full, _ in rows], np.float64)
    taken = np.array([transfer for *_, transfer in rows], np.float64)
    best = float(np.max(sent / taken))
    sizes = len({full for _, _, full, _ in rows})
    if len(rows) < FEWEST or sizes < 2:
        why = "too few collectives, or all of one size: latency and bandwidth cannot be told apart"
        return Link(axis, len(rows), sizes, None, None, None, best, why)
    alpha, beta = _non_negative(*_points(rows))
    residual = float(np.median(np.abs(alpha * steps + beta * sent - taken) / taken))
    return Link(axis, len(rows), sizes, alpha / NS_PER_US, 1 / beta if beta > 0 else None, residual, best)


def _points(rows: list[tuple[str, int, int, int]]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(steps, bytes) over the median transfer of collectives of one kind and size, each as often as there are such."""
    alike: dict[tuple[str, int, int], list[int]] = {}
    for kind, size, full, transfer in rows:
        alike.setdefault((kind, size, full), []).append(transfer)
    count = [len(transfers) for transfers in alike.values()]
    taken = np.array([float(np.median(transfers)) for transfers in alike.values()])
    steps = np.array([logical_steps(kind, _RING[kind], size) for kind, size, _ in alike], np.float64)
    sent = np.array([_sent(kind, size, full) for kind, size, full in alike], np.float64)
    return np.repeat(steps / taken, count), np.repeat(sent / taken, count)


def _sent(kind: str, size: int, full: int) -> float:
    share = (size - 1) / size
    return full * {"all_reduce": 2 * share, "broadcast": 1.0}.get(kind, share)


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
