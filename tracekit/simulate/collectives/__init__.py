"""Collectives on virtual ranks: inputs, every step's messages, outputs; bytes and steps counted beside the closed forms.

Where a tensor is cut, a ring moves one chunk a rank and step; with more chunks than ranks it goes round several times, as NCCL does with
buffers longer than its own. Times are those of the alpha-beta model: a latency for each step, then bytes at the bandwidth of a link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pandas as pd

from tracekit.collectives.cost import ALGORITHMS, busbw_factor, logical_steps, seconds
from tracekit.collectives.semantics import sent_bytes
from tracekit.errors import UsageError
from tracekit.findings import Table
from tracekit.simulate.collectives.run import Outcome, Setting, run_collective
from tracekit.simulate.experiment import Check, Experiment
from tracekit.simulate.virtual import even_splits

TITLE = "Collectives, step by step"
EXAMPLE = "tracekit simulate collectives --kind all_reduce --ranks 4 --elements 8 -o ring.html"
#: all_to_all_v is an all_to_all whose pieces have different sizes.
KINDS = ("broadcast", "scatter", "gather", "reduce", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "all_to_all_v")
_ALGORITHMS = ("usual", "ring", "naive", "tree", "star", "pairwise")
#: Kinds of which every rank gets, or gives, a chunk of its own.
_CUT = ("scatter", "gather", "all_gather", "reduce_scatter")
_ROOTED = ("broadcast", "scatter", "gather", "reduce")
MOST_RANKS, MOST_ELEMENTS, MOST_CHUNKS = 64, 1_000_000, 1024
#: Elements on all ranks together, and cells of the picture: what is done in seconds.
MOST_ON_ALL, MOST_CELLS = 2_000_000, 160_000


@dataclass(frozen=True)
class Arguments:
    """What can be chosen. ``sizes`` wins over ``elements``."""

    kind: str = field(
        default="all", metadata={"help": "Which collective; all: each with each of its algorithms.", "choices": ("all", *KINDS)}
    )
    algorithm: str = field(
        default="usual",
        metadata={"help": "Which algorithm; usual: ring, tree, star or pairwise as the kind commonly has.", "choices": _ALGORITHMS},
    )
    ranks: int = field(default=4, metadata={"help": "Ranks of the group."})
    elements: int = field(default=8, metadata={"help": "Elements of the full tensor (of an all-to-all: of each rank's send buffer)."})
    sizes: tuple[int, ...] = field(
        default=(), metadata={"help": "Elements of each rank's chunk; of all_to_all_v one row of pieces after the other, ranks x ranks."}
    )
    chunks: int = field(
        default=0, metadata={"help": "Chunks that a ring moves, a multiple of the ranks: it goes round several times; 0: one a rank."}
    )
    root: int = field(default=0, metadata={"help": "Root of broadcast, scatter, gather and reduce."})
    element_bytes: int = field(default=4, metadata={"help": "Bytes of one element."})
    latency_us: float = field(default=10.0, metadata={"help": "Latency of one message [us], for the times."})
    bandwidth_gb_s: float = field(default=50.0, metadata={"help": "Bandwidth of a link in one direction [GB/s], for the times."})


def run(arguments: Arguments) -> Experiment:
    """Run the chosen collectives. UsageError for sizes, chunks or a root that do not fit the ranks."""
    _refuse(arguments)
    chosen = _chosen(arguments)
    outcomes = [run_collective(_setting(arguments, kind, algorithm), MOST_CELLS // len(chosen)) for kind, algorithm in chosen]
    checks = [check for outcome in outcomes for check in _checks(arguments, outcome)]
    tables = [_overview(arguments, outcomes)]
    if len(outcomes) == 1:
        tables += [_holdings(outcomes[0]), _messages(outcomes[0])]
    return Experiment(
        name="collectives",
        title=TITLE,
        about="Virtual ranks hand real arrays to each other; every byte and step is counted as it happens and set beside the closed form.",
        arguments=[(name, getattr(arguments, name)) for name in Arguments.__dataclass_fields__],
        verdict=_verdict(outcomes, checks),
        tables=tables,
        moments=[moment for outcome in outcomes for moment in outcome.moments],
        checks=checks,
        notes=_notes(outcomes),
    )


def _refuse(arguments: Arguments) -> None:
    ranks = arguments.ranks
    if not 1 <= ranks <= MOST_RANKS:
        raise UsageError(f"--ranks {ranks}", f"give 1 to {MOST_RANKS} ranks")
    if not 0 <= arguments.elements <= MOST_ELEMENTS:
        raise UsageError(f"--elements {arguments.elements}", f"give 0 to {MOST_ELEMENTS} elements")
    if arguments.elements * ranks > MOST_ON_ALL:
        raise UsageError(f"{arguments.elements} elements on each of {ranks} ranks are too many", f"give {MOST_ON_ALL} in all at most")
    if not 0 <= arguments.root < ranks:
        raise UsageError(f"--root {arguments.root} is not one of {ranks} ranks", f"give 0 to {ranks - 1}")
    if not 1 <= arguments.element_bytes <= 16:
        raise UsageError(f"--element-bytes {arguments.element_bytes}", "give 1 to 16")
    if not 0 <= arguments.latency_us < 1e9 or not 0 < arguments.bandwidth_gb_s < 1e9:
        raise UsageError("--latency-us and --bandwidth-gb-s make no time", "give a latency of 0 or more and a bandwidth above 0")
    _refuse_chunks(arguments)
    _refuse_sizes(arguments)


def _refuse_chunks(arguments: Arguments) -> None:
    ranks, chunks, kind = arguments.ranks, arguments.chunks, arguments.kind
    if chunks == 0:
        return
    if kind == "all" or any(algorithm != "ring" for _, algorithm in _chosen(arguments)):
        raise UsageError(
            "--chunks is for a ring: only there every rank sends one chunk a step", "choose --kind all_reduce, or leave it out"
        )
    if chunks < 0 or chunks % ranks:
        problem = (
            f"{chunks} chunks for {ranks} ranks: a ring moves one chunk of each rank at a time, and {chunks} is no multiple of {ranks}"
        )
        raise UsageError(problem, f"give --chunks {max(1, chunks // ranks) * ranks}, or another multiple of {ranks}")
    if chunks > MOST_CHUNKS:
        raise UsageError(f"--chunks {chunks}", f"give at most {MOST_CHUNKS}")
    if arguments.sizes:
        raise UsageError("--sizes and --chunks exclude each other", "give the sizes, or how many chunks are cut")


def _refuse_sizes(arguments: Arguments) -> None:
    sizes, ranks, kind = arguments.sizes, arguments.ranks, arguments.kind
    if not sizes:
        return
    if kind not in (*_CUT, "all_reduce", "all_to_all_v") or (kind == "all_reduce" and _chosen(arguments)[0][1] != "ring"):
        raise UsageError(
            "--sizes needs a collective that cuts the tensor", "choose a --kind such as all_gather, or all_to_all_v, or leave it out"
        )
    most = MOST_ON_ALL if kind == "all_to_all_v" else MOST_ON_ALL // ranks
    if min(sizes) < 0 or sum(sizes) > most:
        raise UsageError("--sizes holds a negative number, or too many elements", f"give sizes of 0 or more, {most} in all at most")
    wanted = ranks * ranks if kind == "all_to_all_v" else ranks
    if len(sizes) != wanted:
        each = f"one for each pair of ranks ({ranks} x {ranks})" if kind == "all_to_all_v" else f"one for each of {ranks} ranks"
        raise UsageError(f"--sizes gives {len(sizes)} sizes, {kind} needs {wanted}: {each}", f"give {wanted} numbers, or change --ranks")


def _chosen(arguments: Arguments) -> list[tuple[str, str]]:
    """(kind, algorithm) of every run. UsageError where the algorithm is none of the kind's."""
    if arguments.kind == "all":
        if arguments.algorithm != "usual":
            raise UsageError(f"--algorithm {arguments.algorithm} without a kind", "choose a collective with --kind")
        return [(kind, algorithm) for kind in KINDS for algorithm in ALGORITHMS[kind.removesuffix("_v")]]
    known = ALGORITHMS[arguments.kind.removesuffix("_v")]
    if arguments.algorithm == "usual":
        return [(arguments.kind, known[0])]
    if arguments.algorithm not in known:
        raise UsageError(f"there is no {arguments.algorithm} algorithm of {arguments.kind} here", f"choose {' or '.join(known)}")
    return [(arguments.kind, arguments.algorithm)]


def _setting(arguments: Arguments, kind: str, algorithm: str) -> Setting:
    ranks, passes = arguments.ranks, max(1, arguments.chunks // arguments.ranks)
    pieces: Sequence[Sequence[int]] = ()
    if kind == "all_to_all":
        pieces = [even_splits(arguments.elements, ranks)] * ranks
    elif kind == "all_to_all_v":
        flat = arguments.sizes or [(arguments.elements * (1 + (i + 2 * j) % 3)) // (2 * ranks) for i in range(ranks) for j in range(ranks)]
        pieces = [list(flat[i * ranks : (i + 1) * ranks]) for i in range(ranks)]
    cut = kind in _CUT or (kind, algorithm) == ("all_reduce", "ring")
    chunks = arguments.sizes if cut and arguments.sizes else even_splits(arguments.elements, ranks * passes if cut else 1)
    root = arguments.root if kind in _ROOTED else 0
    return Setting(kind.removesuffix("_v"), algorithm, ranks, chunks, passes, pieces, root, arguments.element_bytes)


def _rates(arguments: Arguments) -> tuple[Fraction, Fraction]:
    """(latency [s], seconds a byte), exact."""
    return Fraction(str(arguments.latency_us)) / 10**6, 1 / (Fraction(str(arguments.bandwidth_gb_s)) * 10**9)


def _closed_seconds(arguments: Arguments, outcome: Outcome) -> float | None:
    """The closed form's time; None where chunks are uneven: it speaks of even ones."""
    setting = outcome.setting
    if not _even(setting):
        return None
    latency, per_byte = _rates(arguments)
    once = seconds(setting.kind, setting.algorithm, setting.size, outcome.full_bytes, float(latency), float(per_byte))
    steps = logical_steps(setting.kind, setting.algorithm, setting.size)
    return once + (setting.passes - 1) * steps * float(latency)


def _even(setting: Setting) -> bool:
    return len({n for row in setting.pieces for n in row} or set(setting.chunks)) <= 1


def _checks(arguments: Arguments, outcome: Outcome) -> list[Check]:
    setting, name = outcome.setting, _name(outcome)
    counted = [int(n) for n in outcome.network.sent_bytes]
    expected = outcome.expected_sent
    steps = logical_steps(setting.kind, setting.algorithm, setting.size) * setting.passes
    differ = sum(a != b for a, b in zip(counted, expected, strict=True))
    checks = [
        Check(f"{name}: wrong elements", outcome.wrong, 0, "elements", "every rank holds what the collective is defined to give"),
        Check(f"{name}: logical steps", outcome.network.steps, steps, "steps", _STEPS[setting.algorithm]),
        Check(
            f"{name}: bytes sent by all ranks", sum(counted), sum(expected), "bytes", "sum of what each rank has to send, chunk by chunk"
        ),
        Check(f"{name}: ranks that send another amount", differ, 0, "ranks", "bytes of each rank against its own closed form"),
    ]
    shared = setting.algorithm in ("ring", "pairwise") or (setting.kind, setting.algorithm) in (("scatter", "star"), ("gather", "star"))
    if shared and _even(setting):
        most = int(sent_bytes(pd.Series([setting.kind]), np.array([outcome.full_bytes]), np.array([setting.size]))[0])
        checks.append(Check(f"{name}: most sent by one rank", max(counted), most, "bytes", _SENT[setting.kind]))
    closed = _closed_seconds(arguments, outcome)
    if closed is not None:
        time = float(outcome.seconds(*_rates(arguments)) * 10**6)
        checks.append(Check(f"{name}: time", time, closed * 1e6, "us", "alpha-beta model", tolerance=1e-9 * max(1.0, closed * 1e6)))
    return checks


_STEPS = {
    "ring": "x-1; an all_reduce goes round twice: 2 (x-1)",
    "pairwise": "x-1",
    "star": "x-1: the root deals with one rank after the other (all_reduce: there and back)",
    "tree": "ceil(log2 x) (all_reduce: there and back)",
    "naive": "x (x-1): each rank in turn sends its chunk to each other",
}
_SENT = {
    "scatter": "(x-1)/x S",
    "gather": "S/x",
    "all_gather": "(x-1)/x S",
    "reduce_scatter": "(x-1)/x S",
    "all_reduce": "2 (x-1)/x S",
    "all_to_all": "(x-1)/x S",
}


def _name(outcome: Outcome) -> str:
    setting = outcome.setting
    uneven = bool(setting.pieces) and not _even(setting)
    return f"{setting.kind}{' with splits' if uneven else ''} ({setting.algorithm})"


def _overview(arguments: Arguments, outcomes: Sequence[Outcome]) -> Table:
    rows = []
    for outcome in outcomes:
        setting = outcome.setting
        time = float(outcome.seconds(*_rates(arguments)))
        factor = busbw_factor(setting.kind, setting.size)
        algbw = outcome.full_bytes / time / 1e9 if time > 0 else None
        rows.append(
            {
                "collective": _name(outcome),
                "full": outcome.full_bytes,
                "steps": outcome.network.steps,
                "most": int(outcome.network.sent_bytes.max()),
                "all": int(outcome.network.sent_bytes.sum()),
                "time": time * 1e6,
                "closed": None if (closed := _closed_seconds(arguments, outcome)) is None else closed * 1e6,
                "algbw": algbw,
                "busbw": None if algbw is None or factor is None else algbw * factor,
            }
        )
    heads = {
        "collective": "collective",
        "full": "full tensor [bytes]",
        "steps": "steps",
        "most": "most sent by a rank [bytes]",
        "all": "sent by all ranks [bytes]",
        "time": "time [us]",
        "closed": "closed form [us]",
        "algbw": "algbw [GB/s]",
        "busbw": "busbw [GB/s]",
    }
    note = (
        f"Times for {arguments.latency_us:g} us a message and {arguments.bandwidth_gb_s:g} GB/s; a step lasts as its largest message does."
    )
    missing = {"closed": "the closed form speaks of even chunks", "algbw": "nothing was sent", "busbw": "nothing was sent"}
    return Table("Counted", pd.DataFrame(rows), heads, note, preview=len(rows), missing=missing)


def _holdings(outcome: Outcome) -> Table:
    setting, network = outcome.setting, outcome.network
    frame = pd.DataFrame(
        {
            "rank": range(setting.size),
            "before": outcome.before,
            "after": outcome.after,
            "sent": network.sent_bytes,
            "expected": outcome.expected_sent,
            "received": network.received_bytes,
        }
    )
    heads = {
        "rank": "rank",
        "before": "before",
        "after": "after",
        "sent": "sent [bytes]",
        "expected": "has to send [bytes]",
        "received": "received [bytes]",
    }
    note = "c0 = r1+r2: chunk 0, the sum of what ranks 1 and 2 had. Element 7 of rank 2 has the value 207."
    return Table("What every rank holds", frame, heads, note, preview=16)


def _messages(outcome: Outcome) -> Table:
    rows = [(step + 1, m.source, m.target, m.label, m.bytes) for step, m in outcome.network.messages]
    frame = pd.DataFrame(rows, columns=["step", "source", "target", "label", "bytes"])
    heads = {"step": "step", "source": "from rank", "target": "to rank", "label": "carries", "bytes": "size [bytes]"}
    return Table("Messages of each step", frame, heads)


def _verdict(outcomes: Sequence[Outcome], checks: Sequence[Check]) -> str:
    bad = sum(not check.holds for check in checks)
    if bad:
        return f"{bad} of {len(checks)} figures are not what they have to be"
    if len(outcomes) > 1:
        return (
            f"{len(outcomes)} collectives moved on {outcomes[0].setting.size} ranks: bytes, steps and results are those of the closed forms"
        )
    outcome = outcomes[0]
    most, ranks = int(outcome.network.sent_bytes.max()), outcome.setting.size
    step = "step" if outcome.network.steps == 1 else "steps"
    return (
        f"{_name(outcome)} on {ranks} ranks: {outcome.network.steps} {step}, at most {most} B sent by a rank, just as the closed form says"
    )


def _notes(outcomes: Sequence[Outcome]) -> list[str]:
    notes = ["A partial sum leaves the rank that has sent it on: the picture shows what is still needed."]
    if any(outcome.setting.size == 1 for outcome in outcomes):
        notes.append("A group of one rank sends nothing.")
    if any(0 in outcome.setting.chunks for outcome in outcomes if outcome.setting.size > 1):
        notes.append("There are fewer elements than chunks: empty chunks go round as messages of 0 B, and their steps count.")
    left_out = sum(outcome.left_out for outcome in outcomes)
    if left_out:
        notes.append(f"{left_out} moments are not pictured, for their number; they are counted all the same.")
    return notes
