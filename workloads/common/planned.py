"""What a workload tells the analytical model of itself, in the keys of a plan file (docs/estimate.md): ``plan`` of the manifest.

Mesh, element types, optimizer, batch, schedule and device are not in it: they are observed.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from .gradients import CAP_MB
from .job import Job

Planned = dict[str, Any]


def of(workload: ModuleType, job: Job, options: Any) -> Planned:
    """The plan of a workload with the habits of this loop; {} of one that trains nothing."""
    if not hasattr(workload, "planned"):
        return {}
    told: Planned = workload.planned(job, options)
    repeats = job.shape.kv_heads != job.shape.heads and job.size("cp") == 1
    return {**told, "implementation": {"name": "workloads", "expand_kv": repeats, **told.get("implementation", {})}}


def by_hand(**more: Any) -> Planned:
    """Whole gradients, averaged in buckets when backward is over (``gradients``), or nothing to average at all."""
    return {"strategy": {"name": "ddp", "bucket_cap_mb": float(CAP_MB)}, "implementation": {"averages_after": True}, **more}
