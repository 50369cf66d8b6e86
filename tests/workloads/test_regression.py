"""Quick workloads recorded again, held against the baselines of the samples: calls, bytes, persistent memory exactly, the peak by 2%."""

import importlib.util
from pathlib import Path

import pytest

from tracekit.checks.baseline import read_baseline
from tracekit.checks.check import check
from tracekit.checks.thresholds import Threshold, thresholds_of
from tracekit.cli.recordings import read_side
from tracekit.job.load import LoadOptions

pytest.importorskip("torch")
SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"

#: Times of another machine say nothing; nor does memory that no rank keeps, beyond its sum at the peak.
NO_TIMES = [
    Threshold(pattern, None) for pattern in ("step.*", "phase.*", "kernels.*", "exposed.*", "collectives.*.transfer", "pipeline.*", "mfu")
]
PEAK = {"zero3_2": 0.10}


def arguments(name: str) -> list[str]:
    """How the sample was recorded."""
    spec = importlib.util.spec_from_file_location("record_all", SAMPLES / "record_all.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [word for word in module.SAMPLES[name] if word != "--verify"]


def record(name: str, folder: Path) -> None:
    """Run the sample's workload again."""
    from tracekit.workloads.common.launch import launch

    workload, *options = arguments(name)
    launch(f"tracekit.workloads.{workload}", [*options, "-o", str(folder)], quiet=True)


@pytest.mark.slow
def test_on_the_fake_group_memory_is_the_same_to_the_byte(tmp_path):
    for folder in ("one", "two"):
        record("fsdp2_fake_rank5_of_16", tmp_path / folder)
    sides = [read_side([str(tmp_path / folder)], LoadOptions(), quiet=True) for folder in ("one", "two")]
    assert check(*sides, [*NO_TIMES, Threshold("memory.*", 0.0, "both")]).exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp_2", "fsdp2_2", "zero3_2", "fsdp2_fake_rank5_of_16"])
def test_a_workload_recorded_again_is_its_sample(name, tmp_path):
    record(name, tmp_path)
    baseline = read_baseline(str(SAMPLES / f"{name}.baseline.json"))
    peak = thresholds_of({"memory.peak": PEAK.get(name, 0.02)}, name)
    checked = check(baseline.runs, read_side([str(tmp_path)], LoadOptions(), quiet=True), [*NO_TIMES, *peak])
    assert (checked.exit_code, [row.change.key for row in checked.of("fell")], checked.problem) == (0, [], "")
    assert {"memory.peak", "memory.parameters"} <= {row.change.key for row in checked.of("passed")}
