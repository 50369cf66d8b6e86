"""FLOP by shape, and how far from the device's limit."""

import pytest

from tests.analyses.made import Trace, job_of
from tracekit.analyses import roofline
from tracekit.estimate.operator_flops import COUNTED, cost

BF16 = "c10::BFloat16"


def shaped(trace, name, start, dur, dims, types, concrete=None):
    trace.operator(name, start, dur, **{"Input Dims": dims, "Input type": types, "Concrete Inputs": concrete or [""] * len(dims)})


def mm_trace():
    trace = Trace(device="NVIDIA H100 80GB HBM3")
    for call in range(2):
        at = 1000 * call
        shaped(trace, "aten::mm", at, 100, [[4096, 4096], [4096, 4096]], [BF16, BF16])
        trace.launch(7 + call, at + 20)
        trace.kernel("gemm", at + 200, 400, correlation=7 + call)
    trace.operator("aten::relu", 3000, 20)
    trace.launch(20, 3005)
    trace.kernel("relu", 3010, 200, correlation=20)
    return trace


def test_a_matrix_product_beside_the_peak_of_its_device():
    found = roofline.analyze(job_of(mm_trace())).json()
    (row,) = found["operator_shapes"]
    flop = 2 * 4096**3
    assert (row["operator"], row["shapes"], row["dtype"], row["calls"]) == ("aten::mm", "[4096, 4096] x [4096, 4096]", "bfloat16", 2)
    assert row["flop"] == flop
    assert row["device_us"] == 800.0
    assert row["tflop_s"] == pytest.approx(flop / 400e-6 / 1e12)
    assert row["share_of_peak"] == pytest.approx(flop / 400e-6 / 989e12)
    assert row["intensity_flop_byte"] == pytest.approx(flop / (3 * 4096**2 * 2))
    assert row["bound"] == "compute"
    assert found["counted_flops"]["share_of_compute"] == pytest.approx(0.8)


def test_a_product_of_a_vector_is_bound_by_memory():
    trace = Trace(device="NVIDIA H100 80GB HBM3")
    shaped(trace, "aten::addmm", 0, 100, [[4096], [1, 4096], [4096, 4096], [], []], [BF16, BF16, BF16, "Scalar", "Scalar"])
    trace.launch(7, 20)
    trace.kernel("gemv", 200, 20, correlation=7)
    (row,) = roofline.analyze(job_of(trace)).json()["operator_shapes"]
    moved = 2 * (4096 + 4096**2 + 4096)
    assert row["bound"] == "memory"
    assert row["share_of_limit"] == pytest.approx(moved / 3350e9 / 20e-6)


def test_without_sizes_or_a_known_device_nothing_is_made_up():
    trace = Trace(device="Unheard of")
    trace.operator("aten::mm", 0, 100)
    trace.launch(7, 20)
    trace.kernel("gemm", 200, 20, correlation=7)
    found = roofline.analyze(job_of(trace)).json()
    (row,) = found["operator_shapes"]
    assert [row[key] for key in ("flop", "tflop_s", "share_of_peak", "bound", "share_of_limit")] == [None] * 5
    assert found["counted_flops"] is None
    assert "record_shapes" in found["not_measured"]["counted_flops"]


def test_a_counted_operator_within_a_counted_one_counts_once():
    trace = Trace()
    shapes = [[2, 8, 128, 64]] * 3
    shaped(trace, "aten::_scaled_dot_product_flash_attention", 0, 100, shapes, [BF16] * 3)
    shaped(trace, "aten::_flash_attention_forward", 10, 50, [[2, 128, 8, 64]] * 3, [BF16] * 3)
    trace.launch(7, 20)
    trace.kernel("flash", 200, 20, correlation=7)
    (row,) = roofline.analyze(job_of(trace)).json()["operator_shapes"]
    assert row["operator"] == "aten::_scaled_dot_product_flash_attention"
    assert row["flop"] == 4 * 2 * 8 * 128 * 128 * 64
    assert row["device_us"] == 20.0


CONVOLUTION = ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]


@pytest.mark.parametrize(
    ("name", "shapes", "concrete"),
    [
        ("aten::mm", [[3, 5], [5, 7]], []),
        ("aten::addmm", [[7], [3, 5], [5, 7]], []),
        ("aten::bmm", [[2, 3, 5], [2, 5, 7]], []),
        ("aten::baddbmm", [[2, 3, 7], [2, 3, 5], [2, 5, 7]], []),
        ("aten::convolution", [[2, 6, 17, 15], [8, 6, 3, 3], [8]], CONVOLUTION),
        ("aten::convolution", [[2, 6, 17, 15], [8, 3, 3, 3], [8]], [*CONVOLUTION[:8], "2"]),
        ("aten::convolution", [[2, 6, 9, 8], [6, 4, 3, 3], None], [*CONVOLUTION[:6], "True", "[1, 1]", "1"]),
    ],
)
def test_flop_are_those_of_torch(name, shapes, concrete):
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    tensors = [None if shape is None else torch.ones(shape, device="meta") for shape in shapes]
    arguments = [eval(text) for text in concrete[3:]] if concrete else []
    with FlopCounterMode(display=False) as counter:
        getattr(torch.ops.aten, name.removeprefix("aten::"))(*tensors, *arguments)
    assert cost(name, shapes, concrete).flop == counter.get_total_flops()


def test_gradients_of_a_convolution_are_those_of_torch():
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    x, w = torch.ones(2, 6, 17, 15, device="meta"), torch.ones(8, 6, 3, 3, device="meta")
    gradient = torch.ones(2, 8, 9, 8, device="meta")
    for mask in ([True, True, False], [False, True, True]):
        with FlopCounterMode(display=False) as counter:
            torch.ops.aten.convolution_backward(gradient, x, w, [8], [2, 2], [1, 1], [1, 1], False, [0, 0], 1, mask)
        concrete = ["", "", "", "[8]", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", str(mask)]
        found = cost("aten::convolution_backward", [list(t.shape) for t in (gradient, x, w)], concrete)
        assert found.flop == counter.get_total_flops()


def test_attention_forward_and_backward_are_those_of_torch():
    pytest.importorskip("torch")
    from torch.utils.flop_counter import sdpa_backward_flop, sdpa_flop

    q, k, v = [2, 8, 64, 32], [2, 8, 96, 32], [2, 8, 96, 48]
    out = [2, 8, 64, 48]
    forward = cost("aten::_scaled_dot_product_efficient_attention", [q, k, v])
    backward = cost("aten::_scaled_dot_product_efficient_attention_backward", [out, q, k, v])
    assert forward.flop == sdpa_flop(q, k, v)
    assert backward.flop == sdpa_backward_flop(out, q, k, v)


@pytest.mark.parametrize("name", sorted(COUNTED))
@pytest.mark.parametrize("shapes", [[], [None], [[]], [[0]], [[1, 2, 3, 4, 5]] * 3, [[2, 3], [4, 5], [6, 7]], [[2]] * 4, [None] * 12])
def test_odd_sizes_are_unknown(name, shapes):
    assert cost(name, shapes, ["nonsense"] * 12) is None
    assert cost(name, shapes, []) is None
