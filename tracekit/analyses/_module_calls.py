"""Which module's forward or backward each kernel, or on CPU jobs each operator, belongs to.

Calls of modules are ranges of the host: ``nn.Module: Linear_3`` (``with_modules`` or ``with_stack``), else the recorder's
``unit layers.3`` and ``unit layers.3 backward``. Work launched within such a range is forward; within the backward phase, or within an
autograd node, it is recomputed (activation checkpointing). Work of an autograd node outside every range goes to the module of the forward
operator with the node's sequence number: of operators that share one, the last that started made the node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekit.job.activity import Activity
from tracekit.trace import correlate
from tracekit.trace.events import BoolArray, Category, Int8Array, Int64Array, RankTables
from tracekit.trace.steps import PHASE_NAMES
from tracekit.units import NULL

FORWARD, BACKWARD, RECOMPUTED = 0, 1, 2
_MODULE, _UNIT, _BACKWARD = "nn.Module: ", "unit ", " backward"


@dataclass(frozen=True)
class ModuleCalls:
    """``row``: events rows of the calls. ``label``: index into ``names`` of each; ``parent``: index of the call around it, -1 for none.

    ``backward``: calls that are the recorder's ranges of a unit's backward.
    """

    row: Int64Array
    label: Int64Array
    parent: Int64Array
    backward: BoolArray
    names: list[str]

    def paths(self) -> list[str]:
        """Each name with those around its first call: ``Model_0.Block_3.Linear_7``."""
        result = list(self.names)
        for label in range(len(self.names)):
            at = int(np.argmax(self.label == label))
            parts = [self.names[label]]
            while (at := int(self.parent[at])) >= 0:
                parts.append(self.names[int(self.label[at])])
            result[label] = ".".join(reversed(parts))
        return result


def module_calls(tables: RankTables) -> ModuleCalls | None:
    """The calls of modules that a trace records; None where it records none."""
    found = _rows(tables, Category.PYTHON, _MODULE)
    units = not len(found)
    if units:
        found = _rows(tables, Category.USER_ANNOTATION, _UNIT)
    if not len(found):
        return None
    codes, first = np.unique(tables.name[found], return_inverse=True)
    texts = [tables.text(int(code)) for code in codes]
    named = [text.removeprefix(_UNIT).removesuffix(_BACKWARD) if units else text.removeprefix(_MODULE) for text in texts]
    names = list(dict.fromkeys(named))
    backward = np.array([units and text.endswith(_BACKWARD) for text in texts])
    around = correlate.enclosing(tables, found, found)
    place = np.full(len(tables) + 1, -1, np.int64)
    place[found] = np.arange(len(found))
    label = np.array([names.index(name) for name in named], np.int64)
    return ModuleCalls(found, label[first], place[around], backward[first], names)


def _rows(tables: RankTables, category: Category, prefix: str) -> Int64Array:
    rows = tables.rows(category)
    rows = rows[tables.each_text(tables.name[rows], lambda text: text.startswith(prefix))] if len(rows) else rows
    found: Int64Array = rows[(tables.dur[rows] > 0) & (tables.ts[rows] != NULL)]
    return found


def assign(activity: Activity, calls: ModuleCalls, host_rows: Int64Array) -> tuple[Int64Array, Int8Array]:
    """(index of the innermost call, -1 for none; FORWARD, BACKWARD or RECOMPUTED) for host events: launches or operators."""
    tables = activity.tables
    call, pass_ = np.full(len(host_rows), -1, np.int64), np.zeros(len(host_rows), np.int8)
    known = np.flatnonzero(host_rows >= 0)
    if not len(known):
        return call, pass_
    rows = host_rows[known]
    place = np.full(len(tables) + 1, -1, np.int64)
    place[calls.row] = np.arange(len(calls.row))
    inside = place[correlate.enclosing(tables, rows, calls.row)]
    node = _node(tables, rows)
    in_backward = (node >= 0) | (activity.phases.at(tables.ts[rows]) == PHASE_NAMES.index("backward"))
    by_node = np.where(inside < 0, _of_forward(tables, calls, node, place), -1)
    marked = (inside >= 0) & calls.backward[np.maximum(inside, 0)]
    call[known] = np.where(inside >= 0, inside, by_node)
    pass_[known] = np.where(marked | (by_node >= 0), BACKWARD, np.where((inside >= 0) & in_backward, RECOMPUTED, FORWARD))
    return call, pass_


def _node(tables: RankTables, rows: Int64Array) -> Int64Array:
    """Sequence number of the autograd node that runs around each row, its own included; -1 for none."""
    side = tables.side["autograd"]
    nodes = side.rows[(side.columns["Fwd thread id"] > 0) & (side.columns["Sequence number"] >= 0)] if len(side) else side.rows
    result = np.full(len(rows), -1, np.int64)
    if not len(nodes):
        return result
    around = correlate.enclosing(tables, rows, nodes)
    around = np.where(around >= 0, around, np.where(np.isin(rows, nodes), rows, -1))
    found = around >= 0
    result[found] = side.columns["Sequence number"][side.at(around[found])]
    return result


def _of_forward(tables: RankTables, calls: ModuleCalls, sequence: Int64Array, place: Int64Array) -> Int64Array:
    """The innermost call around the forward operator of each sequence number; -1 for none."""
    side = tables.side["autograd"]
    made = (side.columns["Fwd thread id"] <= 0) & (side.columns["Sequence number"] >= 0) if len(side) else np.zeros(0, np.bool_)
    rows, numbers = side.rows[made], side.columns["Sequence number"][made]
    if not len(rows):
        return np.full(len(sequence), -1, np.int64)
    order = np.lexsort((tables.ts[rows], numbers))
    rows, numbers = rows[order], numbers[order]
    last = np.append(numbers[1:] != numbers[:-1], True)
    rows, numbers = rows[last], numbers[last]
    at = np.minimum(np.searchsorted(numbers, sequence), len(numbers) - 1)
    hit = (numbers[at] == sequence) & (sequence >= 0)
    around = place[correlate.enclosing(tables, rows, calls.row)]
    return np.where(hit, around[at], -1)
