"""Pipeline schedules on virtual stages: when every stage works, what it keeps in flight, what it sends, and that gradients are right.

Every schedule that can run with the arguments is simulated from the dependencies of its actions and held against the closed forms of
``tracekit.estimate.pipeline``; the chosen one also runs a small model with real activations and gradients between the stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tracekit.errors import UsageError
from tracekit.estimate import pipeline as estimate
from tracekit.findings import Table
from tracekit.simulate.arguments import MOST_ELEMENTS, MOST_MULTIPLICATIONS, bytes_of_element, check, option, seed_of, values, within
from tracekit.simulate.experiment import Bar, Check, Experiment, Gantt
from tracekit.simulate.functions import error, rounding
from tracekit.simulate.pipeline.numbers import PipelineRun, action_label, random_model, unsharded
from tracekit.simulate.pipeline.order import StepTimes, simulate
from tracekit.simulate.tables import Columns, table

TITLE = "Pipeline schedules: bubble, activations in flight, messages between stages"
EXAMPLE = "tracekit simulate pipeline --schedule 1f1b --stages 4 --micro-batches 8"

_BAR_KINDS = {"F": "forward", "B": "backward_input", "W": "backward_weight", "BW": "backward"}
#: Beyond these an experiment would no longer finish in seconds, or its picture could not be read.
_MOST_PIECES, _MOST_MOMENTS, _LONGEST = 8192, 120, 10**12


@dataclass(frozen=True)
class Arguments:
    """What ``tracekit simulate pipeline`` can be told."""

    schedule: str = option("1f1b", "Schedule that is shown step by step.", estimate.SCHEDULES)
    stages: int = option(4, "Pipeline stages p: ranks along axis pp.")
    micro_batches: int = option(8, "Micro-batches m a step.")
    virtual_stages: int = option(2, "Chunks v a rank, for interleaved_1f1b.", least=1)
    forward: float = option(1.0, "Time F of one micro-batch in one rank's layers: forward.", least=0, most=_LONGEST)
    backward_input: float = option(1.0, "Time B: backward for the input.", least=0, most=_LONGEST)
    backward_weight: float = option(1.0, "Time W: backward for the weights.", least=0, most=_LONGEST)
    sequence: int = option(8, "Tokens s of a sequence.", least=1)
    micro_batch_size: int = option(1, "Sequences b of a micro-batch.", least=1)
    hidden: int = option(16, "Hidden size h.", least=1)
    element_bytes: int = bytes_of_element("of an activation under way")
    rank: int = option(0, "Rank whose sends and receives are listed.")
    seed: int = seed_of("weights and inputs")


@dataclass(frozen=True)
class _Simulated:
    """One schedule with the times of its actions, and what it takes to ask the closed forms about it."""

    schedule: str
    p: int
    m: int
    v: int
    durations: tuple[Fraction, Fraction, Fraction]
    times: StepTimes

    @property
    def bubble(self) -> Fraction:
        return self.times.wall - self.times.busy(0)


def run(arguments: Arguments) -> Experiment:
    """Simulate every schedule that can run, and train one step by the chosen one. Raises ``UsageError`` on arguments that make no sense."""
    durations = _checked(arguments)
    simulated, refused = [], []
    for schedule in estimate.SCHEDULES:
        try:
            simulated.append(_simulate(schedule, arguments, durations))
        except UsageError as problem:
            if schedule == arguments.schedule:
                raise
            refused.append(f"{schedule} is left out: {problem.problem}.")
    simulated.sort(key=lambda one: one.schedule != arguments.schedule)
    chosen = simulated[0]
    tokens = arguments.sequence * arguments.micro_batch_size
    model = random_model(chosen.p * chosen.v, chosen.m, tokens, arguments.hidden, arguments.seed)
    numbers = PipelineRun(model, chosen.times, arguments.element_bytes, _MOST_MOMENTS)
    if not numbers.moments:
        refused.append(f"The picture step by step is left out: more than {_MOST_MOMENTS} moments. Take fewer stages or micro-batches.")
    size = estimate.boundary_bytes(arguments.sequence, arguments.micro_batch_size, arguments.hidden, arguments.element_bytes)
    checks = [figure for one in simulated for figure in _time_checks(one)]
    checks += [*_message_checks(chosen, numbers, size), *_number_checks(numbers)]
    return Experiment(
        name="pipeline",
        title=TITLE,
        about="Stages hold consecutive layers and hand activations forward, gradients back; a stage that waits is in the bubble. "
        "Every piece of work starts as soon as the schedule's order and its inputs allow; messages take no time.",
        arguments=values(arguments),
        verdict=_verdict(chosen),
        tables=[_stage_table(chosen, numbers), _schedule_table(simulated)],
        moments=numbers.moments,
        charts=[_gantt(one) for one in simulated],
        checks=checks,
        calls=numbers.calls[arguments.rank],
        notes=[
            "Bubble ratio is bubble over ideal time, m (F + B + W); bubble share is bubble over wall time. Papers mean either.",
            "F, B and W are times of one micro-batch in all layers of a rank; interleaving divides them over its chunks.",
            *refused,
        ],
    )


def _checked(arguments: Arguments) -> tuple[Fraction, Fraction, Fraction]:
    """The times F, B, W as decimals say them; raises ``UsageError`` for whatever would not run or not end."""
    a = arguments
    check(a)
    if a.forward + a.backward_input + a.backward_weight == 0:
        raise UsageError("forward, backward input and backward weight all take no time", "give at least one of them a time")
    chunks = a.virtual_stages if a.schedule == "interleaved_1f1b" else 1
    estimate.check_schedule(a.schedule, a.stages, a.micro_batches, chunks)
    if not 0 <= a.rank < a.stages:
        raise UsageError(f"there is no rank {a.rank} among {a.stages} stages", f"give 0 to {a.stages - 1}")
    within(a.stages * a.micro_batches * a.virtual_stages, _MOST_PIECES, "forwards of chunks", "take fewer stages or micro-batches")
    activations = a.stages * chunks * a.micro_batches * a.sequence * a.micro_batch_size * a.hidden
    within(activations, MOST_ELEMENTS, "elements of activations", "take a smaller hidden size or sequence")
    weights = a.stages * chunks * a.hidden**2
    within(weights, MOST_ELEMENTS, "elements of weights", "take a smaller hidden size")
    within(activations * a.hidden, MOST_MULTIPLICATIONS, "multiplications a pass", "take a smaller hidden size or sequence")
    return Fraction(str(a.forward)), Fraction(str(a.backward_input)), Fraction(str(a.backward_weight))


def _simulate(schedule: str, arguments: Arguments, durations: tuple[Fraction, Fraction, Fraction]) -> _Simulated:
    p, m = arguments.stages, arguments.micro_batches
    v = arguments.virtual_stages if schedule == "interleaved_1f1b" else 1
    return _Simulated(schedule, p, m, v, durations, simulate(schedule, p, m, v, *durations))


def _time_checks(one: _Simulated) -> list[Check]:
    name, where = one.schedule, (one.schedule, one.p, one.m)
    ideal = estimate.ideal_time(one.m, *one.durations)
    bubble, wall, v = one.bubble, one.times.wall, one.v
    checks = [
        Check(f"{name}: bubble", bubble, estimate.bubble_time(*where, *one.durations, v), "time", _BUBBLES[name]),
        Check(f"{name}: bubble ratio", bubble / ideal, estimate.bubble_ratio(*where, *one.durations, v), "", "bubble / m (F+B+W)"),
        Check(f"{name}: bubble share", bubble / wall, estimate.bubble_share(*where, *one.durations, v), "", "bubble / wall"),
    ]
    span = estimate.span_bubble_time(*where, *one.durations, one.v)
    if name.startswith("zb_") and span is not None:
        counted = max(one.times.span(rank) for rank in range(one.p)) - ideal
        checks.append(Check(f"{name}: bubble between a stage's own first and last work", counted, span, "time", _SPANS[name]))
    counts = estimate.in_flight(*where, v)
    for rank in range(one.p):
        held = one.times.in_flight(rank, "input")
        checks.append(Check(f"{name}: in flight on stage {rank}", held, counts[rank], "chunks", _IN_FLIGHT[name]))
    counts = estimate.in_flight_until_weight(*where, v)
    for rank in range(one.p) if name.startswith("zb_") else ():
        held = one.times.in_flight(rank, "weight")
        checks.append(Check(f"{name}: in flight until W on stage {rank}", held, counts[rank], "chunks", _UNTIL_WEIGHT[name]))
    return checks


_BUBBLES = {
    "gpipe": "(p-1)(F+B+W), arXiv:1811.06965",
    "1f1b": "(p-1)(F+B+W), arXiv:2104.04473",
    "interleaved_1f1b": "(p-1)(F+B+W)/v, arXiv:2104.04473",
    "zb_h1": "(p-1)(F+B) - (min(m,p)-1) min(F,B,W); (p-1)(F+B-W) of arXiv:2401.10241 where W is least and m >= p",
    "zb_h2": "(p-1) max(F, F+B-2W, B-W, B-F), derived for the wall time",
}
_IN_FLIGHT = {
    "gpipe": "m, arXiv:1811.06965",
    "1f1b": "min(m, p-i) on stage i, arXiv:2104.04473",
    "interleaved_1f1b": "min(v m, 2(p-i-1) + (v-1)p + 1) on stage i, arXiv:2104.04473",
    "zb_h1": "min(m, p-i) on stage i, as 1f1b",
    "zb_h2": "min(m, 2(p-i)-1) on stage i",
}
_UNTIL_WEIGHT = {"zb_h1": "min(m, p), arXiv:2401.10241", "zb_h2": "2p-1, arXiv:2401.10241"}
_SPANS = {"zb_h1": "(p-1)(F+B-W), arXiv:2401.10241", "zb_h2": "max(0, (p-1)(F+B-2W)), arXiv:2401.10241"}


def _message_checks(chosen: _Simulated, numbers: PipelineRun, size: int) -> list[Check]:
    sent = estimate.messages_sent(chosen.schedule, chosen.p, chosen.m, chosen.v)
    messages = [message for _, message in numbers.network.messages]
    checks = [Check("messages in all", len(messages), sum(sent), "messages", "2 m (p v - 1) between ranks")]
    for rank in range(chosen.p):
        count = sum(message.source == rank for message in messages)
        checks.append(Check(f"messages sent by stage {rank}", count, sent[rank], "messages", "m each way over each boundary of a chunk"))
        moved = int(numbers.network.sent_bytes[rank])
        checks.append(Check(f"bytes sent by stage {rank}", moved, sent[rank] * size, "bytes", "messages x s b h x element bytes"))
    return checks


def _number_checks(numbers: PipelineRun) -> list[Check]:
    loss, gradient = unsharded(numbers.model)
    chunks, h = numbers.model.weights.shape[:2]
    tolerance = rounding(numbers.model.tokens * h * chunks, gradient)
    return [
        Check("loss against one rank", numbers.loss, loss, "", "the same sum in another order", tolerance * max(1.0, loss)),
        Check("largest error of a weight's gradient", error(numbers.gradient, gradient), 0.0, "", "unsharded backward", tolerance),
    ]


def _verdict(chosen: _Simulated) -> str:
    ideal = estimate.ideal_time(chosen.m, *chosen.durations)
    return (
        f"{chosen.schedule}, {chosen.p} stages, {chosen.m} micro-batches: bubble {float(chosen.bubble):g} beside {float(ideal):g} of work, "
        f"ratio {float(chosen.bubble / ideal):.4g}, share of the wall time {float(chosen.bubble / chosen.times.wall):.4g}."
    )


def _stage_table(chosen: _Simulated, numbers: PipelineRun) -> Table:
    line, ranks = chosen.times, range(chosen.p)
    sources = [message.source for _, message in numbers.network.messages]
    columns: Columns = {
        "stage": ("stage", ranks),
        "busy": ("busy [time]", [float(line.busy(rank)) for rank in ranks]),
        "bubble": ("bubble [time]", [float(line.wall - line.busy(rank)) for rank in ranks]),
        "in_flight": ("in flight until B [chunks]", [line.in_flight(rank, "input") for rank in ranks]),
        "until_weight": ("in flight until W [chunks]", [line.in_flight(rank, "weight") for rank in ranks]),
        "messages": ("messages sent", [sources.count(rank) for rank in ranks]),
        "sent_bytes": ("sent [bytes]", [int(numbers.network.sent_bytes[rank]) for rank in ranks]),
    }
    note = "A chunk is all layers of a rank, or 1/v of them with interleaving, for one micro-batch."
    return table(f"Stages of {chosen.schedule}", columns, note)


def _schedule_table(simulated: Sequence[_Simulated]) -> Table:
    ideal = [estimate.ideal_time(one.m, *one.durations) for one in simulated]
    held = [max(one.times.in_flight(rank, "weight") for rank in range(one.p)) / one.v for one in simulated]
    columns: Columns = {
        "schedule": ("schedule", [one.schedule for one in simulated]),
        "wall": ("wall [time]", [float(one.times.wall) for one in simulated]),
        "bubble": ("bubble [time]", [float(one.bubble) for one in simulated]),
        "ratio": ("bubble / ideal", [float(one.bubble / time) for one, time in zip(simulated, ideal, strict=True)]),
        "share": ("bubble / wall", [float(one.bubble / one.times.wall) for one in simulated]),
        "in_flight": ("most in flight on a rank [micro-batches x its layers]", held),
        "messages": ("messages", [sum(estimate.messages_sent(one.schedule, one.p, one.m, one.v)) for one in simulated]),
    }
    return table("Schedules side by side", columns)


def _gantt(one: _Simulated) -> Gantt:
    lanes = [f"stage {rank}" for rank in range(one.p)]
    bars = [
        Bar(
            lanes[timed.rank],
            float(timed.start),
            float(timed.end),
            action_label(timed.action, one.p, one.p * one.v),
            _BAR_KINDS[timed.action.kind],
        )
        for timed in one.times.actions
    ]
    note = f"Bubble {float(one.bubble):g} on every stage, {float(one.bubble / one.times.wall):.1%} of the wall time."
    return Gantt(f"{one.schedule}, p = {one.p}, m = {one.m}" + (f", v = {one.v}" if one.v > 1 else ""), lanes, bars, "time", note)
