from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analyses.made import Trace, group, job_of, mesh_groups, work
from tracekit.analyses import overlap
from tracekit.findings import Heatmap, StackedBars


def two_axes() -> Trace:
    """Compute 100-500 and 650-750; tp 300-700, dp 600-800."""
    trace = Trace(0, 4, groups=mesh_groups(0))
    trace.step(1, 0, 1000)
    trace.kernel("gemm", 100, 400, launch=10)
    trace.kernel("gemm", 650, 100, launch=20)
    trace.collective("allreduce", 300, 400, group="3", description="mesh_tp", ranks="[0, 1]", stream=20, launch=30)
    trace.collective("allreduce", 600, 200, group="5", description="mesh_dp", ranks="[0, 2]", stream=24, launch=40)
    return trace


def test_exposed_communication_of_each_axis_and_of_all_together() -> None:
    result = overlap.analyze(job_of(two_axes())).json()
    assert result["overlap"] == [{"rank": 0, "step": 1, "comm_us": 500.0, "hidden_us": 300.0, "exposed_us": 200.0, "overlap": 0.6}]
    assert sorted(result["exposed_by_axis"], key=lambda row: row["axis"]) == [
        {"rank": 0, "step": 1, "axis": "dp", "exposed_us": 100.0, "busy_us": 200.0},  # 600-650 and 750-800
        {"rank": 0, "step": 1, "axis": "tp", "exposed_us": 150.0, "busy_us": 400.0},  # 500-650
    ]


def test_findings_give_share_of_the_step_time_and_advice_for_the_axis() -> None:
    total, tp, dp = overlap.analyze(job_of(two_axes())).findings()
    assert total.text == "Exposed communication: 200 us a step (20%), most of it along tp; 60% of all is overlapped."
    assert (total.id, total.severity) == ("overlap.exposed", "warning")
    assert (total.value, total.unit, total.weight_ns) == (0.2, "ratio of step", 200_000)
    assert "inside a node" in total.advice
    assert tp.text == "Communication along tp is exposed for 15% of a step (150 us); 62% of it is hidden."
    assert dp.text == "Communication along dp is exposed for 10% of a step (100 us); 50% of it is hidden."
    assert "bucket_cap_mb" in dp.advice  # nothing is gathered


def test_sections_show_hidden_and_exposed_by_rank_and_axis() -> None:
    (section,) = overlap.analyze(job_of(two_axes())).sections()
    bars, heat, table = section.charts
    assert isinstance(bars, StackedBars) and isinstance(heat, Heatmap)
    assert dict(bars.series) == {"hidden communication": [300.0], "exposed communication": [200.0]}
    assert dict(zip(heat.x_labels, heat.values[0], strict=True)) == {"dp": 100.0, "tp": 150.0}
    assert dict(zip(table.frame["axis"], table.frame["hidden"], strict=True)) == {"dp": 0.5, "tp": 0.625}


def test_communication_across_the_edge_of_a_step_is_shared_between_the_steps() -> None:
    trace = Trace()
    trace.step(1, 0, 100)
    trace.step(2, 100, 100)
    trace.kernel("gemm", 110, 20, launch=5)
    trace.collective("allreduce", 80, 60, launch=10)
    rows = overlap.analyze(job_of(trace)).json()["exposed_by_axis"]
    assert [(row["step"], row["busy_us"], row["exposed_us"]) for row in rows] == [(1, 20.0, 20.0), (2, 40.0, 20.0)]


def test_communication_of_no_known_group_is_called_unknown() -> None:
    trace = Trace(0, 2)
    trace.step(1, 0, 100)
    trace.kernel("void vllm::cross_device_reduce_2stage<__half, 4>(x)", 10, 30, launch=5)
    (row,) = overlap.analyze(job_of(trace)).json()["exposed_by_axis"]
    assert (row["axis"], row["busy_us"]) == ("unknown", 30.0)


def test_a_rank_without_communication_is_measured_as_zero_and_says_nothing() -> None:
    trace = Trace()
    trace.step(1, 0, 100)
    trace.kernel("gemm", 10, 30, launch=5)
    result = overlap.analyze(job_of(trace))
    assert result.json() == {
        "exposed_by_axis": [],
        "overlap": [{"rank": 0, "step": 1, "comm_us": 0.0, "hidden_us": 0.0, "exposed_us": 0.0, "overlap": None}],
    }
    assert result.findings() == [] and result.sections() == []


def test_well_hidden_communication_is_told_without_a_warning() -> None:
    trace = Trace()
    trace.step(1, 0, 1000)
    trace.kernel("gemm", 0, 900, launch=5)
    trace.collective("allreduce", 100, 300, launch=10)
    (finding,) = overlap.analyze(job_of(trace)).findings()
    assert (finding.id, finding.severity) == ("overlap.hidden", "info")
    assert finding.text == "100% of the communication is hidden behind compute; 0.0% of a step is exposed."


_PIECES = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 50), st.integers(0, 1), st.just(0), st.none()), min_size=1, max_size=30)


@given(_PIECES)
@settings(max_examples=100, deadline=None)
def test_what_compute_hides_of_communication_is_what_communication_hides_of_compute(pieces: list[tuple[int, ...]]) -> None:
    pieces = [(start, start + length, *rest) for start, length, *rest in pieces]
    swapped = [(start, end, 1 - kind, *rest) for start, end, kind, *rest in pieces]
    marks = [(0, 0, 120), (1, 120, 250)]
    one, other = overlap.reduce(work(pieces, marks)), overlap.reduce(work(swapped, marks))
    assert one is not None and other is not None
    assert one.hidden_ns.tolist() == other.hidden_ns.tolist()


@given(_PIECES)
@settings(max_examples=100, deadline=None)
def test_exposed_pieces_belong_to_their_operation_and_cover_what_is_exposed(pieces: list[tuple[int, ...]]) -> None:
    pieces = sorted(((start, start + length, *rest) for start, length, *rest in pieces), key=lambda piece: piece[0])
    exposure = overlap.reduce(work(pieces, [(0, 0, 300)]))
    assert exposure is not None
    operations = [piece for piece in pieces if piece[2] == 1]
    compute = {t for start, end, kind, *_ in pieces if kind == 0 for t in range(start, end)}
    for number, (start, end, *_) in enumerate(operations):
        own = exposure.pieces.operation == number
        found = {t for s, e in zip(exposure.pieces.start[own], exposure.pieces.end[own], strict=True) for t in range(s, e)}
        assert found == set(range(start, end)) - compute


def gathers(starts: list[int], compute: list[int], launch_before: int = 5) -> list[str]:
    """Findings on FSDP whose gathers of 50 us begin there, beside gemms of 100 us."""
    trace = Trace(0, 2, groups=[group("1", "mesh_dp_shard", [0, 1])])
    trace.step(1, 0, 1000)
    for i, at in enumerate(compute):
        trace.kernel("gemm", at, 100, launch=at - 3)
        where = {"group": "1", "description": "mesh_dp_shard", "ranks": "[0, 1]"}
        trace.collective("_allgather_base", starts[i], 50, launch=starts[i] - launch_before, seq=i, stream=20, **where)
    return [f"{finding.id}: {finding.text}" for finding in overlap.analyze(job_of(trace)).findings()]


def test_gathers_that_wait_for_the_compute_before_them_are_not_prefetched() -> None:
    first, *_ = gathers([20, 180, 340, 500], [75, 235, 395, 555])
    assert first == (
        "overlap.no_prefetch: Parameters are gathered without prefetch: 3 of 3 gathers start only after the compute before them ended "
        "(they are called no earlier). 150 us a step (15%) is exposed that compute could hide."
    )
    queued, *_ = gathers([20, 180, 340, 500], [75, 235, 395, 555], launch_before=60)
    assert "though they were called earlier" in queued
    assert not [text for text in gathers([20, 80, 240, 400], [75, 235, 395, 555]) if "no_prefetch" in text]  # beside the compute before


def test_hops_of_a_ring_and_what_hides_them() -> None:
    traces = []
    for rank in range(2):
        trace = Trace(rank, 2, groups=[group("1", "mesh_cp", [0, 1])])
        trace.step(1, 0, 1000)
        for hop, compute in enumerate((100, 50)):  # the second hop of 100 us is hidden by half
            at = 100 + 200 * hop
            trace.kernel("flash_attention", at, compute, launch=at - 5)
            for kind, source in (("send", rank), ("recv", 1 - rank)):
                ends = {"Src Rank": source, "Dst Rank": 1 - source}
                stream, launch = (20, at - 90) if kind == "send" else (24, at - 50)
                where = {"group": "1", "description": "mesh_cp", "ranks": "[0, 1]"}
                trace.collective(kind, at, 100, launch=launch, stream=stream, **where, **ends)
        traces.append(trace)
    (told,) = [found for found in overlap.analyze(job_of(*traces)).findings() if found.id == "overlap.ring"]
    assert told.text == (
        "Ring of context parallelism along cp: 2 hops a rank and step, 100 us each once both sides are there; "
        "75% of their time is overlapped."
    )
