import base64

import numpy as np
import pandas as pd

from tracekit.findings import Timeline
from tracekit.report.timeline import by_name, timeline_data


def chart(*spans: tuple[str, float, float, str, str]) -> Timeline:
    return Timeline("t", pd.DataFrame(spans, columns=["lane", "start_us", "end_us", "name", "category"]))


STEP = chart(
    ("rank 0 · stream 7", 105.0, 110.0, "gemm", "compute"),
    ("rank 1 · stream 7", 100.0, 120.0, "gemm", "compute"),
    ("rank 0 · stream 20", 103.0, 109.0, "all_reduce", "communication"),
    ("rank 0 · stream 7", 101.0, 104.0, "relu", "compute"),
)


def test_lanes_of_one_rank_stand_together() -> None:
    assert timeline_data(STEP).lanes == [("rank 0", "stream 7"), ("rank 0", "stream 20"), ("rank 1", "stream 7")]


def test_spans_are_sorted_by_lane_and_start_and_count_from_the_first() -> None:
    found = timeline_data(STEP)
    assert found.offsets.tolist() == [0, 2, 3, 4]
    assert found.start.tolist() == [1.0, 5.0, 3.0, 0.0]
    assert found.duration.tolist() == [3.0, 5.0, 6.0, 20.0]
    assert [found.names[i] for i in found.name] == ["relu", "gemm", "all_reduce", "gemm"]
    assert [found.categories[i] for i in found.category] == ["compute", "compute", "communication", "compute"]


def test_an_outer_span_comes_before_what_it_encloses() -> None:
    found = timeline_data(chart(("host", 0.0, 5.0, "inner", "a"), ("host", 0.0, 9.0, "outer", "a")))
    assert [found.names[i] for i in found.name] == ["outer", "inner"]


def test_the_page_gets_typed_arrays() -> None:
    payload = timeline_data(STEP).payload()
    start = np.frombuffer(base64.b64decode(payload["start"]), "<f8")
    duration = np.frombuffer(base64.b64decode(payload["duration"]), "<f4")
    assert start.tolist() == [1.0, 5.0, 3.0, 0.0]
    assert duration.tolist() == [3.0, 5.0, 6.0, 20.0]
    assert payload["categories"] == [{"name": "compute", "role": "compute"}, {"name": "communication", "role": "exposed"}]
    assert payload["lanes"][0] == {"group": "rank 0", "label": "stream 7"}


def test_of_too_many_spans_the_longest_stay() -> None:
    found = timeline_data(STEP, max_spans=2)
    assert (found.left_out, sorted(found.duration.tolist())) == (2, [6.0, 20.0])


def test_spans_that_end_before_they_begin_are_not_drawn() -> None:
    assert len(timeline_data(chart(("l", 5.0, 4.0, "k", "c"), ("l", float("nan"), 4.0, "k", "c"))).start) == 0


def test_spans_by_name() -> None:
    found = by_name(STEP).frame
    assert found.to_dict("records") == [
        {"name": "gemm", "category": "compute", "count": 2, "sum": 25.0, "max": 20.0},
        {"name": "all_reduce", "category": "communication", "count": 1, "sum": 6.0, "max": 6.0},
        {"name": "relu", "category": "compute", "count": 1, "sum": 3.0, "max": 3.0},
    ]
