"""Whole made-up jobs: whatever is planted is the first finding, at what it really costs; where nothing is, nobody is blamed."""

import pytest

from tests.builder import Trace
from tests.jobs import Cause, MadeJob, Shape
from tracekit import analyses
from tracekit.job.load import LoadOptions, load_job
from tracekit.report.document import document

MESHES = {
    "dp": Shape(dp=4),
    "dp, two ranks": Shape(dp=2),
    "tp": Shape(tp=4),
    "pp": Shape(pp=4),
    "pp x dp": Shape(pp=2, dp=2),
    "dp x tp": Shape(dp=2, tp=2),
    "pp x dp x tp": Shape(pp=2, dp=2, tp=2),
    "dp x ep x tp": Shape(dp=2, ep=2, tp=2),
}
#: One cause after the other over the meshes; every pair once would take minutes.
PLANTED = [
    ("dp", Cause("throttled", rank=2), "stragglers.rank"),
    ("dp", Cause("rotating"), "stragglers.moving"),
    ("dp, two ranks", Cause("pause", rank=1, us=9000), "stragglers.rank"),
    ("tp", Cause("more_work", rank=3), "stragglers.rank"),
    ("pp", Cause("stage", stage=3), "pipeline.slow_stage"),
    ("pp", Cause("throttled", rank=1), "pipeline.slow_stage"),
    ("pp x dp", Cause("loader", rank=3), "stragglers.rank"),
    ("pp x dp", Cause("throttled", rank=0), "stragglers.rank"),
    ("dp x tp", Cause("link", rank=3, axis="tp", factor=4), "links.slow_group"),
    ("dp x tp", Cause("loader", rank=1), "stragglers.rank"),
    ("pp x dp x tp", Cause("throttled", rank=5), "stragglers.rank"),
    ("pp x dp x tp", Cause("stage", stage=1), "pipeline.slow_stage"),
    ("pp x dp x tp", Cause("pause", rank=3, us=9000), "stragglers.rank"),
    ("dp x ep x tp", Cause("expert", rank=3, factor=3), "stragglers.rank"),
    ("dp x ep x tp", Cause("expert", rank=3, axis="tp", factor=3), "stragglers.rank"),  # and its tensor-parallel mate
    ("dp x ep x tp", Cause("link", rank=0, axis="ep", factor=6), "links.slow_group"),
]
BLAMES = (
    "stragglers.rank",
    "stragglers.moving",
    "pipeline.slow_stage",
    "links.",
    "collectives.slow",
    "breakdown.compute",
    "kernels.uneven",
)


def found_in(job, folder, without=()):
    """The JSON document of a made-up job."""
    job.write(folder, without)
    read = load_job([str(folder)], LoadOptions(), analyses.reducers())
    return document(read, analyses.run(read))


@pytest.mark.parametrize(("mesh", "cause", "name"), PLANTED, ids=[f"{mesh}: {cause.name}" for mesh, cause, _ in PLANTED])
def test_the_first_finding_is_the_planted_cause_at_its_cost(mesh, cause, name, tmp_path):
    job = MadeJob(MESHES[mesh], cause)
    first, *others = found_in(job, tmp_path)["findings"]
    assert first["id"] == name
    if name == "pipeline.slow_stage":
        assert first["subject"]["stage"] == (cause.stage if cause.name == "stage" else cause.rank)
    elif name != "stragglers.moving":
        assert cause.rank in first["subject"]["ranks"]
    if name == "stragglers.rank":
        assert first["subject"]["ranks"] == ([2, 3] if cause.axis == "tp" else [cause.rank])
    cost = job.step_us - job.healthy_us
    assert first["gain_us"] == pytest.approx(cost, rel=0.1)
    assert first["severity"] == ("critical" if first["gain_us"] >= 0.1 * job.step_us else "warning")
    assert not [other["id"] for other in others if other["id"].startswith(BLAMES) and other["severity"] != "info"]


@pytest.mark.parametrize("mesh", ["dp", "pp", "dp x ep x tp"])
@pytest.mark.parametrize("jitter", [0.01, 0.05])
def test_nobody_is_blamed_in_a_healthy_job(mesh, jitter, tmp_path):
    shape = Shape(**{**vars(MESHES[mesh]), "jitter": jitter})
    findings = found_in(MadeJob(shape), tmp_path)["findings"]
    assert not [finding for finding in findings if finding["id"].startswith(BLAMES)]
    assert "stragglers.none" in [finding["id"] for finding in findings]


def test_clocks_that_differ_and_drift_blame_nobody(tmp_path):
    findings = found_in(MadeJob(MESHES["dp"], Cause("drift")), tmp_path)["findings"]
    assert not [finding for finding in findings if finding["id"].startswith(BLAMES)]


def test_a_cause_is_only_possible_where_ranks_are_missing(tmp_path):
    job = MadeJob(MESHES["dp"], Cause("throttled", rank=2))
    first, *_ = found_in(job, tmp_path, without=(1,))["findings"]
    assert (first["id"], first["subject"]["ranks"]) == ("stragglers.rank", [2])
    assert "at least" in first["text"] and "possible" in first["text"] and "1 rank of the job was not read" in first["text"]


def test_what_the_host_did_and_who_inherits_the_lateness_is_said(tmp_path):
    first, *_ = found_in(MadeJob(MESHES["dp x tp"], Cause("loader", rank=3)), tmp_path)["findings"]
    assert "while loading data (enumerate(DataLoader)" in first["text"]
    assert first["consequences"][0] == "Ranks 2, 3 arrive late at other collectives; rank 3 is the cause."


@pytest.mark.parametrize(
    ("name", "words"),
    [("throttled", "the same kernels take 1.50 times as long there"), ("more_work", "it runs 1.49 times as many kernels")],
)
def test_a_throttled_device_and_more_work_are_told_apart(name, words, tmp_path):
    first, *_ = found_in(MadeJob(MESHES["tp"], Cause(name, rank=1)), tmp_path)["findings"]
    assert words in first["text"]


def test_a_first_step_that_warms_up_is_in_no_gain(tmp_path):
    for rank, compute in enumerate((100, 200)):
        trace, at = Trace(rank, 2), 0
        for step, more in enumerate((400_000, 0, 0, 0)):
            trace.step(step, at, 900 + more)
            trace.kernel("gemm", at + 50, compute, launch=at + 10)
            trace.collective("allreduce", at + 50 + compute, 400 - compute + more, 8_000_000, launch=at + 20, seq=step)
            trace.launch(trace.next_id(), at + 30, 830 + more, "cudaDeviceSynchronize")
            at += 900 + more
        trace.write(tmp_path / f"rank{rank}.json")
    read = load_job([str(tmp_path)], LoadOptions(), analyses.reducers())
    found = document(read, analyses.run(read))
    first, study = found["findings"][0], found["what_if"][0]
    assert (first["id"], first["subject"]["ranks"], first["gain_us"]) == ("stragglers.rank", [1], 100)
    assert study["steps"] == [1, 2, 3]
    assert "the first step is left out: more than 2 times as long as the median step" in study["notes"]


def test_what_was_not_chosen_was_not_read(tmp_path):
    MadeJob(MESHES["dp"], Cause("throttled", rank=2)).write(tmp_path)
    read = load_job([str(tmp_path)], LoadOptions(ranks=frozenset((0, 2, 3))), analyses.reducers())
    first, *_ = document(read, analyses.run(read))["findings"]
    assert (first["id"], first["subject"]["ranks"]) == ("stragglers.rank", [2])
    assert "at least" in first["text"] and "possible" in first["text"] and "1 rank of the job was not read" in first["text"]
    assert any("wait at least" in text or "waits at least" in text for text in first["consequences"])
