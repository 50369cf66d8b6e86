"""Traces of jobs that stood still when they ended, without any dump: who is named. All made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builder import Trace, group
from tests.jobs import MadeJob, Shape
from tracekit import analyses
from tracekit.analyses.hang import Hang, analyze
from tracekit.findings import of_job
from tracekit.job.load import LoadOptions, load_job
from tracekit.job.model import Job

STEP, LONG = 1000, 60_000_000
WORLD = [group("0", "default_pg", [0, 1, 2, 3])]
DP = [group("0", "default_pg", list(range(8))), group("1", "dp", list(range(8)))]


def read(folder: Path) -> tuple[Job, Hang]:
    job = load_job([str(folder)], LoadOptions(), analyses.reducers())
    return job, analyze(job)


def healthy(trace: Trace, rank: int, steps: range, name: str = "0", description: str = "default_pg", ranks: str = "[0, 1, 2, 3]") -> None:
    for step in steps:
        at = STEP * step
        trace.step(step, at, STEP)
        trace.kernel("gemm", at + 50, 300, launch=at + 10)
        trace.collective("allreduce", at + 400, 60 - rank, seq=step + 1, launch=at + 20, group=name, description=description, ranks=ranks)


def waits(trace: Trace, how: str, at: int, seq: int, **where: str) -> None:
    """A collective that never ends, in the ways in which a trace may show that."""
    correlation = trace.collective("allreduce", at + 400, LONG, seq=seq, launch=at + 20, **{"ranks": "[0, 1, 2, 3]", **where})
    if how == "no kernel":
        trace.events = [e for e in trace.events if not (e.get("cat") == "kernel" and e["args"]["correlation"] == correlation)]
    if how == "no end":
        del trace.events[-1]["dur"]
    if how != "nothing on the host":
        trace.launch(trace.next_id(), at + 60, LONG + 400, "cudaDeviceSynchronize")


@pytest.mark.parametrize("how", ["a long kernel", "no kernel", "no end", "nothing on the host"])
@pytest.mark.parametrize("culprit", [0, 6])
def test_one_rank_never_joins(how, culprit, tmp_path):
    for rank in range(8):
        trace = Trace(rank, 8, DP)
        healthy(trace, rank, range(3), "1", "dp", str(list(range(8))))
        if rank == culprit:
            trace.operator("aten::item", 3 * STEP + 60, LONG)
        else:
            waits(trace, how, 3 * STEP, 4, group="1", description="dp", ranks=str(list(range(8))))
        trace.write(tmp_path / f"rank{rank}.json")
    job, hang = read(tmp_path)
    assert hang.root is not None
    assert (hang.root.ranks, hang.root.why, job.steps) == ([culprit], "busy", [0, 1, 2])
    rest = "1-7" if culprit == 0 else "0-5, 7"
    assert hang.text == f"Ranks {rest} wait in all_reduce seq 4 of dp (axis world) for rank {culprit}, which is in aten::item." or (
        hang.text == f"Ranks {rest} wait in all_reduce seq 4 of dp for rank {culprit}, which is in aten::item."
    )
    (wait,) = hang.json()["hang"]["waiting"]
    assert (wait["seq"], wait["last_completed"], wait["missing"]) == (4, 3, [culprit])
    findings = of_job(analyses.run(job))
    assert findings[0].id == "hang.root"
    assert "in step 3" in findings[0].evidence
    assert any(finding.id.startswith("stragglers.") for finding in findings)
    exposed = next((finding for finding in findings if finding.id == "overlap.exposed"), None)
    assert exposed is None or (exposed.value or 0) < 0.5


@pytest.mark.parametrize("gone", ["no file", "ends early", "cut"])
def test_a_rank_that_died(gone, tmp_path):
    for rank in range(4):
        if rank == 2 and gone == "no file":
            continue
        trace = Trace(rank, 4, WORLD)
        healthy(trace, rank, range(3))
        if rank != 2:
            waits(trace, "a long kernel", 3 * STEP, 4)
        path = trace.write(tmp_path / f"rank{rank}.json")
        if rank == 2 and gone == "cut":
            path.write_bytes(path.read_bytes()[:-300])
    _, hang = read(tmp_path)
    assert hang.root is not None
    assert (hang.root.ranks, hang.waits[0].call.seq) == ([2], 4)
    assert {
        "no file": "left no trace: it died",
        "ends early": "its trace ends 60 s before the last one",
        "cut": "its trace ends in the middle of the file",
    }[gone] in hang.text


@pytest.mark.parametrize("shift", [{1: 1}, {0: 1, 3: 2}, {0: 2, 1: 2, 2: 2}])
def test_windows_that_begin_and_end_at_other_steps_are_no_hang(shift, tmp_path):
    for rank in range(4):
        trace = Trace(rank, 4, WORLD)
        first = shift.get(rank, 0)
        healthy(trace, rank, range(first, first + 4))
        trace.write(tmp_path / f"rank{rank}.json")
    job, hang = read(tmp_path)
    assert (job.standstill, hang.root, hang.findings()) == (None, None, [])


def test_a_late_rank_at_the_end_of_the_window_is_a_straggler_and_no_hang(tmp_path):
    for rank in range(4):
        trace = Trace(rank, 4, WORLD)
        healthy(trace, rank, range(4))
        begin = 4 * STEP + (20_000 if rank == 3 else 100)
        trace.collective("allreduce", begin, 4 * STEP + 20_050 - begin, seq=5, launch=4 * STEP + 20, ranks="[0, 1, 2, 3]")
        trace.write(tmp_path / f"rank{rank}.json")
    assert read(tmp_path)[0].standstill is None


def test_kernels_that_one_rank_lost_are_no_hang(tmp_path):
    for rank in range(4):
        trace = Trace(rank, 4, WORLD)
        healthy(trace, rank, range(6))
        lost = [e for e in trace.events if e.get("cat") == "kernel" and e["ts"] > 3 * STEP]
        trace.events = [e for e in trace.events if rank != 1 or e not in lost]
        trace.write(tmp_path / f"rank{rank}.json")
    assert read(tmp_path)[0].standstill is None


def test_a_chain_over_two_groups(tmp_path):
    pairs = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
    across = {0: [0, 2], 2: [0, 2], 1: [1, 3], 3: [1, 3]}
    for rank in range(4):
        groups = [*WORLD, group("1", "tp", pairs[rank]), group("2", "dp", across[rank])]
        trace = Trace(rank, 4, groups)
        for step in range(3):
            at = STEP * step
            trace.step(step, at, STEP)
            trace.collective("allreduce", at + 400, 50, seq=step + 1, launch=at + 20, group="1", description="tp", ranks=str(pairs[rank]))
            trace.collective("allreduce", at + 500, 50, seq=step + 1, launch=at + 30, group="2", description="dp", ranks=str(across[rank]))
        if rank == 3:
            trace.annotation("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 3 * STEP + 10, LONG)
        elif rank == 2:
            waits(trace, "no kernel", 3 * STEP, 4, group="1", description="tp", ranks="[2, 3]")
        else:
            trace.collective("allreduce", 3400, 50, seq=4, launch=3020, group="1", description="tp", ranks="[0, 1]")
            waits(trace, "a long kernel", 3 * STEP + 100, 4, group="2", description="dp", ranks=str(across[rank]))
        trace.write(tmp_path / f"rank{rank}.json")
    _, hang = read(tmp_path)
    assert {(edge.rank, edge.waits_for) for edge in hang.edges} == {(0, 2), (1, 3), (2, 3)}
    assert hang.root is not None
    assert (hang.root.ranks, hang.root.doing) == ([3], "waits for its data loader")


def test_several_windows_of_which_the_last_hangs(tmp_path):
    for rank in range(4):
        for window, first in enumerate((0, 100)):
            trace = Trace(rank, 4, WORLD)
            healthy(trace, rank, range(first, first + 3))
            if window and rank != 1:
                waits(trace, "no kernel", (first + 3) * STEP, first + 4)
            elif window:
                trace.operator("aten::item", (first + 3) * STEP, LONG)
            trace.write(tmp_path / f"rank{rank}_{window}.json")
    job, hang = read(tmp_path)
    assert hang.root is not None
    assert (hang.root.ranks, hang.waits[0].call.seq, job.steps) == ([1], 104, [0, 1, 2, 100, 101, 102])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_pipeline_in_which_one_stage_stops(stage, tmp_path):
    """The stage sends nothing more; those behind it wait to receive."""
    job = MadeJob(Shape(pp=4, layers=1, micro_batches=4, steps=3))
    last = max(work.end for work in job.work if work.step == 1)
    for rank in range(4):
        own = [work for work in job.work if work.rank == rank and work.step < 2]
        trace = job._trace(rank, [*own, *(work for work in job.work if work.rank == rank and work.step == 2)])
        trace.events = [event for event in trace.events if event.get("ts", 0) < last]
        if rank > stage:
            trace.collective(
                "recv", last + 50, LONG, seq=None, launch=last + 10, group="1", description="mesh_pp", ranks="[0, 1, 2, 3]",
                stream=36, **{"Src Rank": rank - 1, "Dst Rank": rank},
            )  # fmt: skip
        trace.operator("aten::item" if rank == stage else "aten::to", last + 20, LONG)
        trace.write(tmp_path / f"rank{rank}.json")
    _, hang = read(tmp_path)
    assert hang.root is not None
    assert (hang.root.ranks, hang.root.why) == ([stage], "busy")
    assert hang.text.startswith(f"Rank {stage + 1} waits in recv of mesh_pp")
    assert {(edge.rank, edge.waits_for) for edge in hang.edges} == {(rank, rank - 1) for rank in range(stage + 1, 4)}


def gloo(rank: int, calls: list[tuple[int, int]], end: int) -> Trace:
    """Plain gloo: ranges without numbers. ``calls``: (start, duration; -1 none in the trace, only the call)."""
    trace = Trace(rank, 3, [group("0", "default_pg", [0, 1, 2])], backend="gloo", device=None)
    for start, duration in calls:
        trace.operator("c10d::allreduce_", start, 20)
        if duration >= 0:
            trace.annotation("gloo:all_reduce", start + 5, duration, tid=77)
    trace.operator("aten::sort", calls[-1][0] + 100, end - calls[-1][0] - 200)
    return trace


@pytest.mark.parametrize("shown", [LONG, -1])
@pytest.mark.parametrize("culprit", [0, 2])
def test_gloo(shown, culprit, tmp_path):
    for rank in range(3):
        calls = [(1000 * n, 300) for n in range(5)]
        calls += [] if rank == culprit else [(5000, shown)]
        gloo(rank, calls, LONG + 5000).write(tmp_path / f"rank{rank}.json")
    _, hang = read(tmp_path)
    assert hang.root is not None
    others = [rank for rank in range(3) if rank != culprit]
    assert (hang.root.ranks, sorted(call.rank for call in hang.waits[0].waiting)) == ([culprit], others)
    assert hang.waits[0].call.seq == 6


def test_the_line_of_code_where_python_is_recorded(tmp_path):
    for rank in range(4):
        trace = Trace(rank, 4, WORLD)
        trace.add("python_function", "train.py(9): <module>", 0, LONG + 5000, **{"Python id": 1})
        healthy(trace, rank, range(3))
        line = 31 if rank != 1 else 77
        trace.add("python_function", f"train.py({line}): step", 3 * STEP, LONG + 2000, **{"Python id": 2, "Python parent id": 1})
        if rank != 1:
            waits(trace, "no kernel", 3 * STEP, 4)
        trace.write(tmp_path / f"rank{rank}.json")
    _, hang = read(tmp_path)
    assert "all_reduce seq 4 of the default group (train.py:31) for rank 1, which is in step, at train.py:77" in hang.text


def test_all_are_in_it_and_it_does_not_end(tmp_path):
    for rank in range(4):
        trace = Trace(rank, 4, WORLD)
        healthy(trace, rank, range(3))
        waits(trace, "a long kernel", 3 * STEP, 4)
        trace.write(tmp_path / f"rank{rank}.json")
    _, hang = read(tmp_path)
    assert hang.root is not None
    assert (hang.root.why, hang.root.ranks) == ("stuck", [0, 1, 2, 3])
    assert hang.findings()[0].severity == "critical"


def test_without_steps_times_are_consequences(tmp_path):
    for rank in range(4):
        trace = Trace(rank, 4, WORLD)
        healthy(trace, rank, range(3))
        trace.events = [event for event in trace.events if not event["name"].startswith("ProfilerStep")]
        if rank == 2:
            trace.operator("aten::item", 3 * STEP + 60, LONG)
        else:
            waits(trace, "a long kernel", 3 * STEP, 4)
        trace.write(tmp_path / f"rank{rank}.json")
    job, hang = read(tmp_path)
    assert hang.root is not None
    assert hang.root.ranks == [2]
    findings = of_job(analyses.run(job))
    assert findings[0].id == "hang.root"
    assert not [finding.id for finding in findings if finding.id.startswith(("overlap.", "idle.waiting"))]
