"""Windows of all ranks to one Job: who is who, which groups and axes there are, which operations belong together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from tracekit import schema
from tracekit.collectives.kinds import BLOCKING, POINT_TO_POINT, element_type
from tracekit.collectives.matching import Matched, match, measure
from tracekit.collectives.purpose import purposes
from tracekit.collectives.semantics import full_elements, kept_elements, sent_bytes
from tracekit.errors import InputError, UsageError
from tracekit.job.activity import Window
from tracekit.job.memory_window import pair
from tracekit.job.model import Job
from tracekit.mesh.mesh import Axis, Recorded, infer_mesh, parse_mesh
from tracekit.mesh.process_groups import ProcessGroups, unite
from tracekit.mesh.topology import nodes, spans_nodes
from tracekit.notes import Note, note
from tracekit.readers.identity import resolve
from tracekit.trace.clock import Clock, Messages, align
from tracekit.trace.events import BoolArray, Coverage, Int32Array, Int64Array
from tracekit.trace.steps import numbered_on
from tracekit.units import NULL, listed


def join(
    windows: Sequence[Window],
    coverage: Sequence[Coverage],
    mesh: str | None = None,
    gpus_per_node: int | None = None,
    ranks: frozenset[int] | None = None,
) -> Job:
    """The job of these windows. ``coverage`` are files that gave no window; ``ranks`` the ranks a user wants to see."""
    traced = [window for window in windows if window.has_events]
    used, notes = _ranked(traced, ranks if traced else None)
    everything = sorted([*coverage, *(w.coverage for w in windows)], key=lambda c: c.file)
    world_size, present, missing, world_notes = _world(used, everything, ranks if traced else None)
    alone = pair([window for window in windows if not window.has_events], used, ranks)
    notes += _numbered_on(used)
    recorded = _steps_of_ranks(used)
    notes += [*world_notes, *_steps_apart(recorded)]
    groups, group_notes = unite([(w.rank if w.rank is not None else 0, w.groups) for w in used], world_size)
    wanted, more = _recorded_mesh(used)
    notes += more
    layout, axes, mesh_notes = infer_mesh(groups, world_size, present, parse_mesh(mesh) if mesh else None, wanted)
    hosts = {w.rank: w.identity.host for w in used if w.rank is not None}
    node_of = nodes(hosts, world_size, gpus_per_node)
    groups = ProcessGroups(
        [replace(g, axis=axis, spans_nodes=spans_nodes(g, node_of)) for g, axis in zip(groups.groups, axes, strict=True)],
        groups.index,
    )
    operations = _operations(used, groups)
    operations, matches, clock, match_notes = _matched(operations, groups, hosts)
    operations["purpose"] = purposes(operations)
    notes += [*group_notes, *mesh_notes, *match_notes, *_unrecorded(operations)]
    return Job(
        world_size=world_size,
        ranks=present if used else sorted({w.rank for w in alone if w.rank is not None}),
        missing_ranks=missing,
        backend=_most_common(w.identity.backend for w in used),
        device=_most_common(w.identity.device_name for w in used),
        steps=_common_steps(recorded),
        windows=[*used, *alone],
        groups=groups,
        mesh=layout,
        clock=clock,
        operations=schema.OPERATIONS.check(operations[schema.OPERATIONS.names]),
        matches=matches,
        coverage=everything,
        notes=list(dict.fromkeys(notes)),
        node_of=node_of,
    )


def _ranked(windows: Sequence[Window], wanted: frozenset[int] | None) -> tuple[list[Window], list[Note]]:
    """The windows that can be used, each with its final rank, sorted by rank and time."""
    ranks, problems, notes = resolve([(w.coverage, w.identity, w.span) for w in windows])
    used: list[Window] = []
    for window, rank, found in zip(windows, ranks, problems, strict=True):
        window.rank = window.coverage.rank = rank
        for doubt in found:
            window.coverage.note(doubt)
        if rank is not None and window.coverage.status not in ("skipped", "duplicate"):
            used.append(window)
    if not used and windows:
        nameless = [w.coverage.file for w in windows if any(found.code == "rank_unknown" for found in w.coverage.notes)]
        if nameless:
            raise InputError(f"the rank of {listed(nameless, 3)} is unknown", "put it into the file's name, for example rank3.json")
        reasons = [f"{w.coverage.file}: {p}" for w in windows for p in w.coverage.problems]
        raise InputError(reasons[0] if reasons else "no file could be given a rank", "put the rank into the file names (rank3.json)")
    if wanted is not None:
        kept = [w for w in used if w.rank in wanted]
        if not kept:
            there = ", ".join(str(r) for r in sorted({w.rank for w in used if w.rank is not None})[:20])
            raise UsageError("no rank of --ranks is in the traces", f"there are {there}")
        used = kept
    return sorted(used, key=lambda w: (w.rank, w.span)), notes


def _world(
    used: Sequence[Window], coverage: Sequence[Coverage], wanted: frozenset[int] | None
) -> tuple[int | None, list[int], list[int], list[Note]]:
    present = sorted({w.rank for w in used if w.rank is not None})
    sizes = Counter(w.identity.world_size for w in used if w.identity.world_size)
    notes = []
    world_size = sizes.most_common(1)[0][0] if sizes else None
    if len(sizes) > 1:
        notes.append(note("world_sizes_differ", sizes=tuple(sorted(sizes.items())), used=world_size))
    if world_size is not None and present and present[-1] >= world_size:
        notes.append(note("rank_beyond_world", rank=present[-1], world=world_size))
        world_size = present[-1] + 1
    if world_size is None:
        notes.append(note("world_size_not_recorded"))
        return None, present, [], notes
    asked = set(range(min(world_size, 10**6))) if wanted is None else set(wanted)
    missing = sorted(asked - set(present))
    cut = sorted({c.rank for c in coverage if c.status == "truncated" and c.rank is not None})
    if missing:
        of = f"{world_size}" if wanted is None else f"the {len(asked)} chosen"
        notes.append(note("ranks_missing", len(missing), read=len(present), of=of, missing=tuple(missing)))
    if cut:
        notes.append(note("ranks_truncated", len(cut), complete=len(set(present) - set(cut)), world=world_size, truncated=tuple(cut)))
    return world_size, present, missing, notes


def _recorded_mesh(used: Sequence[Window]) -> tuple[Recorded | None, list[Note]]:
    """The mesh that the manifests agree on; None where there are none, and (with a note) where they differ."""
    manifests = [w.manifest for w in used if w.manifest is not None and w.manifest.mesh]
    meshes = {tuple((axis.name, axis.size) for axis in m.mesh) for m in manifests}
    if len(meshes) != 1:
        return None, [note("manifests_of_different_meshes")] if meshes else []
    axis_of = {(g.name, tuple(g.ranks)): g.axis for m in manifests for g in m.groups if g.axis}
    axes = [Axis(name, size) for name, size in meshes.pop()]
    complete = [m for m in manifests if all(axis.name in m.coordinate for axis in axes)]
    return Recorded(axes, axis_of, {m.rank: tuple(m.coordinate[axis.name] for axis in axes) for m in complete}), []


def _most_common(values: Iterable[str]) -> str:
    counted = Counter(v for v in values if v)
    return counted.most_common(1)[0][0] if counted else ""


def _steps_of_ranks(used: Sequence[Window]) -> dict[int, set[int]]:
    """Numbers of the steps that each rank recorded, over all its windows."""
    by_rank: dict[int, set[int]] = {}
    for window in used:
        if window.rank is not None:
            by_rank.setdefault(window.rank, set()).update(int(n) for n in window.steps.number)
    return by_rank


def _numbered_on(used: Sequence[Window]) -> list[Note]:
    """Steps of a rank's later windows whose numbers repeat earlier ones (a profiler started again) are other steps: numbered on."""
    seen: dict[int | None, set[int]] = {}
    repeated = 0
    for window in used:
        before = seen.setdefault(window.rank, set())
        numbers = window.steps.number.tolist()
        if before.intersection(numbers):
            repeated += len(numbers)
            window.steps = replace(window.steps, number=numbered_on(window.steps.number, frozenset(before)))
        before.update(window.steps.number.tolist())
    return [note("windows_repeat_steps", repeated)] if repeated else []


def _common_steps(by_rank: Mapping[int, set[int]]) -> list[int]:
    return sorted(set.intersection(*by_rank.values())) if by_rank else []


def _steps_apart(by_rank: Mapping[int, set[int]]) -> list[Note]:
    """A note when ranks have steps but none in common."""
    if not any(by_rank.values()) or _common_steps(by_rank):
        return []
    return [note("no_common_step", len(by_rank), steps=tuple((rank, tuple(sorted(steps))) for rank, steps in sorted(by_rank.items())))]


def _operations(used: Sequence[Window], groups: ProcessGroups) -> pd.DataFrame:
    """All local operations, one under the other, with global groups and bytes; times still on each rank's own clock."""
    some = [index for index, window in enumerate(used) if len(window.operations)]
    if not some:
        columns = {name: schema.LOCAL_OPERATIONS.empty()[name] for name in ("source_rank", "destination_rank", "operator", "named_axis")}
        return schema.OPERATIONS.empty().assign(**columns)
    locals_ = [used[index].operations for index in some]
    numbers = [_one_window(index, used[index], groups) for index in some]
    united = pd.DataFrame(
        {
            **{name: np.concatenate([frame[name].to_numpy() for frame in locals_]) for name in _KEPT_NUMBERS},
            **{name: np.concatenate([columns[name] for columns in numbers]) for name in numbers[0]},
            **{name: _united_text([frame[name] for frame in locals_]) for name in _KEPT_TEXTS},
        }
    )
    sizes = np.array([g.size for g in groups.groups] or [0], np.int64)
    size = np.where(united["group"] >= 0, sizes[np.maximum(united["group"], 0)], 0)
    return _with_bytes(united, size)


#: Columns of LOCAL_OPERATIONS that the job's operations keep as they are.
_KEPT_NUMBERS = ("start_ns", "end_ns", "launch_ns", "seq", "in_elements", "out_elements", "stream")
_KEPT_TEXTS = ("kind", "dtype", "in_split", "phase", "context", "operator", "kernel", "implementation", "named_axis")


def _united_text(columns: Sequence[pd.Series[Any]]) -> pd.Categorical:
    """One text column of several, one under the other."""
    place: dict[str, int] = {}
    codes = []
    for column in columns:
        own = column.array if isinstance(column.dtype, pd.CategoricalDtype) else pd.Categorical(column)
        here = np.array([place.setdefault(str(word), len(place)) for word in own.categories.tolist()] or [-1], np.int64)
        codes.append(np.where(own.codes >= 0, here[own.codes], -1))
    return schema.categorical(np.concatenate(codes), list(place))


def _one_window(index: int, window: Window, groups: ProcessGroups) -> dict[str, npt.NDArray[Any]]:
    """What the job adds to the operations of one window."""
    local = window.operations
    rank = window.rank if window.rank is not None else -1
    numbers = np.append(window.steps.number, NULL)
    group = np.array([*groups.index[index], -1], np.int32)[local["group"].to_numpy()]
    used, of_group = np.unique(group, return_inverse=True)
    members = [groups.groups[number].ranks or () if number >= 0 else () for number in used.tolist()]
    positions = np.array([ranks.index(rank) if rank in ranks else -1 for ranks in members], np.int64)
    kind = np.asarray(local["kind"], dtype=object)
    source, destination = local["source_rank"].to_numpy().copy(), local["destination_rank"].to_numpy().copy()
    source[(kind == "send") & (source == NULL)] = rank
    destination[(kind == "recv") & (destination == NULL)] = rank
    return {
        "rank": np.full(len(local), rank, np.int32),
        "window": np.full(len(local), index, np.int32),
        "local": np.arange(len(local), dtype=np.int32),
        "step_number": numbers[local["step"].to_numpy()],
        "launch_step_number": numbers[local["launch_step"].to_numpy()],
        "group": group,
        "position": positions[of_group.reshape(-1)],
        "source_rank": source,
        "destination_rank": destination,
    }


def _with_bytes(frame: pd.DataFrame, size: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pd.DataFrame:
    categories = list(frame["dtype"].cat.categories)
    widths = np.array([element_type(c)[1] or NULL if c else NULL for c in categories] or [NULL], np.int64)
    width = widths[frame["dtype"].cat.codes.to_numpy()]
    ingoing, outgoing = frame["in_elements"].to_numpy(), frame["out_elements"].to_numpy()
    elements = full_elements(frame["kind"], ingoing, outgoing, size)
    known = ((elements != NULL) & (width != NULL)) | (elements == 0)  # nothing is no bytes, whatever the type
    full = np.where(known, elements * np.where(known, width, 0), NULL)
    frame["full_bytes"] = full
    kept = kept_elements(frame["in_split"], ingoing, size, frame["position"].to_numpy())
    own = np.where((kept != NULL) & (width != NULL), kept * np.where(width != NULL, width, 0), NULL)
    frame["sent_bytes"] = sent_bytes(frame["kind"], full, size, own)
    return frame


def _matched(
    operations: pd.DataFrame, groups: ProcessGroups, hosts: dict[int, str]
) -> tuple[pd.DataFrame, pd.DataFrame, Clock, list[Note]]:
    """Match, align the clocks on what was matched, then measure on the aligned times."""
    matched = match(operations, groups, hosts)
    clock = _clock(operations, matched, hosts)
    for name in ("start_ns", "end_ns"):
        operations[name] = _on_one_clock(operations, operations[name].to_numpy(), clock)
    matches, wait = measure(operations, matched, groups)
    _withhold(matches, wait, operations["rank"].to_numpy(), matched, clock)
    operations["match"] = matched.match
    operations["wait_ns"] = wait
    axes = [g.axis for g in groups.groups]
    names = list(dict.fromkeys(["", *axes]))
    lookup = np.array([names.index(a) for a in axes] + [0], np.int64)
    axis = np.asarray(names, dtype=object)[lookup[operations["group"].to_numpy()]]
    by_user = operations["named_axis"].astype("str").to_numpy()
    operations["axis"] = pd.Categorical(np.where(axis == "", by_user, axis))
    notes = list(matched.notes)
    if clock.note is not None:
        notes.append(clock.note)
    return operations, matches, clock, notes


def _on_one_clock(operations: pd.DataFrame, times: Int64Array, clock: Clock) -> Int64Array:
    """Times of operations, which stand rank by rank, on the job's clock."""
    result, rank = times.copy(), operations["rank"].to_numpy()
    bounds = np.append(np.flatnonzero(np.append(True, rank[1:] != rank[:-1])), len(rank)) if len(rank) else np.zeros(1, np.int64)
    for low, high in pairwise(bounds.tolist()):
        result[low:high] = clock.of(int(rank[low]), times[low:high])
    return result


def _withhold(matches: pd.DataFrame, wait: Int64Array, rank: Int32Array, matched: Matched, clock: Clock) -> None:
    """Between clocks that could not be aligned there is neither transfer nor wait, of collectives and messages alike."""
    if not clock.apart or not len(matches):
        return
    rows = np.flatnonzero(matched.match >= 0)
    number = matched.match[rows]
    own = np.array([clock.apart.get(int(r), 0) for r in rank[rows]], np.int64)
    low, high = np.full(len(matches), np.iinfo(np.int64).max), np.full(len(matches), -1, np.int64)
    np.minimum.at(low, number, own)
    np.maximum.at(high, number, own)
    wait[rows[(low < high)[number]]] = NULL
    matches["transfer_ns"] = np.where(low < high, NULL, matches["transfer_ns"].to_numpy())


def _messages(operations: pd.DataFrame, matched: Matched) -> Messages | None:
    """The matched sends with their receives."""
    frame = pd.DataFrame({"match": matched.match, "kind": operations["kind"].astype("str"), "rank": operations["rank"]})
    frame = frame.assign(start=operations["start_ns"], end=operations["end_ns"])[(matched.match >= 0) & frame["kind"].isin(POINT_TO_POINT)]
    sends, receives = (frame[frame["kind"] == kind] for kind in ("send", "recv"))
    both = sends.merge(receives, on="match", suffixes=("", "_there"))
    if not len(both):
        return None
    names = ("rank", "rank_there", "start", "end_there")
    sender, receiver, sent, received = (both[name].to_numpy() for name in names)
    return Messages(sender, receiver, sent, received)


def _clock(operations: pd.DataFrame, matched: Matched, hosts: dict[int, str]) -> Clock:
    by_seq = np.array([by == "seq" for by in matched.by] + [False], np.bool_)
    blocking = np.asarray(operations["kind"].isin(BLOCKING), np.bool_) & (matched.match >= 0)
    strong = blocking & by_seq[matched.match]
    chosen = strong if strong.any() else blocking
    clock = _aligned(operations, matched, hosts, chosen)
    if clock.aligned:
        return clock
    # Hosts that no collective ties are tied by their messages: over NCCL both sides of one leave it together.
    messages = operations["kind"].isin(POINT_TO_POINT) & operations["implementation"].isin(["nccl", "rccl"]) & (matched.match >= 0)
    by_messages = _aligned(operations, matched, hosts, chosen | messages.to_numpy())
    if by_messages.aligned:
        return by_messages
    both_ways = _messages(operations, matched)
    return _aligned(operations, matched, hosts, chosen, both_ways) if both_ways is not None else clock


def _aligned(
    operations: pd.DataFrame, matched: Matched, hosts: dict[int, str], chosen: BoolArray, messages: Messages | None = None
) -> Clock:
    part = operations[chosen]
    times = part["start_ns"].to_numpy(), part["end_ns"].to_numpy()
    return align(hosts, part["rank"].to_numpy(), matched.match[chosen], *times, messages)


def _unrecorded(operations: pd.DataFrame) -> list[Note]:
    """Notes on what the traces do not say about their communication."""
    notes: list[Note] = []
    if not len(operations):
        return notes
    without_group = int((operations["group"] < 0).sum())
    if without_group:
        notes.append(note("groups_not_recorded", without_group, total=len(operations)))
    unknown = operations[operations["full_bytes"] == NULL]
    if len(unknown):
        odd = sorted(set(unknown["dtype"].astype("str")) - {""})
        strange = [d for d in odd if element_type(d)[1] is None]
        notes.append(note("bytes_not_known", len(unknown), types=tuple(strange[:5])))
    return notes
