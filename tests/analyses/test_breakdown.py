from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analyses.made import Trace, activity_of, job_of, work
from tracekit.analyses import breakdown, idle, overlap


def test_a_step_is_divided_among_compute_communication_copies_and_idle() -> None:
    # compute 100-400; communication 300-600 (100 hidden, 200 exposed); copy 550-700 (100 exposed); idle 0-100, 700-1000
    trace = Trace()
    trace.step(3, 0, 1000)
    trace.kernel("gemm", 100, 300, launch=10)
    trace.collective("allreduce", 300, 300, launch=20)
    trace.kernel("Memcpy HtoD", 550, 150, stream=9, launch=50, cat="gpu_memcpy")
    rows = job_result(trace)
    assert rows == [
        {
            "rank": 0,
            "step": 3,
            "step_us": 1000.0,
            "device": None,
            "compute_us": 300.0,
            "exposed_comm_us": 200.0,
            "hidden_comm_us": 100.0,
            "memory_copy_us": 100.0,
            "hidden_copy_us": 50.0,
            "idle_us": 400.0,
            "unknown_us": 0.0,
            "launched_compute_us": 300.0,
            "launched_comm_us": 300.0,
        }
    ]


def job_result(*traces: Trace) -> list[dict[str, object]]:
    result = breakdown.analyze(job_of(*traces)).json()["breakdown"]
    assert isinstance(result, list)
    return result


def test_work_counts_where_it_runs_and_again_where_it_was_launched() -> None:
    # The device is one step behind: step 1 launches 200 us that run in step 2.
    trace = Trace()
    trace.step(1, 0, 500)
    trace.step(2, 500, 500)
    trace.kernel("gemm", 450, 100, launch=100)  # 50 in step 1, 50 in step 2
    trace.kernel("gemm", 600, 100, launch=200)
    trace.kernel("gemm", 900, 300, launch=700)  # 100 in step 2, the rest after it
    rows = job_result(trace)
    assert [row["compute_us"] for row in rows] == [50.0, 250.0]
    assert [row["launched_compute_us"] for row in rows] == [200.0, 300.0]


def test_device_time_that_starts_outside_every_step_is_told() -> None:
    trace = Trace()
    trace.step(1, 0, 500)
    trace.kernel("gemm", 100, 300, launch=10)
    trace.kernel("gemm", 600, 100, launch=20)
    result = breakdown.analyze(job_of(trace))
    assert result.outside_share == 0.25
    assert [f.id for f in result.findings()] == ["breakdown.outside_steps"]
    assert "25% of the device time" in result.sections()[0].charts[0].note


def test_without_step_marks_the_whole_window_is_one_step_without_a_number() -> None:
    trace = Trace()
    trace.operator("aten::mm", 0, 10)
    trace.kernel("gemm", 100, 300, launch=10)
    trace.kernel("gemm", 500, 100, launch=20)
    (row,) = job_result(trace)
    assert (row["step"], row["step_us"], row["compute_us"], row["idle_us"]) == (None, 600.0, 400.0, 200.0)


def test_a_truncated_rank_has_no_sums_and_is_in_no_mean() -> None:
    traces = [Trace(rank, 2) for rank in range(2)]
    for trace in traces:
        trace.step(1, 0, 1000)
        trace.kernel("gemm", 100, 300, launch=10)
    result = breakdown.analyze(job_of(*traces, status={1: "truncated"}))
    rows = result.json()["breakdown"]
    assert [row["compute_us"] for row in rows] == [300.0, None]
    assert [row["idle_us"] for row in rows] == [700.0, None]
    assert "rank 1 is truncated" in result.json()["not_measured"]["breakdown parts"]
    assert result.sections()[0].charts[0].labels == ["rank 0"]


def test_a_rank_that_computes_longer_is_named_with_its_figure() -> None:
    traces = [Trace(rank, 4) for rank in range(4)]
    for trace, duration in zip(traces, (400, 400, 400, 480), strict=True):
        trace.step(1, 0, 1000)
        trace.kernel("gemm", 100, duration, launch=10)
    (finding,) = breakdown.analyze(job_of(*traces)).findings()
    assert finding.id == "breakdown.compute_imbalance"
    assert finding.severity == "warning"
    assert finding.text == "Rank 3 computes 20% longer than the median rank (480 us against 400 us)."
    assert finding.weight_ns == 80_000


def test_a_step_that_takes_longer_and_copies_that_hold_up_the_device_are_findings() -> None:
    trace = Trace()
    for number, (start, dur) in enumerate([(0, 100), (100, 100), (200, 150)]):
        trace.step(number, start, dur)
        trace.kernel("gemm", start, 80, launch=start)
        trace.kernel("Memcpy DtoH", start + 80, 20, launch=start, cat="gpu_memcpy")
    texts = [f.text for f in breakdown.analyze(job_of(trace)).findings()]
    assert texts == [
        "Step 2 takes 150 us, 50% more than the median of 100 us.",
        "Memory copies hold up the device for 17.1% of a step (20 us), most of it from the device to the host.",
    ]


def test_no_work_gives_no_row_instead_of_zeros() -> None:
    trace = Trace()
    trace.step(1, 0, 1000)
    assert breakdown.reduce(activity_of(trace)) is None
    assert job_result(trace) == []


_PIECES = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 60), st.integers(0, 2), st.integers(0, 2), st.one_of(st.none(), st.integers(-50, 400))),
    min_size=1,
    max_size=40,
)


@given(_PIECES, st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_parts_are_what_counting_every_nanosecond_gives_and_add_up(pieces: list[tuple[int, ...]], steps: int) -> None:
    pieces = [(start, start + length, *rest) for start, length, *rest in pieces]
    marks = [(number, number * 100, number * 100 + 100) for number in range(steps)]
    activity = work(pieces, marks)
    parts = breakdown.reduce(activity)
    gaps = idle.reduce(activity)
    exposure = overlap.reduce(activity)
    assert parts is not None and gaps is not None and exposure is not None
    for step, (_, low, high) in enumerate(marks):
        at = np.arange(low, high)
        k, c, m = (np.zeros(len(at), bool) for _ in range(3))
        for start, end, kind, *_ in pieces:
            (k, c, m)[kind][:] |= (at >= start) & (at < end)
        assert parts.compute_ns[step] == k.sum()
        assert parts.exposed_comm_ns[step] == (c & ~k).sum() == exposure.exposed_ns[step]
        assert parts.hidden_comm_ns[step] == (c & k).sum() == exposure.hidden_ns[step]
        assert parts.exposed_copy_ns[step] == (m & ~k & ~c).sum()
        assert parts.hidden_copy_ns[step] == (m & (k | c)).sum()
        assert parts.idle_ns[step] == (~(k | c | m)).sum() == gaps.idle_ns[step]
        assert parts.compute_ns[step] + parts.exposed_comm_ns[step] + parts.exposed_copy_ns[step] + parts.idle_ns[step] == high - low
        assert gaps.host_bound_ns[step] + gaps.waiting_ns[step] + gaps.other_ns[step] == gaps.idle_ns[step]
        assert min(gaps.host_bound_ns[step], gaps.waiting_ns[step], gaps.other_ns[step]) >= 0


@given(_PIECES)
@settings(max_examples=50, deadline=None)
def test_launched_work_is_the_union_of_what_each_step_launched(pieces: list[tuple[int, ...]]) -> None:
    pieces = [(start, start + length, *rest) for start, length, *rest in pieces]
    marks = [(0, 0, 100), (1, 100, 200), (2, 250, 300)]
    parts = breakdown.reduce(work(pieces, marks))
    assert parts is not None
    for step, (_, low, high) in enumerate(marks):
        busy: set[int] = set()
        for start, end, kind, _, launch in pieces:
            if kind == 0 and launch is not None and low <= launch < high:
                busy |= set(range(start, end))
        assert parts.launched_compute_ns[step] == len(busy)


PARTS = ("compute_us", "exposed_comm_us", "memory_copy_us", "idle_us", "unknown_us")


def test_time_in_which_lost_work_may_have_run_is_unknown_and_the_step_is_in_no_mean() -> None:
    trace = Trace()
    trace.step(1, 0, 500)
    trace.kernel("gemm", 100, 300, launch=10)
    trace.step(2, 500, 500)
    trace.kernel("gemm", 550, 100, launch=510)
    for correlation in (901, 902):
        trace.launch(correlation, 520)  # their kernels are not in the trace
    trace.kernel("gemm", 850, 50, launch=530)
    job = job_of(trace)
    found = breakdown.analyze(job)
    assert [[row[part] for part in PARTS] for row in found.json()["breakdown"]] == [[300, 0, 0, 200, 0], [150, 0, 0, 150, 200]]
    assert [(mean["steps"], mean["compute_us"]) for mean in found.json()["mean_step"]] == [(1, 300), (1, 300)]
    assert any(p.startswith("2 of 5 kernel launches have no kernel") and "steps 2" in p for p in job.coverage[0].problems)


def test_launches_and_not_one_kernel_are_no_cpu_job() -> None:
    whole, lost = Trace(0, 2), Trace(1, 2)
    for trace in (whole, lost):
        trace.step(1, 0, 500)
    whole.kernel("gemm", 100, 300, launch=10)
    lost.operator("aten::mm", 5, 40)
    for correlation in range(901, 905):
        lost.launch(correlation, 10)
    job = job_of(whole, lost)
    found = breakdown.analyze(job)
    rows = found.json()["breakdown"]
    assert [(row["compute_us"], row["idle_us"], row["unknown_us"]) for row in rows] == [(300, 200, 0), (None, None, 500)]
    assert found.json()["mean_step"][0]["compute_us"] == 300
    assert (job.windows[1].on_cpu, job.windows[1].device_read) == (False, False)
    assert any("4 kernel launches" in p for p in job.coverage[1].problems)


def test_launches_that_a_capture_swallows_are_not_lost() -> None:
    trace = Trace()
    trace.step(1, 0, 500)
    trace.add("cuda_runtime", "cudaStreamBeginCapture", 5, 1, correlation=700)
    trace.launch(701, 10)
    trace.add("cuda_runtime", "cudaStreamEndCapture", 20, 1, correlation=702)
    trace.kernel("gemm", 100, 300, launch=30)
    (row,) = job_result(trace)
    assert row["unknown_us"] == 0


def test_time_outside_the_span_of_the_profiler_is_unknown() -> None:
    trace = Trace()
    trace.add("Trace", "PyTorch Profiler (0)", 0, 600, tid="PyTorch Profiler", pid="Spans")
    trace.step(1, 0, 1000)
    trace.kernel("gemm", 100, 300, launch=10)
    (row,) = job_result(trace)
    assert [row[part] for part in PARTS] == [300, 0, 0, 300, 400]


def test_devices_of_one_process_fill_nobody_elses_idle_time() -> None:
    trace = Trace()
    trace.step(1, 0, 100)
    trace.kernel("gemm", 0, 50, launch=1)
    trace.gpu = 1
    trace.kernel("gemm", 50, 50, launch=2)
    rows = job_result(trace)
    assert [(row["device"], row["compute_us"], row["idle_us"]) for row in rows] == [(0, 50, 50), (1, 50, 50)]


def test_work_without_a_correlation_is_linked_by_order_and_lost_by_nothing() -> None:
    trace = Trace()
    trace.step(1, 0, 500)
    for start, launch in ((100, 10), (200, 20)):
        trace.launch(0, launch)
        trace.kernel("gemm", start, 50, correlation=0)
    job = job_of(trace)
    (row,) = breakdown.analyze(job).json()["breakdown"]
    assert (row["launched_compute_us"], row["unknown_us"]) == (100, 0)


@given(lost=st.lists(st.integers(0, 99), max_size=5), kept=st.lists(st.integers(0, 99), min_size=1, max_size=8, unique=True))
@settings(max_examples=30)
def test_all_parts_make_up_the_step_whatever_is_lost(lost: list[int], kept: list[int]) -> None:
    trace = Trace()
    trace.step(1, 0, 1000)
    for place, at in enumerate(sorted(kept)):
        trace.kernel("gemm", 100 + 100 * place, 40, launch=at)
    for place, at in enumerate(lost):
        trace.launch(5000 + place, at)
    (row,) = job_result(trace)
    assert sum(row[part] for part in PARTS) == row["step_us"]  # type: ignore[misc]
    assert (row["unknown_us"] > 0) >= bool(lost)  # type: ignore[operator]


def test_long_kernels_on_a_stream_of_their_own_may_be_communication() -> None:
    trace = Trace(0, 64)
    trace.step(1, 0, 10_000)
    trace.kernel("gemm", 0, 9_900, launch=1)
    trace.kernel("strange_exchange<8>(x)", 100, 5_000, stream=27, launch=2)
    found = breakdown.analyze(job_of(trace)).findings()[0]
    assert (found.id, found.severity) == ("breakdown.communication_not_recognised", "critical")
    assert "strange_exchange<8> (5 ms)" in found.text
    assert "--communication" in found.advice


def test_a_job_whose_communication_is_recognised_is_not_suspected() -> None:
    trace = Trace(0, 64)
    trace.step(1, 0, 10_000)
    trace.kernel("gemm", 0, 9_900, launch=1)
    trace.kernel("embedding", 100, 5_000, stream=27, launch=2)
    trace.collective("allreduce", 9_000, 500, launch=3)
    assert breakdown.analyze(job_of(trace)).suspicion is None
