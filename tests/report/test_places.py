"""A finding's evidence is a row where one shows it, else a chart; addresses follow from what names the row."""

import pandas as pd
import pytest

from tracekit.findings import Finding, Section, StackedBars, Subject, Table
from tracekit.report.cells import ColumnData, naming, slug
from tracekit.report.places import Chapter, Places

BARS = StackedBars("Bars", ["rank 0"], {"busy": [1.0]}, "us")
WAITS = Table("Waits", pd.DataFrame({"rank": [7, 0, 3], "us": [9.0, 5.0, 1.0]}), {"rank": "Rank", "us": "Wait [us]"})
SIZES = Table(
    "Sizes",
    pd.DataFrame({"kind": ["all_gather", "All-Gather", "send"], "axis": ["tp", "tp", None], "size": [1, 2, 3]}),
    {"kind": "Kind", "axis": "Axis", "size": "Full size [bytes]"},
)


def place(finding: Finding):
    sections = [Section("Waiting", "", (BARS, WAITS, SIZES), name="waiting"), Section("Groups", "", (BARS,), name="groups")]
    chapters = [Chapter("stragglers", "waiting", sections[0]), Chapter("process_groups", "groups", sections[1])]
    subject = {"ranks": finding.subject.ranks, "axis": finding.subject.axis}
    return Places(chapters).of({"id": finding.id, "row": finding.row, "subject": subject})


@pytest.mark.parametrize(
    ("finding", "anchor", "row"),
    [
        (Finding("stragglers.rank", "info", "", subject=Subject((3,))), "waiting-2.3", [3]),
        (Finding("links.slow", "info", "", subject=Subject((), "tp")), "waiting-3.all_gather.tp", ["all_gather", "tp"]),
        (Finding("stragglers.x", "info", "", row={"Full size": 2}), "waiting-3.all-gather.tp", ["All-Gather", "tp"]),
        (Finding("stragglers.x", "info", "", row={"Full size": 3}), "waiting-3.send.", ["send", None]),
        (Finding("stragglers.x", "info", "", subject=Subject((4,))), "waiting-1", None),  # no such row: the first chart
        (Finding("process_groups.x", "info", "", subject=Subject((3,))), "groups-1", None),  # rows of its own chapter only
        (Finding("coverage.problem", "info", ""), "t-files", None),
    ],
)
def test_evidence_is_found(finding: Finding, anchor: str, row: object) -> None:
    found = place(finding)
    assert found is not None
    assert (found["anchor"], found["row"] and [named["value"] for named in found["row"]]) == (anchor, row)


def test_what_no_chapter_shows_has_no_place() -> None:
    assert place(Finding("hang.root", "critical", "")) is None


def test_rows_that_are_named_alike_are_counted() -> None:
    columns = [
        ColumnData("Kind", "text", ["send", "recv", "Send"]),
        ColumnData("Step", "number", [1, 1, 1]),
        ColumnData("Size", "bytes", [1, 2, 3]),
    ]
    assert naming(columns) == [0, 1]
    assert [slug(columns[:2], row) for row in range(3)] == ["send.1", "recv.1", "send.1.~2"]
