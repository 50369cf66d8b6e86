"""A pass of a pipeline in its schedule's order: the closed form where stages are alike, the order itself where not."""

import pytest

from tracekit.graph.filling import order_of, run_ns
from tracekit.simulate.pipeline.order import order


@pytest.mark.parametrize(
    ("forward", "backward", "places", "batches", "forwards_first", "wall"),
    [
        ([10] * 4, [20] * 4, 4, 8, False, 11 * 30),  # (m + p - 1)(f + b)
        ([10] * 4, [20] * 4, 4, 8, True, 11 * 30),
        ([10] * 8, [20] * 8, 4, 8, False, 19 * 30),  # (v m + p - 1)(f + b) of a stage
        ([10] * 4, [20] * 4, 4, 1, False, 4 * 30),
        ([10, 30], [20, 60], 2, 3, True, 10 + 3 * 90 + 20),  # all for the second, before and behind the first's own
        (
            [30, 10],
            [60, 20],
            2,
            2,
            False,
            2 * 90,
        ),  # 0F0 0F1 0B0 0B1 without a gap: 1F0 and 1B0 end when 0F1 does, 1F1 and 1B1 while 0B0 runs
    ],
)
def test_a_pass_by_hand(forward: list[float], backward: list[float], places: int, batches: int, forwards_first: bool, wall: float) -> None:
    assert run_ns(forward, backward, places, batches, forwards_first) == wall


@pytest.mark.parametrize(("schedule", "held"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3)])
def test_orders_are_those_of_the_schedules(schedule: str, held: int) -> None:
    for place in range(4):
        wanted = [(action.kind == "F", action.chunk, action.micro_batch) for action in order(schedule, 4, 8, held, place)]
        assert order_of(place, 4, held, 8, schedule == "gpipe") == wanted


def test_what_cannot_run_or_is_too_long_is_not_followed() -> None:
    assert run_ns([1.0] * 8, [1.0] * 8, 4, 6, False) is None  # interleaved in rounds of 4
    assert run_ns([1.0] * 3, [1.0] * 3, 2, 4, False) is None
    assert run_ns([1.0] * 4, [1.0] * 4, 4, 10**6, False) is None
