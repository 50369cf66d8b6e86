"""Run a piece of Python in a process of its own; give back its seconds and its peak memory."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# The clock starts when the imports are done, and stops when the last value is there.
_TIMED = """
import json, resource, time
{setup}
begin = time.perf_counter()
{body}
seconds = time.perf_counter() - begin
print("\\n" + json.dumps({{"seconds": seconds, "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}}))
"""


@dataclass(frozen=True)
class Cost:
    """Median over the runs of one way to do something."""

    seconds: float
    peak_mb: float  # 10^6 bytes, of the largest process
    cpu_s: float = 0.0  # of all processes and threads, where it was asked for


def timed(setup: str, body: str, runs: int) -> Cost:
    """``body`` after ``setup``, each run in a new process; imports and start-up are not in the time, but are in the memory."""
    return middle([_timed_once(setup, body) for _ in range(runs)])


def _timed_once(setup: str, body: str) -> Cost:
    code = _TIMED.format(setup=setup, body=body)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the measured process failed:\n{done.stderr[-2000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    return Cost(told["seconds"], told["peak_kib"] * 1.024e-3)


def process(command: list[str], runs: int) -> Cost:
    """A whole command from start to exit; the memory is that of its largest process."""
    return middle([_process_once(command) for _ in range(runs)])


def _process_once(command: list[str]) -> Cost:
    # a small parent: the peak of a child starts from that of the process it was forked from
    code = (
        "import json, resource, subprocess, sys, time; begin = time.perf_counter(); "
        "done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE); seconds = time.perf_counter() - begin; "
        "sys.stderr.buffer.write(done.stderr); "
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print(json.dumps([seconds, used.ru_maxrss, used.ru_utime + used.ru_stime])); sys.exit(done.returncode)"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    seconds, peak, cpu = json.loads(done.stdout.splitlines()[-1])
    return Cost(seconds, peak * 1.024e-3, cpu)


def middle(costs: list[Cost]) -> Cost:
    """The median of each figure."""
    return Cost(*(statistics.median(getattr(cost, name) for cost in costs) for name in ("seconds", "peak_mb", "cpu_s")))


def settle(path: Path) -> None:
    """Reads all files below ``path`` once, so that no measurement pays for the disk."""
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        with file.open("rb") as source:
            while source.read(1 << 24):
                pass


def machine() -> str:
    """How many cores this process may use, and nothing that names the machine."""
    return f"{len(os.sched_getaffinity(0))} cores, Python {sys.version.split()[0]}"
