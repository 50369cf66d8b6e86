"""Context parallelism: four ways to let a rank's queries see all keys, each equal to one process after a step."""

import pytest

from tests.workloads.recording import check, check_matches, needs_torch, record, run

pytestmark = needs_torch

SMALL = ("--layers", "2", "--hidden", "64", "--ffn", "128", "--vocabulary", "128", "--active", "2")


@pytest.mark.parametrize("kind", ["allgather", "blockwise", "ulysses"])
def test_with_grouped_heads_and_micro_batches(tmp_path, kind):
    """Keys and values travel with the heads that they have, not repeated to the number of query heads."""
    recording = record(tmp_path, f"context_parallel_{kind}", "--verify", *SMALL, "--kv-heads", "2", "--micro-batches", "2")
    check(recording)
    check_matches(recording)
    assert recording.manifests[0].notes[0].startswith("verified")


def test_ring_hands_every_block_to_the_next_rank(tmp_path):
    recording = record(tmp_path, "context_parallel_ring", "--verify", *SMALL, "--mesh", "cp=3", "--sequence", "48", "--kv-heads", "1")
    check(recording)
    check_matches(recording)
    assert recording.manifests[0].notes[0].startswith("verified")
    operations = recording.job.operations
    hops = operations[operations["kind"].isin(["send", "recv"]) & (operations["launch_step_number"] >= 0)]
    pairs = hops.pivot(index="match", columns="kind", values="rank")
    assert len(pairs) and ((pairs["send"] + 1) % 3 == pairs["recv"]).all()


@pytest.mark.parametrize("kind", ["ring", "blockwise"])
def test_one_rank_of_a_large_mesh_in_half_precision(tmp_path, kind):
    """Elements of two bytes; gradients over the data and context axes together."""
    options = ("--backend", "fake", "--mesh", "dp_replicate=2,cp=4", "--rank", "6", "--precision", "bf16")
    recording = record(tmp_path, f"context_parallel_{kind}", *SMALL, *options)
    check(recording)
    assert {group.axis for group in recording.manifests[6].groups} == {"world", "dp_replicate", "cp"}


def test_sizes_that_do_not_divide_are_told():
    told = run("record", "context_parallel_ring", "--backend", "fake", "--sequence", "30", "-o", "unused", expect=2)
    assert "30 tokens a sample do not divide into 4 ranks of axis cp" in told.stderr
    told = run("record", "context_parallel_ulysses", "--backend", "fake", "--mesh", "cp=8", "-o", "unused", expect=2)
    assert "4 heads do not divide into 8 ranks of axis cp" in told.stderr
