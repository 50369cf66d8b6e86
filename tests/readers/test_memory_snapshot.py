"""Snapshot pickles: every protocol, every age, and nothing that is more than plain values."""

import gzip
import os
import pickle
import resource

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.memory.made import entry, segment, snapshot
from tracekit.errors import InputError
from tracekit.executors import memory
from tracekit.job.load import LoadOptions, load_job
from tracekit.readers import memory_snapshot_child, memory_snapshot_process
from tracekit.readers.memory_snapshot import read_snapshot
from tracekit.readers.sources import Source
from tracekit.units import NULL

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
T = 1_700_000_000_000_000


HISTORY = [
    entry("segment_alloc", T, 4096, 0x7F0000000000),
    entry(
        "alloc",
        T + 1,
        1024,
        0x7F0000000000,
        [("/a/model.py", 3, "forward"), ("/a/train.py", 9, "main")],
        user_metadata="epoch 1",
        pool_id=(0, 0),
    ),
    entry("alloc", T + 2, 512, 0x7F0000000400, [("/a/other.py", 4, "f"), ("/a/train.py", 9, "main")], new_key={"a": [1, 2.5]}),
    entry("oom", T + 3, 1 << 30, frames=[("/a/model.py", 3, "forward")], device_free=77),
    entry("free_requested", T + 4, 1024, 0x7F0000000000),
    entry("a_future_action", T + 5, 1, 0x1),
]
WHOLE = snapshot(
    [[], HISTORY], [segment(0x7F0000000000, 4096, [(1024, "inactive"), (512, "active_allocated"), (2560, "inactive")], device=1)]
)


def load(tmp_path, data: bytes, name: str = "snap.pickle"):
    path = tmp_path / name
    path.write_bytes(data)
    return read_snapshot(Source(str(path), name, len(data), 0))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_every_protocol_gives_the_same_columns(tmp_path, protocol: int, pack) -> None:
    found = load(tmp_path, pack(pickle.dumps(WHOLE, protocol)))
    (device,) = found.devices
    assert device.index == 1
    entries = device.entries
    assert entries.size.tolist() == [4096, 1024, 512, 1 << 30, 1024, 1]
    assert entries.time.tolist() == [(T + i) * 1000 for i in range(6)]
    assert entries.address.tolist() == [0x7F0000000000, 0x7F0000000000, 0x7F0000000400, NULL, 0x7F0000000000, 1]
    assert entries.free.tolist() == [NULL] * 3 + [77] + [NULL] * 2
    assert [found.stacks.describe(i) for i in found.stacks.innermost(entries.stack)] == [
        "",
        "model.py:3 forward",
        "other.py:4 f",
        "model.py:3 forward",
        "",
        "",
    ]
    assert [found.stacks.strings[i] if i >= 0 else None for i in entries.note.tolist()] == [None, "epoch 1", None, None, None, None]
    assert [found.pools[i] if i >= 0 else None for i in entries.pool.tolist()] == [None, (0, 0), None, None, None, None]
    assert device.state.size.tolist() == [1024, 512, 2560]
    assert device.state.address.tolist() == [0x7F0000000000, 0x7F0000000400, 0x7F0000000600]
    assert device.state.allocated.tolist() == [False, True, False]
    assert (device.segments.size.tolist(), device.segments.claimed.tolist()) == ([4096], [512])


def test_equal_frames_and_stacks_are_kept_once(tmp_path) -> None:
    history = [entry("alloc", T + i, 512, i + 1, [("/a/model.py", i % 3, "forward"), ("/a/train.py", 9, "main")]) for i in range(100)]
    found = load(tmp_path, pickle.dumps(snapshot([history])))
    assert len(found.stacks.frames) == 4
    assert found.stacks.start.tolist() == [0, 0, 2, 4, 6]  # the empty stack, then three of two frames


def test_a_bare_list_of_segments_is_a_snapshot_without_history(tmp_path) -> None:
    found = load(tmp_path, pickle.dumps([segment(4096, 512, [(512, "active_allocated")])]))
    assert found.devices[0].end_allocated == 512
    assert "history was not recorded" in found.problems[0]


def test_old_blocks_have_a_history_instead_of_frames_and_no_address(tmp_path) -> None:
    part = segment(4096, 1024, [(512, "inactive"), (512, "active_allocated")])
    for block in part["blocks"]:
        del block["frames"], block["address"]
    part["blocks"][1]["history"] = [{"real_size": 500, "addr": 1, "frames": [{"filename": "/a/old.py", "line": 7, "name": "g"}]}]
    found = load(tmp_path, pickle.dumps(snapshot([], [part])))
    state = found.devices[0].state
    assert state.address.tolist() == [4096, 4608]
    assert [found.stacks.describe(i) for i in found.stacks.innermost(state.stack)] == ["", "old.py:7 g"]


def test_annotations_pair_by_name(tmp_path) -> None:
    marks = [
        {"name": "outer", "stage": "START", "time_us": T, "device": 0},
        {"name": "inner", "stage": "START", "time_us": T + 1, "device": 0},
        {"name": "inner", "stage": "END", "time_us": T + 2, "device": 0},
        {"name": "lost", "stage": "END", "time_us": T + 3, "device": 0},
        {"name": "open", "stage": "START", "time_us": T + 4, "device": 0},
    ]
    found = load(tmp_path, pickle.dumps(snapshot([[entry("alloc", T, 512, 1)]], [], marks)))
    names = [found.stacks.strings[code] for code in found.ranges.name.tolist()]
    spans = [(int(a) // 1000 - T, int(b) // 1000 - T) for a, b in zip(found.ranges.start, found.ranges.end, strict=True)]
    assert dict(zip(names, spans, strict=True)) == {"outer": (0, 4), "inner": (1, 2), "open": (4, 4)}


def test_entries_that_cannot_be_true_are_left_out_and_counted(tmp_path) -> None:
    history = [entry("alloc", T, 512, 1), entry("alloc", -5, 512, 2), {"action": "alloc", "addr": 3}, entry("alloc", T, -1, 4)]
    found = load(tmp_path, pickle.dumps(snapshot([history])))
    assert len(found.devices[0].entries) == 1
    assert "3 entries" in found.problems[0]


def test_a_history_without_times_counts_entries(tmp_path) -> None:
    history = [entry("alloc", 0, 512, 1), entry("alloc", 0, 1024, 4096)]
    for one in history:
        del one["time_us"]
    found = load(tmp_path, pickle.dumps(snapshot([history])))
    assert not found.timed
    assert found.devices[0].entries.time.tolist() == [1000, 2000]
    assert "has no times" in found.problems[0]


def test_pools_written_as_lists(tmp_path) -> None:
    parts = [segment(4096, 512, [(512, "inactive")], pool=pool) for pool in ([0, 0], [1, 0], [1, 0])]
    found = load(tmp_path, pickle.dumps(snapshot([], parts)))
    assert [found.pools[code] for code in found.devices[0].segments.pool.tolist()] == [(0, 0), (1, 0), (1, 0)]


def test_sizes_beyond_any_device_are_no_sizes(tmp_path) -> None:
    found = load(tmp_path, pickle.dumps(snapshot([[entry("alloc", T, 2**58, 1), entry("alloc", T, 8, 2)]], [segment(1, 2**50, [])])))
    assert found.devices[0].entries.size.tolist() == [8]
    assert found.devices[0].end_reserved == 0


def test_segments_that_claim_what_their_blocks_do_not_hold(tmp_path) -> None:
    part = segment(4096, 1024, [(1024, "active_allocated")]) | {"active_size": 5}
    found = load(tmp_path, pickle.dumps(snapshot([[entry("alloc", T, 1024, 4096)]], [part])))
    assert "it contradicts itself" in found.problems[0]
    assert found.devices[0].end_allocated == 1024


class Calls:
    def __init__(self, *what) -> None:
        self.what = what

    def __reduce__(self):
        return self.what


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_pickle_that_calls_a_function_is_refused_and_calls_nothing(tmp_path, protocol: int) -> None:
    marker = tmp_path / "called"
    data = pickle.dumps({"segments": [Calls(os.mkdir, (str(marker),))]}, protocol)
    with pytest.raises(InputError) as refused:
        load(tmp_path, data)
    assert not marker.exists()
    assert "\n" not in str(refused.value)
    assert "mkdir" in str(refused.value)
    assert str(refused.value).startswith("snap.pickle was not opened: the pickle wants ")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02ls\x85R.", "wants os.system"),
        (b"cos\nsystem\n(S'ls'\ntR.", "wants os.system"),
        (b"(ios\nsystem\n.", "wants os.system"),
        (b"(S'ls'\no.", "not a pickle of plain values"),
        (b"\x80\x02\x82\x01.", "not a pickle of plain values"),
        (b"Pid\n.", "object from outside"),
        (b"\x80\x04NQ.", "object from outside"),
        (b"\x80\x05\x97.", "not a pickle of plain values"),
        (b"\x80\x05\x96\x01\x00\x00\x00\x00\x00\x00\x00a.", "not of a memory snapshot"),
        (b"\x80\x04}}b.", "not a pickle of plain values"),
        (b"\x80\x04N)R.", "not a pickle of plain values"),
        (b"\x80\x04\x8c\x01x)\x81.", "not a pickle of plain values"),
    ],
)
def test_every_opcode_that_is_more_than_a_value_is_refused(tmp_path, data: bytes, said: str) -> None:
    with pytest.raises(InputError, match=said) as refused:
        load(tmp_path, data)
    assert "\n" not in str(refused.value)


DEEP = b"\x80\x04" + b")" + b"\x85" * 500_000  # a tuple in a tuple in a tuple ...


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x80\x04" + b"]" * 3_000_000 + b".", "needs more than 100 MB of memory"),  # a byte of text, 72 of memory
        (b"\x80\x04Nr\xff\xff\xff\x7f.", "damaged"),  # a place in the memo far out
        (b"\x80\x04B\xff\xff\xff\x7f" + b"x", "damaged"),  # a length that no text follows
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f", "damaged"),
        (DEEP + b".", "not of a memory snapshot"),
        (b"\x80\x04}" + DEEP[2:] + b"Ns.", "damaged"),  # its hash needs more stack than there is: only the child ends
        (b"\x80\x04I" + b"9" * 100_000 + b"\n.", "damaged"),
        (gzip.compress(b"\x80\x04" + b"]" * 50_000_000), "needs more than 100 MB of memory"),
    ],
    ids=["lists", "memo", "bytes", "bytes8", "deep", "deep key", "digits", "packed"],
)
def test_what_would_use_up_memory_or_the_stack_is_one_line(tmp_path, data: bytes, said: str) -> None:
    path = tmp_path / "snap.pickle"
    path.write_bytes(data)
    with pytest.raises((InputError, MemoryError), match=said) as refused:
        read_snapshot(Source(str(path), path.name, len(data), 0), memory=100_000_000)
    assert "\n" not in str(refused.value)


def test_what_takes_too_long_is_one_line(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(memory_snapshot_process, "SECONDS", 1)
    monkeypatch.setattr(memory_snapshot_process, "SECONDS_PER_MB", 0)
    frames = b"]q\x01(" + b"N" * 100_000 + b"e"  # one list ...
    data = b"\x80\x02}X\x08\x00\x00\x00segments]sX\x0d\x00\x00\x00device_traces](](" + (
        b"}(X\x06\x00\x00\x00actionNX\x06\x00\x00\x00frames" + frames + b"u"
        + b"}(X\x06\x00\x00\x00actionNX\x06\x00\x00\x00framesh\x01u" * 20_000  # ... in very many entries
    ) + b"ees."  # fmt: skip
    with pytest.raises(InputError, match="takes more than 1 s to read"):
        load(tmp_path, data)


def test_the_child_limits_itself_and_its_missing_value_is_ours() -> None:
    assert memory_snapshot_child.NULL == NULL
    before = [resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_CORE)]
    try:
        memory_snapshot_child.limit(1 << 50, 1 << 30)
        assert resource.getrlimit(resource.RLIMIT_AS)[0] == 1 << 50
        assert resource.getrlimit(resource.RLIMIT_CPU)[0] == 1 << 30
    finally:
        for kind, limits in zip((resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_CORE), before, strict=True):
            resource.setrlimit(kind, limits)


def test_the_memory_of_a_container_counts(tmp_path, monkeypatch) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    monkeypatch.setattr(memory, "_CGROUPS", (str(tmp_path / "memory.max"), str(tmp_path / "absent")))
    assert memory.machine_memory() == 1_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.machine_memory() > 1_000_000


def test_a_snapshot_that_needs_more_than_the_limit_is_one_line_and_the_others_are_read(tmp_path) -> None:
    entries = [entry("alloc", T + i, 512, 4096 * i) for i in range(150_000)]
    for rank, history in enumerate([entries, HISTORY]):
        (tmp_path / f"rank{rank}_snapshot.pickle").write_bytes(pickle.dumps(snapshot([history])))
    job = load_job([str(tmp_path)], LoadOptions(memory_limit=50_000_000), {})
    assert job.ranks == [1]
    (lost,) = [entry for entry in job.coverage if entry.status == "skipped"]
    assert "rank0_snapshot.pickle needs more than 50 MB of memory to be read: raise --memory-limit" in lost.problems[0]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "truncated"),
        (b"\x80\x04", "truncated"),
        (pickle.dumps(WHOLE)[:-40], "truncated"),
        (b"PK\x03\x04rest", "is a zip archive"),
        (b"\xff\xff\xff", "not a pickle"),
        (b"\x80\x04.", "not a pickle"),
        (b"\x80\x04]]]a.", "not of a memory snapshot"),
        (b"\x80\x04h\x07.", "not a pickle"),
        (b"\x80\x04h\xff.", "not a pickle"),
        (b"\x80\x04N\x94q\x00t.", "not a pickle"),
        (b"\x80\x04}(N\x85Nu0e.", "not a pickle"),
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff.", "not a pickle"),
        (b"\x80\x04\x8b\xff\xff\xff\x7f.", "truncated"),
        (pickle.dumps([1, 2]), "not of a memory snapshot"),
        (pickle.dumps({"weights": 1}), "not of a memory snapshot"),
        (pickle.dumps("segments"), "not of a memory snapshot"),
    ],
)
def test_what_is_no_snapshot_is_one_line(tmp_path, data: bytes, said: str) -> None:
    with pytest.raises(InputError, match=said) as refused:
        load(tmp_path, data)
    assert "\n" not in str(refused.value)


def test_a_list_within_itself_does_not_hang(tmp_path) -> None:
    knot: list = []
    knot.append(knot)
    found = load(tmp_path, pickle.dumps({"segments": knot, "device_traces": [knot]}))
    assert found.devices == []


@given(st.integers(0, 2000), st.binary(min_size=1, max_size=4))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_is_a_sentence_or_a_snapshot_never_a_crash(tmp_path, place: int, noise: bytes) -> None:
    data = bytearray(pickle.dumps(WHOLE))
    place %= len(data)
    data[place : place + len(noise)] = noise
    try:
        load(tmp_path, bytes(data))
    except InputError as refused:
        assert "\n" not in str(refused)
