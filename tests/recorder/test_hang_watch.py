"""``record(flight_recorder=...)``: what a job on gloo leaves when it hangs or fails, and that a healthy one is left as it was."""

import contextlib
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.recorder.launching import JOBS, start  # noqa: E402
from tracekit import record  # noqa: E402
from tracekit.analyses.hang import Hang, analyze  # noqa: E402
from tracekit.job.load import LoadOptions, load_job  # noqa: E402
from tracekit.recorder import hang_watch, private  # noqa: E402
from tracekit.recorder.guard import Guard  # noqa: E402
from tracekit.recorder.ring import Ring  # noqa: E402

SOURCE = (JOBS / "hangs.py").read_text().splitlines()


def line_of(text: str) -> str:
    return f"hangs.py:{next(number for number, line in enumerate(SOURCE, 1) if text in line)}"


def _dumped(folder: Path) -> bool:
    """Whether all three have dumped since one is stuck (before, a slow machine may look like a hang)."""
    with contextlib.suppress(OSError):
        stuck = (folder / "stuck").stat().st_mtime_ns
        return sum(path.stat().st_mtime_ns > stuck for path in folder.glob("*.flight_recorder.pickle")) == 3
    return False


def left_by(what: str, folder: Path) -> tuple[Hang, list[int]]:
    """The hang of three ranks that are told to end once each of them has dumped, and their exit codes."""
    processes = start(JOBS / "hangs.py", what, str(folder), ranks=3)
    try:
        until = time.monotonic() + 120
        while not _dumped(folder) and time.monotonic() < until:
            time.sleep(0.2)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(60) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return analyze(load_job([str(folder)], LoadOptions())), codes


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named_by_the_dumps_of_all(tmp_path):
    hang, codes = left_by("busy", tmp_path)
    assert codes == [-signal.SIGTERM] * 3
    assert hang.root is not None
    assert (hang.root.ranks, hang.root.why) == ([1], "busy")
    (wait,) = hang.waits
    assert (wait.call.kind, wait.call.seq, sorted(call.rank for call in wait.waiting), wait.group.ranks) == (
        "all_reduce",
        4,
        [0, 2],
        (0, 1, 2),
    )
    assert wait.call.site.endswith(line_of("dist.all_reduce"))
    assert hang.root.doing.endswith(line_of("time.sleep"))
    assert sorted(path.name for path in tmp_path.glob("*.json.gz")) == [f"rank_0000{rank}.pt.trace.json.gz" for rank in range(3)]


@pytest.mark.slow
def test_a_stage_that_raises_leaves_its_exception_and_its_trace(tmp_path):
    hang, _ = left_by("raises", tmp_path)
    assert hang.root is not None
    assert (hang.root.ranks, hang.root.why) == ([1], "raised")
    assert "ValueError: not finite" in hang.text
    assert line_of("raise ValueError") in hang.text
    assert hang.evidence is not None
    messages = hang.evidence.dumps[1].calls
    assert (messages.source >= 0).sum() == 3 + 4  # three sent to stage 2, four received of stage 0
    assert (tmp_path / "rank_00001.pt.trace.json.gz").exists()


class Group:
    group_name, group_desc = "7", "pp"


class Work:
    over = False

    def is_completed(self) -> bool:
        return self.over


def test_the_ring_has_what_is_not_over(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_rank", lambda *_: 3)
    monkeypatch.setattr("torch.distributed.get_group_rank", lambda *_: 1)
    ring, work = Ring(Guard()), Work()
    call = ring._around("recv")(lambda *_: work)
    assert call(Group(), [torch.ones(2, 3)], 0, 0) is work
    (entry,) = ring.entries()
    assert (entry["profiling_name"], entry["output_sizes"], entry["retired"]) == ("gloo:recv 1<-0", [[2, 3]], False)
    assert entry["frames"][0]["filename"] == __file__
    work.over = True
    assert ring.entries()[0]["retired"]
    broken = ring._around("send")(lambda *_: work)
    assert broken(None, None) is work  # what cannot be noted is called all the same


def test_a_job_that_ends_well_is_left_as_it_was(tmp_path):
    owner = private.process_group_type()
    kept = {name: vars(owner)[name] for name in ("send", "recv", "recv_anysource")}
    handlers, variable = [signal.getsignal(number) for number in hang_watch.SIGNALS], os.environ.get("TORCH_FR_BUFFER_SIZE")
    with record(tmp_path, wait=0, active=1, flight_recorder=5) as recorder:
        assert signal.getsignal(signal.SIGTERM) not in handlers
        recorder.step()
    assert [signal.getsignal(number) for number in hang_watch.SIGNALS] == handlers
    assert (signal.set_wakeup_fd(-1), os.environ.get("TORCH_FR_BUFFER_SIZE")) == (-1, variable)
    assert {name: vars(owner)[name] for name in kept} == kept
    assert not list(tmp_path.glob("*stacks*"))


def test_the_end_of_a_forked_worker_is_not_the_end_of_the_job(tmp_path, monkeypatch):
    monkeypatch.setattr(hang_watch, "ANSWER_S", 0.2)
    with record(tmp_path, wait=9, flight_recorder=0.4):
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        worker.terminate()
        worker.join()
        assert worker.exitcode == -signal.SIGTERM
        time.sleep(0.8)
    assert not list(tmp_path.glob("*.stacks.txt"))


@pytest.mark.parametrize("given", ["soon", -1, float("inf")])
def test_what_is_no_time_is_warned_of_and_the_loop_goes_on(given, tmp_path):
    with pytest.warns(UserWarning, match="flight_recorder|soon"), record(tmp_path, flight_recorder=given) as recorder:
        pass
    assert recorder.failed


def test_an_exception_keeps_the_trace(tmp_path):
    with pytest.raises(ZeroDivisionError), record(tmp_path, wait=0, warmup=0, active=5, flight_recorder=True) as recorder:
        recorder.step()
        _ = 1 / 0
    assert [path.suffix for path in recorder.files] == [".gz", ".json"]
    assert "ZeroDivisionError" in (tmp_path / "rank_00000.stacks.txt").read_text()
    assert "ZeroDivisionError" in recorder.files[1].read_text()
