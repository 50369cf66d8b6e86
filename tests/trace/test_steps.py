import numpy as np
import pytest

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
    times = BASE + np.array([-1, 0, 99_999, 100_000, 150_000, 250_000], np.int64)
    assert s.index_at(times).tolist() == [-1, 0, 0, -1, 1, -1]


def phase_of(trace, *times):
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


def test_numbered_ranges_inside_an_iteration_are_its_parts():
    trace = Trace()
    for n in range(2):
        trace.annotation(f"iteration {n + 5}", 100 * n, 90)
        for i in range(3):
            trace.annotation(f"step {i + 5}", 100 * n + 30 * i, 20)
    found, source, t = steps(trace)
    assert (found, source) == ([(5, 0, 90), (6, 100, 190)], "iteration")
    assert any("6 numbered ranges lie inside" in p for p in t.coverage.problems)


@pytest.mark.parametrize(
    "name", ["iteration 3", "Iteration#3", "iter_3", "step: 3", "train_step 3", "## train step 3 ##", "global_step=3", "Training Step [3]"]
)
def test_names_of_iterations(name):
    trace = Trace()
    trace.annotation(name, 0, 90)
    assert steps(trace)[:2] == ([(3, 0, 90)], "iteration")


@pytest.mark.parametrize("name", ["micro_batch 3", "optimizer step 3", "step", "step_3_forward", "Optimizer.step#Adam.step", "epoch 3"])
def test_names_of_other_things(name):
    trace = Trace()
    trace.annotation(name, 0, 90)
    assert steps(trace)[:2] == ([], "none")


def test_profiler_steps_win_over_iterations():
    trace = Trace()
    trace.step(12, 0, 100)
    trace.annotation("iteration 900", 0, 100)
    assert steps(trace)[:2] == ([(12, 0, 100)], "ProfilerStep")


def test_one_step_seen_on_two_threads():
    trace = Trace()
    trace.step(7, 0, 100)
    trace.annotation("ProfilerStep#7", 2, 100, tid=99)
    found, _, t = steps(trace)
    assert found == [(7, 0, 100)]
    assert t.coverage.problems == []


def test_a_number_that_comes_back_is_another_step():
    trace = Trace()
    for i, number in enumerate((0, 1, 0, 1)):
        trace.annotation(f"step {number}", 100 * i, 90)
    found, _, t = steps(trace)
    assert found == [(0, 0, 90), (1, 100, 190), (2, 200, 290), (3, 300, 390)]
    assert "2 steps repeat the number of an earlier one: numbered on as 2, 3" in t.coverage.problems


def test_only_unfinished_steps_are_none():
    trace = Trace()
    trace.operator("aten::mm", 0, 50)
    trace.step(1, 0, -1)
    found, source, t = steps(trace)
    assert (found, source) == ([], "none")
    assert "no whole ProfilerStep marks: the whole trace is one window" in t.coverage.problems


def test_steps_at_times_that_cannot_be_true():
    trace = Trace(base=None)
    now = 1_778_000_000_000_000
    trace.operator("aten::mm", now, 50)
    trace.step(1, 0, 100)
    trace.step(2, now, 100)
    trace.step(3, now + 100, 10**13)
    t = tables(trace.text())
    assert find_steps(t).number.tolist() == [2]
    assert any("2 step marks have no end (or times" in p for p in t.coverage.problems)


def test_backward_of_traces_without_annotations_or_engine_ranges():
    """As torch 1.8 wrote it: record_function left operators, and backward is known by the forward's thread."""
    trace = Trace()
    old = {"tid": 9}
    trace.add("Operator", "aten::nll_loss_forward", 0, 10, **{"Sequence number": 4, "Fwd thread id": 0})
    trace.add("Operator", "NllLossBackward", 100, 10, **old, **{"Sequence number": 4, "Fwd thread id": 1})
    trace.add("Operator", "torch::autograd::AccumulateGrad", 120, 10, **old)
    trace.add("Operator", "Optimizer.step#SGD.step", 200, 10)
    assert phase_of(trace, 5, 50, 105, 115, 125, 205) == ["forward", "", "backward", "backward", "backward", "optimizer"]


def test_recomputation_inside_backward_is_backward():
    trace = Trace()
    trace.annotation("FSDP::pre_forward", 0, 20)
    trace.operator("autograd::engine::evaluate_function: CheckpointFunctionBackward", 100, 80, tid=9)
    trace.annotation("FSDP::pre_forward", 110, 20, tid=9)
    assert phase_of(trace, 5, 105, 115, 135) == ["forward", "backward", "backward", "backward"]


def test_a_short_forward_between_two_backwards_keeps_its_name():
    trace = Trace()
    trace.annotation("PP:0B0", 0, 100)
    trace.annotation("PP:0F1", 110, 50)
    trace.annotation("PP:0B1", 170, 100)
    assert phase_of(trace, 50, 105, 120, 165, 200) == ["backward", "", "forward", "", "backward"]


def test_a_name_that_says_two_phases_says_none():
    trace = Trace()
    trace.annotation("forward_backward_func", 0, 100)
    trace.annotation("forward_step", 10, 20)
    trace.annotation("backward_step", 40, 20)
    assert phase_of(trace, 5, 15, 35, 45, 70) == ["", "forward", "", "backward", ""]


def test_an_optimizer_that_steps_inside_backward():
    trace = Trace()
    trace.operator("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 0, 100, tid=9)
    trace.annotation("Optimizer.step#SGD.step", 20, 30, tid=9)
    assert phase_of(trace, 10, 30, 60) == ["backward", "optimizer", "backward"]


def test_operators_of_new_traces_only_sound_like_a_phase():
    trace = Trace()
    trace.annotation("ProfilerStep#1", 0, 100)
    trace.operator("aten::nll_loss_forward", 0, 10)
    trace.operator("triton_poi_fused_threshold_backward_3", 20, 10)
    assert phase_of(trace, 5, 25) == ["", ""]


def test_phases_are_sorted_and_disjoint_whatever_overlaps():
    trace = Trace()
    for i, name in enumerate(["forward", "backward", "optimizer", "## forward ##", "loss.backward", "forward"]):
        trace.annotation(name, 7 * i, 23 - 2 * i, tid=i)
        trace.annotation(name, 7 * i, -1)
    p = find_phases(tables(trace.text()))
    assert len(p.start) > 2
    assert (p.end > p.start).all()
    assert (p.start[1:] >= p.end[:-1]).all()


def test_a_trace_of_nothing_has_no_phases():
    assert len(find_phases(tables(Trace().text())).start) == 0
