"""Expert parallelism: tokens travel to the ranks of their experts; what the manifest tells of them accounts for every byte."""

from tests.workloads.recording import check, check_matches, needs_torch, record, run

pytestmark = needs_torch

SMALL = ("--layers", "2", "--hidden", "64", "--ffn", "96", "--vocabulary", "128", "--active", "2")


def test_rows_in_the_manifest_account_for_the_bytes_of_every_exchange(tmp_path):
    recording = record(tmp_path, "expert_parallel", "--verify", *SMALL, "--micro-batches", "2")
    check(recording)
    check_matches(recording)
    for rank, manifest in recording.manifests.items():
        assert manifest.notes[0].startswith("verified")
        for step in manifest.steps:
            loads = [load for load in manifest.experts if load.step == step]
            assert [load.layer for load in loads] == ["layers.0.mlp", "layers.1.mlp"]
            assert [sum(load.routed) for load in loads] == [4 * 64 * 2, 4 * 64 * 2]  # samples, tokens, choices: nothing is dropped
            assert all(load.owned == list(range(4 * rank, 4 * rank + 4)) and load.dropped == 0 for load in loads)
            seen = recording.counted(rank, step)
            rows = 64 * 4 * sum(sum(load.routed) + sum(load.received) for load in loads)
            counts = 2 * 2 * 8 * 8  # layers, micro-batches, experts, bytes
            assert seen["all_to_all", "ep", "expert_dispatch"] == (12, rows + counts)
            assert seen["all_to_all", "ep", "expert_combine"] == (8, rows)


def test_every_row_that_is_sent_is_received(tmp_path):
    """Over a data axis beside ``ep`` the experts' gradients are averaged as well; one choice a token, some of them dropped."""
    mesh = ("--mesh", "dp_replicate=2,ep=2", "--top-k", "1", "--capacity-factor", "1.0", "--batch", "2")
    recording = record(tmp_path, "expert_parallel", *SMALL, *mesh)
    check(recording)
    check_matches(recording)
    manifests = recording.manifests
    for first in (0, 2):  # ranks 0 and 1 exchange tokens, and ranks 2 and 3
        for here, there in zip(manifests[first].experts, manifests[first + 1].experts, strict=True):
            together = [a + b for a, b in zip(here.routed, there.routed, strict=True)]
            assert together == here.received + there.received
            assert here.capacity == 2 * 64 / 8 and max(here.routed) <= here.capacity
            assert sum(here.routed) + here.dropped == 2 * 64
    assert any(load.dropped for load in manifests[0].experts)


def test_padding_makes_exchanges_even_and_their_bytes_known(tmp_path):
    recording = record(tmp_path, "expert_parallel", "--verify", *SMALL, "--capacity-factor", "4", "--padding")
    check(recording)
    check_matches(recording)
    assert all(line.full_bytes > 0 for line in recording.manifests[0].expected)
    assert recording.manifests[0].notes[0].startswith("verified")


def test_one_rank_of_many(tmp_path):
    check(record(tmp_path, "expert_parallel", *SMALL, "--backend", "fake", "--mesh", "ep=8", "--rank", "5", "--precision", "bf16"))


def test_what_cannot_be_is_told():
    for arguments, sentence in (
        (("--experts", "6", "--mesh", "ep=4"), "6 experts do not divide into 4 ranks of axis ep"),
        (("--top-k", "9"), "a token cannot choose 9 of 8 experts"),
        (("--padding",), "--padding fills every expert up to its capacity, and none is set"),
        (("--mesh", "tp=2,ep=2"), "this workload has no use for axis tp of the mesh"),
    ):
        assert sentence in run("record", "expert_parallel", "--backend", "fake", "-o", "unused", *arguments, expect=2).stderr
