"""A rank alone on the fake group has the memory peak that it has in the real job."""

import pytest

from tests.workloads.recording import Recording, needs_torch, record
from tracekit import analyses
from tracekit.job.load import LoadOptions, load_job

pytestmark = needs_torch


def peak(folder, workload, *arguments):
    record(folder, workload, "--layers", "2", "--active", "1", *arguments)
    job = load_job([str(folder)], LoadOptions(), {"memory": analyses.reducers()["memory"]})
    memory = analyses.run(Recording(folder, job, "").job, ["memory"])["memory"].json()["memory"]
    return next(entry["peak_bytes"] for entry in memory if entry["rank"] == 0)


#: gloo copies the input of a reduce-scatter: for a moment that is more than the scratch memory that is the peak without it.
COPY = 1024


@pytest.mark.parametrize(("workload", "apart"), [("ddp", 0), ("fsdp1", COPY), ("fsdp2", COPY), ("tensor_parallel", 0)])
def test_the_peak_on_the_fake_group_is_that_on_gloo(tmp_path, workload, apart):
    real, alone = peak(tmp_path / "gloo", workload), peak(tmp_path / "fake", workload, "--backend", "fake")
    assert 0 <= real - alone <= apart
