"""ZeRO-2: one reduce-scatter a bucket in every micro-batch, one all-gather a bucket behind the optimizer, state and gradients by slices."""

from tests.workloads.recording import check, check_matches, needs_torch, record
from tracekit.manifest import decode

pytestmark = needs_torch


def test_every_bucket_is_reduced_to_slices_and_its_parameters_are_gathered(tmp_path):
    recording = record(tmp_path, "zero2", "--verify", "--active", "2")
    check(recording)
    check_matches(recording)
    assert recording.manifests[0].notes[0].startswith("verified")
    owners = decode((tmp_path / "rank_00000.manifest.json").read_bytes(), "rank 0").owners
    assert {owners.strings[c] for c in owners.category} >= {
        "parameters", "gradients", "unsharded_gradients", "optimizer_state", "communication_buffers"
    }  # fmt: skip


def test_every_micro_batch_reduces_and_buckets_are_padded(tmp_path):
    recording = record(tmp_path, "zero2", "--verify", "--mesh", "dp_shard=3", "--micro-batches", "2", "--active", "1")
    check(recording)
    check_matches(recording)
    for manifest in recording.manifests.values():
        padded = sum(unit.padded_elements for unit in manifest.units)
        assert padded > sum(unit.elements for unit in manifest.units) == manifest.model["parameters"]
        assert manifest.optimizer.state_elements == 2 * padded // 3 + len(manifest.units)  # Adam counts the steps of each slice


def test_fp16_with_whole_gradients_kept_until_the_last_micro_batch(tmp_path):
    arguments = ["--precision", "fp16", "--micro-batches", "2", "--no-reduce-every-micro-batch", "--layers", "1", "--active", "1"]
    recording = record(tmp_path, "zero2", *arguments)
    check(recording)
    check_matches(recording)
