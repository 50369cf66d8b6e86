from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.analyses.made import Trace, group, job_of
from tests.workloads.recording import needs_torch, record
from tracekit.analyses import pipeline
from tracekit.analyses.pipeline import order as order
from tracekit.errors import UsageError
from tracekit.estimate import pipeline as closed_forms
from tracekit.job.join import join
from tracekit.job.load import LoadOptions, load_job
from tracekit.job.model import Job
from tracekit.job.window import Task, reduce_window
from tracekit.manifest import Axis, Manifest
from tracekit.simulate.pipeline.order import simulate
from tracekit.trace.clock import Clock

#: (name of the range, start, end) in us.
Work = Sequence[tuple[str, int, int]]


def rank_of(rank: int, work: Work, world: int = 2, steps: Sequence[tuple[int, int, int]] = (), **more: Any) -> Trace:
    """A rank on a CPU, one operator in every range. ``steps`` are (number, start, length)."""
    trace = Trace(rank, world, backend="gloo", device=None, **more)
    for number, start, length in steps:
        trace.step(number, start, length)
    for name, start, end in work:
        trace.annotation(name, start, end - start)
        trace.operator("aten::mm", start, end - start)
    return trace


def recorded(traces: Sequence[Trace], manifests: Sequence[Manifest]) -> Job:
    """The job of traces with the manifests beside them."""
    task = Task(reducers={"pipeline": pipeline.reduce})
    windows = [
        reduce_window(oracle.tables(trace.text()), f"rank{trace.rank}.json", task, manifest)
        for trace, manifest in zip(traces, manifests, strict=True)
    ]
    return join(windows, [], None, None)


def found(*traces: Trace, mesh: str | None = None) -> dict[str, Any]:
    """``pipeline`` of the JSON."""
    return as_written(pipeline.analyze(job_of(*traces, mesh=mesh)))


def as_written(result: pipeline.Pipeline) -> dict[str, Any]:
    """``pipeline`` of the JSON as a file holds it."""
    told: dict[str, Any] = json.loads(json.dumps(result.json(), allow_nan=False))["pipeline"]
    return told


def reason(*traces: Trace) -> str:
    """Why there is none."""
    (key, text), *rest = pipeline.analyze(job_of(*traces)).json()["not_measured"].items()
    assert key == "pipeline" and not rest
    return str(text)


# Two stages, two micro-batches, all forwards first:   0: F0 F1 .  .  B0 B1     1: .  F0 F1 B0 B1 .
FIRST: Work = [("PP:0F0", 0, 10), ("PP:0F1", 10, 20), ("PP:0B0", 50, 70), ("PP:0B1", 70, 90)]
SECOND: Work = [("PP:1F0", 10, 20), ("PP:1F1", 20, 30), ("PP:1B0", 30, 50), ("PP:1B1", 50, 70)]


def test_gpipe_by_hand() -> None:
    told = found(rank_of(0, FIRST), rank_of(1, SECOND))
    assert (told["schedule"], told["schedule_from"], told["stages"], told["microbatches"]) == ("gpipe", "order of work", 2, 2)
    assert told["bubble_share"] == {
        "measured": pytest.approx(1 / 3),  # 60 of 90 us are work
        "ideal": pytest.approx(1 / 3),  # (p-1)/(m+p-1)
        "ideal_from": "closed form",
        "ideal_with_twice_the_microbatches": pytest.approx(1 / 5),
        "replayed_equal_stages": pytest.approx(1 / 3),
        "replayed": pytest.approx(1 / 3),
    }
    assert told["in_flight_peak"] == {"0": 2, "1": 2}
    parts = ("rank", "run_us", "busy_us", "bubble_us", "fill_us", "waiting_us", "other_us", "drain_us", "waiting_for_stage_us")
    assert [tuple(row[key] for key in parts) for row in told["by_rank"]] == [
        (0, 90.0, 60.0, 30.0, 0.0, 30.0, 0.0, 0.0, {"1": 30.0}),  # until 1B0 is done
        (1, 90.0, 60.0, 30.0, 10.0, 0.0, 0.0, 20.0, {}),
    ]
    shown = ("stage", "ranks", "forward_us", "backward_us", "weight_backward_us", "bubble_share")
    assert [tuple(row[key] for key in shown) for row in told["by_stage"]] == [
        (0, [0], 10.0, 20.0, None, pytest.approx(1 / 3)),
        (1, [1], 10.0, 20.0, None, pytest.approx(1 / 3)),
    ]


def test_1f1b_holds_fewer_micro_batches_at_once() -> None:
    first = [("PP:0F0", 0, 10), ("PP:0F1", 10, 20), ("PP:0B0", 40, 60), ("PP:0F2", 60, 70), ("PP:0B1", 80, 100), ("PP:0B2", 120, 140)]
    last = [("PP:1F0", 10, 20), ("PP:1B0", 20, 40), ("PP:1F1", 40, 50), ("PP:1B1", 50, 70), ("PP:1F2", 70, 80), ("PP:1B2", 80, 100)]
    told = found(rank_of(0, first), rank_of(1, last))
    assert (told["schedule"], told["in_flight_peak"]) == ("1f1b", {"0": 2, "1": 1})
    waits = {row["rank"]: (row["waiting_us"], row["other_us"]) for row in told["by_rank"]}
    assert waits == {0: (20.0, 30.0), 1: (0.0, 0.0)}  # 1B1 is done at 70 and 1B2 at 100: 0B1 and 0B2 begin 10 and 20 later than they could


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2"]),
    st.integers(2, 4),
    st.integers(2, 8),
    st.integers(1, 3),
    st.integers(1, 3),
)
@settings(max_examples=25, deadline=None)
def test_what_is_measured_of_an_ideal_timeline_is_the_ideal(schedule: str, p: int, m: int, f: int, b: int) -> None:
    v = 2 if schedule == "interleaved_1f1b" else 1
    try:
        timeline = simulate(schedule, p, m, v, Fraction(2 * f), Fraction(2 * b), Fraction(2))
    except UsageError:
        return  # this schedule cannot run these micro-batches
    spelled = {"F": "F", "BW": "B", "B": "I", "W": "W"}
    traces = []
    for rank in range(p):
        pieces = sorted(timeline.of_rank(rank), key=lambda piece: piece.start)
        names = [f"PP:{timed.action.chunk}{spelled[timed.action.kind]}{timed.action.micro_batch}" for timed in pieces]
        traces.append(rank_of(rank, [(n, int(10 * x.start), int(10 * x.end)) for n, x in zip(names, pieces, strict=True)], p))
    told = found(*traces)
    share = closed_forms.bubble_share(schedule, p, m, 2 * f, 2 * b, 2, v)
    assert (told["schedule"], told["stages"], told["stages_per_rank"], told["microbatches"]) == (schedule, p * v, v, m)
    assert told["bubble_share"]["measured"] == pytest.approx(float(share))
    assert told["bubble_share"]["ideal"] == pytest.approx(float(share))
    assert told["bubble_share"]["replayed"] == pytest.approx(float(share))
    if v == 1:
        assert list(told["in_flight_peak"].values()) == list(closed_forms.in_flight_until_weight(schedule, p, m))
        assert list(told["in_flight_until_input_peak"].values()) == list(closed_forms.in_flight(schedule, p, m))


@pytest.mark.parametrize(
    ("orders", "schedule"),
    [
        (["F F B B", "F F B B"], "gpipe"),
        (["F F B B", "F B F B"], "1f1b"),
        (["F F B B"], "unknown"),  # the first of two stages alone: both schedules do that
        (["F B F B", "F F B B"], "unknown"),
        (["F F I I W W", "F I F I W W"], "zero_bubble"),
        (["F F", "F F"], "forward_only"),
    ],
)
def test_a_schedule_is_told_by_the_order_of_work(orders: list[str], schedule: str) -> None:
    given_orders = {}
    for rank, text in enumerate(orders):
        kinds = text.split()
        given_orders[rank] = [order.Piece(kind, rank, kinds[:i].count(kind)) for i, kind in enumerate(kinds)]
    assert order.schedule_of(given_orders, 2, 2)[0] == schedule


@pytest.mark.parametrize(
    ("orders", "schedule"),
    [
        (("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"), "looped"),
        (("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"), "interleaved_1f1b"),
        (("0F0 0F1 2F0 2F1 2I0 0I0 2I1 0I1 2W0 2W1 0W0 0W1", "1F0 1F1 3F0 3I0 1I0 3F1 3I1 1I1 3W0 3W1 1W0 1W1"), "interleaved_zero_bubble"),
        (("0F0 0F1 3F0 3I0 3F1 3I1 3W0 3W1 0I0 0W0 0I1 0W1", "1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 2W1 1W0 1W1"), "zbv"),
        (("0F0 2F0 0B0 2B0 0F1 2F1 2B1 0B1", "1F0 3F0 3B0 1B0 1F1 3F1 3B1 1B1"), "unknown"),
    ],
)
def test_a_schedule_of_two_stages_a_rank_too(orders: tuple[str, ...], schedule: str) -> None:
    given_orders = {rank: [order.Piece(x[1], int(x[0]), int(x[2])) for x in text.split()] for rank, text in enumerate(orders)}
    assert order.schedule_of(given_orders, 4, 2)[0] == schedule


def test_ranks_that_would_wait_for_ever_are_not_replayed() -> None:
    orders = {0: [order.Piece("B", 0, 0), order.Piece("F", 0, 0)], 1: [order.Piece("F", 1, 0), order.Piece("B", 1, 0)]}
    assert order.replay(orders, lambda piece: 1.0) is None


def test_waiting_for_a_message_inside_a_range_is_not_work() -> None:
    trace = Trace(1, 2, backend="gloo", device=None)
    trace.annotation("PP:1F0", 0, 100)
    trace.operator("c10d::recv_", 5, 1)
    trace.annotation("gloo:recv", 6, 54)
    trace.operator("aten::mm", 60, 20)
    trace.operator("c10d::send", 85, 15)
    trace.annotation("gloo:send", 90, 500)
    told = found(rank_of(0, [("PP:0F0", -10, 0)]), trace)
    assert {row["rank"]: row["busy_us"] for row in told["by_rank"]} == {0: 10.0, 1: 100 - 55 - 15}


def test_a_message_that_is_on_its_way_beside_the_work_costs_nothing() -> None:
    trace = rank_of(1, [("PP:1F0", 0, 100)])
    trace.operator("c10d::recv_", 30, 1)
    trace.annotation("gloo:recv", 31, 60)
    told = found(rank_of(0, [("PP:0F0", -10, 0)]), trace)
    assert {row["rank"]: row["busy_us"] for row in told["by_rank"]} == {0: 10.0, 1: 100.0}


def test_on_a_gpu_a_piece_lasts_as_long_as_the_kernels_launched_in_its_range() -> None:
    traces = [Trace(0, 2), Trace(1, 2)]
    for rank, trace in enumerate(traces):
        trace.annotation(f"PP:{rank}F0", 0, 10)
        trace.annotation(f"PP:{rank}B0", 20, 10)
        if rank:
            trace.collective("recv", 5, 95, group="1", description="mesh_pp", launch=-30, stream=20)
        trace.kernel("forward", 100 * rank, 60, launch=5)
        trace.kernel("forward 2", 70 + 100 * rank, 30, launch=6)
        trace.kernel("backward", 300 - 100 * rank, 100, launch=25, tid=77)  # the autograd engine's own thread
        trace.kernel("optimizer", 400, 50, launch=40)
    told = found(*traces)
    assert (told["times_from"], told["schedule"]) == ("device", "gpipe")  # one micro-batch: every schedule is the same
    assert [(row["run_us"], row["busy_us"], row["waiting_us"]) for row in told["by_rank"]] == [(400.0, 200.0, 200.0), (400.0, 200.0, 0.0)]


def test_stages_of_torchs_gpipe_are_the_places_on_the_pipelines_axis() -> None:
    own = [(name.replace("PP:0F", "Forward ").replace("PP:0B", "Backward "), start, end) for name, start, end in FIRST]
    last = [(name.replace("PP:1F", "Forward ").replace("PP:1B", "Backward "), start, end) for name, start, end in SECOND]
    told = found(rank_of(0, own), rank_of(1, last), mesh="pp=2")
    assert (told["schedule"], told["axis"], told["in_flight_peak"]) == ("gpipe", "pp", {"0": 2, "1": 2})
    assert "--mesh" in reason(rank_of(0, own), rank_of(1, last))


def test_every_place_beside_the_pipelines_axis_is_a_pipeline_of_its_own() -> None:
    late = [(name, start + 5, end + 5) for name, start, end in FIRST], [(name, start + 5, end + 5) for name, start, end in SECOND]
    works = [FIRST, late[0], SECOND, late[1]]
    for mesh in ("pp=2,dp=2", None):  # without a mesh the ranks of one stage are told apart by their order
        told = found(*(rank_of(rank, work, 4) for rank, work in enumerate(works)), mesh=mesh)
        assert [(row["rank"], row["pipeline"]) for row in told["by_rank"]] == [(0, 0), (1, 1), (2, 0), (3, 1)]
        assert [row["run_us"] for row in told["by_rank"]] == [90.0] * 4
        assert told["pipelines"] == 2
        assert [row["ranks"] for row in told["by_stage"]] == [[0, 1], [2, 3]]


def test_each_step_is_a_run_and_what_is_not_whole_is_left_out() -> None:
    again = [[(name, start + 100, end + 100) for name, start, end in work] for work in (FIRST, SECOND)]
    steps = [(1, 0, 95), (2, 100, 95)]
    told = found(rank_of(0, [*FIRST, *again[0]], steps=steps), rank_of(1, [*SECOND, *again[1]], steps=steps))
    assert [(row["rank"], row["step"]) for row in told["by_rank"]] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert (told["runs"], told["notes"]) == (2, [])
    told = found(rank_of(0, [*FIRST, *again[0]], steps=steps), rank_of(1, [*SECOND, *again[1][:-1]], steps=steps))
    assert [(row["rank"], row["step"]) for row in told["by_rank"]] == [(0, 1), (1, 1)]
    assert "2 ranks' runs of the schedule are left out" in told["notes"][0]


def test_two_runs_in_one_step_are_two_runs() -> None:
    again = [[(name, start + 100, end + 100) for name, start, end in work] for work in (FIRST, SECOND)]
    told = found(*(rank_of(r, [*w, *again[r]], steps=[(7, 0, 200)]) for r, w in enumerate((FIRST, SECOND))))
    assert [(row["step"], row["turn"]) for row in told["by_rank"] if row["rank"] == 0] == [(7, 0), (7, 1)]
    assert told["bubble_share"]["measured"] == pytest.approx(1 / 3)


def test_without_backward_nothing_is_counted_in_flight() -> None:
    told = found(rank_of(0, FIRST[:2]), rank_of(1, SECOND[:2]))
    assert (told["schedule"], told["in_flight_peak"]) == ("forward_only", None)
    assert told["bubble_share"]["measured"] == pytest.approx(1 / 3) == told["bubble_share"]["ideal"]


@pytest.mark.parametrize(
    ("work", "measured", "note"),
    [
        (FIRST, 1 / 3, "no rank with stage 1 was read: the measured bubble is a lower bound"),
        (SECOND, None, "no rank with stage 0 was read: how long a run of the schedule is cannot be told"),
    ],
)
def test_without_the_first_stage_the_length_of_a_run_is_not_known(work: Work, measured: float | None, note: str) -> None:
    told = found(rank_of(0, work), mesh="pp=2")
    assert told["stages"] == 2 and note in told["notes"]
    assert told["bubble_share"]["measured"] == (None if measured is None else pytest.approx(measured))
    assert [row["run_us"] for row in told["by_rank"]] == [None if measured is None else 90.0]
    assert told["bubble_share"]["replayed"] is None


def test_clocks_that_are_not_aligned_measure_nothing_between_ranks() -> None:
    job = job_of(rank_of(0, FIRST), rank_of(1, SECOND))
    result = pipeline.analyze(replace(job, clock=Clock(False, {}, None)))
    told = as_written(result)
    assert (told["bubble_share"]["measured"], told["bubble_share"]["ideal"]) == (None, pytest.approx(1 / 3))
    assert told["in_flight_peak"] == {"0": 2, "1": 2}
    assert [(row["busy_us"], row["bubble_us"], row["waiting_for_stage_us"]) for row in told["by_rank"]] == [(60.0, None, None)] * 2
    assert "could not be aligned" in told["notes"][0]
    assert result.findings() == [] and len(result.sections()[0].charts) == 2


def test_without_ranges_of_stages_the_reason_says_what_is_there() -> None:
    silent = [Trace(rank, 2, groups=[group("0", "default_pg", [0, 1]), group("1", "mesh_pp", [0, 1])]) for rank in range(2)]
    for trace in silent:
        trace.kernel("gemm", 0, 10)
    assert reason(*silent).startswith("nothing in the traces is a pipeline")
    silent[0].collective("send", 10, 5, group="1", description="mesh_pp")
    assert reason(*silent).startswith("stages exchange messages, but no range such as PP:0F3")
    assert reason(rank_of(0, FIRST[:3])).startswith("no run of the schedule was recorded whole")


def test_names_that_only_look_like_pieces_are_not_taken_for_one() -> None:
    names = ("PP:0SEND_F0", "PP:F0", "PP:0F", "PP:1234567F0", "PP:0F0 again", "PP:-1F0", "Forward", "XPP:0F0")
    assert reason(rank_of(0, [(name, 10 * i, 10 * i + 5) for i, name in enumerate(names)])).startswith("nothing")


def test_a_range_inside_its_own_is_the_same_piece() -> None:
    told = found(rank_of(0, [("PP:0F0", 1, 9), *FIRST]), rank_of(1, SECOND))
    assert told["bubble_share"]["measured"] == pytest.approx(1 / 3)


def test_the_bubble_is_told_with_what_would_shrink_it() -> None:
    (finding,) = pipeline.analyze(job_of(rank_of(0, FIRST), rank_of(1, SECOND))).findings()
    assert (finding.id, finding.severity) == ("pipeline.bubble", "warning")
    assert finding.text == (
        "Pipeline bubble: ranks have no pipeline work for 33% of a run of the schedule (30 us of 90 us), "
        "where gpipe with 2 micro-batches leaves 33% at best."
    )
    assert finding.advice.startswith("4 micro-batches leave 20% at best")
    assert finding.weight_ns == 15_000  # 60 / (1 - 1/3) - 60 / (1 - 1/5)


def test_stages_of_unequal_length_are_told_and_explain_the_bubble() -> None:
    slow = [("PP:1F0", 10, 40), ("PP:1F1", 40, 70), ("PP:1B0", 70, 130), ("PP:1B1", 130, 190)]
    early = [*FIRST[:2], ("PP:0B0", 130, 150), ("PP:0B1", 190, 210)]
    result = pipeline.analyze(job_of(rank_of(0, early), rank_of(1, slow)))
    bubble, above, unequal = result.findings()
    share = (150 / 210 + 30 / 210) / 2
    assert (bubble.value, above.value) == (pytest.approx(share), pytest.approx(share - 1 / 3))
    assert above.text.startswith("The pipeline bubble is 43% of a run where gpipe needs 33%: unequal stages explain 10 of these 10 points")
    assert above.advice == "Balance the layers of the stages."
    assert unequal.text.startswith("Stage 1 takes 90 us for one micro-batch, forward and backward, 50% more than the mean rank (60 us)")
    assert (unequal.severity, unequal.weight_ns) == ("warning", 60_000)


def test_the_report_shows_a_run_stage_by_stage() -> None:
    (section,) = pipeline.analyze(job_of(rank_of(1, SECOND), rank_of(0, FIRST))).sections()
    gantt, bars, table = section.charts
    assert "gpipe: 2 stages on 2 ranks, 2 micro-batches." in section.lead
    rows = gantt.spans[["lane", "start_us", "end_us", "name", "category"]].values.tolist()  # type: ignore[union-attr]
    assert rows[0] == ["rank 0 · stage 0", 0.0, 10.0, "F0", "forward"]
    assert rows[-1] == ["rank 1 · stage 1", 50.0, 70.0, "B1", "backward"]
    assert bars.series["compute of stages"] == [60.0, 60.0]  # type: ignore[union-attr]
    assert [sum(parts) for parts in zip(*bars.series.values(), strict=True)] == [90.0, 90.0]  # type: ignore[union-attr]
    assert list(table.frame["in_flight_peak"]) == [2, 2]  # type: ignore[union-attr]
    assert "weight_backward_us" not in table.columns  # type: ignore[union-attr]


def test_with_several_stages_a_rank_bars_name_theirs() -> None:
    works = [
        [("PP:0F0", 0, 10), ("PP:2F0", 20, 30), ("PP:2B0", 60, 80), ("PP:0B0", 100, 120)],
        [("PP:1F0", 10, 20), ("PP:3F0", 30, 40), ("PP:3B0", 40, 60), ("PP:1B0", 80, 100)],
    ]
    result = pipeline.analyze(job_of(*(rank_of(rank, work) for rank, work in enumerate(works))))
    spans = result.sections()[0].charts[0].spans  # type: ignore[union-attr]
    assert spans["lane"].unique().tolist() == ["rank 0 · stages 0, 2", "rank 1 · stages 1, 3"]
    assert spans["name"].tolist()[:2] == ["0F0", "2F0"]
    told = result.json()["pipeline"]
    assert (told["stages"], told["ranks_per_pipeline"], told["stages_per_rank"]) == (4, 2, 2)


def test_the_manifest_names_the_schedule_and_its_contradiction_is_told() -> None:
    said = {"schedule": "1f1b", "axis": "pp", "stages": 2, "microbatches": 2, "stage_of_rank": {"0": [0], "1": [1]}}
    manifests = [Manifest(rank=rank, world_size=2, mesh=[Axis("pp", 2)], coordinate={"pp": rank}, pipeline=said) for rank in range(2)]
    told = pipeline.analyze(recorded([rank_of(0, FIRST), rank_of(1, SECOND)], manifests)).json()["pipeline"]
    assert (told["schedule"], told["schedule_from"], told["axis"]) == ("1f1b", "manifest", "pp")
    assert told["notes"] == ["the manifest calls the schedule 1f1b; the order of work is that of gpipe"]


def test_a_manifest_that_tells_nonsense_changes_nothing() -> None:
    said = {"schedule": 7, "axis": ["pp"], "stages": "many", "microbatches": -1, "stage_of_rank": 3}
    manifests = [Manifest(rank=rank, world_size=2, pipeline=said) for rank in range(2)]
    told = pipeline.analyze(recorded([rank_of(0, FIRST), rank_of(1, SECOND)], manifests)).json()["pipeline"]
    assert (told["stages"], told["schedule"], told["schedule_from"]) == (2, "gpipe", "order of work")


def test_every_key_is_documented() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "json.md").read_text()
    documented = set(re.findall(r"[a-z_0-9]+", " ".join(re.findall(r"`([^`]+)`", text))))
    told = found(rank_of(0, FIRST), rank_of(1, SECOND))
    keys = {key for key in re.findall(r'"([a-z_0-9]+)":', json.dumps(told)) if not key.isdigit()}
    assert keys - documented == set() and "waiting_for_stage_us" in keys


@needs_torch
@pytest.mark.parametrize(
    ("workload", "schedule", "peak", "orders"),
    [
        ("pipeline_1f1b", "1f1b", {0: 2, 1: 1}, ["FFBFBFBB", "FBFBFBFB"]),
        ("pipeline_gpipe", "gpipe", {0: 4, 1: 4}, ["FFFFBBBB", "FFFFBBBB"]),
    ],
)
def test_a_recording(tmp_path: Path, workload: str, schedule: str, peak: dict[int, int], orders: list[str]) -> None:
    record(tmp_path, workload, "--active", "2")
    result = pipeline.analyze(load_job([str(tmp_path)], LoadOptions(), {"pipeline": pipeline.reduce}))
    told = result.json()["pipeline"]
    assert (told["schedule"], told["stages"], told["microbatches"], told["runs"], told["notes"]) == (schedule, 2, 4, 2, [])
    assert told["in_flight_peak"] == peak
    assert told["bubble_share"]["ideal"] == pytest.approx(1 / 5)
    assert 0 < told["bubble_share"]["measured"] < 1
    for row in told["by_rank"]:
        parts = row["fill_us"] + row["waiting_us"] + row["other_us"] + row["drain_us"]
        assert parts == pytest.approx(row["bubble_us"])
        assert row["run_us"] == pytest.approx(row["busy_us"] + row["bubble_us"])
    first = result.pieces[result.pieces["step"] == result.pieces["step"].min()]
    assert ["".join("FBIW"[kind] for kind in own["kind"]) for _, own in first.groupby("rank")] == orders
