"""Whole made-up pipelines on devices: the bubble is that of the schedule, also beside FSDP, and a slow stage is charged with the waits."""

import gzip
import json
from pathlib import Path

import pytest

from tests.jobs import Cause
from tests.pipelines import PipelineJob, PipelineShape
from tracekit import analyses
from tracekit.graph.scenarios import scenario
from tracekit.graph.study import study_of
from tracekit.job.load import LoadOptions, load_job
from tracekit.report.document import document

#: (p-1)/(m+p-1), the same, (p-1)/(v m+p-1) for p = 4, m = 8, v = 2
BUBBLES = {"gpipe": (1, 3 / 11), "1f1b": (1, 3 / 11), "interleaved_1f1b": (2, 3 / 19)}
IN_FLIGHT = {"gpipe": [8, 8, 8, 8], "1f1b": [4, 3, 2, 1], "interleaved_1f1b": [8, 8, 7, 5, 4, 4, 3, 1]}


def told(job, folder):
    """The JSON document of a made-up job."""
    folder.mkdir(exist_ok=True)
    job.write(folder)
    read = load_job([str(folder)], LoadOptions(), analyses.reducers())
    return document(read, analyses.run(read))


def shape(schedule, fsdp=False, **more):
    """p = 4, m = 8, pieces so long that messages take next to nothing."""
    own = {"pp": 4, "dp": 2 if fsdp else 1, "micro_batches": 8, "layers": 1, "kernel_us": 1000, "steps": 1, "fsdp": fsdp}
    return PipelineShape(schedule=schedule, chunks=BUBBLES.get(schedule, (1, 0))[0], **{**own, **more})


@pytest.mark.parametrize("fsdp", [False, True], ids=["alone", "beside FSDP"])
@pytest.mark.parametrize("schedule", list(BUBBLES))
def test_the_bubble_is_that_of_the_schedule(schedule: str, fsdp: bool, tmp_path: Path) -> None:
    found = told(PipelineJob(shape(schedule, fsdp)), tmp_path)["pipeline"]
    ideal = BUBBLES[schedule][1]
    assert (found["schedule"], found["microbatches"], found["pipelines"]) == (schedule, 8, 2 if fsdp else 1)
    assert found["bubble_share"]["ideal"] == pytest.approx(ideal)
    assert found["bubble_share"]["measured"] == pytest.approx(ideal, abs=0.005)
    assert found["bubble_share"]["replayed"] == pytest.approx(ideal, abs=0.005)
    assert list(found["in_flight_peak"].values()) == IN_FLIGHT[schedule]


@pytest.mark.parametrize("fsdp", [False, True], ids=["alone", "beside FSDP"])
def test_waits_are_charged_to_the_slow_stage(fsdp: bool, tmp_path: Path) -> None:
    job = PipelineJob(shape("1f1b", fsdp, layers=2, kernel_us=500), Cause("stage", stage=2, factor=1.5))
    document = told(job, tmp_path)
    first = document["findings"][0]
    assert (first["id"], first["subject"]["stage"]) == ("pipeline.slow_stage", 2)
    assert first["gain_us"] == pytest.approx(job.step_us - job.healthy_us, rel=0.1)


@pytest.mark.parametrize("schedule", list(BUBBLES))
def test_messages_show_the_schedule_where_no_range_names_it(schedule: str, tmp_path: Path) -> None:
    found = told(PipelineJob(shape(schedule, fsdp=schedule == "1f1b", named=False)), tmp_path)["pipeline"]
    assert (found["schedule"], found["schedule_from"]) == (schedule, "order of compute and messages")
    assert (found["microbatches"], found["stages_per_rank"]) == (8, BUBBLES[schedule][0])
    assert found["bubble_share"]["measured"] == pytest.approx(BUBBLES[schedule][1], abs=0.005)
    assert list(found["in_flight_peak"].values()) == IN_FLIGHT[schedule]


def test_the_two_parts_of_a_backward_are_told_apart_by_messages(tmp_path: Path) -> None:
    found = told(PipelineJob(shape("zb_h1", named=False)), tmp_path)["pipeline"]
    assert (found["schedule"], found["microbatches"]) == ("zb_h1", 8)
    assert found["bubble_share"]["measured"] == pytest.approx(3 / 27, abs=0.005)  # (p-1)(f+b-w) beside m (f+b+w), all three alike
    assert list(found["in_flight_peak"].values()) == [4, 4, 4, 4]
    assert list(found["in_flight_until_input_peak"].values()) == [4, 3, 2, 1]


def test_a_bubble_is_measured_where_messages_show_no_numbers(tmp_path: Path) -> None:
    named, bare = (told(PipelineJob(shape("zbv", named=named)), tmp_path / str(named))["pipeline"] for named in (True, False))
    assert (bare["schedule"], bare["microbatches"], bare["stages"], bare["stages_per_rank"]) == ("zbv", 8, 8, 2)
    assert bare["bubble_share"]["measured"] == pytest.approx(named["bubble_share"]["measured"], abs=0.005)
    assert bare["bubble_share"]["ideal"] is None and bare["in_flight_peak"] is None and bare["by_stage"] == []
    assert {row["waiting_us"] for row in bare["by_rank"]} == {None}
    assert "lie in a V (ZBV" in bare["notes"][0]


def test_the_waits_of_a_pipeline_are_told_with_its_bubble(tmp_path: Path) -> None:
    found = {finding["id"]: finding for finding in told(PipelineJob(shape("1f1b")), tmp_path)["findings"]}
    assert "overlap.exposed" not in found
    assert any(text.startswith("Exposed communication") for text in found["pipeline.bubble"]["consequences"])


def test_a_slow_stage_is_found_without_ranges(tmp_path: Path) -> None:
    job = PipelineJob(shape("1f1b", layers=2, kernel_us=500, named=False), Cause("stage", stage=1, factor=1.5))
    first = told(job, tmp_path)["findings"][0]
    assert (first["id"], first["subject"]["stage"]) == ("pipeline.slow_stage", 1)
    assert first["gain_us"] == pytest.approx(job.step_us - job.healthy_us, rel=0.1)


def test_the_recorded_interleaved_pipeline_is_told_by_its_messages_too(tmp_path: Path) -> None:
    """The sample without its ranges and manifests: bookkeeping between the pieces is not taken for work."""
    for path in (Path(__file__).resolve().parents[2] / "sample_traces/pipeline_interleaved_2").glob("*.json.gz"):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        trace["traceEvents"] = [event for event in trace["traceEvents"] if not str(event.get("name")).startswith("PP:")]
        (tmp_path / path.name.removesuffix(".gz")).write_text(json.dumps(trace))
    read = load_job([str(tmp_path)], LoadOptions(), analyses.reducers())
    found = document(read, analyses.run(read))["pipeline"]
    assert (found["schedule"], found["schedule_from"]) == ("interleaved_1f1b", "order of compute and messages")
    assert (found["stages"], found["microbatches"], found["runs"]) == (4, 4, 2)


@pytest.mark.parametrize("cause", [Cause(), Cause("stage", stage=1, factor=1.5)], ids=["equal stages", "unequal stages"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_what_other_micro_batches_win_is_what_a_job_with_them_takes(schedule: str, cause: Cause, tmp_path: Path) -> None:
    job = PipelineJob(shape(schedule, layers=2, kernel_us=500), cause)
    finer = PipelineJob(shape(schedule, layers=2, kernel_us=250, micro_batches=16), cause)
    job.write(tmp_path)
    study = study_of(load_job([str(tmp_path)], LoadOptions(), analyses.reducers()))
    gain = study.step_ns - scenario(study, "microbatches=16").step_ns
    assert gain / 1000 == pytest.approx(job.step_us - finer.step_us, rel=0.02)


def test_a_zero_bubble_schedule_of_other_micro_batches_has_no_closed_form(tmp_path: Path) -> None:
    PipelineJob(shape("zb_h1")).write(tmp_path)
    study = study_of(load_job([str(tmp_path)], LoadOptions(), analyses.reducers()))
    found = scenario(study, "microbatches=16")
    assert found.step_ns is None and "no closed form" in found.reason
