"""Collectives on virtual ranks: inputs, every step's messages, outputs; bytes and steps counted beside the closed forms.

Where a tensor is cut, a ring moves one chunk a rank and step; with more chunks than ranks it goes round several times, as NCCL does with
buffers longer than its own. Times are those of the alpha-beta model: a latency for each step, then bytes at the bandwidth of a link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pandas as pd

from tracekit.collectives.cost import ALGORITHMS, busbw_factor, logical_steps, seconds
from tracekit.collectives.semantics import sent_bytes
from tracekit.errors import UsageError
from tracekit.findings import Table
from tracekit.simulate.arguments import bytes_of_element, check, option, values
from tracekit.simulate.collectives.run import CollectiveRun, Setting, run_collective
from tracekit.simulate.experiment import Check, Experiment
from tracekit.simulate.tables import Columns, table
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

    kind: str = option("all", "Which collective; all: each with each of its algorithms.", ("all", *KINDS))
    algorithm: str = option("usual", "Which algorithm; usual: ring, tree, star or pairwise as the kind commonly has.", _ALGORITHMS)
    ranks: int = option(4, "Ranks of the group.", most=MOST_RANKS)
    elements: int = option(8, "Elements of the full tensor (of an all-to-all: of each rank's send buffer).", least=0, most=MOST_ELEMENTS)
    sizes: tuple[int, ...] = option((), "Elements of each rank's chunk; of all_to_all_v one row of pieces after the other, ranks x ranks.")
    chunks: int = option(0, "Chunks that a ring moves, a multiple of the ranks: it goes round several times; 0: one a rank.")
    root: int = option(0, "Root of broadcast, scatter, gather and reduce.")
    element_bytes: int = bytes_of_element("", 4)
    latency_us: float = option(10.0, "Latency of one message [us], for the times.")
    bandwidth_gb_s: float = option(50.0, "Bandwidth of a link in one direction [GB/s], for the times.")


def run(arguments: Arguments) -> Experiment:
    """Run the chosen collectives. UsageError for sizes, chunks or a root that do not fit the ranks."""
    _refuse(arguments)
    chosen = _chosen(arguments)
    runs = [run_collective(_setting(arguments, kind, algorithm), MOST_CELLS // len(chosen)) for kind, algorithm in chosen]
    checks = [figure for one in runs for figure in _checks(arguments, one)]
    tables = [_overview(arguments, runs)]
    if len(runs) == 1:
        tables += [_holdings(runs[0]), _messages(runs[0])]
    return Experiment(
        name="collectives",
        title=TITLE,
        about="Virtual ranks hand real arrays to each other; every byte and step is counted as it happens and set beside the closed form.",
        arguments=values(arguments),
        verdict=_verdict(runs, checks),
        tables=tables,
        moments=[moment for one in runs for moment in one.moments],
        checks=checks,
        notes=_notes(runs),
    )


def _refuse(arguments: Arguments) -> None:
    check(arguments)
    ranks = arguments.ranks
    if arguments.elements * ranks > MOST_ON_ALL:
        raise UsageError(f"{arguments.elements} elements on each of {ranks} ranks are too many", f"give {MOST_ON_ALL} in all at most")
    if not 0 <= arguments.root < ranks:
        raise UsageError(f"--root {arguments.root} is not one of {ranks} ranks", f"give 0 to {ranks - 1}")
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


def _closed_seconds(arguments: Arguments, one: CollectiveRun) -> float | None:
    """The closed form's time; None where chunks are uneven: it speaks of even ones."""
    setting = one.setting
    if not _even(setting):
        return None
    latency, per_byte = _rates(arguments)
    once = seconds(setting.kind, setting.algorithm, setting.size, one.full_bytes, float(latency), float(per_byte))
    steps = logical_steps(setting.kind, setting.algorithm, setting.size)
    return once + (setting.passes - 1) * steps * float(latency)


def _even(setting: Setting) -> bool:
    return len({n for row in setting.pieces for n in row} or set(setting.chunks)) <= 1


def _checks(arguments: Arguments, one: CollectiveRun) -> list[Check]:
    setting, name = one.setting, _name(one)
    counted = [int(n) for n in one.network.sent_bytes]
    expected = one.expected_sent
    steps = logical_steps(setting.kind, setting.algorithm, setting.size) * setting.passes
    differ = sum(a != b for a, b in zip(counted, expected, strict=True))
    checks = [
        Check(f"{name}: wrong elements", one.wrong, 0, "elements", "every rank holds what the collective is defined to give"),
        Check(f"{name}: logical steps", one.network.steps, steps, "steps", _STEPS[setting.algorithm]),
        Check(
            f"{name}: bytes sent by all ranks", sum(counted), sum(expected), "bytes", "sum of what each rank has to send, chunk by chunk"
        ),
        Check(f"{name}: ranks that send another amount", differ, 0, "ranks", "bytes of each rank against its own closed form"),
    ]
    shared = setting.algorithm in ("ring", "pairwise") or (setting.kind, setting.algorithm) in (("scatter", "star"), ("gather", "star"))
    if shared and _even(setting):
        most = int(sent_bytes(pd.Series([setting.kind]), np.array([one.full_bytes]), np.array([setting.size]))[0])
        checks.append(Check(f"{name}: most sent by one rank", max(counted), most, "bytes", _SENT[setting.kind]))
    closed = _closed_seconds(arguments, one)
    if closed is not None:
        time = float(one.seconds(*_rates(arguments)) * 10**6)
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


def _name(one: CollectiveRun) -> str:
    setting = one.setting
    uneven = bool(setting.pieces) and not _even(setting)
    return f"{setting.kind}{' with splits' if uneven else ''} ({setting.algorithm})"


def _overview(arguments: Arguments, runs: Sequence[CollectiveRun]) -> Table:
    times = [float(one.seconds(*_rates(arguments))) for one in runs]
    closed = [_closed_seconds(arguments, one) for one in runs]
    factors = [busbw_factor(one.setting.kind, one.setting.size) for one in runs]
    algbw = [one.full_bytes / time / 1e9 if time > 0 else None for one, time in zip(runs, times, strict=True)]
    busbw = [None if rate is None or factor is None else rate * factor for rate, factor in zip(algbw, factors, strict=True)]
    columns: Columns = {
        "collective": ("collective", [_name(one) for one in runs]),
        "full": ("full tensor [bytes]", [one.full_bytes for one in runs]),
        "steps": ("steps", [one.network.steps for one in runs]),
        "most": ("most sent by a rank [bytes]", [int(one.network.sent_bytes.max()) for one in runs]),
        "all": ("sent by all ranks [bytes]", [int(one.network.sent_bytes.sum()) for one in runs]),
        "time": ("time [us]", [time * 1e6 for time in times]),
        "closed": ("closed form [us]", [None if time is None else time * 1e6 for time in closed]),
        "algbw": ("algbw [GB/s]", algbw),
        "busbw": ("busbw [GB/s]", busbw),
    }
    rates = f"{arguments.latency_us:g} us a message and {arguments.bandwidth_gb_s:g} GB/s"
    missing = {"closed": "the closed form speaks of even chunks", "algbw": "nothing was sent", "busbw": "nothing was sent"}
    return table("Counted", columns, f"Times for {rates}; a step lasts as its largest message does.", missing=missing)


def _holdings(one: CollectiveRun) -> Table:
    columns: Columns = {
        "rank": ("rank", range(one.setting.size)),
        "before": ("before", one.before),
        "after": ("after", one.after),
        "sent": ("sent [bytes]", one.network.sent_bytes.tolist()),
        "expected": ("has to send [bytes]", one.expected_sent),
        "received": ("received [bytes]", one.network.received_bytes.tolist()),
    }
    note = "c0 = r1+r2: chunk 0, the sum of what ranks 1 and 2 had. Element 7 of rank 2 has the value 207."
    return table("What every rank holds", columns, note, shown=16)


def _messages(one: CollectiveRun) -> Table:
    messages = one.network.messages
    columns: Columns = {
        "step": ("step", [step + 1 for step, _ in messages]),
        "source": ("from rank", [message.source for _, message in messages]),
        "target": ("to rank", [message.target for _, message in messages]),
        "label": ("carries", [message.label for _, message in messages]),
        "bytes": ("size [bytes]", [message.bytes for _, message in messages]),
    }
    return table("Messages of each step", columns, shown=0)


def _verdict(runs: Sequence[CollectiveRun], checks: Sequence[Check]) -> str:
    bad = sum(not figure.holds for figure in checks)
    if bad:
        return f"{bad} of {len(checks)} figures are not what they have to be"
    if len(runs) > 1:
        return f"{len(runs)} collectives moved on {runs[0].setting.size} ranks: bytes, steps and results are those of the closed forms"
    one = runs[0]
    most, ranks = int(one.network.sent_bytes.max()), one.setting.size
    step = "step" if one.network.steps == 1 else "steps"
    return f"{_name(one)} on {ranks} ranks: {one.network.steps} {step}, at most {most} B sent by a rank, just as the closed form says"


def _notes(runs: Sequence[CollectiveRun]) -> list[str]:
    notes = ["A partial sum leaves the rank that has sent it on: the picture shows what is still needed."]
    if any(one.setting.size == 1 for one in runs):
        notes.append("A group of one rank sends nothing.")
    if any(0 in one.setting.chunks for one in runs if one.setting.size > 1):
        notes.append("There are fewer elements than chunks: empty chunks go round as messages of 0 B, and their steps count.")
    left_out = sum(one.left_out for one in runs)
    if left_out:
        notes.append(f"{left_out} moments are not pictured, for their number; they are counted all the same.")
    return notes
