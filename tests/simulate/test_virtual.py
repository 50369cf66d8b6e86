"""Virtual ranks: what arrives, and that bytes and steps counted by moving data are those of the closed forms."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.collectives.cost import ALGORITHMS, logical_steps, seconds
from tracekit.collectives.semantics import sent_bytes
from tracekit.simulate.collectives.closed_forms import sent_elements
from tracekit.simulate.experiment import Call, Message
from tracekit.simulate.schedules import schedule
from tracekit.simulate.virtual import Network, even_splits

SIZES = st.integers(1, 16)
PAIRS = [(kind, algorithm) for kind, algorithms in ALGORITHMS.items() if kind != "send" for algorithm in algorithms]


def _parts(sizes):
    return [np.arange(n, dtype=np.int64) + 100 * i for i, n in enumerate(sizes)]


def _moved(kind, algorithm, sizes, root):
    """(network, what everybody got, what everybody has to get) of one collective over all ranks; chunks of ``sizes`` elements."""
    x, total = len(sizes), sum(sizes)
    net, group = Network(x, element_bytes=4), list(range(x))
    parts, inputs = _parts(sizes), [np.arange(total, dtype=np.int64) * (i + 1) for i in range(x)]
    summed, joined, cuts = np.sum(inputs, axis=0), np.concatenate(parts), np.cumsum(sizes)[:-1]
    if kind == "all_gather":
        return net, net.all_gather(parts, group, algorithm), [joined] * x
    if kind == "reduce_scatter":
        return net, net.reduce_scatter(inputs, group, sizes), np.split(summed, cuts)
    if kind == "all_reduce":
        return net, net.all_reduce(inputs, group, algorithm), [summed] * x
    if kind == "broadcast":
        return net, net.broadcast(joined, group, root, algorithm), [joined] * x
    if kind == "reduce":
        return net, [net.reduce(inputs, group, root, algorithm)], [summed]
    if kind == "scatter":
        return net, net.scatter(parts, group, root, algorithm), parts
    if kind == "gather":
        return net, [net.gather(parts, group, root, algorithm)], [joined]
    pieces = [[piece + 1000 * i for piece in parts] for i in range(x)]
    got = net.all_to_all(pieces, group)
    return net, [a for row in got for a in row], [pieces[i][j] for j in range(x) for i in range(x)]


@pytest.mark.parametrize(("kind", "algorithm"), PAIRS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_counted_bytes_and_steps_are_the_closed_forms(kind, algorithm, data):
    x = data.draw(SIZES)
    total = data.draw(st.integers(0, 40))
    uneven = kind != "all_reduce" and data.draw(st.booleans())
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=x, max_size=x)) if uneven else even_splits(total, x)
    root = data.draw(st.integers(0, x - 1)) if kind in ("broadcast", "scatter", "gather", "reduce") else 0
    net, got, wanted = _moved(kind, algorithm, sizes, root)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    others = [sum(sizes) - own for own in sizes]
    expected = others if kind == "all_to_all" else sent_elements(kind, algorithm, sizes, root)
    assert net.sent_bytes.tolist() == [4 * n for n in expected]
    assert net.sent_bytes.sum() == net.received_bytes.sum() == sum(message.bytes for _, message in net.messages)
    assert net.steps == logical_steps(kind, algorithm, x)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "scatter", "gather"])
@settings(max_examples=25, deadline=None)
@given(x=SIZES, each=st.integers(0, 6))
def test_even_chunks_give_the_figure_of_the_semantics(kind, x, each):
    algorithm = "star" if kind in ("scatter", "gather") else ALGORITHMS[kind][0]
    net, _, _ = _moved(kind, algorithm, [each] * x, 0)
    assert net.sent_bytes.max() == sent_bytes(pd.Series([kind]), np.array([4 * each * x]), np.array([x]))[0]


@pytest.mark.parametrize(("kind", "algorithm"), PAIRS)
@settings(max_examples=20, deadline=None)
@given(x=SIZES, each=st.integers(1, 5))
def test_time_of_the_counted_messages_is_the_alpha_beta_time(kind, algorithm, x, each):
    net, _, _ = _moved(kind, algorithm, [each] * x, 0)
    largest = {}
    for step, message in net.messages:
        largest[step] = max(largest.get(step, 0), message.bytes)
    counted = sum(3e-6 + size * 2e-9 for size in largest.values())
    assert counted == pytest.approx(seconds(kind, algorithm, x, 4 * each * x, 3e-6, 2e-9), rel=1e-12, abs=1e-18)


@given(pair=st.sampled_from(PAIRS), x=st.integers(1, 300), size=st.integers(0, 2**40), more=st.integers(1, 2**20))
def test_time_grows_with_bytes_and_ranks(pair, x, size, more):
    time = seconds(*pair, x, size, 1e-6, 1e-10)
    assert time <= seconds(*pair, x, size + more, 1e-6, 1e-10)
    assert time <= seconds(*pair, x + 1, size, 1e-6, 1e-10) * (1 + 1e-12)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    both = sum(seconds(kind, "ring", 8, 1e9, 1e-5, 1e-11) for kind in ("reduce_scatter", "all_gather"))
    assert seconds("all_reduce", "ring", 8, 1e9, 1e-5, 1e-11) == pytest.approx(both)
    assert logical_steps("all_reduce", "ring", 8) == 14
    assert [logical_steps("broadcast", "tree", x) for x in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("wrong", [("scatter", "ring", 4), ("nonsense", "ring", 4), ("all_gather", "ring", 0)])
def test_costs_of_what_does_not_exist_are_refused(wrong):
    with pytest.raises(ValueError, match=r"no algorithm|a group of"):
        seconds(*wrong, 100, 1e-6, 1e-9)
    with pytest.raises(ValueError, match="negative"):
        seconds("send", "direct", 2, -1, 1e-6, 1e-9)


def test_ring_chunks_start_behind_their_owner_and_end_at_it():
    rounds = schedule("reduce_scatter", "ring", 4)
    way = {c: [(t.source, t.target) for r in rounds for t in r if t.keys == ((c,),)] for c in range(4)}
    assert way[0] == [(1, 2), (2, 3), (3, 0)]
    for chunk, hops in way.items():
        assert hops[0][0] == (chunk + 1) % 4
        assert hops[-1][1] == chunk


def test_nobody_sends_or_receives_twice_in_a_step_of_a_ring_or_pairwise_exchange():
    for kind, algorithm in (("all_gather", "ring"), ("all_reduce", "ring"), ("all_to_all", "pairwise")):
        for transfers in schedule(kind, algorithm, 7):
            assert len({t.source for t in transfers}) == len({t.target for t in transfers}) == len(transfers) == 7


def test_groups_that_share_no_rank_go_side_by_side():
    net = Network(4, element_bytes=1)
    for group in ([0, 1], [2, 3]):
        net.all_reduce([np.ones(2)] * 2, group)
    assert net.steps == 2
    net.all_reduce([np.ones(4)] * 4, range(4))
    assert net.steps == 2 + 6
    net.send(0, 1, np.ones(1))
    assert (net.steps_of(0), net.steps_of(3)) == (9, 8)


def test_one_step_may_hold_many_messages():
    net = Network(3)
    with net.step():
        got = [net.send(i, (i + 1) % 3, np.full(2, i, np.int16), f"block {i}") for i in range(3)]
    assert net.steps == 1
    assert [a.tolist() for a in got] == [[0, 0], [1, 1], [2, 2]]
    assert net.messages[2] == (0, Message(2, 0, "block 2", 4))


def test_calls_are_what_a_recording_shows():
    net = Network(4, element_bytes=2)
    shards = _parts([3, 2, 2, 1])
    net.all_gather(shards, [0, 1, 2, 3], axis="dp_shard", purpose="parameter_gather", phase="forward", label="layer 0")
    net.all_reduce([np.ones(4)] * 2, [2, 3])  # without an axis it is no call
    net.all_reduce([np.ones(4)], [2], axis="tp")  # nor in a group of one
    net.send(2, 3, np.ones(5), "activation", axis="pp", purpose="pipeline", phase="forward")
    gather = Call("all_gather", "dp_shard", "parameter_gather", 16, "forward", "layer 0")
    assert net.calls(2) == [gather, Call("send", "pp", "pipeline", 10, "forward", "activation")]
    assert net.calls(3) == [gather, Call("recv", "pp", "pipeline", 10, "forward", "activation")]
    assert net.messages[0][1].label == "layer 0: c0"


def test_no_two_ranks_share_memory():
    net = Network(3)
    mine = np.zeros(3)
    results = [
        *net.broadcast(mine, [0, 1, 2], 0),
        *net.all_gather([mine] * 3, [0, 1, 2]),
        *net.all_reduce([mine] * 3, [0, 1, 2]),
        net.send(1, 1, mine),
    ]
    for number, array in enumerate(results):
        array += number + 1
    assert mine.tolist() == [0, 0, 0]
    assert len({tuple(a.tolist()) for a in results}) == len(results)


def test_arrays_of_several_dimensions_are_joined_and_cut_along_one():
    net = Network(2)
    a, b = np.arange(6.0).reshape(2, 3), np.arange(4.0).reshape(2, 2)
    assert net.all_gather([a, b], [0, 1], dim=1)[0].shape == (2, 5)
    first, second = net.reduce_scatter([a, a], [0, 1], dim=1)
    np.testing.assert_array_equal(first, 2 * a[:, :2])
    np.testing.assert_array_equal(second, 2 * a[:, 2:])
    assert net.all_reduce([a, a], [0, 1])[1].shape == (2, 3)


def test_a_group_of_one_sends_nothing_and_copies():
    net = Network(5)
    part = np.arange(4)
    assert net.all_gather([part], [3])[0].tolist() == [0, 1, 2, 3]
    assert net.reduce_scatter([part], [3])[0].tolist() == [0, 1, 2, 3]
    assert (net.steps, net.messages, int(net.sent_bytes.sum())) == (0, [], 0)


def test_element_bytes_can_differ_call_by_call():
    net = Network(2, element_bytes=2)
    net.all_gather([np.ones(3), np.ones(3)], [0, 1])
    net.reduce_scatter([np.ones(6), np.ones(6)], [0, 1], element_bytes=4)
    assert net.sent_bytes.tolist() == [6 + 12, 6 + 12]
    plain = Network(2)
    plain.send(0, 1, np.ones(3, np.float32))
    assert plain.sent_bytes.tolist() == [12, 0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda net: net.send(0, 4, np.ones(1)), "rank 4 does not exist among 4"),
        (lambda net: net.all_gather([np.ones(1)], [0, 1]), "1 inputs for a group of 2"),
        (lambda net: net.all_gather([], []), "no process group"),
        (lambda net: net.all_reduce([np.ones(1)] * 2, [1, 1]), "names a rank twice"),
        (lambda net: net.broadcast(np.ones(1), [0, 1], 2), "root 2 is not in the group"),
        (lambda net: net.reduce_scatter([np.ones(4)] * 2, [0, 1], [3, 2]), "do not cut 4 elements into 2"),
        (lambda net: net.all_to_all([[np.ones(1)]] * 2, [0, 1]), "one piece for each member"),
        (lambda net: net.all_gather([np.ones(1)] * 2, [0, 1], "tree"), "no algorithm tree for all_gather"),
        (lambda net: Network(0), "a network of 0 ranks"),
    ],
)
def test_what_makes_no_sense_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(Network(4))


@given(length=st.integers(0, 1000), pieces=st.integers(1, 64))
def test_even_splits_differ_by_one_at_most(length, pieces):
    sizes = even_splits(length, pieces)
    assert sum(sizes) == length
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) == math.ceil(length / pieces)
    assert min(sizes) == length // pieces
