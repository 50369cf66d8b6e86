"""A report of a saved document, and what is refused as one."""

import json
from pathlib import Path

import pytest

from tests.report.example import Given, breakdown, job, with_means
from tracekit.errors import InputError
from tracekit.findings import Finding, StackedBars, Subject, Table
from tracekit.report import html
from tracekit.report.document import document
from tracekit.report.encoding import encode
from tracekit.report.saved import Saved, load


def test_lists_of_the_document_are_tables_and_its_mean_step_a_chart(tmp_path: Path) -> None:
    calls = {"collectives": [{"axis": "tp", "full_bytes": 8, "busbw_gb_s": 1.5, "wait_us": {"0": 1.0}}]}
    given = document(job(), {"a": Given(json={**with_means(breakdown()), **calls})})
    (tmp_path / "run.json").write_bytes(encode(given))
    found = load(str(tmp_path / "run.json"))
    assert found == json.loads(encode(given))
    sections = {section.name: section for section in Saved(found).sections()}
    (table,) = sections["collectives"].charts
    assert isinstance(table, Table)
    assert table.columns == {"axis": "Axis", "full_bytes": "Full [bytes]", "busbw_gb_s": "Busbw [GB/s]"}
    assert table.note == "In the JSON only: wait_us."
    bars = sections["mean-step"].charts[0]
    assert isinstance(bars, StackedBars)
    assert bars.series["compute"] == [600.0, 600.0]
    page = html.render({"saved": Saved(found)}, found, "plotly.min.js")
    assert 'id="collectives"' in page and "A step takes 1" in page


def test_findings_of_a_saved_document_lead_to_its_tables() -> None:
    finding = Finding("stragglers.rank", "warning", "Rank 1 is late.", evidence="its waits", subject=Subject((1,)))
    found = json.loads(encode(document(job(), {"a": Given([finding], json={"stragglers": [{"rank": 1, "wait_us": 2.0}]})})))
    page = html.render({"saved": Saved(found)}, found, "plotly.min.js")
    assert '<a href="#stragglers-1.1">its waits</a>' in page and 'id="stragglers-1"' in page


@pytest.mark.parametrize(
    ("text", "why"), [("{", "is no JSON"), ("[]", "is not what"), ('{"schema_version": 1}', "is not what"), ("\x00", "is no JSON")]
)
def test_other_files_are_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InputError, match=why):
        load(str(tmp_path / "x.json"))
