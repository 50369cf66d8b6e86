"""What the recorder's manifest adds to its rank: the job's size, process groups, and group and sequence of each collective."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from tracekit.collectives.kinds import element_type, kind_of_operator
from tracekit.manifest import Manifest
from tracekit.mesh.process_groups import LocalGroup
from tracekit.notes import note
from tracekit.readers.identity import Identity
from tracekit.trace.events import Category, Int64Array, RankTables
from tracekit.units import NULL

#: So many calls back is looked for the one that was still running: calls of several threads overlap, and few do.
_LOOK_BACK = 4


def filled(identity: Identity, manifest: Manifest) -> Identity:
    """What the trace does not say of its rank, where the recorder does: one that outlived its process groups has no distributedInfo."""
    if not manifest.tracekit_version:  # its defaults would be taken for what somebody wrote
        return identity
    world = manifest.world_size if 0 <= manifest.rank < manifest.world_size else None
    return replace(
        identity,
        world_size=identity.world_size or world,
        backend=identity.backend or manifest.backend,
        host=identity.host or manifest.host,
    )


def add_groups(groups: list[LocalGroup], manifest: Manifest) -> None:
    """Groups that the manifest lists and the trace does not, behind the others; a whole list takes the place of a cut one."""
    index = {group.name: i for i, group in enumerate(groups)}
    for listed in manifest.groups:
        recorded = LocalGroup(listed.name, listed.description, tuple(listed.ranks), len(listed.ranks), backend=listed.backend)
        at = index.get(listed.name)
        if at is None:
            groups.append(recorded)
        elif groups[at].ranks is None and groups[at].size in (0, recorded.size):
            groups[at] = recorded


def add_calls(tables: RankTables, operations: pd.DataFrame, groups: list[LocalGroup], manifest: Manifest) -> None:
    """Fill in group, sequence and type of operations that lack them: of the call that the flight recorder saw in the same operator."""
    calls = manifest.calls
    if calls.lost:
        tables.coverage.note(note("flight_recorder_overwritten", calls.lost))
    if not calls.time_ns or not len(operations):
        return
    time = np.array(calls.time_ns, np.int64)
    order = np.argsort(time, kind="stable")
    around = _operator_around(tables, time[order])
    known = around != NULL
    index = {group.name: i for i, group in enumerate(groups)}
    group_of = np.array([index.get(group.name, -1) for group in manifest.groups] + [-1], np.int32)
    group = group_of[np.array(calls.group, np.int64)[order][known]]
    seq = np.array(calls.seq, np.int64)[order][known]
    started, first = np.unique(around[known], return_index=True)
    launch = operations["launch_ns"].to_numpy()
    at = np.minimum(np.searchsorted(started, launch), max(0, len(started) - 1))
    hit = (started[at] == launch) & (operations["group"].to_numpy() < 0) if len(started) else np.zeros(len(launch), np.bool_)
    operations.loc[hit, "group"] = group[first][at[hit]]
    operations.loc[hit, "seq"] = seq[first][at[hit]]
    if calls.dtype:  # a rank that gets its share of a scatter shows no input, and so no type
        types = np.array([element_type(text)[0] for text in calls.strings], dtype=object)
        recorded = types[np.array(calls.dtype, np.int64)[order][known]][first]
        named = np.asarray(operations["dtype"], dtype=object)
        missing = np.flatnonzero(hit & (named == ""))
        named[missing] = recorded[at[missing]]
        operations["dtype"] = pd.Categorical(named)


def _operator_around(tables: RankTables, times: Int64Array) -> Int64Array:
    """Start of the c10d operator that was running at each of the sorted times, the latest started one; NULL for none."""
    rows = tables.rows(Category.OPERATOR)
    rows = rows[tables.each_text(tables.name[rows], lambda text: text.startswith("c10d::") and kind_of_operator(text) is not None)]
    rows = rows[tables.dur[rows] >= 0]
    rows = rows[np.argsort(tables.ts[rows], kind="stable")]
    start, end = tables.ts[rows], tables.ts[rows] + tables.dur[rows]
    result = np.full(len(times), NULL, np.int64)
    if not len(rows):
        return result
    last = np.searchsorted(start, times, side="right") - 1
    for back in range(_LOOK_BACK):
        at = np.maximum(last - back, 0)
        fits = (result == NULL) & (last - back >= 0) & (times <= end[at])
        result[fits] = start[at[fits]]
    return result
