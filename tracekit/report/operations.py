"""Every matched operation of the job, rank by rank, for ``--operations``."""

from __future__ import annotations

from typing import Any

import numpy as np

from tracekit.job.model import Job
from tracekit.units import NS_PER_US, NULL, microseconds


def time_zero(job: Job) -> int | None:
    """Unix time [ns], on the job's clock, from which ``start_us`` and ``end_us`` count: the start of the earliest window."""
    starts = [int(job.aligned(index, window.span[0])) for index, window in enumerate(job.traced)]
    return min(starts, default=None)


def operations_json(job: Job) -> list[dict[str, Any]]:
    """One entry a match, in order of its number; ``ranks`` holds when each rank began and left it."""
    zero = time_zero(job) or 0
    chosen = job.operations[job.operations["match"] >= 0]
    order = np.argsort(chosen["match"].to_numpy(), kind="stable")
    numbers = chosen["match"].to_numpy()[order]
    bounds = np.searchsorted(numbers, np.arange(len(job.matches) + 1)).tolist()
    ranks = chosen["rank"].to_numpy()[order].tolist()
    starts = ((chosen["start_ns"].to_numpy()[order] - zero) / NS_PER_US).tolist()
    ends = ((chosen["end_ns"].to_numpy()[order] - zero) / NS_PER_US).tolist()
    result = []
    for index, match in enumerate(job.matches.to_dict("records")):
        members = range(bounds[index], bounds[index + 1])
        transfer = int(match["transfer_ns"])
        result.append(
            {
                "group": job.groups[match["group"]].id if match["group"] >= 0 else None,
                "kind": match["kind"],
                "seq": _known(match["seq"]),
                "step": _known(match["step_number"]),
                "ranks": {str(ranks[i]): {"start_us": starts[i], "end_us": ends[i]} for i in members},
                "last_rank": int(match["last_rank"]),
                "skew_us": microseconds(int(match["last_start_ns"]) - int(match["first_start_ns"])),
                "transfer_us": microseconds(transfer),
                "complete": bool(match["complete"]),
                "matched_by": match["matched_by"],
            }
        )
    return result


def _known(value: int) -> int | None:
    return None if value == NULL else int(value)
