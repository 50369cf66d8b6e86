"""The backward of experts one after another, moment by moment."""

from dataclasses import replace

import pytest

from tracekit.estimate.activations import block_backward
from tracekit.estimate.plan import Batch, Implementation, MeshSizes, Plan
from tracekit.estimate.recipe import RECIPES
from tracekit.estimate.saved import layer_saved
from tracekit.estimate.shape import ModelShape

MOE = ModelShape(layers=1, hidden=16, heads=2, ffn=24, vocabulary=64, sequence=32, experts=4, top_k=2, expert_ffn=24)
PLAN = Plan(
    mesh=MeshSizes(dp_replicate=2, ep=2),
    recipe=RECIPES["fp32"],
    batch=Batch(micro_batch=1, micro_batches=1),
    implementation=Implementation(single_operations=True),
)


@pytest.mark.parametrize("gated", [False, True])
def test_an_expert_frees_what_it_kept_one_tensor_after_the_other(gated: bool) -> None:
    """In fp32, 64 rows at the two experts of a rank: an expert keeps 32 rows of up and its activation, gated: gate, that activated, up and
    their product."""
    shape = replace(MOE, gated=gated)
    saved = {tensor.name: tensor.bytes for tensor in layer_saved(shape, PLAN, 0)}
    own, back, rows, stream = 32 * 24 * 4, 32 * 16 * 4, 64 * 16 * 4, 32 * 16 * 4
    left = sum(saved.values()) - 2 * rows  # outputs and what they were combined to are gone
    moments = [(step.saved, step.temporaries, step.shares) for step in block_backward(shape, PLAN, 0) if step.shares]
    passing = stream + rows
    if not gated:
        wanted = [(left, passing + own), (left - own, passing + 2 * own), (left - 2 * own, passing + own + back)]
        parts = [{"down"}, {"down"}, {"down", "up"}]
    else:
        wanted = [(left, passing + own), (left - own, passing + 3 * own)]  # the gradient of the product, and of both its factors
        wanted += [(left - 3 * own, passing + 2 * own + back), (left - 4 * own, passing + own + 2 * back)]
        parts = [{"down"}, {"down"}, {"down", "up"}, {"down", "up", "gate"}]
    first = moments[: len(wanted)]
    assert len(moments) == 2 * len(wanted)
    assert [pair[:2] for pair in first] == wanted
    assert [{part for part, ready, _ in shares if ready} for _, _, shares in first] == parts
    each = (4 if gated else 2) * own
    assert [(a - each, b + back) for a, b in wanted] == [pair[:2] for pair in moments[len(wanted) :]]
