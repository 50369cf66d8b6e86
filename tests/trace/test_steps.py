from tests.builder import BASE, Trace
from tests.oracle import tables
from tracekit.trace.steps import PHASE_NAMES, find_phases, find_steps

US = 1000


def steps(trace):
    t = tables(trace.text())
    s = find_steps(t)
    return [(int(n), (int(a) - BASE) // US, (int(b) - BASE) // US) for n, a, b in zip(s.number, s.start, s.end, strict=True)], s.source, t


def test_profiler_steps_are_counted_on_the_host_only():
    trace = Trace()
    trace.step(11, 1000, 900)
    trace.step(10, 0, 900)
    trace.kernel("ProfilerStep#10", 100, 700, cat="gpu_user_annotation")
    assert steps(trace)[:2] == ([(10, 0, 900), (11, 1000, 1900)], "ProfilerStep")


def test_the_operator_of_old_traces():
    trace = Trace()
    trace.add("Operator", "ProfilerStep#3", 0, 10)
    assert steps(trace)[:2] == ([(3, 0, 10)], "ProfilerStep")


def test_micro_batches_are_not_steps_and_iterations_are():
    trace = Trace()
    for i in range(3):
        trace.annotation(f"micro_batch {i}", 10 * i, 5)
    found, source, t = steps(trace)
    assert (found, source) == ([], "none")
    assert "ProfilerStep" in t.coverage.problems[0]
    trace.annotation("train_step 7", 0, 40)
    assert steps(trace)[:2] == ([(7, 0, 40)], "iteration")


def test_overlapping_steps_are_cut_and_unfinished_ones_left_out():
    trace = Trace()
    trace.step(1, 0, 120)
    trace.step(2, 100, 100)
    trace.step(3, 200, -1)
    found, _, t = steps(trace)
    assert found == [(1, 0, 100), (2, 100, 200)]
    assert any("overlap" in p for p in t.coverage.problems)
    assert any("no end" in p for p in t.coverage.problems)


def test_a_time_belongs_to_the_step_that_holds_it():
    trace = Trace()
    trace.step(1, 0, 100)
    trace.step(2, 150, 100)
    s = find_steps(tables(trace.text()))
    import numpy as np

    times = BASE + np.array([-1, 0, 99_999, 100_000, 150_000, 250_000], np.int64)
    assert s.index_at(times).tolist() == [-1, 0, 0, -1, 1, -1]


def phase_of(trace, *times):
    import numpy as np

    p = find_phases(tables(trace.text()))
    return [PHASE_NAMES[k] for k in p.at(BASE + np.array(times, np.int64) * US)]


def test_phases_by_annotation_innermost_first():
    trace = Trace()
    trace.annotation("## forward ##", 0, 100)
    trace.annotation("DistributedDataParallel.forward", 10, 50)
    trace.annotation("## backward ##", 100, 100)
    trace.annotation("Optimizer.step#Adam.step", 220, 50)
    trace.operator("autograd::engine::evaluate_function: MmBackward0", 110, 20, tid=9)
    assert phase_of(trace, 5, 20, 105, 115, 210, 230) == ["forward", "forward", "backward", "backward", "", "optimizer"]


def test_phases_of_a_loop_without_annotations():
    trace = Trace()
    trace.operator("aten::linear", 0, 40, **{"Sequence number": 5, "Fwd thread id": 0})
    trace.operator("autograd::engine::evaluate_function: AddmmBackward0", 2000, 30, tid=9)
    trace.operator("autograd::engine::evaluate_function: AddmmBackward0", 2100, 30, tid=9)
    assert phase_of(trace, 10, 1000, 2010, 2050, 2110) == ["forward", "", "backward", "backward", "backward"]
