import base64
import zlib

import numpy as np
import pandas as pd
import pytest

from tracekit.findings import Timeline
from tracekit.report.timeline import by_name, timeline_data
from tracekit.units import NULL


def chart(*spans: tuple[str, float, float, str, str]) -> Timeline:
    return Timeline("t", pd.DataFrame(spans, columns=["lane", "start_us", "end_us", "name", "category"]))


STEP = chart(
    ("rank 0 · stream 7", 105.0, 110.0, "gemm", "compute"),
    ("rank 1 · stream 7", 100.0, 120.0, "gemm", "compute"),
    ("rank 0 · stream 20", 103.0, 109.0, "all_reduce", "communication"),
    ("rank 0 · stream 7", 101.0, 104.0, "relu", "compute"),
)


def steps(stretches: list[tuple[int, str, int, str, str, float, float]] | None = None) -> Timeline:
    """Two steps of two ranks with waits and a critical path; step 4 is shown first, and rank 0."""
    rows = [
        (3, "rank 0 · stream 7", 0.0, 5.0, "gemm", "compute", 1),
        (3, "critical path", 0.0, 6.0, "rank 1: gemm", "compute", 1),
        (4, "rank 0 · stream 7", 1.0, 9.0, "gemm", "compute", 7),
        (4, "rank 0 · waits", 2.0, 9.0, "waits for rank 1", "waiting", 1),
        (4, "rank 1 · stream 7", 0.0, 9.0, "relu", "compute", 1),
    ]
    frame = pd.DataFrame(rows, columns=["step", "lane", "start_us", "end_us", "name", "category", "merged"])
    found = pd.DataFrame(stretches or [], columns=["step", "kind", "rank", "axis", "group", "start_us", "end_us"])
    return Timeline("t", frame.astype({"lane": "category", "name": "category"}), "", 4, (0,), found)


def test_lanes_of_one_rank_stand_together() -> None:
    assert timeline_data(STEP).steps[0].lanes == [("rank 0", "stream 7"), ("rank 0", "stream 20"), ("rank 1", "stream 7")]


def test_spans_are_sorted_by_lane_and_start_and_count_from_the_first() -> None:
    found = timeline_data(STEP)
    (step,) = found.steps
    assert step.offsets.tolist() == [0, 2, 3, 4]
    assert step.start.tolist() == [1000, 5000, 3000, 0]
    assert step.duration.tolist() == [3000, 5000, 6000, 20000]
    assert [found.names[i] for i in step.name] == ["relu", "gemm", "all_reduce", "gemm"]
    assert [found.categories[i] for i in step.category] == ["compute", "compute", "communication", "compute"]


def test_an_outer_span_comes_before_what_it_encloses() -> None:
    found = timeline_data(chart(("host", 0.0, 5.0, "inner", "a"), ("host", 0.0, 9.0, "outer", "a")))
    assert [found.names[i] for i in found.steps[0].name] == ["outer", "inner"]


def unpacked(step: dict[str, object]) -> np.ndarray:
    """The five columns of a step as the page reads them."""
    count = int(str(step["spans"]))
    content = np.frombuffer(zlib.decompress(base64.b64decode(str(step["packed"])), -zlib.MAX_WBITS), np.uint8)
    words = content.reshape(5, 4, count).astype(np.uint32)
    columns = words[:, 0] | words[:, 1] << 8 | words[:, 2] << 16 | words[:, 3] << 24
    columns[0] = np.cumsum(columns[0], dtype=np.uint32)
    return columns


def test_the_page_gets_packed_columns() -> None:
    payload = timeline_data(STEP).payload()
    (step,) = payload["steps"]
    assert unpacked(step).tolist() == [[1000, 5000, 3000, 0], [3000, 5000, 6000, 20000], [2, 0, 1, 0], [0, 0, 1, 0], [1, 1, 1, 1]]
    assert (step["tick_us"], step["label"]) == (0.001, "The whole trace")
    assert payload["categories"] == [{"name": "compute", "role": "compute"}, {"name": "communication", "role": "exposed"}]
    assert step["lanes"][0] == {"group": "rank 0", "label": "stream 7"}


def test_a_step_of_an_hour_keeps_its_times_to_a_microsecond() -> None:
    hour = 3.6e9
    (step,) = timeline_data(chart(("l", 0.0, 1.0, "a", "c"), ("l", hour, hour + 5.0, "b", "c"))).payload()["steps"]
    start, duration = unpacked(step)[:2] * step["tick_us"]
    assert start.tolist() == pytest.approx([0.0, hour], abs=1) and duration.tolist() == pytest.approx([1.0, 5.0], abs=1)


def test_every_step_has_lanes_of_its_own_and_the_critical_path_stands_above_the_ranks() -> None:
    found = timeline_data(steps())
    assert [(step.number, step.lanes) for step in found.steps] == [
        (3, [("critical path", ""), ("rank 0", "stream 7")]),
        (4, [("rank 0", "stream 7"), ("rank 0", "waits"), ("rank 1", "stream 7")]),
    ]
    assert (found.first, found.shown) == (1, [0])
    assert [step["label"] for step in found.payload()["steps"]] == ["Step 3", "Step 4"]


FINDINGS = [
    {"id": "stragglers.rank", "text": "Rank 1 is late.", "subject": {"ranks": [1], "axis": None, "group": None}},
    {"id": "links.slow_group", "text": "A link is slow.", "subject": {"ranks": [], "axis": "dp", "group": "g1"}},
    {"id": "memory.peak", "text": "No place in time.", "subject": {"ranks": [0], "axis": None, "group": None}},
]


def test_findings_are_drawn_where_they_can_be_seen() -> None:
    places = [
        (4, "late", 0, "dp", "g0", 0.0, 9.0),  # of another rank
        (4, "late", 1, "dp", "g0", 2.0, 6.0),
        (3, "late", 1, "dp", "g0", 1.0, 3.0),
        (4, "transfer", -1, "dp", "g0", 0.0, 8.0),  # of another group
        (4, "transfer", -1, "dp", "g1", 6.0, 9.0),
    ]
    found = timeline_data(steps(places), FINDINGS)
    assert found.findings == [(1, 1, 2.0, 6.0, 1), (1, 0, 1.0, 3.0, 1), (2, 1, 6.0, 9.0, -1)]
    assert found.steps[1].lanes[:2] == [("findings", "1"), ("findings", "2")]
    step = found.steps[1]
    assert [found.names[i] for i in step.name[:2]] == ["Rank 1 is late.", "A link is slow."]
    assert step.start[:2].tolist() == [2000, 6000] and step.duration[:2].tolist() == [4000, 3000]


def test_of_too_many_spans_the_longest_stay() -> None:
    found = timeline_data(STEP, max_spans=2)
    assert (found.left_out, sorted(found.steps[0].duration.tolist())) == (2, [6000, 20000])


def test_spans_that_end_before_they_begin_are_not_drawn() -> None:
    assert timeline_data(chart(("l", 5.0, 4.0, "k", "c"), ("l", float("nan"), 4.0, "k", "c"))).spans == 0


def test_spans_by_name() -> None:
    found = by_name(STEP).frame
    assert found.to_dict("records") == [
        {"name": "gemm", "category": "compute", "count": 2, "sum": 25.0, "max": 20.0},
        {"name": "all_reduce", "category": "communication", "count": 1, "sum": 6.0, "max": 6.0},
        {"name": "relu", "category": "compute", "count": 1, "sum": 3.0, "max": 3.0},
    ]


def test_spans_by_name_are_those_of_the_step_and_ranks_shown_first() -> None:
    table = by_name(steps())
    assert table.title == "Spans by name, step 4"
    assert table.frame.to_dict("records") == [{"name": "gemm", "category": "compute", "count": 7, "sum": 8.0, "max": 8.0}]


def test_a_timeline_without_steps_is_one_of_no_step() -> None:
    assert timeline_data(STEP).steps[0].number == NULL
