"""Holistic Trace Analysis' TraceDiff and tracekit agree on kernels and copies of a step, where both define them: without communication."""

import warnings

import pytest

from tests.real import REAL
from tracekit.analyses import step_classes
from tracekit.job.load import LoadOptions, load_job

pytest.importorskip("hta", reason="the extra hta is not installed")
FILES = [REAL / f"hta_diff_{name}.json.gz" for name in ("control", "test")]
STEP = 1009


def ours(path):
    """(calls, us) of the step."""
    found = step_classes.analyze(load_job([str(path)], LoadOptions(), {"step_classes": step_classes.reduce}))
    column = [number for _, number in found.steps].index(STEP)
    return sum(row["calls"][column] for row in found.compute), round(sum(row["time_us"][column] for row in found.compute))


@pytest.mark.slow
@pytest.mark.skipif(not FILES[0].exists(), reason="the traces of real jobs are not beside the project")
def test_calls_and_times_of_a_step():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from hta.common.trace import Trace
        from hta.trace_diff import DeviceType, LabeledTrace, TraceDiff

        sides = [LabeledTrace(path.name[9:-8], Trace(trace_files={0: str(path)}, trace_dir="")) for path in FILES]
        found = TraceDiff.compare_traces(*sides, control_iteration=STEP, test_iteration=STEP, device_type=DeviceType.GPU)
    rest = found[~found.index.str.contains("nccl", case=False)]
    theirs = [tuple(int(rest[f"{side}_{what}"].sum()) for what in ("counts", "total_duration")) for side in ("control", "test")]
    assert [ours(path) for path in FILES] == theirs
