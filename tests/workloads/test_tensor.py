"""Tensor and sequence parallelism: all-reduces, and the gathers and scatters that take their place."""

import pytest

from tests.workloads.recording import check, check_matches, needs_torch, record, run

pytestmark = needs_torch


@pytest.mark.parametrize("workload", ["tensor_parallel", "sequence_parallel"])
def test_collectives_are_those_stated_and_the_parameters_those_of_one_process(tmp_path, workload):
    recording = record(tmp_path, workload, "--verify", "--layers", "2", "--active", "2")
    check(recording)
    check_matches(recording)
    assert recording.manifests[0].notes[0].startswith("verified")


@pytest.mark.parametrize("workload", ["tensor_parallel", "sequence_parallel"])
def test_under_autocast_outputs_travel_in_sixteen_bits_and_inputs_do_not(tmp_path, workload):
    check(record(tmp_path, workload, "--precision", "bf16", "--micro-batches", "2", "--layers", "2", "--active", "1"))


def test_heads_that_do_not_divide_are_refused(tmp_path):
    done = run("record", "tensor_parallel", "--nproc", "3", "-o", str(tmp_path), expect=2)
    assert "--heads 4 does not divide among tp=3 ranks" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("workload", ["tensor_parallel", "sequence_parallel", "pipeline_gpipe"])
def test_a_data_parallel_axis_that_nothing_would_synchronise_is_refused(tmp_path, workload):
    done = run("record", workload, "--mesh", "dp_replicate=2,tp=2,pp=2", "-o", str(tmp_path), expect=2)
    assert "averages no gradients" in done.stderr.splitlines()[-1]
