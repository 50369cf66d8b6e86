"""Terms are explained where they stand, and each is one of docs/glossary.md."""

import re
from pathlib import Path

from tracekit.report.glossary import TERMS, explained

GLOSSARY = Path(__file__).resolve().parents[2] / "docs" / "glossary.md"


def test_the_first_mention_of_a_term_says_what_it_means() -> None:
    text = str(explained("Idle: a bubble is no idle <b>bubble</b>."))
    assert text.count("<dfn") == 2
    assert text.startswith('<dfn tabindex="0" data-tip="nothing on the device">Idle</dfn>: a <dfn')
    assert "&lt;b&gt;bubble&lt;/b&gt;" in text


def test_every_term_stands_in_the_glossary() -> None:
    bold = {word.strip("* ") for found in re.findall(r"\*\*([^*]+)\*\*", GLOSSARY.read_text(encoding="utf-8")) for word in found.split("/")}
    assert set(TERMS) <= bold
