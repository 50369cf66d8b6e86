"""DDP and ZeRO on virtual ranks: who holds what, what is sent, the same parameters."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.errors import UsageError
from tracekit.simulate.data_parallel.strategies import ZERO
from tracekit.simulate.zero import Arguments, run

KEYS = [strategy.key for strategy in ZERO]
#: 8 + 8 elements in two units, two of each unit on each of 4 ranks: no padding.
EVEN = Arguments(layers="2x4,4x2", bias="no", micro_batches=2)


def table(experiment, title):
    (found,) = [t.frame for t in experiment.tables if t.title == title]
    return found


def rows(experiment, title, *columns):
    return table(experiment, title)[list(columns)].to_numpy().tolist()


def test_model_state_of_16_elements_on_4_ranks():
    """N = 16, W = 4, P + G + O = 4 + 4 + 8. torch deals out whole parameters: two ranks own 8 elements each, two own nothing."""
    assert rows(run(EVEN), "Bytes of a rank", "strategy", "between", "parameter", "gradient", "optimizer_state", "sum") == [
        ["DDP", 192, 64, 64, 128, 256],
        ["ZeRO-1 naive", 96, 64, 64, 32, 160],
        ["ZeRO-1 torch", 128, 64, 64, 64, 192],
        ["ZeRO-1", 96, 64, 64, 32, 160],
        ["ZeRO-2", 96, 64, 16, 32, 112],
        ["ZeRO-3", 48, 16, 16, 32, 64],
    ]


def test_sixteen_bytes_a_parameter_under_mixed_precision():
    """The ZeRO paper's 2 + 2 + 12: 16 N without sharding, 4 N + 12 N / W, 2 N + 14 N / W, 16 N / W with."""
    state = [size for (size,) in rows(run(replace(EVEN, recipe="mixed")), "Bytes of a rank", "sum")]
    assert state == [256, 112, 160, 112, 88, 64]


def test_what_each_strategy_sends():
    """Of 64 B of gradients and 64 B of parameters in 2 micro-batches: 2F, 3F, 2F + F on average, 2F, 3F, 5F of them, F = 3/4.

    With stage 3 the second layer is gathered once a micro-batch: backward begins with it.
    """
    assert rows(run(EVEN), "What is sent in a step", "strategy", "forward", "backward", "optimizer", "most", "steps") == [
        ["DDP", "none", "2 all_reduce", "none", 96, 12],
        ["ZeRO-1 naive", "none", "2 all_reduce", "2 all_gather", 144, 18],
        ["ZeRO-1 torch", "none", "2 all_reduce", "2 broadcast", 192, 16],
        ["ZeRO-1", "none", "2 reduce_scatter", "2 all_gather", 96, 12],
        ["ZeRO-2", "none", "4 reduce_scatter", "2 all_gather", 144, 18],
        ["ZeRO-3", "4 all_gather", "2 all_gather, 4 reduce_scatter", "none", 240, 30],
    ]


def test_with_one_micro_batch_stage_3_sends_one_and_a_half_times_ddp():
    """As the paper counts; without --reshard-last the last layer's parameters are gathered once only."""
    sent = dict(rows(run(replace(EVEN, micro_batches=1, reshard_last="yes")), "What is sent in a step", "strategy", "most"))
    assert sent["ZeRO-1"] == sent["ZeRO-2"] == sent["DDP"]
    assert 2 * sent["ZeRO-3"] == 3 * sent["DDP"]


def test_who_holds_what():
    """One layer 2 x 3 on 2 ranks: 3 elements each."""
    experiment = run(Arguments(world=2, layers="2x3", bias="no"))
    columns = ("strategy", "rank", "parameters", "gradients", "reduced", "optimizer")
    own = ["flat(W1)[0:3]", "flat(W1)[3:6]"]
    assert rows(experiment, "Who holds what", *columns) == [
        ["DDP", 0, "all", "all", "all", "all"],
        ["DDP", 1, "all", "all", "all", "all"],
        ["ZeRO-1 naive", 0, "all", "all", "all", own[0]],
        ["ZeRO-1 naive", 1, "all", "all", "all", own[1]],
        ["ZeRO-1 torch", 0, "all", "all", "all", "W1"],
        ["ZeRO-1 torch", 1, "all", "all", "all", ""],
        ["ZeRO-1", 0, "all", "all", own[0], own[0]],
        ["ZeRO-1", 1, "all", "all", own[1], own[1]],
        ["ZeRO-2", 0, "all", own[0], own[0], own[0]],
        ["ZeRO-2", 1, "all", own[1], own[1], own[1]],
        ["ZeRO-3", 0, own[0], own[0], own[0], own[0]],
        ["ZeRO-3", 1, own[1], own[1], own[1], own[1]],
    ]


def test_the_moments_show_what_the_table_says():
    """Stage 1 keeps the whole gradient, of which only the rank's own part is reduced."""
    moments = run(Arguments(strategy="zero1", world=2, layers="2x3", bias="no")).moments
    (before,) = [moment for moment in moments if moment.title == "before the update"]
    assert [[cell.label for cell in cells if cell.kind == "gradient"] for cells in before.holds] == [
        ["mean grad flat(W1)[0:3]", "local grad flat(W1)[3:6]"],
        ["local grad flat(W1)[0:3]", "mean grad flat(W1)[3:6]"],
    ]
    assert [[cell.label for cell in cells] for cells in moments[-1].holds] == [
        ["W1", "exp_avg flat(W1)[0:3]", "exp_avg_sq flat(W1)[0:3]"],
        ["W1", "exp_avg flat(W1)[3:6]", "exp_avg_sq flat(W1)[3:6]"],
    ]


def test_elements_that_do_not_divide_are_padded():
    """9 elements on 4 ranks: 3 each, 3 of 12 are padding."""
    moments = run(Arguments(strategy="zero3", layers="3x3", bias="no")).moments
    kept = [[(cell.label, cell.bytes) for cell in cells if not cell.label.startswith("exp")] for cells in moments[0].holds]
    assert kept == [
        [("flat(W1)[0:3]", 12)],
        [("flat(W1)[3:6]", 12)],
        [("flat(W1)[6:9]", 12)],
        [("padding", 12)],
    ]


@pytest.mark.parametrize("key", KEYS)
def test_calls_of_a_step(key):
    experiment = run(replace(EVEN, strategy=key))
    assert experiment.holds
    found = [(call.kind, call.purpose, call.phase, call.label) for call in experiment.calls]
    reduced = [("layer 2", "layer 1")] * (2 if key in ("zero2", "zero3") else 1)
    scattered = [("reduce_scatter", "gradient_scatter", "backward", unit) for pair in reduced for unit in pair]
    synchronised = [("all_gather", "parameter_sync", "optimizer", unit) for unit in ("layer 2", "layer 1")]
    owners = [("broadcast", "parameter_sync", "optimizer", name) for name in ("W1", "W2")]
    summed = [("all_reduce", "gradient_sync", "backward", unit) for unit in ("layer 2", "layer 1")]
    micro_batch = [
        ("all_gather", "parameter_gather", "forward", "layer 1"),
        ("all_gather", "parameter_gather", "forward", "layer 2"),
        ("all_gather", "parameter_gather", "backward", "layer 1"),
        ("reduce_scatter", "gradient_scatter", "backward", "layer 2"),
        ("reduce_scatter", "gradient_scatter", "backward", "layer 1"),
    ]
    expected = {
        "ddp": summed,
        "zero1_naive": summed + synchronised,
        "zero1_torch": summed + owners,
        "zero1": scattered + synchronised,
        "zero2": scattered + synchronised,
        "zero3": micro_batch * 2,
    }
    assert found == expected[key]


def test_a_bucket_is_closed_by_the_layer_that_reaches_its_size():
    """20, 30 and 12 elements of 4 B, from the last layer on: 12 + 30 reach 160 B, the first layer is left for a bucket of its own."""
    experiment = run(Arguments(strategy="ddp", layers="5x4,6x5,2x6", bias="no", units="bucket", bucket_bytes=160))
    assert [(call.label, call.full_bytes) for call in experiment.calls] == [("bucket 0", 168), ("bucket 1", 80)]


def test_without_prefetch_a_unit_is_gathered_when_its_turn_comes():
    experiment = run(replace(EVEN, strategy="zero3", micro_batches=1, prefetch="no", reshard_last="yes"))
    found = [(call.kind, call.label) for call in experiment.calls if call.phase == "backward"]
    assert found == [(kind, f"layer {layer}") for layer in (2, 1) for kind in ("all_gather", "reduce_scatter")]


def test_owners_may_broadcast_what_they_have_updated():
    experiment = run(replace(EVEN, strategy="zero1_naive", naive_sync="broadcast"))
    assert experiment.holds
    assert [call.kind for call in experiment.calls] == ["all_reduce"] * 2 + ["broadcast"] * 8


def test_gradients_are_averaged_over_ranks_and_micro_batches():
    frame = table(run(Arguments()), "Gradient averaging (DDP)").set_index("who")["gradient"]
    own = [frame[f"rank {rank}"] for rank in range(4)]
    assert len(set(own)) == 4, "every rank has other samples"
    assert frame["sum"] == pytest.approx(sum(own), rel=1e-12)
    assert frame["mean"] == pytest.approx(frame["sum"] / 4, rel=1e-12)
    assert frame["one process"] == pytest.approx(frame["mean"], rel=1e-12)


def test_peak_falls_with_each_stage():
    peaks = dict(rows(run(Arguments(layers="16x16,16x16,16x16")), "Bytes of a rank", "strategy", "peak"))
    assert peaks["DDP"] > peaks["ZeRO-1"] > peaks["ZeRO-2"] > peaks["ZeRO-3"]
    assert peaks["ZeRO-1"] == peaks["ZeRO-1 naive"]


def test_bytes_of_every_moment_add_up():
    experiment = run(Arguments())
    peaks = table(experiment, "Peak, and by what")
    assert (peaks.drop(columns=["variant", "rank", "moment", "sum"]).sum(axis=1) == peaks["sum"]).all()
    for strategy in ZERO:
        (live,) = [t.frame for t in experiment.tables if t.title.startswith(f"{strategy.name}: bytes held")]
        assert (live.drop(columns=["moment", "sum"]).sum(axis=1) == live["sum"]).all()


@pytest.mark.parametrize("key", KEYS)
def test_messages_of_the_moments_are_all_that_was_sent(key):
    experiment = run(Arguments(strategy=key))
    sent = sum(message.bytes for moment in experiment.moments for message in moment.messages)
    assert [sent] == rows(experiment, "What is sent in a step", "total")[0]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=4),
    st.builds(
        Arguments,
        world=st.integers(1, 8),
        bias=st.sampled_from(["yes", "no"]),
        units=st.sampled_from(["layer", "model", "bucket"]),
        bucket_bytes=st.integers(1, 200),
        prefetch=st.sampled_from(["yes", "no"]),
        reshard_last=st.sampled_from(["yes", "no"]),
        micro_batches=st.integers(1, 3),
        batch=st.integers(1, 3),
        recipe=st.sampled_from(["fp32", "mixed", "mixed_fp32_gradients"]),
        naive_sync=st.sampled_from(["all_gather", "broadcast"]),
        steps=st.integers(1, 3),
        seed=st.integers(0, 99),
    ),
)
def test_every_check_holds_for_any_stack_and_world(widths, arguments):
    layers = ",".join(f"{outputs}x{inputs}" for inputs, outputs in pairwise(widths))
    experiment = run(replace(arguments, layers=layers))
    assert [check for check in experiment.checks if not check.holds] == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"world": 0}, "--world 0"),
        ({"micro_batches": 0}, "--micro-batches 0"),
        ({"batch": -1}, "--batch -1"),
        ({"steps": 21}, "--steps 21"),
        ({"seed": -1}, "--seed -1"),
        ({"strategy": "zero4"}, "--strategy zero4"),
        ({"recipe": "fp8"}, "--recipe fp8"),
        ({"layers": "2x3,4x4"}, "layer 1 has 2 outputs"),
        ({"world": 32, "layers": ",".join(["2x2"] * 5)}, "nobody can read"),
        ({"world": 8, "layers": "4096x4096"}, "elements on all ranks"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, problem):
    with pytest.raises(UsageError, match=problem):
        run(Arguments(**arguments))
