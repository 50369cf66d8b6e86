"""The replay of what was measured gives what was measured, and other costs do what they must."""

import numpy as np
import pytest

from tests.analyses.made import Trace, job_of
from tests.builder import group
from tracekit.analyses import critical_path
from tracekit.errors import UsageError
from tracekit.graph.scenarios import check, scenario
from tracekit.graph.step_graph import StepGraph
from tracekit.graph.study import Study, study_of


def two_ranks(late: float = 0.0) -> Study:
    """Compute 100 us, an all-reduce of 50 us on another stream, compute that waits for it; rank 1 computes ``late`` longer."""
    traces = [Trace(rank, 2) for rank in range(2)]
    for rank, trace in enumerate(traces):
        own = 100 + late * rank
        trace.step(1, 0, 1000)
        trace.kernel("gemm", 100, own, launch=10)
        trace.collective("allreduce", 100 + own, 150 + late - own, ranks="[0, 1]", seq=1, launch=20)
        trace.kernel("gemm", 250 + late, 100, launch=30)
    study = study_of(job_of(*traces))
    assert isinstance(study, Study)
    return study


def test_measured_costs_give_the_measured_times() -> None:
    study = two_ranks(80)
    start, end = study.graph.replay()
    assert np.array_equal(start + study.graph.begin, study.graph.start)
    assert np.array_equal(end + study.graph.begin, study.graph.end)
    assert study.error == 0 and study.step_ns == 430_000


def test_a_collective_costs_its_transfer_and_waits_for_the_last() -> None:
    graph = two_ranks(80).graph
    assert graph.cost[graph.comm].tolist() == [50_000, 50_000]
    shorter = np.where((graph.rank == 1) & ~graph.comm, np.minimum(graph.cost, 100_000), graph.cost)
    assert graph.step_ns(graph.replay(shorter)) == 350_000


def test_the_culprit_is_who_computes_longer_not_who_waits() -> None:
    (culprit,) = two_ranks(80).search.culprits
    assert (culprit.scope, culprit.ranks, culprit.gain_ns, culprit.excess_ns) == ("rank", (1,), 80_000, 80_000)


def test_scenarios() -> None:
    study = two_ranks(80)
    steps = {name: scenario(study, name).step_ns for name in ("bandwidth:world=2", "perfect_overlap", "no_straggler")}
    assert steps == {"bandwidth:world=2": 405_000, "perfect_overlap": 380_000, "no_straggler": 350_000}
    assert scenario(study, "equal_stages").step_ns is None


@pytest.mark.parametrize("name", ["bandwidth", "bandwidth:tp=0", "microbatches=0", "faster", "bandwidth:=2"])
def test_a_wrong_scenario_is_said(name: str) -> None:
    with pytest.raises(UsageError, match="there is no scenario"):
        check(name)


def test_an_axis_that_nothing_uses_is_said() -> None:
    with pytest.raises(UsageError, match="nothing communicates along 'tp'"):
        scenario(two_ranks(), "bandwidth:tp=2")


def test_a_host_that_paces_its_device_keeps_its_pace() -> None:
    """Kernels that begin as soon as they are launched: shorter ones win nothing, an absent host everything."""
    trace = Trace(0, 1, groups=[group("0", "default_pg", [0])])
    trace.step(1, 0, 1000)
    for i in range(8):
        trace.kernel("small", 20 + 50 * i, 10, launch=10 + 50 * i)
    study = study_of(job_of(trace))
    assert isinstance(study, Study)
    graph: StepGraph = study.graph
    assert graph.step_ns(graph.replay(graph.cost // 2)) == pytest.approx(study.step_ns - 5_000)
    assert scenario(study, "no_host").step_ns == pytest.approx(80_000, abs=20_000)


def test_the_critical_path_adds_up_to_the_step() -> None:
    pieces = critical_path.analyze(two_ranks(80).job).pieces
    assert pieces["duration_ns"].sum() == 430_000
    assert pieces["kind"].tolist() == ["idle", "compute", "communication", "compute"]
    assert pieces["rank"].tolist()[1] == 1
