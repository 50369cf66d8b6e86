"""``tracekit analyze`` end to end on hand-made traces."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.builder import Trace, group
from tracekit.cli.main import cli


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Two ranks, two steps of 1 ms: a gemm, then an all-reduce along tp for which rank 0 waits 100 us."""
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in (0, 1):
        trace = Trace(rank=rank, world_size=2, groups=[group("0", "default_pg", [0, 1]), group("3", "mesh_tp", [0, 1])])
        for step in (0, 1):
            start = 1000 * step
            trace.step(10 + step, start, 1000)
            trace.kernel("gemm</script>", start + 100, 500, launch=start + 20, op="aten::mm")
            late = 100 * rank
            trace.collective("allreduce", start + 650 + late, 250 - late, group="3", description="mesh_tp", seq=step + 1, launch=start + 40)
        trace.write(folder / f"rank{rank}.json")
    return folder


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["analyze", *map(str, arguments), "--no-cache"])


def test_a_summary_a_report_and_json(traces: Path, tmp_path: Path) -> None:
    report, data = tmp_path / "out.html", tmp_path / "out.json"
    result = run(traces, "-o", report, "--json", data)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "2 of 2 ranks" in result.stdout
    assert "A step takes 1 ms on average: 50% compute" in result.stdout
    assert result.stdout.endswith(f"Report: {report}\n")
    assert report.read_text().startswith("<!DOCTYPE html>")
    found = json.loads(data.read_text())
    assert found["job"]["mesh"]["axes"] == [{"name": "tp", "size": 2}]
    assert [(row["rank"], row["step"], row["compute_us"], row["exposed_comm_us"]) for row in found["breakdown"]] == [
        (0, 10, 500.0, 250.0),
        (0, 11, 500.0, 250.0),
        (1, 10, 500.0, 150.0),
        (1, 11, 500.0, 150.0),
    ]
    assert "operations" not in found


def test_the_default_report_is_in_the_current_folder(traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "Report: tracekit-report.html" in run(traces).stdout
    assert (tmp_path / "tracekit-report.html").exists()


def test_no_report(traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(traces, "--no-report")
    assert "Report:" not in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["traces"]


def test_operations_are_added_on_request(traces: Path, tmp_path: Path) -> None:
    data = tmp_path / "out.json"
    run(traces, "--no-report", "--json", data, "--operations")
    operations = json.loads(data.read_text())["operations"]
    assert [(o["kind"], o["seq"], o["step"], o["last_rank"], o["skew_us"]) for o in operations] == [
        ("all_reduce", 1, 10, 1, 100.0),
        ("all_reduce", 2, 11, 1, 100.0),
    ]
    ends = [rank["end_us"] for operation in operations for rank in operation["ranks"].values()]
    assert ends == [900.0, 900.0, 1900.0, 1900.0]


def test_quiet_prints_nothing(traces: Path) -> None:
    result = run(traces, "--no-report", "-q")
    assert (result.exit_code, result.output) == (0, "")


def test_verbose_says_how_long_it_took(traces: Path) -> None:
    words = [line.split(" in ")[0] for line in run(traces, "--no-report", "-v").stderr.splitlines()]
    assert words == ["started", "read", "analyzed", "written"]


def test_chosen_steps_and_ranks(traces: Path, tmp_path: Path) -> None:
    data = tmp_path / "out.json"
    run(traces, "--no-report", "--json", data, "--steps", "11", "--ranks", "1")
    found = json.loads(data.read_text())
    assert [(row["rank"], row["step"]) for row in found["breakdown"]] == [(1, 11)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "5:2"], "holds no step"),
        (["--ranks", "x"], "is no list of ranks"),
        (["--mesh", "tp"], "is not NAME=SIZE"),
        (["--jobs", "0"], "not in the range"),
        (["-o", "no/such/folder/x.html"], "does not exist"),
        (["-o", "x.html", "--no-report"], "exclude each other"),
        (["--operations"], "--json FILE"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_read(options: list[str], words: str) -> None:
    result = CliRunner().invoke(cli, ["analyze", "does-not-exist", *options])
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_a_missing_path_is_one_line() -> None:
    result = run("does-not-exist", "--no-report")
    assert result.exit_code == 2
    assert "does-not-exist" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_unreadable_file_costs_one_line_and_the_rest_is_analyzed(traces: Path) -> None:
    (traces / "notes.json").write_text("{}")
    (traces / "empty.json").write_text("")
    result = run(traces, "--no-report")
    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines() if line.startswith("! ")]
    assert [line.split(":")[0] for line in lines] == ["! empty.json", "! notes.json"]
    assert "2 of 2 ranks" in result.stdout


def test_strict_still_writes_everything_then_exits_with_3(traces: Path, tmp_path: Path) -> None:
    (traces / "rank1.json").unlink()
    report = tmp_path / "out.html"
    assert run(traces, "-o", report).exit_code == 0
    report.unlink()
    result = run(traces, "-o", report, "--strict")
    assert result.exit_code == 3
    assert result.stderr.startswith("tracekit: --strict: 1 of 2 ranks are missing;")
    assert report.exists()


def test_strict_is_content_with_a_whole_job(traces: Path) -> None:
    assert run(traces, "--no-report", "--strict").exit_code == 0


def process(*arguments: str | Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "tracekit", *map(str, arguments)], capture_output=True, check=False)


def test_json_on_standard_output_is_pure(traces: Path) -> None:
    done = process("analyze", traces, "--no-report", "--no-cache", "--json", "-")
    assert done.returncode == 0
    assert json.loads(done.stdout)["job"]["ranks"] == [0, 1]
    assert b"2 of 2 ranks" in done.stderr


def test_nothing_readable_exits_with_2_and_no_traceback(tmp_path: Path) -> None:
    bad = tmp_path / "b\x1b[31mad.json"
    bad.write_bytes(b"\x00\x01 no trace")
    done = process("analyze", bad, "--no-report")
    assert (done.returncode, done.stdout) == (2, b"")
    assert len(done.stderr.splitlines()) == 1
    assert b"\x1b" not in done.stderr
    assert b"Traceback" not in done.stderr


def test_strict_exit_code_of_the_process(traces: Path) -> None:
    whole = (traces / "rank1.json").read_text()
    (traces / "rank1.json").write_text(whole[: len(whole) * 2 // 3])
    done = process("analyze", traces, "--no-report", "--no-cache", "--strict", "-q")
    assert (done.returncode, done.stdout) == (3, b"")
    assert b"rank1.json" in done.stderr


def test_a_reader_that_has_seen_enough_is_no_error(traces: Path) -> None:
    command = [sys.executable, "-m", "tracekit", "analyze", str(traces), "--no-report", "--no-cache", "--json", "-", "-q"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 0
