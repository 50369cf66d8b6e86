"""Buffers, cuts and threads: however the text is cut, nothing is lost; whatever it is, reading ends."""

import gzip
import io
import json
import random
import resource

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.builder import Trace
from tests.readers.made import assert_same, read, texts
from tracekit.errors import InputError
from tracekit.readers import compressed, stream, worker
from tracekit.readers.compressed import TextStream
from tracekit.readers.recognise import looks_like_trace


def event(name, **more):
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 2, "ts": 5, "dur": 1, **more}


def document(events, **top):
    return json.dumps({"schemaVersion": 1, "traceEvents": events, **top})


FAKES = ['}, {"ph": "X"', '"},{"name": "', "},{", '}]}, {"cat":', "\\", '\\"}, {"ts": 1', "é"]
fake_names = st.lists(st.sampled_from(FAKES), max_size=4).map("".join)


@settings(deadline=None, max_examples=60)
@given(st.lists(fake_names, min_size=1, max_size=30), st.integers(40, 400), st.integers(1, 4))
def test_text_that_looks_like_the_start_of_an_event_is_no_cut(names, chunk, threads):
    text = document([event(name, args={"l": [{"ph": name}, {"ph": name}]}) for name in names])
    assert_same(read(text, chunk=chunk, threads=threads), oracle.tables(text))


def test_what_a_wrong_cut_found_says_nothing_of_the_file():
    inside = '"},{"ph":"X","name":"C:\\\\mm\\q' + "é" * 3
    text = document([event(f"n{i} {inside} \\n", args={"l": [{"ph": "X", "pid": i, "tid": 1, "name": "ghost"}] * 3}) for i in range(40)])
    tables = read(text, chunk=150, threads=3)
    assert_same(tables, oracle.tables(text))
    assert tables.coverage.problems == []


@pytest.mark.parametrize("first", ["dur", "args", "bp", "unknown_key"])
def test_events_may_begin_with_any_key(first):
    events = [{first: 3, **event(f"n{i}")} | ({"args": {"Seq": i}} if first == "args" else {}) for i in range(300)]
    text = document(events)
    assert_same(read(text, chunk=1000), oracle.tables(text))


BROKEN = [
    'a "b" , {"ph": "X"}, {"ph": "q"} c',
    'x }, {"ph":"X", "name" : "z  ',
    'say "hi", \\q and }, \t',
    "plain",
    "\x01 },{",
    '", "dur": NaN, "args": {"k": "',
]


@pytest.mark.parametrize("end", ["]}", '], "x": 1}', "", ', {"ph": "X", "na', " \0\0\0"])
def test_the_answer_does_not_depend_on_where_the_text_was_cut(end):
    events = [f'{{"ph": "X", "cat": "cpu_op", "name": "{BROKEN[i % 6]}", "pid": 1, "tid": 2, "ts": {i}, "dur": 1}}' for i in range(24)]
    text = '{"schemaVersion": 1, "traceEvents": [' + ",\n  ".join(events) + end
    whole = read(text, chunk=1 << 20, threads=1)
    assert whole.coverage.problems
    for chunk in range(40, 600, 47):
        cut = read(text, chunk=chunk, threads=1 + chunk % 3)
        assert (texts(cut, cut.name), cut.ts.tolist()) == (texts(whole, whole.name), whole.ts.tolist()), chunk
        assert (cut.coverage.problems, cut.coverage.status) == (whole.coverage.problems, whole.coverage.status), chunk


def test_what_stands_after_the_list_is_read_too():
    text = document([event(f"n{i}") for i in range(50)], baseTimeNanoseconds=10**18, note="x" * 5000)
    tables = read(text, chunk=700)
    assert set(tables.ts.tolist()) == {10**18 + 5000}
    assert tables.metadata["note"] == "x" * 5000


def test_an_event_longer_than_a_buffer_is_read(monkeypatch):
    text = document([event("a"), event("b" * 50_000), event("c")])
    assert_same(read(text, chunk=1000), oracle.tables(text))


def test_an_event_that_is_too_long_ends_the_reading(monkeypatch):
    monkeypatch.setattr(stream, "LONGEST", 20_000)
    tables = read(document([event("a"), event("b" * 50_000), event("c")]), chunk=1000)
    assert texts(tables, tables.name) == ["a"]
    assert tables.coverage.status == "truncated"
    assert any("is longer than" in p for p in tables.coverage.problems)


def test_too_long_a_head_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(stream, "LONGEST", 20_000)
    with pytest.raises(InputError, match="no events"):
        read(json.dumps({"a": "x" * 50_000, "traceEvents": [event("a")]}), chunk=1000)


def test_a_long_tail_is_not_read_to_its_end(monkeypatch):
    for limit in ("LONGEST", "LONGEST_TAIL"):
        monkeypatch.setattr(stream, limit, 20_000)
    tables = read(document([event("a")], note="x" * 500_000, later=1), chunk=1000)
    assert texts(tables, tables.name) == ["a"]
    assert "later" not in tables.metadata
    assert tables.coverage.status != "truncated"


def test_where_everything_is_broken_reading_ends(monkeypatch):
    monkeypatch.setattr(worker, "LEAST_WORK", 3000)
    whole = [json.dumps(event("w"))] * 10
    broken = [json.dumps(event("b")).replace('"b"', '"b"b"')] * 100
    text = '{"traceEvents": [' + ",".join([*whole, *broken, *whole]) + "]}"
    tables = read(text, chunk=2000)
    assert 10 < len(tables) < 60
    assert {len(read(text, chunk=chunk, threads=chunk % 3 + 1)) for chunk in (130, 500, 3000, 10**6)} == {len(tables)}
    assert tables.coverage.status == "truncated"
    assert any("profile again" in p for p in tables.coverage.problems)
    many = read('{"traceEvents": [' + ",".join([*whole * 80, *broken[:50], *whole]) + "]}", chunk=2000)
    assert len(many) == 860


def stream_of(data, **options):
    text = TextStream(io.BytesIO(data), **options)
    buffer = bytearray(1 << 16)
    parts = []
    while count := text.fill(memoryview(buffer)):
        parts.append(bytes(buffer[:count]))
    text.close()
    return b"".join(parts), text.damage


PACKS = {
    "plain": lambda b: b,
    "gzip": gzip.compress,
    "members": lambda b: b"".join(gzip.compress(b[i : i + 30_000]) for i in range(0, len(b), 30_000)),
    "twice": lambda b: gzip.compress(gzip.compress(b)),
    "three times": lambda b: gzip.compress(gzip.compress(gzip.compress(b))),
    "zstd": zstandard.ZstdCompressor().compress,
    "frames": lambda b: zstandard.ZstdCompressor().compress(b[:70_000]) + zstandard.ZstdCompressor().compress(b[70_000:]),
    "zstd in gzip": lambda b: gzip.compress(zstandard.ZstdCompressor().compress(b)),
}
DATA = b"".join(b'{"n": %d},' % (i * i % 9973) for i in range(20_000))


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("pack", PACKS.values(), ids=PACKS)
def test_every_packing_is_undone(pack, threaded):
    assert stream_of(pack(DATA), threaded=threaded) == (DATA, "")


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("pack", [PACKS["gzip"], PACKS["twice"], PACKS["zstd"]])
@pytest.mark.parametrize("hurt", ["cut", "changed"])
def test_of_a_damaged_stream_comes_what_is_before_the_damage(pack, hurt, threaded):
    packed = pack(DATA)
    half = len(packed) // 2
    got, damage = stream_of(packed[:half] if hurt == "cut" else packed[:half] + b"\xff" * 40 + packed[half + 40 :], threaded=threaded)
    assert DATA.startswith(got[: len(DATA) // 4])
    assert "stream is " + ("cut off" if hurt == "cut" else "") in damage


@pytest.mark.parametrize("pack", ["zstd", "frames", "zstd in gzip"])
def test_a_zstd_stream_that_is_cut_anywhere_keeps_its_whole_blocks_and_says_so(pack):
    data = random.Random(1).randbytes(400_000).hex().encode()  # all blocks pack alike
    packed = PACKS[pack](data)
    for cut in sorted({1, 3, 4, 5, 6, 9, *range(10, len(packed), len(packed) // 23), len(packed) - 5, len(packed) - 1}):
        got, damage = stream_of(packed[:cut])
        assert data.startswith(got) or cut < 4
        assert "cut off" in damage or cut < 4
        if pack == "zstd":
            assert len(got) >= len(data) * (cut - 20) // len(packed) - (1 << 17) - 2_000


def test_frames_that_are_to_be_skipped_are_and_what_is_none_is_told():
    skipped = b"\x5a\x2a\x4d\x18" + (70_000).to_bytes(4, "little") + bytes(70_000)
    one = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compress(DATA)
    assert stream_of(one + skipped + one) == (DATA + DATA, "")
    assert stream_of(one + b"behind") == (DATA, "the compressed stream is damaged: what follows is no frame of zstd")
    wrong = bytearray(one)
    wrong[-1] ^= 1
    assert "checksum" in stream_of(bytes(wrong))[1]


@settings(deadline=None, max_examples=40)
@given(st.binary(max_size=300_000), st.sampled_from([-5, 1, 3, 19]), st.booleans(), st.booleans())
def test_blocks_of_zstd_are_those_of_the_library(data, level, checksum, size):
    packed = zstandard.ZstdCompressor(level=level, write_checksum=checksum, write_content_size=size).compress(data + data)
    assert stream_of(packed) == (data + data, "")


def test_the_head_of_a_bomb_is_unpacked_no_further():
    """64 kB of a zstd frame may hold 2 GB."""
    packed = zstandard.ZstdCompressor().compress(bytes(600 << 20))
    assert len(packed) < 1 << 16
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert not looks_like_trace(packed)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_bytes_behind_a_gzip_member_that_start_no_other_are_ignored():
    assert stream_of(gzip.compress(DATA) + b"\0" * 100) == (DATA, "")


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("pack", [PACKS["gzip"], PACKS["zstd"], PACKS["twice"]])
def test_what_unpacks_beyond_all_measure_is_left(pack, threaded, monkeypatch):
    monkeypatch.setattr(compressed, "TRUSTED", 1 << 20)
    got, damage = stream_of(pack(b" " * (64 << 20)), threaded=threaded)
    assert len(got) < 32 << 20
    assert "unpacks to more than 250 times" in damage


def test_an_error_of_the_disk_ends_the_text_and_is_told():
    class Failing(io.RawIOBase):
        def __init__(self):
            self.parts = [b'{"traceEvents": [' + b",".join(json.dumps(event("a")).encode() for _ in range(3))]

        def readable(self):
            return True

        def readinto(self, target):
            if not self.parts:
                raise OSError(5, "Input/output error")
            part = self.parts.pop()
            target[: len(part)] = part
            return len(part)

    text = TextStream(Failing())
    buffer = bytearray(1 << 16)
    assert text.fill(memoryview(buffer)) > 100
    assert text.damage == "reading failed: Input/output error"


def test_the_compiled_trace_of_a_thread_that_was_not_read_to_the_end_is_let_go():
    text = TextStream(io.BytesIO(gzip.compress(b" " * (40 << 20))), threaded=True)
    assert text.fill(memoryview(bytearray(10))) == 10
    text.close()  # does not wait for what nobody reads


def test_one_thread_and_many_read_the_same():
    trace = Trace(0, 2)
    for i in range(500):
        trace.collective("allreduce", i, "0.25", launch=i, seq=i)
    want = oracle.tables(trace.text())
    for threads in (1, 3, 8):
        assert_same(read(trace.text(), threads=threads, chunk=5000), want)
