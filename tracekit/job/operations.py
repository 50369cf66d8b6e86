"""Communication operations of one window: for every piece of communication, what was called, by whom, over which group.

Metadata decides before the operator's name, the operator before the backend's annotation, and that before the kernel's name:
a kernel called SendRecv may be any collective, an uneven all-gather runs as broadcasts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from tracekit import schema
from tracekit.collectives import kinds
from tracekit.collectives.named import Named, named_class
from tracekit.job.activity import DeviceWork, Work
from tracekit.job.calls import Grouped, Links, batches, group
from tracekit.job.communication import HOST_BACKENDS, LABEL, around, host_ranges, records
from tracekit.job.host_calls import host_calls, passed
from tracekit.job.shapes import tensor_shapes
from tracekit.trace.codes import distinct, distinct_rows
from tracekit.trace.events import DEVICE_WORK, BoolArray, Category, Int32Array, Int64Array, RankTables
from tracekit.trace.steps import PHASE_NAMES, Phases, Steps
from tracekit.units import NULL

EVIDENCE = ("metadata", "operator", "annotation", "kernel_name")


def local_operations(
    tables: RankTables, work: DeviceWork, phases: Phases, group_of: Int32Array, steps: Steps, named: Named = ()
) -> tuple[pd.DataFrame, DeviceWork]:
    """The table schema.LOCAL_OPERATIONS, and the device work with ``operation`` filled in.

    ``group_of`` gives the local group of each row of ``tables.side["communication"]``.
    """
    at = np.flatnonzero(work.work == Work.COMMUNICATION)
    if not len(at):
        return schema.LOCAL_OPERATIONS.empty(), work
    pieces = _links(tables, work.row[at], work.launch_row[at], work.start[at])
    grouped = group(tables, work.name[at].astype(np.int64), work.start[at], work.end[at], _streams(work, at), pieces)
    links = pieces.at(grouped.piece)
    shown = at[grouped.piece]
    kinds_found = _kinds(tables, work.row[shown], links, named)
    source, edges = batches(tables, links, np.asarray(kinds_found[0], dtype=object), records(tables))
    operation = work.operation.copy()
    first = np.searchsorted(source, np.arange(len(grouped.piece)))  # of a batch the first edge
    operation[at] = first[grouped.operation].astype(np.int32)
    if edges is not links:
        shown, links, grouped = shown[source], edges, grouped.at(source)
        kinds_found = _kinds(tables, work.row[shown], links, named)
    work = replace(work, operation=operation)
    columns = {
        **dict(zip(("kind", "implementation", "evidence"), kinds_found, strict=True)),
        **_times(tables, work, shown, links, grouped, np.asarray(kinds_found[0]) == "send", steps, phases),
        "kernels": grouped.pieces,
        "waiting_ns": grouped.waiting,
        "stream": work.stream[shown],
        "context": texts(tables, _names(tables, links.context)),
        "operator": texts(tables, _names(tables, links.operator)),
        "kernel": texts(tables, work.name[shown]),
        "named_axis": _named_axes(tables, work.name[shown], named),
        **_metadata(tables, work.launch_row[shown] < 0, work.row[shown], links, group_of),
    }
    return schema.LOCAL_OPERATIONS.check(schema.LOCAL_OPERATIONS.frame(columns)), work


def _times(
    tables: RankTables, work: DeviceWork, shown: Int64Array, links: Links, grouped: Grouped, sends: BoolArray, steps: Steps, phases: Phases
) -> dict[str, object]:
    """When each operation was called, began and ended, in which step and phase; ``shown``: the piece of work that stands for it."""
    called = np.full(len(shown), NULL, np.int64)
    known = links.anchor >= 0
    called[known] = tables.ts[links.anchor[known]]
    launch_step = work.launch_step[shown].copy()
    on_host = known & (work.launch_row[shown] < 0)
    launch_step[on_host] = steps.index_at(called[on_host])
    return {
        # gloo opens the range of a send behind the call that has already begun to move it.
        "start_ns": np.where(on_host & sends, called, grouped.start),
        "end_ns": grouped.end,
        "launch_ns": called,
        "step": steps.index_at(grouped.start),
        "launch_step": launch_step,
        "phase": schema.categorical(phases.at(called), PHASE_NAMES),
    }


def _streams(work: DeviceWork, at: Int64Array) -> Int64Array:
    """A number for the stream of each piece, devices apart."""
    return distinct_rows(work.device[at], work.stream[at])[1]


def texts(tables: RankTables, codes: Int32Array) -> pd.Categorical:
    """String codes as a categorical; code 0 is ''."""
    return lookup(tables, codes, lambda text: text)


def lookup(tables: RankTables, codes: Int32Array, translate: Callable[[str], str]) -> pd.Categorical:
    """``translate`` of every code's string, called once a distinct string."""
    place, categories = _looked_up(tables, codes, translate)
    return schema.categorical(place, categories)


def _looked_up(tables: RankTables, codes: Int32Array, translate: Callable[[str], str]) -> tuple[Int64Array, list[str]]:
    """(place of each code's word, the words)."""
    used, inverse = distinct(codes)
    words = [translate(tables.text(int(code))) for code in used]
    categories = list(dict.fromkeys(words))
    position = {word: i for i, word in enumerate(categories)}
    index = np.array([position[word] for word in words], np.int64)
    return (index[inverse] if len(used) else np.empty(0, np.int64)), categories


def _each_word(tables: RankTables, codes: Int32Array, translate: Callable[[str], str]) -> npt.NDArray[np.object_]:
    """``translate`` of every code's string."""
    place, words = _looked_up(tables, codes, translate)
    found: npt.NDArray[np.object_] = np.array([*words, ""], dtype=object)[place]
    return found


def _names(tables: RankTables, rows: Int64Array) -> Int32Array:
    return np.where(rows >= 0, tables.name[np.maximum(rows, 0)], 0).astype(np.int32)


def _coded_rows(tables: RankTables, rows: Int64Array, wanted: Callable[[str], bool]) -> Int64Array:
    """The rows whose name satisfies ``wanted``."""
    found: Int64Array = rows[tables.each_text(tables.name[rows], wanted)]
    return found


def _links(tables: RankTables, rows: Int64Array, launch: Int64Array, start: Int64Array) -> Links:
    side = tables.side["communication"]
    host = host_ranges(tables)
    calls = _coded_rows(tables, host, lambda text: _kind_of_operator(text) != "")
    annotations = _coded_rows(tables, host, lambda text: kinds.kind_of_annotation(text) is not None and not text.startswith(HOST_BACKENDS))
    contexts = _coded_rows(tables, tables.rows(Category.USER_ANNOTATION), is_context)
    recorded = records(tables)
    recorded = recorded[side.at(recorded) >= 0]
    anchor = launch.copy()
    by_host = np.flatnonzero(~np.isin(tables.category[rows], [int(c) for c in DEVICE_WORK]))
    if len(by_host):
        anchor[by_host] = host_calls(tables, rows[by_host], start[by_host], calls)
        labels = tables.each_text(tables.name[rows], lambda text: text == LABEL)
        anchor[labels] = rows[labels]
    operator = around(tables, anchor, calls)
    operator[by_host] = anchor[by_host]
    return Links(
        anchor=anchor,
        own=side.at(rows),
        record=around(tables, anchor, recorded),
        barrier=around(tables, anchor, _barriers(tables, recorded, calls)),
        operator=operator,
        annotation=around(tables, anchor, annotations),
        context=around(tables, anchor, contexts),
    )


def _barriers(tables: RankTables, recorded: Int64Array, calls: Int64Array) -> Int64Array:
    """Records and operators of barriers; NCCL runs an all-reduce inside, with a record of its own."""
    side = tables.side["communication"]
    names = side.columns["Collective name"][side.at(recorded)] if len(recorded) else np.empty(0, np.int32)
    by_record = recorded[tables.each_text(names, lambda text: kinds.kind_of_collective_name(text) == "barrier")]
    return np.union1d(by_record, _coded_rows(tables, calls, lambda text: kinds.kind_of_operator(text) == "barrier"))


def is_context(text: str) -> bool:
    """An annotation that says what the program was doing, not which step or which backend call."""
    return kinds.kind_of_annotation(text) is None and not text.startswith("ProfilerStep")


def _kinds(tables: RankTables, rows: Int64Array, links: Links, named: Named) -> tuple[pd.Categorical, pd.Categorical, pd.Categorical]:
    side = tables.side["communication"]
    column = side.columns["Collective name"]

    def of_side(at: Int64Array) -> npt.NDArray[np.object_]:
        codes = np.where(at >= 0, column[np.maximum(at, 0)], 0) if len(side) else np.zeros(len(at), np.int32)
        return _each_word(tables, codes.astype(np.int32), lambda text: kinds.kind_of_collective_name(text) or "")

    names = tables.name[rows]
    by_kernel = _each_word(tables, names, lambda text: _kind_of_kernel(text, named))
    sources = [
        (np.where(links.barrier >= 0, "barrier", "").astype(object), 0),
        (of_side(links.own), 0),
        (of_side(_side_rows(tables, links.record)), 0),
        (_each_word(tables, _names(tables, links.operator), _kind_of_operator), 1),
        (_each_word(tables, _names(tables, links.annotation), lambda t: kinds.kind_of_annotation(t) or ""), 2),
        (by_kernel, 3),
    ]
    kind = np.full(len(rows), "unknown", dtype=object)
    evidence = np.full(len(rows), 3, np.int8)
    decided = np.zeros(len(rows), np.bool_)
    for values, level in sources:
        new = ~decided & (values != "") & (values != "unknown")
        kind[new] = values[new]
        evidence[new] = level
        decided |= new
    implementation = lookup(tables, names, lambda text: _implementation(text, named))
    return schema.sorted_categorical(kind), implementation, schema.categorical(evidence, EVIDENCE)


def _kind_of_operator(text: str) -> str:
    return kinds.kind_of_operator(text) or kinds.kind_of_fused_operator(text) or ""


def _side_rows(tables: RankTables, rows: Int64Array) -> Int64Array:
    """Rows of the communication side table of these events; -1 for none."""
    return np.where(rows >= 0, tables.side["communication"].at(np.maximum(rows, 0)), -1)


def _named_axes(tables: RankTables, names: Int32Array, named: Named) -> pd.Categorical:
    """The axis that the user named for kernels of these names; '' for none."""

    def axis(text: str) -> str:
        found = named_class(text, named)
        return found[1] if found is not None else ""

    return lookup(tables, names, axis)


def _kind_of_kernel(text: str, named: Named) -> str:
    by_user = named_class(text, named)
    if by_user is not None:
        return by_user[0].kind
    found = kinds.kernel_class(text)
    if found is not None:
        return found.kind
    return kinds.kind_of_annotation(text) or ""


def _implementation(text: str, named: Named) -> str:
    if named_class(text, named) is not None:
        return "named"
    found = kinds.kernel_class(text)
    if found is not None:
        return found.implementation
    return text.partition(":")[0] if text.startswith(HOST_BACKENDS) else "unknown"


def _metadata(tables: RankTables, host: BoolArray, rows: Int64Array, links: Links, group_of: Int32Array) -> dict[str, object]:
    """What is known of the arguments of each call, by metadata, else by the operator's shapes, else by those of the backend's range.

    ``host``: the pieces that are themselves ranges of a host backend, whose shapes are those of the event in ``rows``.
    """
    side = tables.side["communication"]
    sources = (_side_rows(tables, links.record), links.own)  # the kernel's own value wins over the record's
    arguments = passed(tables, links.operator)
    shapes = tensor_shapes(tables, np.where(host, rows, links.annotation))

    def number(name: str) -> Int64Array:
        return _last_of(sources, side.columns[name], NULL, np.int64)

    def code(name: str) -> Int32Array:
        return _last_of(sources, side.columns[name], 0, np.int32)

    ingoing, outgoing = number("In msg nelems"), number("Out msg nelems")
    shown_in = np.where(host | (arguments.in_elements == NULL), shapes.elements, arguments.in_elements)
    recorded = (ingoing != NULL) | (outgoing != NULL)
    dtype = lookup(tables, code("dtype"), lambda text: kinds.element_type(text)[0] if text else "")
    return {
        "group": _last_of(sources, group_of, -1, np.int32),
        "seq": number("Seq"),
        "dtype": _filled(_filled(dtype, arguments.dtype), shapes.dtype),
        "in_elements": np.where(recorded, ingoing, shown_in),
        "out_elements": np.where(recorded, outgoing, arguments.out_elements),
        "in_split": _filled(lookup(tables, code("In split size"), _split), arguments.in_split),
        "out_split": _filled(lookup(tables, code("Out split size"), _split), arguments.out_split),
        "source_rank": number("Src Rank"),
        "destination_rank": number("Dst Rank"),
        "tensors": shapes.tensors,
    }


def _last_of(sources: Sequence[Int64Array], values: npt.NDArray[Any], missing: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """For each operation the value of the last of several rows of the communication side table that has one; else ``missing``."""
    result = np.full(len(sources[0]), missing, dtype)
    for at in sources:
        rows = np.flatnonzero(at >= 0)
        found = values[at[rows]]
        known = found != missing
        result[rows[known]] = found[known]
    return result


def _split(text: str) -> str:
    return "" if text in ("[]", "") else text


def _filled(first: pd.Categorical, second: pd.Categorical) -> pd.Categorical:
    own, other = (column.categories.tolist() for column in (first, second))
    if "" not in own:
        return first
    values = np.array(own, dtype=object)[first.codes]
    missing = values == ""
    values[missing] = np.array([*other, ""], dtype=object)[second.codes][missing]
    return schema.sorted_categorical(values)
