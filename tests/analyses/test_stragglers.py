from __future__ import annotations

import pytest

from tests.analyses.made import Trace, group, job_of, mesh_groups
from tracekit.analyses import stragglers
from tracekit.findings import Heatmap
from tracekit.job.model import Job


def tensor_parallel(late: list[float], count: int, world: int = 8) -> Job:
    """``count`` all-reduces of one tp group, one step each; rank i comes ``late[i]`` us after the first."""
    members = list(range(world))
    traces = []
    for rank in members:
        trace = Trace(rank, world, groups=[group("0", "default_pg", members), group("3", "mesh_tp", members)])
        for i in range(count):
            trace.step(10 + i, 1000 * i, 1000)
            start = 1000 * i + 100 + late[rank]
            trace.collective(
                "allreduce", start, 900 - late[rank], group="3", description="mesh_tp", ranks=str(members), seq=i, launch=1000 * i + 10
            )
        traces.append(trace)
    return job_of(*traces)


def test_the_last_rank_to_arrive_is_charged_with_the_waits_of_the_others() -> None:
    job = tensor_parallel([0, 0, 0, 600, 0, 0, 0, 0], count=12)
    result = stragglers.analyze(job)
    rows = {row["rank"]: row for row in result.json()["stragglers"]}
    assert rows[3] == {
        "rank": 3,
        "caused_wait_us": 7 * 600.0 * 12,
        "share": 1.0,
        "axis": "tp",
        "last_in": 12,
        "collectives": 12,
        "wait_us": 0.0,
        "pipeline_wait_us": 0.0,
    }
    assert (rows[0]["caused_wait_us"], rows[0]["share"], rows[0]["axis"], rows[0]["wait_us"]) == (0.0, 0.0, None, 600.0 * 12)


def test_the_finding_says_who_makes_how_many_wait_how_long_and_where() -> None:
    first, *_ = stragglers.analyze(tensor_parallel([0, 0, 0, 600, 0, 0, 0, 0], count=12)).findings()
    assert first.text == (
        "The device of rank 3 waits longer for work than its peers', and nothing in the trace says for what. "
        "Without it a step would be 600 us shorter (60.0%)."
    )
    assert (first.id, first.severity, first.value, first.unit, first.gain_ns) == ("stragglers.rank", "critical", 600.0, "us", 600_000)
    assert first.subject.ranks == (3,)
    assert first.consequences == ("7 ranks wait 600 us a step in collectives.",)


def test_ranks_that_take_turns_are_one_cause() -> None:
    members = [0, 1]
    traces = [Trace(rank, 2) for rank in members]
    for i in range(20):
        for rank, trace in enumerate(traces):
            trace.step(i, 1000 * i, 1000)
            late = 200 if i % 2 == rank else 0
            trace.collective("allreduce", 1000 * i + 100 + late, 700 - late, ranks="[0, 1]", seq=i, launch=1000 * i + 10)
    (found,) = (f for f in stragglers.analyze(job_of(*traces)).findings() if f.id.startswith("stragglers"))
    assert found.id == "stragglers.moving"
    assert found.text.startswith("The host of another rank is late in each step, the latest by 200 us more than its peers")


def test_alike_ranks_are_said_to_be_alike() -> None:
    (found,) = stragglers.analyze(tensor_parallel([0, 0], count=10, world=2)).findings()
    assert (found.id, found.severity) == ("stragglers.none", "info")


def between_two(first: list[tuple[float, float]], steps: int = 4) -> Job:
    """Two ranks with an all-reduce after each of two kernels a step; ``first`` are the durations [us] of both kernels of each rank."""
    traces = []
    for rank in range(2):
        trace = Trace(rank, 2)
        at = 0.0
        for number in range(steps):
            trace.step(1 + number, at, sum(max(times[half] for times in first) + 50 for half in range(2)))
            for half in range(2):  # the next kernel begins the moment the all-reduce has ended
                latest, own = max(times[half] for times in first), first[rank][half]
                trace.kernel(f"gemm_{half}", at, own)
                trace.collective("allreduce", at + own, latest + 50 - own, group="0", seq=2 * number + half)
                at += latest + 50
        traces.append(trace)
    return job_of(*traces)


def test_who_computes_longer_here_and_as_much_less_there_is_no_straggler() -> None:
    even = stragglers.analyze(between_two([(900, 1500), (1500, 900)])).findings()
    assert [finding.id for finding in even] == ["stragglers.none"]
    uneven = stragglers.analyze(between_two([(900, 1500), (1500, 1100)])).findings()
    assert [(finding.id, finding.subject.ranks) for finding in uneven if finding.subject is not None] == [("stragglers.rank", (1,))]
    assert "Rank 1 computes 600 us longer a step than its peers where it is slower (200 us in all)" in uneven[0].text


def test_waits_are_kept_apart_by_axis() -> None:
    traces = [Trace(rank, 4, groups=mesh_groups(rank)) for rank in range(4)]
    for rank, trace in enumerate(traces):
        trace.step(1, 0, 1000)
        tp, dp = (str(g["ranks"]) for g in mesh_groups(rank)[1:])
        late = 50 * rank
        trace.collective("allreduce", 100 + late, 300 - late, group="3", description="mesh_tp", ranks=tp, seq=1, launch=10)
        trace.collective("allreduce", 500 + late, 300 - late, group="5", description="mesh_dp", ranks=dp, seq=1, launch=20)
    result = stragglers.analyze(job_of(*traces))
    (heat, table) = result.sections()[0].charts
    assert isinstance(heat, Heatmap)
    waits = {axis: [row[x] for row in heat.values] for x, axis in enumerate(heat.x_labels)}
    assert waits == {"tp": [50.0, 0.0, 50.0, 0.0], "dp": [100.0, 100.0, 0.0, 0.0]}
    assert result.caused_by_rank() == {0: 0, 1: 50_000, 2: 100_000, 3: 150_000}
    assert table.frame["rank"].tolist() == [3, 2, 1, 0]


def test_waits_between_pipeline_stages_are_not_blamed_on_a_rank() -> None:
    groups = [group("6", "mesh_pp", [0, 1])]
    sender, receiver = Trace(0, 2, groups=groups), Trace(1, 2, groups=groups)
    args = {"group": "6", "description": "mesh_pp", "elements": 1000, "launch": 10, "Src Rank": 0, "Dst Rank": 1}
    for trace in (sender, receiver):
        trace.step(1, 0, 1000)
    sender.collective("send", 500, 100, **args)
    receiver.collective("recv", 100, 500, **args)
    result = stragglers.analyze(job_of(sender, receiver))
    rows = result.json()["stragglers"]
    assert [(row["rank"], row["caused_wait_us"], row["pipeline_wait_us"]) for row in rows] == [(0, None, 0.0), (1, None, 400.0)]
    assert [f.subject.ranks for f in result.findings() if f.id == "stragglers.rank"] in ([], [(0,)])  # never who waits


def test_means_are_over_the_steps_that_two_ranks_recorded() -> None:
    traces = [Trace(rank, 2) for rank in range(2)]
    for rank, trace in enumerate(traces):
        for i in range(rank, rank + 3):  # rank 0 records steps 0-2, rank 1 steps 1-3
            trace.step(i, 1000 * i, 1000)
            trace.collective("allreduce", 1000 * i + 100 + 60 * rank, 500 - 60 * rank, ranks="[0, 1]", seq=i, launch=1000 * i + 10)
    job = job_of(*traces)
    result = stragglers.analyze(job)
    assert (result.steps, result.unmatched, result.operations) == (2, 2, 6)
    finding = next(f for f in result.findings() if f.id == "stragglers.rank")
    assert finding.value == pytest.approx(60.0)
    assert "2 of 6 communication operations are not matched" in result.sections()[0].charts[0].note


@pytest.mark.parametrize("collective", [True, False])
def test_nothing_matched_is_an_empty_list_with_its_reason(collective: bool) -> None:
    trace = Trace(0, 2)
    trace.step(1, 0, 1000)
    trace.kernel("gemm", 10, 10, launch=5)
    if collective:
        trace.collective("allreduce", 100, 50, launch=10)
    result = stragglers.analyze(job_of(trace)).json()
    assert result["stragglers"] == []
    assert result["not_measured"]["stragglers"] == (
        "no collective could be matched with another rank's" if collective else "no communication was found"
    )
