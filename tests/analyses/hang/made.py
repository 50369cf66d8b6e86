"""Dumps of a few lines in the flight recorder's own form (its fields stand in torch's sources), and the hang that follows from them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

from tracekit.analyses.hang import Hang, analyze
from tracekit.job.load import LoadOptions, load_job

DONE, STARTED, SCHEDULED = "completed", "started", "scheduled"
WORLD = {"0": ("default_pg", [0, 1, 2, 3])}


class RankDump:
    """One rank's dump. ``groups``: name -> (description, global ranks)."""

    def __init__(self, groups: dict[str, tuple[str, list[int]]] | None = None, version: str = "2.10", backend: str = "nccl") -> None:
        self.groups = WORLD if groups is None else groups
        self.version, self.backend = version, backend
        self.entries: list[dict[str, Any]] = []
        self.numbers: dict[str, int] = {}

    def call(
        self, kind: str = "all_reduce", group: str = "0", state: str = DONE, line: int = 10, size: int = 64, dtype: str = "Float"
    ) -> RankDump:
        """One more call, with the next number of its group; ``kind`` may be ``send 0->1``."""
        p2p = kind.startswith(("send", "recv"))
        number = self.numbers.get(group, 0)
        if not p2p:
            number = self.numbers[group] = number + 1
        frames = [
            {"name": kind, "filename": "/lib/site-packages/torch/distributed/distributed_c10d.py", "line": 3000},
            {"name": "train_step", "filename": "train.py", "line": line},
        ]
        entry = {
            "frames": frames,
            "record_id": len(self.entries),
            "pg_id": 0,
            "process_group": (group, self.groups[group][0]),
            "collective_seq_id": number,
            "p2p_seq_id": len(self.entries) if p2p else 0,
            "op_id": len(self.entries),
            "profiling_name": f"{self.backend}:{kind}",
            "time_created_ns": 1_780_000_000_000_000_000 + len(self.entries),
            "duration_ms": None,
            "input_sizes": [[size]],
            "output_sizes": [[size]],
            "input_dtypes": [dtype],
            "output_dtypes": [dtype],
            "state": state,
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "retired": state == DONE,
            "timeout_ms": 600_000,
            "is_p2p": p2p,
        }
        if self.version.startswith("2.0"):
            del entry["process_group"]
            entry["seq_id"] = entry.pop("collective_seq_id")
        self.entries.append(entry)
        return self

    def root(self) -> dict[str, Any]:
        config = {name: {"name": name, "desc": description, "ranks": str(ranks)} for name, (description, ranks) in self.groups.items()}
        return {"version": self.version, "pg_config": config, "pg_status": {}, "entries": self.entries}

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(json.dumps(self.root()).encode() if path.suffix == ".json" else pickle.dumps(self.root(), 2))


def hang_of(folder: Path, dumps: dict[int, RankDump], texts: dict[int, str] | None = None) -> Hang:
    """Write the dumps and stacks of these ranks and find the hang."""
    for rank, dump in dumps.items():
        dump.write(folder / f"nccl_trace_rank_{rank}")
    for rank, text in (texts or {}).items():
        (folder / f"rank_{rank}.stacks.txt").write_text(text)
    return analyze(load_job([str(folder)], LoadOptions()))


def told(hang: Hang) -> tuple[str, str]:
    """(why, the sentence of the first finding)."""
    assert hang.root is not None
    return hang.root.why, hang.findings()[0].text
