"""Pipeline schedules simulated from their dependencies, held against the closed forms and the unsharded model."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.errors import UsageError
from tracekit.estimate import pipeline as estimate
from tracekit.simulate import pipeline
from tracekit.simulate.pipeline.order import order, simulate

durations = st.fractions(0, 6, max_denominator=7)


@st.composite
def pipelines(draw):
    schedule = draw(st.sampled_from(estimate.SCHEDULES))
    p, v = draw(st.integers(1, 6)), 1
    m = draw(st.integers(1, 12))
    if schedule == "interleaved_1f1b":
        v, m = draw(st.integers(1, 4)), p * draw(st.integers(1, 3))
    if schedule == "zb_h2":
        m += 2 * p - 2
    return schedule, p, m, v


def _names(works):
    return " ".join(f"{work.kind}{work.micro_batch}" for work in works)


def test_orders_of_three_stages_and_four_micro_batches():
    assert _names(order("gpipe", 3, 4, 1, 0)) == "F0 F1 F2 F3 BW0 BW1 BW2 BW3"
    assert _names(order("1f1b", 3, 4, 1, 0)) == "F0 F1 F2 BW0 F3 BW1 BW2 BW3"
    assert _names(order("1f1b", 3, 4, 1, 2)) == "F0 BW0 F1 BW1 F2 BW2 F3 BW3"
    assert _names(order("zb_h1", 3, 4, 1, 0)) == "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"
    assert _names(order("zb_h1", 3, 4, 1, 2)) == "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"
    interleaved = order("interleaved_1f1b", 2, 2, 2, 1)
    assert [(w.kind, w.chunk, w.micro_batch) for w in interleaved] == [
        ("F", 1, 0), ("F", 1, 1), ("F", 3, 0), ("BW", 3, 0), ("F", 3, 1), ("BW", 3, 1), ("BW", 1, 0), ("BW", 1, 1),
    ]  # fmt: skip


@given(case=pipelines())
def test_every_piece_runs_once(case):
    schedule, p, m, v = case
    for rank in range(p):
        works = order(schedule, p, m, v, rank)
        assert len(set(works)) == len(works)
        kinds = ("F", "B", "W") if schedule.startswith("zb_") else ("F", "BW")
        assert {(w.kind, w.chunk, w.micro_batch) for w in works} == {
            (kind, chunk * p + rank, j) for kind in kinds for chunk in range(v) for j in range(m)
        }


@given(case=pipelines(), f=durations, b=durations, w=durations)
@settings(deadline=None)
def test_bubble_and_in_flight_are_the_closed_forms(case, f, b, w):
    schedule, p, m, v = case
    line = simulate(schedule, p, m, v, f, b, w)
    for rank in range(p):
        assert line.wall - line.busy(rank) == estimate.bubble_time(schedule, p, m, f, b, w, v)
        assert line.in_flight(rank, "input") == estimate.in_flight(schedule, p, m, v)[rank]
        assert line.in_flight(rank, "weight") == estimate.in_flight_until_weight(schedule, p, m, v)[rank]
    published = estimate.span_bubble_time(schedule, p, m, f, b, w, v)
    if published is not None:
        assert max(line.span(rank) for rank in range(p)) - m * (f + b + w) == published


@given(case=pipelines(), f=durations, b=durations, w=durations)
@settings(deadline=None)
def test_nothing_runs_before_its_inputs_or_beside_other_work(case, f, b, w):
    schedule, p, m, v = case
    line = simulate(schedule, p, m, v, f, b, w)
    ends = {timed.action: timed.end for timed in line.actions}
    backward = "B" if schedule.startswith("zb_") else "BW"
    for timed in line.actions:
        kind, chunk, j = timed.action
        needs = {"F": [("F", chunk - 1, j)], "W": [("B", chunk, j)]}.get(kind, [("F", chunk, j), (backward, chunk + 1, j)])
        assert all(ends.get(need, 0) <= timed.start for need in needs)
    for rank in range(p):
        mine = line.of_rank(rank)
        assert all(before.end <= after.start for before, after in itertools.pairwise(mine))


@given(case=pipelines(), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_gradients_and_counted_bytes(case, seed):
    schedule, p, m, v = case
    done = pipeline.run(pipeline.Arguments(schedule=schedule, stages=p, micro_batches=m, virtual_stages=v, sequence=3, hidden=5, seed=seed))
    assert done.holds, [check for check in done.checks if not check.holds]
    sent = {check.quantity: check.counted for check in done.checks if check.quantity.startswith("bytes sent")}
    assert sum(sent.values()) == (2 * m * (p * v - 1) * 3 * 5 * 2 if p > 1 else 0)


def test_the_tour_of_the_default_arguments():
    done = pipeline.run(pipeline.Arguments())
    assert done.holds
    assert done.verdict == "1f1b, 4 stages, 8 micro-batches: bubble 9 beside 24 of work, ratio 0.375, share of the wall time 0.2727."
    assert done.tables[0].frame["in_flight"].tolist() == [4, 3, 2, 1]
    assert done.tables[0].frame["sent_bytes"].tolist() == [8 * 256, 16 * 256, 16 * 256, 8 * 256]
    walls = dict(zip(done.tables[1].frame["schedule"], done.tables[1].frame["wall"], strict=True))
    assert walls == {"1f1b": 33, "gpipe": 33, "interleaved_1f1b": 28.5, "zb_h1": 27, "zb_h2": 27}
    assert done.charts[0].title == "1f1b, p = 4, m = 8"
    assert len(done.charts[0].bars) == 4 * 16
    assert [call.kind for call in done.calls] == ["send"] * 4 + ["recv", "send"] * 4 + ["recv"] * 4
    assert {(call.axis, call.purpose, call.full_bytes) for call in done.calls} == {("pp", "pipeline", 256)}


def test_moments_show_what_is_saved_and_sent():
    done = pipeline.run(pipeline.Arguments(stages=2, micro_batches=2))
    first, *_, last = done.moments
    assert (first.title, first.text) == ("t = 1", "Done: F0 on rank 0.")
    assert [cell.label for cell in first.holds[0]] == ["x 0", "z 0"]
    assert [(m.source, m.target, m.label, m.bytes) for m in first.messages] == [(0, 1, "activation 0", 256)]
    assert [cell.label for cell in first.holds[1]] == ["activation 0 waits"]
    assert last.holds == ((), ())
    for moment in done.moments:
        assert all(cell.bytes == 256 for cells in moment.holds for cell in cells)


def test_a_wrong_gradient_is_found(monkeypatch):
    right = pipeline.unsharded

    def wrong(model):
        loss, gradient = right(model)
        gradient[0, 0, 0] += 1e-9
        return loss, gradient

    monkeypatch.setattr(pipeline, "unsharded", wrong)
    done = pipeline.run(pipeline.Arguments())
    assert [check.quantity for check in done.checks if not check.holds] == ["largest error of a weight's gradient"]


def test_times_are_taken_as_decimals():
    done = pipeline.run(pipeline.Arguments(forward=0.1, backward_input=0.2, backward_weight=0.1, schedule="zb_h1"))
    bubble = next(check for check in done.checks if check.quantity == "zb_h1: bubble")
    assert bubble.counted == Fraction(6, 10)
    assert np.isclose(done.charts[0].bars[-1].end, 8 * 0.4 + 0.6)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"schedule": "interleaved_1f1b", "micro_batches": 3}, "3 is no multiple of 4"),
        ({"schedule": "zb_h2", "micro_batches": 6}, "7 micro-batches"),
        ({"schedule": "dualpipe"}, "--schedule"),
        ({"stages": 0}, "0 stages"),
        ({"virtual_stages": 0}, "--virtual-stages 0"),
        ({"forward": float("nan")}, "--forward nan"),
        ({"backward_weight": -1.0}, "--backward-weight -1"),
        ({"forward": 0.0, "backward_input": 0.0, "backward_weight": 0.0}, "no time"),
        ({"hidden": 0}, "hidden 0"),
        ({"seed": -1}, "--seed -1"),
        ({"micro_batches": 100_000}, "forwards of chunks"),
        ({"hidden": 4096}, "elements of weights"),
        ({"hidden": 1, "sequence": 1 << 40}, "elements of activations"),
        ({"hidden": 1024, "sequence": 256}, "multiplications"),
        ({"forward": 1e300}, "--forward"),
        ({"element_bytes": 10**9}, "--element-bytes 1000000000"),
    ],
)
def test_bad_arguments_are_refused(arguments, reason):
    with pytest.raises(UsageError, match=reason):
        pipeline.run(pipeline.Arguments(**arguments))


def test_a_schedule_that_cannot_run_beside_the_chosen_one_is_named():
    done = pipeline.run(pipeline.Arguments(micro_batches=6))
    assert done.tables[1].frame["schedule"].tolist() == ["1f1b", "gpipe", "zb_h1"]
    assert sum("is left out" in note for note in done.notes) == 2


@pytest.mark.parametrize("schedule", estimate.SCHEDULES)
def test_what_is_posted_is_what_is_sent(schedule):
    """Every rank's posts are its messages, and each send has its receive."""
    for rank in range(3):
        sizes = pipeline.Arguments(schedule=schedule, stages=3, micro_batches=6, virtual_stages=2, rank=rank)
        done = pipeline.run(sizes)
        messages = [message for moment in done.moments for message in moment.messages]
        for kind, end in (("send", "source"), ("recv", "target")):
            posted = [(call.label, call.full_bytes) for call in done.calls if call.kind == kind]
            assert sorted(posted) == sorted((m.label, m.bytes) for m in messages if getattr(m, end) == rank)
