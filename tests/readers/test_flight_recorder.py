import gzip
import os
import pickle
from pathlib import Path

import pytest
import zstandard

from tests.analyses.hang.made import STARTED, RankDump
from tracekit.errors import InputError
from tracekit.readers.flight_recorder import read_dump, sizes_text
from tracekit.readers.hang_files import content_of_head, rank_of_name
from tracekit.readers.python_stacks import read_stacks
from tracekit.readers.sources import Source, find_sources


def source(path: Path) -> Source:
    return Source(str(path), path.name, path.stat().st_size, 0)


@pytest.mark.parametrize("name", ["nccl_trace_rank_3", "comm_lib_trace_rank_3", "anything3.json", "dump_rank0003.pickle"])
@pytest.mark.parametrize("version", ["2.0", "2.1", "2.10"])
def test_every_form_gives_the_same_calls(name, version, tmp_path):
    dump = RankDump(version=version, backend="gloo").call(line=4).call("all_gather", state=STARTED, line=5)
    dump.write(tmp_path / name)
    found = read_dump(source(tmp_path / name))
    assert (found.rank, found.version) == (3, version)
    calls = found.calls
    assert [found.texts[code] for code in calls.kind] == ["all_reduce", "all_gather"]
    assert (calls.seq.tolist(), calls.state.tolist()) == ([1, 2], [2, 1])
    assert [found.texts[code] for code in calls.site] == ["train.py:4", "train.py:5"]
    assert [str(frame) for frame in found.stacks[1]][1] == "train_step (train.py:5)"
    assert [entry.name for entry in find_sources([str(tmp_path)]).sources] == [name]


class Calls:
    def __reduce__(self):
        return (print, ("run",))


def test_a_pickle_that_calls_something_is_refused(tmp_path, capsys):
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps({"pg_status": {}, "profiling_name": 1, "entries": [Calls()]}, 2))
    with pytest.raises(InputError, match=r"wants \w+\.print"):
        read_dump(source(path))
    assert capsys.readouterr().out == ""


def nested(depth: int, leaf):
    """A value that is short as a pickle and endless written out."""
    for _ in range(depth):
        leaf = [leaf] * 10
    return leaf


def pickled(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


BOMBS = {
    "a memo of 16 GB": (pickled(b"}r\xff\xff\xff\x7f"), "asks for more memory"),
    "a number of 2 GB": (pickled(b"\x8b\xff\xff\xff\x7fx"), "is cut"),
    "a text of 8 EB": (pickled(b"\x8d" + b"\xff" * 8 + b"x"), "is cut"),
    "tuples of tuples as a key": (pickled(b")q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"}h\x00Ns"), "keys that are no texts"),
    "numbers that collide as keys": (pickled(b"}(" + b"\x8a\x08" + b"\xff" * 7 + b"\x1fNu"), "keys that are no texts"),
    "too many values": (pickled(b"]" * 20_000_001), "more than 20,000,000 values"),
    "too many values, JSON": (b'{"entries":[' + b"[]," * 10_000_001, "more than 20,000,000 values"),
    "deep JSON": (b'{"entries":' + b"[" * 100_000, "damaged or cut"),
    "an old call": (pickled(b"cos\nsystem\n(S'true'\ntR"), "wants os.system"),
    "an object from outside": (pickled(b"Pfoo\n"), "from outside"),
    "a registered object": (pickled(b"\x82\x01"), "damaged"),
    "a memo behind a call of nothing": (pickled(b"}Nbr\xff\xff\xff\x7f"), "no pickle of plain values"),
    "a set": (pickled(b"\x8f"), "no pickle of plain values"),
}


@pytest.mark.parametrize(("data", "why"), BOMBS.values(), ids=BOMBS)
def test_a_hostile_dump_is_refused_in_a_line(data, why, tmp_path):
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(data)
    with pytest.raises(InputError, match=why) as refused:
        read_dump(source(path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("leaf", [1, 10**6000, "x"], ids=["small", "large", "text"])
def test_values_that_are_endless_written_out_are_cut(leaf, tmp_path):
    many = nested(30, leaf)
    entry = dict.fromkeys(("input_sizes", "output_sizes", "input_dtypes", "frames", "process_group", "state", "profiling_name"), many)
    entry |= {"process_group": (leaf, many), "collective_seq_id": leaf}
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps({"entries": [entry], "pg_config": {"0": {"ranks": many}}, "pg_status": {"0": many}}, 2))
    dump = read_dump(source(path))
    assert (len(dump.calls), max(map(len, dump.texts)) <= 300) == (1, True)


def test_a_packed_dump(tmp_path):
    RankDump(version="2.4").call().call(state=STARTED).write(tmp_path / "plain")
    for rank, pack in enumerate([gzip.compress, zstandard.ZstdCompressor().compress]):
        path = tmp_path / f"nccl_trace_rank_{rank}{('.gz', '.zst')[rank]}"
        path.write_bytes(pack((tmp_path / "plain").read_bytes()))
        assert (read_dump(source(path)).rank, read_dump(source(path)).calls.seq.tolist()) == (rank, [1, 2])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match=r"nccl_trace_rank_1\.zst"):
        read_dump(source(path))


def test_the_list_of_entries_that_the_first_versions_dumped(tmp_path):
    path = tmp_path / "nccl_trace_rank_2"
    path.write_bytes(pickle.dumps(RankDump(version="2.0").call().call(state=STARTED).entries, 2))
    assert read_dump(source(path)).calls.seq.tolist() == [1, 2]


def test_of_many_tensors_the_first_stand_there_and_how_many():
    assert sizes_text([[4, 1024], [3]]) == "[[4,1024],[3]]"
    assert sizes_text([[2, 5]] * 100) == "[" + "[2,5]," * 8 + "... 100 tensors of 1000 elements]"


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("name", ["rank_0", "rank_0.json"])
def test_a_file_that_is_cut_is_refused_in_a_line(keep, name, tmp_path):
    path = tmp_path / name
    RankDump().call().call().write(path)
    os.truncate(path, int(path.stat().st_size * keep))
    with pytest.raises(InputError, match=name) as refused:
        read_dump(source(path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "root",
    [
        {"entries": [None, 3, {"frames": 3, "process_group": 5, "profiling_name": None, "collective_seq_id": "x"}], "pg_config": [1]},
        {"entries": [{"frames": [{"name": [], "line": 2**80}], "input_sizes": {"a": 1}, "state": {}}], "pg_config": {"0": 3}},
        {"entries": [{"profiling_name": "nccl:send 99999999->1"}], "pg_config": {"0": {"ranks": "[1, 2, ...]"}}, "pg_status": {"0": []}},
    ],
)
def test_nonsense_in_entries_breaks_nothing(root, tmp_path):
    path = tmp_path / "rank_0"
    path.write_bytes(pickle.dumps(root, 2))
    assert len(read_dump(source(path)).calls) == 1


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_12", 12),
        ("nccl_trace_rank_container-node01_7", 7),
        ("rank_00003.stacks.txt", 3),
        ("dump_rank5_b.pickle", 5),
        ("x", None),
    ],
)
def test_the_rank_stands_in_the_name(name, rank):
    assert rank_of_name(name) == rank


def test_a_trace_and_a_snapshot_are_no_dump():
    assert content_of_head(b'{"traceEvents": [{"name": "profiling_name"}], "pg_config": 1}') is None
    assert content_of_head(b"\x80\x04}device_traces segments pg_config pg_status") is None


STACKS = {
    "faulthandler": 'Thread 0x7f (most recent call first):\n  File "a.py", line 3 in g\n  File "a.py", line 9 in <module>\n',
    "traceback": 'Traceback (most recent call last):\n  File "a.py", line 9, in <module>\n  File "a.py", line 3, in g\nValueError: no\n',
    "py-spy": 'Thread 123 (idle): "MainThread"\n    g (a.py:3)\n    <module> (a.py:9)\n',
}


@pytest.mark.parametrize("text", STACKS.values(), ids=STACKS)
def test_python_stacks(text, tmp_path):
    path = tmp_path / "rank_1.stacks.txt"
    path.write_text(text)
    found = read_stacks(source(path))
    assert (found.rank, [str(frame) for frame in found.threads[0]]) == (1, ["g (a.py:3)", "<module> (a.py:9)"])
    assert found.error == ("ValueError: no" if "ValueError" in text else "")
