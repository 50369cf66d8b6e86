"""Tensor and sequence parallel: the reference against finite differences, the shards against the reference, bytes against formulas."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.errors import UsageError
from tracekit.simulate import tensor_parallel
from tracekit.simulate.functions import gelu, gelu_backward, softmax, softmax_backward
from tracekit.simulate.tensor_parallel import Arguments
from tracekit.simulate.tensor_parallel.layers import Block, Norm, block_step, layer_step


def _slope(function, array, direction, width=1e-5):
    """Derivative of the scalar ``function()`` while ``array`` moves along ``direction``, by central differences."""
    original = array.copy()
    array[...] = original + width * direction
    above = function()
    array[...] = original - width * direction
    below = function()
    array[...] = original
    return (above - below) / (2 * width)


def _layer(heads, kv_heads, causal):
    draw = np.random.default_rng(7).standard_normal
    h, qkv = 8, 8 + 2 * kv_heads * (8 // heads)
    attention = Block("attention", draw((h, qkv)), draw(qkv), draw((h, h)), draw(h), heads, kv_heads, causal)
    mlp = Block("mlp", draw((h, 12)), draw(12), draw((12, h)), draw(h))
    norms = (Norm(1 + 0.1 * draw(h), draw(h)), Norm(1 + 0.1 * draw(h), draw(h)))
    return attention, mlp, norms, draw((5, 2, h)), draw((5, 2, h))


@pytest.mark.parametrize(("heads", "kv_heads", "causal"), [(2, 2, True), (4, 2, False), (4, 1, True)])
def test_the_reference_has_the_derivatives_of_finite_differences(heads, kv_heads, causal):
    attention, mlp, norms, x, dy = _layer(heads, kv_heads, causal)
    _, dx, gradients = layer_step(attention, mlp, norms, x, dy)
    weights = {f"{b.name}.{part}": getattr(b, part) for b in (attention, mlp) for part in ("column", "column_bias", "row", "row_bias")}
    weights |= {f"norm{i + 1}.{part}": getattr(norms[i], part) for i in (0, 1) for part in ("gamma", "beta")}
    assert weights.keys() == gradients.keys()
    draw = np.random.default_rng(8).standard_normal
    for array, gradient in [(x, dx), *((weights[name], gradients[name]) for name in weights)]:
        direction = draw(array.shape)
        slope = _slope(lambda: float((layer_step(attention, mlp, norms, x, dy)[0] * dy).sum()), array, direction)
        assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-6, abs=1e-6)


def test_gelu_and_softmax_by_hand():
    x = np.array([-3.0, -1.0, 0.0, 0.5, 2.0])
    # erf form, 0.5 x (1 + erf(x / sqrt 2)): the tanh form is within 5e-4 of it
    assert np.allclose(gelu(x), [-0.00405, -0.15866, 0.0, 0.34573, 1.95450], atol=5e-4)
    assert np.allclose(gelu_backward(x, np.ones(5)), (gelu(x + 1e-6) - gelu(x - 1e-6)) / 2e-6, atol=1e-8)
    p = softmax(np.array([[0.0, np.log(3.0)]]))
    assert np.allclose(p, [[0.25, 0.75]])
    assert np.allclose(softmax_backward(p, np.array([[1.0, 0.0]])), [[0.1875, -0.1875]])  # p0 (1 - p0), -p0 p1


@st.composite
def sizes(draw):
    t = draw(st.sampled_from([1, 2, 3, 4]))
    kv_heads = t * draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    return Arguments(
        tp=t,
        sequence=t * draw(st.integers(1, 3)),
        batch=draw(st.integers(1, 3)),
        hidden=heads * draw(st.integers(1, 4)),
        heads=heads,
        kv_heads=kv_heads,
        ffn=t * draw(st.integers(1, 5)),
        causal=draw(st.booleans()),
        library=draw(st.sampled_from(tensor_parallel.LIBRARIES)),
        element_bytes=draw(st.sampled_from([1, 2, 4])),
        seed=draw(st.integers(0, 99)),
    )


@given(arguments=sizes())
@settings(max_examples=30, deadline=None)
def test_any_sizes_give_the_result_of_one_rank_and_the_bytes_of_the_formulas(arguments):
    done = tensor_parallel.run(arguments)
    assert done.holds, [check for check in done.checks if not check.holds]


def test_which_collectives_sequence_parallel_puts_where():
    done = tensor_parallel.run(Arguments(part="mlp", sequence_parallel=True, library="megatron"))
    table = done.tables[0].frame.set_index("place")
    assert table[["tensor_parallel", "sequence_parallel"]].to_dict("index") == {
        "mlp: input of the column linear": {"tensor_parallel": "nothing", "sequence_parallel": "all_gather"},
        "mlp: output of the row linear": {"tensor_parallel": "all_reduce", "sequence_parallel": "reduce_scatter"},
        "mlp: gradient of the row linear's output": {"tensor_parallel": "nothing", "sequence_parallel": "all_gather"},
        "mlp: input of the column linear, again": {"tensor_parallel": "nothing", "sequence_parallel": "all_gather"},
        "mlp: gradient of the column linear's input": {"tensor_parallel": "all_reduce", "sequence_parallel": "reduce_scatter"},
        "gradients of norms and row biases": {"tensor_parallel": "nothing", "sequence_parallel": "all_reduce"},
    }


def test_a_layer_has_two_all_reduces_each_way():
    done = tensor_parallel.run(Arguments(tp=4, sequence=8, batch=2, hidden=16))
    full = 8 * 2 * 16 * 2
    assert [(call.kind, call.phase, call.full_bytes) for call in done.calls] == [("all_reduce", "forward", full)] * 2 + [
        ("all_reduce", "backward", full)
    ] * 2
    assert {(call.axis, call.purpose) for call in done.calls} == {("tp", "tensor_parallel")}
    sent = done.tables[1].frame.set_index(["part", "mode"])["sent"]
    assert sent["layer", "tensor_parallel"] == 4 * 2 * full * 3 // 4
    assert sent["layer", "sequence_parallel"] == 8 * full * 3 // 4 + 2 * 6 * 16 * 2 * 3 // 4


def test_moments_of_the_mlp():
    done = tensor_parallel.run(Arguments(tp=2, part="mlp"))
    assert [(moment.title, len(moment.messages)) for moment in done.moments] == [
        ("mlp: local work", 0),
        ("mlp: sum over ranks", 4),
        ("mlp: backward of the row linear", 0),
        ("mlp: backward of the column linear", 4),
    ]
    weights = {cell.label: cell.bytes for cell in done.moments[0].holds[1] if cell.kind == "parameter"}
    assert weights == {"mlp.column[:, 32:64]": 1024, "mlp.column_bias[32:64]": 64, "mlp.row[32:64]": 1024, "mlp.row_bias": 32}


def test_sequence_parallel_keeps_a_share_of_the_tokens():
    plain, shared = (
        next(cell.bytes for cell in done.moments[-1].holds[0] if cell.label == "mlp dx")
        for done in (tensor_parallel.run(Arguments(tp=4, part="mlp", sequence_parallel=way)) for way in (False, True))
    )
    assert plain == 4 * shared


@pytest.mark.parametrize(("library", "gathers", "sums"), [("dtensor", 4, 6), ("megatron", 6, 1)])
def test_what_the_libraries_gather_again_and_sum_together(library, gathers, sums):
    """One all-gather a block more; gradients of two gamma, two beta and two row biases in one buffer."""
    calls = tensor_parallel.run(Arguments(sequence_parallel=True, library=library)).calls
    found = Counter((call.kind, call.purpose) for call in calls)
    assert found == {
        ("all_gather", "sequence_parallel"): gathers,
        ("reduce_scatter", "sequence_parallel"): 4,
        ("all_reduce", "gradient_sync"): sums,
    }


def test_an_error_in_one_rank_is_found(monkeypatch):
    monkeypatch.setattr(tensor_parallel, "block_step", lambda block, x, dy: tuple(_shifted(block_step(block, x, dy))))
    done = tensor_parallel.run(Arguments())
    assert {check.quantity for check in done.checks if not check.holds} == {
        f"{mode}, {part}: largest error of dX" for mode in tensor_parallel.MODES for part in ("mlp", "attention")
    }


def _shifted(step):
    y, dx, gradients = step
    return y, dx + 1e-9, gradients


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"tp": 3}, "tp 3 does not divide the 4 heads"),
        ({"tp": 4, "kv_heads": 2}, "tp 4 does not divide the 2 heads of keys and values"),
        ({"tp": 2, "sequence": 7}, "7 tokens"),
        ({"tp": 2, "ffn": 7}, "7 hidden units"),
        ({"hidden": 18}, "4 heads do not divide the hidden size 18"),
        ({"kv_heads": 3}, "3 heads of keys and values do not divide 4 heads"),
        ({"tp": 0}, "tp 0"),
        ({"batch": -1}, "batch -1"),
        ({"seed": -1}, "--seed -1"),
        ({"part": "router"}, "--part router"),
        ({"library": "jax"}, "--library jax"),
        ({"hidden": 1 << 20}, "elements of one array"),
        ({"sequence": 1 << 14}, "elements of one array"),
        ({"hidden": 1024, "sequence": 256}, "multiplications"),
        ({"element_bytes": 17}, "--element-bytes 17"),
    ],
)
def test_bad_arguments_are_refused_with_the_reason(arguments, reason):
    with pytest.raises(UsageError, match=reason):
        tensor_parallel.run(Arguments(**arguments))
