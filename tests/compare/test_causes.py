import pytest

from tests.compare.made import run
from tracekit.compare.causes import causes
from tracekit.compare.changes import compare
from tracekit.compare.words import headline, phrase
from tracekit.errors import InputError

GATHER = "collectives.dp.all_gather.parameter_gather"


def found(base, new):
    comparison = compare([base], [new])
    return comparison, causes(comparison.changes)


def flat(value):
    return [value, value, value] * 2


def test_a_slower_kernel_is_the_root_of_compute_and_step():
    times = {"step.time": 1000.0, "step.compute": 600.0, "kernels.gemm.time": 500.0, "kernels.norm.time": 100.0}
    slower = {"step.time": 1050.0, "step.compute": 650.0, "kernels.gemm.time": 550.0, "kernels.norm.time": 100.0}
    comparison, roots = found(*(run({key: flat(v) for key, v in side.items()}) for side in (times, slower)))
    assert [cause.root.key for cause in roots] == ["kernels.gemm.time"]
    assert [change.key for change in roots[0].consequences] == ["step.compute", "step.time"]
    said = "NEW is 5% slower (1 ms -> 1.05 ms a step): gemm kernels take 10% longer (+50 us a step)."
    assert headline(comparison, roots) == said


def test_all_kernels_by_one_factor_are_the_device():
    names = ("gemm", "norm", "softmax", "copy", "attention")
    base = {f"kernels.{name}.time": flat(100.0 + place) for place, name in enumerate(names)} | {"step.compute": flat(510.0)}
    new = {key: [value * 1.2 for value in values] for key, values in base.items()}
    _, roots = found(run(base), run(new))
    assert [cause.root.key for cause in roots] == ["step.compute"]
    assert phrase(roots[0]).startswith("all compute, whatever the kernel, takes 20% longer")


def test_more_calls_explain_bytes_transfer_and_exposure():
    base = run({"exposed.dp": flat(100.0), f"{GATHER}.transfer": flat(200.0)}, {f"{GATHER}.calls": flat(4), f"{GATHER}.bytes": flat(400)})
    new = run({"exposed.dp": flat(150.0), f"{GATHER}.transfer": flat(300.0)}, {f"{GATHER}.calls": flat(6), f"{GATHER}.bytes": flat(600)})
    _, roots = found(base, new)
    assert [cause.root.key for cause in roots] == [f"{GATHER}.calls"]
    assert phrase(roots[0]) == "2 calls more a step: all_gather of dp for parameter gather (4 calls -> 6 calls (+50%), +200 B)"


def test_another_element_type_is_said():
    classes = [f"{GATHER}.bfloat16.100.calls", f"{GATHER}.float32.200.calls"]
    base = run(counts={f"{GATHER}.calls": flat(4), f"{GATHER}.bytes": flat(400), classes[0]: flat(4), classes[1]: flat(0)})
    new = run(counts={f"{GATHER}.calls": flat(4), f"{GATHER}.bytes": flat(800), classes[0]: flat(0), classes[1]: flat(4)})
    _, roots = found(base, new)
    assert phrase(roots[0]).endswith("(400 B -> 800 B (+100%)): float32 instead of bfloat16")


def test_exposure_without_more_communication_is_lost_overlap():
    base, new = (run({"exposed.dp": flat(v), "step.time": flat(1000.0 + v), f"{GATHER}.transfer": flat(400.0)}) for v in (10.0, 60.0))
    comparison, roots = found(base, new)
    assert headline(comparison, roots).endswith("communication of dp is no longer hidden by compute (+50 us exposed a step).")


def test_one_slow_rank_explains_what_its_peers_wait():
    base = run({"phase.forward.compute": flat(50.0), "exposed.dp": flat(10.0)})
    new = run({"phase.forward.compute": [50.0, 50, 50, 60, 60, 60], "exposed.dp": flat(20.0)})
    _, roots = found(base, new)
    assert [phrase(cause) for cause in roots] == ["rank 1 computes 20% longer in forward (+10 us a step)"]


def test_idle_time_is_not_laid_on_what_cannot_explain_it():
    base = {"step.time": flat(1000.0), "step.idle": flat(100.0), "exposed.dp": flat(20.0), "step.compute": flat(800.0)}
    new = base | {"step.time": flat(1300.0), "step.idle": flat(396.0), "exposed.dp": flat(24.0)}
    comparison, roots = found(run(base), run(new))
    assert [cause.root.key for cause in roots] == ["step.idle", "exposed.dp"]
    assert [change.key for change in roots[0].consequences] == ["step.time"]
    assert "the device is idle longer (+296 us a step, 100 us -> 396 us" in headline(comparison, roots)


def test_a_rank_that_is_slower_in_every_phase_is_one_cause():
    base = {"step.time": flat(1000.0), "phase.forward.compute": flat(300.0), "phase.backward.compute": flat(500.0)}
    base["step.compute"] = flat(800.0)
    new = {key: [*values[:3], *(value * 1.2 for value in values[3:])] for key, values in base.items()}
    _, roots = found(run(base), run(new | {"step.time": flat(1160.0)}))
    assert [cause.root.key for cause in roots] == ["step.compute@1"]
    assert phrase(roots[0]) == "rank 1 computes 20% longer (+160 us a step)"


def test_a_slow_link_of_one_group_of_an_axis_is_named():
    key = "collectives.tp.all_reduce.tensor_parallel.transfer"
    times = {key: [880.0, 882.0, 881.0] * 4, "step.exposed_comm": flat(1000.0) * 2, "step.time": flat(6000.0) * 2}
    slow = times | {
        key: [1520.0, 1523.0, 1521.0] * 2 + times[key][:6],
        "step.exposed_comm": flat(1640.0) * 2,
        "step.time": flat(6640.0) * 2,
    }
    _, roots = found(*(run(side, ranks=range(4), world_size=4, axes=(("dp", 2), ("tp", 2))) for side in (times, slow)))
    assert [cause.root.key for cause in roots] == [key + "@0+1"]
    assert phrase(roots[0]) == "the transfers of all_reduce of tp for tensor parallel take 73% longer on ranks 0, 1 (+640 us a step)"


def test_a_window_without_marks_is_not_held_against_a_step():
    times = {"step.time": [1000.0] * 2}
    with pytest.raises(InputError, match="no steps are marked in NEW"):
        compare([run(times, steps=(1,))], [run(times, steps=())])
    assert "no steps are marked" in compare([run(times, steps=())], [run(times, steps=())]).alignment.notes[0]


def test_what_one_side_alone_measured_is_said():
    bare = run({"step.time": flat(1000.0)}, not_measured={"memory": "no memory events"})
    whole = run({"step.time": flat(1000.0)}, memory={"peak": [10, 10]})
    assert compare([bare], [whole]).alignment.notes == ["memory of BASE is not known (no memory events): not compared"]


def test_nothing_changed():
    comparison, roots = found(run({"step.time": flat(5.0)}), run({"step.time": flat(5.0)}))
    assert headline(comparison, roots) == "NEW is as fast as BASE (5 us -> 5 us a step); nothing else changed by more than noise."
