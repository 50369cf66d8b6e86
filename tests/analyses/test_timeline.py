from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.analyses.made import Trace, activity_of, job_of
from tracekit.analyses import timeline
from tracekit.analyses.timeline.spans import KEPT

COLUMNS = ("stream", "device", "start", "end", "name", "category", "merged")


def stepping(rank: int = 0, world: int = 1, steps: tuple[int, ...] = (1, 2), late: float = 0) -> Trace:
    trace = Trace(rank, world)
    for number in steps:
        base = 1000 * number
        trace.step(number, base, 1000)
        trace.kernel("gemm", base + 100 + late, 300, launch=base + 10)
        trace.collective("allreduce", base + 400 + late, 200 - late, stream=20, seq=number, launch=base + 20)
    return trace


def by_rank(result, step=None):
    """The spans of the ranks' own work in the step shown first, without waits and the critical path."""
    spans = result.spans.astype({"lane": str, "name": str, "category": str})
    wanted = result.step if step is None else step
    return spans[(spans["lane"] != "critical path") & (spans["category"] != "waiting") & (spans["step"] == wanted)]


def test_the_critical_path_has_a_lane_of_its_own() -> None:
    result = timeline.analyze(job_of(stepping(0, 2), stepping(1, 2, late=50)))
    spans = result.spans[result.spans["step"] == result.step]
    path = spans[spans["lane"] == "critical path"]
    assert path["start_us"].tolist()[1:] == path["end_us"].tolist()[:-1]  # no gap, no overlap
    assert path["end_us"].max() == spans["end_us"].max()
    assert "rank 1: gemm" in path["name"].tolist() or "communication" in path["category"].tolist()


def test_the_last_step_is_laid_out_by_rank_and_stream_from_a_common_zero() -> None:
    result = timeline.analyze(job_of(stepping(0, 2), stepping(1, 2, late=50)))
    rows = by_rank(result).sort_values(["lane", "start_us"]).to_dict("records")
    assert [(row["lane"], row["start_us"], row["end_us"], row["category"]) for row in rows] == [
        ("rank 0 · stream 20", 300.0, 500.0, "all_reduce"),
        ("rank 0 · stream 7", 0.0, 300.0, "compute"),
        ("rank 1 · stream 20", 350.0, 500.0, "all_reduce"),
        ("rank 1 · stream 7", 50.0, 350.0, "compute"),
    ]
    assert result.step == 2
    assert result.sections()[0].charts[0].title == "Steps"


def test_every_step_is_there_from_a_zero_of_its_own() -> None:
    result = timeline.analyze(job_of(stepping(0, 2, steps=(1, 2, 3)), stepping(1, 2, steps=(1, 2, 3), late=50)))
    assert sorted(result.spans["step"].unique()) == [1, 2, 3]
    columns = ["lane", "start_us", "end_us", "name", "category"]
    tables = [by_rank(result, step)[columns].to_numpy().tolist() for step in (1, 2, 3)]
    assert tables[0] == tables[1] == tables[2]


def test_waits_are_drawn_with_whom_they_are_for() -> None:
    result = timeline.analyze(job_of(stepping(0, 2), stepping(1, 2, late=50)))
    waits = result.spans[result.spans["category"] == "waiting"]
    assert waits[["step", "lane", "start_us", "end_us", "name"]].to_numpy().tolist() == [
        [1, "rank 0 · waits", 300.0, 350.0, "waits for rank 1: all_reduce (world)"],
        [2, "rank 0 · waits", 300.0, 350.0, "waits for rank 1: all_reduce (world)"],
    ]


def test_the_critical_path_is_drawn_for_every_step() -> None:
    result = timeline.analyze(job_of(stepping(0, 2), stepping(1, 2, late=50)))
    path = result.spans[result.spans["lane"] == "critical path"]
    assert sorted(path["step"].unique()) == [1, 2]


def test_stretches_say_where_causes_can_be_seen() -> None:
    result = timeline.analyze(job_of(stepping(0, 2), stepping(1, 2, late=50)))
    found = result.stretches[result.stretches["step"] == 2]
    rows = {(kind, rank): (start, end) for kind, rank, start, end in found[["kind", "rank", "start_us", "end_us"]].to_numpy().tolist()}
    assert rows["late", 1] == (300.0, 350.0)  # rank 1 comes last
    assert rows["transfer", -1] == (350.0, 500.0)
    assert rows["exposed", 0] == (300.0, 500.0)
    assert rows["exposed", 1] == (350.0, 500.0)
    assert rows["idle", 0] == (500.0, 900.0)  # from its last kernel to the end of the step


def test_phases_of_the_host_stand_in_a_lane_of_their_own() -> None:
    trace = stepping(steps=(1,))
    trace.annotation("forward", 1000, 300)
    trace.annotation("backward", 1300, 900)  # runs over the end of the step at 2000
    spans = timeline.analyze(job_of(trace)).spans
    host = spans[spans["lane"] == "rank 0 · host phases"]
    assert host[["start_us", "end_us", "name", "category"]].to_numpy().tolist() == [
        [0.0, 300.0, "forward", "phase"],
        [300.0, 1000.0, "backward", "phase"],
    ]


def test_a_last_step_without_device_work_gives_way_to_the_one_before() -> None:
    trace = stepping(steps=(1, 2))
    trace.step(3, 3000, 1000)
    assert timeline.analyze(job_of(trace)).step == 2


def test_the_step_that_most_ranks_have_is_shown_first() -> None:
    result = timeline.analyze(job_of(stepping(0, 3), stepping(1, 3), stepping(2, 3, steps=(1, 2, 3))))
    assert result.step == 2 and set(by_rank(result)["lane"].str[:6]) == {"rank 0", "rank 1", "rank 2"}
    assert "shown at first" not in result.note


def test_ranks_without_the_step_that_is_shown_first_are_named() -> None:
    result = timeline.analyze(job_of(stepping(0, 3, steps=(2, 3)), stepping(1, 3, steps=(2, 3)), stepping(2, 3, steps=(1,))))
    assert "Rank 2 did not record step 3." in result.note
    assert set(by_rank(result, 1)["lane"].str[:6]) == {"rank 2"}


def test_of_many_ranks_those_that_cause_the_most_and_the_least_waiting_are_shown() -> None:
    world = 40
    traces = []
    for rank in range(world):
        trace = Trace(rank, world)
        trace.step(1, 0, 1000)
        late = 300 if rank == 17 else 0
        trace.collective("allreduce", 100 + late, 600 - late, ranks=str(list(range(world))), size=world, seq=1, launch=10)
        traces.append(trace)
    result = timeline.analyze(job_of(*traces))
    assert len(result.shown) == timeline.SHOWN_RANKS and 17 in result.shown
    assert "16 of 40 ranks are shown at first" in result.note
    assert {int(lane.split()[1]) for lane in by_rank(result)["lane"]} == set(range(world))  # any can be chosen


def test_a_busy_step_is_coarsened_without_losing_time() -> None:
    trace = Trace()
    count = 3 * KEPT
    trace.step(1, 0, 10 * count)
    for i in range(count):
        trace.kernel(f"small{i % 3}", 10 * i, 6 + i % 3, launch=10 * i - 20)
    trace.kernel("long one", 10 * count - 500, 400, stream=9, launch=5)
    (spans,) = timeline.reduce(activity_of(trace)) or ()
    assert len(spans.start) <= KEPT
    assert int(spans.merged.sum()) == count + 1
    covered = np.zeros(10 * count + 10, bool)
    for start, end, stream in zip(spans.start, spans.end, spans.stream, strict=True):
        if stream == 7:
            covered[(start - spans.start.min()) // 1000 : (end - spans.start.min()) // 1000] = True
    for i in range(count):
        assert covered[10 * i : 10 * i + 6 + i % 3].all()
    drawn = timeline.analyze(job_of(trace)).spans
    assert "long one" in drawn["name"].tolist()
    assert drawn["merged"].sum() == count + 1
    assert (drawn["name"][drawn["merged"] > 1] == "small2").any()


def test_steps_in_fewer_spans_lose_no_time() -> None:
    trace = Trace()
    for step in (1, 2):
        trace.step(step, 100_000 * step, 20_000)
        for i in range(1000):
            trace.kernel(f"small{i % 3}", 100_000 * step + 20 * i, 6 + i % 3, launch=100_000 * step + 20 * i - 20)
    spans = (timeline.reduce(activity_of(trace)) or [])[0]
    few = spans.at_most(50)
    assert len(few.start) <= 50 and few.merged.sum() == spans.merged.sum() == 1000
    assert (few.start.min(), few.end.max()) == (spans.start.min(), spans.end.max())
    assert spans.at_most(5000) is spans


def test_a_page_has_room_for_all_steps_of_all_ranks() -> None:
    """Whatever the size of the job: those shown first come whole, the others share what is left."""
    spans = timeline.reduce(activity_of(stepping()))[0]
    many = replace(spans, **{name: np.resize(getattr(spans, name), 3000) for name in COLUMNS})
    ranks = dict.fromkeys(range(1024), many)
    kept = timeline._Kept({1: ranks, 2: ranks}, {(step, rank): rank for step in (1, 2) for rank in range(1024)}, {1: 0, 2: 0})
    limits = timeline._limits(kept, 2, set(range(16)))
    assert limits[2, 0] >= 3000 and limits[1, 0] > limits[2, 1000] > limits[1, 1000] >= timeline.FEWEST
    assert sum(min(limit, 3000) for limit in limits.values()) <= timeline.MOST_SPANS


def test_kinds_that_alternate_are_merged_when_nothing_else_makes_them_fit() -> None:
    trace = Trace()
    count = 2 * KEPT
    trace.step(1, 0, 10 * count)
    for i in range(count):
        trace.kernel("k" if i % 2 else "Memset (Device)", 10 * i, 5, launch=10 * i - 20, cat="kernel" if i % 2 else "gpu_memset")
    (spans,) = timeline.reduce(activity_of(trace)) or ()
    assert len(spans.start) <= KEPT and int(spans.merged.sum()) == count


def test_a_job_without_work_has_no_timeline() -> None:
    trace = Trace()
    trace.step(1, 0, 100)
    result = timeline.analyze(job_of(trace))
    assert result.sections() == [] and result.json() == {} and result.findings() == []


def test_the_programs_own_ranges_stand_above_by_nesting() -> None:
    trace = Trace()
    trace.step(1, 0, 1000)
    trace.annotation("outer <b>", 10, 500)
    trace.annotation("inner", 20, 100)
    trace.annotation("nccl:all_reduce", 30, 10)
    trace.kernel("gemm", 100, 50)
    spans = timeline.analyze(job_of(trace)).spans
    host = spans[spans["category"] == "annotation"]
    assert list(zip(host["lane"], host["name"], strict=True)) == [
        ("rank 0 · annotations", "outer <b>"),
        ("rank 0 · annotations 2", "inner"),
    ]
