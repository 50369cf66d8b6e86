import pytest

from tests.compare.made import run
from tracekit.compare.changes import Change, compare

CALLS = "collectives.dp.all_reduce.gradient_sync.calls"


def change(base, new, key) -> Change:
    sides = [side if isinstance(side, list) else [side] for side in (base, new)]
    return compare(*sides).by_key()[key]


def test_counts_are_compared_step_by_step():
    base = run(counts={CALLS: [4, 8, 4, 4, 8, 4]})
    assert change(base, base, CALLS).outcome == "same"
    found = change(base, run(counts={CALLS: [4, 9, 4, 4, 8, 4]}), CALLS)
    assert (found.outcome, found.ranks, found.difference) == ("worse", (0,), 0.5)
    assert change(base, run(counts={CALLS: [4, 7, 4, 4, 7, 4]}), CALLS).outcome == "better"


def test_a_warm_up_step_more_is_not_compared():
    base = run({"step.time": [9.0] * 6}, {CALLS: [4] * 6})
    new = run({"step.time": [90.0, 9, 9, 9] * 2}, {CALLS: [0, 4, 4, 4] * 2}, steps=(9, 10, 11, 12))
    comparison = compare([base], [new])
    assert [c.outcome for c in comparison.changes] == ["same", "same"]
    assert comparison.alignment.notes == ["compared on the steps that all recordings have (10-12)"]


def test_other_step_numbers_compare_the_typical_step():
    base = run({"step.time": [9.0] * 6}, {CALLS: [4] * 6})
    new = run({"step.time": [90.0, 9, 9, 9] * 2}, {CALLS: [0, 4, 4, 4] * 2}, steps=(70, 71, 72, 73))
    comparison = compare([base], [new])
    assert [c.outcome for c in comparison.changes] == ["same", "same"]
    assert "other step numbers" in comparison.alignment.notes[0]


def test_counts_that_vary_from_recording_to_recording_have_to_leave_their_range():
    base = [run(counts={CALLS: values}) for values in ([4, 5, 6] * 2, [5, 7, 4] * 2)]
    assert change(base, run(counts={CALLS: [7, 4, 4] * 2}), CALLS).outcome == "same"
    assert change(base, run(counts={CALLS: [9, 9, 9] * 2}), CALLS).outcome == "worse"


@pytest.mark.parametrize("key", ["peak", "parameters"])
def test_memory_that_grows_on_one_rank_is_worse_though_it_shrinks_on_another(key):
    found = change(run(memory={key: [100, 100]}), run(memory={key: [80, 110]}), f"memory.{key}")
    assert (found.outcome, found.base, found.new, found.ranks) == ("worse", 100, 110, (0, 1))


def test_a_time_beyond_the_spread_of_a_quiet_recording_is_worse():
    base = run({"step.time": [100.0, 101, 99, 100, 101, 99]})
    found = change(base, run({"step.time": [110.0, 111, 109, 110, 111, 109]}), "step.time")
    assert (found.outcome, found.p, found.relative) == ("worse", pytest.approx(1 / 924), pytest.approx(0.1))
    assert change(base, run({"step.time": [102.0, 99, 100, 103, 101, 99]}), "step.time").outcome in ("same", "noise")


def test_one_noisy_recording_says_nothing_of_times():
    base = run({"step.time": [100.0, 140, 80, 100, 130, 85]})
    found = change(base, run({"step.time": [300.0, 320, 280, 300, 350, 290]}), "step.time")
    assert (found.outcome, found.why) == ("noise", "too noisy for one recording a side")


def test_four_recordings_a_side_are_judged_by_how_recordings_differ():
    def side(middles):
        return [run({"step.time": [0.7 * m, m, 1.3 * m] * 2}) for m in middles]

    base = side([100, 104, 98, 101, 103])
    assert change(base, side([120, 124, 118, 121, 125]), "step.time").outcome == "worse"
    assert change(base, side([99, 124, 97, 121, 100]), "step.time").outcome in ("same", "noise")


def test_one_rank_that_slows_down_is_named():
    base = run({"phase.forward.compute": [50.0, 50.2, 49.8, 50, 50.1, 49.9]})
    new = run({"phase.forward.compute": [50.1, 50.0, 49.9, 60, 60.2, 59.9]})
    comparison = compare([base], [new])
    assert comparison.by_key()["phase.forward.compute@1"].relative == pytest.approx(0.2)
    assert "phase.forward.compute@0" not in comparison.by_key()


def test_what_one_side_did_not_measure_is_not_measured():
    found = change(run(memory={"peak": [5, 5]}), run(not_measured={"memory": "profile_memory is off"}), "memory.peak")
    assert (found.outcome, found.base, found.new) == ("not_measured", 5, None)
    assert found.why == "NEW has no memory: profile_memory is off"


def test_a_class_that_did_not_run_is_none_of_it():
    found = change(run(counts={CALLS: [2] * 6}), run(counts={}), CALLS)
    assert (found.outcome, found.new) == ("better", 0)


def test_jobs_of_another_size_are_compared_by_role():
    base = run({"step.time": [9.0] * 6}, {CALLS: [4] * 6})
    new = run({"step.time": [9.0] * 12}, {CALLS: [4] * 12}, ranks=(0, 1, 2, 3), world_size=4, axes=(("dp", 4),))
    comparison = compare([base], [new])
    assert comparison.alignment.by_role
    assert comparison.alignment.notes[0] == "world size: 2 in BASE, 4 in NEW"
    assert [c.outcome for c in comparison.changes] == ["same", "same"]
