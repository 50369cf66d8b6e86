from __future__ import annotations

from tests.analyses.made import Trace, activity_of, job_of
from tracekit.analyses import operators


def test_device_time_goes_to_the_innermost_operator_and_host_time_without_nested_calls() -> None:
    trace = Trace()
    trace.operator("aten::linear", 0, 100)
    trace.operator("aten::mm", 20, 50)
    trace.launch(7, 30)
    trace.kernel("gemm", 200, 400, correlation=7)
    trace.operator("aten::relu", 120, 20)
    trace.launch(8, 125)
    trace.kernel("relu", 600, 10, correlation=8)
    rows = operators.analyze(job_of(trace)).json()["operators"]
    assert rows == [
        {"name": "aten::mm", "calls": 1, "host_self_us": 50.0, "launches": 1, "device_us": 400.0, "ranks": 1},
        {"name": "aten::relu", "calls": 1, "host_self_us": 20.0, "launches": 1, "device_us": 10.0, "ranks": 1},
        {"name": "aten::linear", "calls": 1, "host_self_us": 50.0, "launches": 0, "device_us": 0.0, "ranks": 1},
    ]


def test_operators_of_two_threads_do_not_nest() -> None:
    trace = Trace()
    trace.operator("a", 0, 100, tid=1)
    trace.operator("b", 10, 50, tid=2)
    trace.kernel("k", 200, 5, launch=150)
    rows = {row["name"]: row["host_self_us"] for row in operators.analyze(job_of(trace)).json()["operators"]}
    assert rows == {"a": 100.0, "b": 50.0}


def test_an_operator_that_outlasts_the_one_around_it_counts_up_to_its_end() -> None:
    trace = Trace()
    trace.operator("outer", 0, 100)
    trace.operator("late", 80, 50)
    trace.kernel("k", 200, 5, launch=150)
    rows = {row["name"]: row["host_self_us"] for row in operators.analyze(job_of(trace)).json()["operators"]}
    assert rows == {"outer": 80.0, "late": 50.0}


def test_a_cpu_job_is_sorted_by_the_operators_own_time_and_has_no_device_time() -> None:
    traces = [Trace(rank, 2, backend="gloo", device=None) for rank in range(2)]
    for trace in traces:
        trace.operator("aten::linear", 0, 100)
        trace.operator("aten::mm", 10, 80)
    result = operators.analyze(job_of(*traces))
    assert [(row["name"], row["calls"], row["host_self_us"], row["device_us"], row["ranks"]) for row in result.json()["operators"]] == [
        ("aten::mm", 2, 160.0, None, 2),
        ("aten::linear", 2, 40.0, None, 2),
    ]
    assert "nested operators left out" in result.sections()[0].lead


def test_names_beyond_the_largest_are_added_up_exactly() -> None:
    trace = Trace()
    many = 2 * operators.KEPT + 5
    for i in range(many):
        trace.operator(f"op{i:04}", 10 * i, 1 + i % 7)
    sums = operators.reduce(activity_of(trace))
    assert sums is not None
    assert sums.name[-1] == "other" and len(sums.name) < many
    assert int(sums.calls.sum()) == many
    assert int(sums.self_ns.sum()) == 1000 * sum(1 + i % 7 for i in range(many))
    rows = operators.analyze(job_of(trace)).json()["operators"]
    assert sum(row["calls"] for row in rows) == many


def test_a_trace_without_operators_says_so() -> None:
    trace = Trace()
    trace.kernel("gemm", 10, 5, launch=1)
    assert operators.analyze(job_of(trace)).json() == {
        "operators": None,
        "not_measured": {"operators": "the traces hold no operator"},
    }
