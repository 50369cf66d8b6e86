"""A recorded job computes what it computes without the recorder, before, in and after the window, whatever it does."""

import contextlib
import copy
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import types
import warnings

import pytest

torch = pytest.importorskip("torch")

from tests.recorder.launching import JOBS, run_job  # noqa: E402
from tracekit import record  # noqa: E402
from tracekit.job.load import LoadOptions, load_job  # noqa: E402
from tracekit.manifest import decode  # noqa: E402
from tracekit.recorder import history, private  # noqa: E402


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Digests of each step of the job that nobody records, by rank."""
    for _ in range(2):  # nothing of tracekit runs in it: a port that another job took meanwhile is no fault of ours
        with contextlib.suppress(AssertionError):
            return digests(tmp_path_factory.mktemp("plain"))
    return digests(tmp_path_factory.mktemp("plain"))


def digests(folder, *arguments, **environment):
    run_job(JOBS / "everything.py", str(folder / "digests"), *arguments, environment=environment)
    return [(folder / f"digests.{rank}").read_text().split() for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "all"])
def test_every_step_of_a_job_with_everything_in_it_is_the_same_bit_for_bit(plain, options, tmp_path):
    assert digests(tmp_path, str(tmp_path / "traces"), ALL_OPTIONS=options) == plain
    job = load_job([str(tmp_path / "traces")], LoadOptions())
    assert job.ranks == [0, 1]
    assert job.steps == [3, 4, 5]


# What a loop may do to the recorder ----------------------------------------------------------------------------------


class Loop:
    """A small training loop; ``losses`` of the steps it ran."""

    def __init__(self):
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.Adam(self.net.parameters())
        self.losses = []

    def step(self):
        loss = self.net(torch.randn(2, 4)).square().sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def run(self, *steppers, steps=8):
        for _ in range(steps):
            self.step()
            for stepper in steppers:
                stepper.step()
        return self.losses


@pytest.fixture
def losses():
    """Of the loop without anything around it."""
    return Loop().run()


def users_profiler(wait, seen):
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=wait, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda found: seen.extend(e.name for e in found.events() if e.name.startswith("ProfilerStep")),
    )


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("wait", [1, 2, 3, 4])
def test_another_profiler_on_the_loop_keeps_its_steps(outer, first, wait, losses, tmp_path):
    """Ours warms up in step 1 and records 2 to 4; theirs begin at the same moment, inside, or behind, in any order of calls."""
    loop, seen = Loop(), []
    with warnings.catch_warnings(record=True) as told, contextlib.ExitStack() as stack:
        warnings.simplefilter("always")
        managers = {"theirs": users_profiler(wait, seen), "ours": record(tmp_path, model=loop.net)}
        order = ["theirs", "ours"] if outer else ["ours", "theirs"]
        entered = {name: stack.enter_context(managers[name]) for name in order}
        assert loop.run(*(entered[name] for name in (["theirs", "ours"] if first else ["ours", "theirs"]))) == losses
    assert len(seen) == 2
    assert wait == 4 or [w for w in told if "another profiler" in str(w.message)]
    assert not torch.autograd._profiler_enabled()


def test_a_second_recorder_leaves_the_first_alone(losses, tmp_path):
    loop = Loop()
    with record(tmp_path / "a") as first, pytest.warns(UserWarning, match="another profiler is at work"), record(tmp_path / "b") as second:
        assert loop.run(first, second) == losses
    assert first.files
    assert not second.files


def test_recordings_one_after_another_are_each_whole(losses, tmp_path):
    loop = Loop()
    with record(tmp_path / "a", active=1, model=loop.net) as first:
        loop.run(first, steps=4)
    with record(tmp_path / "b", active=1, model=loop.net, optimizer=loop.optimizer) as second:
        assert loop.run(second, steps=4) == losses
    assert first.files
    assert second.files


def test_warnings_that_are_errors_do_not_come_from_the_recorder(losses, tmp_path, capsys):
    loop = Loop()
    (tmp_path / "file").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with record(tmp_path / "file", model="none", optimizer=3, warmup=0) as recorder:
            assert loop.run(recorder) == losses
    told = capsys.readouterr().err
    assert told.count("model of type str is none") == 1
    assert "tracekit stopped recording: FileExistsError" in told


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda real: real,
        lambda real: [real, real],
        lambda real: types.SimpleNamespace(param_groups=real.param_groups, state=real.state, step=real.step),
        lambda real: types.SimpleNamespace(param_groups=real.param_groups),
        lambda real: types.SimpleNamespace(optimizer=real, param_groups=[]),
    ],
)
def test_any_optimizer_like_object_is_accepted(optimizer, losses, tmp_path):
    loop = Loop()
    with record(tmp_path, model=loop.net, optimizer=optimizer(loop.optimizer)) as recorder:
        assert loop.run(recorder) == losses
    assert len(recorder.files) == 2


@pytest.mark.parametrize("arguments", [{"optimizer": 3}, {"model": "net"}, {"model": [None]}, {"mesh": "dp"}, {"mesh": 7}])
def test_what_is_no_model_optimizer_or_mesh_is_left_out_with_a_note(arguments, losses, tmp_path):
    loop = Loop()
    with pytest.warns(UserWarning, match=next(iter(arguments))), record(tmp_path, **arguments) as recorder:
        assert loop.run(recorder) == losses
    manifest = decode((tmp_path / "rank_00000.manifest.json").read_bytes(), "m")
    assert any(next(iter(arguments)) in note for note in manifest.notes)


def test_an_unusable_folder_is_no_reason_to_stop(losses):
    loop = Loop()
    with pytest.warns(UserWarning, match="tracekit stopped recording: TypeError"), record(None, model=loop.net) as recorder:
        assert loop.run(recorder) == losses


def test_a_forked_child_leaves_the_recording_to_its_parent(losses, tmp_path):
    loop = Loop()
    with record(tmp_path, model=loop.net, optimizer=loop.optimizer) as recorder:
        loop.run(recorder, steps=3)
        child = os.fork()
        if child == 0:
            try:
                loop.step()
                recorder.step()
                recorder.stop()
            finally:
                os._exit(0 if not recorder.files and not recorder.failed else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert not list(tmp_path.glob("*.gz"))
        assert loop.run(recorder, steps=5) == losses
    assert len(recorder.files) == 2


def test_workers_of_a_data_loader_are_not_disturbed(tmp_path):
    loop = Loop()
    data = torch.utils.data.DataLoader(torch.arange(8.0), num_workers=2)
    with record(tmp_path, model=loop.net) as recorder:
        loop.run(recorder, steps=2)
        assert sorted(float(batch) for batch in data) == list(range(8))
        loop.run(recorder)
    assert len(recorder.files) == 2


# What is put in place for the window ---------------------------------------------------------------------------------


class Base:
    def method(self):
        return "method", self

    @staticmethod
    def static(value):
        return "static", value

    @classmethod
    def klass(cls):
        return "class", cls


class Child(Base):
    pass


@pytest.mark.parametrize("owner", [Base, Child, torch.distributed.ProcessGroup])
@pytest.mark.parametrize("name", ["method", "static", "send"])
def test_what_was_replaced_is_put_back_as_it_was(owner, name):
    if not hasattr(owner, name):
        pytest.skip("it has none")
    before = dict(vars(owner))
    undo = private.replaced(owner, name, lambda original: original)
    assert dict(vars(owner)) != before
    undo()
    assert dict(vars(owner)) == before


def test_a_replaced_method_still_gets_what_it_had():
    seen = []

    def make(original):
        return lambda *args: seen.append(args) or original(*args)

    undo = [private.replaced(Base, name, make) for name in ("method", "static")]
    one = Base()
    assert one.method() == ("method", one)
    assert Base.static(3) == one.static(3) == ("static", 3)
    assert seen == [(one,), (3,), (3,)]
    for step in undo:
        step()
    assert one.method() == ("method", one)
    assert Base.static(3) == ("static", 3)


def test_what_others_have_put_over_it_stays():
    calls = []
    undo = private.replaced(Base, "method", lambda original: lambda self: calls.append("ours") or original(self))
    ours = Base.method
    Base.method = lambda self: calls.append("theirs") or ours(self)
    try:
        undo()
        assert Base().method()[0] == "method"
        assert calls == ["theirs"]
    finally:
        del Base.method
        Base.method = lambda self: ("method", self)


class Cuda:
    """Stands in for the CUDA allocator's history."""

    def __init__(self, monkeypatch, on):
        self.on, self.mark, self.calls, self.entries, self.events = on, "the user's", [], None, []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", self.snapshot)
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: self.on, raising=False)
        monkeypatch.setattr(torch.cuda.memory, "_set_memory_metadata", lambda text: setattr(self, "mark", text))
        monkeypatch.setattr(torch.cuda.memory, "_get_memory_metadata", lambda: self.mark)

    def record(self, enabled="all", **options):
        self.on = enabled is not None
        self.calls.append("start" if self.on else "stop")
        self.entries = options.get("max_entries", self.entries)

    def snapshot(self):
        self.calls.append("snapshot")
        return {"segments": [], "device_traces": [self.events]}


@pytest.mark.parametrize(("on", "calls"), [(False, ["start", "snapshot", "stop"]), (True, ["snapshot"])])
def test_a_history_that_the_user_started_stays_and_phases_are_not_left_behind(on, calls, monkeypatch, tmp_path):
    cuda, loop = Cuda(monkeypatch, on), Loop()
    with record(tmp_path, model=loop.net) as recorder:
        for _ in range(8):
            with recorder.phase("backward"):
                assert cuda.mark == ("backward" if recorder._window.marks_allocations else "the user's")
            loop.run(recorder, steps=1)
    assert cuda.calls == calls
    assert cuda.on == on
    assert cuda.mark == "the user's"


def test_a_phase_that_is_over_is_not_written_on_allocations(monkeypatch, tmp_path):
    cuda, loop, seen = Cuda(monkeypatch, on=False), Loop(), set()
    with record(tmp_path, model=loop.net) as recorder:
        for _ in range(8):
            with recorder.phase("forward"), contextlib.suppress(KeyError), recorder.phase("attention"):
                raise KeyError
            seen.add(cuda.mark)
            loop.run(recorder, steps=1)
    assert seen == {"the user's", ""}


class Slow:
    """Is written only when the job has gone on."""

    written, gone_on = False, threading.Event()

    def __reduce__(self):
        Slow.written = Slow.gone_on.wait(20)
        return (str, ())


def test_a_history_is_bounded_in_bytes_and_written_while_the_job_goes_on(monkeypatch, tmp_path):
    cuda, loop = Cuda(monkeypatch, on=False), Loop()
    snapshot = tmp_path / "rank_00000.memory_snapshot.pickle"
    with record(tmp_path, model=loop.net) as recorder:
        loop.run(recorder, steps=3)
        assert 100_000 < cuda.entries < history.MOST_BYTES / history.ENTRY_BYTES
        assert cuda.entries * (history.ENTRY_BYTES + history.FRAME_BYTES * history.depth()) < history.MOST_BYTES
        cuda.events = [Slow(), *[None] * cuda.entries]
        loop.run(recorder, steps=3)
        assert recorder.over
        assert not Slow.written
        assert not snapshot.exists()
        Slow.gone_on.set()
    assert len(pickle.loads(snapshot.read_bytes())["device_traces"][0]) == len(cuda.events)
    assert not list(tmp_path.glob(".tracekit*"))
    notes = decode((tmp_path / "rank_00000.manifest.json").read_bytes(), "m").notes
    assert notes == [f"the history of the CUDA allocator holds its last {cuda.entries} events: older ones are lost"]


def test_a_history_that_cannot_be_taken_or_written_costs_nothing_else(monkeypatch, tmp_path):
    cuda, loop = Cuda(monkeypatch, on=False), Loop()
    cuda.events = [threading.Lock()]
    with (
        pytest.warns(UserWarning, match="memory_snapshot.pickle was not written: TypeError: cannot pickle"),
        record(tmp_path / "a", model=loop.net) as recorder,
    ):
        loop.run(recorder, steps=8)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: 1 / 0)
    with record(tmp_path / "b", model=loop.net) as recorder:
        loop.run(recorder, steps=8)
    assert not cuda.on
    assert [len(list((tmp_path / name).iterdir())) for name in "ab"] == [2, 2]
    (note,) = decode((tmp_path / "b" / "rank_00000.manifest.json").read_bytes(), "m").notes
    assert note == "the CUDA allocator's history is not recorded: ZeroDivisionError: division by zero"


# What the job does with its model within the window -------------------------------------------------------------------


def test_models_that_are_copied_or_saved_within_the_window_are_whole_and_know_nothing_of_tracekit(tmp_path):
    loop, copies = Loop(), []
    with record(tmp_path / "out", model=loop.net, optimizer=loop.optimizer) as recorder:
        for step in range(8):
            loop.run(recorder, steps=1)
            if step == 4:
                saved = io.BytesIO()
                torch.save([loop.net, loop.optimizer], saved)
                copies = [copy.deepcopy(loop.net), *torch.load(io.BytesIO(saved.getvalue()), weights_only=False)]
                assert b"tracekit" not in saved.getvalue()
                here = loop.net(torch.ones(2, 4))
                assert all(torch.equal(one(torch.ones(2, 4)), here) for one in copies[:2])
                copies[0](torch.ones(2, 4)).sum().backward()
    assert not recorder.failed
    assert len(recorder.steps) == 3
    assert not loop.net._forward_hooks


def test_a_model_that_is_compiled_whole_within_the_window_has_no_hook_in_its_graph(tmp_path):
    loop = Loop()
    with record(tmp_path, model=loop.net, optimizer=loop.optimizer) as recorder:
        for step in range(8):
            if step == 3:
                whole = torch.compile(loop.net, backend="eager", fullgraph=True)
                assert torch.equal(whole(torch.ones(2, 4)), loop.net(torch.ones(2, 4)))
            loop.run(recorder, steps=1)
    assert not recorder.failed


def test_a_folder_is_where_it_was_when_the_loop_began(tmp_path, monkeypatch):
    loop = Loop()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with record("out", model=loop.net) as recorder:
        loop.run(recorder, steps=3)
        monkeypatch.chdir(tmp_path / "elsewhere")
        loop.run(recorder, steps=3)
    assert len(list((tmp_path / "out").iterdir())) == 2


# A job that ends -----------------------------------------------------------------------------------------------------

ENDING = """
import os, signal, sys, torch
from tracekit import record
net = torch.nn.Linear(4, 4)
with record(sys.argv[1], model=net) as recorder:
    for step in range(10):
        net(torch.randn(2, 4)).sum().backward()
        recorder.step()
        if step == 3:
            exec(sys.argv[2])
"""


@pytest.mark.parametrize(
    ("act", "code", "kept"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, True),
        ("os.kill(os.getpid(), signal.SIGHUP)", -signal.SIGHUP, True),
        ("sys.exit(5)", 5, True),
        ("child = os.fork(); child or sys.exit(4); sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))", 4, True),
        ("raise KeyboardInterrupt", -signal.SIGINT, True),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); os.kill(os.getpid(), signal.SIGTERM)", 7, True),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, False),
        ("os._exit(9)", 9, False),
    ],
)
def test_a_job_that_is_ended_keeps_its_recording_and_its_exit_code(act, code, kept, tmp_path):
    done = subprocess.run([sys.executable, "-c", ENDING, str(tmp_path), act], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == code, done.stderr
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == (["rank_00000.manifest.json", "rank_00000.pt.trace.json.gz"] if kept else [])
    if kept:
        assert decode((tmp_path / names[0]).read_bytes(), "m").steps == [2, 3]
