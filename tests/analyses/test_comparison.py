"""Predicted and measured on the sample recordings: what must be equal is equal, and what differs says why."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tracekit import analyses
from tracekit.analyses import comparison
from tracekit.analyses.comparison import Comparison
from tracekit.job.load import LoadOptions, load_job
from tracekit.job.model import Job

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
#: Recordings that come with manifests and train something.
RECORDED = sorted({path.parent.name for path in SAMPLES.glob("*/*.manifest.json")})
NAMES = [name for name in RECORDED if not name.startswith("collectives")]
#: These have lines that differ, each with its reason. Of experts the model knows the mean load of a step's micro-batches only; whether
#: gloo's copies of what is gathered overlap with compute is timing; DeepSpeed keeps buffers of its own; gradients of stage inputs wait.
UNEVEN = {"expert_parallel_2", "hybrid_5d_8"}
TIMING = {"zero3_2"}
BUFFERS = {"deepspeed_zero2_2", "deepspeed_zero3_2"}
WAITING = {"pipeline_interleaved_2"}
#: Gradients of weights are computed later than those of inputs: there is no prediction of the peak.
DEFERRED = {"pipeline_zbv_2"}


@cache
def job(name: str) -> Job:
    return load_job([str(SAMPLES / name)], LoadOptions(), analyses.reducers())


@cache
def compared(name: str) -> Comparison:
    return comparison.analyze(job(name))


def lines(name: str, *starts: str, end: str = "") -> list[comparison.Line]:
    return [each for each in compared(name).lines if each.quantity.startswith(starts) and each.quantity.endswith(end)]


def wrong(found: Sequence[comparison.Line]) -> list[tuple[str, int | None, float | None, float | None]]:
    return [(each.quantity, each.rank, each.predicted, each.measured) for each in found if each.verdict != "match"]


@pytest.mark.parametrize("name", NAMES)
def test_calls_and_bytes_of_every_class_are_exact(name: str) -> None:
    for end in (".calls", ".bytes"):
        found = lines(name, "collectives.", end=end)
        assert wrong(found) == []
        assert all(each.tolerance == 0 and each.predicted == each.measured for each in found)
    ranks = {each.rank for each in lines(name, "collectives.", end=".calls")}
    assert ranks == set(job(name).ranks)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_optimizer_state_are_exact_to_the_byte(name: str) -> None:
    found = lines(name, "memory.parameters", "memory.optimizer_state")
    assert len(found) == 2 * len(job(name).ranks)
    assert wrong(found) == [] and all(each.tolerance == 0 for each in found)


@pytest.mark.parametrize("name", sorted(set(NAMES) - DEFERRED - BUFFERS - WAITING))
def test_gradients_buckets_and_gathered_units_are_exact_to_the_byte(name: str) -> None:
    found = lines(name, "memory.gradients", "memory.gathered", "memory.unsharded", "memory.communication")
    told = [each for each in found if each.verdict != "not_measured"]
    assert told and wrong(told) == []
    assert all(each.predicted == each.measured for each in told if not name.startswith("deepspeed"))


@pytest.mark.parametrize("name", sorted(set(NAMES) - DEFERRED - TIMING))
def test_the_peak_is_within_its_tolerance(name: str) -> None:
    found = lines(name, "memory.peak")
    assert len(found) == len(job(name).ranks)
    assert wrong(found) == []
    tight = name.startswith(("ddp", "fsdp", "accelerate"))
    assert {each.tolerance for each in found} == ({0.02} if tight else {0.05})


@pytest.mark.parametrize("name", sorted(set(NAMES) - DEFERRED - UNEVEN - TIMING))
def test_activations_are_within_five_percent(name: str) -> None:
    found = lines(name, "memory.activations")
    assert len(found) == len(job(name).ranks)
    assert wrong(found) == [] and {each.tolerance for each in found} == {0.05}


@pytest.mark.parametrize("name", NAMES)
def test_what_differs_or_is_missing_has_a_reason_and_what_matches_needs_none(name: str) -> None:
    for each in compared(name).lines:
        assert bool(each.why) == (each.verdict != "match")
        assert (each.predicted is None or each.measured is None) <= (each.verdict == "not_measured")


@pytest.mark.parametrize(
    ("name", "quantity", "reason"),
    [
        ("pipeline_interleaved_2", "memory.gradients", "gradients of 1 stage input, 65536 bytes each, are not there yet"),
        ("deepspeed_zero2_2", "memory.gradients", "DeepSpeed keeps gradients in buffers of a bucket and of its partition"),
        ("expert_parallel_2", "memory.activations", "the backend's threads may still hold the buffers of the last exchange"),
        ("hybrid_5d_8", "memory.activations", "experts get other numbers of rows in each micro-batch, and the model takes their mean"),
        ("fsdp1_2", "memory.unsharded_gradients", "gradients of views of a flat parameter have no owner"),
        ("pipeline_1f1b_2", "pipeline.bubble_share", "stages of unequal length make it 0."),
        ("pipeline_zbv_2", "memory.peak", "gradients of weights are computed later than those of inputs"),
        ("hybrid_5d_fake_rank45_of_64", "pipeline.bubble_share", "no rank with stage 0 was read"),
        ("ddp_2", "step.mfu", "neither peak FLOP/s nor bandwidth of the device (CPU) is known"),
        ("tensor_parallel_2", "collectives.tp.all_reduce.tensor_parallel.time", "all of one size"),
    ],
)
def test_the_reason_is_the_one_that_holds(name: str, quantity: str, reason: str) -> None:
    told = [each.why for each in lines(name, quantity) if each.why]
    assert told and reason in told[0]


def test_the_bubble_of_the_model_is_the_closed_form() -> None:
    (found,) = lines("pipeline_gpipe_2", "pipeline.bubble_share")
    assert found.predicted == pytest.approx((2 - 1) / (4 + 2 - 1))  # p = 2, m = 4


def test_exchanges_between_experts_follow_the_recorded_loads() -> None:
    """Rank 0 of 2: step 2 sends 512 rows a layer, and 490 and 853 arrive; rows of 128 fp32 elements, each way once in each direction."""
    found = {each.quantity: each for each in lines("expert_parallel_2", "collectives.ep.all_to_all", end=".bytes") if each.rank == 0}
    loads = [load for load in job("expert_parallel_2").windows[0].manifest.experts if load.step == 2]  # type: ignore[union-attr]
    rows = sum(sum(load.routed) + sum(load.received) for load in loads)
    assert found["collectives.ep.all_to_all.expert_combine.bytes"].predicted == rows * 128 * 4
    assert found["collectives.ep.all_to_all.expert_dispatch.bytes"].predicted == rows * 128 * 4 + 2 * 8 * 8  # counts of 8 experts, 2 layers


def test_without_a_prediction_the_reason_is_told() -> None:
    found = compared(next(name for name in RECORDED if name.startswith("collectives"))).json()
    assert "comparison" not in found
    assert found["not_measured"]["comparison"].startswith("the manifest lists no parameters")


def test_json_findings_and_tables() -> None:
    found = compared("zero1_2")
    document = found.json()
    assert set(document) == {"comparison", "links"}
    assert {*document["comparison"][0]} == {"quantity", "rank", "predicted", "measured", "unit", "ratio", "verdict", "why", "tolerance"}
    json.dumps(document, allow_nan=False)
    agreement = found.findings()[0]
    assert agreement.id == "comparison.agreement" and agreement.value == 1.0
    titles = [chart.title for section in found.sections() for chart in section.charts]
    assert titles[0].startswith("Memory of rank ") and titles[1:] == ["Predicted and measured", "Links"]


def test_memory_over_one_step_has_the_peaks_of_both() -> None:
    """Areas add up to the model's moments; the line's highest point is the measured peak, under the moment that is most like it."""
    chart, found = compared("fsdp2_2").step, {each.quantity: each for each in lines("fsdp2_2", "memory.peak")}["memory.peak"]
    assert chart is not None
    predicted = [sum(values) for values in zip(*chart.series.values(), strict=True)]
    measured = [each or 0 for each in chart.lines["measured"]]
    assert max(predicted) == found.predicted and max(measured) == found.measured
    ((peak, _),) = chart.marks
    assert measured[min(range(len(chart.x)), key=lambda place: abs(chart.x[place] - peak))] == max(measured)
    assert sorted(chart.x) == list(chart.x) and len(chart.x) == len(predicted) == len(measured)


# A manifest that is not true ------------------------------------------------------------------------------------------


def with_manifest(folder: Path, name: str, change: Any) -> dict[str, Any]:
    """The JSON of all analyses of a sample whose manifests were changed."""
    shutil.copytree(SAMPLES / name, folder / name)
    for path in (folder / name).glob("*.manifest.json"):
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))
    read = load_job([str(folder / name)], LoadOptions(), analyses.reducers())
    merged: dict[str, Any] = {}
    for result in analyses.run(read).values():
        document = result.json()
        merged |= {key: value for key, value in document.items() if key != "not_measured"}
        merged.setdefault("not_measured", {}).update(document.get("not_measured", {}))
        result.findings(), result.sections()
    return merged


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.update(plan={}, units=[]), "does not tell how data-parallel ranks share the model"),
        (lambda m: m["model"].update(hidden=-1), "hidden is -1"),
        (lambda m: m["model"].update(hidden=10**9, ffn=10**9, vocabulary=10**9), "those of no job"),
        (lambda m: m["plan"]["strategy"].update(bucket_cap_mb=[1]), "bucket_cap_mb is list"),
        (lambda m: m.update(mesh=[{"name": "dp_replicate", "size": -2}]), "axes below 1"),
        (lambda m: m.update(precision=None), "element type of the parameters is not recorded"),
    ],
)
def test_a_manifest_that_cannot_be_predicted_ends_in_a_reason(tmp_path: Path, change: Any, reason: str) -> None:
    found = with_manifest(tmp_path, "ddp_2", change)
    assert reason in found["not_measured"]["comparison"]
    assert found["links"] and found["memory"]


def test_a_bucket_size_that_was_not_used_shows_in_the_calls(tmp_path: Path) -> None:
    found = with_manifest(tmp_path, "ddp_2", lambda m: m["plan"]["strategy"].update(bucket_cap_mb=25.0))
    rows = {row["quantity"]: row for row in found["comparison"] if row["rank"] == 0}
    calls, size = (rows[f"collectives.dp_replicate.all_reduce.gradient_sync.{what}"] for what in ("calls", "bytes"))
    assert (calls["predicted"], calls["verdict"], calls["why"]) == (1, "differs", "the same bytes in other buckets")
    assert size["verdict"] == "match"


def test_resharding_that_the_manifest_denies_shows_in_the_gathers(tmp_path: Path) -> None:
    found = with_manifest(tmp_path, "fsdp2_2", lambda m: m["plan"]["strategy"].update(reshard_after_forward=False))
    rows = {row["quantity"]: row for row in found["comparison"] if row["rank"] == 0}
    gathers = rows["collectives.dp_shard.all_gather.parameter_gather.calls"]
    assert (gathers["predicted"], gathers["measured"]) == (3, 5)  # two blocks and the root
    assert gathers["why"].startswith("2 all-gathers more")
