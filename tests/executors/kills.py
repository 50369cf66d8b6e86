"""Kill `tracekit analyze` at random moments: what it leaves, in its outputs and its cache, is whole or not there.

    python -m tests.executors.kills -n 50 --seed 1

After every kill the outputs are those of an earlier run or of this one, byte for byte, and no process is left; at the end a run with the
same cache says what a run without it says. Not a test: it takes some minutes,
in which the code must not change.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.builder import Trace

TRACEKIT = [sys.executable, "-m", "tracekit.cli.main"]


def job(folder: Path) -> None:
    """Four ranks of a few steps."""
    folder.mkdir()
    for rank in range(4):
        trace = Trace(rank, 4)
        for step in range(1, 6):
            trace.step(step, 1000 * step, 900)
            for number in range(8):
                trace.kernel("gemm", 1000 * step + 30 * number + 50, 20 + rank, launch=1000 * step + 10 + 30 * number, op="aten::mm")
            trace.collective("allreduce", 1000 * step + 400, 200, seq=step, launch=1000 * step + 350)
        trace.write(folder / f"rank{rank}.json")


def command(folder: Path, *more: str) -> list[str]:
    """The command that a user types."""
    outputs = ["-o", str(folder / "report.html"), "--json", str(folder / "result.json")]
    return [*TRACEKIT, "analyze", str(folder / "job"), "-q", *outputs, *more]


def contents(folder: Path) -> list[bytes | None]:
    """The two outputs; None for one that is not there."""
    return [path.read_bytes() if path.exists() else None for path in (folder / "report.html", folder / "result.json")]


def group_is_gone(number: int) -> bool:
    """Whether no process of a group is left, within some seconds."""
    for _ in range(100):
        try:
            os.killpg(number, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def one_kill(folder: Path, whole: list[bytes | None], length: float, chance: random.Random) -> tuple[list[str], bool]:
    """(what is wrong after a run was killed at a random moment of ``length`` seconds, whether it had ended before)."""
    for path in (folder / "report.html", folder / "result.json"):
        if chance.random() < 0.5:
            path.unlink(missing_ok=True)
    cache = ["--cache", str(folder / "cache")]
    if chance.random() < 0.8:  # else a kept answer is found, which is over soon
        subprocess.run([*TRACEKIT, "cache", "clear", *cache], check=True, stdout=subprocess.DEVNULL)
    way = chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    more = chance.choice([[], ["--executor", "processes", "--jobs", "2"]])
    running = subprocess.Popen(command(folder, *cache, *more), start_new_session=True, stderr=subprocess.PIPE)
    time.sleep(chance.random() * length * 0.7)  # later the run has ended
    ended = running.poll() is not None
    running.send_signal(way)
    running.communicate(timeout=120)
    problems = [] if group_is_gone(running.pid) else ["a process is left"]
    for have, wanted in zip(contents(folder), whole, strict=True):
        if have not in (None, wanted):
            problems.append(f"an output is not whole ({len(have or b'')} bytes of {len(wanted or b'')})")
    if way == signal.SIGINT and any(path.name.startswith(".tracekit-") for path in folder.iterdir()):
        problems.append("half a file is left")
    for path in folder.glob(".tracekit-*"):
        path.unlink()
    return [f"{way.name} {' '.join(more)}: {problem}" for problem in problems], ended


def main() -> None:
    """Kill, look, and say what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-n", type=int, default=50, help="kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance, problems, late = random.Random(options.seed), [], 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        job(folder / "job")
        begin = time.perf_counter()
        subprocess.run(command(folder, "--no-cache"), check=True)
        length, whole = time.perf_counter() - begin, contents(folder)
        for _ in range(options.n):
            found, ended = one_kill(folder, whole, length, chance)
            problems += found
            late += ended
        subprocess.run(command(folder, "--cache", str(folder / "cache")), check=True)
        if contents(folder) != whole:
            problems.append("with the cache that is left the answer is another")
    print("\n".join([*problems, f"{options.n} kills ({late} behind the end), {len(problems)} problems"]))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
