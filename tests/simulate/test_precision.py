"""Number formats: range, rounding, and sums that round on the way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.errors import UsageError
from tracekit.simulate.precision import Arguments, ring_sum, run
from tracekit.simulate.precision.formats import BY_NAME, nearest_by_search

_FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=64)


def _table(experiment, title):
    return next(table.frame for table in experiment.tables if table.title == title)


@pytest.mark.parametrize(
    ("name", "size", "largest", "least_normal", "least", "epsilon"),
    [
        ("fp32", 4, 3.4028234663852886e38, 2.0**-126, 2.0**-149, 2.0**-23),
        ("tf32", 4, (2 - 2.0**-10) * 2.0**127, 2.0**-126, 2.0**-136, 2.0**-10),
        ("fp16", 2, 65504.0, 2.0**-14, 2.0**-24, 2.0**-10),
        ("bf16", 2, 3.3895313892515355e38, 2.0**-126, 2.0**-133, 2.0**-7),
        ("fp8 e4m3", 1, 448.0, 2.0**-6, 2.0**-9, 0.125),
        ("fp8 e5m2", 1, 57344.0, 2.0**-14, 2.0**-16, 0.25),
    ],
)
def test_ranges_are_those_of_the_standards(name, size, largest, least_normal, least, epsilon):
    chosen = BY_NAME[name]
    assert (chosen.bytes, chosen.largest, chosen.least_normal, chosen.least, chosen.epsilon) == (
        size,
        largest,
        least_normal,
        least,
        epsilon,
    )


@given(_FLOATS)
def test_rounding_is_numpys(value):
    with np.errstate(over="ignore"):
        assert BY_NAME["fp32"].round([value])[0] == np.float64(np.float32(value))
        assert BY_NAME["fp16"].round([value])[0] == np.float64(np.float16(value))


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8 e4m3", "fp8 e5m2"])
def test_every_number_of_a_format_stays_and_every_half_goes_to_even(name):
    chosen = BY_NAME[name]
    numbers = chosen.every_number()
    count = 2 ** (chosen.exponent_bits + chosen.mantissa_bits) - (1 if chosen.finite else 2**chosen.mantissa_bits)
    assert len(numbers) == count
    np.testing.assert_array_equal(chosen.round(numbers), numbers)
    halves = (numbers[:-1] + numbers[1:]) / 2
    np.testing.assert_array_equal(chosen.round(-halves), nearest_by_search(-halves, numbers))


@pytest.mark.parametrize(
    ("name", "value", "rounded"),
    [
        ("fp16", 65519.0, 65504.0),
        ("fp16", 65520.0, np.inf),
        ("fp16", -1e9, -np.inf),
        ("fp16", 2.0**-25, 0.0),
        ("fp16", 2.0**-25 * 1.01, 2.0**-24),
        ("fp8 e4m3", 464.0, 448.0),
        ("fp8 e4m3", 465.0, np.nan),
        ("fp8 e5m2", 61440.0, np.inf),
        ("bf16", 1 + 2.0**-8, 1.0),
        ("bf16", 1 + 3 * 2.0**-8, 1 + 2.0**-6),
        ("fp32", np.inf, np.inf),
        ("bf16", np.nan, np.nan),
    ],
)
def test_overflow_underflow_and_ties(name, value, rounded):
    np.testing.assert_array_equal(BY_NAME[name].round([value]), [rounded])


def test_numbers_of_32_bits_are_not_listed():
    with pytest.raises(ValueError, match="fp32"):
        BY_NAME["fp32"].every_number()


def test_a_ring_in_16_bits_rounds_on_its_way():
    inputs = [np.array([256.0, 1.0]), np.array([1.0, 1.0]), np.array([1.0, 1.0])]
    exact, wide = ring_sum(inputs, BY_NAME["fp32"])
    rounded, narrow = ring_sum(inputs, BY_NAME["bf16"])
    assert exact.tolist() == [258.0, 3.0]
    assert rounded.tolist() == [258.0, 3.0]  # 1 + 1 first, as the chunk starts behind its owner
    assert ring_sum(inputs[1:2] + inputs[:1] + inputs[2:], BY_NAME["bf16"])[0].tolist() == [256.0, 3.0]  # 256 + 1 rounds to 256, twice
    assert (2 * narrow.sent_bytes).tolist() == wide.sent_bytes.tolist()
    assert (narrow.steps, wide.steps) == (2, 2)


def test_sums_in_16_bits_have_the_larger_error():
    sums = _table(run(Arguments()), "Sums over ranks").set_index("what")["error"].astype(float)
    assert sums["fp32"] < sums["fp16 gradients, sum in fp32"] < sums["fp16"] < sums["bf16"] < sums["fp8 e5m2"]
    assert sums["bf16 gradients, sum in fp32"] < sums["bf16"]


def test_a_loss_scale_saves_gradients_of_fp16_and_a_large_one_overflows():
    scaling = _table(run(Arguments()), "Loss scaling").set_index("scale")
    assert scaling.loc["2^0", "fp16 zero"] > 0.3
    assert scaling.loc["2^16", "fp16 zero"] == 0
    assert scaling.loc["2^40", "fp16 over"] > 0.3
    assert (scaling["bf16 zero"] == 0).all()


def test_dynamic_loss_scaling_halves_after_an_overflow_and_skips_the_step():
    steps = _table(run(Arguments(steps=30)), "Dynamic loss scaling in fp16")
    scale = steps["scale"].astype(float).tolist()
    skipped = steps["update"].eq("skipped").tolist()
    assert any(skipped)
    for now, then, skip in zip(scale, scale[1:], skipped, strict=False):
        assert then == pytest.approx(now / 2 if skip else now * 2, rel=1e-5)


def test_small_updates_are_lost_without_a_master_weight():
    updates = _table(run(Arguments(elements=8)), "Small updates").set_index("format")["weight"].astype(float)
    assert updates["bf16"] == 1
    assert updates["fp32"] == pytest.approx(2, abs=1e-3)


@pytest.mark.parametrize(("ranks", "elements"), [(1, 1), (3, 2), (16, 1000), (7, 4096)])
def test_checks_hold_for_any_ranks(ranks, elements):
    assert [check for check in run(Arguments(ranks=ranks, elements=elements)).checks if not check.holds] == []


@pytest.mark.parametrize("exponent", [-140, 100])
def test_gradients_at_the_ends_of_the_range_are_finite_figures_or_none(exponent):
    assert run(Arguments(gradient_exponent=exponent, elements=64)).holds


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"elements": 0}, "--elements 0; give 1"),
        ({"ranks": 1000}, "--ranks 1000"),
        ({"ranks": 200, "elements": 900_000}, "too many"),
        ({"gradient_exponent": -500}, "--gradient-exponent -500"),
        ({"loss_scale": 0.0}, "--loss-scale 0"),
        ({"loss_scale": float("nan")}, "--loss-scale nan"),
        ({"steps": 0}, "--steps 0"),
    ],
)
def test_what_is_out_of_range_is_refused(chosen, words):
    with pytest.raises(UsageError, match=words):
        run(Arguments(**chosen))
