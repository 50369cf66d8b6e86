"""``tracekit compare``, ``baseline`` and ``check`` end to end on hand-made traces."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from tests.compare.made import write_job
from tests.real import CASES
from tracekit.cli.main import cli


def tracekit(command: str, *arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [command, *map(str, arguments), "--no-cache"])


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    file = tmp_path / "baseline.json"
    assert tracekit("baseline", write_job(tmp_path / "base"), "-o", file).exit_code == 0
    return file


HARMLESS = {
    "process ids": {"pid": 77},
    "streams": {"streams": (13, 36)},
    "the next generation of kernel names": {"kernel": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"},
    "file names": {"names": "trace-rank-{}.json.gz"},
    "the order of events": {"shuffled": True},
    "a warm-up step": {"warmup": 9},
    "step numbers": {"steps": (110, 111, 112)},
    "step numbers and a warm-up step": {"steps": (110, 111, 112), "warmup": 109},
    "a renamed kernel of the same operator": {"gemm_name": "nvjet_tst_128x256_64x4_gemm"},
}


@pytest.mark.parametrize("other", HARMLESS.values(), ids=HARMLESS)
def test_what_means_nothing_is_no_regression(other, baseline, tmp_path):
    result = tracekit("check", write_job(tmp_path / "same", **other), "--baseline", baseline)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("passed: NEW is as fast as BASE (1 ms -> 1 ms a step); nothing else changed by more than noise.")


CHANGES = {
    "gemm kernels take 10% longer (+25 us a step)": {"gemm": 275},
    "1 call more a step: all_reduce of world (1 call -> 2 calls (+100%), +4.19 MB)": {"calls": 2},
    "2 calls more a step: all_reduce of world (1 call -> 3 calls (+200%), the bytes unchanged)": {"calls": 3, "elements": (1 << 20) // 3},
}


@pytest.mark.parametrize(("said", "other"), list(CHANGES.items())[:2])
def test_a_change_is_found_with_its_cause_and_nothing_else(said, other, baseline, tmp_path):
    result = tracekit("check", write_job(tmp_path / "new", **other), "--baseline", baseline, "--json", tmp_path / "out.json")
    assert result.exit_code == 1
    assert json.loads((tmp_path / "out.json").read_text())["causes"] == [said]


def test_a_wider_element_type_is_found(tmp_path):
    base, new = write_job(tmp_path / "base", dtype="BFloat16"), write_job(tmp_path / "new", dtype="Float")
    result = tracekit("compare", base, new, "--no-report", "--json", "-")
    causes = json.loads(result.stdout)["causes"]
    assert [cause["text"] for cause in causes] == [
        "all_reduce of world moves more bytes a step in as many calls (2.1 MB -> 4.19 MB (+100%)): float32 instead of bfloat16"
    ]


def test_every_output_of_a_check(baseline, tmp_path):
    new = write_job(tmp_path / "new", gemm=300)
    out = {name: tmp_path / f"check.{name}" for name in ("xml", "md", "jsonl", "html")}
    for _ in range(2):
        outputs = ("--junit", out["xml"], "--markdown", out["md"], "--history", out["jsonl"], "-o", out["html"], "--annotations")
        result = tracekit("check", new, "--baseline", baseline, *outputs)
    assert result.exit_code == 1
    assert "::error title=tracekit check::gemm kernels take 20%25 longer (+50 us a step)" in result.stdout
    suite = ElementTree.parse(out["xml"]).getroot()[0]
    assert [case.get("name") for case in suite if len(case)] == ["gemm.time", "compute"]
    assert suite.get("failures") == "2"
    assert out["md"].read_text().count("### tracekit check found a regression") == 2
    assert len(out["jsonl"].read_text().splitlines()) == 2
    assert out["html"].read_text().startswith("<!DOCTYPE html>")
    trend = tracekit("compare", "--history", out["jsonl"], "--quantity", "kernels.gemm.time", "--no-report")
    assert trend.stdout == "kernels.gemm.time: 300 us -> 300 us over 2 checks (lowest 300 us, highest 300 us)\n"


def test_saved_json_and_baselines_stand_for_traces(baseline, tmp_path):
    new, saved = write_job(tmp_path / "new", gemm=275), tmp_path / "new.json"
    assert tracekit("analyze", new, "--no-report", "--json", saved).exit_code == 0
    said = [tracekit("compare", old, late, "--no-report").stdout for old in (baseline, tmp_path / "base") for late in (saved, new)]
    assert len(set(said)) == 1
    assert "gemm kernels take 10% longer" in said[0]


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"traceEvents": []}', b'{"format": "tracekit baseline"', b'{"tracekit_version": "1", "schema_version": 1}']
)
def test_nothing_to_compare_is_exit_2_and_a_line(content, baseline, tmp_path):
    wrong = tmp_path / "wrong.json"
    wrong.write_bytes(content)
    for result in (tracekit("check", wrong, "--baseline", baseline), tracekit("check", tmp_path / "base", "--baseline", wrong)):
        assert result.exit_code == 2
        assert result.stderr.startswith("tracekit: ")
        assert result.stderr.count("\n") == 1


def test_a_baseline_of_another_version_is_exit_2(baseline, tmp_path):
    baseline.write_text(baseline.read_text().replace('"schema_version": 1', '"schema_version": 7'))
    result = tracekit("check", tmp_path / "base", "--baseline", baseline)
    assert result.exit_code == 2
    assert "schema version 7" in result.stderr


def test_renewing_a_baseline_keeps_its_thresholds(baseline, tmp_path):
    gate = tmp_path / "gate.toml"
    gate.write_text('[thresholds]\n"kernels.*" = "ignore"\n"step.compute" = "ignore"\n')
    base, new = tmp_path / "base", write_job(tmp_path / "new", gemm=275)
    assert tracekit("baseline", base, "-o", baseline, "--thresholds", gate).exit_code == 0
    assert tracekit("baseline", base, "-o", baseline).exit_code == 0
    assert tracekit("check", new, "--baseline", baseline).exit_code == 0


def test_several_recordings_of_a_side(tmp_path):
    sides = [
        arg
        for n in range(4)
        for arg in ("--base", write_job(tmp_path / f"b{n}", gemm=250 + n), "--new", write_job(tmp_path / f"n{n}", gemm=270 + n))
    ]
    result = tracekit("compare", *sides, "-o", tmp_path / "page.html")
    assert "gemm kernels take 8% longer (+20 us a step)" in result.stdout
    assert "4 against 4 recordings" in (tmp_path / "page.html").read_text()


def test_one_run_is_not_two(tmp_path):
    result = tracekit("compare", tmp_path)
    assert result.exit_code == 2
    assert "name two runs" in result.stderr


@pytest.mark.skipif(not (CASES / "R03_regression_same_run").is_dir(), reason="the given cases are not beside the project")
def test_the_given_case(tmp_path):
    case = CASES / "R03_regression_same_run"
    expected = json.loads((case / "expected.json").read_text())["expect"]
    for name in ("same", "slower"):
        found = json.loads(tracekit("compare", case / "base", case / name, "--no-report", "--json", "-").stdout)
        changes = {change["quantity"]: change for change in found["changes"]}
        told = expected[f"base_vs_{name}"]
        assert bool(found["causes"]) == told["regression"]
        if told["regression"]:
            assert changes["kernels.gemm.time"]["relative"] * 100 == pytest.approx(told["gemm_change_percent"])
            assert changes["collectives.world.all_reduce.unknown.transfer"]["relative"] * 100 == told["allreduce_change_percent"]
            assert [cause["quantity"] for cause in found["causes"]] == ["kernels.gemm.time"]
