"""Jobs recorded by others, beside the project; each figure is computed here again, from the JSON, the long way."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tracekit import analyses
from tracekit.job.load import LoadOptions, load_job

REAL = Path(__file__).resolve().parents[2].parent / "shared" / "real"
DLRM, DDP = REAL / "dlrm_v100_8ranks", REAL / "hta_a100_ddp_nccl_rank0of2.json.gz"


def events(path: Path) -> list[dict[str, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", errors="replace") as stream:
        return json.load(stream, parse_float=Decimal)["traceEvents"]


def communication(path: Path) -> list[tuple[str, int, int]]:
    """(kind by the kernel's name, start, end) in ns, by start."""
    found = []
    for event in events(path):
        if event.get("cat") == "kernel" and event["name"].startswith("ncclKernel"):
            kind = "all_to_all" if "SendRecv" in event["name"] else "all_reduce"
            start = int(Decimal(str(event["ts"])) * 1000)
            found.append((kind, start, start + int(Decimal(str(event["dur"])) * 1000)))
    return sorted(found, key=lambda piece: piece[1])


def covered(pieces: list[tuple[int, int]]) -> int:
    total, reach = 0, -1
    for start, end in sorted(pieces):
        total += max(0, end - max(start, reach))
        reach = max(reach, end)
    return total


@pytest.mark.skipif(not DLRM.exists(), reason="the recorded job is not beside the project")
def test_dlrm_busy_and_wait_times_are_those_computed_by_hand() -> None:
    job = load_job([str(DLRM)], LoadOptions(), analyses.reducers())
    results = analyses.run(job)
    assert (job.world_size, job.ranks, job.missing_ranks) == (8, list(range(8)), [])
    by_rank = {}
    for path in DLRM.iterdir():
        if ".json" in path.name:
            found = communication(path)
            with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as stream:
                by_rank[json.load(stream)["distributedInfo"]["rank"]] = found
    assert sorted(by_rank) == list(range(8))
    overlap = {row["rank"]: row for row in results["overlap"].json()["overlap"]}
    waits: dict[int, int] = dict.fromkeys(by_rank, 0)
    caused: dict[int, int] = dict.fromkeys(by_rank, 0)
    for kind, count in (("all_to_all", 5), ("all_reduce", 3)):
        own = {rank: [piece for piece in pieces if piece[0] == kind] for rank, pieces in by_rank.items()}
        assert {len(pieces) for pieces in own.values()} == {count}
        for nth in range(count):
            starts = {rank: pieces[nth][1] for rank, pieces in own.items()}
            last = max(starts.values())
            blamed = min(rank for rank, start in starts.items() if start == last)
            for rank, start in starts.items():
                waits[rank] += last - start
                caused[blamed] += last - start
    for row in results["stragglers"].json()["stragglers"]:
        assert row["wait_us"] == waits[row["rank"]] / 1000
        assert row["caused_wait_us"] == caused[row["rank"]] / 1000
        assert row["collectives"] == 8
    for rank, pieces in by_rank.items():
        assert overlap[rank]["comm_us"] == covered([piece[1:] for piece in pieces]) / 1000
    rows = results["collectives"].json()["collectives"]
    assert {kind: sum(row["count"] for row in rows if row["kind"] == kind) for kind in ("all_to_all", "all_reduce")} == {
        "all_to_all": 5,
        "all_reduce": 3,
    }
    assert all(row["full_bytes"] for row in rows)  # by the shapes of the operators


@pytest.mark.skipif(not DDP.exists(), reason="the recorded job is not beside the project")
def test_one_rank_of_a_ddp_job_has_its_collectives_and_says_what_is_missing() -> None:
    job = load_job([str(DDP)], LoadOptions(), analyses.reducers())
    results = analyses.run(job)
    rows = results["collectives"].json()["collectives"]
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["kind"]] = counts.get(row["kind"], 0) + row["count"]
        assert (row["group"], row["busbw_gb_s"], row["matched_by"]) == ("0", None, "none")
    assert counts == {"all_reduce": 15, "broadcast": 6}
    assert 6_637_568 * 4 in {row["full_bytes"] for row in rows}
    (group,) = results["process_groups"].json()["process_groups"]
    assert (group["description"], group["ranks"], group["operations"]) == ("default_pg", [0, 1], 21)
    assert "1 of 2 ranks are missing: 1." in [f.text for f in results["coverage"].findings()]
    for row in results["breakdown"].json()["breakdown"]:
        parts = ("compute_us", "exposed_comm_us", "memory_copy_us", "idle_us")
        assert sum(round(row[part] * 1000) for part in parts) == round(row["step_us"] * 1000)
