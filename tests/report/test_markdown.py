"""The answer as Markdown: figures and reasons, and names that stay text."""

import re

import pytest

from tests.report.example import HOSTILE, Given, breakdown, job, with_means
from tracekit.findings import Finding
from tracekit.report.document import document
from tracekit.report.markdown import summary


def test_the_whole_page() -> None:
    finding = Finding("a.b", "warning", "It is slow.", advice="Make it fast.", evidence="the chart", gain_ns=2_000_000)
    page = summary(document(job(), {"a": Given([finding], json=with_means(breakdown()))}))
    assert page.startswith("# A step takes 1 ms on average: 60% compute")
    assert "**First:** It is slow. (up to 2 ms a step) **Next step:** Make it fast." in page
    assert "1. warning: It is slow. Up to 2 ms a step.\n   - next step: Make it fast.\n   - evidence: the chart" in page
    assert "| 0 | 1 ms | 600 us | 250 us | 100 us | 10 us | 140 us |" in page
    assert "- memory: no analysis measured it in this run" in page
    assert "- busbw: bus bandwidth" in page


@pytest.mark.parametrize("name", HOSTILE)
def test_names_stay_text_on_one_line(name: str) -> None:
    page = summary(document(job(device=name), {"a": Given([Finding("a.b", "warning", name, advice=name)])}))
    assert not re.search(r"(?<!\\)[<|`]", page.partition("## Not known")[0].replace("| ", "").replace(" |", ""))
    assert "\x1b" not in page and "\u202e" not in page
    lines = page.splitlines()
    assert len([line for line in lines if line.startswith("1. warning: ")]) == 1
    assert not [line for line in lines if line.startswith("#") and not line.startswith(("# No step", "## "))]
