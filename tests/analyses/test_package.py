"""The package finds its analyses by itself, and every result keeps the promises of findings.Result."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest

from tests.analyses.made import Trace, activity_of, job_of, mesh_groups
from tracekit import analyses
from tracekit.errors import UsageError
from tracekit.findings import Finding, Result, Section, Table
from tracekit.job.model import Job

#: Keys of the contract that these analyses write.
CONTRACT = {"process_groups", "collectives", "breakdown", "exposed_by_axis", "stragglers"}


def busy_job() -> Job:
    traces = [Trace(rank, 4, groups=mesh_groups(rank)) for rank in range(4)]
    for rank, trace in enumerate(traces):
        for step in range(2):
            at = 1000 * step
            trace.step(step, at, 1000)
            trace.kernel("gemm", at + 100, 300, launch=at + 10, op="aten::mm")
            trace.kernel("Memcpy HtoD", at + 850, 50, launch=at + 30, cat="gpu_memcpy")
            tp = str(mesh_groups(rank)[1]["ranks"])
            trace.collective("allreduce", at + 400 + 20 * rank, 300, group="3", description="mesh_tp", ranks=tp, seq=step, launch=at + 20)
    return job_of(*traces)


def test_every_module_of_the_package_is_an_analysis_in_reading_order() -> None:
    assert list(analyses.modules()) == [
        "hang",
        "breakdown",
        "overlap",
        "idle",
        "process_groups",
        "units",
        "collectives",
        "pipeline",
        "experts",
        "stragglers",
        "what_if",
        "critical_path",
        "kernels",
        "memory",
        "module_time",
        "roofline",
        "operators",
        "comparison",
        "timeline",
        "coverage",
        "step_classes",
    ]
    assert set(analyses.reducers()) == {
        "breakdown",
        "overlap",
        "idle",
        "kernels",
        "memory",
        "module_time",
        "roofline",
        "operators",
        "pipeline",
        "step_classes",
        "timeline",
        "what_if",
    }


def test_results_keep_the_promises_of_the_protocol() -> None:
    results = analyses.run(busy_job())
    keys: list[str] = []
    for name, result in results.items():
        assert isinstance(result, Result), name
        assert all(isinstance(f, Finding) and f.text.endswith(".") and f.id for f in result.findings()), name
        for section in result.sections():
            assert isinstance(section, Section) and section.title and section.lead.endswith("."), name
            for chart in section.charts:
                if isinstance(chart, Table):
                    assert set(chart.columns) <= set(chart.frame.columns), name
        keys += [key for key in result.json() if key != "not_measured"]
        json.dumps(result.json(), allow_nan=False)
    assert len(keys) == len(set(keys))
    assert set(keys) >= CONTRACT


def test_what_a_reducer_returns_can_be_sent_between_processes() -> None:
    activity = activity_of(Trace())
    trace = Trace()
    trace.kernel("gemm", 10, 5, launch=1)
    for name, reducer in analyses.reducers().items():
        assert reducer(activity) is None, name
        assert pickle.loads(pickle.dumps(reducer(activity_of(trace)))) is not None or name in (
            "module_time",
            "roofline",
            "operators",
            "memory",
            "pipeline",
        )


def test_only_the_wanted_analyses_run_and_a_wrong_name_is_said() -> None:
    job = busy_job()
    assert list(analyses.run(job, {"overlap"})) == ["overlap"]
    with pytest.raises(UsageError, match="no analysis called nonsense"):
        analyses.run(job, {"nonsense"})


def test_an_analysis_whose_reducer_did_not_run_has_nothing_to_say() -> None:
    job = busy_job()
    for window in job.windows:
        window.reduced.clear()
    for name, result in analyses.run(job).items():
        json.dumps(result.json(), allow_nan=False)
        result.sections()
        result.findings()
        assert name
    groups = analyses.run(job, {"process_groups"})["process_groups"].json()["process_groups"]
    used = next(row for row in groups if row["operations"])
    assert (used["busy_us"], used["exposed_us"]) == (None, None)


def test_importing_the_package_imports_no_analysis() -> None:
    code = "import sys, tracekit.analyses; print([m for m in sys.modules if m.startswith('tracekit.analyses.')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
