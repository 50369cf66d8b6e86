"""Context parallelism: four ways to let a rank's queries see all keys, each equal to one process after a step."""

import pytest

from tests.workloads.recording import check, check_matches, needs_torch, record
from tracekit.errors import UsageError

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


def test_one_rank_of_a_large_mesh_in_half_precision(tmp_path):
    """Elements of two bytes; gradients over the data and context axes together."""
    options = ("--backend", "fake", "--mesh", "dp_replicate=2,cp=4", "--rank", "6", "--precision", "bf16")
    recording = record(tmp_path, "context_parallel_ring", *SMALL, *options)
    check(recording)
    assert {group.axis for group in recording.manifests[6].groups} == {"world", "dp_replicate", "cp"}


def job_on(**sizes):
    """A job that has sizes only."""
    import torch
    from tracekit.workloads.common.job import Job
    from tracekit.workloads.common.settings import Settings
    from tracekit.workloads.common.transformer import Shape

    return Job(Settings(), Shape(sequence=30), sizes, None, torch.device("cpu"), 0)


def test_sizes_that_do_not_divide_are_told():
    from tracekit.workloads import context_parallel_ring, context_parallel_ulysses

    with pytest.raises(UsageError, match="30 tokens a sample do not divide into 4 ranks of axis cp"):
        context_parallel_ring.expected(job_on(cp=4), None)
    with pytest.raises(UsageError, match="4 heads do not divide into 3 ranks of axis cp"):
        context_parallel_ulysses.build(job_on(cp=3), None)
    with pytest.raises(UsageError, match="this workload has no use for axis tp of the mesh"):
        context_parallel_ring.expected(job_on(tp=2, cp=3), None)


@pytest.mark.parametrize(("kv_heads", "ranks", "times"), [(4, 2, 1), (4, 4, 1), (2, 4, 2), (1, 4, 4), (3, 2, 2), (6, 4, 2)])
def test_heads_of_keys_are_copied_no_more_than_it_takes(kv_heads, ranks, times):
    from tracekit.workloads.context_parallel_ulysses import copies

    assert copies(12, kv_heads, ranks) == times


def test_parts_of_attention_put_together_are_attention_with_its_gradients():
    """Two blocks of keys; the later one is seen by the later queries only."""
    import torch
    from tracekit.workloads.common.context import attend_part, delta_of, part_gradients
    from tracekit.workloads.common.transformer import attend
    from tracekit.workloads.context_parallel_ring import merged

    torch.manual_seed(0)
    q, (k, v) = torch.randn(2, 4, 10, 8, requires_grad=True), torch.randn(2, 2, 2, 10, 8).unbind()
    k.requires_grad_(), v.requires_grad_()
    wanted = attend(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    grad = torch.randn_like(wanted)
    wanted.backward(grad)

    with torch.no_grad():
        late = q[:, :, 5:]
        early, early_lse = attend_part(q[:, :, :5], k[:, :, :5], v[:, :, :5], 0, 0)
        one = attend_part(late, k[:, :, :5], v[:, :, :5], 5, 0)
        two = attend_part(late, k[:, :, 5:], v[:, :, 5:], 5, 5)
        output, lse = merged(*one, *two)
        torch.testing.assert_close(torch.cat((early, output), 2), wanted)
        lse = torch.cat((early_lse, lse), 2)
        delta = delta_of(wanted, grad)
        first = part_gradients(q, k[:, :, :5], v[:, :, :5], grad, lse, delta, 0, 0)
        second = part_gradients(late, k[:, :, 5:], v[:, :, 5:], grad[:, :, 5:], lse[:, :, 5:], delta[:, :, 5:], 5, 5)
    first[0][:, :, 5:] += second[0]
    torch.testing.assert_close(first[0], q.grad)
    torch.testing.assert_close(torch.cat((first[1], second[1]), 2), k.grad)
    torch.testing.assert_close(torch.cat((first[2], second[2]), 2), v.grad)
