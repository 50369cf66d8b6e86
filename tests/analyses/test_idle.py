from __future__ import annotations

import pytest

from tests.analyses.made import Trace, job_of
from tracekit.analyses import idle


def causes(trace: Trace) -> dict[str, object]:
    (row,) = idle.analyze(job_of(trace)).json()["idle"]
    return {key: row[key] for key in ("idle_us", "host_bound_us", "waiting_for_collective_us", "other_us", "after_sync_us")}


def test_a_gap_is_host_bound_when_the_next_work_was_launched_after_the_device_ran_dry() -> None:
    trace = Trace()
    trace.step(1, 0, 1000)
    trace.kernel("a", 0, 400, launch=-50)
    trace.kernel("b", 600, 400, launch=500)
    assert causes(trace) == {
        "idle_us": 200.0,
        "host_bound_us": 200.0,
        "waiting_for_collective_us": 0.0,
        "other_us": 0.0,
        "after_sync_us": 0.0,
    }


def test_a_gap_before_work_that_was_queued_already_is_other() -> None:
    trace = Trace()
    trace.step(1, 0, 1000)
    trace.kernel("a", 0, 400, launch=-50)
    trace.kernel("b", 410, 590, launch=100)
    assert causes(trace)["other_us"] == 10.0


def test_a_gap_before_work_of_unknown_launch_is_other() -> None:
    trace = Trace()
    trace.step(1, 0, 1000)
    trace.kernel("a", 0, 400, launch=-50)
    trace.kernel("b", 500, 500)
    assert causes(trace)["other_us"] == 100.0


@pytest.mark.parametrize(
    ("stream", "start", "cause"),
    [(7, 420, "waiting_for_collective_us"), (20, 420, "other_us"), (7, 480, "other_us")],
    ids=["other stream", "same stream", "too long after"],
)
def test_queued_work_that_starts_right_after_a_collective_of_another_stream_waited_for_it(stream: int, start: int, cause: str) -> None:
    trace = Trace()
    trace.step(1, 0, 1000)
    trace.collective("allreduce", 0, 400, stream=20, launch=-50)
    trace.kernel("b", start, 1000 - start, stream=stream, launch=100)
    assert causes(trace)[cause] == start - 400.0


def test_a_gap_that_no_work_ends_is_host_bound() -> None:
    trace = Trace()
    trace.step(1, 0, 1000)
    trace.kernel("a", 0, 400, launch=-50)
    assert causes(trace)["host_bound_us"] == 600.0


def test_time_in_a_barrier_before_the_launch_is_waiting_for_a_collective() -> None:
    trace = Trace()
    trace.step(1, 0, 1000)
    trace.kernel("a", 0, 400, launch=-50)
    trace.operator("c10d::monitored_barrier_", 350, 200)  # 150 of it in the gap
    trace.kernel("b", 700, 300, launch=650)
    found = causes(trace)
    assert (found["waiting_for_collective_us"], found["host_bound_us"]) == (150.0, 150.0)


def test_gaps_that_begin_while_the_host_synchronizes_are_told() -> None:
    trace = Trace()
    trace.step(1, 0, 1000)
    trace.kernel("a", 0, 400, launch=-50)
    trace.launch(5000, 100, dur=310, name="cudaStreamSynchronize")
    trace.kernel("b", 600, 100, launch=500)
    trace.kernel("c", 800, 200, launch=750)
    assert causes(trace) == {
        "idle_us": 300.0,
        "host_bound_us": 300.0,
        "waiting_for_collective_us": 0.0,
        "other_us": 0.0,
        "after_sync_us": 200.0,
    }
    (finding,) = idle.analyze(job_of(trace)).findings()
    assert finding.text == (
        "For 30% of a step (300 us) the device is idle because the host has not launched its work yet; "
        "67% of that follows a call that waits for the device."
    )
    assert (finding.id, finding.severity, finding.weight_ns) == ("idle.host_bound", "critical", 300_000)
    assert ".item()" in finding.advice and "CUDA graphs" in finding.advice


def test_a_gap_across_the_edge_of_a_step_is_shared_between_the_steps() -> None:
    trace = Trace()
    trace.step(1, 0, 100)
    trace.step(2, 100, 100)
    trace.kernel("a", 0, 80, launch=-50)
    trace.kernel("b", 150, 50, launch=90)
    rows = idle.analyze(job_of(trace)).json()["idle"]
    assert [(row["idle_us"], row["host_bound_us"]) for row in rows] == [(20.0, 20.0), (50.0, 50.0)]


def test_launches_and_the_delay_to_their_start_are_counted_a_step() -> None:
    trace = Trace()
    trace.step(1, 0, 1000)
    trace.kernel("a", 100, 10, launch=60)
    trace.kernel("b", 200, 10, launch=140)
    trace.kernel("c", 300, 10)
    (row,) = idle.analyze(job_of(trace)).json()["idle"]
    assert (row["launches"], row["launch_to_start_us"]) == (2, 50.0)


def test_on_a_cpu_job_time_outside_operators_is_the_hosts_and_time_in_a_call_is_waiting() -> None:
    trace = Trace(0, 2, backend="gloo", device=None)
    trace.step(1, 0, 1000)
    trace.operator("aten::mm", 0, 300)
    trace.operator("c10d::recv_", 400, 200)
    trace.operator("aten::mm", 600, 400)
    found = causes(trace)
    assert (found["idle_us"], found["host_bound_us"], found["waiting_for_collective_us"]) == (300.0, 100.0, 200.0)
    waiting, host = sorted(idle.analyze(job_of(trace)).findings(), key=lambda f: -f.weight_ns)
    assert waiting.id == "idle.waiting" and "20% of a step" in waiting.text
    assert host.text == "For 10% of a step (100 us) no operator runs: the time goes to Python or data loading."


def test_idle_is_the_breakdowns_idle_and_a_truncated_rank_has_none() -> None:
    trace = Trace()
    trace.step(1, 0, 1000)
    trace.kernel("a", 0, 400, launch=-50)
    result = idle.analyze(job_of(trace, status={0: "truncated"}))
    (row,) = result.json()["idle"]
    assert (row["idle_us"], row["launches"]) == (None, None)
    assert result.findings() == [] and result.sections() == []
