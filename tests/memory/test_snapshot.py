"""Timelines of snapshots, played backwards from their end."""

import pickle

import numpy as np
import pytest

from tests.memory.made import entry, segment, snapshot
from tracekit.manifest import Owners
from tracekit.memory.attribution import attribute_snapshot
from tracekit.memory.fragmentation import of_history, pool_reserved
from tracekit.memory.oom import out_of_memory
from tracekit.memory.peak import composition, holdings
from tracekit.memory.snapshot import Snapshot
from tracekit.memory.snapshot_timeline import timeline
from tracekit.memory.summary import of_snapshot
from tracekit.readers.memory_snapshot import read_snapshot
from tracekit.readers.sources import Source
from tracekit.units import NULL
from tracekit.vocabulary import CATEGORIES

A, B, C, D = 0x10000, 0x20000, 0x30000, 0x40000
T = 1_700_000_000_000_000
FORWARD = ("/job/model.py", 10, "forward")
BACKWARD = ("/job/train.py", 20, "backward")
STEP = ("/usr/lib/python3/site-packages/torch/optim/adam.py", 30, "step")


@pytest.fixture
def read(tmp_path):
    def load(content) -> Snapshot:
        path = tmp_path / "rank0_snapshot.pickle"
        path.write_bytes(pickle.dumps(content))
        return read_snapshot(Source(str(path), path.name, 0, 0))

    return load


def curves(found: Snapshot):
    (device,) = found.devices
    return timeline(device)


def frees(addr: int, size: int, time: int, completed: int | None = None) -> list[dict]:
    return [entry("free_requested", time, size, addr), entry("free_completed", completed or time, size, addr)]


def test_allocated_falls_with_the_request_and_active_with_its_completion(read) -> None:
    history = [entry("alloc", T, 1024, A), entry("alloc", T + 1, 512, B), *frees(A, 1024, T + 2, T + 3)]
    found = curves(read(snapshot([history], [segment(A, 1024, [(1024, "inactive")]), segment(B, 512, [(512, "active_allocated")])])))
    assert found.allocated.tolist() == [0, 1024, 1536, 512, 512]
    assert found.active.tolist() == [0, 1024, 1536, 1536, 512]
    assert found.reserved.tolist() == [1536] * 5


def test_blocks_older_than_the_recording_are_found_backwards(read) -> None:
    history = [entry("alloc", T, 512, B), *frees(C, 1024, T + 1)]
    segments = [
        segment(A, 2048, [(2048, "active_allocated")]),
        segment(B, 512, [(512, "active_allocated")]),
        segment(C, 1024, [(1024, "inactive")]),
    ]
    found = curves(read(snapshot([history], segments)))
    assert found.allocated.tolist() == [3072, 3584, 2560, 2560]
    assert found.notes == ["3.07 kB were allocated before recording began"]


def test_only_completed_frees(read) -> None:
    history = [entry("alloc", T, 512, A), entry("free_completed", T + 1, 512, A)]
    assert curves(read(snapshot([history], [segment(A, 512, [(512, "inactive")])]))).allocated.tolist() == [0, 512, 0]


def test_where_the_history_tells_what_was_asked_for_sizes_are_what_was_given(read) -> None:
    history = [entry("alloc", T, 100, A), entry("alloc", T + 1, 700, B), *frees(B, 700, T + 2)]
    found = curves(read(snapshot([history], [segment(A, 512, [(512, "active_allocated")]), segment(B, 1024, [(1024, "inactive")])])))
    assert found.allocated.tolist() == [0, 512, 1536, 512, 512]


def test_a_block_whose_allocation_the_ring_buffer_dropped_begins_where_the_one_before_it_ended(read) -> None:
    history = [entry("alloc", T, 512, A), *frees(A, 512, T + 1), entry("alloc", T + 2, 512, B)]
    segments = [segment(A, 512, [(512, "active_allocated")]), segment(B, 512, [(512, "active_allocated")])]
    assert curves(read(snapshot([history], segments))).allocated.tolist() == [0, 512, 512, 512, 1024]


def test_a_history_that_the_end_contradicts_is_said(read) -> None:
    found = curves(read(snapshot([[entry("alloc", T, 512, A)]], [segment(A, 512, [(512, "inactive")])])))
    assert "it contradicts itself" in found.notes[0]


def test_more_allocated_than_the_segments_hold_is_said_and_nothing_is_given(read) -> None:
    history = [entry("alloc", T, 4096, A), *frees(A, 4096, T + 1)]
    found = read(snapshot([history], [segment(B, 512, [(512, "inactive")])]))
    assert (curves(found).reserved == NULL).all()
    assert "more is allocated than its segments hold" in curves(found).notes[-1]
    (memory,) = of_snapshot(found)
    assert memory.fragmentation is None
    assert memory.reserved_peak is None


def test_expandable_segments_grow_and_shrink(read) -> None:
    history = [
        entry("segment_map", T, 2048, A), entry("alloc", T + 1, 2048, A), entry("segment_map", T + 2, 4096, A + 2048),
        entry("alloc", T + 3, 3072, A + 2048), *frees(A + 2048, 3072, T + 4), entry("segment_unmap", T + 5, 4096, A + 2048),
    ]  # fmt: skip
    found = read(snapshot([history], [segment(A, 2048, [(2048, "active_allocated")])]))
    assert curves(found).reserved.tolist() == [0, 2048, 2048, 6144, 6144, 6144, 6144, 2048]
    fragments = of_history(found.devices[0], curves(found), found.pools, 3)
    assert fragments is not None
    assert (fragments.reserved, fragments.active, fragments.free, fragments.largest) == (6144, 5120, 1024, 1024)


def test_fragmentation_is_what_lies_between_live_blocks_and_not_in_private_pools(read) -> None:
    history = [
        entry("segment_alloc", T, 4096, A, pool_id=(0, 0)), entry("segment_alloc", T + 1, 8192, B, pool_id=(1, 0)),
        entry("alloc", T + 2, 1024, A, pool_id=(0, 0)), entry("alloc", T + 3, 512, A + 2048, pool_id=(0, 0)),
        entry("alloc", T + 4, 512, B, pool_id=(1, 0)),
    ]  # fmt: skip
    segments = [
        segment(A, 4096, [(1024, "active_allocated"), (1024, "inactive"), (512, "active_allocated"), (1536, "inactive")]),
        segment(B, 8192, [(512, "active_allocated"), (7680, "inactive")], pool=(1, 0)),
    ]
    found = read(snapshot([history], segments))
    fragments = of_history(found.devices[0], curves(found), found.pools, 4)
    assert fragments is not None
    assert (fragments.free, fragments.private, fragments.largest) == (10240, 7680, 1536)
    assert fragments.share == (10240 - 7680) / 12288
    assert pool_reserved(found.devices[0], found.pools) == {"(0, 0)": 4096, "(1, 0)": 8192}


def test_neighbouring_segments_are_not_one_free_piece(read) -> None:
    history = [entry("segment_alloc", T, 1024, A), entry("segment_alloc", T + 1, 2048, A + 1024), entry("oom", T + 2, 3072, device_free=64)]
    found = read(snapshot([history], [segment(A, 1024, [(1024, "inactive")]), segment(A + 1024, 2048, [(2048, "inactive")])]))
    (failure,) = out_of_memory(found, found.devices[0], curves(found))
    assert (failure.requested, failure.free, failure.reserved, failure.allocated, failure.largest) == (3072, 64, 3072, 0, 2048)
    assert failure.reason().endswith(
        "in 2 pieces, the largest free piece was 2.05 kB; the rest is enough, but not in one piece: fragmentation"
    )


def test_a_failed_request_is_no_memory_in_use(read) -> None:
    history = [entry("alloc", T, 512, A), entry("oom", T + 1, 10**9, frames=[STEP], device_free=100), entry("alloc", T + 2, 512, B)]
    found = read(snapshot([history], [segment(A, 512, [(512, "active_allocated")]), segment(B, 512, [(512, "active_allocated")])]))
    assert curves(found).allocated.tolist() == [0, 512, 512, 1024]
    (failure,) = out_of_memory(found, found.devices[0], curves(found))
    assert failure.frame == "adam.py:30 step"


def test_a_snapshot_without_history_knows_its_end_and_no_peak(read) -> None:
    (memory,) = of_snapshot(read(snapshot([[], []], [segment(A, 1024, [(512, "active_allocated"), (512, "inactive")], device=1)])))
    assert (memory.device, memory.peak, memory.end, memory.reserved_end) == ("cuda:1", None, 512, 1024)
    assert "history was not recorded" in memory.notes[0]


def test_devices_are_kept_apart(read) -> None:
    history = [entry("alloc", T, 512, A)]
    segments = [segment(A, 512, [(512, "active_allocated")], device=2), segment(B, 2048, [(2048, "active_allocated")])]
    found = of_snapshot(read(snapshot([[], [], history], segments)))
    assert [(memory.device, memory.peak, memory.end) for memory in found] == [("cuda:0", None, 2048), ("cuda:2", 512, 512)]


def test_owners_by_stack(read) -> None:
    gather = ("/x/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 5, "foreach_all_gather_copy_out")
    history = [
        entry("alloc", T, 512, A, [("/x/torch/nn/modules/module.py", 1, "_apply"), ("/job/train.py", 1, "main")]),
        entry("alloc", T + 1, 1024, B, [FORWARD, ("/job/train.py", 9, "main")]),
        entry("alloc", T + 2, 2048, C, [gather, FORWARD]),
        *frees(C, 2048, T + 3),
        entry("alloc", T + 4, 4096, D, [BACKWARD]),
        *frees(B, 1024, T + 5),
        entry("alloc", T + 6, 512, 0x50000, [STEP]),
        entry("alloc", T + 7, 512, 0x60000, [("/job/train.py", 99, "log")]),
    ]
    live = [(A, 512), (D, 4096), (0x50000, 512), (0x60000, 512)]
    segments = [segment(at, size, [(size, "active_allocated")]) for at, size in live]
    found = read(snapshot([history], segments))
    attributed, _, _ = attribute_snapshot(found, found.devices[0])
    ownership = attributed.ownership
    where = attributed.timeline.blocks.address[ownership.block].tolist()
    assert dict(zip(where, (CATEGORIES[code] for code in ownership.category.tolist()), strict=True)) == {
        A: "parameters",
        B: "activations",
        C: "gathered_parameters",
        D: "gradients",
        0x50000: "unattributed",  # the optimizer's step is where the history ends
        0x60000: "unattributed",
    }
    names = {h.category: h.name for h in holdings(attributed, 2)}
    assert names == {"parameters": "train.py:1 main", "activations": "model.py:10 forward", "gathered_parameters": "model.py:10 forward"}


def test_where_most_allocations_have_a_stack_those_without_are_autograd_s(read) -> None:
    history = [
        entry("alloc", T, 512, A, [FORWARD]),
        entry("alloc", T + 1, 512, B, [FORWARD]),
        entry("alloc", T + 2, 512, C),
        *frees(A, 512, T + 3),
        entry("alloc", T + 4, 512, D, [STEP]),
        entry("alloc", T + 5, 512, A, [FORWARD]),
    ]
    found = read(snapshot([history], [segment(at, 512, [(512, "active_allocated")]) for at in (A, B, C, D)]))
    attributed, _, _ = attribute_snapshot(found, found.devices[0])
    assert composition(attributed, 2)["gradients"] == 512


def test_owners_by_annotations_and_by_what_the_user_attached(read) -> None:
    history = [
        entry("alloc", T + 10, 512, A, user_metadata="forward"),
        entry("alloc", T + 20, 512, B),
        entry("alloc", T + 30, 512, C, user_metadata="backward"),
        *frees(A, 512, T + 40),
        entry("alloc", T + 50, 512, D, user_metadata="optimizer"),
        *frees(B, 512, T + 60),
        *frees(C, 512, T + 61),
        *frees(D, 512, T + 62),
    ]
    marks = [
        {"device": 0, "time_us": T + 15, "stage": "START", "name": "FSDP::all_gather_copy_out (layers.0)"},
        {"device": 0, "time_us": T + 25, "stage": "END", "name": "FSDP::all_gather_copy_out (layers.0)"},
    ]
    found = read(snapshot([history], [segment(A, 8192, [(8192, "inactive")])], marks))
    attributed, _, _ = attribute_snapshot(found, found.devices[0])
    assert {k: v for k, v in composition(attributed, 1).items() if v} == {"activations": 512, "gathered_parameters": 512}
    assert [h.unit for h in holdings(attributed, 1) if h.category == "gathered_parameters"] == ["layers.0"]


def test_a_manifest_tells_more_than_stacks(read) -> None:
    history = [entry("alloc", T, 512, A, [FORWARD]), entry("alloc", T + 5, 512, B, [FORWARD])]
    found = read(snapshot([history], [segment(A, 512, [(512, "active_allocated")]), segment(B, 512, [(512, "active_allocated")])]))
    told = Owners([(T + 1) * 1000], [A], [512], [0], [1], [2], ["parameters", "w", ""])
    (memory,) = of_snapshot(found, told)
    assert memory.source == "manifest+snapshot"
    assert memory.categories["parameters"] == 512


def test_a_manifest_changes_owners_of_a_snapshot_and_no_sizes(read) -> None:
    found = read(snapshot([[entry("alloc", T, 512, B)]], [segment(at, 512, [(512, "active_allocated")]) for at in (A, B)]))
    told = Owners([(T - 1) * 1000, (T + 1) * 1000], [A, B], [512, 512], [0, 0], [1, 1], [2, 2], ["gradients", "w", ""])
    (memory,) = of_snapshot(found, told)
    assert (memory.peak, memory.categories["gradients"]) == (1024, 1024)


def test_a_long_history_is_what_a_plain_replay_finds(read) -> None:
    rng = np.random.default_rng(3)
    live: dict[int, int] = {}
    history, total, expected = [], 0, [0]
    for i in range(2000):
        if live and rng.random() < 0.5:
            address = list(live)[int(rng.integers(len(live)))]
            size = live.pop(address)
            history += frees(address, size, T + i)
            total -= size
            expected += [total, total]
        else:
            address, size = A + i * 4096, 512 * int(rng.integers(1, 8))
            live[address] = size
            history.append(entry("alloc", T + i, size, address))
            total += size
            expected.append(total)
    segments = [
        segment(A + i * 4096, 4096, [(live.get(A + i * 4096, 4096), "active_allocated" if A + i * 4096 in live else "inactive")])
        for i in range(2000)
    ]
    found = curves(read(snapshot([history], segments)))
    assert found.allocated.tolist() == expected
    assert found.reserved.tolist() == [2000 * 4096] * len(expected)


def test_a_block_older_than_the_history_has_the_owner_of_the_stack_that_it_keeps(read) -> None:
    parts = [segment(at, 512, [(512, "active_allocated")]) for at in (A, B, C, D)]
    apply = ("/x/torch/nn/modules/module.py", 1, "_apply")
    for part, (file, line, name) in zip(parts, [apply, STEP, FORWARD], strict=False):
        part["blocks"][0]["frames"] = [{"filename": file, "line": line, "name": name}]
    found = read(snapshot([[entry("alloc", T, 512, 0x50000)]], [*parts, segment(0x50000, 512, [(512, "active_allocated")])]))
    attributed, _, _ = attribute_snapshot(found, found.devices[0])
    assert {(h.category, h.name) for h in holdings(attributed, -1)} == {
        ("parameters", "module.py:1 _apply"),
        ("optimizer_state", "adam.py:30 step"),
        ("before_recording", "model.py:10 forward"),
        ("before_recording", ""),
    }


def test_where_the_history_ends_in_the_optimizer_what_it_keeps_of_every_parameter_is_state(read) -> None:
    history = [
        entry("alloc", T, 512, A, [FORWARD]),
        entry("alloc", T + 1, 512, B, [BACKWARD]),
        entry("alloc", T + 2, 1024, C, [STEP]),
        entry("alloc", T + 3, 1024, D, [STEP]),
    ]
    parts = [segment(at, size, [(size, "active_allocated")]) for at, size in ((A, 512), (B, 512), (C, 1024), (D, 1024))]
    found = read(snapshot([history], parts))
    attributed, _, _ = attribute_snapshot(found, found.devices[0])
    assert composition(attributed, 3)["optimizer_state"] == 2048


def test_roundup_power2_divisions_are_the_allocator_s() -> None:
    from tracekit.memory.snapshot_timeline import rounded

    sizes = np.array([0, 1, 600, 1 << 20, (1 << 20) + 1, 1200 << 10, 3 << 20, (5 << 20) + 7], np.int64)
    assert rounded(sizes, {}).tolist() == [0, 512, 1024, 1 << 20, (1 << 20) + 512, 1200 << 10, 3 << 20, (5 << 20) + 512]
    fourths = {"roundup_power2_divisions": {str(1 << i): 4 for i in range(16)}}
    assert rounded(sizes, fourths).tolist() == [0, 512, 1024, 1 << 20, 5 << 18, 5 << 18, 3 << 20, 6 << 20]
