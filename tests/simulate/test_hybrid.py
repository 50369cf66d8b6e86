"""A hybrid job's micro-batch: bytes of every axis by hand, in closed form, and beside the recordings of hybrid jobs."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulate.recordings import recorded
from tracekit.errors import UsageError
from tracekit.simulate.hybrid import Arguments, run


def axes(experiment):
    (frame,) = [t.frame for t in experiment.tables if t.title == "What each axis sends in one micro-batch"]
    return frame.set_index("axis")


def test_two_layers_on_two_tensor_ranks():
    """h = 4, 3 tokens, fp16: four all-reduces a layer of 24 B, of which a rank of two sends 2 (x-1)/x = all."""
    found = axes(run(Arguments(mesh="tp=2", layers=2, hidden=4, sequence=3, vocabulary=4)))
    assert found.loc["tp", ["calls", "forward", "backward", "once"]].tolist() == [8, 4 * 24, 4 * 24, 0]


def test_sequence_parallel_sends_as_much_in_twice_as_many_calls():
    plain, shares = (axes(run(Arguments(mesh="tp=4", sequence_parallel=on))) for on in (False, True))
    assert shares.loc["tp", "calls"] == 2 * plain.loc["tp", "calls"]
    assert shares.loc["tp", ["forward", "backward"]].tolist() == plain.loc["tp", ["forward", "backward"]].tolist()


def test_a_middle_stage_sends_both_ways_and_an_end_one_way():
    sent = [axes(run(Arguments(mesh="pp=3", layers=3, rank=rank))).loc["pp", ["forward", "backward"]].tolist() for rank in range(3)]
    size = 32 * 32 * 2
    assert sent == [[size, 0], [size, size], [0, size]]


def test_an_axis_that_crosses_nodes_says_so():
    experiment = run(Arguments(mesh="dp_shard=4,tp=2", gpus_per_node=4))
    assert axes(experiment)["nodes"].to_dict() == {"dp_shard": 2, "tp": 1}
    assert "Crosses nodes of 4 ranks: dp_shard." in experiment.notes


@pytest.mark.parametrize("name", ["hybrid_3d_8", "hybrid_4d_16", "hybrid_5d_8"])
def test_a_recorded_step_is_its_micro_batches(name):
    """Every collective with its axis, purpose and bytes; of experts the number of calls, for a router is not even."""
    sample = recorded(name)
    model, batch, options = sample.manifest["model"], sample.manifest["batch"], sample.manifest["options"]
    arguments = Arguments(
        mesh=",".join(f"{axis['name']}={axis['size']}" for axis in sample.manifest["mesh"]),
        rank=sample.manifest["rank"],
        layers=model["layers"],
        hidden=model["hidden"],
        ffn=model["ffn"],
        vocabulary=model["vocabulary"] + model["sequence"],  # positions are a part of the embedding
        sequence=batch["sequence"],
        micro_batch_size=batch["micro_batch"],
        experts=options.get("experts", 0),
        top_k=options.get("top_k", 2),
        reshard_after_forward=False,
        element_bytes=4,
    )
    once = ("parameter_gather", "gradient_scatter", "gradient_sync")
    found: Counter = Counter()
    for call in run(arguments).calls:
        size = 0 if call.purpose.startswith("expert") else call.full_bytes
        found[call.kind, call.axis, call.purpose, size] += 1 if call.purpose in once else batch["micro_batches"]
    wanted = Counter(
        (kind, axis, purpose, 0 if purpose.startswith("expert") else size)
        for kind, axis, purpose, size in sample.calls(sample.manifest["rank"])
        if kind != "recv"
    )
    assert found == wanted


@settings(max_examples=40, deadline=None)
@given(
    st.permutations(["pp", "dp_replicate", "dp_shard", "ep", "cp", "tp"]),
    st.lists(st.sampled_from([1, 1, 2, 2, 3]), min_size=6, max_size=6),
    st.integers(0, 10**6),
    st.booleans(),
    st.booleans(),
)
def test_every_check_holds_on_any_mesh(order, sizes, rank, sequence_parallel, reshard):
    mesh = list(zip(order, sizes, strict=True))
    world = 1
    for _, size in mesh:
        world *= size
    if world > 96:
        return
    arguments = Arguments(
        mesh=",".join(f"{name}={size}" for name, size in mesh),
        rank=rank % world,
        layers=3,
        hidden=36,
        sequence=36,
        experts=6,
        vocabulary=7,
        sequence_parallel=sequence_parallel,
        reshard_after_forward=reshard,
    )
    assert [check for check in run(arguments).checks if not check.holds] == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"mesh": "tp=3"}, "--hidden 32 does not divide by 3"),
        ({"mesh": "cp=5"}, "--sequence 32"),
        ({"mesh": "ep=3", "experts": 4}, "--experts 4"),
        ({"mesh": "pp=8"}, "4 layers do not fill 8 stages"),
        ({"mesh": "foo=2"}, "no strategy is known"),
        ({"mesh": "dp=300"}, "at most 256"),
        ({"rank": 8}, "--rank 8"),
        ({"gradient_bytes": 3}, "--gradient-bytes 3"),
        ({"mesh": "ep=2", "experts": 2, "top_k": 3}, "3 of 2 experts"),
        ({"hidden": 4096, "layers": 128}, "elements moved"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, reason):
    with pytest.raises(UsageError, match=reason):
        run(Arguments(**arguments))
