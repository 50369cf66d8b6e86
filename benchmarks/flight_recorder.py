"""A hang of many ranks: CPU time and memory of ``tracekit analyze`` on their flight recorder dumps.

    python benchmarks/flight_recorder.py FOLDER [RANKS] [ENTRIES] [FRAMES]

The dumps are synthetic, in the form of torch's (its fields, frames that are one object wherever they are the same): groups tp of 8 and
dp of the rest, one rank that never comes to its last all-reduce of dp.
"""

from __future__ import annotations

import json
import pickle
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

TP = 8


def dump(rank: int, ranks: int, entries: int, frames: int, late: int) -> dict[str, Any]:
    """One rank's dump. ``late`` has not come to the last collective."""
    tp = list(range(rank // TP * TP, rank // TP * TP + TP))
    dp = list(range(rank % TP, ranks, TP))
    groups = {"0": ("default_pg", list(range(ranks))), "1": ("mesh_tp", tp), "2": ("mesh_dp", dp)}
    known = [
        {"name": f"function_{n}", "filename": f"/opt/conda/lib/python3.11/site-packages/torch/nn/f{n}.py", "line": n} for n in range(200)
    ]
    own = [{"name": "train_step", "filename": "/home/user/train.py", "line": 100 + n} for n in range(40)]
    rows = []
    for number in range(entries - (rank == late)):
        name = "2" if number % 4 == 3 else "1"
        last = number >= entries - 1
        rows.append(
            {
                "frames": [*(known[(number + n) % 200] for n in range(frames - 2)), own[number % 40], own[0]],
                "record_id": 100_000 + number,
                "pg_id": int(name),
                "process_group": (name, groups[name][0]),
                "collective_seq_id": 50_000 + number,
                "p2p_seq_id": 0,
                "op_id": 100_000 + number,
                "profiling_name": "nccl:all_reduce",
                "time_created_ns": 1_780_000_000_000_000_000 + 1_000_000 * number,
                "duration_ms": None,
                "input_sizes": [[4096, 1024]],
                "input_dtypes": ["BFloat16"],
                "output_sizes": [[4096, 1024]],
                "output_dtypes": ["BFloat16"],
                "state": "started" if last else "completed",
                "time_discovered_started_ns": 1_780_000_000_000_000_000 + 1_000_000 * number,
                "time_discovered_completed_ns": None if last else 1_780_000_000_000_500_000 + 1_000_000 * number,
                "retired": not last,
                "timeout_ms": 600_000,
                "is_p2p": False,
            }
        )
    config = {name: {"name": name, "desc": described, "ranks": str(members)} for name, (described, members) in groups.items()}
    status = {name: {"last_enqueued_collective": -1, "last_started_collective": -1, "last_completed_collective": -1} for name in groups}
    return {"version": "2.10", "pg_config": config, "pg_status": status, "entries": rows}


def main() -> None:
    """Make the dumps, analyze them in a process of its own, print what it took."""
    folder = Path(sys.argv[1])
    ranks, entries, frames = (int(text) for text in (sys.argv[2:] + ["1024", "2000", "20"][len(sys.argv) - 2 :]))
    folder.mkdir(parents=True, exist_ok=True)
    late = ranks // 2 + 3
    for rank in range(ranks):
        path = folder / f"nccl_trace_rank_{rank}"
        if not path.exists():
            path.write_bytes(pickle.dumps(dump(rank, ranks, entries, frames, late), protocol=2))
    size = sum(path.stat().st_size for path in folder.iterdir())
    command = [
        sys.executable,
        "-m",
        "tracekit",
        "analyze",
        str(folder),
        "--json",
        "-",
        "-q",
        "--no-cache",
        "-o",
        str(folder.parent / "hang.html"),
    ]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(json.loads(answer.stdout)["hang"]["text"])
    print(
        f"{ranks} ranks, {size / 1e6:.0f} MB: {used.ru_utime + used.ru_stime:.1f} s of CPU, largest process {used.ru_maxrss / 1024:.0f} MB"
    )


if __name__ == "__main__":
    main()
