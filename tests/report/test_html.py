import base64
import json
import os
import shutil
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from tests.report.example import HOSTILE, Given, breakdown, job, with_means
from tracekit.findings import Finding, Heatmap, Section, StackedBars, Table, Timeline
from tracekit.mesh.mesh import Axis, Mesh
from tracekit.notes import text_note
from tracekit.report import html, pages
from tracekit.report.document import document
from tracekit.report.plotly_code import plotly_source
from tracekit.report.text import encodable
from tracekit.trace.events import Coverage

RAW = {"script", "style"}


class Page(HTMLParser):
    """The elements of a page with their attributes, its text, and its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        tag = self._open[-1][0] if self._open else ""
        if tag == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif tag != "style":
            self.text.append(data)

    def skeleton(self) -> list[tuple[str, tuple[str, ...]]]:
        """Elements and the names of their attributes, without the marks around characters that act."""
        return [(tag, tuple(attributes)) for tag, attributes in self.elements if attributes.get("class") != "ctl"]

    def data(self) -> list[dict[str, object]]:
        return [json.loads(contents(attributes, text)) for attributes, text in self.scripts if attributes.get("type") == "application/json"]


def contents(attributes: dict[str, str | None], text: str) -> str:
    """What stands in a script element, unpacked where it says its size."""
    size = attributes.get("data-size")
    if size is None:
        return text
    content = zlib.decompress(base64.b64decode(text), -zlib.MAX_WBITS)
    assert len(content) == int(size)
    return content.decode()


def render(name: str, plotly_js: str = "plotly.min.js") -> str:
    """A report in which everything that comes from a trace is called ``name``; plotly is left out to keep the tests fast."""
    frame = pd.DataFrame({"name": pd.Series([name] * 30, dtype=object), "us": range(30)})
    spans = pd.DataFrame({"lane": [f"rank 0 {name}"], "start_us": [0.0], "end_us": [1.0], "name": [name], "category": [name]}, dtype=object)
    charts = [
        StackedBars(name, [name], {name: [1.0]}, "us", name),
        Heatmap(name, [name], [name], [[1.0]], name, [[name]], name, name, name),
        Timeline(name, spans, name),
        Table(name, frame, {"name": name, "us": "Time [us]"}, name, missing={"us": name}),
    ]
    results = {
        "one": Given(
            [Finding(name, "critical", name, 1.0, name, name, name)] * 9,
            [Section(name, name, charts)],
            {**with_means(breakdown()), "not_measured": {name: name}},
        )
    }
    given = job(
        device=name,
        backend=name,
        notes=[text_note(name)],
        mesh=Mesh([Axis(name, 2)], {}, "descriptions"),
        coverage=[Coverage(f"runs/{encodable(name)}/rank0.json", 0, "repaired", 3, 0, [text_note(name)])],
    )
    return html.render(results, document(given, results), plotly_js)


PLAIN = Page(render("plain"))


@pytest.mark.parametrize("name", HOSTILE)
def test_no_element_and_no_attribute_comes_from_the_trace(name: str) -> None:
    harmless = "x" * len(name)
    assert Page(render(name)).skeleton() == Page(render(harmless)).skeleton()


@pytest.mark.parametrize("name", HOSTILE)
def test_every_name_is_shown_as_it_is_written(name: str) -> None:
    page = Page(render(name))
    shown = name.replace("\x1b", "␛").replace("\x07", "␇").replace("\ud83d", "\ufffd")
    assert shown in "".join(page.text)
    in_data = [text for block in page.data() for text in strings(block)]
    assert encodable(name) in in_data


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_in_an_attribute_can_act(name: str) -> None:
    for _, attributes in Page(render(name)).elements:
        assert not [key for key in attributes if key.startswith("on")]
        for key in ("src", "href"):
            assert attributes.get(key, "#").startswith(("#", "plotly.min.js"))  # type: ignore[union-attr]


def strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [text for item in value for text in strings(item)] if isinstance(value, list) else []


def test_the_title_names_the_folder_and_nothing_else() -> None:
    assert "<title>plain · tracekit report</title>" in render("plain")
    assert "<title>a · tracekit report</title>" in html.render({}, document(job(), {}), "plotly.min.js")


def test_the_page_fetches_nothing() -> None:
    page = Page(html.render({}, document(job(), {})))
    fetching = ("src", "href", "action", "data", "srcset")
    urls = [value for _, attributes in page.elements for key, value in attributes.items() if key in fetching]
    assert [url for url in urls if url is None or not url.startswith("#")] == []
    policy = next(a["content"] for tag, a in page.elements if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert not {"http:", "https:", "*", "'self'", "file:"} & set(policy.replace(";", " ").split())
    assert not [text for _, text in page.scripts[-4:] if "http" in text or "innerHTML" in text]
    assert {tag for tag, _ in page.elements} & {"link", "iframe", "object", "embed", "base", "form", "img"} == set()


def test_plotly_is_inside_once_and_whole() -> None:
    page = Page(html.render({}, document(job(), {})))
    held = [contents(attributes, text) for attributes, text in page.scripts if attributes.get("id") == "plotly"]
    assert held == [plotly_source().decode()]


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
@pytest.mark.parametrize("level", [1, 9])
def test_the_page_unpacks_what_zlib_packed(tmp_path: Path, level: int) -> None:
    """The page's own inflate, against contents of every kind of block: stored, of fixed codes, of codes of its own, empty."""
    given = [b"", b"a", bytes(70_000), os.urandom(70_000), plotly_source()[:200_000], b"ab" * 3 + os.urandom(300)]
    packed = []
    for content in given:
        deflate = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
        packed.append([base64.b64encode(deflate.compress(content) + deflate.flush()).decode(), len(content)])
    each = f"for (const [text, size] of {json.dumps(packed)}) console.log(Buffer.from(unpack(text, size)).toString('hex'));"
    script = str(pages.asset("unpack.js")) + each
    program = tmp_path / "unpack.js"
    program.write_text(script)
    done = subprocess.run(["node", str(program)], capture_output=True, text=True, check=True, timeout=60)
    assert [bytes.fromhex(line) for line in done.stdout.split("\n")[:-1]] == given


def test_reports_of_one_folder_can_share_plotly() -> None:
    text = render("plain", "../plotly.min.js")
    assert '<script src="../plotly.min.js"></script>' in text
    assert len(text) < 200_000


def test_summary_comes_first_then_findings_then_sections_then_coverage() -> None:
    ids = [attributes["id"] for tag, attributes in PLAIN.elements if tag in ("header", "section") and "id" in attributes]
    assert ids == ["summary", "findings", "rank", "chapter-1", "coverage"]
    links = [attributes["href"] for tag, attributes in PLAIN.elements if tag == "a"]
    assert links[:6] == ["#main", "#summary", "#findings", "#rank", "#chapter-1", "#coverage"]


def test_rows_that_are_not_shown_are_in_the_data() -> None:
    text = "".join(PLAIN.text)
    assert "25 of 30 rows" in text
    assert "Show all 30" in text
    tables = [block for block in PLAIN.data() if "columns" in block]
    assert [len(block["columns"][1]["values"]) for block in tables if block["columns"][0]["title"] == "plain"] == [30]  # type: ignore[index]


def test_a_table_that_is_cut_says_what_was_left_out() -> None:
    section = Section("s", "", [Table("t", pd.DataFrame({"x": range(6000)}), {"x": "X"})])
    results = {"one": Given(sections=[section])}
    assert "The first 5,000 of 6,000 rows are in this page." in html.render(results, document(job(), results), "plotly.min.js")


def test_coverage_says_what_was_read_and_what_was_not() -> None:
    given = job(
        coverage=[
            Coverage("runs/a/rank0.json", 0, events=40),
            Coverage("runs/a/b.json", None, "skipped", notes=[text_note("no traceEvents")]),
        ],
        notes=[text_note("1 of 2 ranks is readable")],
    )
    page = Page(html.render({}, document(given, {}), "plotly.min.js"))
    files = next(block for block in page.data() if block["columns"][0]["title"] == "File")  # type: ignore[index]
    columns = {column["title"]: column["values"] for column in files["columns"]}  # type: ignore[attr-defined]
    assert columns["File"] == ["b.json", "rank0.json"]
    assert columns["Read"] == ["skipped", "complete"]
    assert columns["Rank"] == [None, 0]
    assert columns["What was found"] == ["no traceEvents", ""]
    assert {"1 of 2 ranks is readable", "memory"} <= set(page.text)


def test_an_empty_section_says_so() -> None:
    empty = pd.DataFrame({"lane": [], "start_us": [], "end_us": [], "name": [], "category": []})
    charts = [StackedBars("b", [], {}, "us"), Table("t", pd.DataFrame({"x": []}), {"x": "X"}), Timeline("l", empty)]
    results = {"one": Given(sections=[Section("s", "", charts)])}
    text = html.render(results, document(job(), results), "plotly.min.js")
    for sentence in ("Nothing to draw: not measured", "Nothing to list.", "Nothing to draw: no span was recorded."):
        assert sentence in text


def test_writing_replaces_an_old_report(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    html.write(target, {}, document(job(), {}))
    assert target.read_bytes() == html.render({}, document(job(), {})).encode()
    assert list(tmp_path.iterdir()) == [target]


def test_what_follows_from_a_cause_stands_under_it_once() -> None:
    finding = Finding("stragglers.rank", "warning", "Rank 3 is late.", consequences=("a", "b", "a", "c", "d"))
    page = html.render({"stragglers": Given([finding])}, document(job(), {"stragglers": Given([finding])}), "plotly.min.js")
    assert page.count("<span>a</span>") == 1
    assert "1 more that follow from it" in page
