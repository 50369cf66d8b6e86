import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from tracekit.report.pages import named
from tracekit.report.text import plotly_text, script_json, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("gemm<float>", "gemm<float>"),
        ("\x1b[31mred", "␛[31mred"),
        ("a\nb\tc", "a␊b␉c"),
        ("\u202eevil", "[U+202E]evil"),
        ("one\u2028two", "one[U+2028]two"),
        ("\x9b1m", "[U+009B]1m"),
        ("half \ud83d", "half \ufffd"),
        ("漢字 é 🙂", "漢字 é 🙂"),
    ],
)
def test_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(st.text(alphabet=st.characters()))
def test_visible_text_is_one_encodable_line(text: str) -> None:
    shown = visible(text)
    assert shown.isprintable() or not any(c < " " or c in "\u2028\u2029\u202e\x7f" for c in shown)
    assert len(shown.encode().splitlines()) <= 1
    assert visible(shown) == shown


def test_plotly_sees_no_markup() -> None:
    assert plotly_text("<b>k</b> & \u202e") == "&lt;b&gt;k&lt;/b&gt; &amp; [U+202E]"


def test_named_shows_the_code_and_keeps_the_text() -> None:
    html = named("<i>\u202eevil")
    assert html == '&lt;i&gt;<span class="ctl" data-code="U+202E">\u202e</span>evil'
    assert Markup(html).striptags() == "<i>\u202eevil"


@given(st.text())
def test_script_json_cannot_end_its_element_and_stays_the_same_json(text: str) -> None:
    data = script_json(json.dumps({"name": text}, ensure_ascii=False).encode("utf-8", "replace"))
    for ending in (b"<", b">", b"&", "\u2028".encode(), "\u2029".encode()):
        assert ending not in data
    assert json.loads(data) == {"name": text}
