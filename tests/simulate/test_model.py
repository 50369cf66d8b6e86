"""The model of the sharding experiments: its gradients, its text form, Adam, its units."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.errors import UsageError
from tracekit.simulate.data_parallel.model import Adam, LinearStack, batches, largest_error, layers_from_text, train_in_one_process
from tracekit.simulate.data_parallel.units import units_of


def loss(model, values, batch):
    y = batch.x
    for layer in range(model.layers):
        y = model.forward_layer(layer, values, y)
    return np.mean((y - batch.target) ** 2)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_by_hand_are_those_of_small_differences(bias):
    model = LinearStack(((4, 3), (5, 4), (2, 5)), bias)
    values, (batch,) = model.initial(3), batches(model, 6, 1, 3)
    gradients = model.gradients(values, batch.x, batch.target)
    assert list(values) == [p.name for p in model.parameters]
    for name, value in values.items():
        for at in np.ndindex(value.shape):
            up, down = ({n: v.copy() for n, v in values.items()} for _ in range(2))
            up[name][at] += 1e-6
            down[name][at] -= 1e-6
            assert gradients[name][at] == pytest.approx((loss(model, up, batch) - loss(model, down, batch)) / 2e-6, abs=1e-8)


def test_the_first_step_of_adam_is_the_learning_rate_against_the_sign():
    parameter, first, second = np.array([1.0, 1.0, 1.0]), np.zeros(3), np.zeros(3)
    Adam(learning_rate=0.1).update(parameter, np.array([5.0, -0.2, 0.0]), first, second, 1)
    assert parameter == pytest.approx([0.9, 1.1, 1.0], abs=1e-7)
    assert first == pytest.approx([0.5, -0.02, 0])
    assert second == pytest.approx([0.025, 0.00004, 0])


def test_adam_gives_what_torch_gives():
    """torch.optim.Adam(lr=0.1), float64, gradients 0.5, -0.25, 1.0 on a parameter that starts at 2."""
    parameter, first, second = np.array([2.0]), np.zeros(1), np.zeros(1)
    seen = []
    for step, gradient in enumerate((0.5, -0.25, 1.0), 1):
        Adam(learning_rate=0.1).update(parameter, np.array([gradient]), first, second, step)
        seen.append(float(parameter[0]))
    assert seen == pytest.approx([1.900000002, 1.8733662987078465, 1.80755513967709], rel=1e-14, abs=0)


@given(st.integers(0, 9), st.integers(1, 4))
def test_gradient_of_a_batch_is_the_mean_over_its_equal_parts(seed, parts):
    model = LinearStack(((3, 2), (2, 3)))
    values, (batch,) = model.initial(seed), batches(model, 3 * parts, 1, seed)
    whole = model.gradients(values, batch.x, batch.target)
    each = [model.gradients(values, p.x, p.target) for p in (batch.part(i, parts) for i in range(parts))]
    assert largest_error({name: sum(g[name] for g in each) / parts for name in whole}, whole) < 1e-14


def test_training_goes_down():
    model = LinearStack(((4, 3), (2, 4)))
    (batch,) = batches(model, 8, 1, 0)
    done = train_in_one_process(model, [batch] * 50, Adam(0.01), 0)
    losses = [loss(model, step.parameters, batch) for step in done]
    assert losses[-1] < 0.7 * losses[0]
    assert done[0].parameters["W1"] is not done[1].parameters["W1"], "each step keeps its own values"


def test_layers_are_read_from_text():
    assert layers_from_text("2x3, 2X2") == ((2, 3), (2, 2))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is no weight"),
        ("2x3x4", "is no weight"),
        ("2x3,", "is no weight"),
        ("-2x3", "is no weight"),
        ("２x3", "is no weight"),
        ("0x3", "outside 1 to"),
        ("9999x3", "outside 1 to"),
        ("2x3,2x4", "layer 1 has 2 outputs, but layer 2 takes 4 inputs"),
        (",".join(["2x2"] * 33), "33 layers"),
    ],
)
def test_layers_that_make_no_stack_are_refused(text, problem):
    with pytest.raises(UsageError, match=problem):
        layers_from_text(text)


def test_three_ways_to_make_units():
    model = LinearStack(((2, 2),) * 4)
    assert [(u.name, u.layers, u.root) for u in units_of(model, "model")] == [("model", (0, 1, 2, 3), True)]
    assert [u.layers for u in units_of(model, "layer")] == [(0,), (1,), (2,), (3,)]
    assert [(u.layers, u.root) for u in units_of(model, "blocks")] == [((0, 3), True), ((1,), False), ((2,), False)]
    with pytest.raises(UsageError, match="at least 3 layers"):
        units_of(LinearStack(((2, 2),) * 2), "blocks")
