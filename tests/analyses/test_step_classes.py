from tests.analyses.made import job_of
from tests.builder import Trace
from tracekit.analyses import step_classes


def one_rank(rank: int) -> Trace:
    """Two steps: the gemm of step 0 runs into step 1; a kernel whose operator is not known; an all-reduce a step."""
    trace = Trace(rank, 2)
    for step in range(2):
        at = 1000 * step
        trace.step(step, at, 1000)
        trace.annotation("forward", at + 5, 200)
        trace.kernel("gemm_a", at + 950, 100, launch=at + 10, op="aten::mm")
        trace.kernel("gemm_b", at + 300 + 20 * rank, 40, launch=at + 30, op="aten::mm")
        trace.kernel("custom", at + 500, 7, launch=at + 400)
        trace.collective("allreduce", at + 600 + 20 * rank, 100 - 20 * rank, elements=256, seq=step, launch=at + 450)
    return trace


def test_work_counts_to_the_step_that_launched_it() -> None:
    found = step_classes.analyze(job_of(one_rank(0), one_rank(1))).json()["step_classes"]
    assert found["steps"] == [{"rank": rank, "step": step} for rank in (0, 1) for step in (0, 1)]
    assert [(row["operator"], row["kernels"], row["calls"], row["time_us"]) for row in found["compute"]] == [
        ("aten::mm", ["gemm_a", "gemm_b"], [2] * 4, [140.0] * 4),
        ("custom", ["custom"], [1] * 4, [7.0] * 4),
    ]
    assert found["phases"] == [{"phase": "forward", "time_us": [140.0] * 4}]


def test_a_collective_is_waiting_and_transfer() -> None:
    (row,) = step_classes.analyze(job_of(one_rank(0), one_rank(1))).json()["step_classes"]["collectives"]
    assert (row["axis"], row["kind"], row["dtype"], row["full_bytes"], row["calls"]) == ("world", "all_reduce", "float32", 1024, [1] * 4)
    assert row["wait_us"] == [20.0, 20.0, 0.0, 0.0]
    assert row["transfer_us"] == [80.0] * 4
    assert row["duration_us"] == [100.0, 100.0, 80.0, 80.0]


def test_what_a_rank_has_too_many_of_is_added_up(monkeypatch) -> None:
    monkeypatch.setattr(step_classes, "KEPT", 1)
    found = step_classes.analyze(job_of(one_rank(0), one_rank(1))).json()["step_classes"]
    assert [(row["operator"], row["calls"], row["time_us"]) for row in found["compute"]] == [
        ("aten::mm", [2] * 4, [140.0] * 4),
        ("other", [1] * 4, [7.0] * 4),
    ]


def test_a_trace_cut_in_the_middle_has_no_sums() -> None:
    found = step_classes.analyze(job_of(one_rank(0), one_rank(1), status={1: "truncated"})).json()["step_classes"]
    assert {row["rank"] for row in found["steps"]} == {0}
