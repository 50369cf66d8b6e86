from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analyses.made import Trace, group, job_of
from tracekit.analyses import collectives
from tracekit.analyses._groups import spread
from tracekit.analyses.collectives.rows import MOST_SIZES
from tracekit.job.model import Job


def straggling(*starts: float, end: float = 900, seq: int | None = 1, present: int | None = None) -> Job:
    """One all-reduce of 64 MiB that ends together; rank i starts at ``starts[i]``."""
    world = len(starts)
    traces = [Trace(rank, world) for rank in range(world if present is None else present)]
    for trace, start in zip(traces, starts, strict=False):
        trace.step(2, 0, 2000)
        ranks = str(list(range(world)))
        trace.collective("allreduce", start, end - start, elements=2**24, ranks=ranks, seq=seq, launch=start - 50, size=world)
    return job_of(*traces)


def only(job: Job) -> dict[str, object]:
    (row,) = collectives.analyze(job).json()["collectives"]
    return row


def test_transfer_begins_when_the_last_rank_arrives_and_bandwidth_follows_from_it() -> None:
    row = only(straggling(100, 300, 600, 750, end=1000))
    assert row["count"] == 1 and row["rank_operations"] == 4 and row["matched_by"] == "seq" and row["complete"] is True
    assert row["full_bytes"] == 67_108_864 and row["sent_bytes"] == 100_663_296
    assert row["duration_us"] == {"min": 250.0, "p50": 550.0, "max": 900.0}
    assert row["transfer_us"] == {"min": 250.0, "p50": 250.0, "max": 250.0}
    assert row["wait_us"] == {"0": 650.0, "1": 450.0, "2": 150.0, "3": 0.0}
    assert row["algbw_gb_s"] == pytest.approx(67_108_864 / 250e-6 / 1e9)
    assert row["busbw_gb_s"] == pytest.approx(2 * 3 / 4 * 67_108_864 / 250e-6 / 1e9)


def test_a_bandwidth_that_no_device_reaches_is_shown_with_a_remark() -> None:
    result = collectives.analyze(straggling(100, 300, end=300.001))
    (row,) = result.json()["collectives"]
    assert row["busbw_gb_s"] > 60_000_000
    assert "more than any device reaches" in result.findings()[0].text
    (table,) = result.sections()[0].charts
    assert table.note == "1 rows have a bandwidth that no device reaches: sizes or times in the traces are wrong there."
    assert collectives.analyze(straggling(100, 300, end=900)).sections()[0].charts[0].note == ""


def test_without_its_other_ranks_a_collective_has_a_duration_and_no_bandwidth_and_says_why() -> None:
    result = collectives.analyze(straggling(100, 300, present=1)).json()
    (row,) = result["collectives"]
    assert (row["transfer_us"], row["algbw_gb_s"], row["busbw_gb_s"], row["wait_us"], row["matched_by"]) == (None, None, None, {}, "none")
    assert "not matched" in row["not_measured"]
    assert result["not_measured"]["collectives bandwidth"].startswith("1 of 1 rows")
    json.dumps(result, allow_nan=False)


def test_a_missing_rank_makes_the_transfer_an_upper_bound_and_the_row_says_so() -> None:
    job = straggling(100, 300, 600, present=2)
    assert only(job)["complete"] is False
    table = collectives.analyze(job).sections()[0].charts[0]
    assert "1 rows lack a rank" in table.note


def test_one_row_for_each_group_kind_purpose_type_and_size() -> None:
    traces = [Trace(rank, 2) for rank in range(2)]
    for trace in traces:
        trace.step(1, 0, 1000)
        for seq, (name, elements, dtype) in enumerate(
            [("allreduce", 100, "Float"), ("allreduce", 100, "Float"), ("allreduce", 200, "Float"), ("allreduce", 100, "Half")]
        ):
            trace.collective(name, 100 + 50 * seq, 10 + seq, elements=elements, dtype=dtype, seq=seq, launch=20 + seq)
    rows = collectives.analyze(job_of(*traces)).json()["collectives"]
    assert sorted((row["dtype"], row["full_bytes"], row["count"]) for row in rows) == [
        ("float16", 200, 1),
        ("float32", 400, 2),
        ("float32", 800, 1),
    ]
    assert [row["duration_us"]["max"] for row in rows] == [11.0, 13.0, 12.0]  # by total duration: 42, 26, 24


def test_a_send_with_its_receive_is_one_match_in_two_rows() -> None:
    groups = [group("6", "mesh_pp", [0, 1])]
    sender, receiver = Trace(0, 2, groups=groups), Trace(1, 2, groups=groups)
    for trace in (sender, receiver):
        trace.step(1, 0, 1000)
    args = {"group": "6", "description": "mesh_pp", "elements": 1000, "launch": 10}
    sender.collective("send", 140, 60, **args, **{"Src Rank": 0, "Dst Rank": 1})
    receiver.collective("recv", 100, 100, **args, **{"Src Rank": 0, "Dst Rank": 1})
    rows = {row["kind"]: row for row in collectives.analyze(job_of(sender, receiver)).json()["collectives"]}
    assert {kind: row["count"] for kind, row in rows.items()} == {"send": 1, "recv": 1}
    assert rows["recv"]["wait_us"] == {"1": 40.0} and rows["send"]["wait_us"] == {"0": 0.0}
    assert rows["send"]["busbw_gb_s"] == pytest.approx(4000 / 60_000)


def test_unmatched_operations_with_a_number_count_for_themselves_others_for_the_most_of_a_rank() -> None:
    numbered = [Trace(rank, 2) for rank in range(2)]
    for rank, trace in enumerate(numbered):
        trace.step(1, 0, 1000)
        trace.collective("allreduce", 100, 10, seq=rank, launch=20)
    assert only(job_of(*numbered))["count"] == 2
    plain = [Trace(rank, 2) for rank in range(2)]
    for rank, trace in enumerate(plain):
        trace.step(1, 0, 1000)
        for i in range(rank + 2):  # 2 and 3 of them: their order proves nothing
            trace.collective("allreduce", 100 + 20 * i, 10, launch=20 + 25 * i)
    row = only(job_of(*plain))
    assert (row["matched_operations"], row["rank_operations"], row["count"]) == (0, 5, 3)


def test_operations_of_unknown_groups_are_told_apart_by_stream() -> None:
    trace = Trace(0, 2, groups=[group("0", "default_pg", [0, 1]), group("1", "mesh_tp", [0, 1])])
    trace.step(1, 0, 1000)
    for stream in (20, 24):
        trace.kernel("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", stream * 10, 30, stream=stream, launch=5)
    rows = collectives.analyze(job_of(trace)).json()["collectives"]
    assert [(row["group"], row["stream"], row["full_bytes"]) for row in rows] == [(None, 20, None), (None, 24, None)]


def test_calls_of_many_sizes_become_one_row_with_the_bandwidth_of_all_together() -> None:
    traces = [Trace(rank, 2) for rank in range(2)]
    many = MOST_SIZES + 1
    for trace in traces:
        trace.step(1, 0, 100_000)
        for i in range(many):
            trace.collective("all_to_allv", 100 + 100 * i, 50, elements=1000 + i, seq=i, launch=20 + i)
    row = only(job_of(*traces))
    moved = sum(4 * (1000 + i) for i in range(many))
    assert (row["full_bytes"], row["sizes"], row["count"]) == (None, many, many)
    assert row["algbw_gb_s"] == pytest.approx(moved / (50_000 * many))


def test_uneven_sizes_of_one_collective_stay_in_one_row() -> None:
    traces = [Trace(rank, 2) for rank in range(2)]
    for trace, elements in zip(traces, (1000, 3000), strict=True):
        trace.step(1, 0, 1000)
        trace.collective("all_to_allv", 100, 50, elements=elements, seq=1, launch=20)
    row = only(job_of(*traces))
    assert (row["count"], row["rank_operations"], row["full_bytes"]) == (1, 2, 12_000)


def sibling_groups(*transfers: int) -> Job:
    """Tensor-parallel pairs, one a transfer time."""
    world = 2 * len(transfers)
    traces = []
    for rank in range(world):
        pair = [rank - rank % 2, rank - rank % 2 + 1]
        trace = Trace(rank, world, groups=[group("3", "mesh_tp", pair)])
        trace.step(1, 0, 2000)
        transfer = transfers[rank // 2]
        trace.collective("allreduce", 100, transfer, elements=2**20, group="3", description="mesh_tp", ranks=str(pair), seq=1, launch=10)
        traces.append(trace)
    return job_of(*traces)


def test_a_group_slower_than_its_siblings_is_a_finding() -> None:
    found = [f for f in collectives.analyze(sibling_groups(100, 100, 100, 200)).findings() if f.id == "collectives.slow_group"]
    (finding,) = found
    assert finding.text == ("Group 3@6,7 of axis tp (ranks 6, 7) runs its all_reduce of 4.19 MB at 21 GB/s, its siblings at 41.9 GB/s.")
    assert finding.value == pytest.approx(0.5)
    assert finding.weight_ns == 100_000


def test_groups_of_like_speed_are_no_finding_and_the_costliest_is_named() -> None:
    (finding,) = collectives.analyze(sibling_groups(100, 110, 120)).findings()
    assert finding.id == "collectives.costliest"
    assert finding.text.startswith("Most transfer time goes to the all_reduce of 4.19 MB along tp (tensor_parallel): 1 of them, 120 us")


def test_a_job_without_communication_has_an_empty_list() -> None:
    trace = Trace()
    trace.step(1, 0, 100)
    trace.kernel("gemm", 10, 20, launch=5)
    result = collectives.analyze(job_of(trace))
    assert result.json() == {"collectives": [], "collectives_by_axis": []}
    assert result.findings() == [] and result.sections() == []


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-1000, 1000)), max_size=40))
def test_spread_is_numpys_minimum_median_and_maximum_of_each_group(pairs: list[tuple[int, int]]) -> None:
    group_of = np.array([g for g, _ in pairs], np.int64)
    values = np.array([v for _, v in pairs], np.int64)
    found = spread(group_of, values, 5)
    for number in range(5):
        own = values[group_of == number]
        assert found.count[number] == len(own) and found.total[number] == own.sum()
        expected = {"min": own.min(), "p50": np.median(own), "max": own.max()} if len(own) else None
        assert found.json(number, 1) == expected


def test_groups_of_one_axis_are_summed_up() -> None:
    traces = [Trace(rank, 4) for rank in range(4)]
    for rank, trace in enumerate(traces):
        trace.step(1, 0, 1000)
        own = [0, 1] if rank < 2 else [2, 3]
        trace.collective("allreduce", 100, 40 + rank, elements=100, seq=1, launch=20, group=str(own[0]), description="mesh_tp", ranks=own)
    found = collectives.analyze(job_of(*traces)).json()
    assert [row["count"] for row in found["collectives"]] == [1, 1]
    (row,) = found["collectives_by_axis"]
    assert (row["axis"], row["groups"], row["size"], row["count"], row["rank_operations"]) == ("tp", 2, 2, 2, 4)
    assert row["duration_us"] == {"min": 40.0, "p50": 41.5, "max": 43.0}
    assert list(row["wait_us"]) == ["0", "1", "2", "3"]


def two_groups(size: int, us: float) -> Job:
    """Two tensor-parallel pairs: ranks 0 and 1 move 4 MiB in 100 us, ranks 2 and 3 so many elements in so many us."""
    traces = []
    for rank in range(4):
        pair = [rank - rank % 2, rank - rank % 2 + 1]
        elements, transfer = (2**20, 100.0) if rank < 2 else (size, us)
        trace = Trace(rank, 4, groups=[group("3", "mesh_tp", pair)])
        trace.step(1, 0, 2000)
        trace.collective("allreduce", 100, transfer, elements=elements, group="3", description="mesh_tp", ranks=str(pair), seq=1, launch=10)
        traces.append(trace)
    return job_of(*traces)


@pytest.mark.parametrize(
    ("size", "us", "slow"),
    [(2**20, 200, True), (2**20, 110, False), (2**21, 400, True), (2**21, 210, False), (2**19, 400, False)],
)
def test_of_two_groups_the_slow_one_is_found_by_its_size_and_the_rate_of_the_other(size: int, us: float, slow: bool) -> None:
    found = [f for f in collectives.analyze(two_groups(size, us)).findings() if f.id == "collectives.slow_group"]
    assert [f.subject.ranks for f in found] == ([(2, 3)] if slow else [])


def test_an_uneven_all_to_all_has_the_bandwidth_of_what_was_sent() -> None:
    traces = [Trace(rank, 2) for rank in range(2)]
    for trace, splits in zip(traces, ("[3000, 1000]", "[2000, 2000]"), strict=True):
        trace.step(1, 0, 1000)
        split = {"In split size": splits}
        trace.collective("all_to_allv", 100, 50, elements=4000, seq=1, launch=20, **split)
    row = only(job_of(*traces))
    assert row["busbw_gb_s"] == pytest.approx(4 * 2000 / 50_000)  # rank 1 sends half of its own, rank 0 a quarter
