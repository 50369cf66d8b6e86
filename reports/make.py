"""The gallery: the report of every sample, and a page that leads to them. All reports share one plotly.min.js.

    python reports/make.py            write reports/*.html anew
    python reports/make.py --check    say which of them are out of date, with exit code 1

The same traces and the same program give the same bytes: pages hold no time of day, and paths from the repository on. Only what is packed
depends on the build of zlib; ``--check`` compares what it holds.
"""

from __future__ import annotations

import html
import json
import re
import sys
import tempfile
import zlib
from base64 import b64decode
from pathlib import Path
from typing import Any

from tracekit import analyses
from tracekit.job.load import LoadOptions, load_job
from tracekit.report import html as report
from tracekit.report import overview
from tracekit.report.document import document
from tracekit.report.plotly_code import plotly_source

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "reports"
SAMPLES = ROOT / "sample_traces"
PLOTLY = "plotly.min.js"
_PACKED = re.compile(rb"[A-Za-z0-9+/]{64,}={0,2}")

_PARTS = (
    ("compute_us", "compute", "#4477aa"),
    ("exposed_comm_us", "exposed communication", "#cc6677"),
    ("memory_copy_us", "exposed copies", "#ddcc77"),
    ("idle_us", "idle", "#bbbbbb"),
    ("unknown_us", "not recorded", "#666666"),
)


def make(folder: Path) -> None:
    """Write all pages into ``folder``."""
    (folder / PLOTLY).write_bytes(plotly_source())
    cards = []
    for sample in sorted(path for path in SAMPLES.iterdir() if path.is_dir()):
        job = load_job([str(sample)], LoadOptions(), analyses.reducers())
        results = analyses.run(job)
        found = document(job, results)
        page = report.render(results, found, plotly_js=PLOTLY).replace(f"{ROOT}/", "")
        (folder / f"{sample.name}.html").write_text(page, encoding="utf-8")
        cards.append(_card(sample.name, found))
    (folder / "index.html").write_text(_index(cards), encoding="utf-8")


def _card(name: str, found: dict[str, Any]) -> str:
    answer = overview.answer(found).sentence
    first = f"<p class=finding>{html.escape(found['findings'][0]['text'])}</p>" if found["findings"] else ""
    return f'<a class=card href="{name}.html"><h2>{name}</h2>{_picture(found)}<p>{html.escape(answer)}</p>{first}</a>'


def _picture(found: dict[str, Any]) -> str:
    """The mean step of each rank as a bar, drawn to the longest."""
    rows = [row for row in found.get("mean_step") or [] if row.get("rank") is not None and row.get("step_us")]
    if not rows:
        return "<p class=none>no steps: memory alone</p>"
    longest, height = max(row["step_us"] for row in rows), max(3, min(14, 120 // len(rows)))
    bars = []
    for place, row in enumerate(rows):
        x = 0.0
        for key, label, color in _PARTS:
            width = 300 * (row.get(key) or 0) / longest
            title = f"<title>rank {row['rank']}: {label}</title>"
            bars.append(f'<rect x="{x:.1f}" y="{place * height}" width="{width:.1f}" height="{height - 1}" fill="{color}">{title}</rect>')
            x += width
    size = f'viewBox="0 0 300 {len(rows) * height}" width="300" height="{len(rows) * height}"'
    return f'<svg role="img" aria-label="mean step of each rank" {size}>{"".join(bars)}</svg>'


def _index(cards: list[str]) -> str:
    legend = "".join(f'<span><i style="background:{color}"></i>{label}</span>' for _, label, color in _PARTS)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>tracekit: reports of the samples</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1500px; padding: 0 1rem; color: #1a1a1a; background: #fff }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); gap: 1rem }}
.card {{ border: 1px solid #ccc; border-radius: 8px; padding: .8rem 1rem; color: inherit; text-decoration: none }}
.card:hover, .card:focus {{ border-color: #4477aa; box-shadow: 0 1px 6px #0003 }}
h2 {{ font-size: 1.05rem; margin: 0 0 .5rem }} p {{ margin: .5rem 0 0 }} .finding, .none {{ color: #555; font-size: .9rem }}
svg {{ max-width: 100% }} .legend span {{ margin-right: 1.2rem }}
.legend i {{ display: inline-block; width: .9em; height: .9em; margin-right: .3em }}
@media (prefers-color-scheme: dark) {{
body {{ background: #16181c; color: #e6e6e6 }} .card {{ border-color: #444 }} .finding, .none {{ color: #aaa }}
}}
</style>
<h1>Reports of the samples</h1>
<p>One report for each recording in <code>sample_traces/</code>. A bar is the mean step of one rank,
all drawn to the longest of its job.</p>
<p class=legend>{legend}</p>
<main>
{chr(10).join(cards)}
</main>
</html>
"""


def _differences(made: Path) -> list[str]:
    names = {path.name for folder in (made, HERE) for path in folder.iterdir() if path.suffix in (".html", ".js")}
    return sorted(name for name in names if _bytes(made / name) != _bytes(HERE / name))


def _bytes(path: Path) -> bytes | None:
    return _PACKED.sub(_unpacked, path.read_bytes()) if path.is_file() else None


def _unpacked(found: re.Match[bytes]) -> bytes:
    """What a packed part holds: builds of zlib give other bytes for the same content. As it is, where it is none."""
    try:
        return zlib.decompress(b64decode(found[0], validate=True), -zlib.MAX_WBITS)
    except (ValueError, zlib.error):
        return found[0]


if __name__ == "__main__":
    if "--check" in sys.argv:
        with tempfile.TemporaryDirectory() as scratch:
            make(Path(scratch))
            stale = _differences(Path(scratch))
        sys.exit(f"out of date: {json.dumps(stale)}; run python reports/make.py" if stale else 0)
    make(HERE)
