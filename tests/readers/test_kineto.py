"""The product's reader against the slow, obvious one, on made and on damaged traces."""

import gzip
import json
import random
import subprocess
import sys

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.builder import Trace
from tests.readers.guarded import damaged
from tests.readers.made import assert_same, read, source, texts
from tests.real import real_traces
from tracekit.errors import InputError
from tracekit.readers.kineto import read_trace
from tracekit.trace.events import Category

words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12) | st.sampled_from(["aten::mm", '"},{"ph"', "a\\b", "[memory]"])
# Hypothesis draws the program's own words, too: launches on several processes are refused (test_oddities.py), not read.
names = words.filter(lambda text: "launch" not in text.lower()) | st.sampled_from(["event_wait", "event_record", "dma_request"])
micros = st.decimals(0, 10**13, places=3, allow_nan=False).map(str) | st.integers(-5, 10**13).map(str) | st.just("1.5e3")
args = st.fixed_dictionaries(
    {},
    optional={
        "correlation": st.integers(0, 2**63),
        "External id": st.integers(-1, 2**40) | st.just("77"),
        "stream": st.integers(0, 99),
        "device": st.integers(0, 7),
        "Collective name": words,
        "In msg nelems": st.integers(0, 2**40),
        "Seq": st.integers(0, 9) | st.just("5"),
        "Input Dims": st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3),
        "Bytes": st.integers(-(2**40), 2**40),
        "memory bandwidth (GB/s)": st.sampled_from([0.5, 12.25, 1e-7]),
        "unknown": st.lists(words, max_size=2) | st.dictionaries(words, words, max_size=2),
    },
)


@st.composite
def events(draw):
    event = {
        "ph": draw(st.sampled_from(["X", "X", "X", "i", "s", "f", "M", "B", "E"])),
        "cat": draw(st.sampled_from(["cpu_op", "kernel", "cuda_runtime", "ac2g", "Operator", "new_thing"])),
        "name": draw(names),
        "pid": draw(st.integers(0, 3) | st.just("Spans")),
        "tid": draw(st.integers(0, 3) | st.just("stream x")),
        "ts": _Raw(draw(micros)),
    }
    if draw(st.booleans()):
        event["dur"] = _Raw(draw(micros))
    if draw(st.booleans()):
        event["args"] = draw(args)
    return event


class _Raw(str):
    """Decimal text that is to be written without quotes."""


def dump(value, indent, shuffle):
    if isinstance(value, _Raw):
        return str(value)
    if isinstance(value, dict):
        items = list(value.items())
        if shuffle is not None:
            shuffle.shuffle(items)
        inner = [f"{json.dumps(k)}{':' if indent else ': '}{dump(v, indent, shuffle)}" for k, v in items]
        return "{" + indent + ("," + indent).join(inner) + indent + "}"
    if isinstance(value, list):
        return "[" + indent + ("," + indent).join(dump(v, indent, shuffle) for v in value) + indent + "]"
    return json.dumps(value)


@settings(deadline=None)
@given(
    st.lists(events(), min_size=1, max_size=25),
    st.sampled_from(["", "\n  ", " "]),
    st.randoms(use_true_random=False),
    st.integers(64, 900),
)
def test_every_column_equals_the_obvious_reading(made, indent, random, chunk):
    document = {"schemaVersion": 1, "baseTimeNanoseconds": 1_700_000_000_000_000_000, "traceEvents": made, "traceName": 'a "b"'}
    text = dump(document, indent, random)
    want = oracle.tables(text)
    nothing = [Category.OTHER, Category.METADATA, Category.TRACE]
    if not (want.phase == ord("X")).any() and np.isin(want.category, nothing).all():
        with pytest.raises(InputError, match="no events"):
            read(text, chunk=chunk)
        return
    assert_same(read(text, chunk=chunk), want)


@pytest.mark.parametrize("path", real_traces(), ids=lambda p: p.name)
@pytest.mark.parametrize("chunk", [1 << 14, None])
def test_real_traces_read_the_same(path, chunk):
    raw = path.read_bytes()
    text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    got = read(raw, chunk=chunk)
    want = oracle.tables(text.decode())
    want.metadata = got.metadata  # decimal text is read as text by the oracle
    assert_same(got, want)


def small():
    trace = Trace(0, 2)
    trace.step(3, 0, 1000)
    trace.kernel("gemm", 60, "250.125", launch=20, op="aten::mm")
    trace.collective("allreduce", 320, 180, launch=200, seq=4)
    return trace


@pytest.mark.parametrize(
    "pack",
    [
        gzip.compress,
        lambda b: gzip.compress(gzip.compress(b)),
        lambda b: gzip.compress(b[:500]) + gzip.compress(b[500:]),
        lambda b: zstandard.ZstdCompressor().compress(b),
        lambda b: b"\xef\xbb\xbf" + b,
        lambda b: b"\n\n " + b + b"\n\n",
    ],
    ids=["gzip", "gzip twice", "two members", "zstd", "byte order mark", "space around"],
)
def test_packing_is_told_by_the_bytes(pack):
    data = small().text().encode()
    assert_same(read(pack(data)), oracle.tables(data.decode()))


def test_times_are_exact_integers():
    trace = Trace(base=1_775_078_550_000_000_001)
    trace.kernel("k", "2921450000060.123", "0.001")
    t = read(trace.text())
    assert t.ts.tolist() == [1_775_078_550_000_000_001 + 2_921_450_000_060_123]
    assert t.dur.tolist() == [1]


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [("12", 12000), ("-0.5", -500), ('"7.25"', 7250), ("1e3", 10**6), ("2.5E-1", 250), ("1.0006", 1001), ("0.00049", 0), ("1E+2", 10**5)],
)
def test_decimal_text_to_nanoseconds(text, nanoseconds):
    t = read('{"traceEvents":[{"ph":"X","name":"a","ts":' + text + "}]}")
    assert t.ts.tolist() == [nanoseconds]


@pytest.mark.parametrize("text", ["null", "NaN", "-Infinity", '"soon"', "[1]", "1e300", "99999999999999999999", "true", "1.2.3"])
def test_what_is_no_time_is_missing(text):
    t = read('{"traceEvents":[{"ph":"X","name":"a","ts":' + text + ',"dur":1}]}')
    assert t.ts.tolist() == [oracle.NULL]
    assert t.dur.tolist() == [1000]


def test_a_time_beyond_64_bits_with_its_base_is_missing():
    t = read('{"baseTimeNanoseconds": 1775078550000000000, "traceEvents": [{"ph":"X","ts":9223372036854775.807},{"ph":"X","ts":1}]}')
    assert t.ts.tolist() == [oracle.NULL, 1_775_078_550_000_001_000]


def test_unescaped_quotes_cost_only_their_event():
    text = small().text().replace('"name": "gemm"', '"name": "<module> Library("x", "IMPL")"')
    t = read(text)
    assert t.coverage.status == "repaired"
    assert any("1 event with unescaped quotes" in p for p in t.coverage.problems)
    assert len(t) in (len(oracle.tables(small().text())), len(oracle.tables(small().text())) - 1)


def test_bytes_that_are_not_utf8_are_replaced():
    data = small().text().encode().replace(b"gemm", b"g\xff\xfemm").replace(b"aten::mm", "café".encode())
    t = read(data)
    assert "g\ufffd\ufffdmm" in texts(t, t.name)
    assert "café" in texts(t, t.name)
    assert any("UTF-8" in p for p in t.coverage.problems)


def test_backslashes_of_a_windows_path_are_literal_in_the_whole_file():
    data = small().text().replace("gemm", "C:\\Users\\nina.py").replace("aten::mm", "torch\\nn")
    t = read(data)
    assert {"C:\\Users\\nina.py", "torch\\nn"} <= set(texts(t, t.name))
    assert any("backslash" in p for p in t.coverage.problems)


def test_trailing_commas_are_counted():
    data = small().text()
    data = data.replace("}}]", "},},]").replace('"dur": 1000}', '"dur": 1000, }')
    t = read(data)
    assert_same(t, oracle.tables(small().text()))
    assert any("3 trailing commas" in p or "2 trailing commas" in p for p in t.coverage.problems)


def test_of_a_stream_given_twice_the_row_decides():
    data = small().text().replace('"stream": 7', '"stream": 3, "stream": 5')
    t = read(data)
    assert t.stream[t.category == Category.KERNEL].tolist() == [7, 20]
    assert any("twice" in p for p in t.coverage.problems)


def test_old_spellings():
    events = [
        {"cat": "Kernel", "name": "sgemm", "pid": 1, "tid": "stream 7", "ts": 30, "args": {"external id": 4, "correlation": 9}},
        {"cat": "Runtime", "name": "cudaLaunchKernel", "pid": 2, "tid": "2", "ts": 10, "args": {"correlation": 9}},
    ]
    t = read(json.dumps({"traceEvents": [{"ph": "X", "dur": 5, **e} for e in events]}))
    assert t.category.tolist() == [Category.KERNEL, Category.RUNTIME]
    assert (t.stream[0], t.device[0], t.external_id[0]) == (7, 1, 4)


def test_the_oldest_autograd_export_lacks_a_quote():
    event = '{name": "aten::mm", "ph": "X", "ts": 100.5, "dur": 105.0, "tid": 1, "pid": "CPU functions", "args": {}}'
    t = read(f"[{event}, {event}]")
    assert texts(t, t.name) == ["aten::mm"] * 2
    assert t.dur.tolist() == [105_000] * 2
    assert any("lacks its opening quote" in p for p in t.coverage.problems)


def test_the_old_autograd_export():
    events = [{"name": "aten::mm", "ph": "X", "ts": 100.5, "dur": 105.0, "tid": 1, "pid": "CPU functions", "args": {}}]
    t = read(json.dumps(events))
    assert t.category.tolist() == [Category.OPERATOR]
    assert any("autograd" in p and "no kernel or rank information" in p for p in t.coverage.problems)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"{}", "empty"),
        (b"\xef\xbb\xbf\n", "empty"),
        (b"[1, 2, 3]", "without a list traceEvents"),
        (b'{"traceEvents": null}', "without a list traceEvents"),
        (b'[{"time": 1}, {"time": 2}]', "something else"),
        (b'{"traceEvents": [{"ph": "M", "name": "process_name", "pid": 1}]}', "only their metadata; profile"),
        (b'{"traceEvents": [{"ph": "M", "name": "process_name", "pid": 1}, {"ph"', "only their metadata: it is truncated"),
        (b'{"traceEvents": [7, null]}', "no events"),
        (b"\x1f\x8b\x08\x00", "damaged"),
        (b'{"schemaVersion": 1, "dev', "truncated before"),
        (gzip.compress(b"", mtime=0), "empty"),
        (b'{"traceEvents": []}', "no events"),
        (b'{"a": 1}', "no events"),
        (b"\x80\x04\x95abc", "not a trace"),
        (b"\x89PNG\r\n\x1a\n" + bytes(300), "not a trace"),
        (b'{"traceEvents": [{"ph": "X", "na', "truncated"),
    ],
)
def test_nothing_usable_is_one_clear_line(data, message):
    with pytest.raises(InputError, match=message) as error:
        read(data)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("made.json")


def test_a_cut_file_keeps_its_closed_events():
    data = small().text().encode()
    whole = oracle.tables(data.decode())
    for cut in range(data.index(b"traceEvents") + 200, len(data) - 3, 37):
        t = read(data[:cut])
        assert t.coverage.status == "truncated", cut
        assert any("truncated" in p for p in t.coverage.problems)
        assert t.ts.tolist() == whole.ts.tolist()[: len(t)]


def test_a_cut_gzip_keeps_what_it_gave():
    trace = small()
    for i in range(3000):
        trace.kernel(f"k{i * 7919 % 3000}", 1000 + i, 1)
    data = gzip.compress(trace.text().encode())
    t = read(data[: len(data) // 2])
    assert t.coverage.status == "truncated"
    assert 100 < len(t) < 3003


def test_repairs_between_chunks_lose_nothing():
    trace = small()
    for i in range(200):
        trace.kernel(f"k{i}", 1000 + i, 1)
    text = trace.text()
    for i in (5, 60, 61, 150):
        text = text.replace(f'"k{i}"', f'"k"{i}"')
    for chunk in (300, 1000, 1 << 20):
        t = read(text, chunk=chunk)
        names = set(texts(t, t.name))
        assert {f"k{i}" for i in range(200)} - names <= {"k5", "k60", "k61", "k150"}
        assert any("4 events" in p for p in t.coverage.problems)


@pytest.mark.parametrize("seed", range(60))
def test_damaged_bytes_never_crash(seed):
    """Random damage: either tables whose rows are consistent, or one clear line."""
    dice = random.Random(seed)
    data = damaged(small().text(indent=dice.choice([None, 1])).encode(), dice)
    try:
        t = read(data, chunk=dice.choice([100, 700, 1 << 16]))
    except InputError as error:
        assert "\n" not in str(error)
        return
    assert len(t) == t.coverage.events
    assert (t.name >= 0).all()
    assert (t.name < len(t.strings)).all()
    assert (t.lane < len(t.lanes)).all()
    for side in t.side.values():
        assert (np.diff(side.rows) > 0).all()
        assert not len(side) or side.rows[-1] < len(t)


def test_many_lanes_and_many_strings():
    trace = Trace()
    for i in range(3000):
        trace.add("cpu_op", f"name {i} " + "x" * (i % 50), i, 1, tid=i)
    assert_same(read(trace.text(), chunk=1 << 15), oracle.tables(trace.text()))


def test_progress_counts_stored_bytes():
    seen = []
    data = gzip.compress(small().text().encode())
    read_trace(source(data), progress=seen.append)
    assert sum(seen) == len(data)


def test_without_a_folder_for_compiled_code_reading_works_and_says_so(tmp_path):
    trace = small().write(tmp_path / "rank0.json")
    code = (
        "import numba.core.caching as c\n"
        "c.CacheImpl._locator_classes = []\n"
        "from tracekit.compiled import kept\n"
        "from tracekit.readers.kineto import read_trace\n"
        "from tracekit.readers.sources import find_sources\n"
        f"t = read_trace(find_sources([{str(trace)!r}]).sources[0])\n"
        "print(kept(), len(t), [p for p in t.coverage.problems if 'NUMBA_CACHE_DIR' in p])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False 7 ['the compiled reader cannot be kept")
