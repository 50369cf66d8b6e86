"""ZeRO-1: gradients are all-reduced in buckets, every parameter is broadcast by the rank that updated it, Adam's state is shared out."""

from tests.workloads.recording import check, check_matches, needs_torch, record
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


def test_one_rank_of_many_on_the_fake_group(tmp_path):
    recording = record(tmp_path, "zero1", "--backend", "fake", "--mesh", "dp_shard=64", "--rank", "37", "--active", "1")
    check(recording)
    assert recording.manifests[37].coordinate == {"dp_shard": 37}
