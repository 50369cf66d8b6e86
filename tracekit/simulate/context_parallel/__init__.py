"""Context parallel on virtual ranks: four algorithms of attention over cut sequences, forward and backward, against one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tracekit.errors import UsageError
from tracekit.findings import Table
from tracekit.simulate.arguments import MOST_ELEMENTS, bytes_of_element, check, option, seed_of, values, within
from tracekit.simulate.context_parallel.algorithms import ALGORITHMS
from tracekit.simulate.context_parallel.formulas import FORMULAS, Sizes, expected_imbalance, expected_pairs, expected_sent
from tracekit.simulate.context_parallel.problem import LAYOUTS, AttentionProblem, AttentionResults, Machine, one_rank, token_places
from tracekit.simulate.experiment import Check, Experiment
from tracekit.simulate.functions import error, rounding
from tracekit.simulate.holdings import PicturedRanks
from tracekit.simulate.tables import Columns, table

TITLE = "Context parallel: attention over a sequence cut across ranks"
EXAMPLE = "tracekit simulate context-parallel --algorithm ring --cp 4 --layout zigzag"

_RESULTS = ("out", "dq", "dk", "dv")
#: Four algorithms with two layouts, forward and backward each, stay within seconds.
_MOST_SCORES, _MOST_MULTIPLICATIONS = 2 * 10**6, 3 * 10**7


@dataclass(frozen=True)
class Arguments:
    """What ``tracekit simulate context-parallel`` can be told."""

    algorithm: str = option("ring", "Algorithm that is shown step by step.", tuple(ALGORITHMS))
    cp: int = option(4, "Context-parallel ranks c.", least=1)
    layout: str = option("contiguous", "Tokens of a rank: one part of the sequence, or an early and a late one (zigzag).", LAYOUTS)
    causal: bool = option(True, "Let a token see only itself and those before it.")
    sequence: int = option(16, "Tokens s of a sequence.", least=1)
    batch: int = option(1, "Sequences b.", least=1)
    heads: int = option(4, "Heads a of queries.", least=1)
    kv_heads: int = option(0, "Heads of keys and values; 0: as many as heads.", least=0)
    head_size: int = option(8, "Elements d of a head.", least=1)
    keep_gathered: bool = option(False, "all_gather keeps k and v of all tokens for backward.")
    element_bytes: int = bytes_of_element()
    seed: int = seed_of("q, k, v and the gradient of the output")


@dataclass(frozen=True)
class _Done:
    algorithm: str
    layout: str
    machine: Machine
    errors: dict[str, float]
    allowed: float

    @property
    def name(self) -> str:
        return f"{self.algorithm}, {self.layout}"


def run(arguments: Arguments) -> Experiment:
    """Run every algorithm with every layout that fits, and hold it against one rank. Raises ``UsageError`` on bad arguments."""
    sizes = _checked(arguments)
    layouts = [name for name in LAYOUTS if _misfit(name, sizes) is None]
    algorithms = [name for name in ALGORITHMS if _misfit(name, sizes) is None]
    left_out = [f"{name} is left out: {_misfit(name, sizes)}." for name in (*LAYOUTS, *ALGORITHMS) if _misfit(name, sizes)]
    done = [one for layout in layouts for one in _run_layout(layout, algorithms, sizes, arguments.seed)]
    chosen = next(one for one in done if (one.algorithm, one.layout) == (arguments.algorithm, arguments.layout))
    return Experiment(
        name="context-parallel",
        title=TITLE,
        about="Each rank has the queries, keys and values of its part of the sequence; attention needs every query to meet every key that "
        "it may see. Forward and backward are written by hand.",
        arguments=values(arguments),
        verdict=_verdict(chosen),
        tables=[_algorithms_table(done, arguments.layout), _load_table(done, arguments.algorithm), _rounds_table(chosen)],
        moments=chosen.machine.ranks.moments,
        checks=[figure for one in done for figure in _checks(one, sizes)],
        calls=chosen.machine.ranks.network.calls(0),
        notes=[
            "Load is counted in scores: one query-key pair of one head that the mask lets through. A block that the mask hides costs none.",
            "In the ring a rank's own share of its dk and dv stays at home, so that the others' are home after c-1 hops.",
            *left_out,
        ],
    )


def _checked(a: Arguments) -> Sizes:
    check(a)
    sizes = Sizes(a.cp, a.sequence, a.batch, a.heads, a.kv_heads or a.heads, a.head_size, a.element_bytes, a.causal, a.keep_gathered)
    if sizes.a % sizes.g:
        raise UsageError(f"{sizes.g} heads of keys and values do not divide {sizes.a} heads", "choose a divisor of the heads")
    scores, elements = sizes.s**2 * sizes.b * sizes.a, sizes.s * sizes.b * sizes.a * sizes.d
    within(scores, _MOST_SCORES, "scores", "take a shorter sequence or fewer heads")
    within(elements, MOST_ELEMENTS, "elements of one array", "take a shorter sequence or smaller heads")
    within(scores * sizes.d, _MOST_MULTIPLICATIONS, "multiplications a pass", "take a shorter sequence or smaller heads")
    for name in ("contiguous", a.layout, a.algorithm):
        misfit = _misfit(name, sizes)
        if misfit is not None:
            raise UsageError(f"{a.cp} ranks cannot run {a.algorithm}: {misfit}", "choose sizes that divide, or another algorithm or layout")
    return sizes


def _misfit(name: str, sizes: Sizes) -> str | None:
    """Why an algorithm or layout cannot run with these sizes; None where it can."""
    if name == "contiguous" and sizes.s % sizes.c:
        return f"{sizes.s} tokens do not divide by {sizes.c} ranks"
    if name == "zigzag" and sizes.s % (2 * sizes.c):
        return f"zigzag cuts {sizes.s} tokens into {2 * sizes.c} parts, two a rank, and they do not divide"
    if name == "ulysses" and sizes.a % sizes.c:
        return f"ulysses gives every rank whole heads, and {sizes.a} heads do not divide by {sizes.c}"
    return None


def _run_layout(layout: str, algorithms: Sequence[str], sizes: Sizes, seed: int) -> list[_Done]:
    draw = np.random.default_rng(seed).standard_normal
    wide, narrow = (sizes.s, sizes.b, sizes.a, sizes.d), (sizes.s, sizes.b, sizes.g, sizes.d)
    q, k, v, dout = draw(wide), draw(narrow), draw(narrow), draw(wide)
    problem = AttentionProblem(q, k, v, dout, token_places(layout, sizes.s, sizes.c), sizes.causal)
    wanted = one_rank(problem)
    allowed = max(rounding(sizes.s * sizes.d, array) for array in wanted)
    done = []
    for name in algorithms:
        machine = Machine(problem, PicturedRanks(sizes.c, sizes.element_bytes), keep_gathered=sizes.keep_gathered)
        found = ALGORITHMS[name](machine)
        done.append(_Done(name, layout, machine, _errors(found, wanted), allowed))
    return done


def _errors(found: AttentionResults, wanted: AttentionResults) -> dict[str, float]:
    return {name: error(getattr(found, name), getattr(wanted, name)) for name in _RESULTS}


def _checks(one: _Done, sizes: Sizes) -> list[Check]:
    network, machine, expected = one.machine.ranks.network, one.machine, expected_sent(one.algorithm, sizes)
    checks = [
        Check(f"{one.name}: largest error of {name}", found, 0.0, "", "full attention on one rank", one.allowed)
        for name, found in one.errors.items()
    ]
    formula = FORMULAS[one.algorithm]
    for rank in range(sizes.c):
        forward = machine.forward_bytes[rank]
        backward = int(network.sent_bytes[rank]) - forward
        checks += [
            Check(f"{one.name}: bytes sent in forward by rank {rank}", forward, expected.forward, "bytes", formula),
            Check(f"{one.name}: bytes sent in backward by rank {rank}", backward, expected.backward, "bytes", formula),
            Check(
                f"{one.name}: scores of rank {rank}",
                machine.pairs[rank],
                expected_pairs(one.algorithm, one.layout, rank, sizes),
                "scores",
                "sum over its queries of the keys they see",
            ),
        ]
    checks.append(
        Check(
            f"{one.name}: busiest rank over the mean",
            _imbalance(machine),
            expected_imbalance(one.algorithm, one.layout, sizes),
            "",
            "(2 s - n + 1)/(s + 1), n = s/c, for a causal mask over contiguous tokens, else 1",
        )
    )
    steps = "c-1 a collective and for going round once, an all-reduce 2(c-1)"
    backward_steps = network.steps - machine.forward_steps
    checks.append(Check(f"{one.name}: steps in forward", machine.forward_steps, expected.forward_steps, "steps", steps))
    checks.append(Check(f"{one.name}: steps in backward", backward_steps, expected.backward_steps, "steps", steps))
    if one.algorithm == "ring" and sizes.c > 1:
        hop = 2 * sizes.tokens * sizes.b * sizes.g * sizes.d * sizes.element_bytes
        sent = {message.bytes for step, message in network.messages if step < machine.forward_steps}
        for quantity, size in (("smallest", min(sent)), ("largest", max(sent))):
            checks.append(Check(f"{one.name}: {quantity} message of a forward hop", size, hop, "bytes", "2 (s/c) b g d e"))
    return checks


def _imbalance(machine: Machine) -> Fraction:
    """Most scores of a rank over the mean."""
    return Fraction(max(machine.pairs) * len(machine.pairs), sum(machine.pairs))


def _verdict(chosen: _Done) -> str:
    network = chosen.machine.ranks.network
    return (
        f"{chosen.algorithm} over {chosen.machine.problem.ranks} ranks, {chosen.layout}: largest error {max(chosen.errors.values()):.2g}; "
        f"rank 0 sends {int(network.sent_bytes[0])} bytes in {network.steps} steps; "
        f"the busiest rank has {float(_imbalance(chosen.machine)):.4g} times the mean load."
    )


def _algorithms_table(done: Sequence[_Done], layout: str) -> Table:
    rows = [one for one in done if one.layout == layout]
    networks = [one.machine.ranks.network for one in rows]
    forward = [one.machine.forward_bytes[0] for one in rows]
    columns: Columns = {
        "algorithm": ("algorithm", [one.algorithm for one in rows]),
        **{name: (f"error of {name}", [one.errors[name] for one in rows]) for name in _RESULTS},
        "forward": ("sent in forward [bytes]", forward),
        "backward": ("sent in backward [bytes]", [int(n.sent_bytes[0]) - size for n, size in zip(networks, forward, strict=True)]),
        "steps": ("logical steps", [network.steps for network in networks]),
        "message": ("largest message [bytes]", [max((m.bytes for _, m in n.messages), default=0) for n in networks]),
        "held": ("most held by a rank [bytes]", [one.machine.ranks.most_held() for one in rows]),
    }
    note = "Bytes a rank sends are the same on every rank. Held: in the pictures step by step, scores and working memory of a kernel aside."
    return table(f"Algorithms, {layout} tokens", columns, note)


def _load_table(done: Sequence[_Done], algorithm: str) -> Table:
    rows = [(one, rank) for one in done if one.algorithm == algorithm for rank in range(len(one.machine.pairs))]
    shares = [one.machine.pairs[rank] * len(one.machine.pairs) / sum(one.machine.pairs) for one, rank in rows]
    columns: Columns = {
        "layout": ("layout", [one.layout for one, _ in rows]),
        "rank": ("rank", [rank for _, rank in rows]),
        "tokens": ("tokens", [_spans(one.machine.problem.places[rank].tolist()) for one, rank in rows]),
        "scores": ("scores in forward", [one.machine.pairs[rank] for one, rank in rows]),
        "of_mean": ("of the mean", shares),
    }
    return table(f"Load of {algorithm}, by layout", columns)


def _spans(places: Sequence[int]) -> str:
    """Places of tokens as intervals: ``0:2, 14:16``."""
    spans: list[list[int]] = []
    for place in places:
        if spans and spans[-1][1] == place:
            spans[-1][1] = place + 1
        else:
            spans.append([place, place + 1])
    return ", ".join(f"{begin}:{end}" for begin, end in spans)


def _rounds_table(chosen: _Done) -> Table:
    rounds = chosen.machine.rounds
    columns: Columns = {
        "round": ("round", range(1, len(rounds) + 1)),
        "least": ("least scores of a rank", [min(pairs) for pairs in rounds]),
        "most": ("most scores of a rank", [max(pairs) for pairs in rounds]),
        "mean": ("mean", [sum(pairs) / len(pairs) for pairs in rounds]),
    }
    note = "All ranks wait for the busiest one before the next round."
    return table(f"Rounds of {chosen.algorithm}, {chosen.layout}", columns, note)
