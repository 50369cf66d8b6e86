import pytest

from tests.compare.made import run
from tracekit.checks.check import check
from tracekit.checks.thresholds import Threshold

CALLS, BYTES = "collectives.dp.all_reduce.gradient_sync.calls", "collectives.dp.all_reduce.gradient_sync.bytes"


def flat(value):
    return [value] * 6


def fell(base, new, *thresholds):
    return [row.change.key for row in check([base], [new], thresholds).of("fell")]


BASE = run({"step.time": flat(100.0)}, {CALLS: flat(4), BYTES: flat(400)}, {"peak": [1000, 1000], "parameters": [100, 100]})


def changed(**other):
    values = {"time": 100.0, "calls": 4, "bytes": 400, "peak": 1000, "parameters": 100} | other
    counts = {CALLS: flat(values["calls"]), BYTES: flat(values["bytes"])}
    memory = {name: [values[name]] * 2 for name in ("peak", "parameters")}
    return run({"step.time": flat(values["time"])}, counts, memory)


@pytest.mark.parametrize(
    ("other", "wrong"),
    [
        ({}, []),
        ({"calls": 5}, [CALLS]),
        ({"bytes": 401}, [BYTES]),
        ({"parameters": 101}, ["memory.parameters"]),
        ({"peak": 1020}, []),
        ({"peak": 1021}, ["memory.peak"]),
        ({"time": 105.0}, []),
        ({"time": 105.1}, ["step.time"]),
        ({"time": 80.0, "calls": 3, "bytes": 300, "peak": 900, "parameters": 90}, []),
    ],
)
def test_defaults(other, wrong):
    assert fell(BASE, changed(**other)) == wrong
    assert check([BASE], [changed(**other)]).exit_code == bool(wrong)


def test_the_last_threshold_that_fits_counts():
    slower = changed(time=104.0)
    assert fell(BASE, slower, Threshold("step.*", 0.03)) == ["step.time"]
    assert fell(BASE, slower, Threshold("step.*", 0.03), Threshold("step.time", None)) == []
    assert fell(BASE, changed(time=80.0), Threshold("step.time", 0.05, "both")) == ["step.time"]


def test_a_consequence_names_its_cause():
    rows = check([BASE], [changed(calls=5, bytes=500)]).of("fell")
    assert [(row.change.key, row.cause[:19]) for row in rows] == [(CALLS, ""), (BYTES, "1 call more a step:")]


def test_what_was_asked_for_and_not_measured_never_passes():
    lost = run({"step.time": flat(100.0)}, {CALLS: flat(4), BYTES: flat(400)}, not_measured={"memory": "profile_memory is off"})
    checked = check([BASE], [lost])
    assert checked.exit_code == 2
    assert checked.problem.startswith("the baseline asks for memory.peak, memory.parameters, which the run did not measure")
    assert check([BASE], [lost], [Threshold("memory.*", None)]).exit_code == 0
    assert check([lost], [BASE]).exit_code == 0


def test_nothing_in_common_never_passes():
    assert check([run({"step.time": flat(1.0)})], [run(counts={CALLS: flat(1)})]).exit_code == 2
    assert check([BASE], [BASE], [Threshold("*", None)]).exit_code == 2


def test_a_tenth_more_of_nearly_nothing_passes():
    base, new = (run({"step.time": flat(1000.0), "exposed.dp": flat(v)}) for v in (10.0, 14.0))
    assert fell(base, new) == []
