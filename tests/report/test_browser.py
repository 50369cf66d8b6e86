"""The report in a real browser: nothing fails, links land on their evidence, tables and the timeline answer, axe finds nothing serious.

A script at the end of a copy of the page does what a reader would do and writes down what it sees; Chromium prints the page that is left.
Skipped where there is no Chromium; the part with axe where axe-core is not installed (``npm install axe-core``; AXE names axe.min.js).
"""

import html as markup
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ROOT = Path(__file__).resolve().parents[2]
AXE = Path(os.environ.get("AXE", str(ROOT / "node_modules" / "axe-core" / "axe.min.js")))
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="no Chromium"), pytest.mark.slow]

WAIT = "const wait = (ms) => new Promise((done) => setTimeout(done, ms));"
FRAME = """
const problems = [];
window.addEventListener("error", (event) => problems.push(String(event.message)));
window.addEventListener("securitypolicyviolation", (event) => problems.push("blocked: " + event.blockedURI));
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = tmp_path_factory.mktemp("browser") / "report.html"
    command = [sys.executable, "-m", "tracekit", "analyze", str(ROOT / "sample_traces" / "pipeline_interleaved_2"), "-q", "-o", str(page)]
    subprocess.run([*command, "--no-cache"], check=True, timeout=300)
    return page


def seen(page: Path, script: str, *, width: int = 1280, dark: bool = False, before: str = "") -> Any:
    """What ``script`` returned, run in the page when it was loaded."""
    text = page.read_text(encoding="utf-8")
    run = f"""window.addEventListener("load", async () => {{ {WAIT} let result;
      try {{ result = await (async () => {{ {script} }})(); }} catch (error) {{ result = {{ failed: String(error) }}; }}
      const out = document.createElement("pre"); out.id = "seen"; out.textContent = JSON.stringify({{ result, problems }});
      document.body.append(out); }});"""
    text = text.replace("<style>", f"<script>{FRAME}</script><style>", 1)
    copy = page.with_name(f"copy-{width}.html")
    copy.write_text(text.replace("</body>", f"<script>{before}</script><script>{run}</script></body>"), encoding="utf-8")
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=30000", f"--window-size={width},900", "--dump-dom"]
    done = subprocess.run([str(CHROMIUM), *options, *scheme, copy.as_uri()], capture_output=True, text=True, timeout=240, check=False)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    answer = json.loads(markup.unescape(found[1]))
    assert answer["problems"] == []
    return answer["result"]


def test_findings_lead_to_their_evidence(report: Path) -> None:
    """Every link lands in view: on its row where it names one, on its chart or chapter else."""
    script = """
      for (const each of document.querySelectorAll("section")) { each.scrollIntoView(); await wait(200); } // draws every chart
      const links = [...document.querySelectorAll(".findings .how a[href^='#']")], lost = [], rows = [];
      for (const link of links) {
        link.closest("details")?.setAttribute("open", "");
        link.click(); await wait(400);
        const id = decodeURIComponent(link.hash.slice(1)).split("?")[0], target = document.getElementById(id);
        const box = target?.getBoundingClientRect();
        const end = scrollY + innerHeight >= document.documentElement.scrollHeight - 2;
        const low = id.includes(".") || end ? innerHeight - 20 : 60;
        if (!box || box.top < -1 || box.top > low) lost.push([link.hash, box?.top]);
        if (id.includes(".")) rows.push([id, target?.classList.contains("lit"), document.querySelectorAll("tr.lit").length]);
      }
      return { links: links.length, lost, rows };"""
    found = seen(report, script)
    assert found["links"] > 3 and found["lost"] == []
    assert found["rows"] and all(marked for _, marked, _ in found["rows"])


def test_an_address_of_a_row_lands_on_it_whatever_the_table_showed(report: Path) -> None:
    script = """
      const block = [...document.querySelectorAll("#operators .table")][0], filter = block.querySelector("[data-filter]");
      const columns = tracekit.data(block).columns, last = columns[0].values.length - 1, name = columns[0].values[last];
      filter.value = "no operator is called so"; filter.dispatchEvent(new Event("input"));
      location.hash = "#" + block.id + "." + name.toLowerCase().replace(/[^a-z0-9_]+/g, "-").slice(0, 60).replace(/^-+|-+$/g, "");
      await wait(4000);
      const row = block.querySelector("tr.lit"), box = row.getBoundingClientRect();
      return { name, shown: row.cells[0].textContent, filter: filter.value, inside: box.top > 0 && box.bottom < innerHeight };"""
    found = seen(report, script)
    assert found["shown"] == found["name"] and found["filter"] == "" and found["inside"]


def test_an_address_opens_the_timeline_at_a_step_and_ranks(report: Path) -> None:
    script = """
      const block = document.querySelector("#timeline .timeline"), given = tracekit.data(block);
      const other = given.steps.map((step) => step.label).find((label, index) => index !== given.first);
      location.hash = "#timeline?step=" + other.slice(5) + "&rank=1"; await wait(4000);
      const step = block.querySelector("[data-step]"), boxes = [...block.querySelectorAll("[data-groups] label")];
      const result = { other, step: step.selectedOptions[0].textContent, ranks: block.querySelector("[data-ranks]").value,
        shown: boxes.filter((each) => each.control.checked).map((each) => each.textContent),
        top: Math.round(document.querySelector("#timeline").getBoundingClientRect().top) };
      step.value = String(given.first); step.dispatchEvent(new Event("change"));
      return { ...result, address: location.hash, first: given.steps[given.first].label };"""
    found = seen(report, script)
    assert found["step"] == found["other"] and found["ranks"] == "1" and found["shown"] == ["rank 1"]
    assert 0 <= found["top"] <= 60
    assert found["address"] == f"#timeline?step={found['first'].removeprefix('Step ')}&rank=1"


def test_a_deep_link_lands_though_charts_are_drawn_late(report: Path) -> None:
    script = """
      location.hash = "#operators"; await wait(4000);
      return Math.round(document.querySelector("#operators").getBoundingClientRect().top);"""
    assert 0 <= seen(report, script) <= 60


def test_tables_are_sorted_and_filtered(report: Path) -> None:
    script = """
      const block = document.querySelector("#operators .table"), button = block.querySelector("th button");
      const cells = () => [...block.querySelectorAll("tbody tr")].map((row) => row.cells[0].textContent);
      button.click();
      const up = cells(); button.click(); const down = cells();
      const filter = block.querySelector("[data-filter]"); filter.value = "aten::mm"; filter.dispatchEvent(new Event("input"));
      return { up, down, kept: cells(), sorted: block.querySelector("th").getAttribute("aria-sort") };"""
    found = seen(report, script)
    assert found["up"][0].lower() <= found["up"][-1].lower()
    assert found["up"][0] != found["down"][0]
    assert found["sorted"] == "descending"
    assert found["kept"]
    assert all("aten::mm" in name for name in found["kept"])


def test_the_timeline_finds_counts_and_chooses_ranks(report: Path) -> None:
    script = """
      const block = document.querySelector("#timeline .timeline"); block.scrollIntoView(); await wait(1500);
      const given = tracekit.data(block), name = given.names.find((each) => each.startsWith("aten::"));
      const find = block.querySelector("[data-find]"), hits = () => block.querySelector("[data-hits]").textContent;
      find.value = name; find.dispatchEvent(new Event("input"));
      const count = hits();
      block.querySelector("[data-next]").click();
      const first = hits(), picked = block.querySelector("[data-picked]").textContent;
      const ranks = block.querySelector("[data-ranks]"), shown = {};
      for (const wanted of ["1", "0"]) {
        ranks.value = wanted; ranks.dispatchEvent(new Event("change"));
        shown[wanted] = [...block.querySelectorAll("[data-groups] label")].filter((each) => each.control.checked);
        shown[wanted] = shown[wanted].map((each) => each.textContent);
      }
      const steps = block.querySelector("[data-step]"), turned = [];
      for (const option of [...steps.options]) {
        steps.value = option.value; steps.dispatchEvent(new Event("change"));
        const boxes = [...block.querySelectorAll("[data-groups] label")].filter((each) => each.control.checked);
        turned.push([option.textContent, boxes.map((each) => each.textContent)]);
      }
      return { name, count, first, picked, shown, turned, groups: block.querySelectorAll("[data-groups] input").length };"""
    found = seen(report, script)
    assert re.fullmatch(r"[1-9]\d* found", found["count"])
    assert re.fullmatch(r"\d+ of \d+", found["first"])
    assert found["name"] in found["picked"]
    assert found["groups"] == 4  # the two ranks; findings and the critical path, which are no rank's
    assert found["shown"] == {"1": ["rank 1"], "0": ["rank 0"]}
    assert len(found["turned"]) > 1 and len({label for label, _ in found["turned"]}) == len(found["turned"])
    assert {tuple(shown) for _, shown in found["turned"]} == {("rank 0",)}  # a choice of ranks stays from step to step


def test_a_finding_leads_to_where_it_is_seen_on_the_timeline(report: Path) -> None:
    script = """
      const link = document.querySelector(".findings a[href*='finding=']"), block = document.querySelector("#timeline .timeline");
      link.click(); await wait(4000);
      return { top: Math.round(document.querySelector("#timeline").getBoundingClientRect().top),
        picked: block.querySelector("[data-picked]").textContent, sentence: link.closest("li").querySelector(".what").textContent };"""
    found = seen(report, script)
    assert 0 <= found["top"] <= 60
    assert " · finding · " in found["picked"]
    assert found["picked"][:40] in found["sentence"]


def test_a_page_of_one_rank_gathers_its_rows_and_its_groups(report: Path) -> None:
    script = """
      location.hash = "#rank-1"; await wait(2500);
      const section = document.querySelector("#rank"), steps = [...section.querySelectorAll("h3")].map((each) => each.textContent);
      const ours = tracekit.data(document.querySelector("#waiting .table")).columns, at = ours[0].values.indexOf(1);
      const title = [...section.querySelectorAll("h3")].find((each) => each.querySelector("a").hash.startsWith("#waiting"));
      const rows = title.nextElementSibling.querySelectorAll("tbody tr"), top = Math.round(section.getBoundingClientRect().top);
      const waited = rows[0].cells[0].textContent;
      return { titles: steps, input: section.querySelector("input").value, top, rows: rows.length, waited, wanted: ours[1].values[at] };"""
    found = seen(report, script)
    assert found["input"] == "1" and 0 <= found["top"] <= 60
    assert {"Step breakdown: every rank and step", "Process groups and mesh: groups"} <= set(found["titles"])
    assert found["rows"] == 1
    waited = None if found["waited"] == "–" else float(found["waited"].replace(",", ""))
    assert waited == (found["wanted"] if found["wanted"] is None else pytest.approx(found["wanted"], rel=1e-3, abs=0.5))


@pytest.mark.parametrize("width", [400, 1280, 2560])
def test_nothing_is_wider_than_the_window(report: Path, width: int) -> None:
    found = seen(report, "await wait(1500); return [document.documentElement.scrollWidth, innerWidth];", width=width)
    assert found[0] <= found[1]


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not installed")
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_serious(report: Path, dark: bool) -> None:
    script = """
      for (const each of document.querySelectorAll("section")) { each.scrollIntoView(); await wait(200); } // draws every chart
      const found = await axe.run(document, { resultTypes: ["violations"] });
      const serious = found.violations.filter((each) => ["serious", "critical"].includes(each.impact));
      return serious.map((each) => [each.id, each.nodes.map((node) => node.html.slice(0, 120))]);"""
    assert seen(report, script, dark=dark, before=AXE.read_text(encoding="utf-8")) == []
