"""The page and the JSON of an experiment: whole, offline, and showing hostile names as they are written."""

import json
import math
import re
import shutil
import subprocess
from fractions import Fraction
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from tracekit.findings import Table
from tracekit.report import experiment as page
from tracekit.simulate import collectives, mesh
from tracekit.simulate.experiment import CELL_KINDS, Bar, Call, Cell, Check, Experiment, Gantt, Message, Moment

EVIL = "</script><img src=x onerror=alert(1)>&\u202e\x1b[31m"


def _experiment(**changes):
    given = {"name": "fsdp", "title": "T", "about": "A", "arguments": [("world", 2)], "verdict": "V"}
    return Experiment(**(given | changes))


def _blocks(text):
    return [json.loads(block) for block in re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)]


class _Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.seen, self.attributes = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs


def test_the_picture_holds_every_moment():
    experiment = collectives.run(collectives.Arguments(kind="all_gather", ranks=3, elements=3))
    picture = _blocks(page.render(experiment))[0]
    assert [moment["logical_step"] for moment in picture["moments"]] == [None, 1, 2]
    first = picture["moments"][1]
    assert first["messages"][0] == {"source": 0, "target": 1, "label": "c0", "bytes": 4}
    assert first["ranks"][1] == {
        "rank": 1,
        "live_bytes": 8,
        "cells": [
            {"label": "c0", "kind": "chunk", "bytes": 4, "detail": "[0]"},
            {"label": "c1", "kind": "chunk", "bytes": 4, "detail": "[101]"},
        ],
    }


def test_the_page_needs_nothing_but_itself():
    text = page.render(mesh.run(mesh.Arguments()))
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    tags = _Tags(text)
    assert not {"link", "iframe", "img", "object"} & set(tags.seen)
    assert not [value for name, value in tags.attributes if name == "src"]
    policy = next(value for name, value in tags.attributes if name == "content" and "default-src" in (value or ""))
    assert policy.startswith("default-src 'none'")
    assert "prefers-color-scheme:dark" in text
    assert "prefers-color-scheme: dark" in text


def _hostile():
    return _experiment(
        title=EVIL,
        about=EVIL,
        verdict=EVIL,
        arguments=[(EVIL, EVIL)],
        tables=[Table(EVIL, pd.DataFrame({"a": [EVIL]}), {"a": EVIL}, note=EVIL)],
        moments=[Moment(EVIL, EVIL, [[Cell(EVIL, "chunk", 1, EVIL)], []], [Message(0, 1, EVIL, 1)], 1)],
        charts=[Gantt(EVIL, [EVIL], [Bar(EVIL, 0, 1, EVIL, EVIL)], EVIL, EVIL)],
        checks=[Check(EVIL, 1, 2, EVIL, EVIL)],
        calls=[Call(EVIL, EVIL, EVIL, 1, EVIL, EVIL)],
        notes=[EVIL],
    )


def test_hostile_names_are_text():
    text = page.render(_hostile())
    assert "<img" not in text
    assert "onerror=alert" not in {name for name, _ in _Tags(text).attributes}
    assert _Tags(text).seen.count("script") == len(re.findall(r"<script", text)) == 4 + 2
    assert _blocks(text)[0]["moments"][0]["title"] == EVIL
    assert not re.search("[\x00-\x08\x0b-\x1f]", text)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser")
def test_a_browser_shows_hostile_names_and_runs_none_of_them(tmp_path):
    path = tmp_path / "evil.html"
    page.write(path, _hostile())
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=2000",
        "--dump-dom",
    ]
    done = subprocess.run(["chromium", *options, path.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    tags = _Tags(done.stdout)
    assert "img" not in tags.seen
    assert ("class", "cell new") not in tags.attributes  # the first moment has nothing to compare with
    assert ("class", "cell") in tags.attributes
    assert "1 / 1" in done.stdout
    assert "1 message, 1 B" in done.stdout


def test_checks_are_ticked_or_crossed_failed_ones_first():
    checks = [Check("good", 4, 4, "bytes", "S"), Check("bad", 3, 4, "bytes", "S/x"), Check("near", 1.0001, 1.0, "s", "A", tolerance=0.01)]
    text = page.render(_experiment(checks=checks))
    rows = re.findall(r'<td class="tick" aria-label="(\w+)">(.)</td><td class="long">(\w+)', text)
    assert rows == [("fails", "✗", "bad"), ("holds", "✓", "good"), ("holds", "✓", "near")]
    assert "1 of 3 figures are not what they have to be" in text
    assert "2 of 3" in text


def test_json_has_fractions_as_floats_with_their_exact_text():
    table = Table(
        "Bubble", pd.DataFrame({"ratio": [Fraction(3, 8), Fraction(3, 11)], "stage": [0, 1]}), {"ratio": "ratio", "stage": "stage"}
    )
    made = _experiment(
        tables=[table], checks=[Check("ratio", Fraction(3, 8), Fraction(6, 16), "", "(p-1)/m")], arguments=[("f", Fraction(1, 4))]
    )
    found = page.experiment_document(made)
    assert found["tables"][0]["rows"] == [
        {"ratio": 0.375, "stage": 0, "ratio_exact": "3/8"},
        {"ratio": 3 / 11, "stage": 1, "ratio_exact": "3/11"},
    ]
    assert found["checks"][0] == {
        "quantity": "ratio",
        "counted": 0.375,
        "counted_exact": "3/8",
        "expected": 0.375,
        "expected_exact": "3/8",
        "unit": "",
        "formula": "(p-1)/m",
        "tolerance": 0.0,
        "holds": True,
    }
    assert found["arguments"] == {"f": 0.25}
    assert "0.375 = 3/8" in page.render(made)


def test_json_is_finite_and_keeps_its_keys():
    table = Table("N", pd.DataFrame({"a": [math.nan, 1.0]}), {"a": "a"})
    made = _experiment(tables=[table], checks=[Check("q", math.nan, 0.0, "", "", tolerance=1.0)], arguments=[("sizes", (1, 2))])
    found = page.experiment_document(made)
    assert list(found) == [
        "schema_version",
        "tracekit_version",
        "experiment",
        "title",
        "about",
        "arguments",
        "verdict",
        "holds",
        "tables",
        "moments",
        "charts",
        "checks",
        "calls",
        "notes",
    ]
    assert found["tables"][0]["rows"] == [{"a": None}, {"a": 1.0}]
    assert found["checks"][0]["counted"] is None
    assert not found["holds"]
    assert found["arguments"] == {"sizes": [1, 2]}
    json.dumps(found, allow_nan=False)


def test_numbers_of_numpy_are_plain():
    made = _experiment(
        moments=[Moment("m", "", [[Cell("c", "chunk", np.int64(4))]], [Message(np.int64(0), np.int64(0), "x", np.int64(4))], np.int64(1))],
        checks=[Check("n", np.int64(3), 3, "", ""), Check("f", np.float64(0.5), 0.5, "", "")],
        charts=[Gantt("g", ["l"], [Bar("l", np.float64(0), Fraction(1, 2), "F", "forward")], "s")],
    )
    found = page.experiment_document(made)
    assert found["moments"][0]["ranks"][0]["live_bytes"] == 4
    assert found["charts"][0]["bars"][0]["end"] == 0.5
    assert [check["counted_exact"] for check in found["checks"]] == ["3", None]
    json.dumps(found, allow_nan=False)
    assert "F" in page.render(made)


def test_too_many_moments_are_left_out_of_the_page_and_said(monkeypatch):
    monkeypatch.setattr(page, "MOST_CELLS", 20)
    moments = [Moment(f"m{i}", "", [[Cell("c", "chunk", 1)] * 4]) for i in range(9)]
    made = _experiment(moments=moments)
    text = page.render(made)
    assert "Only the first 4 of 9 moments" in text
    assert len(_blocks(text)[0]["moments"]) == 4
    assert len(page.experiment_document(made)["moments"]) == 9


def test_a_gantt_chart_is_drawn_in_shares_of_its_time():
    bars = [Bar("stage 0", 0, 1, "F0", "forward"), Bar("stage 0", 1, 4, "B0", "backward"), Bar("stage 1", 1, 2, "F0", "forward")]
    text = page.render(_experiment(charts=[Gantt("Work", ["stage 0", "stage 1"], bars, "ms")]))
    assert text.count('<div class="lane-row">') == 3
    assert "left:25.0000%;width:75.0000%" in text
    assert 'title="B0 (backward): 1 to 4 ms"' in text
    assert _blocks(text) == []  # drawn without a script


def test_empty_parts_are_left_out():
    text = page.render(_experiment())
    for part in ("steps", "charts", "tables", "calls", "checks", "notes"):
        assert f'<section id="{part}">' not in text
    assert 'id="g0"' in page.render(_experiment(charts=[Gantt("Nothing", ["l"], [], "s")]))


def test_every_kind_of_cell_has_a_colour_of_its_own():
    assert list(page.CELL_ROLES) == list(CELL_KINDS)
    assert len(set(page.CELL_ROLES.values())) == len(CELL_KINDS)
    with pytest.raises(ValueError, match="'weights' is no kind of cell"):
        page.render(_experiment(moments=[Moment("m", "", [[Cell("c", "weights", 1)]])]))


@pytest.mark.parametrize(
    ("value", "text", "exact"),
    [
        (3, "3", "3"),
        (123456, "123,456", "123456"),
        (0.5, "0.5", None),
        (Fraction(3, 8), "0.375", "3/8"),
        (Fraction(4, 2), "2", "2"),
        (math.inf, "inf", None),
    ],
)
def test_numbers_for_readers(value, text, exact):
    assert (page.number_text(value), page.exact(value)) == (text, exact)


def test_small_errors_are_shown_in_powers_of_ten_and_shares_as_shares():
    frame = pd.DataFrame({"error": [1.5e-16, 0.0, math.nan, 0.25], "share": [1e-9, 0.5, 0.0, 1.0], "ratio": [Fraction(1, 3), 1, 2, None]})
    made = page.legible(Table("Errors", frame, {"error": "error", "share": "lost [share]", "ratio": "ratio"}))
    assert made.frame["error"].tolist() == ["1.50e-16", "0", None, "0.25"]
    assert made.frame["share"].tolist() == [1e-9, 0.5, 0.0, 1.0]
    assert made.frame["ratio"].tolist() == ["0.333333 = 1/3", 1, 2, None]
    assert frame["error"][0] == 1.5e-16


@pytest.mark.parametrize(("end", "numbers"), [(33.0, range(0, 31, 5)), (0.8, [k / 10 for k in range(9)]), (28.5, range(0, 26, 5))])
def test_the_time_axis_has_round_numbers_at_their_places(end, numbers):
    text = page.render(_experiment(charts=[Gantt("g", ["l"], [Bar("l", 0, end, "F", "forward")], "ms")]))
    axis = re.findall(r'<span style="left:([\d.]+)%">([^<]*)</span>', text)
    assert [float(number) for _, number in axis] == pytest.approx(list(numbers))
    assert [float(place) for place, _ in axis] == pytest.approx([100 * number / end for number in numbers], abs=1e-3)


def test_units_stand_in_brackets_behind_the_names_of_arguments():
    text = page.render(_experiment(arguments=[("bandwidth_gb_s", 50.0), ("latency_us", 0.25), ("micro_batches", 4)]))
    facts = re.findall(r"<dt>([^<]*)</dt><dd><bdi>([^<]*)</bdi>", text)
    assert facts[:3] == [("bandwidth [GB/s]", "50"), ("latency [us]", "0.25"), ("micro batches", "4")]
