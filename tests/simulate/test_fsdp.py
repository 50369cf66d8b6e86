"""FSDP on virtual ranks: the worked example, the collectives that torch shows, bytes, and the numbers of one process."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.errors import UsageError
from tracekit.simulate.fsdp import Arguments, run

#: Linear layers 5-4-6-7-3, as in the recordings below.
FOUR = "4x5,6x4,7x6,3x7"


def table(experiment, title):
    (found,) = [t.frame for t in experiment.tables if t.title == title]
    return found


def test_the_worked_example_of_two_linear_layers():
    experiment = run(Arguments(example="tutorial"))
    kept = table(experiment, "What each rank keeps")[["version", "rank", "shard", "elements", "padding", "bytes", "state_bytes"]]
    assert kept.to_numpy().tolist() == [
        ["FSDP1", 0, "W1, b1[0:1]", 7, 0, 28, 56],
        ["FSDP1", 1, "b1[1:2], W2, b2", 7, 0, 28, 56],
        ["FSDP2", 0, "W1[0:1], b1[0:1], W2[0:1], b2[0:1]", 7, 0, 28, 56],
        ["FSDP2", 1, "W1[1:2], b1[1:2], W2[1:2], b2[1:2]", 7, 0, 28, 56],
    ]
    flat = table(experiment, "FSDP1: the flat parameter")[["parameter", "interval", "view", "held", "cut"]]
    assert flat.to_numpy().tolist() == [
        ["W1", "[0, 6)", "flat[0:6].view(2, 3)", "rank 0: [0, 6)", "no"],
        ["b1", "[6, 8)", "flat[6:8].view(2)", "rank 0: [6, 7), rank 1: [7, 8)", "yes"],
        ["W2", "[8, 12)", "flat[8:12].view(2, 2)", "rank 1: [8, 12)", "no"],
        ["b2", "[12, 14)", "flat[12:14].view(2)", "rank 1: [12, 14)", "no"],
    ]
    single = table(experiment, "FSDP2: each parameter by itself")
    assert single[single["rank"] == 1][["parameter", "rows", "local", "offset", "elements", "padding"]].to_numpy().tolist() == [
        ["W1", "[1, 2)", "1 x 3", 0, 3, 0],
        ["b1", "[1, 2)", "1", 3, 1, 0],
        ["W2", "[1, 2)", "1 x 2", 4, 2, 0],
        ["b2", "[1, 2)", "1", 6, 1, 0],
    ]
    assert experiment.holds
    assert [t.title for t in experiment.tables if t.title.startswith("FSDP1") and "14 elements, 14 with padding, 7 a rank" in t.note]


def test_the_tutorial_shows_every_step():
    titles = [moment.title for moment in run(Arguments(example="tutorial", version="1")).moments]
    life = [title.removeprefix("FSDP1, a unit for each layer: ") for title in titles if title.startswith("FSDP1, a unit")]
    assert [title for title in life if "layer 1" in title and (": layer" not in title or "freed" in title)] == [
        "forward: all-gather of layer 1",
        "forward: layer 1 freed",
        "backward: all-gather of layer 1",
        "backward: flat gradient of layer 1",
        "backward: layer 1 freed",
        "backward: reduce-scatter of layer 1",
    ]
    assert titles[: -len(life)] == [
        "after init",
        "batch",
        "forward: all-gather of model",
        "forward: layer 1",
        "forward: layer 2",
        "loss",
        "backward: layer 2",
        "backward: layer 1",
        "backward: flat gradient of model",
        "backward: model freed",
        "backward: reduce-scatter of model",
        "optimizer: Adam on the shards",
        "between steps",
    ]


@pytest.mark.parametrize("version", ["1", "2"])
def test_the_tutorial_shows_the_life_cycle_of_two_units(version):
    """Each is gathered, computes, is freed, gathered again, computes gradients, is freed and reduced; the other comes in between."""
    frame = table(run(Arguments(example="tutorial", version=version)), f"FSDP{version}: life cycle of the units")
    main = frame[frame["event"].str.startswith(("all-gather", "computes", "reshard", "reduce-scatter"))]
    cycle = ["all-gather", "computes", "reshard", "all-gather again", "computes gradients", "reshard", "reduce-scatter"]
    for unit in ("layer 1", "layer 2"):
        assert [event.split(":")[0].split(" of")[0] for event in main[main["unit"] == unit]["event"]] == cycle
    assert set(frame[frame["event"] == "computes"]["gathered"]) == {"layer 1", "layer 2"}
    assert frame["gathered"].iloc[-1] == "none"


def calls(version, **arguments):
    """(all_gather or reduce_scatter, elements of its full tensor) in order, with prefetch as torch has it."""
    experiment = run(Arguments(version=version, layers=FOUR, prefetch="yes", **arguments))
    assert experiment.holds
    return [("AG" if call.kind == "all_gather" else "RS", call.full_bytes // 4) for call in experiment.calls]


def gathers(*sizes):
    return [("AG", size) for size in sizes]


def scatters(*sizes):
    return [("RS", size) for size in sizes]


@pytest.mark.parametrize(
    ("version", "world", "use_orig_params", "sizes"),
    [
        ("2", 2, "no", (24, 30, 56, 32)),
        ("2", 5, "no", (30, 50, 70, 40)),
        ("1", 2, "no", (24, 30, 50, 24)),
        ("1", 2, "yes", (24, 30, 52, 28)),
        ("1", 5, "no", (25, 30, 50, 25)),
        ("1", 5, "yes", (25, 30, 55, 30)),
    ],
)
def test_a_unit_for_each_layer_makes_the_calls_that_torch_makes(version, world, use_orig_params, sizes):
    """Order and elements as torch 2.13 shows them on gloo, fully_shard and FullyShardedDataParallel."""
    a, b, c, d = sizes
    assert calls(version, world=world, use_orig_params=use_orig_params) == [
        *gathers(a, b, c, d),
        *gathers(d, c),
        *scatters(d),
        *gathers(b),
        *scatters(c),
        *gathers(a),
        *scatters(b, a),
    ]


@pytest.mark.parametrize(("version", "sizes"), [("2", (56, 30, 56)), ("1", (48, 30, 50))])
def test_the_root_with_first_and_last_layer_stays_gathered(version, sizes):
    root, second, third = sizes
    assert calls(version, world=2, units="blocks") == [
        *gathers(root, second, third, third, second),
        *scatters(third, second, root),
    ]


def test_the_root_is_gathered_again_where_everything_is_freed():
    """reshard_after_forward=True in torch; FullyShardedDataParallel keeps its root all the same."""
    expected = [*gathers(56, 30, 56, 56, 56, 30), *scatters(56, 30, 56)]
    assert calls("2", world=2, units="blocks", reshard_after_forward="yes") == expected
    assert calls("1", world=2, units="blocks", reshard_after_forward="yes") == calls("1", world=2, units="blocks")


@pytest.mark.parametrize("version", ["1", "2"])
def test_nothing_is_gathered_twice_where_nothing_is_freed(version):
    kinds = [kind for kind, _ in calls(version, world=2, reshard_after_forward="no")]
    assert kinds == ["AG"] * 4 + ["RS"] * 4


def test_one_unit_for_the_model_gathers_once():
    assert calls("2", world=2, units="model") == [("AG", 142), ("RS", 142)]
    assert calls("1", world=2, units="model") == [("AG", 128), ("RS", 128)]
    assert calls("1", world=2, units="model", use_orig_params="yes") == [("AG", 136), ("RS", 136)]


def test_calls_are_tagged_as_a_recording_is():
    first, last = (run(Arguments(version="2", layers=FOUR)).calls[i] for i in (0, -1))
    assert (first.axis, first.purpose, first.phase, first.label) == ("dp_shard", "parameter_gather", "forward", "layer 1")
    assert (last.axis, last.purpose, last.phase, last.label) == ("dp_shard", "gradient_scatter", "backward", "layer 1")


def test_bytes_of_every_moment_and_the_peak_add_up():
    experiment = run(Arguments())
    for version in ("FSDP1", "FSDP2"):
        moments = [moment for moment in experiment.moments if moment.title.startswith(version)]
        peaks = table(experiment, "Peak, and by what")
        (row,) = peaks[peaks["variant"] == version].to_dict("records")
        parts = {name: size for name, size in row.items() if name not in ("variant", "rank", "moment", "sum")}
        assert sum(parts.values()) == row["sum"]
        assert row["sum"] == max(moment.live_bytes(rank) for moment in moments for rank in range(4))
        live = table(experiment, f"{version}: bytes held by rank {row['rank']} at each moment")
        assert (live.drop(columns=["moment", "sum"]).sum(axis=1) == live["sum"]).all()
        assert len(live) == len(moments)


def test_a_rank_without_rows_stores_padding_and_no_adam_state():
    """3 rows on 4 ranks: the last rank has none, but stores one."""
    experiment = run(Arguments(version="2", layers="3x2", bias="no"))
    assert table(experiment, "What each rank keeps")[["shard", "bytes", "state_bytes"]].to_numpy().tolist() == [
        ["W1[0:1]", 8, 16],
        ["W1[1:2]", 8, 16],
        ["W1[2:3]", 8, 16],
        ["padding (2)", 8, 0],
    ]


def test_between_steps_is_what_was_after_init():
    for version in ("1", "2"):
        moments = run(Arguments(version=version)).moments
        assert [sorted(cell.label for cell in cells) for cells in moments[0].holds] == [
            sorted(cell.label for cell in cells) for cells in moments[-1].holds
        ]


def test_messages_of_the_moments_are_all_that_was_sent():
    experiment = run(Arguments(version="2"))
    sent = [sum(m.bytes for moment in experiment.moments for m in moment.messages if m.source == rank) for rank in range(4)]
    counted = [check.counted for check in experiment.checks if check.quantity == "FSDP2: bytes sent by rank 0"]
    assert sent == counted * 4


def test_half_as_wide_gathers_send_half():
    """q 2, r 4: F(W) n (2 + 2 + 4) against F(W) n (4 + 4 + 4)."""
    narrow, wide = (run(Arguments(version="2", gathered_bytes=size)) for size in (2, 4))
    sent = [next(c.counted for c in e.checks if c.quantity == "FSDP2: bytes sent by all ranks") for e in (narrow, wide)]
    assert sent[0] * 12 == sent[1] * 8
    assert narrow.holds and wide.holds


def test_keeping_everything_costs_memory_and_prefetch_does_too():
    def peak(**arguments):
        moments = run(Arguments(version="2", layers="8x8,8x8,8x8,8x8", **arguments)).moments
        return max(moment.live_bytes(0) for moment in moments)

    assert peak(prefetch="no") < peak(prefetch="yes") < peak(reshard_after_forward="no")


def test_replicas_all_reduce_what_each_has_scattered():
    """Hybrid sharding, 2 replicas of 2 ranks: 24 B of each shard's gradient are added up between ranks 0 and 2, 1 and 3."""
    experiment = run(Arguments(version="2", world=2, replicas=2, layers="4x3", bias="no"))
    assert [(call.kind, call.axis, call.full_bytes) for call in experiment.calls] == [
        ("all_gather", "dp_shard", 48),
        ("all_gather", "dp_shard", 48),
        ("reduce_scatter", "dp_shard", 48),
        ("all_reduce", "dp_replicate", 24),
    ]
    (between,) = [moment for moment in experiment.moments if moment.title == "backward: all-reduce of layer 1"]
    assert {(message.source, message.target) for message in between.messages} == {(0, 2), (2, 0), (1, 3), (3, 1)}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=5),
    st.builds(
        Arguments,
        world=st.integers(1, 8),
        replicas=st.integers(1, 3),
        bias=st.sampled_from(["yes", "no"]),
        units=st.sampled_from(["layer", "model", "blocks"]),
        use_orig_params=st.sampled_from(["yes", "no"]),
        reshard_after_forward=st.sampled_from(["default", "yes", "no"]),
        prefetch=st.sampled_from(["yes", "no"]),
        batch=st.integers(1, 3),
        steps=st.integers(1, 3),
        seed=st.integers(0, 99),
        stored_bytes=st.sampled_from([4, 8]),
        gathered_bytes=st.sampled_from([1, 2, 4]),
        reduced_bytes=st.sampled_from([2, 4]),
    ),
)
def test_every_check_holds_for_any_stack_and_world(widths, arguments):
    if arguments.units == "blocks" and len(widths) < 4:
        arguments = replace(arguments, units="layer")
    layers = ",".join(f"{outputs}x{inputs}" for inputs, outputs in pairwise(widths))
    experiment = run(replace(arguments, layers=layers))
    assert [check for check in experiment.checks if not check.holds] == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"world": 0}, "--world 0"),
        ({"world": 33}, "--world 33"),
        ({"replicas": 0}, "--replicas 0"),
        ({"world": 8, "replicas": 5}, "5 replicas of 8 ranks"),
        ({"batch": 0}, "--batch 0"),
        ({"steps": 0}, "--steps 0"),
        ({"seed": -1}, "--seed -1"),
        ({"layers": "2x3,4x4"}, "layer 1 has 2 outputs"),
        ({"units": "blocks", "layers": "2x3,2x2"}, "at least 3 layers"),
        ({"units": "block"}, "--units block"),
        ({"gathered_bytes": 3}, "--gathered-bytes 3"),
        ({"example": "tutorial", "world": 3}, "contradicts --example tutorial"),
        ({"world": 32, "layers": ",".join(["2x2"] * 6)}, "nobody can read"),
        ({"world": 32, "layers": "4096x4096"}, "elements on all ranks"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, problem):
    with pytest.raises(UsageError, match=problem):
        run(Arguments(**arguments))


def test_every_element_is_followed_through_the_step():
    frame = table(run(Arguments(example="tutorial")), "Every element through the step")
    assert frame["element"].tolist()[:8] == ["W1[0, 0]", "W1[0, 1]", "W1[0, 2]", "W1[1, 0]", "W1[1, 1]", "W1[1, 2]", "b1[0]", "b1[1]"]
    assert frame["FSDP1"].tolist() == [0] * 7 + [1] * 7
    assert frame["FSDP2"].tolist() == [0, 0, 0, 1, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1]
    assert frame["mean"].to_numpy() == pytest.approx((frame["rank 0"] + frame["rank 1"]).to_numpy() / 2, rel=1e-12)
    assert frame["mean"].to_numpy() == pytest.approx(frame["expected"].to_numpy(), rel=1e-12)
    assert frame["updated"].to_numpy() == pytest.approx(frame["reference"].to_numpy(), rel=1e-12)
    assert not (frame["rank 0"] == frame["rank 1"]).any()


#: Bytes that torch 2.13 holds on rank 0 of 4 in forward of linear layers 4-5-6-3 with tanh between, 2 samples, as its memory trackers
#: show them on CPU (FSDPMemTracker, MemTracker), without Adam's step counters of 4 bytes a parameter.
FORWARD = {
    "1": {
        "all-gather of layer 1": 432,
        "layer 1": 472,
        "layer 1 freed": 360,
        "all-gather of layer 2": 504,
        "layer 2": 552,
        "layer 2 freed": 408,
        "all-gather of layer 3": 504,
        "layer 3": 528,
        "layer 3 freed": 432,
    },
    "2": {
        "all-gather of layer 1": 564,
        "layer 1 copied out": 724,
        "layer 1": 764,
        "layer 1 freed": 604,
        "all-gather of layer 2": 796,
        "layer 2 copied out": 988,
        "layer 2": 876,
        "layer 2 freed": 684,
        "all-gather of layer 3": 796,
        "layer 3 copied out": 908,
        "layer 3": 740,
        "layer 3 freed": 628,
    },
}


@pytest.mark.parametrize("version", ["1", "2"])
def test_bytes_in_forward_are_those_of_torch(version):
    moments = run(Arguments(version=version)).moments
    found = {m.title.removeprefix("forward: "): m.live_bytes(0) for m in moments if m.title.startswith("forward: ")}
    assert found == FORWARD[version]


def test_the_peak_of_version_1_is_that_of_torch():
    """1012 B at the join of the second layer's gradients, less 12 of step counters and 56 that the training loop's names keep alive."""
    moments = run(Arguments(version="1")).moments
    most = max(moments, key=lambda moment: moment.live_bytes(0))
    assert (most.title, most.live_bytes(0)) == ("backward: flat gradient of layer 2", 1012 - 12 - 56)


@pytest.mark.parametrize(
    ("arguments", "unsharded", "gathering", "scattering"),
    [
        ({"world": 4}, 192, 352, 192),
        ({"world": 4, "reshard_after_forward": "no"}, 464, 352, 192),
        ({"world": 4, "units": "blocks", "layers": FOUR}, 448, 384, 224),
        ({"world": 5, "layers": FOUR}, 280, 480, 280),
        ({"world": 3, "units": "model", "layers": FOUR}, 612, 612, 612),
    ],
)
def test_most_bytes_of_each_buffer_are_those_of_torch(arguments, unsharded, gathering, scattering):
    """Unsharded parameters, all-gather outputs, reduce-scatter inputs: the most of each in a step of fully_shard (FSDPMemTracker)."""
    moments = run(Arguments(version="2", **arguments)).moments

    def most(fits):
        return max(sum(cell.bytes for cell in moment.holds[0] if fits(cell.label)) for moment in moments)

    assert most(lambda label: label.startswith("full ")) == unsharded
    assert most(lambda label: label.startswith("buffer ") and not label.startswith("buffer grad ")) == gathering
    assert most(lambda label: label.startswith("buffer grad ")) == scattering


def test_one_rank_sends_nothing_and_needs_no_gather_buffer():
    experiment = run(Arguments(version="2", world=1))
    assert experiment.holds and not experiment.calls
    assert not any(moment.messages for moment in experiment.moments)
    assert not any(cell.label.startswith("buffer W") for moment in experiment.moments for cell in moment.holds[0])
