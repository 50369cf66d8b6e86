"""An answer that is kept is the same, byte for byte, and only as long as nothing that it depends on has changed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.builder import Trace
from tracekit.cli.main import cli
from tracekit.executors.base import Lost
from tracekit.executors.local import LocalExecutor
from tracekit.job import load


@pytest.fixture
def job(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    trace = Trace(0, 1)
    for step in (1, 2):
        trace.step(step, 1000 * step, 900)
        trace.kernel("gemm", 1000 * step + 50, 100, launch=1000 * step + 10, op="aten::mm")
    trace.write(folder / "rank_00000.pt.trace.json")
    return folder


def analyzed(job, *more):
    """(terminal, report, JSON, Markdown) of one run with a cache beside the job."""
    outputs = [job.parent / f"out.{kind}" for kind in ("html", "json", "md")]
    for path in outputs:
        path.unlink(missing_ok=True)
    options = ["-o", outputs[0], "--json", outputs[1], "--markdown", outputs[2], "--cache", job.parent / "cache", *more]
    result = CliRunner().invoke(cli, ["analyze", str(job), *map(str, options)])
    assert result.exit_code == 0, result.output
    return [result.output, *(path.read_bytes() for path in outputs if path.exists())]


def answers(job):
    return sorted((job.parent / "cache").glob("*.answer"))


@pytest.fixture
def reads(monkeypatch):
    """How often files were read."""
    times = []
    whole = load._read_all
    monkeypatch.setattr(load, "_read_all", lambda *given: times.append(1) or whole(*given))
    return times


@pytest.mark.parametrize("more", [[], ["--anonymize"], ["--operations"], ["--what-if", "perfect_overlap"]], ids=" ".join)
def test_the_second_run_reads_nothing_and_writes_the_same_bytes(job, reads, more):
    first = analyzed(job, *more)
    assert len(first) == 4
    assert analyzed(job, *more) == first
    assert len(reads) == 1


def test_options_that_change_the_answer_are_another_question(job, reads):
    whole = analyzed(job)
    chosen = analyzed(job, "--steps", "1:2")
    assert chosen[2] != whole[2]
    assert analyzed(job, "--ranks", "0", "--jobs", "1")[2] == whole[2]
    analyzed(job, "--jobs", "2")  # how files are read does not
    assert len(reads) == 3


def test_what_the_answer_depends_on(job, reads):
    analyzed(job)
    trace = job / "rank_00000.pt.trace.json"
    (job / "rank_00000.manifest.json").write_text("{}")
    analyzed(job)
    (job / "another.json").write_text("{}")
    assert "another.json" in analyzed(job)[0]
    trace.chmod(0o640)  # the time of its content stays
    analyzed(job)
    os.utime(trace)
    analyzed(job)
    assert len(reads) == 5


def test_a_report_that_was_not_asked_for_is_made_when_it_is(job, reads):
    options = ["analyze", str(job), "--no-report", "--cache", str(job.parent / "cache")]
    assert CliRunner().invoke(cli, options).exit_code == 0
    assert b"<html" in analyzed(job)[1]
    assert CliRunner().invoke(cli, options).exit_code == 0
    assert len(reads) == 2


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:50] + b"\0" + data[51:], lambda _: b""])
def test_a_damaged_entry_is_made_anew(job, reads, damage):
    first = analyzed(job)
    for path in answers(job):
        path.write_bytes(damage(path.read_bytes()))
    assert analyzed(job) == first
    assert analyzed(job) == first
    assert len(reads) == 2


def test_what_was_lost_to_a_killed_worker_is_not_kept(job, monkeypatch):
    def lose(self, function, items):
        yield 0, Lost("its worker was killed")
        for index in range(1, len(items)):
            yield index, function(items[index])

    (job / "rank_00001.pt.trace.json").write_bytes((job / "rank_00000.pt.trace.json").read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(LocalExecutor, "map", lose)
        assert "its worker was killed" in analyzed(job)[0]
    assert answers(job) == []
    assert "its worker was killed" not in analyzed(job)[0]


def test_a_trace_is_not_written_over_by_a_kept_answer(job):
    analyzed(job)
    trace = job / "rank_00000.pt.trace.json"
    before = trace.read_bytes()
    result = CliRunner().invoke(cli, ["analyze", str(job), "--no-report", "--json", str(trace), "--cache", str(job.parent / "cache")])
    assert (result.exit_code, trace.read_bytes()) == (2, before)


def test_a_kept_answer_waits_for_no_heavy_library(job):
    analyzed(job)
    code = (
        "import sys; from click.testing import CliRunner; from tracekit.cli.main import cli; "
        "result = CliRunner().invoke(cli, sys.argv[1:]); print(result.exit_code, 'steps' in result.output, "
        "[name for name in ('pandas', 'numba', 'pyarrow', 'jinja2') if name in sys.modules])"
    )
    command = ["analyze", str(job), "-o", str(job.parent / "out.html"), "--cache", str(job.parent / "cache")]
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout.split("\n")[0] == "0 True []", done.stdout
