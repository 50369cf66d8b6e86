"""Nothing that is said about a job replaces its traces, or another answer."""

import json

from click.testing import CliRunner

from tests.builder import Trace
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


def test_a_report_that_cannot_be_written_costs_the_json_nothing(tmp_path):
    link, found = tmp_path / "report.html", tmp_path / "x.json"
    link.symlink_to(tmp_path / "gone" / "report.html")
    result = analyze(traces(tmp_path / "job"), "-o", link, "--json", found, "--no-cache")
    assert result.exit_code == 2
    assert str(link) in result.output
    assert json.loads(found.read_text())["job"]["ranks"] == [0, 1]
