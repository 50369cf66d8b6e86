import plotly.graph_objects as go

from tests.report.example import HOSTILE
from tracekit.findings import StackedArea, Treemap
from tracekit.report.areas import area_info, tree_info
from tracekit.report.figures import figure

MEMORY = StackedArea(
    "Memory of rank 0",
    [0.0, 1500.0, 4000.0],
    {"parameters": [1e6, 1e6, 1e6], "activations": [0.0, 5e6, 0.0]},
    "bytes",
    {"reserved": [8e6, 8e6, None]},
    [(1500.0, "peak")],
)
OWNERS = Treemap("Peak", [("parameters", "layers.0"), ("activations",), ("parameters", "layers.1")], [1e6, 5e5, 2e6], "bytes")


def test_areas_are_brought_to_one_unit_for_each_axis() -> None:
    info = area_info(MEMORY)
    assert (info.unit, info.x_unit) == ("MB", "ms")
    assert info.x == [0.0, 1.5, 4.0]
    assert info.values == [[1.0, 1.0, 1.0], [0.0, 5.0, 0.0]]
    assert info.lines == [[8.0, 8.0, None]]


def test_areas_are_a_figure_that_plotly_accepts_each_value_held_until_the_next() -> None:
    drawn = go.Figure(figure(MEMORY))
    assert [trace.stackgroup for trace in drawn.data] == ["one", "one", None]
    assert {trace.line.shape for trace in drawn.data} == {"hv"}
    assert drawn.data[0].hovertemplate == "%{fullData.name} %{y:.4~g} MB<extra></extra>"
    assert [mark.text for mark in drawn.layout.annotations] == ["peak"]


def test_areas_around_areas_hold_their_sum() -> None:
    info = tree_info(OWNERS)
    found = {label: (value, parent) for label, value, parent in zip(info.labels, info.values, info.parents, strict=True)}
    outer = info.ids[info.labels.index("parameters")]
    assert found == {"parameters": (3e6, ""), "layers.0": (1e6, outer), "layers.1": (2e6, outer), "activations": (5e5, "")}
    assert info.hovers[info.labels.index("layers.1")] == "parameters · layers.1: 2 MB, 57.1%"


def test_a_treemap_is_a_figure_that_plotly_accepts() -> None:
    assert go.Figure(figure(OWNERS)).data[0].branchvalues == "total"


def test_nothing_is_drawn_of_nothing() -> None:
    assert figure(StackedArea("x", [], {}, "bytes")) is None
    assert figure(Treemap("x", [("a",)], [0.0], "bytes")) is None


def test_names_do_not_act() -> None:
    drawn = figure(Treemap("x", [(HOSTILE,)], [1.0], "bytes"))
    assert drawn is not None
    assert "<" not in drawn["data"][0]["labels"][0]
    drawn = figure(StackedArea("x", [0.0], {HOSTILE: [1.0]}, "bytes"))
    assert drawn is not None
    assert "<" not in drawn["data"][0]["name"]
