"""Real jobs that lie beside the project, against figures worked out by hand with plain json; skipped where the folder is absent."""

import json

import pytest

from tests.real import REAL, real_traces
from tracekit import analyses
from tracekit.job.load import LoadOptions, load_job
from tracekit.notes import sentences
from tracekit.readers.kineto import read_trace
from tracekit.readers.sources import find_sources
from tracekit.report.document import document
from tracekit.trace.events import Category

pytestmark = pytest.mark.skipif(not REAL.is_dir(), reason="no folder of real traces beside the project")


def load(path):
    job = load_job([str(path)], LoadOptions(), analyses.reducers())
    return job, document(job, analyses.run(job))


@pytest.mark.parametrize("path", real_traces(), ids=lambda p: p.name)
def test_every_real_trace_is_analyzed_and_adds_up(path):
    _, found = load(path)
    for row in found["breakdown"]:
        parts = ("compute_us", "exposed_comm_us", "memory_copy_us", "idle_us", "unknown_us")
        assert round(1000 * sum(row[p] for p in parts)) == round(1000 * row["step_us"])
    json.dumps(found, allow_nan=False)


def test_dlrm_on_8_gpus():
    """Busy time and waits of the communication kernels, worked out here from the files alone."""
    folder = REAL / "dlrm_v100_8ranks"
    job, found = load(folder)
    assert (job.world_size, job.ranks, job.missing_ranks) == (8, list(range(8)), [])
    by_rank = {}
    for path in folder.glob("*.json"):
        document_ = json.loads(path.read_text())
        found_ = [e for e in document_["traceEvents"] if e.get("cat") == "kernel" and "nccl" in e["name"]]
        kernels = [(e["ts"], e["ts"] + e["dur"], e["name"]) for e in found_]
        by_rank[document_["distributedInfo"]["rank"]] = sorted(kernels)
    for rank, kernels in by_rank.items():
        own = job.operations[job.operations["rank"] == rank]
        assert own["kind"].value_counts().to_dict() == {"all_to_all": 5, "all_reduce": 3}
        assert int((own["end_ns"] - own["start_ns"]).sum()) == 1000 * sum(e - s for s, e, _ in kernels)
    for i in range(8):  # the n-th kernel of every rank belongs together: one stream, the same order of kinds
        last = max(kernels[i][0] for kernels in by_rank.values())
        for rank, kernels in by_rank.items():
            own = job.operations[job.operations["rank"] == rank].sort_values("start_ns").iloc[i]
            assert own["wait_ns"] == 1000 * (last - kernels[i][0])
    assert job.matches["ranks"].tolist() == [8] * 8
    assert len(found["stragglers"]) == 8


def test_ddp_on_2_gpus_of_which_one_was_kept():
    job, found = load(REAL / "hta_a100_ddp_nccl_rank0of2.json.gz")
    assert job.missing_ranks == [1]
    counts = job.operations.astype({"kind": "str", "purpose": "str"}).groupby(["kind", "purpose"]).size().to_dict()
    assert counts == {("all_reduce", "gradient_sync"): 15, ("broadcast", "parameter_sync"): 6}
    assert sorted(set(job.windows[0].operations.query("kind == 'all_reduce'")["in_elements"])) == [
        2_049_000,
        2_431_040,
        6_563_840,
        6_637_568,
        7_875_584,
    ]
    tables = read_trace(find_sources([str(REAL / "hta_a100_ddp_nccl_rank0of2.json.gz")]).sources[0])
    side = tables.side["communication"]
    kernels = tables.category[side.rows] == Category.KERNEL
    assert side.columns["In msg nelems"][kernels][0] == 6_637_568  # the first in the file, not in time
    group = found["process_groups"][0]
    assert (group["name"], group["description"], group["ranks"], group["operations"]) == ("0", "default_pg", [0, 1], 21)


def test_kernels_that_are_all_called_sendrecv():
    job, _ = load(REAL / "hta_negq_rank0.json.gz")
    kinds = job.operations["kind"].astype("str").value_counts().to_dict()
    assert kinds == {"all_to_all": 45, "all_reduce": 10, "all_gather": 10, "reduce_scatter": 10, "send_recv": 5}


def test_sampled_events_are_not_matched_by_order():
    job, _ = load_job([str(REAL / f"hta_sampled_rank{r}.json.gz") for r in (0, 1)], LoadOptions()), None
    assert len(job.matches) == 0
    assert any("contradict the clocks" in n for n in sentences(job.notes))


def test_multimem_reductions_are_communication():
    job, _ = load(REAL / "tl_b200_eager.json.gz")
    assert job.operations["implementation"].astype("str").value_counts().to_dict() == {"symmetric_memory": 73, "nccl": 1}
