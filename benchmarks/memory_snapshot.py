"""How fast a CUDA memory snapshot opens, and in how many times its size.

    python benchmarks/memory_snapshot.py [--entries 1200000] [--depth 25] [--folder DIR]

Makes a snapshot as torch's ``_dump_snapshot()`` writes one (frames shared, a list of frames an entry), then opens it in a process of its
own: columns and the timeline. Memory is what this process grew by, and the most that the child which takes the pickle apart held.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SECOND = 1_700_000_000_000_000


def make(path: Path, entries: int, depth: int) -> None:
    """A history of ``entries`` entries with stacks of ``depth`` frames; at most 1,000 blocks are live at a time."""
    rng = random.Random(0)
    frames = [{"name": f"function_{i}", "filename": f"/code/module_{i % 97}.py", "line": i} for i in range(5000)]
    stacks = [[rng.choice(frames) for _ in range(depth)] for _ in range(3000)]
    history, live = [], []
    while len(history) < entries:
        number, stack = len(history), rng.choice(stacks)
        common = {"stream": 0, "time_us": SECOND + number, "compile_context": "N/A", "user_metadata": ""}
        size, address = 512 * rng.randrange(1, 5000), 0x7F0000000000 + number * 2**21
        live.append((address, size))
        history.append({"action": "alloc", "addr": address, "size": size, "frames": list(stack), **common})
        if len(live) > 1000:
            address, size = live.pop(rng.randrange(1000))
            freed = {"addr": address, "size": size, **common}
            history += [{"action": action, "frames": list(stack), **freed} for action in ("free_requested", "free_completed")]
    segments = [
        {"device": 0, "address": at, "total_size": size, "active_size": size, "segment_pool_id": (0, 0), "frames": [],
         "blocks": [{"address": at, "size": size, "requested_size": size, "state": "active_allocated", "frames": []}]}
        for at, size in live
    ]  # fmt: skip
    with path.open("wb") as file:
        pickle.dump({"segments": segments, "device_traces": [history], "allocator_settings": {}, "external_annotations": []}, file)


def highest() -> int:
    """The most memory this process has held, in bytes (Linux); getrusage would begin with that of the parent."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def opened(path: str) -> None:
    """Open a snapshot and print what it took, as JSON; a small one before it loads the code."""
    from tracekit.memory.snapshot_timeline import timeline
    from tracekit.readers.memory_snapshot import read_snapshot
    from tracekit.readers.sources import Source

    small = Path(path).with_name("small.pickle")
    small.write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]}))
    read_snapshot(Source(str(small), small.name, 0, 0))
    before = highest()
    start = time.perf_counter()
    found = read_snapshot(Source(path, Path(path).name, 0, 0))
    read = time.perf_counter() - start
    peak = max(int(timeline(device).allocated.max()) for device in found.devices)
    grown = highest() - before
    child = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(json.dumps({"read_s": read, "whole_s": time.perf_counter() - start, "grown": grown, "child": child, "peak": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_200_000)
    parser.add_argument("--depth", type=int, default=25)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "snapshot.pickle"
        make(path, options.entries, options.depth)
        size = path.stat().st_size
        code = f"from benchmarks.memory_snapshot import opened; opened({str(path)!r})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
        found = json.loads(done.stdout)
    speed = size / 1e6 / found["read_s"]
    print(f"{size / 1e6:.0f} MB: read in {found['read_s']:.1f} s ({speed:.0f} MB/s), with its timeline in {found['whole_s']:.1f} s")
    print(f"memory: {found['grown'] / size:.2f} times the file here, {found['child'] / size:.2f} times in the child")


if __name__ == "__main__":
    main()
