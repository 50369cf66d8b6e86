"""What the program was doing at each entry of a snapshot's history: by its Python stack, what the user attached, and annotations."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tracekit.memory.moments import BACKWARD, FORWARD, OPTIMIZER, Hint, Moments, hint_of, interval_at, unit_of
from tracekit.memory.ownership import Texts
from tracekit.memory.snapshot import ALLOC, Entries, Snapshot, Stacks
from tracekit.memory.user_frames import labels
from tracekit.trace.events import BoolArray, Int8Array, Int32Array, Int64Array
from tracekit.trace.steps import Phases, Steps

#: (hint, phase, file, function) of a frame; first hit decides. Files with / between folders.
_FRAMES: tuple[tuple[Hint, int, re.Pattern[str], re.Pattern[str]], ...] = tuple(
    (hint, phase, re.compile(file), re.compile(function))
    for hint, phase, file, function in (
        (Hint.GATHER, 0, r"_fsdp_collectives\.py$", r"copy_out"),
        (Hint.REDUCE, 0, r"_fsdp_collectives\.py$", r"reduce"),
        (Hint.COMMUNICATION, 0, r"_fsdp_collectives\.py$", r""),
        (Hint.GATHER, 0, r"_fsdp_param\.py$", r"unsharded|all_gather_outputs"),
        (Hint.ACCUMULATE, 0, r"_fsdp_param\.py$", r"accumulate"),
        (Hint.GATHER, 0, r"fsdp/_flat_param\.py$", r"unshard|padded"),
        (Hint.REDUCE, 0, r"fsdp/_runtime_utils\.py$", r"reduce_grad|_post_backward"),
        (Hint.COMMUNICATION, 0, r"distributed_c10d\.py$|_functional_collectives\.py$", r""),
        (Hint.COMMUNICATION, 0, r"nn/parallel/distributed\.py$", r"__init__|_ddp_init_helper"),
        (Hint.DDP, FORWARD, r"nn/parallel/distributed\.py$", r"forward"),
        (Hint.LOADING, 0, r"torch/utils/data/", r""),
        (Hint.OPTIMIZER, OPTIMIZER, r"(?:^|/)torch/optim/", r""),
        (Hint.OPTIMIZER, OPTIMIZER, r"(?:^|/)(?:adam\w*|sgd|lamb|lion|adafactor|\w*optim\w*)\.py$", r"step|update"),
        (Hint.BUILDING, 0, r"nn/modules/\w+\.py$", r"^(?:to|cuda|_apply|convert|__init__|reset_parameters|to_empty)$"),
        (Hint.NOTHING, BACKWARD, r"torch/(?:_tensor|autograd/\w+)\.py$", r"backward|grad"),
        (Hint.NOTHING, BACKWARD, r"", r"^backward$|torch::autograd::(?:Engine|python::PythonEngine)|^_engine_run_backward$"),
        (Hint.NOTHING, FORWARD, r"nn/modules/module\.py$", r"_call_impl"),
        (Hint.NOTHING, FORWARD, r"", r"^forward$"),
    )
)
_PHASES = ((BACKWARD, re.compile(r"backward", re.I)), (OPTIMIZER, re.compile(r"optim", re.I)), (FORWARD, re.compile(r"forward", re.I)))
_STEP = re.compile(r"^ProfilerStep[#*]\s*(\d{1,15})$")


def phase_of(text: str) -> int:
    """The phase that a note or an annotation names; 0 for none, and where it names several."""
    named = [phase for phase, pattern in _PHASES if pattern.search(text)]
    return named[0] if len(named) == 1 else 0


def of_history(snapshot: Snapshot, entries: Entries, words: Texts) -> tuple[Moments, Phases, Steps]:
    """The moments of all entries of one device, and the phases and steps that follow from them."""
    hint, phase = _of_stacks(snapshot.stacks, entries.stack)
    texts = snapshot.stacks.strings
    phase = np.where(phase > 0, phase, _by_code(texts, entries.note, phase_of))
    phase = np.where((phase == 0) & _without_python(entries), BACKWARD, phase)
    named = _in_ranges(snapshot, entries.time, lambda text: bool(phase_of(text)) and hint_of(text) == Hint.NOTHING)
    phase = np.where(phase > 0, phase, _by_code(texts, named, phase_of))
    hinting = _in_ranges(snapshot, entries.time, lambda text: hint_of(text) != Hint.NOTHING)
    hint = np.where(hint > 0, hint, _by_code(texts, hinting, hint_of))
    phase = np.where((phase == 0) & (hint == Hint.OPTIMIZER), OPTIMIZER, phase)
    phases = _stretches(_filled(phase.astype(np.int8)), entries.time)
    steps = _steps(snapshot)
    unit = _in_ranges(snapshot, entries.time, lambda text: bool(unit_of(text)))
    names = words.codes(labels(snapshot.stacks))
    return (
        Moments(
            np.ones(len(entries), np.bool_),
            entries.time,
            phases.at(entries.time),
            interval_at(phases, entries.time),
            steps.index_at(entries.time),
            hint.astype(np.int8),
            np.where(entries.stack > 0, names[np.maximum(entries.stack, 0)], 0).astype(np.int32),
            _by_code(texts, unit, lambda text: words.code(unit_of(text))).astype(np.int32),
        ),
        phases,
        steps,
    )


def of_stacks(snapshot: Snapshot, stack: Int32Array, words: Texts) -> tuple[Int8Array, Int32Array]:
    """(hint, code of the name) of stacks alone."""
    hint, _ = _of_stacks(snapshot.stacks, stack)
    return hint, words.codes(labels(snapshot.stacks))[np.maximum(stack, 0)]


def _without_python(entries: Entries) -> BoolArray:
    """Allocations with an empty stack where most have one: made on a thread without Python, as autograd's own threads are."""
    made = entries.action == ALLOC
    stacked = made & (entries.stack > 0)
    if 2 * int(stacked.sum()) <= int(made.sum()):
        return np.zeros(len(entries), np.bool_)
    return np.asarray(made & (entries.stack == 0), np.bool_)


def _of_stacks(stacks: Stacks, stack: Int32Array) -> tuple[Int8Array, Int8Array]:
    """(hint, phase) of each stack: the innermost hint; backward before forward before the optimizer, whose step may call both."""
    found = [_of_frame(stacks, place) for place in range(len(stacks.frames))] or [(0, 0)]
    hint_of_frame, phase_of_frame = (np.array([row[i] for row in found], np.int8) for i in range(2))
    hinting = stacks.first(hint_of_frame > 0)
    hint = np.where(hinting >= 0, hint_of_frame[hinting], np.int8(0))
    phase = np.zeros(len(hint), np.int8)
    for kind in (OPTIMIZER, FORWARD, BACKWARD):  # the strongest last
        phase[stacks.first(phase_of_frame == kind) >= 0] = kind
    known = np.maximum(stack, 0)
    return hint[known], phase[known]


def _of_frame(stacks: Stacks, place: int) -> tuple[int, int]:
    file_code, _, name_code = (int(part) for part in stacks.frames[place])
    file, name = stacks.strings[file_code].replace("\\", "/"), stacks.strings[name_code]
    for hint, phase, file_pattern, name_pattern in _FRAMES:
        if file_pattern.search(file) and name_pattern.search(name):
            return int(hint), phase
    return 0, 0


def _by_code(texts: object, codes: Int32Array, ask: Callable[[str], int]) -> Int64Array:
    """``ask`` of the string of each code, once a distinct one; 0 for -1."""
    distinct, inverse = np.unique(codes, return_inverse=True)
    answers = np.array([int(ask(texts[code])) if code >= 0 else 0 for code in distinct.tolist()], np.int64)  # type: ignore[index]
    found: Int64Array = answers[inverse] if len(distinct) else np.empty(0, np.int64)
    return found


def _in_ranges(snapshot: Snapshot, time: Int64Array, wanted: Callable[[str], bool]) -> Int32Array:
    """Name of the innermost wanted annotation around each time, as a string code; -1 for none."""
    from tracekit.trace.sweep import innermost

    ranges, texts = snapshot.ranges, snapshot.stacks.strings
    chosen = np.flatnonzero(_by_code(texts, ranges.name, lambda text: int(wanted(text))) > 0)
    if not len(chosen) or not len(time):
        return np.full(len(time), -1, np.int32)
    order = chosen[np.lexsort((-ranges.end[chosen], ranges.start[chosen]))]
    queries = np.argsort(time, kind="stable")
    lane, size = np.zeros(len(order), np.int64), len(time)
    one, none = np.zeros(size, np.int64), np.full(size, len(order), np.int64)
    found = innermost(lane, ranges.start[order], ranges.end[order], one, time[queries], none)
    result = np.full(size, -1, np.int32)
    result[queries] = np.where(found >= 0, ranges.name[order][np.maximum(found, 0)], -1)
    return result


def _filled(phase: Int8Array) -> Int8Array:
    """Entries of no phase between two of one phase belong to it, those at the end to the last one."""
    known = np.flatnonzero(phase > 0)
    if not len(known):
        return phase
    at = np.searchsorted(known, np.arange(len(phase)), side="right") - 1
    before = np.where(at >= 0, phase[known[np.maximum(at, 0)]], 0)
    following = np.minimum(at + 1, len(known) - 1)
    after = np.where(at + 1 < len(known), phase[known[following]], before)
    return np.where(phase > 0, phase, np.where(before == after, before, 0)).astype(np.int8)


def _stretches(phase: Int8Array, time: Int64Array) -> Phases:
    """Runs of entries of one phase, from the first one's time to the next run's, or 1 ns behind the last entry."""
    if not len(phase):
        return Phases(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int8))
    first = np.flatnonzero(np.append(True, phase[1:] != phase[:-1]))
    start = time[first]
    end = np.append(start[1:], time[-1] + 1)
    kind = phase[first]
    real = (kind > 0) & (end > start)
    return Phases(start[real], end[real], kind[real])


def _steps(snapshot: Snapshot) -> Steps:
    """Steps by annotations of the profiler."""
    rows = []
    for start, end, code in zip(*(column.tolist() for column in vars(snapshot.ranges).values()), strict=True):
        match = _STEP.match(snapshot.stacks.strings[code])
        if match:
            rows.append((int(match[1]), start, end))
    number, start, end = (np.array([row[i] for row in rows], np.int64) for i in range(3))
    return Steps(number, start, end, "ProfilerStep" if rows else "none")
