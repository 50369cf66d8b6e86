"""Context parallel: attention by hand against a plain softmax and finite differences, four algorithms against one rank."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.errors import UsageError
from tracekit.simulate import context_parallel
from tracekit.simulate.attention import attend, attend_backward, attend_block, causal_mask, delta_of, finish, merge, nothing_seen
from tracekit.simulate.context_parallel import Arguments
from tracekit.simulate.context_parallel.algorithms import ALGORITHMS
from tracekit.simulate.context_parallel.problem import token_places
from tracekit.simulate.functions import softmax


def _tensors(s=6, b=2, a=4, g=2, d=3, seed=0):
    draw = np.random.default_rng(seed).standard_normal
    return draw((s, b, a, d)), draw((s, b, g, d)), draw((s, b, g, d)), draw((s, b, a, d))


def _causal(s):
    return causal_mask(np.arange(s), np.arange(s))


def test_attention_is_softmax_of_scores_times_values():
    q, k, v, _ = _tensors(b=1, a=2, g=1)
    out, _ = attend(q, k, v, _causal(6))
    for head in range(2):
        scores = q[:, 0, head] @ k[:, 0, 0].T / np.sqrt(3)
        scores[~_causal(6)] = -np.inf
        assert np.allclose(out[:, 0, head], softmax(scores) @ v[:, 0, 0], atol=1e-14)


@pytest.mark.parametrize("mask", [None, _causal(6)])
def test_backward_has_the_derivatives_of_finite_differences(mask):
    q, k, v, dout = _tensors()
    out, lse = attend(q, k, v, mask)
    gradients = attend_backward(q, k, v, lse, delta_of(out, dout), dout, mask)
    draw = np.random.default_rng(1).standard_normal
    for tensor, gradient in zip((q, k, v), gradients, strict=True):
        direction, original = draw(tensor.shape), tensor.copy()
        values = []
        for width in (1e-5, -1e-5):
            tensor[...] = original + width * direction
            values.append(float((attend(q, k, v, mask)[0] * dout).sum()))
        tensor[...] = original
        assert (values[0] - values[1]) / 2e-5 == pytest.approx(float((gradient * direction).sum()), rel=1e-7, abs=1e-8)


@given(cuts=st.lists(st.integers(0, 6), max_size=4), order=st.randoms(), scale=st.sampled_from([1.0, 300.0]))
def test_blocks_of_keys_merge_in_any_order_into_the_whole(cuts, order, scale):
    q, k, v, _ = _tensors()
    q = q * scale  # large scores: exp would overflow without the running maximum
    blocks = np.split(np.arange(6), sorted(cuts))
    order.shuffle(blocks)
    partial = nothing_seen(q)
    for keys in blocks:
        partial = merge(partial, attend_block(q, k[keys], v[keys], causal_mask(np.arange(6), keys)))
    for found, wanted in zip(finish(partial), attend(q, k, v, _causal(6)), strict=True):
        assert np.allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_places_of_tokens():
    assert [mine.tolist() for mine in token_places("contiguous", 8, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [mine.tolist() for mine in token_places("zigzag", 8, 2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]


@st.composite
def sizes(draw):
    c = draw(st.integers(1, 5))
    kv_heads = draw(st.integers(1, 4))
    heads = kv_heads * draw(st.sampled_from([1, 2, c]))
    return Arguments(
        algorithm=draw(st.sampled_from([name for name in ALGORITHMS if name != "ulysses" or heads % c == 0])),
        cp=c,
        causal=draw(st.booleans()),
        keep_gathered=draw(st.booleans()),
        sequence=c * draw(st.integers(1, 4)),
        batch=draw(st.integers(1, 2)),
        heads=heads,
        kv_heads=kv_heads,
        head_size=draw(st.integers(1, 4)),
        element_bytes=draw(st.sampled_from([1, 2, 4])),
        seed=draw(st.integers(0, 99)),
    )


@given(arguments=sizes())
@settings(max_examples=40, deadline=None)
def test_any_sizes_give_the_attention_of_one_rank_and_the_figures_of_the_formulas(arguments):
    done = context_parallel.run(arguments)
    assert done.holds, [check for check in done.checks if not check.holds]


def test_the_ring_of_four_ranks():
    done = context_parallel.run(Arguments())
    block = 2 * 4 * 4 * 8 * 2  # k and v of 4 tokens, 4 heads of 8 elements, 2 bytes
    first = done.moments[1]
    assert [(m.source, m.target, m.label, m.bytes) for m in first.messages] == [
        (r, (r + 1) % 4, f"k, v of rank {r}", block) for r in range(4)
    ]
    assert [m.label for m in done.moments[-2].messages] == [f"dk, dv of rank {(r + 1) % 4}" for r in range(4)]
    assert [len(moment.messages) for moment in done.moments] == [0, 4, 4, 4, 0, 0, 4, 8, 8, 4, 0]
    table = done.tables[0].frame.set_index("algorithm")
    assert table["forward"].to_dict() == {"all_gather": 1536, "ring": 3 * block, "blockwise": 1824, "ulysses": 768}
    assert table["backward"].to_dict() == {"all_gather": 3072, "ring": 6 * block, "blockwise": 2496, "ulysses": 768}
    assert [call.kind for call in done.calls] == ["send", "recv"] * 9
    assert {(call.axis, call.purpose) for call in done.calls} == {("cp", "context_parallel")}


def test_causal_load_is_even_in_zigzag_only():
    load = context_parallel.run(Arguments()).tables[1].frame
    assert load[load["layout"] == "contiguous"]["scores"].tolist() == [40, 104, 168, 232]
    assert load[load["layout"] == "zigzag"]["scores"].tolist() == [136] * 4
    assert load["tokens"].tolist() == ["0:4", "4:8", "8:12", "12:16", "0:2, 14:16", "2:4, 12:14", "4:6, 10:12", "6:10"]


def test_rounds_of_the_ring_wait_for_the_busiest_rank():
    contiguous, zigzag = (context_parallel.run(Arguments(layout=layout)).tables[2].frame for layout in ("contiguous", "zigzag"))
    assert contiguous["most"].tolist() == [40, 64, 64, 64]
    assert zigzag["most"].tolist() == [40, 32, 32, 32]
    assert zigzag["least"].tolist() == zigzag["most"].tolist()


def test_calls_of_the_other_algorithms():
    kinds = {name: [(c.kind, c.phase) for c in context_parallel.run(Arguments(algorithm=name)).calls] for name in ALGORITHMS}
    assert kinds["all_gather"] == [("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward")]
    assert kinds["blockwise"] == [
        ("all_gather", "forward"), ("all_reduce", "forward"), ("reduce_scatter", "forward"),
        ("all_gather", "backward"), ("all_gather", "backward"), ("reduce_scatter", "backward"),
    ]  # fmt: skip
    assert kinds["ulysses"] == [("all_to_all", "forward")] * 4 + [("all_to_all", "backward")] * 4


def test_gathered_keys_that_are_kept_need_no_second_all_gather():
    done = context_parallel.run(Arguments(algorithm="all_gather", keep_gathered=True))
    assert [call.kind for call in done.calls] == ["all_gather", "reduce_scatter"]
    assert any(cell.label == "k and v of all" for cell in done.moments[2].holds[0])


def test_what_does_not_fit_is_left_out_and_named():
    done = context_parallel.run(Arguments(cp=3, sequence=9))
    assert done.tables[0].frame["algorithm"].tolist() == ["all_gather", "ring", "blockwise"]
    assert [note.partition(" ")[0] for note in done.notes if "left out" in note] == ["zigzag", "ulysses"]


def test_a_wrong_gradient_is_found(monkeypatch):
    right = context_parallel.one_rank
    monkeypatch.setattr(context_parallel, "one_rank", lambda problem: right(problem)._replace(dk=right(problem).dk + 1e-9))
    done = context_parallel.run(Arguments())
    assert {check.quantity.rpartition(" ")[2] for check in done.checks if not check.holds} == {"dk"}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"sequence": 10}, "10 tokens do not divide by 4 ranks"),
        ({"layout": "zigzag", "sequence": 12}, "12 tokens into 8 parts"),
        ({"algorithm": "ulysses", "heads": 6}, "6 heads do not divide by 4"),
        ({"kv_heads": 3}, "3 heads of keys and values do not divide 4 heads"),
        ({"cp": 0}, "cp 0"),
        ({"head_size": -2}, "--head-size -2"),
        ({"seed": -1}, "--seed -1"),
        ({"algorithm": "star"}, "--algorithm star"),
        ({"layout": "striped"}, "--layout striped"),
        ({"sequence": 1 << 20}, "scores"),
        ({"head_size": 1 << 20}, "elements of one array"),
        ({"sequence": 256, "head_size": 512}, "multiplications"),
        ({"element_bytes": 10**12}, "bytes"),
    ],
)
def test_bad_arguments_are_refused_with_the_reason(arguments, reason):
    with pytest.raises(UsageError, match=reason):
        context_parallel.run(Arguments(**arguments))
