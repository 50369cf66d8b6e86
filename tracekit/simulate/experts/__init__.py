"""Expert parallel on virtual ranks: router, capacity, dispatch, experts, combine, forward and backward, against one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tracekit.errors import UsageError
from tracekit.simulate.arguments import MOST_ELEMENTS, MOST_MULTIPLICATIONS, bytes_of_element, check, option, seed_of, values, within
from tracekit.simulate.experiment import Check, Experiment
from tracekit.simulate.experts.layer import ExpertsResult, Weights, one_rank
from tracekit.simulate.experts.load import (
    ExpertsProblem,
    asked_of,
    choices_table,
    exchange_table,
    expert_table,
    imbalance,
    loads_of,
    rank_table,
)
from tracekit.simulate.experts.ranks import COUNT_BYTES, Exchange, rows_out_of_place, run_ranks
from tracekit.simulate.experts.routing import DROPS, Routing, balance_loss, capacity_of, drop, route, sending_order
from tracekit.simulate.functions import Float, error, rounding
from tracekit.simulate.holdings import PicturedRanks

TITLE = "Expert parallel: tokens travel to their experts and back"
EXAMPLE = "tracekit simulate experts --ep 4 --experts 8 --top-k 2 --capacity-factor 1.25 --pad"

ROUTINGS = ("random", "skewed", "balanced")
#: Rows of the table of choices, and messages, that a reader can still look through.
_MOST_CHOICES = 10**5
#: How much a skewed router prefers the first experts: expert e loses this times log(1 + e).
_SKEW = 1.5


@dataclass(frozen=True)
class Arguments:
    """What ``tracekit simulate experts`` can be told."""

    ep: int = option(4, "Expert-parallel ranks EP.", least=1)
    experts: int = option(8, "Experts E.", least=1)
    top_k: int = option(2, "Experts k of a token.", least=1)
    tokens: int = option(16, "Tokens T of a rank.", least=1)
    hidden: int = option(8, "Hidden size h.", least=1)
    ffn: int = option(16, "Hidden size f of an expert.", least=1)
    routing: str = option("random", "A random router, one that prefers some experts, or perfect balance.", ROUTINGS)
    normalise: bool = option(True, "Make the weights of a token's experts add up to 1.")
    capacity_factor: float = option(1.25, "A rank sends an expert at most this times k T/E tokens, rounded up; 0: any number.")
    drop_by: str = option("position", "Beyond the capacity drop late tokens, or those the router wants least.", DROPS)
    pad: bool = option(False, "Fill every expert's buffer up to the capacity, so that all pieces are even.")
    element_bytes: int = bytes_of_element()
    seed: int = seed_of("weights and tokens")


def run(arguments: Arguments) -> Experiment:
    """Route, dispatch, run the experts, combine, and the same backward; held against one rank. Raises ``UsageError`` on bad arguments."""
    _refuse(arguments)
    problem = _problem(arguments)
    orders = [sending_order(routing, problem.capacity if arguments.pad else None) for routing in problem.routings]
    exchange = Exchange(PicturedRanks(arguments.ep, arguments.element_bytes), orders, arguments.pad)
    found = run_ranks(exchange, problem.weights, problem.routings, problem.xs, problem.dys)
    x, dy, routing = np.concatenate(problem.xs), np.concatenate(problem.dys), problem.whole_routing
    wanted = one_rank(problem.weights, routing, x, dy)
    everything = Routing(routing.probabilities, routing.experts, routing.weights, np.ones_like(routing.kept), routing.normalised)
    missed = error(found.y, one_rank(problem.weights, everything, x, dy).y)
    wrong = rows_out_of_place(orders, arguments.pad, problem.xs)
    checks = [*_result_checks(found, wanted, wrong, arguments), *_traffic_checks(exchange, problem, arguments)]
    dropped = int((~routing.kept).sum())
    if not dropped:
        checks.append(Check("largest error of y against no capacity", missed, 0.0, "", "nothing is dropped", checks[0].tolerance))
    return Experiment(
        name="experts",
        title=TITLE,
        about="A router picks k of E experts for every token. Experts lie on ranks: tokens travel there by all-to-all (dispatch), results "
        "travel back (combine); backward makes the same two journeys with gradients.",
        arguments=values(arguments),
        verdict=_verdict(problem, exchange, checks),
        tables=[
            expert_table(problem, arguments.pad),
            rank_table(problem, exchange, arguments.pad),
            exchange_table(exchange),
            choices_table(problem),
        ],
        moments=exchange.ranks.moments,
        checks=checks,
        calls=exchange.ranks.network.calls(0),
        notes=_notes(problem, dropped, missed),
    )


def _refuse(a: Arguments) -> None:
    check(a)
    if a.experts % a.ep:
        raise UsageError(f"{a.experts} experts do not divide by {a.ep} ranks", "an expert lies whole on one rank: choose a multiple")
    if a.top_k > a.experts:
        raise UsageError(f"a token cannot have {a.top_k} of {a.experts} experts", "choose a smaller top k")
    if not 0 <= a.capacity_factor <= a.experts:
        raise UsageError(f"capacity factor {a.capacity_factor}", f"give a number up to {a.experts}, the experts, or 0 for no limit")
    if a.pad and a.capacity_factor == 0:
        raise UsageError("buffers cannot be filled up to a capacity that has no limit", "give a capacity factor, or leave out --pad")
    if a.routing == "balanced" and (a.tokens * a.top_k) % a.experts:
        raise UsageError(
            f"{a.tokens} tokens with {a.top_k} experts each do not spread evenly over {a.experts} experts",
            "choose tokens so that tokens x top k divides by the experts",
        )
    smaller = "take fewer tokens, experts or ranks, or smaller sizes"
    rows = a.ep * a.tokens * a.top_k
    within(rows, _MOST_CHOICES, "choices of experts", smaller)
    if a.pad:  # at least one row for every expert from every rank
        rows = max(rows, a.ep * a.experts) + math.ceil(a.capacity_factor * rows)
    within(a.ep * a.ep * a.experts, _MOST_CHOICES, "pieces of an all-to-all", smaller)
    arrays = max(rows * max(a.hidden, a.ffn), a.ep * a.tokens * max(a.experts, a.hidden), a.experts * a.hidden * max(a.ffn, 1))
    within(arrays, MOST_ELEMENTS, "elements of one array", smaller)
    work = rows * a.hidden * a.ffn + a.ep * a.tokens * a.experts * a.hidden
    within(work, MOST_MULTIPLICATIONS, "multiplications a pass", smaller)


def _problem(a: Arguments) -> ExpertsProblem:
    draw = np.random.default_rng(a.seed).standard_normal
    first, second = draw((a.experts, a.hidden, a.ffn)) / np.sqrt(a.hidden), draw((a.experts, a.ffn, a.hidden)) / np.sqrt(a.ffn)
    weights = Weights(draw((a.hidden, a.experts)) / np.sqrt(a.hidden), first, second)
    xs, dys = [draw((a.tokens, a.hidden)) for _ in range(a.ep)], [draw((a.tokens, a.hidden)) for _ in range(a.ep)]
    capacity = capacity_of(Fraction(str(a.capacity_factor)), a.tokens, a.top_k, a.experts) if a.capacity_factor else None
    routings = [route(x @ weights.router + _bias(a), a.top_k, a.normalise) for x in xs]
    if capacity is not None:
        routings = [drop(routing, capacity, a.drop_by) for routing in routings]
    return ExpertsProblem(weights, xs, dys, routings, capacity)


def _bias(a: Arguments) -> Float:
    """What is added to the logits (T, E) to make a router skewed or balanced."""
    bias = np.zeros((a.tokens, a.experts))
    if a.routing == "skewed":
        bias -= _SKEW * np.log1p(np.arange(a.experts))
    if a.routing == "balanced":
        wanted = (np.arange(a.tokens)[:, None] * a.top_k + np.arange(a.top_k)) % a.experts
        np.put_along_axis(bias, wanted, 1000.0, axis=1)
    return bias


def _result_checks(found: ExpertsResult, wanted: ExpertsResult, wrong: int, a: Arguments) -> list[Check]:
    terms = max(a.hidden, a.ffn, a.ep * a.tokens) * a.top_k
    names = {"y": "y", "dx": "dx", "drouter": "the router's gradient", "dfirst": "the gradient of W1", "dsecond": "the gradient of W2"}
    checks = []
    for name, words in names.items():
        target: Float = getattr(wanted, name)
        off = error(getattr(found, name), target)
        checks.append(Check(f"largest error of {words}", off, 0.0, "", "all experts on one rank", rounding(terms, target)))
    return [*checks, Check("rows out of place after dispatch and combine", wrong, 0, "rows", "combine undoes dispatch")]


def _expected_sent(problem: ExpertsProblem, a: Arguments) -> dict[str, list[int]]:
    """Bytes every rank sends in every all-to-all, from the choices alone."""
    ranks, width = range(a.ep), a.hidden * a.element_bytes
    if a.pad:
        assert problem.capacity is not None
        even = [(a.ep - 1) * (a.experts // a.ep) * problem.capacity * width] * a.ep
        return dict.fromkeys(("dispatch", "combine", "gradient of combine", "gradient of dispatch"), even)
    owners = problem.owners
    away = [int((owners[rank] != rank).sum()) * width for rank in ranks]
    guests = [sum(int((owners[other] == rank).sum()) for other in ranks if other != rank) * width for rank in ranks]
    counts = [(a.ep - 1) * (a.experts // a.ep) * COUNT_BYTES] * a.ep
    return {"counts": counts, "dispatch": away, "combine": guests, "gradient of combine": away, "gradient of dispatch": guests}


def _traffic_checks(exchange: Exchange, problem: ExpertsProblem, a: Arguments) -> list[Check]:
    formula = "kept choices whose expert lies on another rank x h e; combine: those of others with an expert here"
    if a.pad:
        formula = "(EP-1) E/EP C h e with C the capacity: every piece has the same size"
    checks = []
    for name, sizes in _expected_sent(problem, a).items():
        words = f"(EP-1) E/EP counts of {COUNT_BYTES} bytes" if name == "counts" else formula
        checks += [
            Check(f"{name}: bytes sent by rank {rank}", exchange.sent[name][rank], size, "bytes", words) for rank, size in enumerate(sizes)
        ]
    kept = sum(int(routing.kept.sum()) for routing in problem.routings)
    if a.routing == "balanced" and not a.pad and kept == a.ep * a.tokens * a.top_k:
        even = Fraction(a.top_k * a.tokens * a.hidden * a.element_bytes * (a.ep - 1), a.ep)
        for rank in range(a.ep):
            moved = sum(exchange.sent[name][rank] for name in exchange.sent if name != "counts")
            checks.append(Check(f"rank {rank}: bytes of all four all-to-alls", moved, 4 * even, "bytes", "4 k T h e F(EP), balanced"))
    calls = len(exchange.sent)
    checks.append(Check("logical steps", exchange.ranks.network.steps, calls * (a.ep - 1), "steps", "EP-1 an all-to-all, pairwise"))
    asked = a.ep * a.tokens * a.top_k
    dropped = sum(int((~routing.kept).sum()) for routing in problem.routings)
    over = sum(max(0, int(n) - problem.capacity) for one in problem.routings for n in asked_of(one)) if problem.capacity is not None else 0
    checks.append(Check("dropped choices", dropped, over, "choices", "sum over ranks and experts of what is asked for beyond the capacity"))
    arrived = sum(int(order.counts.sum()) for order in exchange.orders)
    return [*checks, Check("choices that arrived and that were dropped", arrived + dropped, asked, "choices", "EP T k")]


def _verdict(problem: ExpertsProblem, exchange: Exchange, checks: Sequence[Check]) -> str:
    experts, ranks = loads_of(problem)
    dropped = sum(int((~routing.kept).sum()) for routing in problem.routings)
    worst = max(float(figure.counted) for figure in checks if figure.quantity.startswith("largest error"))
    return (
        f"{len(experts)} experts on {len(ranks)} ranks: the busiest expert has {float(imbalance(experts)):.4g} times the mean load, the "
        f"busiest rank {float(imbalance(ranks)):.4g} times; {dropped} of {dropped + sum(experts)} choices are dropped; a rank sends up to "
        f"{int(exchange.ranks.network.sent_bytes.max())} bytes; largest error {worst:.2g}."
    )


def _notes(problem: ExpertsProblem, dropped: int, missed: float) -> list[str]:
    lost = sum(int((~routing.kept.any(axis=1)).sum()) for routing in problem.routings)
    notes = [
        f"Balance loss E sum(f P) = {balance_loss(problem.routings):.4g}; 1 is even (arXiv:2101.03961).",
        "The router is on every rank; its gradient would be all-reduced with the other weights of data parallel and is not counted here.",
    ]
    if dropped:
        notes.append(
            f"What is dropped changes y by up to {missed:.3g}; {lost} tokens lose all their experts and pass by on the residual path alone."
        )
    return notes
