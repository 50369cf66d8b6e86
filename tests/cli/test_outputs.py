"""Nothing that is said about a job replaces its traces, or another answer."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.builder import Trace
from tracekit.cli import record
from tracekit.cli.main import cli


def analyze(*args):
    return CliRunner().invoke(cli, ["analyze", *map(str, args)])


def traces(folder):
    folder.mkdir()
    for rank in (0, 1):
        trace = Trace(rank, 2)
        trace.step(1, 0, 100)
        trace.collective("allreduce", 10, 20, seq=1)
        trace.write(folder / f"rank{rank}.json")
    return folder


def test_a_trace_is_never_overwritten(tmp_path):
    folder = traces(tmp_path / "job")
    before = (folder / "rank0.json").read_bytes()
    for option in ("--json", "-o"):
        result = analyze(folder, "-o", tmp_path / "x.html", option, folder / "rank0.json", "--no-cache")
        assert result.exit_code == 2
        assert "is one of the traces" in result.output
    assert (folder / "rank0.json").read_bytes() == before


def test_report_and_json_need_two_files(tmp_path):
    result = analyze(traces(tmp_path / "job"), "-o", tmp_path / "x", "--json", tmp_path / "x")
    assert result.exit_code == 2
    assert "cannot both be written" in result.output


def test_a_report_is_not_for_standard_output(tmp_path):
    assert analyze(traces(tmp_path / "job"), "-o", "-").exit_code == 2


def test_the_cache_changes_nothing(tmp_path):
    folder = traces(tmp_path / "job")
    for name in ("first", "again"):
        assert analyze(folder, "--cache", tmp_path / "cache", "--no-report", "--json", tmp_path / name).exit_code == 0
    first, again = (json.loads((tmp_path / name).read_text()) for name in ("first", "again"))
    assert first == again


def test_debug_may_stand_anywhere(tmp_path):
    assert CliRunner().invoke(cli, ["analyze", str(tmp_path / "nothing"), "--debug"]).exit_code == 2


def test_what_a_manifest_says_never_reaches_the_terminal_raw(tmp_path, capsys):
    manifest = json.loads((Path(__file__).resolve().parents[2] / "sample_traces" / "fsdp2_2" / "rank_00000.manifest.json").read_text())
    acting = "\x1b[31m\x07\u202e"
    manifest["backend"] += acting
    manifest["coordinate"] = {f"dp{acting}": 0}
    manifest["groups"][0]["axis"] = f"tp{acting}"
    manifest["notes"] = [acting]
    (tmp_path / "rank_00000.manifest.json").write_text(json.dumps(manifest))
    record._tell(tmp_path)
    told = capsys.readouterr().out
    assert "its process groups" in told
    assert not set(acting[:1] + acting[5:]) & set(told)


@pytest.mark.parametrize("target", ["nowhere/report.html", "report.html"], ids=["dangling", "circle"])
def test_an_output_that_is_a_link_to_nowhere_is_refused_before_the_work_and_named(tmp_path, target):
    link = tmp_path / "report.html"
    link.symlink_to(tmp_path / target)
    result = analyze(tmp_path, "-o", link)
    assert result.exit_code == 2
    assert "report.html' is a link" in result.output
    assert ("nowhere" in result.output) is ("nowhere" in target)


def test_a_link_to_a_file_that_is_not_there_yet_is_written_through(tmp_path):
    traces(tmp_path / "job")
    (tmp_path / "out").mkdir()
    link = tmp_path / "report.html"
    link.symlink_to(tmp_path / "out" / "report.html")
    assert analyze(tmp_path / "job", "-q", "-o", link, "--no-cache").exit_code == 0
    assert link.is_symlink()
    assert (tmp_path / "out" / "report.html").stat().st_size > 1000


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no disk that is always full")
def test_a_full_disk_is_named_and_the_other_output_is_written(tmp_path):
    traces(tmp_path / "job")
    for full, other, ending in (("-o", "--json", "out.json"), ("--json", "-o", "out.html")):
        result = analyze(tmp_path / "job", "-q", full, "/dev/full", other, tmp_path / ending, "--no-cache")
        assert result.exit_code == 2
        assert result.output.strip() == "tracekit: /dev/full: No space left on device"
        assert (tmp_path / ending).stat().st_size > 1000
