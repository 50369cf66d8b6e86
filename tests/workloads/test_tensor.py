"""Tensor and sequence parallelism: all-reduces, and the gathers and scatters that take their place."""

import pytest

from tests.workloads.recording import check, check_matches, check_model, job_of, needs_torch, record, run
from tracekit.errors import UsageError

pytestmark = needs_torch


@pytest.mark.parametrize("workload", ["tensor_parallel", "sequence_parallel"])
def test_collectives_are_those_stated_and_the_parameters_those_of_one_process(tmp_path, workload):
    recording = record(tmp_path, workload, "--verify", "--layers", "2", "--active", "2")
    check(recording)
    check_matches(recording)
    assert recording.manifests[0].notes[0].startswith("verified")


@pytest.mark.parametrize("options", [("gather", "--swiglu"), ("loss", "--micro-batches", "2")])
def test_a_divided_vocabulary_is_what_the_model_predicts(tmp_path, options):
    recording = record(tmp_path, "tensor_parallel", "--verify", "--layers", "1", "--active", "1", "--divide-vocabulary", *options)
    check(recording)
    check_matches(recording)
    check_model(recording)
    assert recording.manifests[0].notes[0].startswith("verified")
    assert recording.manifests[0].model["gated_mlp"] == ("--swiglu" in options)


@pytest.mark.parametrize("workload", ["tensor_parallel", "sequence_parallel"])
def test_under_autocast_outputs_travel_in_sixteen_bits_and_inputs_do_not(tmp_path, workload):
    check(record(tmp_path, workload, "--precision", "bf16", "--micro-batches", "2", "--layers", "2", "--active", "1"))


def test_a_vocabulary_that_does_not_divide_is_refused():
    from tracekit.workloads import tensor_parallel

    with pytest.raises(UsageError, match="--vocabulary 515 does not divide among tp=2 ranks"):
        tensor_parallel.expected(*job_of(tensor_parallel, ["--vocabulary", "515", "--divide-vocabulary", "loss"]))


def test_heads_that_do_not_divide_are_refused(tmp_path):
    done = run("record", "tensor_parallel", "--nproc", "3", "-o", str(tmp_path), expect=2)
    assert "--heads 4 does not divide among tp=3 ranks" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("workload", ["tensor_parallel", "sequence_parallel", "pipeline_gpipe"])
def test_a_data_parallel_axis_that_nothing_would_synchronise_is_refused(tmp_path, workload):
    done = run("record", workload, "--mesh", "dp_replicate=2,tp=2,pp=2", "-o", str(tmp_path), expect=2)
    assert "averages no gradients" in done.stderr.splitlines()[-1]
