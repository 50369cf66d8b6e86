"""The real CUDA snapshots that lie beside the project, against a replay of their entries by hand; skipped where they are absent.

The replay knows the allocator's rules and nothing of this program: requests are rounded up to 512 bytes, a block that stands at the end has
the size that its segment gives it, a block without an allocation in the history is older than it.
"""

import gzip
import io
import pickle
import re
from collections import Counter
from dataclasses import dataclass, field

import pytest

from tests.real import REAL
from tests.test_memory_real import memory

SNAPSHOTS = sorted((REAL / "snapshots").glob("*")) if (REAL / "snapshots").is_dir() else []
pytestmark = pytest.mark.skipif(not SNAPSHOTS, reason="no folder of real snapshots beside the project")


class Plain(pickle.Unpickler):
    def find_class(self, module, name):
        raise AssertionError(f"{module}.{name}")


@dataclass
class Replay:
    peak: int = 0
    reserved: int = 0
    start: int = 0
    end: int = 0
    owners: Counter = field(default_factory=Counter)


def user_frame(frames) -> str:
    """The innermost line of Python that is neither torch's nor the standard library's; '' for none."""
    for frame in frames:
        file = frame["filename"]
        if file.endswith(".py") and "/torch/" not in file and not re.search(r"/python3\.\d+/[a-z_]+\.py$", file):
            return f"{file.rsplit('/', 1)[-1]}:{frame['line']} {frame['name']}"
    return ""


def replay(path) -> Replay:
    data = path.read_bytes()
    content = Plain(io.BytesIO(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)).load()
    (history,) = [trace for trace in content["device_traces"] if trace]
    blocks = {b["address"]: b["size"] for part in content["segments"] for b in part["blocks"] if b["state"] == "active_allocated"}
    given = [-(-entry["size"] // 512) * 512 for entry in history]
    # Backwards: which allocations stand at the end, and what was there before the history.
    last = {entry["addr"]: i for i, entry in enumerate(history) if entry["action"] == "alloc"}
    freed = {entry["addr"]: i for i, entry in enumerate(history) if entry["action"] == "free_requested"}
    for address, i in last.items():
        if freed.get(address, -1) < i:
            given[i] = blocks[address]
    live = {address: (size, "") for address, size in blocks.items() if address not in last and address not in freed}
    seen: set[int] = set()
    for i, entry in enumerate(history):
        if entry["action"] == "free_requested" and entry["addr"] not in seen:
            live[entry["addr"]] = (given[i], "")
        if entry["action"] in ("alloc", "free_requested"):
            seen.add(entry["addr"])
    found = Replay(start=sum(size for size, _ in live.values()))
    total = found.peak = found.start
    held = sum(part["total_size"] for part in content["segments"])
    held -= sum({"segment_alloc": 1, "segment_free": -1}.get(entry["action"], 0) * entry["size"] for entry in history)
    found.reserved, at_peak = held, dict(live)
    for i, entry in enumerate(history):
        if entry["action"] == "alloc":
            live[entry["addr"]] = (given[i], user_frame(entry["frames"]))
            total += given[i]
        elif entry["action"] == "free_requested":
            total -= live.pop(entry["addr"])[0]
        held += {"segment_alloc": 1, "segment_free": -1}.get(entry["action"], 0) * entry["size"]
        found.reserved = max(found.reserved, held)
        if total > found.peak:
            found.peak, at_peak = total, dict(live)
    found.end = total
    for size, name in at_peak.values():
        found.owners[name] += size
    return found


@pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: path.name.partition(".")[0])
def test_peak_reserved_and_the_largest_owners_are_those_of_a_replay_by_hand(path) -> None:
    want = replay(path)
    (row,) = memory(f"snapshots/{path.name}").values()
    assert not [note for note in row["notes"] if "contradicts" in note]
    assert (row["start_bytes"], row["peak_bytes"], row["end_bytes"]) == (want.start, want.peak, want.end)
    assert row["reserved_peak_bytes"] == want.reserved
    assert row["reserved_peak"]["reserved_bytes"] == want.reserved
    owners: Counter = Counter()
    for unit in row["units"]:
        owners["" if unit["category"] == "before_recording" else unit["name"]] += unit["bytes"]
    for name, size in [(name, size) for name, size in want.owners.most_common(11) if name][:10]:
        assert owners[name] == size, name
    assert sum(owners.values()) == want.peak
