"""Calls whose FLOP are known: matrix products, convolutions and attention with recorded shapes, and the device time they launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from tracekit.collectives.kinds import element_type
from tracekit.estimate.operator_flops import COUNTED, cost
from tracekit.job.activity import Activity, Work
from tracekit.trace import correlate
from tracekit.trace.codes import distinct_rows
from tracekit.trace.events import Category, Int64Array, RankTables
from tracekit.units import NULL


@dataclass(frozen=True)
class Counted:
    """One entry a call, in order of their rows; nested ones (``aten::_flash_attention_forward``) count with the outermost."""

    row: Int64Array  # events row of the operator
    case: Int64Array  # index into ``cases``
    device_ns: Int64Array  # of the kernels launched within it; on CPU jobs its own duration
    cases: list[Case]


@dataclass(frozen=True)
class Case:
    """One operator with one set of shapes. ``flop`` and ``moved_bytes`` of a call: NULL where sizes are missing."""

    name: str
    shapes: str
    dtype: str
    element_bytes: int  # NULL unknown
    flop: int
    moved_bytes: int  # least traffic: inputs and outputs once


def counted(activity: Activity) -> Counted:
    """All calls of operators of ``operator_flops.COUNTED`` in one window."""
    tables = activity.tables
    rows = tables.rows(Category.OPERATOR)
    rows = rows[tables.each_text(tables.name[rows], COUNTED.__contains__)] if len(rows) else rows
    rows = rows[(tables.dur[rows] >= 0) & (tables.ts[rows] != NULL)]
    rows = rows[correlate.enclosing(tables, rows, rows) < 0]
    side = tables.side["shapes"]
    at = side.at(rows) if len(rows) else np.empty(0, np.int64)
    keys = [tables.name[rows].astype(np.int64)]
    for column in ("Input Dims", "Input type", "Concrete Inputs"):
        values = side.columns[column]
        keys.append(np.where(at >= 0, values[np.maximum(at, 0)], 0).astype(np.int64) if len(values) else np.zeros(len(rows), np.int64))
    unique, case = distinct_rows(*keys)
    cases = [_case(tables, *codes) for codes in np.stack(unique, axis=1).tolist()]
    return Counted(rows, case, _device_time(activity, rows), cases)


def _device_time(activity: Activity, rows: Int64Array) -> Int64Array:
    tables, device = activity.tables, activity.device
    if activity.on_cpu:
        return tables.dur[rows]
    result = np.zeros(len(rows), np.int64)
    chosen = np.flatnonzero((device.work == Work.COMPUTE) & (device.launch_row >= 0))
    if not len(rows) or not len(chosen):
        return result
    around = correlate.enclosing(tables, device.launch_row[chosen], rows)
    place = np.full(len(tables), -1, np.int64)
    place[rows] = np.arange(len(rows))
    inside = around >= 0
    np.add.at(result, place[around[inside]], (device.end - device.start)[chosen[inside]])
    return result


def _case(tables: RankTables, name: int, dims: int, types: int, concrete: int) -> Case:
    shapes = [shape if _is_shape(shape) else None for shape in _decoded(tables.text(dims))]
    names = [str(word) for word in _decoded(tables.text(types))]
    first = next((i for i, shape in enumerate(shapes) if shape), 0)
    dtype, width = element_type(names[first]) if first < len(names) else ("", None)
    found = cost(tables.text(name), shapes, [str(value) for value in _decoded(tables.text(concrete))])
    flop = NULL if found is None or found.flop >= 2**62 else found.flop
    moved = NULL if found is None or width is None or found.elements >= 2**58 else found.elements * width
    text = " x ".join(str(shape) for shape in shapes if shape)
    return Case(tables.text(name), text[:200], dtype, NULL if width is None else width, flop, moved)


def _decoded(text: str) -> list[Any]:
    try:
        found = msgspec.json.decode(text) if text else []
    except msgspec.DecodeError:
        return []
    return found if isinstance(found, list) else []


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(n, int) and 0 <= n < 2**40 for n in value)
