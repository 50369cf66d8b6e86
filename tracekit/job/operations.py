"""Communication operations of one window: for every piece of communication, what was called, by whom, over which group.

Metadata decides before the operator's name, the operator before the backend's annotation, and that before the kernel's name:
a kernel called SendRecv may be any collective, an uneven all-gather runs as broadcasts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from tracekit import schema
from tracekit.collectives import kinds
from tracekit.job.activity import DeviceWork, Work
from tracekit.job.device import HOST_BACKENDS, LABEL, host_ranges
from tracekit.job.host_calls import Passed, host_calls, passed
from tracekit.job.shapes import TensorShapes, tensor_shapes
from tracekit.trace import correlate
from tracekit.trace.events import BoolArray, Category, Int32Array, Int64Array, RankTables
from tracekit.trace.steps import PHASE_NAMES, Phases, Steps
from tracekit.units import NULL

RECORDS = ("record_param_comms", LABEL)
EVIDENCE = ("metadata", "operator", "annotation", "kernel_name")


@dataclass(frozen=True)
class Links:
    """For each operation the host rows around the call (-1: none) and the row of the communication side table (-1: none)."""

    anchor: Int64Array  # the host row that called it: launch, or the c10d operator of a host backend
    own: Int64Array  # side-table row of the kernel itself
    record: Int64Array  # side-table row of the enclosing record_param_comms
    operator: Int64Array  # innermost operator that is a collective
    annotation: Int64Array  # innermost backend annotation
    context: Int64Array  # innermost other annotation


def local_operations(
    tables: RankTables, work: DeviceWork, phases: Phases, group_of: Int32Array, steps: Steps
) -> tuple[pd.DataFrame, DeviceWork]:
    """The table schema.LOCAL_OPERATIONS, and the device work with ``operation`` filled in.

    ``group_of`` gives the local group of each row of ``tables.side["communication"]``.
    """
    at = np.flatnonzero(work.work == Work.COMMUNICATION)
    operation = work.operation.copy()
    operation[at] = np.arange(len(at), dtype=np.int32)
    work = replace(work, operation=operation)
    if not len(at):
        return schema.LOCAL_OPERATIONS.empty(), work
    links = _links(tables, work.row[at], work.launch_row[at], work.start[at])
    shapes = tensor_shapes(tables, np.where(work.launch_row[at] < 0, work.row[at], -1))
    arguments = passed(tables, np.where(work.launch_row[at] < 0, links.operator, -1))
    kind, implementation, evidence = _kinds(tables, work.row[at], links)
    called = np.full(len(at), NULL, np.int64)
    known = links.anchor >= 0
    called[known] = tables.ts[links.anchor[known]]
    launch_step = work.launch_step[at].copy()
    on_host = known & (work.launch_row[at] < 0)
    # gloo opens the range of a send behind the call that has already begun to move it.
    begun = np.where(on_host & (np.asarray(kind) == "send"), called, work.start[at])
    launch_step[on_host] = steps.index_at(called[on_host])
    frame = schema.LOCAL_OPERATIONS.frame(
        {
            "start_ns": begun,
            "end_ns": work.end[at],
            "launch_ns": called,
            "step": work.step[at],
            "launch_step": launch_step,
            "kind": kind,
            "implementation": implementation,
            "evidence": evidence,
            "stream": work.stream[at],
            "phase": schema.categorical(phases.at(called), PHASE_NAMES),
            "context": texts(tables, _names(tables, links.context)),
            "operator": texts(tables, _names(tables, links.operator)),
            "kernel": texts(tables, work.name[at]),
            **_metadata(tables, links, shapes, arguments, group_of),
        }
    )
    return schema.LOCAL_OPERATIONS.check(frame), work


def texts(tables: RankTables, codes: Int32Array) -> pd.Categorical:
    """String codes as a categorical; code 0 is ''."""
    return lookup(tables, codes, lambda text: text)


def lookup(tables: RankTables, codes: Int32Array, translate: Callable[[str], str]) -> pd.Categorical:
    """``translate`` of every code's string, called once a distinct string."""
    used, inverse = np.unique(codes, return_inverse=True)
    words = [translate(tables.text(int(code))) for code in used]
    categories = list(dict.fromkeys(words))
    position = {word: i for i, word in enumerate(categories)}
    index = np.array([position[word] for word in words], np.int64)
    return schema.categorical(index[inverse] if len(used) else np.empty(0, np.int64), categories)


def _names(tables: RankTables, rows: Int64Array) -> Int32Array:
    return np.where(rows >= 0, tables.name[np.maximum(rows, 0)], 0).astype(np.int32)


def _coded_rows(tables: RankTables, rows: Int64Array, wanted: Callable[[str], bool]) -> Int64Array:
    """The rows whose name satisfies ``wanted``."""
    found: Int64Array = rows[tables.each_text(tables.name[rows], wanted)]
    return found


def _links(tables: RankTables, rows: Int64Array, launch: Int64Array, start: Int64Array) -> Links:
    side = tables.side["communication"]
    host = host_ranges(tables)
    calls = _coded_rows(tables, host, lambda text: kinds.kind_of_operator(text) is not None)
    annotations = _coded_rows(tables, host, lambda text: kinds.kind_of_annotation(text) is not None and not text.startswith(HOST_BACKENDS))
    contexts = _coded_rows(tables, tables.rows(Category.USER_ANNOTATION), is_context)
    records = _coded_rows(tables, host, lambda text: text in RECORDS)
    records = records[side.at(records) >= 0]
    anchor = launch.copy()
    by_host = np.flatnonzero(~np.isin(tables.category[rows], [int(Category.KERNEL)]))
    if len(by_host):
        anchor[by_host] = host_calls(tables, rows[by_host], start[by_host], calls)
        labels = _is_label(tables, rows)
        anchor[labels] = rows[labels]
    inner, inverse = np.unique(anchor[anchor >= 0], return_inverse=True)

    def around(outer: Int64Array) -> Int64Array:
        result = np.full(len(rows), -1, np.int64)
        result[anchor >= 0] = correlate.enclosing(tables, inner, outer)[inverse]
        return result

    operator = around(calls)
    operator[by_host] = anchor[by_host]
    record = around(records)
    return Links(anchor, side.at(rows), np.where(record >= 0, side.at(record), -1), operator, around(annotations), around(contexts))


def _is_label(tables: RankTables, rows: Int64Array) -> BoolArray:
    return tables.each_text(tables.name[rows], lambda text: text == LABEL)


def is_context(text: str) -> bool:
    """An annotation that says what the program was doing, not which step or which backend call."""
    return kinds.kind_of_annotation(text) is None and not text.startswith("ProfilerStep")


def _kinds(tables: RankTables, rows: Int64Array, links: Links) -> tuple[pd.Categorical, pd.Categorical, pd.Categorical]:
    side = tables.side["communication"]
    column = side.columns["Collective name"]

    def of_side(at: Int64Array) -> pd.Categorical:
        codes = np.where(at >= 0, column[np.maximum(at, 0)], 0) if len(side) else np.zeros(len(at), np.int32)
        return lookup(tables, codes.astype(np.int32), lambda text: kinds.kind_of_collective_name(text) or "")

    names = tables.name[rows]
    by_kernel = lookup(tables, names, _kind_of_kernel)
    sources = [
        (of_side(links.own), 0),
        (of_side(links.record), 0),
        (lookup(tables, _names(tables, links.operator), lambda t: kinds.kind_of_operator(t) or ""), 1),
        (lookup(tables, _names(tables, links.annotation), lambda t: kinds.kind_of_annotation(t) or ""), 2),
        (by_kernel, 3),
    ]
    kind = np.full(len(rows), "unknown", dtype=object)
    evidence = np.full(len(rows), 3, np.int8)
    decided = np.zeros(len(rows), np.bool_)
    for words, level in sources:
        values = np.asarray(words, dtype=object)
        new = ~decided & (values != "") & (values != "unknown")
        kind[new] = values[new]
        evidence[new] = level
        decided |= new
    implementation = lookup(tables, names, _implementation)
    return pd.Categorical(kind), implementation, schema.categorical(evidence, EVIDENCE)


def _kind_of_kernel(text: str) -> str:
    found = kinds.kernel_class(text)
    if found is not None:
        return found.kind
    return kinds.kind_of_annotation(text) or ""


def _implementation(text: str) -> str:
    found = kinds.kernel_class(text)
    if found is not None:
        return found.implementation
    return text.partition(":")[0] if text.startswith(HOST_BACKENDS) else "unknown"


def _metadata(tables: RankTables, links: Links, shapes: TensorShapes, arguments: Passed, group_of: Int32Array) -> dict[str, object]:
    side = tables.side["communication"]

    def number(name: str) -> Int64Array:
        result = np.full(len(links.own), NULL, np.int64)
        for at in (links.record, links.own):  # the kernel's own value wins over the record's
            values = side.columns[name][np.maximum(at, 0)] if len(side) else result
            use = (at >= 0) & (values != NULL)
            result[use] = values[use]
        return result

    def code(name: str) -> Int32Array:
        result = np.zeros(len(links.own), np.int32)
        for at in (links.record, links.own):
            values = side.columns[name][np.maximum(at, 0)] if len(side) else result
            use = (at >= 0) & (values > 0)
            result[use] = values[use]
        return result

    group = np.full(len(links.own), -1, np.int32)
    for at in (links.record, links.own):
        values = group_of[np.maximum(at, 0)] if len(side) else group
        use = (at >= 0) & (values >= 0)
        group[use] = values[use]
    ingoing, outgoing = number("In msg nelems"), number("Out msg nelems")
    recorded = (ingoing != NULL) | (outgoing != NULL)
    dtype = lookup(tables, code("dtype"), lambda text: kinds.element_type(text)[0] if text else "")
    return {
        "group": group,
        "seq": number("Seq"),
        "dtype": _filled(dtype, shapes.dtype),
        "in_elements": np.where(recorded, ingoing, shapes.elements),
        "out_elements": np.where(recorded, outgoing, arguments.out_elements),
        "in_split": _filled(lookup(tables, code("In split size"), _split), arguments.in_split),
        "out_split": _filled(lookup(tables, code("Out split size"), _split), arguments.out_split),
        "source_rank": number("Src Rank"),
        "destination_rank": number("Dst Rank"),
        "tensors": shapes.tensors,
    }


def _split(text: str) -> str:
    return "" if text in ("[]", "") else text


def _filled(first: pd.Categorical, second: pd.Categorical) -> pd.Categorical:
    values = np.asarray(first, dtype=object)
    missing = values == ""
    values[missing] = np.asarray(second, dtype=object)[missing]
    return pd.Categorical(values)
