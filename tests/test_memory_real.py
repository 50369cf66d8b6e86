"""Memory of real traces and snapshots that lie beside the project, against a replay by hand; skipped where they are absent."""

import io
import json
import pickle
from collections import defaultdict

import pytest

from tests.real import REAL
from tracekit import analyses
from tracekit.job.load import LoadOptions, load_job
from tracekit.readers.compressed import TextStream

pytestmark = pytest.mark.skipif(not REAL.is_dir(), reason="no folder of real traces beside the project")


def text(name: str) -> bytes:
    with (REAL / name).open("rb") as raw:
        stream, found, block = TextStream(raw), io.BytesIO(), bytearray(1 << 20)
        while count := stream.fill(memoryview(block)):
            found.write(block[:count])
    return found.getvalue()


def memory(name: str) -> dict[str, dict]:
    job = load_job([str(REAL / name)], LoadOptions(), {"memory": analyses.reducers()["memory"]})
    return {row["device"]: row for row in analyses.modules()["memory"].analyze(job).json()["memory"]}


def by_hand(name: str) -> dict[str, dict[str, int]]:
    """Device -> highest Total Allocated, and the highest sum of changes on top of what the device began with."""
    found: dict[str, list] = defaultdict(list)
    for event in json.loads(text(name))["traceEvents"]:
        if event.get("name") == "[memory]":
            args = event["args"]
            found["cpu" if args["Device Type"] == 0 else f"cuda:{args['Device Id']}"].append((float(event["ts"]), args))
    result = {}
    for device, events in found.items():
        events.sort(key=lambda pair: pair[0])
        total = lowest = highest = 0
        for _, args in events:
            total += args["Bytes"]
            lowest, highest = min(lowest, total), max(highest, total)
        start = events[0][1].get("Total Allocated", events[0][1]["Bytes"] - lowest) - events[0][1]["Bytes"]
        recorded = max((args["Total Allocated"] for _, args in events if "Total Allocated" in args), default=None)
        result[device] = {"recorded": recorded, "peak": start + highest, "start": start}
    return result


@pytest.mark.parametrize("name", ["tl_h100_qwen.json.gz", "tl_mi300_ddp_resnet18.json.gz", "kineto_resnet50_w0.json.gz"])
def test_peaks_are_the_highest_total_and_what_a_replay_by_hand_finds(name: str) -> None:
    found, expected = memory(name), by_hand(name)
    assert set(found) == set(expected)
    for device, row in found.items():
        assert row["recorded_peak_bytes"] == expected[device]["recorded"]
        assert row["peak_bytes"] == expected[device]["peak"]
        assert row["start_bytes"] == expected[device]["start"]
        assert expected[device]["recorded"] in (None, row["peak_bytes"])
        assert sum(row["categories"].values()) == row["peak_bytes"]
        assert row["lower_bound"] is (expected[device]["recorded"] is None or device == "cpu")  # the trace began after the job


def test_the_snapshot_by_hand() -> None:
    class Plain(pickle.Unpickler):
        def find_class(self, module, name):
            raise AssertionError(f"{module}.{name}")

    content = Plain(io.BytesIO((REAL / "mosaic_snapshot.pickle").read_bytes())).load()
    blocks = [block for part in content["segments"] for block in part["blocks"] if block["state"] == "active_allocated"]
    total = highest = sum(block["size"] for block in blocks)
    assert total == 8704
    for entry in content["device_traces"][0]:
        total += {"alloc": entry["size"], "free_completed": -entry["size"]}[entry["action"]]
        highest = max(highest, total)
    (row,) = memory("mosaic_snapshot.pickle").values()
    assert (row["start_bytes"], row["peak_bytes"], row["end_bytes"]) == (8704, highest, 8704)
    assert sum(row["categories"].values()) == highest
    said = " ".join(row["notes"])
    assert "contradicts itself" in said
    assert "174,716,640" in said
    assert "8,704" in said


def test_the_raw_timeline_by_hand() -> None:
    rows = json.loads(text("hta_memory_timeline.raw.gz"))
    total = sum(size for time, _, size, _ in rows if time < 0)
    highest, moments = total, defaultdict(int)
    for time, _, size, _ in rows:
        if time >= 0:
            moments[time] += size
    for time in sorted(moments):
        total += moments[time]
        highest = max(highest, total)
    (row,) = memory("hta_memory_timeline.raw.gz").values()
    assert row["peak_bytes"] == highest == sum(row["categories"].values())
