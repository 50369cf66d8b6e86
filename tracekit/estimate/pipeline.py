"""Pipeline schedules in closed form: bubble, wall time, activations in flight, messages between stages.

Symbols, the same in every function:

    p        pipeline stages: ranks along axis pp
    m        micro-batches a step
    v        virtual stages (model chunks) a rank; 1 except for interleaved_1f1b
    f, b, w  time of one micro-batch in one rank's layers: forward, backward for the input, backward for the weights; any one unit

gpipe, 1f1b and interleaved_1f1b run the two halves of the backward as one piece of b + w; zb_h1 and zb_h2 (zero bubble) run them apart.
Messages take no time here. All ranks compute m (f + b + w); what is left of the wall time is the bubble:

    schedule           bubble                                     activations in flight on stage i = 0 .. p-1
    gpipe              (p-1) (f+b+w)                              m
    1f1b               (p-1) (f+b+w)                              min(m, p-i)
    interleaved_1f1b   (p-1) (f+b+w) / v                          min(v m, 2 (p-i-1) + (v-1) p + 1) chunks, each 1/v of a stage
    zb_h1              (p-1) (f+b-w)       published, w least     min(m, p-i) until b, min(m, p) until w
                       (p-1) (f+b) - (min(m,p)-1) min(f,b,w)      the same for any times and m
    zb_h2              (p-1) (f+b-2w)      published, see below   min(m, 2(p-i)-1) until b, 2p-1 until w
                       (p-1) max(f, f+b-2w, b-w, b-f)             wall, m >= 2p-1

Two figures are made of a bubble, and papers mean either: its **ratio** to the ideal time m (f+b+w), which is (p-1)/m for 1F1B, and its
**share** of the wall time, (p-1)/(m+p-1). Both have the name in full here.

The published bubble of zb_h2 leaves out that stage i cannot start before i f: it is the longest time from a stage's first to its last piece
of work, less the work (``span_bubble_time``). One optimizer step after another can hide the rest only where no stage waits for all others.

Sources: GPipe, arXiv:1811.06965; 1F1B and its interleaved form, arXiv:2104.04473 (PTD-P, section 2.2); zero bubble, arXiv:2401.10241
(section 2.3 and table 1). The lines without a publication were derived here and hold exactly in ``tracekit.simulate.pipeline``.
"""

from __future__ import annotations

import math
from fractions import Fraction

from tracekit.errors import UsageError

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2")
#: Schedules whose messages are known, and for which there is no closed form of the bubble: chunks as a V, two a rank (arXiv:2405.15362).
WITHOUT_BUBBLE = ("zbv",)

Time = int | float | Fraction
#: More stages than any job has ranks: beyond, a list with one entry a stage only fills memory.
MOST_STAGES = 10**6


def check_schedule(schedule: str, p: int, m: int, v: int = 1) -> None:
    """Refuse what the schedule cannot run: raises ``UsageError`` that says why and what to do."""
    if schedule not in SCHEDULES and schedule not in WITHOUT_BUBBLE:
        raise UsageError(f"there is no schedule {schedule!r}", f"choose one of {', '.join(SCHEDULES)}")
    for name, value in (("stages", p), ("micro-batches", m), ("virtual stages", v)):
        if value < 1:
            raise UsageError(f"a pipeline with {value} {name}", f"give at least 1 of the {name}")
    if p > MOST_STAGES:
        raise UsageError(f"a pipeline with {p} stages", f"give at most {MOST_STAGES}")
    if schedule == "zbv" and v != 2:
        raise UsageError(f"zbv has two chunks a rank, not {v}", "give 2 virtual stages")
    if v > 1 and schedule not in ("interleaved_1f1b", "zbv"):
        raise UsageError(f"{schedule} has one chunk a rank, not {v} virtual stages", "use interleaved_1f1b or 1 virtual stage")
    if schedule == "interleaved_1f1b" and m % p:
        raise UsageError(
            f"interleaved_1f1b runs its micro-batches in rounds of {p}, one a stage, and {m} is no multiple of {p}",
            f"use {p}, {2 * p}, {3 * p}, ... micro-batches or another schedule",
        )
    if schedule == "zb_h2" and m < 2 * p - 1:
        raise UsageError(
            f"zb_h2 fills {p} stages with {2 * p - 1} micro-batches before its steady state, and there are {m}",
            f"use at least {2 * p - 1} micro-batches, or zb_h1",
        )


def wall_bubble_share(p: int, m: int, v: int = 1) -> Fraction:
    """Bubble over wall time of the same schedules, (p-1)/(v m + p-1) (arXiv:2104.04473, section 2.2)."""
    return Fraction(p - 1, v * m + p - 1)


def ideal_time(m: int, f: Time, b: Time, w: Time) -> Fraction:
    """Time one rank computes in a step, m (f + b + w), in the unit of the times."""
    return m * sum(_exact(f, b, w), Fraction(0))


def _exact(*times: Time) -> tuple[Fraction, ...]:
    """Times as fractions, without rounding; raises ``UsageError`` for what is no time."""
    for time in times:
        if not 0 <= time < math.inf:
            raise UsageError(f"a piece of work that takes {time}", "give times of 0 or more")
    return tuple(Fraction(time) for time in times)


def bubble_time(schedule: str, p: int, m: int, f: Time, b: Time, w: Time, v: int = 1) -> Fraction:
    """Time a rank waits between the start of the step and its end on all ranks, in the unit of the times; the same for every rank.

    Exact for equal stages and messages that take no time; the formulas stand at the head of this file. Raises ``UsageError`` where the
    schedule cannot run, or a time is negative.
    """
    check_schedule(schedule, p, m, v)
    if schedule in WITHOUT_BUBBLE:
        raise UsageError(f"there is no closed form of the bubble of {schedule}", f"choose one of {', '.join(SCHEDULES)}")
    forward, backward, weight = _exact(f, b, w)
    if schedule == "zb_h1":
        return (p - 1) * (forward + backward) - (min(m, p) - 1) * min(forward, backward, weight)
    if schedule == "zb_h2":
        return (p - 1) * max(forward, forward + backward - 2 * weight, backward - weight, backward - forward)
    return (p - 1) * (forward + backward + weight) / v


def span_bubble_time(schedule: str, p: int, m: int, f: Time, b: Time, w: Time, v: int = 1) -> Fraction | None:
    """The largest bubble between a stage's own first and last piece of work, in the unit of the times, as the zero-bubble paper counts it.

    zb_h1 (p-1)(f+b-w) and zb_h2 (p-1)(f+b-2w), not below 0, where w <= f and zb_h1 has at least p micro-batches; None elsewhere: no
    closed form is known. The other schedules begin and end with stage 0, so that theirs is ``bubble_time``.
    """
    whole = bubble_time(schedule, p, m, f, b, w, v)
    if not schedule.startswith("zb_"):
        return whole
    if w > f or m < p:
        return None
    weights = 1 if schedule == "zb_h1" else 2
    return max(Fraction(0), (p - 1) * (Fraction(f) + Fraction(b) - weights * Fraction(w)))


def wall_time(schedule: str, p: int, m: int, f: Time, b: Time, w: Time, v: int = 1) -> Fraction:
    """Time of a step from the first forward to the last backward, in the unit of the times: ideal time + bubble."""
    return ideal_time(m, f, b, w) + bubble_time(schedule, p, m, f, b, w, v)


def bubble_ratio(schedule: str, p: int, m: int, f: Time, b: Time, w: Time, v: int = 1) -> Fraction:
    """Bubble over ideal time, ``bubble_time / ideal_time``; 0 where there is no work at all."""
    ideal = ideal_time(m, f, b, w)
    return bubble_time(schedule, p, m, f, b, w, v) / ideal if ideal else Fraction(0)


def bubble_share(schedule: str, p: int, m: int, f: Time, b: Time, w: Time, v: int = 1) -> Fraction:
    """Bubble over wall time, ``bubble_time / wall_time``; 0 where there is no work at all."""
    wall = wall_time(schedule, p, m, f, b, w, v)
    return bubble_time(schedule, p, m, f, b, w, v) / wall if wall else Fraction(0)


def in_flight(schedule: str, p: int, m: int, v: int = 1) -> tuple[int, ...]:
    """Most activations that stage i = 0 .. p-1 holds at once: micro-batches between the start of their forward and the end of b.

    For interleaved_1f1b the unit is a chunk, 1/v of a stage's layers for one micro-batch. Weight gradients that wait (zb_*) keep a part of
    the activations longer: see ``in_flight_until_weight``.
    """
    check_schedule(schedule, p, m, v)
    if schedule == "gpipe":
        return (m,) * p
    if schedule == "interleaved_1f1b":
        return tuple(min(v * m, 2 * (p - i - 1) + (v - 1) * p + 1) for i in range(p))
    if schedule == "zbv":  # in chunks; an upper bound
        return (min(2 * m, 2 * p),) * p
    if schedule == "zb_h2":
        return tuple(min(m, 2 * (p - i) - 1) for i in range(p))
    return tuple(min(m, p - i) for i in range(p))


def in_flight_until_weight(schedule: str, p: int, m: int, v: int = 1) -> tuple[int, ...]:
    """As ``in_flight``, but an activation counts until its weight gradient is done: zb_h1 min(m, p), zb_h2 2p-1, on every stage.

    The other schedules compute both gradients at once: the same as ``in_flight``.
    """
    counts = in_flight(schedule, p, m, v)
    if schedule == "zb_h1":
        return (min(m, p),) * p
    if schedule == "zb_h2":
        return (2 * p - 1,) * p
    return counts


def boundary_bytes(s: int, b: int, h: int, element_bytes: int, t: int = 1, c: int = 1) -> int:
    """Bytes of one message between stages: the activation of one micro-batch, s b h elements, or its gradient.

    ``s`` sequence, ``b`` sequences a micro-batch, ``h`` hidden size; ``t`` > 1 with sequence parallel over t tensor-parallel ranks (plain
    tensor parallel holds the whole activation on each: t = 1), ``c`` context-parallel ranks. Shares are rounded up to whole tokens.
    """
    return -(-s // (t * c)) * b * h * element_bytes


def messages_sent(schedule: str, p: int, m: int, v: int = 1) -> tuple[int, ...]:
    """Messages that stage i = 0 .. p-1 sends in a step: activations to the next stage, gradients to the one before.

    p v chunks in a row have p v - 1 boundaries with m messages each way, in all 2 m (p v - 1); with interleaving the last rank hands on to
    the first. Chunks of one rank (p = 1) hand on without a message; as a V (zbv) the innermost rank hands over to itself, 2 m (2 p - 2).
    """
    check_schedule(schedule, p, m, v)
    if p == 1:
        return (0,)
    if schedule == "zbv":
        return tuple(2 * m * ((i > 0) + (i < p - 1)) for i in range(p))
    counts = [2 * m * v] * p
    counts[0] -= m  # the first chunk has nobody to send a gradient to
    counts[-1] -= m  # the last chunk has nobody to send an activation to
    return tuple(counts)
