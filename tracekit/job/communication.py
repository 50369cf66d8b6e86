"""Which device work is communication: what a communication call launched, not only what is called like it.

In this order: metadata on the kernel; the ``record_param_comms`` that encloses its launch; the operator; the backend's range
(``nccl:``, ``mccl:``, ``xccl:``, ...); the kernel's name, by the tables of ``collectives.kinds`` or a pattern of the user's. Inside such a
call a kernel is communication whatever its name, unless it is known to compute or an inner ``aten::`` operator launched it: those are what
gets a tensor ready (concatenation, casts). A copy inside a call is the transfer unless such an operator launched it; a copy between two
devices always is. A call with a kernel that is known to move its data needs no others.
"""

from __future__ import annotations

import re

import numpy as np

from tracekit.collectives.kinds import (
    computes,
    kernel_class,
    kind_of_annotation,
    kind_of_collective_name,
    kind_of_fused_operator,
    kind_of_operator,
)
from tracekit.collectives.named import Named, named_class
from tracekit.trace import correlate
from tracekit.trace.events import BoolArray, Category, Int64Array, RankTables
from tracekit.units import NULL

#: Backends whose annotations ARE the communication (it runs on the host). An ``nccl:`` range only encloses a launch.
HOST_BACKENDS = ("gloo:", "mpi:", "ucc:")
#: The recorder's range around a collective call, with the arguments that NCCL's record has.
LABEL = "tracekit::collective"
RECORD = "record_param_comms"

_BETWEEN_DEVICES = re.compile(r"P\s*to\s*P|Peer", re.I)
#: Operators that get tensors ready inside a communication call.
_PREPARES = ("aten::", "fsdp::", "prims::", "inductor::", "triton::")


def host_ranges(tables: RankTables) -> Int64Array:
    """Rows of operators and annotations that have an end."""
    rows = tables.rows(Category.OPERATOR, Category.USER_ANNOTATION)
    return rows[tables.dur[rows] >= 0]


def records(tables: RankTables) -> Int64Array:
    """Records of calls that move something; those that wait, or make a group, are none."""
    side = tables.side["communication"]
    host = host_ranges(tables)
    rows: Int64Array = host[tables.each_text(tables.name[host], lambda text: text in (RECORD, LABEL))]
    at = side.at(rows)
    if not len(side):
        return rows
    called = np.where(at >= 0, side.columns["Collective name"][np.maximum(at, 0)], 0)
    moving: Int64Array = rows[tables.each_text(called, lambda text: text == "" or kind_of_collective_name(text) is not None)]
    return moving


def call_rows(tables: RankTables) -> Int64Array:
    """Host ranges in which a communication library is called: records, operators, ranges of a backend of devices."""
    host = host_ranges(tables)

    def calls(text: str) -> bool:
        return kind_of_operator(text) is not None or (kind_of_annotation(text) is not None and not text.startswith(HOST_BACKENDS))

    return np.union1d(host[tables.each_text(tables.name[host], calls)], records(tables))


def around(tables: RankTables, launch: Int64Array, outer: Int64Array) -> Int64Array:
    """Innermost of ``outer`` around each launch; -1 where there is none, or no launch (-1)."""
    result = np.full(len(launch), -1, np.int64)
    known = launch >= 0
    if known.any() and len(outer):
        rows, inverse = np.unique(launch[known], return_inverse=True)
        result[known] = correlate.enclosing(tables, rows, outer)[inverse]
    return result


def is_communication(tables: RankTables, rows: Int64Array, launch: Int64Array, named: Named) -> BoolArray:
    """Whether each piece of device work is communication; ``launch`` are the host calls that launched them (-1: not known)."""
    kernels = tables.category[rows] == Category.KERNEL
    by_name = tables.each_text(tables.name[rows], lambda text: kernel_class(text) is not None or named_class(text, named) is not None)
    found: BoolArray = kernels & (by_name | _by_metadata(tables, rows))
    calls = call_rows(tables)
    call = around(tables, launch, calls)
    open_ = np.flatnonzero((call >= 0) & ~found & (tables.category[rows] != Category.MEMSET))
    if len(open_):
        prepared = _prepared(tables, launch[open_], call[open_], calls)
        names = tables.name[rows[open_]]
        computing = tables.each_text(names, computes)
        served = np.isin(call[open_], call[found & _moves(tables, rows)])
        peers = tables.each_text(names, lambda text: _BETWEEN_DEVICES.search(text) is not None)
        found[open_] = np.where(kernels[open_], ~prepared & ~served & ~computing, (~prepared & ~served) | peers)
    _fused_transfers(tables, rows, launch, found)
    return found


def _fused_transfers(tables: RankTables, rows: Int64Array, launch: Int64Array, found: BoolArray) -> None:
    """Mark copies between devices inside an operator that fuses a collective with a multiplication, in place."""
    host = host_ranges(tables)
    fused = host[tables.each_text(tables.name[host], lambda text: kind_of_fused_operator(text) is not None)]
    if len(fused):
        copies = np.flatnonzero((tables.category[rows] == Category.MEMCPY) & ~found)
        peers = tables.each_text(tables.name[rows[copies]], lambda text: _BETWEEN_DEVICES.search(text) is not None)
        found[copies[peers & (around(tables, launch[copies], fused) >= 0)]] = True


def _moves(tables: RankTables, rows: Int64Array) -> BoolArray:
    """Whether the name of each piece of work is none of a kernel that only waits."""

    def moves(text: str) -> bool:
        known = kernel_class(text)
        return known is None or known.moves_data

    result: BoolArray = tables.each_text(tables.name[rows], moves)
    return result


def _by_metadata(tables: RankTables, rows: Int64Array) -> BoolArray:
    side = tables.side["communication"]
    result = np.zeros(len(rows), np.bool_)
    if len(side):
        at = side.at(rows)
        result[at >= 0] = side.columns["Collective name"][at[at >= 0]] > 0
    return result


def _prepared(tables: RankTables, launch: Int64Array, call: Int64Array, calls: Int64Array) -> BoolArray:
    """Whether an operator inside the call launched the work to get a tensor ready."""
    operators = tables.rows(Category.OPERATOR)
    inner = around(tables, launch, operators[~np.isin(operators, calls)])
    row = np.maximum(inner, 0)
    start, length = tables.ts[row], tables.dur[row]
    inside = (inner >= 0) & (start != NULL) & (start >= tables.ts[call]) & (start + length <= tables.ts[call] + tables.dur[call])
    prepares: BoolArray = tables.each_text(np.where(inside, tables.name[row], 0), lambda text: text.startswith(_PREPARES))
    result: BoolArray = inside & prepares
    return result
