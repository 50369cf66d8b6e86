import io
from typing import Any

import pandas as pd
import pytest

from tests.report.example import HOSTILE, Given, breakdown, job, with_means
from tracekit.cli.summary import by_axis, culprits, print_summary, problems, step_rows
from tracekit.findings import Finding, Result, Section, Table
from tracekit.notes import text_note
from tracekit.report.document import document
from tracekit.report.tables import previews
from tracekit.trace.events import Coverage

AXES = {
    "exposed_by_axis": [
        {"rank": rank, "step": step, "axis": "tp", "exposed_us": 200.0, "busy_us": 500.0} for rank in (0, 1) for step in (10, 11)
    ],
    "process_groups": [{"axis": "tp", "size": 2, "step_operations": 12, "step_sent_bytes": 4_000_000}],
    "collectives": [
        {"axis": "tp", "full_bytes": 1000, "busbw_gb_s": 1.0},
        {"axis": "tp", "full_bytes": 9000, "busbw_gb_s": 402.7},
        {"axis": "tp", "full_bytes": None, "busbw_gb_s": None},
    ],
}


def summary(*results: Given, report: str | None = None, **changes: Any) -> str:
    given: dict[str, Result] = {str(index): result for index, result in enumerate(results)}
    stream = io.StringIO()
    print_summary(document(job(**changes), given), previews(given), report, stream)
    return stream.getvalue()


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def test_the_whole_answer() -> None:
    finding = Finding("overlap.exposed", "warning", "25% of a step is exposed.", advice="Prefetch.")
    text = summary(Given([finding], json={**with_means(breakdown()), **AXES}), report="out.html")
    assert lines(text) == [
        "2 of 2 ranks · mesh tp 2 · NVIDIA H100 80GB HBM3 · nccl · steps 10–11",
        "A step takes 1 ms on average: 60% compute, 25% exposed communication, 14% idle, 1% exposed copies.",
        "Mean step of each rank",
        "step compute exposed comm hidden comm exposed copies idle",
        "rank 0 1 ms 600 us 60% 250 us 25% 100 us 10% 10 us 1% 140 us 14%",
        "rank 1 1 ms 600 us 60% 250 us 25% 100 us 10% 10 us 1% 140 us 14%",
        "Communication by mesh axis, a rank and step",
        "axis size exposed busy ops sent busbw",
        "tp 2 200 us 500 us 3 1 MB 402.7 GB/s",
        "warning 25% of a step is exposed.",
        "Prefetch.",
        "Report: out.html",
    ]


def test_means_by_axis() -> None:
    assert by_axis(document(job(), {"a": Given(json={**with_means(breakdown()), **AXES})})) == [
        {
            "axis": "tp",
            "sizes": [2],
            "operations": 3.0,
            "sent_bytes": 1_000_000.0,
            "busy_us": 500.0,
            "exposed_us": 200.0,
            "busbw_gb_s": 402.7,
        }
    ]


def test_many_ranks_are_a_spread_and_those_that_matter() -> None:
    rows = breakdown(ranks=64, steps=1)
    rows[7]["compute_us"] = 100.0
    rows[9]["compute_us"] = 700.0
    named = culprits([{"subject": {"ranks": [3]}}, {"subject": {"ranks": [4, 5]}}, {"subject": {"ranks": [3]}}])
    found = dict(step_rows(with_means(rows)["mean_step"], named))
    ranks = ["rank 3 (see findings)", "rank 9 (longest compute)", "rank 7 (least compute)"]
    assert list(found) == ["least", "median", "most", *ranks]
    assert [found[label]["compute_us"] for label in ("least", "median", "most", ranks[2])] == [100.0, 600.0, 700.0, 100.0]


def test_a_part_that_was_not_measured_is_a_dash() -> None:
    row = {**breakdown()[0], "compute_us": None, "exposed_comm_us": None, "hidden_comm_us": None, "memory_copy_us": None, "idle_us": None}
    assert "rank 0 1 ms – – – – –" in lines(summary(Given(json=with_means([row]))))


COVERAGE = [
    Coverage("runs/a/rank0.json", 0, "repaired", 10, 0, [text_note("2 events were repaired")]),
    Coverage("runs/a/rank1.json", 1, "repaired", 10, 0, [text_note("2 events were repaired")]),
    Coverage("runs/a/rank2.json", 2, "truncated", 10, 0, [text_note("the file ends in the middle")]),
    Coverage("runs/a/notes.json", None, "skipped", 0, 0, [text_note("no traceEvents")]),
    Coverage("runs/a/copy.json", 0, "duplicate"),
    Coverage("runs/a/rank3.json", 3, "complete", 10, 0, []),
]


def test_problems_are_a_line_a_file_and_shared_ones_one_line() -> None:
    found = problems(document(job(coverage=COVERAGE, notes=[text_note("3 of 4 ranks are readable")]), {}))
    assert found == [
        ("", "3 of 4 ranks are readable"),
        ("rank2.json", "truncated: the file ends in the middle"),
        ("notes.json", "skipped: no traceEvents"),
        ("copy.json", "duplicate"),
        ("rank0.json and 1 more", "2 events were repaired"),
    ]


def test_of_many_problems_ten_are_printed() -> None:
    coverage = [Coverage(f"x/{i}.json", None, "skipped", notes=[text_note(f"problem {i}")]) for i in range(30)]
    found = lines(summary(coverage=coverage))
    assert len([line for line in found if line.startswith("! ")]) == 10
    assert "... and 20 more, see the report" in found


def test_tables_with_a_preview_print_their_first_rows() -> None:
    frame = pd.DataFrame({"name": ["gemm", "relu", "add"], "us": [3.0, 2.0, 1.0]})
    headings = {"name": "Kernel", "us": "Total [us]"}
    shown = Table("Kernels", frame, headings, preview=2)
    hidden = Table("Operators", frame, headings)
    found = lines(summary(Given(sections=[Section("Kernels", "", [shown, hidden])])))
    assert found[-4:] == ["Kernels (2 of 3 rows)", "Kernel Total [us]", "gemm 3", "relu 2"]


@pytest.mark.parametrize("width", ["20", "60", "200"])
def test_no_line_is_wider_than_the_terminal(width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", width)
    frame = pd.DataFrame({name: ["x" * 50] for name in "abcdef"})
    table = Table("Kernels", frame, {name: f"Heading {name}" for name in "abcdef"}, preview=5)
    finding = Finding("f", "warning", "many words " * 20, advice="try this " * 20)
    result = Given([finding], [Section("", "", [table])], {**with_means(breakdown()), **AXES})
    assert max(len(line) for line in summary(result, report="out.html").splitlines()) <= int(width)


def test_equal_advice_is_given_once() -> None:
    findings = [Finding(str(i), "info", f"finding {i}", advice="do this") for i in range(12)]
    found = lines(summary(Given(findings)))
    assert found.count("do this") == 1
    assert "... and 5 more findings, see the report" in found


@pytest.mark.parametrize("name", [*HOSTILE, "[bold red]x[/bold red]", ":smile:", "[link=file:///etc]x[/link]"])
def test_a_name_is_printed_as_it_is_written_and_controls_nothing(name: str) -> None:
    frame = pd.DataFrame({"name": pd.Series([name], dtype=object)})
    result = Given([Finding(name, "critical", name, advice=name)], [Section(name, "", [Table(name, frame, {"name": name}, preview=1)])])
    text = summary(
        result, report=name, device=name, notes=[text_note(name)], coverage=[Coverage(name, 0, "skipped", notes=[text_note(name)])]
    )
    assert not [c for c in text if c != "\n" and (c < " " or c in "\x7f\x9b\u2028\u2029\u202e" or "\ud800" <= c <= "\udfff")]
    shown = name.replace("\x1b", "␛").replace("\x07", "␇").replace("\u202e", "[U+202E]").replace("\ud83d", "\ufffd")
    shown = shown.replace("\u2028", "[U+2028]").replace("\u2029", "[U+2029]")
    assert f"! {shown}\n" in text
    assert f"Report: {shown}\n" in text


def test_findings_that_repeat_a_line_about_a_file_are_left_to_the_report() -> None:
    findings = [Finding("coverage.skipped", "warning", "1 file could not be used")]
    findings += [Finding("coverage.unmatched", "info", "9 are not matched")]
    assert lines(summary(Given(findings)))[-1] == "info 9 are not matched"
    assert "1 file could not be used" not in summary(Given(findings))
