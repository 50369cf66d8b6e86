"""torch's own memory trackers on the same step: totals, and the categories that they get right, agree with the analysis of a recording."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workloads.recording import needs_torch, run

pytestmark = needs_torch

JOB = Path(__file__).with_name("tracker_job.py")
#: Inputs, the loss, step counters: kilobytes that trackers count in other places or not at all.
SMALL = 16_384 + 16


def tracked(*arguments):
    done = subprocess.run([sys.executable, str(JOB), *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def analyzed(folder, workload, *arguments):
    run("record", workload, "-o", str(folder), "--backend", "fake", "--active", "1", *arguments)
    (entry,) = json.loads(run("analyze", str(folder), "-o", str(folder / "r.html"), "--json", "-", "-q").stdout)["memory"]
    return entry


@pytest.mark.parametrize("options", [[], ["--reshard-after-forward", "false"], ["--nproc", "4"]])
def test_fsdp2_agrees_with_its_tracker(tmp_path, options):
    arguments = ["--layers", "2", *options]
    theirs, ours = tracked("fsdp2", *arguments), analyzed(tmp_path, "fsdp2", *arguments)
    categories = ours["categories"]
    assert categories["parameters"] == theirs["Sharded Param"]
    assert categories["gathered_parameters"] == theirs["Unsharded Param"]
    assert categories["optimizer_state"] == theirs["OptState"]
    assert categories["communication_buffers"] == theirs["All Gather"] + theirs["Reduce Scatter"]
    # Gradients that autograd has not handed over yet are called temporary there.
    passing = categories["temporaries"] + categories["unsharded_gradients"] + categories["activations"]
    assert abs(passing - theirs["Temp"] - theirs["Unsharded Grad"] - theirs["Activation"]) < SMALL
    assert abs(ours["peak_bytes"] - theirs["Total"]) < SMALL


@pytest.mark.parametrize("mesh", ["tp=1", "tp=2"])
def test_a_plain_and_a_split_model_agree_with_the_tracker(tmp_path, mesh):
    """The tracker does not see the state of an optimizer that is older than itself; with it the totals are the same."""
    arguments = ["--layers", "2", "--mesh", mesh]
    theirs, ours = tracked("tensor_parallel", *arguments), analyzed(tmp_path, "tensor_parallel", *arguments)
    assert ours["categories"]["parameters"] == theirs["Parameter"]
    state = ours["categories"]["optimizer_state"]
    assert abs(ours["peak_bytes"] - theirs["Total"] - (state - theirs["Optstate"])) < SMALL
