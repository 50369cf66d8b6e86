"""Training programs that are not this repository's, recorded on two ranks: categories against known sizes and torch's own trackers.

All of them take a CPU minute: `python -m pytest -m frameworks tests/memory/test_recorded_programs.py`; without the marker a few run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.memory.recorded_programs import PROGRAMS, Program
from tests.recorder.launching import run_job
from tracekit import analyses
from tracekit.job.load import LoadOptions, load_job

SCRIPT = Path(__file__).with_name("recorded_programs.py")
SHORT = ("gpt ddp views from the first step", "lstm replacing", "mixer fsdp2 accumulating")
REST = tuple(name for name in PROGRAMS if name not in SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("names", [SHORT, pytest.param(REST, marks=pytest.mark.frameworks)], ids=["short", "rest"])
def test_categories_are_those_that_are_known(names: tuple[str, ...], tmp_path: Path) -> None:
    told = run_job(SCRIPT, str(tmp_path), *names, environment={"PYTHONPATH": str(Path(__file__).parents[2])})
    found = [json.loads(line) for line in told.splitlines() if line.startswith('{"name"')]
    assert [one["name"] for one in found] == list(names)
    for one in found:
        check(one["name"], PROGRAMS[one["name"]], peak_of(tmp_path / one["name"].replace(" ", "_")), one["known"], one["tracked"])


def peak_of(folder: Path) -> dict[str, Any]:
    job = load_job([str(folder)], LoadOptions(), {"memory": analyses.reducers()["memory"]})
    rows = analyses.modules()["memory"].analyze(job).json()["memory"]
    return next(row for row in rows if row["rank"] == 0)


def check(name: str, program: Program, row: dict[str, Any], known: dict[str, int], tracked: dict[str, int]) -> None:
    categories, least = row["categories"], 0.01 * row["peak_bytes"]
    for category in ("parameters", "optimizer_state", "buffers"):
        assert categories[category] == pytest.approx(known[category], rel=0.01, abs=64), (name, category)
    views = (program.ddp or {}).get("gradient_as_bucket_view")
    buckets = known["gradients"] if program.ddp is not None and not views else 0
    unsharded = tracked.get("Unsharded Grad", 0)
    assert (known["gradients"] if views else 0) <= categories["gradients"] <= 1.01 * known["gradients"], name
    passing = tracked.get("All Gather", 0) + tracked.get("Reduce Scatter", 0)
    assert categories["communication_buffers"] == pytest.approx(buckets + passing, rel=0.01), name
    assert categories["before_recording"] + categories["unattributed"] <= least, name
    assert categories["inputs"] == pytest.approx(known["batch"], abs=least), name
    assert categories["gathered_parameters"] == tracked.get("Unsharded Param", 0), name
    if program.compares:
        standing = known["gradients"] if views and not tracked.get("Gradient", 0) else 0
        assert row["peak_bytes"] == pytest.approx(tracked["Total"] + buckets + standing, rel=0.01), name
        inputs = 0 if "Inputs" in tracked else known["batch"]  # MemTracker counts those that autograd saves as activations
        assert abs(categories["activations"] + inputs - tracked["Activation"]) <= least + inputs, name
        assert unsharded <= categories["unsharded_gradients"] <= unsharded + categories["gathered_parameters"], name
