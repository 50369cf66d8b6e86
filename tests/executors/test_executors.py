"""Every item comes back once, whatever happens to the worker that had it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.builder import Trace
from tracekit.cli.main import cli
from tracekit.errors import UsageError
from tracekit.executors.base import Lost
from tracekit.executors.cluster import DaskExecutor
from tracekit.executors.local import LocalExecutor, choose
from tracekit.executors.memory import limit_memory, parse_size


def square(item):
    return item * item


def die_always(item):
    if item == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def die_once(path):
    """Kills its worker where the file does not exist yet."""
    if not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return path.name


def fail(item):
    raise ValueError(f"item {item}")


@pytest.mark.parametrize("executor", [LocalExecutor(1), LocalExecutor(3), LocalExecutor(2, "processes")])
def test_every_item_comes_back_with_its_index(executor):
    assert dict(executor.map(square, range(5))) == {0: 0, 1: 1, 2: 4, 3: 9, 4: 16}


def test_a_worker_that_dies_costs_only_the_item_that_kills_it():
    results = dict(LocalExecutor(2, "processes").map(die_always, range(5)))
    assert isinstance(results.pop(2), Lost)
    assert results == {0: 0, 1: 1, 3: 3, 4: 4}


def test_an_item_whose_worker_died_is_tried_again(tmp_path):
    paths = [tmp_path / name for name in ("a", "b", "c")]
    assert dict(LocalExecutor(2, "processes").map(die_once, paths)) == {0: "a", 1: "b", 2: "c"}


@pytest.mark.parametrize("executor", [LocalExecutor(1), LocalExecutor(2), LocalExecutor(2, "processes")])
def test_an_error_of_the_function_is_raised(executor):
    with pytest.raises(ValueError, match="item"):
        list(executor.map(fail, range(3)))


def test_small_input_is_read_by_threads_and_a_choice_of_the_user_holds():
    assert choose(None, 8, 1000).kind == "threads"
    assert choose(4, 8, 10**10).kind == "processes"
    assert choose(4, 8, 1000, "processes").kind == "processes"
    assert choose(4, 2, 10**10, "threads") == LocalExecutor(2, "threads")


def test_sizes_of_memory():
    assert [parse_size(text) for text in ("8GB", "1.5 gib", "500000000")] == [8 * 10**9, 3 * 2**29, 5 * 10**8]
    for bad in ("", "8 parsecs", "-1GB", "1e9"):
        with pytest.raises(UsageError, match="no amount of memory"):
            parse_size(bad)
    with pytest.raises(UsageError, match="less than the program itself needs"):
        limit_memory(1000)


_PARENT = """
import sys, time
from pathlib import Path
from tests.executors.test_executors import sleep_beside
from tracekit.executors.local import LocalExecutor
if __name__ == "__main__":
    list(LocalExecutor(2, "processes").map(sleep_beside, [Path(sys.argv[1]) / name for name in "ab"]))
"""


def sleep_beside(path):
    path.write_text(str(os.getpid()))
    time.sleep(60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_the_command(tmp_path, number):
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    root = Path(__file__).resolve().parents[2]
    parent = subprocess.Popen([sys.executable, script, tmp_path], env={**os.environ, "PYTHONPATH": str(root)}, stderr=subprocess.DEVNULL)
    files = [tmp_path / name for name in "ab"]
    _until(lambda: all(file.exists() and file.read_text() for file in files))
    parent.send_signal(number)
    parent.wait(timeout=60)
    pids = [int(file.read_text()) for file in files]
    _until(lambda: not any(_alive(pid) for pid in pids))


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _until(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it did not come to that within a minute")


@pytest.mark.filterwarnings("ignore")
def test_a_dask_cluster_gives_the_same_and_tells_what_its_workers_could_not(tmp_path):
    pytest.importorskip("distributed")
    assert dict(DaskExecutor(None, 2).map(square, range(5))) == {0: 0, 1: 1, 2: 4, 3: 9, 4: 16}
    results = dict(DaskExecutor(None, 2).map(die_always, range(4)))
    assert isinstance(results.pop(2), Lost)
    assert results == {0: 0, 1: 1, 3: 3}


#: What each worker runs first: the one that reads rank 1 for the first time is killed half way.
_KILLER = """
import os, signal
from pathlib import Path
from tracekit.job import load, window

def read_window(source, task):
    mark = Path({mark!r})
    if "rank1" in source.name and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return window.read_window(source, task)

load.read_window = read_window
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_job_read_by_dask_is_the_same_to_the_last_byte_when_a_worker_is_killed_half_way(tmp_path):
    dask = pytest.importorskip("dask")
    pytest.importorskip("distributed")
    folder = tmp_path / "job"
    folder.mkdir()
    for rank in range(4):
        trace = Trace(rank, 4)
        for step in (1, 2):
            trace.step(step, 1000 * step, 900)
            trace.kernel("gemm", 1000 * step + 50, 100 + rank, launch=1000 * step + 10, op="aten::mm")
            trace.collective("allreduce", 1000 * step + 300, 200, seq=step, launch=1000 * step + 200)
        trace.write(folder / f"rank{rank}.json")
    killer, mark = tmp_path / "killer.py", tmp_path / "killed"
    killer.write_text(_KILLER.format(mark=str(mark)))

    def analyzed(*more):
        result = CliRunner().invoke(cli, ["analyze", str(folder), "--no-report", "-q", "--operations", "--no-cache", "--json", "-", *more])
        assert result.exit_code == 0, result.output
        return result.stdout_bytes

    local = analyzed()
    assert json.loads(local)["job"]["ranks"] == [0, 1, 2, 3]
    with dask.config.set({"distributed.worker.preload": [str(killer)]}):
        assert analyzed("--executor", "dask", "--jobs", "2") == local
    assert mark.exists()


def test_a_scheduler_that_is_not_there_is_one_line():
    pytest.importorskip("distributed")
    with pytest.raises(UsageError, match="no Dask scheduler"):
        DaskExecutor("nonsense://nowhere:1")
