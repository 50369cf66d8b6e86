"""DDP: one all-reduce a bucket; under accumulation only in the last micro-batch."""

from tests.workloads.recording import check, check_matches, check_model, needs_torch, record, run

pytestmark = needs_torch


def test_every_bucket_is_reduced_once_a_step(tmp_path):
    recording = record(tmp_path, "ddp", "--verify")
    check(recording)
    check_matches(recording)
    assert recording.manifests[0].notes[0].startswith("verified")


def test_accumulation_reduces_only_in_the_last_micro_batch(tmp_path):
    check(record(tmp_path, "ddp", "--micro-batches", "2", "--gradient-as-bucket-view", "--active", "2"))


def test_blocks_computed_again_send_nothing_more(tmp_path):
    recording = record(tmp_path, "ddp", "--recompute", "full", "--swiglu", "--verify", "--layers", "1", "--active", "1")
    check(recording)
    check_model(recording)
    assert recording.manifests[0].plan["recompute"] == "full"


def test_a_loss_scale_that_is_too_large_skips_steps_and_the_manifest_says_so(tmp_path):
    more = ("--backend", "fake", "--nproc", "2", "--layers", "1", "--active", "1", "--precision", "fp16", "--loss-scale", str(2.0**40))
    (note,) = [n for n in record(tmp_path, "ddp", *more).manifests[0].notes if n.startswith("loss scale")]
    assert note.startswith(f"loss scale {2**40:,} at the start, {2**37:,} behind step 2: skipped the update of steps 0, 1, 2")


def test_one_rank_alone_on_the_fake_group(tmp_path):
    check(record(tmp_path, "ddp", "--backend", "fake", "--nproc", "8", "--rank", "3", "--layers", "2", "--active", "1"))


def test_a_second_axis_that_nothing_would_synchronise_is_refused(tmp_path):
    done = run("record", "ddp", "--mesh", "dp_replicate=2,dp_shard=2", "-o", str(tmp_path), expect=2)
    assert "synchronises gradients along dp_replicate only" in done.stderr


def test_a_fixed_global_batch_is_shared_out_and_trains_the_same(tmp_path):
    recording = record(tmp_path, "ddp", "--global-batch", "12", "--nproc", "3", "--layers", "1", "--active", "1", "--verify")
    check(recording)
    batches = {manifest.batch.local_batch for manifest in recording.manifests.values()}
    assert batches == {4}
    assert {manifest.batch.global_batch for manifest in recording.manifests.values()} == {12}
