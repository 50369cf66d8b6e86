"""Scale study: time and memory of `tracekit analyze` over ranks and over bytes, in one and two processes and on Dask.

    python benchmarks/scale.py FOLDER                                   # 64 to 4,096 ranks x 1,856 events, one process, then two and Dask
    python benchmarks/scale.py FOLDER --ranks 64,256 --modes one,two
    python benchmarks/scale.py FOLDER --draw                            # fit and draw again what was measured

Jobs are those of many_ranks.py; bytes are varied by the number of layers at 64 ranks. What was measured is added to FOLDER/scale.json, a
point that is there is not measured again, so a study can be stopped and gone on with. Through the points of each mode goes

    y = a + b n        least squares of the relative error, n ranks (or GB)
    y ~ n^p            p by least squares of the logarithms, of what is above the smallest point's constant part a

and `scale.svg` beside this script shows points, lines and what the line says of 16,384 ranks, which nobody measured.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import many_ranks
import numpy as np

MODES = {
    "one": ["--jobs", "1"],
    "two": ["--executor", "processes", "--jobs", "2"],
    "dask": ["--executor", "dask", "--jobs", "2"],
}
NAMES = {"one": "one process", "two": "two processes", "dask": "Dask, two workers"}
#: Ranks x device work a step x steps: over ranks, and over bytes at 64 ranks.
RANKS, WORK, STEPS = (64, 256, 1024, 2048, 4096), 400, 2
BYTES = (400, 1600, 6400)
FAR = 16_384
COLOURS = {"one": "#3465a4", "two": "#cc6600", "dask": "#4e9a06"}
Point = dict[str, Any]


def measured(folder: Path, ranks: int, work: int, mode: str) -> Point:
    """One point: the whole command, without cache and report, in processes of its own."""
    traces = folder / f"{ranks}x{work}x{STEPS}"
    if not (traces / f"rank{ranks - 1}.json").exists():
        many_ranks.write(many_ranks.made(ranks, work, STEPS), traces)
    size = sum(path.stat().st_size for path in traces.iterdir())
    command = ["analyze", str(traces), "--no-cache", "--no-report", "-q", "--json", os.devnull, *MODES[mode]]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-m", "tracekit", *command])
    peak = 0
    while child.poll() is None:  # of the main process, which holds what all others found
        peak = max(peak, _peak_kb(child.pid))
        time.sleep(0.2)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    wall = time.perf_counter() - began
    return {"ranks": ranks, "work": work, "mode": mode, "bytes": size, "cpu_s": cpu, "wall_s": wall, "peak_mb": peak * 1.024e-3}


def _peak_kb(process: int) -> int:
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("VmHWM")), 0)


def fitted(x: list[float], y: list[float]) -> tuple[float, float, float]:
    """(a, b, p) of y = a + b x and y - a ~ x^p."""
    n, value = np.array(x), np.array(y)
    a, b = np.linalg.lstsq(np.stack([1 / value, n / value], axis=1), np.ones(len(n)), rcond=None)[0]
    above = value - min(a, 0.9 * value.min())
    return float(a), float(b), float(np.polyfit(np.log(n), np.log(above), 1)[0])


def _series(points: list[Point], mode: str, over: str) -> list[Point]:
    """Points of one mode over ranks, or over bytes at 64 ranks."""
    chosen = [p for p in points if p["mode"] == mode and (p["work"] == WORK if over == "ranks" else p["ranks"] == RANKS[0])]
    return sorted(chosen, key=lambda p: float(p[over]))


def told(points: list[Point]) -> list[str]:
    """The table of what was measured, and a line for each fit."""
    lines = ["| ranks | GB | | CPU s | wall s | peak MB |", "|-|-|-|-|-|-|"]
    for p in sorted(points, key=lambda p: (p["work"], p["ranks"], p["mode"])):
        gb, mode = p["bytes"] / 1e9, NAMES[p["mode"]]
        lines.append(f"| {p['ranks']:,} | {gb:.3f} | {mode} | {p['cpu_s']:.1f} | {p['wall_s']:.1f} | {p['peak_mb']:.0f} |")
    for over, scale, unit in (("ranks", 1.0, "rank"), ("bytes", 1e-9, "GB")):
        for mode in MODES:
            own = _series(points, mode, over)
            if len(own) < 3:
                continue
            for what, name in (("cpu_s", "CPU s"), ("peak_mb", "peak MB")):
                a, b, p = fitted([q[over] * scale for q in own], [q[what] for q in own])
                far = f"; at {FAR:,} ranks, extrapolated, {a + b * FAR:,.0f}" if over == "ranks" else ""
                lines.append(f"{NAMES[mode]}, {name} = {a:.3g} + {b:.3g} a {unit}, exponent {p:.2f}{far}")
    return lines


def drawn(points: list[Point]) -> str:
    """Four plots as SVG: CPU time and peak memory, over ranks and over bytes; both axes logarithmic."""
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" width="960" height="700" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="960" height="700" fill="white"/>')
    for column, (over, scale, label) in enumerate((("ranks", 1.0, "ranks (1,856 events each)"), ("bytes", 1e-9, "GB of traces, 64 ranks"))):
        for row, (what, name) in enumerate((("cpu_s", "CPU time of all processes [s]"), ("peak_mb", "peak memory [MB]"))):
            parts += _plot(points, (70 + 480 * column, 30 + 340 * row), over, scale, label, what, name)
    for number, mode in enumerate(MODES):
        parts.append(f'<text x="{90 + 160 * number}" y="692" fill="{COLOURS[mode]}">● {NAMES[mode]}</text>')
    parts.append('<text x="580" y="692">line: a + b n; dashed beyond what was measured</text></svg>')
    return "\n".join(parts) + "\n"


def _plot(points: list[Point], at: tuple[int, int], over: str, scale: float, label: str, what: str, name: str) -> list[str]:
    every = [p for mode in MODES for p in _series(points, mode, over)]
    if not every:
        return []
    low, high = (pick([p[over] * scale for p in every]) for pick in (min, max))
    high = FAR if over == "ranks" else high * 1.2
    lines = {}
    for mode in MODES:
        own = _series(points, mode, over)
        if len(own) > 2:
            lines[mode] = fitted([p[over] * scale for p in own], [p[what] for p in own])
    values = [p[what] for p in every] + [a + b * high for a, b, _ in lines.values()]
    bottom, top = 0.7 * min(values), 1.4 * max(values)
    width, height = 380, 260

    def place(x: float, y: float) -> tuple[float, float]:
        across = np.log(x / (0.9 * low)) / np.log(high / (0.9 * low))
        return float(at[0] + width * across), float(at[1] + height * (1 - np.log(max(y, bottom) / bottom) / np.log(top / bottom)))

    parts = [f'<rect x="{at[0]}" y="{at[1]}" width="{width}" height="{height}" fill="none" stroke="#999"/>']
    parts.append(f'<text x="{at[0]}" y="{at[1] - 8}" font-weight="bold">{name}</text>')
    parts.append(f'<text x="{at[0] + width / 2}" y="{at[1] + height + 32}" text-anchor="middle">{label}</text>')
    for x in sorted({p[over] * scale for p in every} | ({float(FAR)} if over == "ranks" else set())):
        left, _ = place(x, bottom)
        parts.append(f'<text x="{left:.1f}" y="{at[1] + height + 16}" text-anchor="middle">{x:,.0f}</text>' if x >= 10 else
                     f'<text x="{left:.1f}" y="{at[1] + height + 16}" text-anchor="middle">{x:.2g}</text>')  # fmt: skip
    for y in (v for d in range(-1, 5) for v in (10.0**d, 2 * 10.0**d, 5 * 10.0**d) if bottom <= v <= top):
        _, up = place(low, y)
        parts.append(f'<path d="M{at[0]} {up:.1f}h{width}" stroke="#eee"/>')
        parts.append(f'<text x="{at[0] - 6}" y="{up + 4:.1f}" text-anchor="end">{y:,.0f}</text>')
    for mode, (a, b, _) in lines.items():
        last = max(p[over] * scale for p in _series(points, mode, over))
        for first, end, dash in ((low, last, ""), (last, high, ' stroke-dasharray="4 4"')):
            curve = [place(x, a + b * x) for x in np.geomspace(first, end, 40).tolist()]
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in curve)
            parts.append(f'<path d="M{path}" fill="none" stroke="{COLOURS[mode]}"{dash}/>')
    for p in every:
        x, y = place(p[over] * scale, p[what])
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLOURS[p["mode"]]}"/>')
    return parts


def main() -> None:
    """Measure what is missing, say and draw all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    file = given.folder / "scale.json"
    points: list[Point] = json.loads(file.read_text()) if file.exists() else []
    wanted = [(int(ranks), WORK, mode) for mode in given.modes.split(",") for ranks in given.ranks.split(",")]
    wanted += [(RANKS[0], work, mode) for mode in given.modes.split(",") for work in BYTES[1:]]
    for ranks, work, mode in [] if given.draw else wanted:
        if not any((p["ranks"], p["work"], p["mode"]) == (ranks, work, mode) for p in points):
            points.append(measured(given.folder, ranks, work, mode))
            file.write_text(json.dumps(points, indent=1))
            print(points[-1], flush=True)
    print("\n".join(told(points)))
    (Path(__file__).parent / "scale.svg").write_text(drawn(points))


if __name__ == "__main__":
    main()
