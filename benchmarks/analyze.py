"""The whole of `tracekit analyze`, start-up, JSON and HTML included, against HTA's load + temporal breakdown + overlap + kernels.

    python benchmarks/make_traces.py INPUTS
    python benchmarks/analyze.py INPUTS [--runs 3]

HTA, with the extra hta, runs as its users run it (TraceAnalysis on the folder, all defaults, nothing drawn), in a process of its own with
its imports in the time; tracekit without its cache. Then: the second run on the same input, out of the cache, against the first, both as
a whole command and as opening the tables alone; time and peak memory on 1 GB; how long `tracekit --help` takes. Peak memory is that of
the largest process.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from measure import Cost, machine, middle, process, settle, timed

HTA = """
import logging, sys, warnings
logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
from hta.trace_analysis import TraceAnalysis
if __name__ == "__main__":
    analysis = TraceAnalysis(trace_dir=sys.argv[1])
    analysis.get_temporal_breakdown(visualize=False)
    analysis.get_comm_comp_overlap(visualize=False)
    analysis.get_gpu_kernel_breakdown(visualize=False)
"""
OPEN = """
from tracekit.job.window import Task, read_tables
from tracekit.readers.sources import find_sources
source = find_sources([{path!r}]).sources[0]
task = Task(cache={cache!r})
"""
TRACEKIT = [sys.executable, "-m", "tracekit.cli.main"]


def analyze(path: Path, out: Path, *options: str) -> list[str]:
    """The command that a user types."""
    return [*TRACEKIT, "analyze", str(path), "-q", "-o", str(out / "report.html"), "--json", str(out / "result.json"), *options]


def against_hta(inputs: Path, names: list[str], out: Path, runs: int) -> None:
    script = out / "hta_run.py"
    script.write_text(HTA)
    heads = ("CPU s", "peak MB", "HTA s", "CPU s", "peak MB", "x faster", "x CPU")
    print(f"{'input':>12} {'tracekit s':>10} " + " ".join(f"{head:>8}" for head in heads))
    for name in names:
        folder = inputs / name
        settle(folder)
        first = process(analyze(folder, out, "--no-cache"), 1)  # in turn: one before and the others behind
        hta = process([sys.executable, str(script), str(folder)], 1)
        ours = middle([first, *(process(analyze(folder, out, "--no-cache"), 1) for _ in range(runs - 1))])
        print(
            f"{name:>12} {ours.seconds:10.2f} {ours.cpu_s:8.2f} {ours.peak_mb:8.0f} {hta.seconds:8.2f} {hta.cpu_s:8.2f} {hta.peak_mb:8.0f} "
            f"{hta.seconds / ours.seconds:8.1f} {hta.cpu_s / ours.cpu_s:8.1f}",
            flush=True,
        )


def again(inputs: Path, names: list[str], out: Path, runs: int) -> None:
    """First run (reads and fills the cache) against the next (reads the cache)."""
    print(f"\n{'input':>12} {'first s':>8} {'again s':>8} {'x faster':>8} {'x CPU':>8}    the whole command")
    for name in names:
        folder = inputs / name
        settle(folder)
        first = [process(analyze(folder, out, "--cache", tempfile.mkdtemp(dir=out)), 1) for _ in range(runs)]
        cache = str(out / "cache")
        process(analyze(folder, out, "--cache", cache), 1)
        second = process(analyze(folder, out, "--cache", cache), runs)
        before = middle(first)
        ratios = f"{before.seconds / second.seconds:8.1f} {before.cpu_s / second.cpu_s:8.1f}"
        print(f"{name:>12} {before.seconds:8.2f} {second.seconds:8.2f} {ratios}", flush=True)


def open_again(inputs: Path, names: list[str], out: Path, runs: int) -> None:
    """The tables of rank 0: read and stored in the cache, against loaded from it; imports not in the time."""
    print(f"\n{'input':>12} {'first s':>8} {'again s':>8} {'x faster':>8}    opening the tables of rank 0")
    for name in names:
        path = str(next((inputs / name).glob("rank0.json*")))
        first = [
            timed(OPEN.format(path=path, cache=tempfile.mkdtemp(dir=out)), "read_tables(source, task)", 1).seconds for _ in range(runs)
        ]
        setup = OPEN.format(path=path, cache=str(out / f"tables-{name}"))
        timed(setup, "read_tables(source, task)", 1)
        second = timed(setup, "read_tables(source, task)", runs).seconds
        before = sorted(first)[len(first) // 2]
        print(f"{name:>12} {before:8.3f} {second:8.3f} {before / second:8.1f}", flush=True)


def alone(inputs: Path, out: Path) -> Cost:
    settle(inputs / "1GB")
    return process(analyze(inputs / "1GB", out, "--no-cache"), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("--runs", type=int, default=3, help="of tracekit; HTA runs once")
    given = parser.parse_args()
    names = [name for name in ("250MB", "250MB.gz", "8x50MB", "8x50MB.gz") if (given.inputs / name).is_dir()]
    print(f"{machine()}; median of {given.runs} runs of tracekit, one of HTA; MB = 10^6 bytes\n")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        process(analyze(given.inputs / names[0], out, "--no-cache"), 1)  # numba's cache, once for all
        against_hta(given.inputs, names, out, given.runs)
        again(given.inputs, names, out, given.runs)
        open_again(given.inputs, names, out, given.runs)
        if (given.inputs / "1GB").is_dir():
            cost = alone(given.inputs, out)
            print(f"\n         1GB {cost.seconds:10.2f} {cost.peak_mb:8.0f}")
        print(f"\ntracekit --help: {process([*TRACEKIT, '--help'], max(5, given.runs)).seconds:.2f} s")


if __name__ == "__main__":
    main()
