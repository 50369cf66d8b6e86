"""What the program was doing when a block was born and when it died: phase, step, and what enclosing ranges say of its memory.

For a profiler's trace: operators and annotations around the event on its own thread. The names are torch's (FSDP1, FSDP2, DDP, c10d,
optimizers, data loaders).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np

from tracekit.memory.ownership import Texts
from tracekit.trace import correlate
from tracekit.trace.events import BoolArray, Category, Int8Array, Int32Array, Int64Array, RankTables
from tracekit.trace.steps import Phases, Steps
from tracekit.units import NULL

FORWARD, BACKWARD, OPTIMIZER = 1, 2, 3


class Hint(IntEnum):
    """What an enclosing range says of memory."""

    NOTHING = 0
    COMMUNICATION = 1  # a collective's own tensors, buffers of gathers
    GATHER = 2  # full parameters of a sharded unit
    ACCUMULATE = 3  # full gradients of a sharded unit
    REDUCE = 4  # reduce-scatter: what is kept is the gradient shard, the rest are buffers
    RESHARD = 5  # full parameters are given back
    DDP = 6  # DistributedDataParallel's forward: buckets are built anew in the first one
    OPTIMIZER = 7
    ZERO_GRAD = 8
    LOADING = 9  # batches
    BUILDING = 10  # modules, parameters
    ACCUMULATED = 11  # a gradient arrives at its parameter


_FSDP1 = r"^FullyShardedDataParallel\._"
#: First hit decides; names of operators and annotations. Beside torch's own, what hand-written sharding calls its ranges.
_HINTS: tuple[tuple[Hint, re.Pattern[str]], ...] = tuple(
    (hint, re.compile(pattern))
    for hint, pattern in (
        # A backend's range of a send or receive stays open until somebody waits for it: what happens meanwhile is not inside.
        (
            Hint.COMMUNICATION,
            r"^(?:c10d::|_c10d_functional|aten::flatten_dense_tensors$|record_param_comms$|tracekit::collective|(?:gloo|nccl|mpi|ucc|xccl):(?!send|recv))",
        ),
        (Hint.GATHER, r"^FSDP::all_gather_copy_out"),
        (Hint.COMMUNICATION, r"^FSDP::all_gather"),
        (Hint.ACCUMULATE, r"^FSDP::post_backward_accumulate"),
        (Hint.REDUCE, r"^FSDP::(?:post_backward_r(?!eshard)|root_post_backward|reduce_scatter|all_reduce)"),
        (Hint.RESHARD, r"^FSDP::post_(?:forward|backward_reshard)"),
        (Hint.REDUCE, _FSDP1 + "post_backward_hook$"),
        (Hint.RESHARD, _FSDP1 + "post_(?:forward$|backward_hook_reshard_only)"),
        (Hint.GATHER, _FSDP1 + "(?:(?:root_)?pre_forward|pre_backward|post_backward_prefetch|rate_limiter)"),
        (Hint.GATHER, r"^(?:gather|unshard|all-?gather) (?:the )?(?:full )?parameters\b"),
        (Hint.REDUCE, r"^(?:reduce|reduce-?scatter) (?:the )?(?:full )?gradients\b"),
        (Hint.DDP, r"^DistributedDataParallel\.forward$"),
        (Hint.ZERO_GRAD, r"^Optimizer\.zero_grad"),
        (Hint.OPTIMIZER, r"^Optimizer\.step"),
        (Hint.ACCUMULATED, r"^autograd::engine::evaluate_function: \S*AccumulateGrad$"),
        (Hint.LOADING, r"^enumerate\(DataLoader\)|DataLoader.*__next__"),
    )
)
_UNIT = re.compile(
    r"^FSDP::\w+ \(([^()]+)\)$|^FSDP::\w+_prefetch for (.+)$|^unit (.+?)(?: backward)?$|^\S+ (?:parameters|gradients) of (.+)$"
)


def hint_of(name: str) -> Hint:
    """What a range of this name says of memory."""
    return next((hint for hint, pattern in _HINTS if pattern.search(name)), Hint.NOTHING)


def unit_of(name: str) -> str:
    """The unit that a range names; '' for none."""
    match = _UNIT.match(name)
    return next((text for text in match.groups() if text), "") if match else ""


@dataclass(frozen=True)
class Moments:
    """One entry a block. ``interval`` is the stretch of one phase that holds the moment, -1 none; ``step`` -1 outside every step.

    ``known``: the log shows the moment. ``time`` [ns] is NULL where it does not.
    """

    known: BoolArray
    time: Int64Array
    phase: Int8Array
    interval: Int32Array
    step: Int32Array
    hint: Int8Array
    name: Int32Array
    unit: Int32Array

    def at(self, place: Int64Array) -> Moments:
        """The moments of these places; -1 is a moment that is not known."""
        if not len(self.time):
            return nothing_known(len(place))
        taken = Moments(**{part.name: getattr(self, part.name)[np.maximum(place, 0)] for part in fields(self)})
        missing = place < 0
        if missing.any():
            empty = nothing_known(len(place))
            taken = Moments(**{part.name: np.where(missing, getattr(empty, part.name), getattr(taken, part.name)) for part in fields(self)})
        return taken


def nothing_known(count: int) -> Moments:
    """Moments of which nothing is known."""
    none, code = np.full(count, -1, np.int32), np.zeros(count, np.int32)
    zero = np.zeros(count, np.int8)
    return Moments(np.zeros(count, np.bool_), np.full(count, NULL, np.int64), zero, none, none, zero, code, code)


@dataclass(frozen=True)
class Context:
    """What the rules know beside the blocks: stretches of one phase in order of time, steps, and the span of the log [ns]."""

    phases: Phases
    steps: Steps
    end: int


def of_events(tables: RankTables, rows: Int64Array, phases: Phases, steps: Steps, words: Texts) -> Moments:
    """The moments of these rows of a trace, all of them known."""
    time = tables.ts[rows]
    hosts = tables.rows(Category.OPERATOR, Category.USER_ANNOTATION)
    names = tables.name[hosts]
    hints = tables.each_text(names, hint_of, np.int8)
    hinting = correlate.enclosing(tables, rows, hosts[hints > 0])
    hint_at = np.zeros(len(tables), np.int8)
    hint_at[hosts] = hints
    units = hosts[tables.each_text(names, lambda text: bool(unit_of(text)))]
    unit_rows = correlate.enclosing(tables, rows, units)
    operators = correlate.enclosing(tables, rows, hosts[tables.category[hosts] == Category.OPERATOR])
    return Moments(
        np.ones(len(rows), np.bool_),
        time,
        phases.at(time),
        interval_at(phases, time),
        steps.index_at(time),
        np.where(hinting >= 0, hint_at[hinting], 0).astype(np.int8),
        _coded(tables, operators, words, str),
        _coded(tables, unit_rows, words, unit_of),
    )


def interval_at(phases: Phases, time: Int64Array) -> Int32Array:
    """Index of the stretch of phases that holds each time; -1 for none."""
    if not len(phases.start):
        return np.full(len(time), -1, np.int32)
    at = np.searchsorted(phases.start, time, side="right") - 1
    inside = (at >= 0) & (time < phases.end[np.maximum(at, 0)])
    return np.where(inside, at, -1).astype(np.int32)


def _coded(tables: RankTables, rows: Int64Array, words: Texts, text: type[str] | object) -> Int32Array:
    found = np.zeros(len(rows), np.int32)
    known = rows >= 0
    found[known] = tables.each_text(tables.name[rows[known]], lambda name: words.code(text(name)), np.int32)  # type: ignore[operator]
    return found
