"""Calls of c10d operators on the host: what was passed to them, and which of them each range of a host backend carries out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import pandas as pd

from tracekit.collectives import kinds
from tracekit.job.shapes import argument_elements, argument_type, tensor_shapes
from tracekit.schema import categorical
from tracekit.trace import correlate
from tracekit.trace.codes import distinct_rows
from tracekit.trace.events import Int32Array, Int64Array, RankTables
from tracekit.units import NULL

Words = npt.NDArray[np.object_]

#: Operators with one tensor argument, which goes in and comes out; all others take their outputs first, their inputs second.
_ONE_ARGUMENT = ("all_reduce", "broadcast", "reduce", "send", "recv", "barrier")
#: Operators whose arguments are known; all but c10d's take the input first and return the output.
_READ = ("c10d::", "_c10d_functional", "c10d_functional::", "symm_mem::")
#: gloo carries a reduce-scatter out as an all-reduce of the whole input.
_CARRIED_AS = {"reduce_scatter": "all_reduce"}
#: Where ``alltoall_base_`` has its split sizes among its arguments.
_OUT_SPLIT, _IN_SPLIT = 3, 4


@dataclass(frozen=True)
class Passed:
    """What the arguments of c10d operators say, one entry an operation; NULL and '' where nothing is recorded."""

    in_elements: Int64Array
    out_elements: Int64Array
    in_split: pd.Categorical
    out_split: pd.Categorical
    dtype: pd.Categorical


def passed(tables: RankTables, rows: Int64Array) -> Passed:
    """Arguments of the operators in these event rows (-1: none)."""
    side = tables.side["shapes"]
    at = side.at(rows)

    def code(column: str) -> Int32Array:
        values = side.columns[column][np.maximum(at, 0)] if len(side) else np.zeros(len(rows), np.int32)
        return np.where(at >= 0, values, 0).astype(np.int32)

    names = np.where(rows >= 0, tables.name[np.maximum(rows, 0)], 0).astype(np.int32)
    columns, inverse = distinct_rows(names, code("Input Dims"), code("Input type"), code("Concrete Inputs"))
    read = [_read(tables, *row) for row in np.stack(columns, axis=1).tolist()] or [(NULL, NULL, "", "", "")]

    def words(index: int) -> pd.Categorical:
        texts = [str(row[index]) for row in read]
        categories = list(dict.fromkeys(texts))
        return categorical(np.array([categories.index(text) for text in texts], np.int64)[inverse], categories)

    ingoing, outgoing = (np.array([row[i] for row in read], np.int64)[inverse] for i in (0, 1))
    return Passed(ingoing, outgoing, words(2), words(3), words(4))


def _read(tables: RankTables, name: int, dims: int, types: int, concrete: int) -> tuple[int, int, str, str, str]:
    """(elements in, elements out, splits in, splits out, element type) of one call."""
    text = tables.text(name)
    kind = kinds.kind_of_operator(text)
    if kind is None or not text.startswith(_READ):
        return NULL, NULL, "", "", ""
    sizes = argument_elements(tables.text(dims), tables.text(types))
    dtype = argument_type(tables.text(types))
    first, second = (sizes[i] if i < len(sizes) else NULL for i in (0, 1))
    if kind in _ONE_ARGUMENT:
        return first, (first if kind not in ("send", "barrier") else NULL), "", "", dtype
    if not text.startswith("c10d::"):  # the input comes first, the output is returned
        return first, NULL, "", "", dtype
    splits = _splits(tables.text(concrete)) if text == "c10d::alltoall_base_" else ("", "")
    return second, first, *splits, dtype


def _splits(concrete: str) -> tuple[str, str]:
    """(in, out) split sizes of an all_to_all; '' for even ones."""
    try:
        values = msgspec.json.decode(concrete) if concrete else []
    except msgspec.DecodeError:
        return "", ""
    found = [str(values[i]) if isinstance(values, list) and len(values) > i else "" for i in (_IN_SPLIT, _OUT_SPLIT)]
    ingoing, outgoing = ("" if text == "[]" else text for text in found)
    return ingoing, outgoing


def host_calls(tables: RankTables, rows: Int64Array, start: Int64Array, calls: Int64Array) -> Int64Array:
    """The c10d operator that queued each piece of a host backend's work; -1 where it is not in the trace.

    A backend serves its queue in order, so the n-th piece of one kind and size belongs to the n-th such call that had been made by then:
    with c[j] the calls made before piece j began, the piece takes call a[j] where a[0] = 0 and a[j+1] = min(a[j] + 1, c[j]).
    """
    result = np.full(len(rows), -1, np.int64)
    calls = calls[~tables.each_text(tables.name[calls], lambda text: text.startswith("_c10d_functional"))]
    # Under a dispatch mode a call stands twice in the trace, the inner one inside the outer: the inner one is what the backend got.
    outer = correlate.enclosing(tables, calls, calls)
    calls = calls[~np.isin(calls, outer[outer >= 0])]
    kind_of_call = _coded(tables, calls, kinds.kind_of_operator)
    kind_of_piece = _coded(tables, rows, kinds.kind_of_annotation)
    size_of_call, size_of_piece = passed(tables, calls).in_elements, tensor_shapes(tables, rows).elements
    for kind in np.unique(kind_of_piece).tolist():
        pieces, queued = np.flatnonzero(kind_of_piece == kind), np.flatnonzero(kind_of_call == kind)
        sizes = np.unique(size_of_piece[pieces])
        # Where a backend shows other sizes than were passed (the root's of a scatter), the order alone has to do.
        by_size = bool(np.isin(sizes, size_of_call[queued]).all())
        for size in sizes.tolist() if by_size else [None]:
            some = pieces if size is None else pieces[size_of_piece[pieces] == size]
            made = queued if size is None else queued[size_of_call[queued] == size]
            _serve(result, some, start[some], calls[made], tables.ts[calls[made]])
    return result


def _coded(tables: RankTables, rows: Int64Array, kind: Callable[[str], str | None]) -> Words:
    """The kind of each row, a reduce-scatter under the kind that carries it out."""
    used, inverse = np.unique(tables.name[rows], return_inverse=True)
    words = [kind(tables.text(code)) or "" for code in used.tolist()]
    carried = np.array([_CARRIED_AS.get(word, word) for word in words] or [""], dtype=object)
    found: Words = carried[inverse] if len(rows) else carried[:0]
    return found


def _serve(result: Int64Array, pieces: Int64Array, start: Int64Array, calls: Int64Array, called: Int64Array) -> None:
    """Give the pieces of one queue their calls, the first come first."""
    order, in_time = np.argsort(start, kind="stable"), np.argsort(called, kind="stable")
    pieces, start, calls = pieces[order], start[order], calls[in_time]
    made = np.searchsorted(called[in_time], start, side="right")
    position = np.arange(len(pieces))
    after = np.minimum(np.minimum.accumulate(made - position) + position, position + 1)  # a[j+1], written out over all earlier pieces
    before = np.concatenate([[0], after[:-1]])
    served = before < made
    result[pieces[served]] = calls[before[served]]
