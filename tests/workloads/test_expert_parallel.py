"""Expert parallelism: tokens travel to the ranks of their experts; what the manifest tells of them accounts for every byte."""

import pytest

from tests.workloads.recording import check, check_matches, needs_torch, record
from tracekit.errors import UsageError

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
    """The auxiliary loss is that of each rank's own tokens, also in the training on one process."""
    recording = record(tmp_path, "expert_parallel", "--verify", *SMALL, "--capacity-factor", "4", "--padding", "--auxiliary-loss", "0.1")
    check(recording)
    check_matches(recording)
    assert all(line.full_bytes > 0 for line in recording.manifests[0].expected)
    assert recording.manifests[0].notes[0].startswith("verified")


def test_one_rank_of_many(tmp_path):
    check(record(tmp_path, "expert_parallel", *SMALL, "--backend", "fake", "--mesh", "ep=8", "--rank", "5", "--precision", "bf16"))


def test_the_auxiliary_loss_is_one_where_experts_are_evenly_busy_and_their_number_where_one_is():
    import torch
    from tracekit.workloads.common.experts import MoE, Routing, balance
    from tracekit.workloads.common.transformer import Shape

    layer = MoE(Shape(hidden=4, heads=1, kv_heads=1, ffn=4), Routing(4, 1, auxiliary_loss=0.5))
    for weight, wanted in ((torch.zeros(4, 4), 1.0), (torch.eye(4) * 100, 1.0), (torch.eye(4)[:1].repeat(4, 1).mT * 100, 4.0)):
        layer.router.weight.data = weight
        layer(torch.eye(4)[None])
        assert balance(layer, 0.5).item() == pytest.approx(0.5 * wanted)


@pytest.mark.parametrize(
    ("figures", "ranks", "sentence"),
    [
        ({"experts": 6}, 4, "6 experts do not divide into 4 ranks of axis ep"),
        ({"top_k": 9}, 2, "a token cannot choose 9 of 8 experts"),
        ({"capacity_factor": -1.0}, 2, "a capacity factor of -1.0 makes no sense"),
        ({"padding": True}, 2, "--padding fills every expert up to its capacity, and none is set"),
    ],
)
def test_what_cannot_be_is_told(figures, ranks, sentence):
    from tracekit.workloads.common.experts import Routing

    with pytest.raises(UsageError, match=sentence):
        Routing(**figures).check(ranks)


def test_first_choices_go_first_where_room_is_short():
    """4 tokens, 2 choices, 3 experts with room for 2 each: token 3's first choice of expert 0 goes before token 0's second."""
    import torch
    from tracekit.workloads.common.experts import Plan, Routing

    first, second = [1, 0, 2, 0], [0, 1, 1, 2]
    plan = Plan.of(torch.tensor([first, second]), Routing(3, 2, capacity_factor=0.75))
    assert plan.capacity == 2
    assert [int(slot) for slot in plan.slot] == [1, 3, 0, 5, 2, 7]  # slot = 4 * choice + token
    assert plan.routed.tolist() == plan.counts.tolist() == [2, 2, 2]
    roomy = Plan.of(torch.tensor([first, second]), Routing(3, 2, capacity_factor=1.5, padding=True))
    assert roomy.counts.tolist() == [4, 4, 4] and roomy.routed.tolist() == [3, 3, 2]
    assert roomy.place.tolist() == [0, 1, 2, 4, 5, 6, 8, 9]


@pytest.mark.parametrize("padding", [False, True])
def test_a_mixture_is_the_weighted_sum_of_the_chosen_experts(padding):
    """Tokens whose choices are all dropped get zeros."""
    import torch
    from tracekit.workloads.common.experts import MoE, Routing
    from tracekit.workloads.common.transformer import Shape, initialize

    shape = Shape(hidden=8, heads=2, kv_heads=2, ffn=16)
    layer = MoE(shape, Routing(4, 2, capacity_factor=0.75, padding=padding))
    initialize(layer, 0)
    x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1))
    found = layer(x)
    load = layer.take_load("layer", 0)
    assert (load.capacity, max(load.routed)) == (6, 6) and sum(load.routed) + load.dropped == 32 and load.dropped
    probability = (x @ layer.router.weight.T).softmax(-1).flatten(0, 1)
    room, wanted = [6] * 4, torch.zeros(16, 8)
    weights, choices = probability.topk(2, -1)
    for choice in range(2):
        for token in range(16):
            number = int(choices[token, choice])
            if room[number]:
                room[number] -= 1
                share = weights[token, choice] / weights[token].sum()
                wanted[token] += share * layer.experts[str(number)](x.flatten(0, 1)[token])
    torch.testing.assert_close(found.flatten(0, 1), wanted)
