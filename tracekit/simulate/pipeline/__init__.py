"""Pipeline schedules on virtual stages: when every stage works, what it keeps in flight, what it sends, and that gradients are right.

Every schedule that can run with the arguments is simulated from the dependencies of its pieces and held against the closed forms of
``tracekit.estimate.pipeline``; the chosen one also runs a small model with real activations and gradients between the stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction

import pandas as pd

from tracekit.errors import UsageError
from tracekit.estimate import pipeline as estimate
from tracekit.findings import Table
from tracekit.simulate import bounds
from tracekit.simulate.experiment import Bar, Check, Experiment, Gantt
from tracekit.simulate.functions import error, rounding
from tracekit.simulate.pipeline.numbers import PipelineRun, random_model, unsharded, work_label
from tracekit.simulate.pipeline.order import Timeline, simulate

TITLE = "Pipeline schedules: bubble, activations in flight, messages between stages"
EXAMPLE = "tracekit simulate pipeline --schedule 1f1b --stages 4 --micro-batches 8"

_BAR_KINDS = {"F": "forward", "B": "backward_input", "W": "backward_weight", "BW": "backward"}
#: Beyond these an experiment would no longer finish in seconds, or its picture could not be read.
_MOST_PIECES, _MOST_MOMENTS, _LONGEST = 8192, 120, 1e12


@dataclass(frozen=True)
class Arguments:
    """What ``tracekit simulate pipeline`` can be told."""

    schedule: str = field(default="1f1b", metadata={"help": "Schedule that is shown step by step.", "choices": estimate.SCHEDULES})
    stages: int = field(default=4, metadata={"help": "Pipeline stages p: ranks along axis pp."})
    micro_batches: int = field(default=8, metadata={"help": "Micro-batches m a step."})
    virtual_stages: int = field(default=2, metadata={"help": "Chunks v a rank, for interleaved_1f1b."})
    forward: float = field(default=1.0, metadata={"help": "Time F of one micro-batch in one rank's layers: forward."})
    backward_input: float = field(default=1.0, metadata={"help": "Time B: backward for the input."})
    backward_weight: float = field(default=1.0, metadata={"help": "Time W: backward for the weights."})
    sequence: int = field(default=8, metadata={"help": "Tokens s of a sequence."})
    micro_batch_size: int = field(default=1, metadata={"help": "Sequences b of a micro-batch."})
    hidden: int = field(default=16, metadata={"help": "Hidden size h."})
    element_bytes: int = field(default=2, metadata={"help": "Bytes of one element of an activation under way."})
    rank: int = field(default=0, metadata={"help": "Rank whose sends and receives are listed."})
    seed: int = field(default=0, metadata={"help": "Seed of weights and inputs."})


@dataclass(frozen=True)
class _Simulated:
    """One schedule with its timeline, and what it takes to ask the closed forms about it."""

    schedule: str
    p: int
    m: int
    v: int
    times: tuple[Fraction, Fraction, Fraction]
    timeline: Timeline

    @property
    def bubble(self) -> Fraction:
        return self.timeline.wall - self.timeline.busy(0)


def run(arguments: Arguments) -> Experiment:
    """Simulate every schedule that can run, and train one step by the chosen one. Raises ``UsageError`` on arguments that make no sense."""
    times = _checked(arguments)
    simulated, refused = [], []
    for schedule in estimate.SCHEDULES:
        try:
            simulated.append(_simulate(schedule, arguments, times))
        except UsageError as problem:
            if schedule == arguments.schedule:
                raise
            refused.append(f"{schedule} is left out: {problem.problem}.")
    simulated.sort(key=lambda one: one.schedule != arguments.schedule)
    chosen = simulated[0]
    tokens = arguments.sequence * arguments.micro_batch_size
    model = random_model(chosen.p * chosen.v, chosen.m, tokens, arguments.hidden, arguments.seed)
    numbers = PipelineRun(model, chosen.timeline, arguments.element_bytes, _MOST_MOMENTS)
    if not numbers.moments:
        refused.append(f"The picture step by step is left out: more than {_MOST_MOMENTS} moments. Take fewer stages or micro-batches.")
    size = estimate.boundary_bytes(arguments.sequence, arguments.micro_batch_size, arguments.hidden, arguments.element_bytes)
    checks = [check for one in simulated for check in _time_checks(one)]
    checks += [*_message_checks(chosen, numbers, size), *_number_checks(numbers)]
    return Experiment(
        name="pipeline",
        title=TITLE,
        about="Stages hold consecutive layers and hand activations forward, gradients back; a stage that waits is in the bubble. "
        "Every piece of work starts as soon as the schedule's order and its inputs allow; messages take no time.",
        arguments=[(f.name, getattr(arguments, f.name)) for f in fields(arguments)],
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
    bounds.at_least(1, a, "sequence", "micro_batch_size", "hidden", "virtual_stages")
    bounds.at_least(0, a, "seed")
    bounds.element_bytes(a)
    for name in ("forward", "backward_input", "backward_weight"):
        value = getattr(a, name)
        if not 0 <= value <= _LONGEST:
            raise UsageError(f"{bounds.words(name)} takes {value}", f"give a time from 0 to {_LONGEST:g}, in any unit")
    if a.forward + a.backward_input + a.backward_weight == 0:
        raise UsageError("forward, backward input and backward weight all take no time", "give at least one of them a time")
    chunks = a.virtual_stages if a.schedule == "interleaved_1f1b" else 1
    estimate.check_schedule(a.schedule, a.stages, a.micro_batches, chunks)
    if not 0 <= a.rank < a.stages:
        raise UsageError(f"there is no rank {a.rank} among {a.stages} stages", f"give 0 to {a.stages - 1}")
    bounds.within(a.stages * a.micro_batches * a.virtual_stages, _MOST_PIECES, "forwards of chunks", "take fewer stages or micro-batches")
    activations = a.stages * chunks * a.micro_batches * a.sequence * a.micro_batch_size * a.hidden
    bounds.within(activations, bounds.MOST_ELEMENTS, "elements of activations", "take a smaller hidden size or sequence")
    weights = a.stages * chunks * a.hidden**2
    bounds.within(weights, bounds.MOST_ELEMENTS, "elements of weights", "take a smaller hidden size")
    bounds.within(activations * a.hidden, bounds.MOST_MULTIPLICATIONS, "multiplications a pass", "take a smaller hidden size or sequence")
    return Fraction(str(a.forward)), Fraction(str(a.backward_input)), Fraction(str(a.backward_weight))


def _simulate(schedule: str, arguments: Arguments, times: tuple[Fraction, Fraction, Fraction]) -> _Simulated:
    p, m = arguments.stages, arguments.micro_batches
    v = arguments.virtual_stages if schedule == "interleaved_1f1b" else 1
    return _Simulated(schedule, p, m, v, times, simulate(schedule, p, m, v, *times))


def _time_checks(one: _Simulated) -> list[Check]:
    name, where = one.schedule, (one.schedule, one.p, one.m)
    ideal = estimate.ideal_time(one.m, *one.times)
    bubble, wall, v = one.bubble, one.timeline.wall, one.v
    checks = [
        Check(f"{name}: bubble", bubble, estimate.bubble_time(*where, *one.times, v), "time", _BUBBLES[name]),
        Check(f"{name}: bubble ratio", bubble / ideal, estimate.bubble_ratio(*where, *one.times, v), "", "bubble / m (F+B+W)"),
        Check(f"{name}: bubble share", bubble / wall, estimate.bubble_share(*where, *one.times, v), "", "bubble / wall"),
    ]
    span = estimate.span_bubble_time(*where, *one.times, one.v)
    if name.startswith("zb_") and span is not None:
        counted = max(one.timeline.span(rank) for rank in range(one.p)) - ideal
        checks.append(Check(f"{name}: bubble between a stage's own first and last work", counted, span, "time", _SPANS[name]))
    counts = estimate.in_flight(*where, v)
    for rank in range(one.p):
        held = one.timeline.in_flight(rank, "input")
        checks.append(Check(f"{name}: in flight on stage {rank}", held, counts[rank], "chunks", _IN_FLIGHT[name]))
    counts = estimate.in_flight_until_weight(*where, v)
    for rank in range(one.p) if name.startswith("zb_") else ():
        held = one.timeline.in_flight(rank, "weight")
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
    ideal = estimate.ideal_time(chosen.m, *chosen.times)
    return (
        f"{chosen.schedule}, {chosen.p} stages, {chosen.m} micro-batches: bubble {float(chosen.bubble):g} beside {float(ideal):g} of work, "
        f"ratio {float(chosen.bubble / ideal):.4g}, share of the wall time {float(chosen.bubble / chosen.timeline.wall):.4g}."
    )


def _stage_table(chosen: _Simulated, numbers: PipelineRun) -> Table:
    line = chosen.timeline
    ranks = range(chosen.p)
    sources = [message.source for _, message in numbers.network.messages]
    frame = pd.DataFrame(
        {
            "stage": list(ranks),
            "busy": [float(line.busy(rank)) for rank in ranks],
            "bubble": [float(line.wall - line.busy(rank)) for rank in ranks],
            "in_flight": [line.in_flight(rank, "input") for rank in ranks],
            "until_weight": [line.in_flight(rank, "weight") for rank in ranks],
            "messages": [sources.count(rank) for rank in ranks],
            "sent_bytes": [int(numbers.network.sent_bytes[rank]) for rank in ranks],
        }
    )
    headings = {
        "stage": "stage",
        "busy": "busy [time]",
        "bubble": "bubble [time]",
        "in_flight": "in flight until B [chunks]",
        "until_weight": "in flight until W [chunks]",
        "messages": "messages sent",
        "sent_bytes": "sent [bytes]",
    }
    note = "A chunk is all layers of a rank, or 1/v of them with interleaving, for one micro-batch."
    return Table(f"Stages of {chosen.schedule}", frame, headings, note, preview=chosen.p)


def _schedule_table(simulated: Sequence[_Simulated]) -> Table:
    rows = []
    for one in simulated:
        ideal = estimate.ideal_time(one.m, *one.times)
        rows.append(
            {
                "schedule": one.schedule,
                "wall": float(one.timeline.wall),
                "bubble": float(one.bubble),
                "ratio": float(one.bubble / ideal),
                "share": float(one.bubble / one.timeline.wall),
                "in_flight": max(one.timeline.in_flight(rank, "weight") for rank in range(one.p)) / one.v,
                "messages": sum(estimate.messages_sent(one.schedule, one.p, one.m, one.v)),
            }
        )
    headings = {
        "schedule": "schedule",
        "wall": "wall [time]",
        "bubble": "bubble [time]",
        "ratio": "bubble / ideal",
        "share": "bubble / wall",
        "in_flight": "most in flight on a rank [micro-batches x its layers]",
        "messages": "messages",
    }
    return Table("Schedules side by side", pd.DataFrame(rows), headings, preview=len(rows))


def _gantt(one: _Simulated) -> Gantt:
    lanes = [f"stage {rank}" for rank in range(one.p)]
    bars = [
        Bar(
            lanes[piece.rank],
            float(piece.start),
            float(piece.end),
            work_label(piece.work, one.p, one.p * one.v),
            _BAR_KINDS[piece.work.kind],
        )
        for piece in one.timeline.pieces
    ]
    note = f"Bubble {float(one.bubble):g} on every stage, {float(one.bubble / one.timeline.wall):.1%} of the wall time."
    return Gantt(f"{one.schedule}, p = {one.p}, m = {one.m}" + (f", v = {one.v}" if one.v > 1 else ""), lanes, bars, "time", note)
