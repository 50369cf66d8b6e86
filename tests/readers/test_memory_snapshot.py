"""Snapshot pickles: every protocol, every age, and nothing that is more than plain values."""

import gzip
import io
import os
import pickle
import pickletools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.memory.made import entry, segment, snapshot
from tracekit.errors import InputError
from tracekit.readers import memory_snapshot_pickle
from tracekit.readers import memory_snapshot_store as s
from tracekit.readers.compressed import TextStream
from tracekit.readers.memory_snapshot import read_snapshot
from tracekit.readers.memory_snapshot_pickle import read_pickle
from tracekit.readers.sources import Source
from tracekit.units import NULL

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
T = 1_700_000_000_000_000


def read(data: bytes):
    return read_pickle(TextStream(io.BytesIO(data)), "snap.pickle")


def value(reading, word: int):
    """A word as Python sees it; floats, bytes and huge numbers as None."""
    kind = word & 15
    if kind in (s.NONE, s.FLOAT, s.BYTES, s.HUGE):
        return None
    if kind == s.BOOL:
        return bool(word >> 4)
    if kind == s.INT:
        return word >> 4
    if kind == s.TEXT:
        return reading.strings[word >> 4]
    items = [value(reading, int(item)) for item in reading.items(word)]
    container = reading.kind(word)
    if container == s.DICT:
        return dict(zip(items[::2], items[1::2], strict=True))
    return items if container == s.LIST else set(items) if container == s.SET else tuple(items)


def plain(thing):
    """What ``value`` makes of a Python value."""
    if thing is None or isinstance(thing, float | bytes) or (type(thing) is int and not -(2**59) <= thing < 2**59):
        return None
    if isinstance(thing, dict):
        return {plain(key): plain(item) for key, item in thing.items()}
    return type(thing)(plain(item) for item in thing) if isinstance(thing, list | tuple | set) else thing


# Keys and texts without the words of snapshots, which are packed.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6).map(lambda text: "x" + text)
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | texts | st.floats() | st.binary(max_size=5)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=6) | st.dictionaries(texts, inner, max_size=6) | st.tuples(inner, inner), max_leaves=30
)


@given(values, st.sampled_from(range(3, pickle.HIGHEST_PROTOCOL + 1)))  # protocol 2 writes bytes as a call
@settings(deadline=None)
def test_plain_values_are_what_pickle_reads(thing, protocol) -> None:
    reading = read(pickle.dumps(thing, protocol))
    assert value(reading, reading.root) == plain(thing)


@given(
    st.lists(st.integers(-(2**60), 2**60) | st.from_regex(r"\A[a-z ]{0,9}\Z") | st.none() | st.booleans(), max_size=9),
    st.sampled_from([0, 1]),
)
@settings(deadline=None)
def test_the_oldest_protocols(thing, protocol) -> None:
    reading = read(pickle.dumps({"a": thing, "b": (thing, [thing])}, protocol))
    assert value(reading, reading.root) == plain({"a": thing, "b": (thing, [thing])})


@pytest.mark.parametrize("size", [5, 999, 1000, 1001, 5000])
def test_long_lists_and_dicts_come_in_batches(size: int) -> None:
    thing = {"list": list(range(size)), "dict": {f"k{i}": i for i in range(size)}}
    reading = read(pickle.dumps(thing))
    assert value(reading, reading.root) == thing


def test_a_set_and_shared_values() -> None:
    shared = ["one"]
    reading = read(pickle.dumps({"a": shared, "b": shared, "c": {1, 2}}))
    assert value(reading, reading.root) == {"a": ["one"], "b": ["one"], "c": {1, 2}}


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
    assert len(found.stacks.nodes) == 1 + 2 * 3


@pytest.mark.parametrize("chunk", [16, 64, 1000])
def test_where_the_text_is_cut_makes_no_difference(tmp_path, monkeypatch, chunk: int) -> None:
    data = pickle.dumps(WHOLE)
    expected = load(tmp_path, data)
    monkeypatch.setattr(memory_snapshot_pickle, "CHUNK", chunk)
    found = load(tmp_path, data)
    assert found.stacks.strings == expected.stacks.strings
    for one, other in zip(vars(found.devices[0].entries).values(), vars(expected.devices[0].entries).values(), strict=True):
        assert np.array_equal(one, other)


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
        (b"(S'ls'\no.", "makes an object"),
        (b"\x80\x02\x82\x01.", "registered extension"),
        (b"Pid\n.", "object from outside"),
        (b"\x80\x04NQ.", "object from outside"),
        (b"\x80\x05\x97.", "buffer from outside"),
        (b"\x80\x05\x96\x01\x00\x00\x00\x00\x00\x00\x00a.", "byte array"),
        (b"\x80\x04}}b.", "sets the state of an object"),
        (b"\x80\x04N)R.", "calls a function"),
    ],
)
def test_every_opcode_that_is_more_than_a_value_is_refused(tmp_path, data: bytes, said: str) -> None:
    with pytest.raises(InputError, match=said):
        load(tmp_path, data)


def test_every_opcode_of_the_library_is_known_one_way_or_the_other() -> None:
    from tracekit.readers.memory_snapshot_machine import NONE_SUCH, SIZES

    assert [op.name for op in pickletools.opcodes if SIZES[ord(op.code)] == NONE_SUCH] == []


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "truncated"),
        (b"\x80\x04", "truncated"),
        (pickle.dumps(WHOLE)[:-40], "truncated"),
        (b"PK\x03\x04rest", "is a zip archive"),
        (b"\xff\xff\xff", "not a pickle"),
        (b"\x80\x04.", "not a pickle"),
        (b"\x80\x04]]]a.", "not a pickle"),
        (b"\x80\x04h\x07.", "not a pickle"),
        (b"\x80\x04Nr\xff\xff\xff\xff.", "not a pickle"),
        (b"\x80\x04N\x94q\x00t.", "not a pickle"),
        (b"\x80\x04}(N\x85Nu0e.", "not a pickle"),
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff.", "not a pickle"),
        (b"\x80\x04\x8b\xff\xff\xff\x7f.", "not a pickle"),
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


def test_far_more_objects_than_a_snapshot_of_its_size_are_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(memory_snapshot_pickle, "_FREE_BYTES", 1 << 20)
    with pytest.raises(InputError, match="far more objects"):
        load(tmp_path, b"\x80\x04" + b"]" * 500_000 + b".")


@given(st.integers(0, 2000), st.binary(min_size=1, max_size=4))
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_is_a_sentence_or_a_snapshot_never_a_crash(tmp_path, place: int, noise: bytes) -> None:
    data = bytearray(pickle.dumps(WHOLE))
    place %= len(data)
    data[place : place + len(noise)] = noise
    try:
        load(tmp_path, bytes(data))
    except InputError as refused:
        assert "\n" not in str(refused)


def test_memory_stays_near_the_size_of_the_file() -> None:
    history = [entry("alloc", T + i, 512, 4096 * i, [("/a/model.py", i % 7, "forward")]) for i in range(50_000)]
    data = pickle.dumps(snapshot([history]))
    reading = read(data)
    kept = sum(column.nbytes for column in (reading.numbers, reading.codes, reading._words, reading._first, reading._kind))
    assert kept < 2 * len(data)
