"""DDP: one all-reduce a bucket; under accumulation only in the last micro-batch."""

from tests.workloads.recording import check, check_matches, needs_torch, record

pytestmark = needs_torch


def test_every_bucket_is_reduced_once_a_step(tmp_path):
    recording = record(tmp_path, "ddp", "--verify")
    check(recording)
    check_matches(recording)
    assert recording.manifests[0].notes[0].startswith("verified")


def test_accumulation_reduces_only_in_the_last_micro_batch(tmp_path):
    check(record(tmp_path, "ddp", "--micro-batches", "2", "--gradient-as-bucket-view", "--active", "2"))
