"""A small job and results made by hand: everything a report can show, with names that try to break out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from tracekit import schema
from tracekit.analyses.breakdown import BREAKDOWN, Breakdown
from tracekit.findings import Finding, Section
from tracekit.job.model import Job
from tracekit.mesh.mesh import Axis, Mesh
from tracekit.mesh.process_groups import ProcessGroup, ProcessGroups
from tracekit.trace.clock import Clock
from tracekit.trace.events import Coverage
from tracekit.units import NULL

#: Our own names of the kinds that break reports: ends of elements, handlers, templates, entities, marks that turn a line around.
HOSTILE = (
    "</script><script>document.title='broken'</script>",
    "</title></style><h1>big",
    '<svg onload="alert(1)">',
    "<built-in method run>",
    "x && y <= z &amp; &lt;b&gt;",
    "{{ 6*7 }} {% raw %} ${6*7} `#{6*7}`",
    "\u202egnol si siht",
    "one\u2028two\u2029three",
    "\x1b[31mred\x1b[0m\x07",
    "<!-- <script> -->",
    "<!--plotly-->",
    "half a \ud83d surrogate",
    "' onmouseover='alert(1)",
    "%{y} <b>bold</b> <a href='https://example.org'>link</a>",
)


class Given:
    """A Result with given parts."""

    def __init__(self, findings: Sequence[Finding] = (), sections: Sequence[Section] = (), json: dict[str, Any] | None = None) -> None:
        self._findings, self._sections, self._json = list(findings), list(sections), json or {}

    def findings(self) -> list[Finding]:
        return self._findings

    def sections(self) -> list[Section]:
        return self._sections

    def json(self) -> dict[str, Any]:
        return self._json


def job(**changes: Any) -> Job:
    """Ranks 0 and 1 of 2, one all-reduce between them."""
    values: dict[str, Any] = {
        "world_size": 2,
        "ranks": [0, 1],
        "missing_ranks": [],
        "backend": "nccl",
        "device": "NVIDIA H100 80GB HBM3",
        "steps": [10, 11],
        "windows": [],
        "groups": ProcessGroups([ProcessGroup("3@0,1", "3", "mesh_tp", (0, 1), (0, 1), 2, "tp", False)], []),
        "mesh": Mesh([Axis("tp", 2)], {0: (0,), 1: (1,)}, "descriptions"),
        "clock": Clock(True, {0: 0, 1: 0}, 0),
        "operations": operations(),
        "matches": matches(),
        "coverage": [Coverage("runs/a/rank0.json", 0, events=40, arrows=7), Coverage("runs/a/rank1.json", 1, events=41, arrows=7)],
    }
    return Job(**(values | changes))


def operations() -> pd.DataFrame:
    """Rank 0 waits 300 us for rank 1; then a broadcast that only rank 0 recorded."""
    rows = [
        (0, 0, 0, 10, 10, 1_000_000, 1_500_000, "all_reduce", "tensor_parallel", 0, "tp", 7, "float32", 4096, 4096, 0, 300_000),
        (1, 1, 0, 10, 10, 1_300_000, 1_500_000, "all_reduce", "tensor_parallel", 0, "tp", 7, "float32", 4096, 4096, 0, 0),
        (0, 0, 1, NULL, NULL, 2_000_000, 2_100_000, "broadcast", "unknown", -1, "", NULL, "", NULL, NULL, -1, NULL),
    ]
    columns = list(zip(*rows, strict=True))
    rest = {"stream": [20, 20, 20], "phase": [""] * 3, "context": [""] * 3, "implementation": ["nccl"] * 3}
    return schema.OPERATIONS.frame({**dict(zip(schema.OPERATIONS.names, columns, strict=False)), **rest})


def matches() -> pd.DataFrame:
    row = (0, "all_reduce", 7, 10, 2, 2, True, 1_000_000, 1_300_000, 1_500_000, 1, 200_000, "seq", 4096)
    return schema.MATCHES.frame({name: [value] for name, value in zip(schema.MATCHES.names, row, strict=True)})


def breakdown(ranks: int = 2, steps: int = 2) -> list[dict[str, Any]]:
    """A step of 1 ms: 60% compute, 25% exposed communication, 1% copies, 14% idle; 100 us of communication hidden."""
    row = {"step_us": 1000.0, "compute_us": 600.0, "exposed_comm_us": 250.0, "memory_copy_us": 10.0, "idle_us": 140.0}
    return [{"rank": rank, "step": 10 + step, **row, "hidden_comm_us": 100.0} for rank in range(ranks) for step in range(steps)]


def with_means(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the step breakdown puts into the document for these rows."""
    columns = [column for column in BREAKDOWN.columns if column.unit == "ns"]
    ns = {c.name: [NULL if row.get(c.key) is None else int(row[c.key] * 1000) for row in rows] for c in columns}
    steps = [NULL if row["step"] is None else row["step"] for row in rows]
    ns["unknown_ns"] = [0] * len(rows)
    own = {"rank": [row["rank"] for row in rows], "window": [0] * len(rows), "step": steps, "device": [NULL] * len(rows)}
    frame = BREAKDOWN.frame({**own, **ns})
    return {"breakdown": rows, "mean_step": Breakdown(frame, 0.0).json()["mean_step"]}
