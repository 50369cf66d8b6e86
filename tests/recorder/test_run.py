"""tracekit run: an unchanged program is recorded, at the steps that were given or asked for, the same on all ranks."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("torch")

from tests.recorder.launching import JOBS, free_port
from tracekit.cli.afterwards import reason
from tracekit.errors import UsageError
from tracekit.job.load import LoadOptions, load_job
from tracekit.manifest import decode
from tracekit.recorder.attach import Turns
from tracekit.recorder.folder import empty_folder
from tracekit.recorder.marks import without_hook
from tracekit.recorder.request import Requests, Steps, parse_steps

# What a step is ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stepped", "over"),
    [
        ("aaaa", [None, 2, 3, 4]),
        ("ababab", [None, None, None, 2, None, 3]),  # two optimizers (GAN), or one inside another (ZeroRedundancyOptimizer)
        ("aababa", [None, 2, None, 3, None, 4]),  # one that is seldom used does not make steps longer
    ],
)
def test_a_step_is_over_when_the_last_optimizer_has_stepped(stepped, over):
    turns = Turns()
    assert [turns.over(ord(one)) for one in stepped] == over


def test_where_an_engine_steps_its_own_optimizer_does_not_count():
    """DeepSpeed steps its optimizer once a part of the parameters."""
    turns = Turns()
    assert [turns.over(1), turns.over(1), turns.over(9, engine=True), turns.over(1), turns.over(9, engine=True)] == [None, 2, None, None, 2]


def test_what_is_known_to_be_the_last_ends_the_first_step():
    turns = Turns()
    turns.ends(2, engine=False)
    assert [turns.over(one) for one in (1, 2, 1, 2)] == [None, 1, None, 2]
    turns = Turns()
    turns.ends(9, engine=True)
    assert [turns.over(1), turns.over(9, engine=True), turns.over(1), turns.over(9, engine=True)] == [None, 1, None, 2]


@pytest.mark.parametrize(("text", "steps"), [("10:13", (10, 13)), ("3:4", (3, 4)), ("none", None)])
def test_steps_are_written_as_everywhere(text, steps):
    assert parse_steps(text) == steps


@pytest.mark.parametrize("text", ["", "10", "13:10", "a:b", "10:", "-1:3", "0:3", "10:2000000000", "10:5000"])
def test_steps_that_cannot_be_recorded_are_refused(text):
    with pytest.raises(UsageError, match="--steps"):
        parse_steps(text)


# Which steps, agreed through the folder ------------------------------------------------------------------------------


class Job:
    """Ranks in one folder, each with a clock of its own."""

    def __init__(self, folder, ranks, steps=None):
        self.now = [0.0] * ranks
        self.folder = folder
        self.ranks = [Requests(folder, steps, lambda rank=rank: self.now[rank]) for rank in range(ranks)]
        self.due = [[] for _ in range(ranks)]

    def step(self, number, seconds):
        for rank, requests in enumerate(self.ranks):
            self.now[rank] += seconds
            steps = requests.due(number)
            if steps is not None:
                self.due[rank].append((number, steps))


def test_the_first_steps_are_due_one_before_them(tmp_path):
    job = Job(tmp_path, 2, (10, 13))
    for number in range(2, 20):
        job.step(number, 0.1)
    assert job.due == [[(9, Steps(10, 13, tmp_path))]] * 2


@pytest.mark.parametrize(
    ("first_known", "due"),
    [(1, [(1, 1)]), (2, [(2, 2)])],  # one optimizer; several
)
def test_early_steps_begin_without_a_warm_up_or_as_soon_as_it_is_known_what_a_step_is(first_known, due, tmp_path):
    job = Job(tmp_path, 1, (1, 3))
    for number in range(first_known, 6):
        job.step(number, 0.1)
    assert [(number, steps.first) for number, steps in job.due[0]] == due
    assert job.due[0][0][1].stop == due[0][1] + 2
    assert ("steps 2 to 3 are recorded instead" in job.ranks[0].news) == (first_known == 2)


@pytest.mark.parametrize("seconds", [0.01, 0.3, 1.0, 30.0])
def test_a_request_is_recorded_by_all_ranks_at_the_same_step(seconds, tmp_path):
    """Two requests, one after the other; the decision is at least ten seconds ahead."""
    job = Job(tmp_path, 3)
    job.now = [70.0, 71.0, 69.5]  # the job has taken its time before the first step
    for number in range(2, 5000):
        if number in (50, 2500):
            (tmp_path / "record").touch()
        job.step(number, seconds)
    firsts = [[steps.first for _, steps in due] for due in job.due]
    assert firsts[0] == firsts[1] == firsts[2]
    assert len(firsts[0]) == 2
    assert all(number == steps.first - 1 for due in job.due for number, steps in due)
    assert (firsts[0][0] - 50) * seconds >= 10
    assert {steps.folder for steps in (s for due in job.due for _, s in due)} == {tmp_path / f"steps_{f}_{f + 2}" for f in firsts[0]}
    assert not (tmp_path / "record").exists()


def test_a_rank_that_learns_of_it_too_late_says_so(tmp_path):
    job = Job(tmp_path, 1)
    (tmp_path / ".tracekit-recording.json").write_text(json.dumps({"first": 20, "stop": 23}))
    for number in (30, 31):
        job.step(number, 1)
    assert job.due == [[]]
    assert job.ranks[0].news == "steps 20 to 22 are not recorded: this rank was at step 30 when it learned of them"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"first": "x", "stop": 2}', "\x00"])
def test_a_decision_that_makes_no_sense_is_none(text, tmp_path):
    job = Job(tmp_path, 1)
    (tmp_path / ".tracekit-recording.json").write_text(text)
    for number in range(10):
        job.step(number, 1)
    assert job.due == [[]]


# The folder ----------------------------------------------------------------------------------------------------------


def test_a_folder_that_holds_a_recording_is_replaced_whole_or_not_at_all(tmp_path):
    for folder in (tmp_path / "steps_20_22", tmp_path / "steps_30_32", tmp_path / "steps_of_mine"):
        folder.mkdir()
    for name in ("rank_00000.pt.trace.json.gz", "steps_20_22/rank_00007.manifest.json", ".tracekit-x.json.gz", "mine.txt", "steps_30_32/a"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match="holds a recording; give another folder, or --replace"):
        empty_folder(tmp_path, replace=False)
    assert len(list(tmp_path.iterdir())) == 6
    empty_folder(tmp_path, replace=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", "steps_30_32", "steps_of_mine"]


def test_a_recording_on_demand_is_a_recording(tmp_path):
    (tmp_path / "steps_20_22").mkdir()
    (tmp_path / "steps_20_22" / "rank_00000.manifest.json").touch()
    with pytest.raises(UsageError, match="holds a recording"):
        empty_folder(tmp_path, replace=False)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "-o", "out"], "there is no command to run"),
        (["run", "-o", "out", "--", "no-such-program"], "no-such-program: no such command"),
        (["run", "-o", "out", "--steps", "5", "--", "python"], "--steps '5' is not FIRST:STOP"),
        (["run", "-o", "file/below", "--", "python"], "file/below: Not a directory"),
        (["run", "-o", "full", "--", "python"], "full holds a recording"),
        (["record", "ddp", "-o", "full"], "full holds a recording"),
        (["record", "ddp", "-o", "file/below"], "file/below: Not a directory"),
        (["record", "ddp", "--nproc", "0"], "--nproc 0 is no size that a job can have"),
        (["record", "ddp", "--nproc", "4000"], "a mesh of 4000 ranks is more than one machine can run"),
        (["record", "ddp", "--hidden", "0"], "--hidden 0 is no size"),
        (
            ["record", "fsdp2", "--backend", "fake", "--mesh", "dp_shard=1000000"],
            "a mesh of 1000000 ranks is more than one process",
        ),
    ],
)
def test_what_cannot_be_run_or_recorded_is_refused_in_one_line(arguments, told, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "rank_00000.manifest.json").touch()
    done = subprocess.run([sys.executable, "-m", "tracekit", *arguments], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert told in done.stderr.splitlines()[-1]
    assert len(done.stderr.splitlines()) == 1


def test_workloads_are_listed_a_line_each():
    done = subprocess.run([sys.executable, "-m", "tracekit", "record", "--list"], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) >= 24
    assert all(line.split(maxsplit=1)[1] for line in lines)


# What a command without a recording is told ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        ("python -I train.py", "python -I"),
        ("/usr/bin/python3.11 -X dev -Es train.py", "python3.11 -Es"),
        ("torchrun --no-python python -E -m train", "python -E"),
        ("env -i A=1 python train.py", "env -i"),
        ("sudo -E torchrun train.py", "sudo"),
        ("python -u -m train -I", ""),
        ("python -X importtime -c pass -S", ""),
        ("env A=1 python train.py -I", ""),
    ],
)
def test_what_keeps_the_hook_out_is_named(command, cause):
    assert without_hook(command.split()) == cause


@pytest.mark.parametrize(
    ("left", "steps", "told"),
    [
        (set(), "10:13", "came into no Python of this command; python -I, -E and -S"),
        (set(), "none", "came into no Python of this command"),
        ({"begun"}, "10:13", "no optimizer has stepped in a Python that the start-up hook came into"),
        ({"begun"}, "none", ""),
        ({"begun", "stepped"}, "10:13", "optimizers have stepped, but no process could write at its end"),
        ({"begun", "stepped"}, "none", ""),
        ({"begun", "stepped", "told"}, "10:13", ""),
    ],
)
def test_a_command_without_a_recording_is_told_why(left, steps, told, tmp_path):
    assert (told in reason(tmp_path, left, ["torchrun"], steps)) if told else not reason(tmp_path, left, ["torchrun"], steps)
    (tmp_path / "rank_00001.manifest.json").touch()
    assert not reason(tmp_path, left, ["torchrun"], steps)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-I", "-c", "pass"], "came into no Python of this command; python -I leaves it out: start without -I"),
        (["-c", "import subprocess, sys; subprocess.run([sys.executable, '-E', '-c', 'pass'])"], "no optimizer has stepped in a Python"),
        (["-c", "import os; os.kill(os.getpid(), 9)"], "no optimizer has stepped"),
    ],
)
def test_a_command_whose_python_leaves_the_hook_out_is_told_at_its_end(words, told, tmp_path):
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    around = [sys.executable, "-m", "tracekit", "run", "-o", str(tmp_path / "out"), "--", str(tmp_path / "python")]
    done = subprocess.run([*around, *words], capture_output=True, text=True, check=False)
    assert done.returncode == (-9 if "kill" in words[-1] else 0)
    assert told in done.stderr.splitlines()[-1]
    assert not list((tmp_path / "out").iterdir())


# Whole jobs ----------------------------------------------------------------------------------------------------------

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def launched(*words, folder=None, steps="5:7", environment=None):
    around = [sys.executable, "-m", "tracekit", "run", "-o", str(folder), "--steps", steps, "--"] if folder else []
    launch = [*LAUNCH, "--master-port", str(free_port())] if "--alone" not in words else [sys.executable]
    told = [word for word in words if word != "--alone"]
    return subprocess.Popen([*around, *launch, *told], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finished(process):
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err[-2000:]
    return sorted(re.findall(r"rank \d step \d+: [-+.e\d]+", out)), err  # two ranks may print into one line


@pytest.mark.slow
def test_a_program_that_knows_nothing_of_tracekit_is_recorded_and_computes_the_same(tmp_path):
    plain, _ = finished(launched(str(JOBS / "unchanged.py"), "10"))
    seen, told = finished(launched(str(JOBS / "unchanged.py"), "10", folder=tmp_path))
    assert seen == plain
    assert f"tracekit (rank 0): recorded steps 5 to 6: tracekit analyze {tmp_path}" in told
    manifests = [decode((tmp_path / f"rank_0000{rank}.manifest.json").read_bytes(), "m") for rank in range(2)]
    assert [m.rank for m in manifests] == [0, 1]
    assert manifests[0].roles == {"dp_replicate": "dp_replicate"}
    assert manifests[0].optimizer.kind == "AdamW"
    assert [p.name for p in manifests[0].parameters] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    job = load_job([str(tmp_path)], LoadOptions())
    assert job.steps == [5, 6]
    calls = job.operations[job.operations["launch_step_number"] >= 0]
    assert set(calls["purpose"]) == {"gradient_sync"}


@pytest.mark.slow
def test_a_program_that_ends_before_its_steps_or_within_them(tmp_path):
    _, told = finished(launched("--alone", str(JOBS / "unchanged.py"), "3", folder=tmp_path / "before"))
    assert "recorded nothing: the program ended after 3 steps, step 5 was to be the first" in told
    finished(launched("--alone", str(JOBS / "unchanged.py"), "6", folder=tmp_path / "within"))
    assert decode((tmp_path / "within" / "rank_00000.manifest.json").read_bytes(), "m").steps == [5]


@pytest.mark.slow
def test_a_running_job_records_when_it_is_asked_to(tmp_path):
    process = launched("--alone", str(JOBS / "unchanged.py"), "400", "0.05", folder=tmp_path, steps="none")
    deadline = time.monotonic() + 200
    while not (tmp_path / "running").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    os.kill(process.pid, signal.SIGUSR2)
    finished(process)
    (folder,) = tmp_path.glob("steps_*")
    assert len(decode((folder / "rank_00000.manifest.json").read_bytes(), "m").steps) == 3


def test_another_sitecustomize_is_still_imported(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('theirs', __file__.endswith('sitecustomize.py'))")
    around = [sys.executable, "-m", "tracekit", "run", "-o", str(tmp_path / "out"), "--", sys.executable]
    around += ["-c"]
    code = "import sys; print('torch' in sys.modules, sys.modules['sitecustomize'].__file__, any('startup' in p for p in sys.path))"
    done = subprocess.run([*around, code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.stdout.splitlines()[-2:] == ["theirs True", f"False {tmp_path / 'sitecustomize.py'} False"]
