"""Time by module: forward by the range around the launch, backward by autograd's sequence numbers, recomputed within backward."""

import pytest

from tests.analyses.made import Trace, activity_of, job_of
from tracekit.analyses import module_time


def module(trace, name, start, dur):
    trace.add("python_function", f"nn.Module: {name}", start, dur, **{"Python id": start + 1, "Python parent id": 0, "Python module id": 0})


def launched(trace, number, op, start, dur, kernel_dur, **args):
    trace.operator(op, start, dur, **args)
    trace.launch(number, start + 1)
    trace.kernel(f"k{number}", 5000 + 1000 * number, kernel_dur, correlation=number)


def transformer(device="NVIDIA H100 80GB HBM3"):
    """Model_0 holds Linear_0 and Linear_1; the backward of both on another thread; then an optimizer."""
    trace = Trace(device=device)
    module(trace, "Model_0", 0, 1000)
    module(trace, "Linear_0", 100, 300)
    module(trace, "Linear_1", 500, 300)
    sizes = {"Input Dims": [[512, 512], [512, 512]], "Input type": ["c10::BFloat16"] * 2}
    launched(trace, 1, "aten::mm", 150, 50, 100, **{"Sequence number": 10, "Fwd thread id": 0}, **sizes)
    launched(trace, 2, "aten::mm", 550, 50, 200, **{"Sequence number": 11, "Fwd thread id": 0})
    launched(trace, 3, "aten::add", 900, 20, 10, **{"Sequence number": 12, "Fwd thread id": 0})
    for number, (sequence, spent) in enumerate(((12, 20), (11, 400), (10, 300)), 4):
        start = 2000 + 200 * number
        name = "autograd::engine::evaluate_function: MmBackward0"
        trace.operator(name, start, 150, tid=2, **{"Sequence number": sequence, "Fwd thread id": 1})
        trace.operator("aten::mm", start + 10, 100, tid=2)
        trace.add("cuda_runtime", "cudaLaunchKernel", start + 20, 5, tid=2, correlation=number)
        trace.kernel(f"k{number}", 5000 + 1000 * number, spent, correlation=number)
    launched(trace, 9, "aten::_foreach_add_", 4000, 20, 50)
    return trace


def rows(trace, *keys):
    found = module_time.analyze(job_of(trace)).json()
    return {row["module"]: tuple(row[key] for key in keys) for row in found["modules"]}, found["outside_modules_us"]


def test_forward_and_backward_of_each_module():
    found, outside = rows(transformer(), "forward_us", "backward_us", "recomputed_us", "self_us", "calls")
    assert found == {
        "Model_0": (310.0, 720.0, 0.0, 30.0, 1),
        "Model_0.Linear_1": (200.0, 400.0, 0.0, 600.0, 1),
        "Model_0.Linear_0": (100.0, 300.0, 0.0, 400.0, 1),
    }
    assert outside == 50.0


def test_own_times_and_what_is_outside_add_up_to_all_compute():
    sums = module_time.reduce(activity_of(transformer()))
    assert int(sums.sums[3].sum()) + sums.outside_ns == sums.compute_ns == 1_080_000


def test_flop_and_share_of_the_peak():
    found, _ = rows(transformer(), "flop", "share_of_peak")
    flop = 2 * 512**3
    assert found["Model_0.Linear_0"][0] == found["Model_0"][0] == flop
    assert found["Model_0.Linear_0"][1] == pytest.approx(flop / 989e12 / 400e-6, rel=0.01)
    assert found["Model_0.Linear_1"] == (None, None)


def test_a_module_that_runs_within_backward_is_recomputed():
    trace = Trace()
    trace.annotation("forward", 0, 400)
    trace.annotation("backward", 1000, 1000)
    for start, number, spent in ((100, 1, 100), (1200, 2, 110)):
        module(trace, "Linear_0", start, 200)
        launched(trace, number, "aten::mm", start + 50, 50, spent)
    found, _ = rows(trace, "forward_us", "recomputed_us", "calls")
    assert found == {"Linear_0": (100.0, 110.0, 2)}


def test_units_of_the_recorder_stand_in_for_modules():
    trace = Trace()
    trace.annotation("unit layers.0", 0, 200)
    launched(trace, 1, "aten::mm", 50, 50, 100)
    trace.annotation("unit layers.0 backward", 1000, 200)
    launched(trace, 2, "aten::mm", 1050, 50, 220)
    found, _ = rows(trace, "forward_us", "backward_us", "calls")
    assert found == {"layers.0": (100.0, 220.0, 1)}


def test_a_trace_without_modules_says_how_to_record_them():
    trace = Trace()
    launched(trace, 1, "aten::mm", 50, 50, 100)
    found = module_time.analyze(job_of(trace)).json()
    assert found["modules"] is None
    assert "with_modules=True" in found["not_measured"]["modules"]
