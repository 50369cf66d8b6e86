"""Expert parallel: routing and capacity by small tables, the reference against finite differences, ranks against the reference."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.errors import UsageError
from tracekit.simulate import experts
from tracekit.simulate.experts import Arguments
from tracekit.simulate.experts.layer import Weights, one_rank
from tracekit.simulate.experts.ranks import Exchange
from tracekit.simulate.experts.routing import balance_loss, capacity_of, drop, route, sending_order

LOGITS = np.log(np.array([[6.0, 3.0, 1.0], [5.0, 1.0, 4.0], [7.0, 2.0, 1.0], [1.0, 2.0, 7.0]]))


def test_every_token_gets_its_most_probable_experts():
    routing = route(LOGITS, 2, normalised=False)
    assert routing.experts.tolist() == [[0, 1], [0, 2], [0, 1], [2, 1]]
    assert np.allclose(routing.weights, [[0.6, 0.3], [0.5, 0.4], [0.7, 0.2], [0.7, 0.2]])
    assert np.allclose(route(LOGITS, 2, normalised=True).weights[0], [2 / 3, 1 / 3])


def test_equal_experts_are_taken_in_order():
    assert route(np.zeros((2, 4)), 2, normalised=True).experts.tolist() == [[0, 1], [0, 1]]


def test_a_full_expert_drops_late_or_unwanted_tokens():
    routing = route(LOGITS, 2, normalised=False)
    # expert 0 is the first choice of tokens 0, 1, 2; expert 1 the second of 0, 2, 3; expert 2 the first of 3 and the second of 1
    assert drop(routing, 2, "position").kept.tolist() == [[True, True], [True, True], [False, True], [True, False]]
    assert drop(routing, 2, "probability").kept.tolist() == [[True, True], [False, True], [True, True], [True, False]]
    assert drop(routing, 1, "position").kept.tolist() == [[True, True], [False, False], [False, False], [True, False]]


@pytest.mark.parametrize(("factor", "capacity"), [("1", 4), ("1.25", 5), ("1.1", 5), ("0.01", 1)])
def test_capacity_is_rounded_up(factor, capacity):
    assert capacity_of(Fraction(factor), tokens=16, k=2, experts=8) == capacity


def test_the_order_of_sending():
    routing = drop(route(LOGITS, 2, normalised=False), 2, "position")
    compact, padded = sending_order(routing, None), sending_order(routing, 2)
    assert compact.tokens.tolist() == [0, 1, 0, 2, 1, 3]  # expert 0: 0, 1; expert 1: 0, 2; expert 2: 1, 3
    assert compact.slots.tolist() == [0, 0, 1, 1, 1, 0]
    assert compact.rows.tolist() == padded.rows.tolist() == [0, 1, 2, 3, 4, 5]
    wide = sending_order(routing, 3)
    assert wide.rows.tolist() == [0, 1, 3, 4, 6, 7]
    assert (wide.counts.tolist(), wide.sizes.tolist()) == ([2, 2, 2], [3, 3, 3])


def test_balance_loss_is_1_in_balance_and_e_when_all_go_to_one():
    assert balance_loss([route(np.zeros((4, 4)), 4, normalised=True)]) == pytest.approx(1)
    assert balance_loss([route(np.array([[1000.0, 0, 0, 0]] * 3), 1, normalised=True)]) == pytest.approx(4)


@pytest.mark.parametrize(("k", "normalised", "capacity"), [(1, False, 9), (2, True, 9), (2, False, 3), (3, True, 3)])
def test_the_reference_has_the_derivatives_of_finite_differences(k, normalised, capacity):
    draw = np.random.default_rng(3).standard_normal
    weights = Weights(draw((4, 3)), draw((3, 4, 5)), draw((3, 5, 4)))
    x, dy = draw((6, 4)), draw((6, 4))

    def routing():
        return drop(route(x @ weights.router, k, normalised), capacity, "position")

    found = one_rank(weights, routing(), x, dy)
    before = routing()
    arrays = [(x, found.dx), (weights.router, found.drouter), (weights.first, found.dfirst), (weights.second, found.dsecond)]
    for array, gradient in arrays:
        direction, original, values = draw(array.shape), array.copy(), []
        for width in (1e-6, -1e-6):
            array[...] = original + width * direction
            assert (routing().experts == before.experts).all()  # top-k is not differentiable where it changes
            values.append(float((one_rank(weights, routing(), x, dy).y * dy).sum()))
        array[...] = original
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(float((gradient * direction).sum()), rel=1e-6, abs=1e-7)


@st.composite
def arguments(draw):
    ep = draw(st.integers(1, 5))
    count = ep * draw(st.integers(1, 3))
    factor = draw(st.sampled_from([0.0, 0.01, 0.5, 1.0, 1.25, float(count)]))
    return Arguments(
        ep=ep,
        experts=count,
        top_k=draw(st.integers(1, count)),
        tokens=draw(st.integers(1, 9)),
        hidden=draw(st.integers(1, 5)),
        ffn=draw(st.integers(1, 5)),
        routing=draw(st.sampled_from(["random", "skewed"])),
        normalise=draw(st.booleans()),
        capacity_factor=min(factor, float(count)),
        drop_by=draw(st.sampled_from(["position", "probability"])),
        pad=factor > 0 and draw(st.booleans()),
        element_bytes=draw(st.sampled_from([1, 2, 4])),
        seed=draw(st.integers(0, 99)),
    )


@given(given_arguments=arguments())
@settings(max_examples=60, deadline=None)
def test_any_routing_gives_the_result_of_one_rank_and_the_bytes_of_its_choices(given_arguments):
    done = experts.run(given_arguments)
    assert done.holds, [check for check in done.checks if not check.holds]
    load = done.tables[0].frame
    assert load["asked"].sum() == given_arguments.ep * given_arguments.tokens * given_arguments.top_k
    assert (load["kept"] + load["dropped"]).tolist() == load["asked"].tolist()


def test_balanced_routing_sends_k_t_h_e_f_of_ep():
    done = experts.run(Arguments(routing="balanced", ep=4, experts=8, top_k=2, tokens=16, hidden=8))
    one = 2 * 16 * 8 * 2 * 3 // 4
    exchanges = done.tables[2].frame.set_index("exchange")
    for name in ("dispatch", "combine", "gradient of combine", "gradient of dispatch"):
        assert exchanges.loc[name].tolist() == [one] * 4
    assert exchanges.loc["counts"].tolist() == [3 * 2 * 8] * 4
    assert "0 of 128 choices are dropped" in done.verdict
    assert sum(check.formula == "4 k T h e F(EP), balanced" for check in done.checks) == 4


def test_padding_makes_all_pieces_even():
    done = experts.run(Arguments(routing="skewed", pad=True, capacity_factor=1.0))
    assert {message.bytes for moment in done.moments for message in moment.messages} == {2 * 4 * 8 * 2}  # 2 experts, C = 4, h e = 16
    assert "counts" not in done.tables[2].frame["exchange"].tolist()
    load = done.tables[0].frame
    assert (load["kept"] + load["padding"]).tolist() == [16] * 8
    assert load["padding"].sum() > 0
    arrived = next(moment for moment in done.moments if moment.title == "dispatch").holds[3]
    assert sum(cell.bytes for cell in arrived if cell.label.startswith("arrived")) == 2 * 16 * 16


def test_a_large_capacity_drops_nothing_and_a_small_one_is_told():
    free = experts.run(Arguments(capacity_factor=8.0))
    assert "0 of 128 choices are dropped" in free.verdict
    assert "largest error of y against no capacity" in [check.quantity for check in free.checks]
    tight = experts.run(Arguments(capacity_factor=0.5))
    assert any("lose all their experts" in note for note in tight.notes)
    assert tight.tables[0].frame["kept"].max() <= 2 * 4
    assert tight.holds


def test_calls_of_a_rank():
    done = experts.run(Arguments())
    assert [(call.kind, call.purpose, call.phase) for call in done.calls] == [
        ("all_to_all", "expert_dispatch", "forward"),
        ("all_to_all", "expert_dispatch", "forward"),
        ("all_to_all", "expert_combine", "forward"),
        ("all_to_all", "expert_combine", "backward"),
        ("all_to_all", "expert_dispatch", "backward"),
    ]
    assert {call.axis for call in done.calls} == {"ep"}
    kept = done.tables[1].frame["sent"][0]
    assert done.calls[1].full_bytes == kept * 16


def test_rows_that_come_back_in_another_order_are_found(monkeypatch):
    right = Exchange.combine
    monkeypatch.setattr(Exchange, "combine", lambda self, *given: [rows[::-1] for rows in right(self, *given)])
    failed = {check.quantity: check.counted for check in experts.run(Arguments()).checks if not check.holds}
    assert failed["rows out of place after dispatch and combine"] > 0
    assert "largest error of y" in failed


def test_a_wrong_gradient_is_found(monkeypatch):
    right = experts.one_rank
    monkeypatch.setattr(experts, "one_rank", lambda *given: right(*given)._replace(drouter=right(*given).drouter + 1e-9))
    assert [check.quantity for check in experts.run(Arguments()).checks if not check.holds] == ["largest error of the router's gradient"]


@pytest.mark.parametrize(
    ("given_arguments", "reason"),
    [
        ({"experts": 6}, "6 experts do not divide by 4 ranks"),
        ({"top_k": 9}, "9 of 8 experts"),
        ({"capacity_factor": -1.0}, "capacity factor -1"),
        ({"capacity_factor": float("nan")}, "capacity factor nan"),
        ({"capacity_factor": 9.0}, "capacity factor 9"),
        ({"pad": True, "capacity_factor": 0.0}, "no limit"),
        ({"routing": "balanced", "tokens": 15}, "do not spread evenly"),
        ({"routing": "hash"}, "--routing hash"),
        ({"drop_by": "age"}, "--drop-by age"),
        ({"tokens": 0}, "--tokens 0"),
        ({"seed": -1}, "--seed -1"),
        ({"element_bytes": 1 << 40}, "--element-bytes 1099511627776"),
        ({"tokens": 1 << 30}, "choices of experts"),
        ({"hidden": 1 << 30}, "elements of one array"),
        ({"ep": 1 << 20, "experts": 1 << 20, "tokens": 1, "top_k": 1}, "choices|pieces"),
    ],
)
def test_bad_arguments_are_refused_with_the_reason(given_arguments, reason):
    with pytest.raises(UsageError, match=reason):
        experts.run(Arguments(**given_arguments))
