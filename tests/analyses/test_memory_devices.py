"""Whole devices: allocators of the ranks, their contexts, other processes; what was not recorded is said to be."""

from tests.memory.made import MB
from tracekit.analyses.memory.devices import device_records, devices_table, outside
from tracekit.analyses.memory.rows import RankMemory
from tracekit.manifest import PINNED, DeviceUse
from tracekit.memory.summary import DeviceMemory


def rank(number: int, reserved: int, device: str = "cuda:0") -> RankMemory:
    return RankMemory(number, DeviceMemory(device, "events", 2 * MB, reserved_peak=reserved))


def test_the_parts_of_a_device_of_two_ranks_add_up_to_what_is_used():
    # rank 0 reserves 30 and holds 35, rank 1 reserves 10 and holds 13, another process holds 7; of 100, 45 are free
    uses = {
        0: [DeviceUse("cuda:0", 100 * MB, 45 * MB, 30 * MB, 35 * MB, 20 * MB)],
        1: [DeviceUse("cuda:0", 100 * MB, 45 * MB, 10 * MB, 13 * MB, 42 * MB)],
    }
    (record,) = records = device_records([rank(0, 32 * MB), rank(1, 10 * MB)], {0: "a", 1: "a"}, uses)
    assert record == {
        "host": "a",
        "device": "cuda:0",
        "total_bytes": 100 * MB,
        "allocators_bytes": 42 * MB,  # at their highest, which may be another moment
        "ranks": {"0": 32 * MB, "1": 10 * MB},
        "free_bytes": 45 * MB,
        "outside_bytes": 15 * MB,
        "contexts_bytes": 8 * MB,
        "other_processes_bytes": 7 * MB,
        "outside": None,
    }
    (finding,) = outside(records)
    assert (finding.severity, finding.value) == ("info", 0.15)
    assert finding.text.endswith(
        "outside of torch's allocator: 8 MB for CUDA contexts, libraries and NCCL of the job, 7 MB for other processes."
    )
    (shown,) = devices_table(records)
    assert shown.frame["others"].tolist() == [7 * MB]


def test_without_nvml_one_sum_is_known_and_said_to_be_one():
    uses = {0: [DeviceUse("cuda:0", 100 * MB, 20 * MB, 50 * MB)]}
    (record,) = records = device_records([rank(0, 50 * MB)], {}, uses)
    assert (record["outside_bytes"], record["contexts_bytes"], record["other_processes_bytes"]) == (30 * MB, None, None)
    assert record["outside"].startswith("not recorded: NVML")
    (finding,) = outside(records)
    assert (finding.severity, "which of them is not recorded" in finding.text) == ("warning", True)


def test_a_device_of_which_a_rank_told_nothing_is_not_split():
    uses = {0: [DeviceUse("cuda:0", 100 * MB, 45 * MB, 30 * MB, 35 * MB, 20 * MB)]}
    (record,) = records = device_records([rank(0, 32 * MB), rank(1, 10 * MB)], {}, uses)
    assert (record["outside_bytes"], record["free_bytes"]) == (None, 45 * MB)
    assert record["outside"].startswith("not recorded: the CUDA context")
    assert list(outside(records)) == []


def test_ranks_of_two_hosts_with_one_name_of_device_are_two_devices_and_the_host_is_none():
    rows = [rank(0, MB), rank(1, MB), RankMemory(0, DeviceMemory("cpu", "events", MB))]
    records = device_records(rows, {0: "a", 1: "b"})
    assert [(r["host"], r["device"], r["ranks"]) for r in records] == [("a", "cuda:0", {"0": MB}), ("b", "cuda:0", {"1": MB})]
    assert devices_table(records) == []


def test_pinned_memory_of_the_ranks_of_a_host_is_a_line_of_its_own():
    uses = {0: [DeviceUse(PINNED, reserved=3 * MB)], 1: [DeviceUse(PINNED, reserved=4 * MB)]}
    *_, record = records = device_records([rank(0, MB), rank(1, MB, "cuda:1")], {0: "a", 1: "a"}, uses)
    assert (record["device"], record["ranks"], record["allocators_bytes"]) == (PINNED, {"0": 3 * MB, "1": 4 * MB}, 7 * MB)
    assert (record["total_bytes"], record["outside_bytes"], len(records)) == (None, None, 3)
    (shown,) = devices_table(records)
    assert shown.frame["allocators"].tolist() == [MB, MB, 7 * MB]
