"""What comes out of the cache is what went in, or nothing."""

import dataclasses
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builder import Trace
from tests.oracle import tables_from_document
from tracekit.notes import note
from tracekit.readers import cache
from tracekit.readers.cache import ArrowStrings, load, store
from tracekit.readers.cache_folder import ENDINGS, clear, default_directory, distrust, prune, read_entry, usage, write_entry
from tracekit.readers.sources import Source
from tracekit.trace.events import SIDE_COLUMNS, Lane, RankTables

SOURCE = Source("/data/rank0.json", "rank0.json", 1234, 1_700_000_000_123_456_789)


def example() -> RankTables:
    trace = Trace(rank=0, world_size=2, host_name="n\u00f6de <1>\n")
    trace.step(10, 0, 1000)
    trace.kernel("gemm", start="100.123", dur=200, launch=50, op="aten::mm")
    trace.collective("allreduce", start=300, dur=50, elements=1024, seq=7, launch=280)
    trace.add(None, "[memory]", 5, **{"Bytes": 64, "Addr": 2**63 - 1, "Total Allocated": 64})
    trace.add("user_annotation", "odd", 5, 1, tid="stream <b>", pid="Spans")
    tables = tables_from_document(trace.document())
    tables.coverage.note(note("seq_not_everywhere", 2, group="0", seq=(1, 2), rank=3), "repaired")
    tables.coverage.file = SOURCE.url
    return tables


def assert_same(one: RankTables, other: RankTables) -> None:
    for column in cache._COLUMNS:
        left, right = getattr(one, column), getattr(other, column)
        assert left.dtype == right.dtype, column
        assert np.array_equal(left, right), column
    assert one.side.keys() == other.side.keys() == SIDE_COLUMNS.keys()
    for name, side in one.side.items():
        assert np.array_equal(side.rows, other.side[name].rows)
        assert side.columns.keys() == other.side[name].columns.keys()
        for column, values in side.columns.items():
            assert values.dtype == other.side[name].columns[column].dtype
            assert np.array_equal(values, other.side[name].columns[column])
    assert list(one.strings) == list(other.strings)
    assert list(one.lanes) == list(other.lanes)
    assert one.metadata == other.metadata
    assert one.coverage == other.coverage


def test_what_was_stored_is_loaded(tmp_path: Path) -> None:
    tables = example()
    assert store(SOURCE, tables, tmp_path / "new" / "folder") is None
    loaded = load(SOURCE, tmp_path / "new" / "folder")
    assert loaded is not None
    assert_same(tables, loaded)
    assert [path.suffix for path in (tmp_path / "new" / "folder").iterdir()] == [".arrow"]


def test_a_trace_without_events(tmp_path: Path) -> None:
    tables = tables_from_document({"traceEvents": []})
    tables.coverage.file = SOURCE.url
    store(SOURCE, tables, tmp_path)
    loaded = load(SOURCE, tmp_path)
    assert loaded is not None
    assert_same(tables, loaded)


@settings(max_examples=20, deadline=None)
@given(
    strings=st.lists(st.text(), max_size=20),
    metadata=st.dictionaries(st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5)),
    numbers=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50),
    lane=st.tuples(st.integers() | st.text(), st.text()),
)
def test_whatever_the_tables_hold(tmp_path_factory: pytest.TempPathFactory, strings, metadata, numbers, lane) -> None:
    folder = tmp_path_factory.mktemp("cache")
    tables = tables_from_document({"traceEvents": [{"ph": "X", "ts": 1}] * len(numbers)})
    tables = dataclasses.replace(
        tables, ts=np.array(numbers, np.int64), strings=["", *strings], metadata=metadata, lanes=[Lane(lane[0], lane[1], lane[1])]
    )
    tables.coverage.file = SOURCE.url
    assert store(SOURCE, tables, folder) is None
    loaded = load(SOURCE, folder)
    assert loaded is not None
    assert_same(tables, loaded)


def test_columns_that_are_views_of_others(tmp_path: Path) -> None:
    tables = example()
    turned = dataclasses.replace(tables, ts=np.ascontiguousarray(tables.ts[::-1])[::-1])
    store(SOURCE, turned, tmp_path)
    loaded = load(SOURCE, tmp_path)
    assert loaded is not None
    assert np.array_equal(loaded.ts, tables.ts)


def test_coverage_names_the_file_as_the_reader_does(tmp_path: Path) -> None:
    store(SOURCE, example(), tmp_path)
    loaded = load(dataclasses.replace(SOURCE, name="job/rank0.json"), tmp_path)
    assert loaded is not None
    assert loaded.coverage.file == SOURCE.url


@pytest.mark.parametrize("change", [{"size": 1235}, {"mtime": 1_700_000_000_123_456_790}, {"url": "/data/rank1.json"}])
def test_another_file_or_version_of_it_is_not_found(tmp_path: Path, change: dict[str, object]) -> None:
    store(SOURCE, example(), tmp_path)
    assert load(dataclasses.replace(SOURCE, **change), tmp_path) is None


def test_another_schema_of_the_tables_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(SOURCE, example(), tmp_path)
    monkeypatch.setitem(SIDE_COLUMNS["copy"], "new argument", "int")
    assert load(SOURCE, tmp_path) is None


def test_an_unknown_time_of_change_is_never_cached(tmp_path: Path) -> None:
    timeless = dataclasses.replace(SOURCE, mtime=0)
    assert store(timeless, example(), tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    assert load(timeless, tmp_path) is None


def test_every_damaged_byte_is_noticed_and_the_entry_rewritten(tmp_path: Path) -> None:
    store(SOURCE, example(), tmp_path)
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    for at in [*range(20), *range(64, len(good), 97)]:
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x20]) + good[at + 1 :])
        assert load(SOURCE, tmp_path) is None, at
    for damaged in (b"", b"text", good[:-1], good[:64], good[: len(good) // 2], good + b"x", os.urandom(3000)):
        path.write_bytes(damaged)
        assert load(SOURCE, tmp_path) is None
    assert store(SOURCE, example(), tmp_path) is None
    assert load(SOURCE, tmp_path) is not None


def test_an_entry_of_another_file_under_this_name_is_foreign(tmp_path: Path) -> None:
    other = dataclasses.replace(SOURCE, url="/data/other.json")
    store(other, example(), tmp_path)
    (path,) = tmp_path.iterdir()
    path.rename(cache._entry(SOURCE, tmp_path))
    assert load(SOURCE, tmp_path) is None


def test_no_cache_is_no_problem(tmp_path: Path) -> None:
    assert load(SOURCE, tmp_path / "nothing") is None
    cache._entry(SOURCE, tmp_path).mkdir()
    assert load(SOURCE, tmp_path) is None


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    warning = store(SOURCE, example(), tmp_path / "file" / "cache\n")
    assert warning is not None
    assert "could not be written" in warning
    assert "\n" not in warning


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(batch: object, file: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_write", full)
    warning = store(SOURCE, example(), tmp_path)
    assert warning is not None
    assert "No space left on device" in warning
    assert list(tmp_path.iterdir()) == []


def test_strings_are_a_sequence(tmp_path: Path) -> None:
    tables = example()
    store(SOURCE, tables, tmp_path)
    loaded = load(SOURCE, tmp_path)
    assert loaded is not None
    strings = loaded.strings
    assert isinstance(strings, ArrowStrings)
    wanted = list(tables.strings)
    for again in (strings, pickle.loads(pickle.dumps(strings))):
        assert (again[0], again[1], again[-1], len(again)) == ("", wanted[1], wanted[-1], len(wanted))
        assert again == wanted
        assert again != wanted[1:]
        assert again[1:3] == wanted[1:3]
        assert wanted[2] in again
        assert again.index(wanted[2]) == 2
        with pytest.raises(IndexError):
            again[len(wanted)]


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("TRACEKIT_CACHE", raising=False)
    assert default_directory() == tmp_path / ".cache" / "tracekit"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_directory() == tmp_path / "xdg" / "tracekit"
    monkeypatch.setenv("TRACEKIT_CACHE", "~/mine")
    assert default_directory() == tmp_path / "mine"


def test_prune_removes_the_oldest_and_nothing_of_others(tmp_path: Path) -> None:
    for index in range(4):
        source = dataclasses.replace(SOURCE, mtime=index + 1)
        store(source, example(), tmp_path)
        os.utime(cache._entry(source, tmp_path), (1000 + index, 1000 + index))
    for name in ("notes.arrow", "writing-abc.tmp", "writing-now.tmp", "trace.json"):
        (tmp_path / name).write_text("1234567")
    old = time.time() - 100_000
    os.utime(tmp_path / "writing-abc.tmp", (old, old))
    size = cache._entry(dataclasses.replace(SOURCE, mtime=1), tmp_path).stat().st_size
    removed = prune(tmp_path, limit_bytes=int(2.5 * size))
    assert [load(dataclasses.replace(SOURCE, mtime=index + 1), tmp_path) is not None for index in range(4)] == [False, False, True, True]
    assert sorted(path.name for path in tmp_path.iterdir() if len(path.name) < 40) == ["notes.arrow", "trace.json", "writing-now.tmp"]
    assert removed == pytest.approx(2 * size, abs=200)
    assert prune(tmp_path / "nothing") == 0


def test_entries_of_every_kind_count_and_those_that_were_used_stay(tmp_path: Path) -> None:
    paths = [tmp_path / (letter * 40 + ending) for letter, ending in zip("abc", ENDINGS, strict=True)]
    for index, path in enumerate(paths):
        write_entry(path, b"MAGIC", bytes(1000))
        os.utime(path, (1000 + index, 1000 + index))
    size = usage(tmp_path).size
    assert usage(tmp_path).entries == 3 and size > 3000
    assert read_entry(paths[0], b"MAGIC") == bytes(1000)
    left = tmp_path / ".tracekit-killed.tmp"
    left.write_text("half")
    os.utime(left, (1000, 1000))
    prune(tmp_path, limit_bytes=size // 3)
    assert [path.exists() for path in (*paths, left)] == [True, False, False, False]


def test_loading_needs_neither_numba_nor_pandas(tmp_path: Path) -> None:
    store(SOURCE, example(), tmp_path)
    code = (
        "import sys; from tracekit.readers.cache import load; from tracekit.readers.sources import Source; "
        f"assert load({SOURCE!r}, {str(tmp_path)!r}).strings[1]; "
        "print([m for m in ('numba', 'pandas', 'torch', 'fsspec') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_folder_that_others_can_write_is_neither_believed_nor_used(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    assert distrust(folder) is None
    assert distrust(tmp_path / "not there yet") is None
    for mode in (0o777, 0o770, 0o702):
        folder.chmod(mode)
        assert distrust(folder) == "can be written by other users"
        assert "is not used" in str(store(SOURCE, example(), folder))
        assert load(SOURCE, folder) is None
        assert list(folder.iterdir()) == []
    (tmp_path / "file").touch()
    assert distrust(tmp_path / "file") == "is no folder"


def test_info_and_clear_count_entries_and_leave_other_files(tmp_path: Path) -> None:
    names = ["a" * 40 + ".arrow", "b" * 40 + ".window", "notes.arrow", "trace.json"]
    for name in names:
        (tmp_path / name).write_bytes(b"12345")
    assert (usage(tmp_path).entries, usage(tmp_path).size) == (2, 10)
    assert (clear(tmp_path).entries, usage(tmp_path).entries) == (2, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.arrow", "trace.json"]
    assert usage(tmp_path / "nothing").entries == 0
