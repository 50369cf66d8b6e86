import math

import plotly.graph_objects as go
import pytest

from tests.report.example import HOSTILE
from tracekit.findings import Heatmap, StackedBars
from tracekit.report.figures import bars_info, figure, heat_info
from tracekit.report.in_words import in_words
from tracekit.report.palette import PLAIN, roles
from tracekit.report.quantity import axis_unit, decimals, quantity

PARTS = {"compute": [7000.0, 8000.0], "exposed communication": [2000.0, math.nan]}


def test_bars_are_brought_to_one_readable_unit() -> None:
    info = bars_info(StackedBars("Steps", ["rank 0", "rank 1"], PARTS, "us"))
    assert info.unit == "ms"
    assert info.values == [[7.0, 8.0], [2.0, None]]
    assert info.roles == ["compute", "exposed"]
    assert info.hovers[1] == ["rank 0: exposed communication 2 ms", "rank 1: exposed communication –"]


def test_bars_are_a_figure_that_plotly_accepts() -> None:
    found = figure(StackedBars("Steps", ["rank 0", "rank 1"], PARTS, "us"))
    drawn = go.Figure(found)
    assert [trace.type for trace in drawn.data] == ["bar", "bar"]
    assert drawn.layout.yaxis.ticktext == ("rank 0", "rank 1")


def test_equal_and_numeric_labels_stay_bars_of_their_own() -> None:
    found = figure(StackedBars("Steps", ["1e5", "1e5", "2026-01-01"], {"a": [1.0, 2.0, 3.0]}, "us"))
    assert found is not None
    assert found["data"][0]["y"] == [0, 1, 2]
    assert found["layout"]["yaxis"]["ticktext"] == ["1e5", "1e5", "2026-01-01"]


def test_a_thousand_bars_have_readable_ticks() -> None:
    labels = [f"rank {rank}" for rank in range(1024)]
    found = figure(StackedBars("Steps", labels, {"compute": [1.0] * 1024}, "us"))
    assert found is not None
    assert found["layout"]["height"] <= 1000
    assert 20 < len(found["layout"]["yaxis"]["ticktext"]) < 70


def test_heat_map_leaves_holes_where_nothing_was_measured() -> None:
    info = heat_info(Heatmap("Wait", ["tp", "dp"], ["rank 0"], [[3000.0, None]], "us"))
    assert (info.unit, info.values) == ("ms", [[3.0, None]])
    assert info.cells == [["3 ms", ""]]
    assert info.hovers == [["rank 0 · tp: 3 ms", "rank 0 · dp: –"]]
    drawn = go.Figure(figure(Heatmap("Wait", ["tp", "dp"], ["rank 0"], [[3000.0, None]], "us")))
    assert (drawn.data[0].zmin, drawn.data[0].zmax) == (0.0, 3.0)


def test_numbers_of_things_get_a_colour_each() -> None:
    chart = Heatmap("Group", ["tp"], ["rank 0", "rank 1"], [[1.0], [float(len(PLAIN) + 1)]], "", [["tp, group 3@0"], ["tp, group 3@1"]])
    assert heat_info(chart).numbered
    drawn = go.Figure(figure(chart)).data[0]
    assert drawn.z == ([0.0], [0.0])  # the palette begins again
    assert drawn.text == (["1"], [str(len(PLAIN) + 1)])
    assert drawn.hovertext == (["rank 0 · tp: tp, group 3@0"], ["rank 1 · tp: tp, group 3@1"])


@pytest.mark.parametrize(
    "chart",
    [
        StackedBars("Steps", [], {}, "us"),
        StackedBars("Steps", ["r"], {"a": [math.nan]}, "us"),
        Heatmap("Wait", ["x"], ["y"], [[None]], "us"),
    ],
)
def test_nothing_to_draw(chart: StackedBars | Heatmap) -> None:
    assert figure(chart) is None


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_is_markup_for_plotly(name: str) -> None:
    bars = figure(StackedBars("t", [name], {name: [1.0]}, "us"))
    heat = figure(Heatmap("t", [name], [name], [[1.0]], name, [[name]], name, name))
    for found in (bars, heat):
        texts = list(strings(found))
        assert not [text for text in texts if "<" in text or ">" in text]
        assert not [text for text in texts if "\u202e" in text or "\x1b" in text]


def strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value] if value != "%{text}" else []
    if isinstance(value, dict):
        value = list(value.values())
    return [text for item in value for text in strings(item)] if isinstance(value, list) else []


def test_one_part_has_one_colour_in_every_chart() -> None:
    assert roles(["compute", "exposed communication", "exposed copies", "idle"]) == ["compute", "exposed", "copy", "idle"]
    assert roles(["hidden communication", "exposed communication"]) == ["hidden", "exposed"]
    assert roles(["compute", "communication", "all_reduce"]) == ["compute", "p0", "exposed"]
    assert len(set(roles([f"thing {i}" for i in range(8)]))) == 8


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "us", "–"),
        (math.nan, "us", "–"),
        (0.0, "us", "0"),
        (1250.0, "us", "1.25 ms"),
        (67108864, "bytes", "67.1 MB"),
        (0.256, "share", "25.6%"),
        (402.653, "GB/s", "402.7 GB/s"),
        (12, "", "12"),
    ],
)
def test_quantity(value: float | None, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def test_axis_unit_and_decimals() -> None:
    assert axis_unit([1999.0, None], "us") == ("us", 1.0)
    assert axis_unit([2000.0], "us") == ("ms", 1000.0)
    assert axis_unit([5e6], "GB/s") == ("GB/s", 1.0)
    assert [decimals([value]) for value in (12345.6, 123.4, 1.2345, 0.00012, 0.0, 483.0)] == [0, 1, 3, 4, 0, 0]
    assert decimals([1.234, 2.5, 37935.5]) == 1


def test_a_chart_says_in_words_what_is_largest() -> None:
    bars = StackedBars("t", ["rank 0", "rank 1"], {"compute": [1.0, 5.0], "idle": [2.0, 1.0]}, "us")
    assert in_words(bars) == "2 bars of compute, idle; the longest is rank 1 with 6 us"
    heat = Heatmap("t", ["tp", "dp"], ["rank 0", "rank 1"], [[1.0, None], [3.0, 2.0]], "us")
    assert in_words(heat) == "2 rows, 2 columns; most is 3 us at rank 1, tp"
