"""ZeRO-1: gradients are all-reduced in buckets, every parameter is broadcast by the rank that updated it, Adam's state is shared out."""

import pytest

from tests.workloads.recording import check, check_matches, check_model, job_of, needs_torch, record
from tracekit.errors import UsageError
from tracekit.manifest import decode

pytestmark = needs_torch


def test_every_parameter_is_broadcast_once_a_step_by_its_owner(tmp_path):
    recording = record(tmp_path, "zero1", "--verify", "--active", "2")
    check(recording)
    check_matches(recording)
    manifests = recording.manifests
    assert manifests[0].notes[0].startswith("verified")
    assert recording.counted(0, 2)["broadcast", "dp_shard", "parameter_sync"][0] == len(manifests[0].parameters)


def test_together_the_ranks_hold_the_optimizer_state_once(tmp_path):
    recording = record(tmp_path, "zero1", "--mesh", "dp_shard=3", "--parameters-as-bucket-view", "--active", "1")
    check(recording)
    check_matches(recording)
    states = [manifest.optimizer.state_elements for manifest in recording.manifests.values()]
    parameters = recording.manifests[0].model["parameters"]
    steps = len(recording.manifests[0].parameters)  # Adam counts the steps of each parameter
    assert sum(states) == 2 * parameters + steps
    assert max(states) < parameters
    owners = decode((tmp_path / "rank_00000.manifest.json").read_bytes(), "rank 0").owners
    assert "optimizer_state" in {owners.strings[category] for category in owners.category}


def test_gradients_reduced_to_slices_are_what_the_model_predicts(tmp_path):
    """Whole gradients of two micro-batches, reduced where they lie; a vocabulary that leaves padding in the last bucket."""
    more = ("--micro-batches", "2", "--layers", "1", "--vocabulary", "515", "--mesh", "dp_shard=3", "--batch", "2", "--active", "1")
    recording = record(tmp_path, "zero1", "--exchange", "reduce_scatter", "--verify", *more)
    check(recording)
    check_matches(recording)
    check_model(recording)
    manifest = recording.manifests[2]
    assert manifest.notes[0].startswith("verified")
    kinds = {key[0]: calls for key, (calls, _) in recording.counted(2, 2).items()}
    assert kinds == {"reduce_scatter": len(manifest.units), "all_gather": len(manifest.units)}
    padded = sum(unit.padded_elements for unit in manifest.units)
    assert padded > manifest.model["parameters"]
    assert manifest.optimizer.state_elements == 2 * padded // 3 + len(manifest.units)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.distributed.optim uses torch.jit
def test_slices_cannot_be_reduced_twice_where_they_lie():
    from tracekit.workloads import zero1

    with pytest.raises(UsageError, match="reduces gradients where they lie, once a step"):
        zero1.expected(*job_of(zero1, ["--exchange", "reduce_scatter", "--no-no-sync"]))


def test_one_rank_of_many_on_the_fake_group(tmp_path):
    recording = record(tmp_path, "zero1", "--backend", "fake", "--mesh", "dp_shard=64", "--rank", "37", "--active", "1")
    check(recording)
    assert recording.manifests[37].coordinate == {"dp_shard": 37}
