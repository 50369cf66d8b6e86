"""Tensor and sequence parallel on virtual ranks: linears, MLP, attention and a whole layer, forward and backward, against one rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from tracekit.errors import UsageError
from tracekit.findings import Table
from tracekit.simulate.arguments import MOST_ELEMENTS, MOST_MULTIPLICATIONS, bytes_of_element, check, option, seed_of, values, within
from tracekit.simulate.experiment import Check, Experiment
from tracekit.simulate.functions import Float, error, rounding
from tracekit.simulate.tables import Columns, table
from tracekit.simulate.tensor_parallel.layers import Block, Gradients, Norm, block_step, deviations, layer_step
from tracekit.simulate.tensor_parallel.linears import linear_step, run_column, run_row
from tracekit.simulate.tensor_parallel.ranks import Ranks, run_block, run_layer

TITLE = "Tensor parallel and sequence parallel: which rank holds and sends what, and that the results are the same"
EXAMPLE = "tracekit simulate tensor-parallel --tp 4 --part mlp --sequence-parallel"

PARTS = ("column", "row", "mlp", "attention", "layer")
MODES = ("tensor_parallel", "sequence_parallel")
LIBRARIES = ("dtensor", "megatron")
#: Full-size collectives of each part: (mode, kind) -> calls of s b h elements. Sums of small gradients (``_SMALL``) come on top.
_CALLS = {
    "column": {("tensor_parallel", "all_reduce"): 1, ("sequence_parallel", "all_gather"): 2, ("sequence_parallel", "reduce_scatter"): 1},
    "row": {("tensor_parallel", "all_reduce"): 1, ("sequence_parallel", "all_gather"): 1, ("sequence_parallel", "reduce_scatter"): 1},
    "mlp": {("tensor_parallel", "all_reduce"): 2, ("sequence_parallel", "all_gather"): 3, ("sequence_parallel", "reduce_scatter"): 2},
}
_CALLS["attention"] = _CALLS["mlp"]
_CALLS["layer"] = {key: 2 * count for key, count in _CALLS["mlp"].items()}
#: All-gathers of a column linear's input in backward, which keeping it saves.
_GATHERED_AGAIN = {"column": 1, "row": 0, "mlp": 1, "attention": 1, "layer": 2}
#: Vectors of h elements whose gradients sequence parallel adds up: row biases, and gamma and beta of both norms.
_SMALL = {"column": 0, "row": 1, "mlp": 1, "attention": 1, "layer": 6}


@dataclass(frozen=True)
class Arguments:
    """What ``tracekit simulate tensor-parallel`` can be told."""

    tp: int = option(2, "Tensor-parallel ranks t.", least=1)
    part: str = option("layer", "Part that is shown step by step.", PARTS)
    sequence_parallel: bool = option(False, "Show the steps with sequence parallel.")
    library: str = option(
        "dtensor",
        "Whose sequence parallel: dtensor keeps gathered inputs for backward and sums gradients of norms and row biases one by one; "
        "megatron gathers again, and sums them in one buffer.",
        LIBRARIES,
    )
    sequence: int = option(8, "Tokens s of a sequence.", least=1)
    batch: int = option(2, "Sequences b.", least=1)
    hidden: int = option(16, "Hidden size h.", least=1)
    heads: int = option(4, "Attention heads a.", least=1)
    kv_heads: int = option(0, "Heads of keys and values; 0: as many as heads.", least=0)
    ffn: int = option(0, "Hidden size of the MLP; 0: 4 h.", least=0)
    causal: bool = option(True, "Let a token see only itself and those before it.")
    element_bytes: int = bytes_of_element()
    seed: int = seed_of("weights and inputs")


@dataclass(frozen=True)
class _Sizes:
    """The arguments with their defaults filled in, checked."""

    t: int
    s: int
    b: int
    h: int
    heads: int
    kv_heads: int
    ffn: int
    element_bytes: int
    megatron: bool

    @property
    def full_bytes(self) -> int:
        """Bytes of one activation of s b h elements."""
        return self.s * self.b * self.h * self.element_bytes


@dataclass(frozen=True)
class _Model:
    attention: Block
    mlp: Block
    norms: tuple[Norm, Norm]
    x: Float
    dy: Float
    wide_x: Float
    wide_dy: Float


Step = tuple[Float, Float, Gradients]


@dataclass(frozen=True)
class _Done:
    """One part in one mode: the ranks that ran it, its largest errors by Y, dX, dW and db, and how large they may be."""

    part: str
    mode: str
    ranks: Ranks
    errors: dict[str, float]
    allowed: dict[str, float]


def run(arguments: Arguments) -> Experiment:
    """Run every part in both modes and hold it against one rank. Raises ``UsageError`` on arguments that make no sense."""
    sizes = _checked(arguments)
    model = _model(sizes, arguments)
    done = {(part, mode): _run_part(part, mode, model, sizes) for part in PARTS for mode in MODES}
    chosen = done[arguments.part, MODES[arguments.sequence_parallel]]
    worst = max(max(one.errors.values()) for one in done.values())
    sent = {mode: int(done[arguments.part, mode].ranks.network.sent_bytes[0]) for mode in MODES}
    return Experiment(
        name="tensor-parallel",
        title=TITLE,
        about="The first linear of a block is cut by columns, the second by rows, so that what lies between needs no communication. "
        "Forward and backward are written by hand; every rank computes with its shards alone.",
        arguments=values(arguments),
        verdict=f"{arguments.part} over {sizes.t} ranks: largest error {worst:.2g} in all parts; a rank sends {sent[MODES[0]]} bytes, "
        f"with sequence parallel {sent[MODES[1]]}.",
        tables=[_places_table(done, arguments.part), _sent_table(done, sizes), _errors_table(done)],
        moments=chosen.ranks.moments,
        checks=[figure for one in done.values() for figure in (*_error_checks(one), *_sent_checks(one, sizes))],
        calls=chosen.ranks.network.calls(0),
        notes=[
            "With sequence parallel, Megatron gathers a column linear's input again in backward, one all-gather a block more than the "
            "all-reduces cost; DTensor keeps it.",
            "Bytes are those of the element size given; NumPy computes in 64 bits, so that errors show rounding and nothing else.",
        ],
    )


def _checked(a: Arguments) -> _Sizes:
    check(a)
    kv_heads, ffn = a.kv_heads or a.heads, a.ffn or 4 * a.hidden
    sizes = _Sizes(a.tp, a.sequence, a.batch, a.hidden, a.heads, kv_heads, ffn, a.element_bytes, a.library == "megatron")
    if sizes.h % sizes.heads:
        raise UsageError(f"{sizes.heads} heads do not divide the hidden size {sizes.h}", "choose a multiple of the heads")
    if sizes.heads % sizes.kv_heads:
        raise UsageError(f"{sizes.kv_heads} heads of keys and values do not divide {sizes.heads} heads", "choose a divisor of the heads")
    for what, length in (
        ("heads", sizes.heads),
        ("heads of keys and values", sizes.kv_heads),
        ("hidden units of the MLP", sizes.ffn),
        ("tokens of a sequence, which sequence parallel cuts", sizes.s),
    ):
        if length % sizes.t:
            raise UsageError(f"tp {sizes.t} does not divide the {length} {what}", "choose a tp that divides them; heads are never cut")
    smaller = "take a smaller hidden size or a shorter sequence"
    tokens, widest = sizes.s * sizes.b, max(3 * sizes.h, sizes.ffn)
    arrays = max(tokens * widest, sizes.h * widest, tokens * sizes.s * sizes.heads)
    within(arrays, MOST_ELEMENTS, "elements of one array", smaller)
    work = tokens * sizes.h * (4 * sizes.h + 2 * sizes.ffn + 2 * sizes.s)
    within(work, MOST_MULTIPLICATIONS, "multiplications a pass", smaller)
    return sizes


def _model(sizes: _Sizes, a: Arguments) -> _Model:
    draw = np.random.default_rng(a.seed).standard_normal
    h, qkv = sizes.h, sizes.h + 2 * sizes.kv_heads * (sizes.h // sizes.heads)

    def block(name: str, wide: int, inner: int, heads: int, kv_heads: int) -> Block:
        column, row = draw((h, wide)) / np.sqrt(h), draw((inner, h)) / np.sqrt(inner)
        return Block(name, column, draw(wide), row, draw(h), heads, kv_heads, a.causal and heads > 0)

    attention, mlp = block("attention", qkv, h, sizes.heads, sizes.kv_heads), block("mlp", sizes.ffn, sizes.ffn, 0, 0)
    tokens = (sizes.s, sizes.b)
    norms = (Norm(1 + 0.1 * draw(h), draw(h)), Norm(1 + 0.1 * draw(h), draw(h)))
    return _Model(attention, mlp, norms, draw((*tokens, h)), draw((*tokens, h)), draw((*tokens, sizes.ffn)), draw((*tokens, sizes.ffn)))


def _run_part(part: str, mode: str, model: _Model, sizes: _Sizes) -> _Done:
    ranks = Ranks(sizes.t, mode == "sequence_parallel", sizes.element_bytes, sizes.megatron)
    mlp, x, dy = model.mlp, model.x, model.dy
    found: Step
    wanted: Step
    if part == "column":
        linear = (mlp.column, mlp.column_bias, x, model.wide_dy)
        found, wanted = run_column(ranks, *linear), linear_step(*linear)
    elif part == "row":
        linear = (mlp.row, mlp.row_bias, model.wide_x, dy)
        found, wanted = run_row(ranks, *linear), linear_step(*linear)
    elif part == "layer":
        layer = (model.attention, mlp, model.norms, x, dy)
        found, wanted = run_layer(ranks, *layer), layer_step(*layer)
    else:
        block = mlp if part == "mlp" else model.attention
        found, wanted = run_block(ranks, block, x, dy), block_step(block, x, dy)
    terms = max(sizes.ffn, sizes.s * sizes.b) * (4 if part == "layer" else 1)
    enlarged = deviations(model.attention, model.norms, x) if part == "layer" else ()
    errors, allowed = _errors(found, wanted, terms, enlarged)
    return _Done(part, mode, ranks, errors, allowed)


def _errors(found: Step, wanted: Step, terms: int, enlarged: tuple[Float, ...]) -> tuple[dict[str, float], dict[str, float]]:
    """Largest error of Y, dX, dW (matrices) and db (vectors: biases, norms), and what rounding, ``enlarged`` by norms, may make of each."""
    if found[2].keys() != wanted[2].keys():
        raise ValueError(f"gradients {sorted(found[2])} and {sorted(wanted[2])} are not the same")
    pairs = {"Y": [(found[0], wanted[0])], "dX": [(found[1], wanted[1])]}
    for name, gradient in wanted[2].items():
        pairs.setdefault("dW" if gradient.ndim > 1 else "db", []).append((found[2][name], gradient))
    errors = {name: max(error(one, other) for one, other in group) for name, group in pairs.items()}
    return errors, {name: max(rounding(terms, other, *enlarged) for _, other in group) for name, group in pairs.items()}


def _error_checks(one: _Done) -> list[Check]:
    return [
        Check(f"{one.mode}, {one.part}: largest error of {name}", one.errors[name], 0.0, "", "one rank's result", one.allowed[name])
        for name in one.errors
    ]


def _full_calls(part: str, mode: str, sizes: _Sizes) -> int:
    """Calls of s b h elements, an all-reduce counted twice: it is a reduce-scatter and an all-gather."""
    count = sum(n * (2 if kind == "all_reduce" else 1) for (of, kind), n in _CALLS[part].items() if of == mode)
    kept = mode == "sequence_parallel" and not sizes.megatron
    return count - (_GATHERED_AGAIN[part] if kept else 0)


def _expected_sent(part: str, mode: str, sizes: _Sizes) -> int:
    """Bytes a rank sends: F(t) S for each all-gather and reduce-scatter, twice that for an all-reduce; t divides all of them."""
    small = 2 * _SMALL[part] * sizes.h * sizes.element_bytes if mode == "sequence_parallel" else 0
    return (_full_calls(part, mode, sizes) * sizes.full_bytes + small) // sizes.t * (sizes.t - 1)


def _expected_steps(part: str, mode: str, sizes: _Sizes) -> int:
    """Logical steps: t-1 for each all-gather and reduce-scatter, 2(t-1) for an all-reduce."""
    small = 0
    if mode == "sequence_parallel":
        small = min(1, _SMALL[part]) if sizes.megatron else _SMALL[part]
    return (_full_calls(part, mode, sizes) + 2 * small) * (sizes.t - 1)


def _sent_checks(one: _Done, sizes: _Sizes) -> list[Check]:
    network, name = one.ranks.network, f"{one.mode}, {one.part}"
    expected = _expected_sent(one.part, one.mode, sizes)
    formula = "2F(t)S an all-reduce, F(t)S an all-gather or reduce-scatter, F(t) = (t-1)/t, S = s b h e; arXiv:2205.05198, section 4.2"
    checks = [Check(f"{name}: bytes sent by rank {r}", int(network.sent_bytes[r]), expected, "bytes", formula) for r in range(sizes.t)]
    steps = _expected_steps(one.part, one.mode, sizes)
    return [*checks, Check(f"{name}: logical steps", network.steps, steps, "steps", "t-1 each, an all-reduce 2(t-1)")]


def _places_table(done: dict[tuple[str, str], _Done], part: str) -> Table:
    """What stands at the same place of the computation in both modes."""
    by_mode = {mode: {(c.phase, c.label): c for c in reversed(done[part, mode].ranks.network.calls(0))} for mode in MODES}
    places = [(call.phase, call.label) for call in done[part, "sequence_parallel"].ranks.network.calls(0)]
    found = {mode: [calls.get(place) for place in places] for mode, calls in by_mode.items()}
    full = [next(calls[place].full_bytes for calls in by_mode.values() if place in calls) for place in places]
    kinds = {mode: ["nothing" if call is None else call.kind for call in calls] for mode, calls in found.items()}
    columns: Columns = {
        "phase": ("phase", [phase for phase, _ in places]),
        "place": ("place", [label for _, label in places]),
        "tensor_parallel": ("tensor parallel", kinds["tensor_parallel"]),
        "sequence_parallel": ("with sequence parallel", kinds["sequence_parallel"]),
        "full_bytes": ("full tensor [bytes]", full),
    }
    note = "An all-reduce is a reduce-scatter and an all-gather: sequence parallel puts them around what works on shares of tokens."
    return table(f"Collectives of the {part}", columns, note)


def _sent_table(done: dict[tuple[str, str], _Done], sizes: _Sizes) -> Table:
    rows = list(done.values())
    kinds = [Counter((call.phase, call.kind) for call in one.ranks.network.calls(0)) for one in rows]

    def of_phase(phase: str) -> list[str]:
        return [", ".join(f"{n} {kind}" for (of, kind), n in counts.items() if of == phase) or "nothing" for counts in kinds]

    columns: Columns = {
        "part": ("part", [one.part for one in rows]),
        "mode": ("mode", [one.mode for one in rows]),
        "forward": ("forward", of_phase("forward")),
        "backward": ("backward", of_phase("backward")),
        "sent": ("sent by a rank [bytes]", [int(one.ranks.network.sent_bytes[0]) for one in rows]),
        "expected": ("by formula [bytes]", [_expected_sent(one.part, one.mode, sizes) for one in rows]),
        "steps": ("logical steps", [one.ranks.network.steps for one in rows]),
    }
    return table("Communication of every part", columns)


def _errors_table(done: dict[tuple[str, str], _Done]) -> Table:
    rows = list(done.values())
    columns: Columns = {
        "part": ("part", [one.part for one in rows]),
        "mode": ("mode", [one.mode for one in rows]),
        **{name: (f"error of {name}", [one.errors[name] for one in rows]) for name in ("Y", "dX", "dW", "db")},
    }
    note = "Largest absolute difference from one rank. db: biases, and gamma and beta of norms."
    return table("Errors against one rank", columns, note)
