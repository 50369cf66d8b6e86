"""A second look at the same traces gives the same, and believes nothing that is not a window."""

import hashlib
import json
import os
import pickle
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.builder import Trace
from tracekit.cli.main import cli
from tracekit.job import window, window_cache

SAMPLE = Path(__file__).resolve().parents[2] / "sample_traces" / "fsdp2_2"


def analyzed(path, cache, *more):
    """The document; by the windows that are kept, not by a whole answer."""
    for answer in cache.glob("*.answer"):
        answer.unlink()
    result = CliRunner().invoke(
        cli, ["analyze", str(path), "--no-report", "-q", "--operations", "--cache", str(cache), "--json", "-", *more]
    )
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_second_run_reads_no_events_and_says_the_same(tmp_path, monkeypatch):
    first = analyzed(SAMPLE, tmp_path / "cache")

    def read(*_):
        raise AssertionError("the trace was read again")

    monkeypatch.setattr(window, "read_tables", read)
    assert analyzed(SAMPLE, tmp_path / "cache") == first


def job(folder):
    folder.mkdir()
    trace = Trace(0, 1)
    for step in (1, 2):
        trace.step(step, 1000 * step, 900)
        trace.kernel("gemm", 1000 * step + 50, 100, launch=1000 * step + 10, op="aten::mm")
    trace.write(folder / "rank_00000.pt.trace.json")
    return folder


def entries(cache):
    return sorted(path for path in cache.iterdir() if path.suffix == ".window")


def test_another_choice_of_steps_and_a_changed_manifest_are_read_anew(tmp_path):
    folder, cache = job(tmp_path / "job"), tmp_path / "cache"
    assert analyzed(folder, cache)["job"]["steps"] == [1, 2]
    assert analyzed(folder, cache, "--steps", "1:2")["job"]["steps"] == [1]
    assert len(entries(cache)) == 2
    (folder / "rank_00000.manifest.json").write_text("{}")
    analyzed(folder, cache)
    assert len(entries(cache)) == 3


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:20], lambda data: b"", lambda data: data[:-9] + b"x" + data[-8:]]
)
def test_a_damaged_entry_is_written_anew(tmp_path, damage):
    folder, cache = job(tmp_path / "job"), tmp_path / "cache"
    first = analyzed(folder, cache)
    (entry,) = entries(cache)
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    assert analyzed(folder, cache) == first
    assert entry.read_bytes()[:8] == whole[:8]


class Harm:
    def __init__(self, call, *arguments):
        self.call = (call, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("harm", [Harm(os.system, "touch harmed"), Harm(eval, "1"), Harm(Path, "x"), Harm(window.read_window, None, None)])
def test_a_planted_entry_runs_nothing(tmp_path, monkeypatch, harm):
    monkeypatch.chdir(tmp_path)
    folder, cache = job(tmp_path / "job"), tmp_path / "cache"
    first = analyzed(folder, cache)
    (entry,) = entries(cache)
    body = pickle.dumps(harm)
    entry.write_bytes(window_cache._MAGIC + hashlib.sha256(body).digest() + body)
    assert analyzed(folder, cache) == first
    assert not (tmp_path / "harmed").exists()
