from __future__ import annotations

import pytest

from tests.analyses.made import Trace, activity_of, job_of
from tracekit.analyses import kernels


def some_kernels(rank: int = 0, world: int = 1, gemm: float = 30) -> Trace:
    trace = Trace(rank, world)
    trace.step(1, 0, 1000)
    trace.kernel("gemm", 100, gemm, launch=5)
    trace.kernel("gemm", 200, 10, launch=6)
    trace.kernel("relu", 300, 5, launch=7)
    trace.kernel("Memcpy HtoD", 400, 20, launch=8, cat="gpu_memcpy")
    trace.collective("allreduce", 500, 35, launch=9)
    trace.kernel("gemm", 2000, 20, launch=1900)  # after the step: counted here
    return trace


def test_kernels_are_summed_by_name_over_the_whole_trace() -> None:
    rows = kernels.analyze(job_of(some_kernels())).json()["kernels"]
    assert [(row["name"].split("(")[0], row["work"], row["calls"], row["total_us"]) for row in rows] == [
        ("gemm", "compute", 3, 60.0),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication", 1, 35.0),
        ("Memcpy HtoD", "copy", 1, 20.0),
        ("relu", "compute", 1, 5.0),
    ]
    assert (rows[0]["mean_us"], rows[0]["min_us"], rows[0]["max_us"], rows[0]["share"]) == (20.0, 10.0, 30.0, 0.5)


def test_ranks_are_compared_and_an_uneven_kernel_is_named() -> None:
    result = kernels.analyze(job_of(*(some_kernels(rank, 4, gemm=30 if rank else 130) for rank in range(4))))
    row = result.json()["kernels"][0]
    assert (row["ranks"], row["rank_min_us"], row["rank_max_us"]) == (4, 60.0, 160.0)
    (finding,) = result.findings()
    assert finding.text == "Kernel gemm takes 88% longer on rank 0 than on the mean rank (160 us against 85 us, whole trace)."


def test_a_rank_that_does_not_run_a_kernel_has_a_total_of_zero() -> None:
    other = Trace(1, 2)
    other.kernel("softmax", 10, 8, launch=5)
    rows = {row["name"]: row for row in kernels.analyze(job_of(some_kernels(0, 2), other)).json()["kernels"]}
    assert (rows["softmax"]["ranks"], rows["softmax"]["rank_min_us"], rows["softmax"]["rank_max_us"]) == (1, 0.0, 8.0)


def test_names_beyond_the_largest_are_added_up_exactly() -> None:
    trace = Trace()
    many = kernels.KEPT + 7
    for i in range(many):
        trace.kernel(f"kernel_{i:04}", 100 * i, 1 + i % 50, launch=100 * i - 20)
    sums = kernels.reduce(activity_of(trace))
    assert sums is not None
    assert len(sums.name) == kernels.KEPT + 1 and sums.name[-1] == "other"
    assert int(sums.calls.sum()) == many
    assert int(sums.total.sum()) == 1000 * sum(1 + i % 50 for i in range(many))
    result = kernels.analyze(job_of(trace)).json()["kernels"]
    assert len(result) == kernels.IN_JSON + 1 and result[-1]["name"] == "other"
    assert sum(row["share"] for row in result) == pytest.approx(1.0)
    assert sum(row["calls"] for row in result) == many


def test_names_that_no_text_column_can_hold_are_repaired() -> None:
    trace = Trace()
    trace.kernel("bad \ud800 name", 10, 5, launch=1)
    assert kernels.analyze(job_of(trace)).json()["kernels"][0]["name"] == "bad \ufffd name"


def test_a_cpu_job_has_no_kernels_and_says_so() -> None:
    trace = Trace(backend="gloo", device=None)
    trace.operator("aten::mm", 10, 50)
    result = kernels.analyze(job_of(trace))
    assert result.json() == {"kernels": None, "not_measured": {"kernels": "the job ran on the CPU"}}
    assert result.sections() == []
