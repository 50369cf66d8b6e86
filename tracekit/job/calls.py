"""Pieces of device work to calls: a call that ran as several kernels is one operation, a batch of sends and receives is its edges."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from tracekit.collectives.kinds import EXPERT_LIBRARIES, kernel_class, kind_of_annotation, kind_of_collective_name
from tracekit.trace.codes import distinct_rows
from tracekit.trace.events import BoolArray, Int64Array, RankTables
from tracekit.units import NULL

#: What pieces of one call have in common in their metadata; the sequence number first.
_ARGUMENTS = ("Seq", "Collective name", "Process Group Name", "In msg nelems", "Out msg nelems", "dtype")


@dataclass(frozen=True)
class Links:
    """For each operation the host rows around the call (-1: none) and the rows of the communication side table (-1: none)."""

    anchor: Int64Array  # the host row that called it: launch, or the c10d operator of a host backend
    own: Int64Array  # side-table row of the kernel itself
    record: Int64Array  # events row of the enclosing record_param_comms
    barrier: Int64Array  # events row of the record or operator of a barrier around it
    operator: Int64Array  # innermost operator that is a collective
    annotation: Int64Array  # innermost backend annotation
    context: Int64Array  # innermost other annotation

    def at(self, rows: Int64Array) -> Links:
        """The links of some of the operations, or of some several times."""
        return Links(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


@dataclass(frozen=True)
class Grouped:
    """Operations made of pieces: ``piece`` is the one whose name and arguments stand for the operation."""

    operation: Int64Array  # of each piece: the operation it belongs to
    piece: Int64Array  # of each operation
    start: Int64Array  # ns
    end: Int64Array  # ns
    pieces: Int64Array  # how many pieces each operation has
    waiting: Int64Array  # of them, time [ns] of those that only wait for other ranks or exchange counts

    def at(self, rows: Int64Array) -> Grouped:
        """Some of the operations, or some several times; the pieces stay as they are."""
        columns = {field.name: getattr(self, field.name)[rows] for field in fields(self) if field.name != "operation"}
        return Grouped(operation=self.operation, **columns)


def group(tables: RankTables, names: Int64Array, start: Int64Array, end: Int64Array, stream: Int64Array, links: Links) -> Grouped:
    """One operation a call. All arrays have one entry a piece of communication; pieces are sorted by start.

    A call is its record, else its operator, else the backend's range, else (kernels that no launch ties to anything) its sequence number.
    Kernels of an expert library that only wait or exchange counts belong to the next kernel of that stream that moves tokens.
    """
    key = _keys(tables, links)
    moves, expert = _kernel_facts(tables, names)
    key = _with_next(key, expert & (key < 0), moves, stream, links.context)
    single = key < 0
    key[single] = int(key.max(initial=0)) + 1 + np.arange(int(single.sum()))
    _, first, operation = np.unique(key, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")  # operations in the order of their first piece
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    operation = rank[operation.reshape(-1)]
    count = len(order)
    shown = np.full(count, len(names), np.int64)
    np.minimum.at(shown, operation, np.where(moves, np.arange(len(names)), len(names)))
    shown = np.where(shown < len(names), shown, first[order])
    low, high = np.full(count, np.iinfo(np.int64).max), np.full(count, NULL)
    np.minimum.at(low, operation, start)
    np.maximum.at(high, operation, end)
    waiting = np.zeros(count, np.int64)
    np.add.at(waiting, operation[~moves], (end - start)[~moves])
    return Grouped(operation, shown, low, high, np.bincount(operation, minlength=count).astype(np.int64), waiting)


def _keys(tables: RankTables, links: Links) -> Int64Array:
    """A number for the call of each piece; -1 where nothing but the piece itself is known."""
    key = np.full(len(links.own), -1, np.int64)
    for rows in (links.annotation, links.operator, links.record, links.barrier):  # what comes later counts more
        key = np.where(rows >= 0, rows, key)
    own = _own_arguments(tables, links.own)
    alone = key < 0
    both = np.flatnonzero(~alone | (own >= 0))
    if len(both):  # kernels that tell different arguments are different calls, whatever range they were launched in
        key[both] = distinct_rows(np.where(alone, -1, key)[both], np.where(links.barrier[both] >= 0, -1, own[both]))[1]
    return key


def _own_arguments(tables: RankTables, own: Int64Array) -> Int64Array:
    """A number for what each kernel's metadata tells of its call; -1 where it tells no sequence number and so not which call it is."""
    side = tables.side["communication"]
    result = np.full(len(own), -1, np.int64)
    rows = np.flatnonzero(own >= 0)
    if not len(rows):
        return result
    at = own[rows]
    columns = [side.columns[name][at] for name in _ARGUMENTS]
    number = distinct_rows(*columns)[1]
    name = side.columns["Collective name"][at]
    single = tables.each_text(name, lambda text: kind_of_collective_name(text) in ("send", "recv", "send_recv"))
    result[rows] = np.where((columns[0] != NULL) & ~single, number, -1)
    return result


def _kernel_facts(tables: RankTables, names: Int64Array) -> tuple[BoolArray, BoolArray]:
    """(moves data, is of an expert library) of each kernel, by its name."""

    def moves(text: str) -> bool:
        found = kernel_class(text)
        return found is None or found.moves_data

    def expert(text: str) -> bool:
        found = kernel_class(text)
        return found is not None and found.implementation in EXPERT_LIBRARIES

    return tables.each_text(names, moves), tables.each_text(names, expert)


def _with_next(key: Int64Array, expert: BoolArray, moves: BoolArray, stream: Int64Array, context: Int64Array) -> Int64Array:
    """Give pieces that move nothing the key of the next one of their stream and range that does."""
    rows = np.flatnonzero(expert)
    if not len(rows) or moves[rows].all():
        return key
    rows = rows[np.argsort(stream[rows], kind="stable")]
    place = np.arange(len(rows))
    following = np.minimum.accumulate(np.where(moves[rows], place, len(rows))[::-1])[::-1]
    target = rows[np.minimum(following, len(rows) - 1)]
    fits = (following < len(rows)) & (stream[target] == stream[rows]) & (context[target] == context[rows])
    result = key.copy()
    base = int(key.max(initial=0)) + 1
    result[rows] = np.where(fits, base + target, base + rows)
    return result


def batches(tables: RankTables, links: Links, kinds: npt.NDArray[np.object_], records: Int64Array) -> tuple[Int64Array, Links]:
    """Batches of point-to-point calls to one operation a call: (operation that each result comes from, links of the results).

    ``batch_isend_irecv`` records every send and receive, then launches one kernel for all of them, inside ``nccl:coalesced``: what was
    recorded on the thread since the last such launch, and launched nothing itself, is what the kernel carries.
    """
    same = np.arange(len(kinds))
    side = tables.side["communication"]
    vague = np.isin(kinds, ["send_recv", "unknown"]) & (links.anchor >= 0)
    grouped = tables.each_text(np.where(links.annotation >= 0, tables.name[np.maximum(links.annotation, 0)], 0), _is_batch)
    batch = np.flatnonzero(vague & (grouped | (links.record < 0)))
    lone = np.setdiff1d(records[side.at(records) >= 0], links.record)
    if not len(batch) or not len(lone):
        return same, links
    names = side.columns["Collective name"][side.at(lone)]
    lone = lone[tables.each_text(names, lambda text: kind_of_collective_name(text) in ("send", "recv"))]
    carried = _carried_by(tables, lone, links.anchor[batch])
    used = carried >= 0
    lone, carried = lone[used], batch[carried[used]]
    source = np.concatenate([np.setdiff1d(same, carried), carried])
    record = np.concatenate([np.full(len(source) - len(lone), -1, np.int64), lone])
    order = np.lexsort((record, source))
    source, record = source[order], record[order]
    result = links.at(source)
    edge = record >= 0
    return source, replace(result, record=np.where(edge, record, result.record), own=np.where(edge, -1, result.own))


def _is_batch(text: str) -> bool:
    return kind_of_annotation(text) in ("unknown", "send_recv")


def _carried_by(tables: RankTables, records: Int64Array, launches: Int64Array) -> Int64Array:
    """For each record the first launch behind it on its thread (index into ``launches``); -1 where there is none."""
    result = np.full(len(records), -1, np.int64)
    for lane in np.unique(tables.lane[launches]).tolist():
        there = np.flatnonzero(tables.lane[launches] == lane)
        there = there[np.argsort(tables.ts[launches[there]], kind="stable")]
        own = np.flatnonzero(tables.lane[records] == lane)
        at = np.searchsorted(tables.ts[launches[there]], tables.ts[records[own]], side="left")
        result[own] = np.where(at < len(there), there[np.minimum(at, len(there) - 1)], -1)
    return result
