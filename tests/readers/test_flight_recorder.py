import os
import pickle
from pathlib import Path

import pytest

from tests.analyses.hang.made import STARTED, RankDump
from tracekit.errors import InputError
from tracekit.readers.flight_recorder import read_dump
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
