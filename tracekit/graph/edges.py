"""What waits for what on one rank.

Work of one stream runs in order (STREAM). With ``cuda_sync`` rows, streams wait for what they were told to (EVENT). Where no such rows are
recorded, ``graph.habits`` stands for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.graph import habits
from tracekit.graph.nodes import Nodes
from tracekit.graph.script import HOLD, NODE, RECORD, Script, waits_of
from tracekit.trace.events import Category, Int8Array, Int32Array, Int64Array, RankTables
from tracekit.units import NULL

STREAM, EVENT, CALL, WAIT, MESSAGE, DATA, INFERRED, HOST = range(8)
KIND_NAMES = ("stream", "event", "call", "wait", "message", "data", "inferred", "host")
#: Kinds that are read off times or habits, not recorded.
GUESSED = (CALL, WAIT, DATA, INFERRED, HOST)
Pairs = tuple[Int64Array, Int64Array]


@dataclass(frozen=True)
class Edges:
    """``target`` starts when ``source`` has ended; nodes of one window, ``kind`` as above."""

    source: Int32Array
    target: Int32Array
    kind: Int8Array

    def repeated(self, first: Int64Array, count: Int64Array) -> Edges:
        """The edges where node i has become ``count[i]`` nodes from ``first[i]`` on: each of them waits, and is waited for."""
        times = count[self.source] * count[self.target]
        edge = np.repeat(np.arange(len(self.source)), times)
        nth = np.arange(len(edge)) - (np.cumsum(times) - times)[edge]
        source = first[self.source[edge]] + nth % count[self.source[edge]]
        target = first[self.target[edge]] + nth // count[self.source[edge]]
        return Edges(source.astype(np.int32), target.astype(np.int32), self.kind[edge])


def find_edges(tables: RankTables, nodes: Nodes) -> tuple[Edges, bool]:
    """Edges between nodes of one window, and whether its stream waits are recorded."""
    recorded = _recorded(tables, nodes)
    found: list[tuple[Pairs, int]] = [(_stream_order(nodes), STREAM)]
    if recorded is not None:
        found.append((recorded, EVENT))
        found.append((habits.behind_host_waits(nodes, _ready(nodes, [pairs for pairs, _ in found])), HOST))
        return _together(found), True
    into, out_of = habits.around_calls(nodes)
    found += [(into, CALL), (out_of, WAIT)]
    named = habits.named_messages(nodes)
    found += [(named, MESSAGE), (habits.first_use(nodes, without=named[0]), DATA)]
    found.append((habits.just_then(nodes, _ready(nodes, [pairs for pairs, _ in found]), into[1]), INFERRED))
    found.append((habits.behind_host_waits(nodes, _ready(nodes, [pairs for pairs, _ in found])), HOST))
    return _together(found), False


def _together(parts: list[tuple[Pairs, int]]) -> Edges:
    source, target = (np.concatenate([pairs[i] for pairs, _ in parts]).astype(np.int32) for i in (0, 1))
    return Edges(source, target, np.repeat([kind for _, kind in parts], [len(pairs[0]) for pairs, _ in parts]).astype(np.int8))


def _ready(nodes: Nodes, parts: list[Pairs]) -> Int64Array:
    """The latest end of what each node waits for; NULL for nothing."""
    result = np.full(len(nodes), NULL, np.int64)
    for source, target in parts:
        np.maximum.at(result, target, nodes.end[source])
    return result


def _stream_order(nodes: Nodes) -> Pairs:
    order = np.lexsort((nodes.end, nodes.start, nodes.stream))
    same = nodes.stream[order][1:] == nodes.stream[order][:-1]
    return order[:-1][same], order[1:][same]


def _recorded(tables: RankTables, nodes: Nodes) -> Pairs | None:
    """Edges of the recorded stream waits; None where none are recorded."""
    side = tables.side["sync"]
    if not len(side):
        return None
    rows = side.rows[(side.columns["wait_on_cuda_event_record_corr_id"] > 0) & (tables.category[side.rows] == Category.SYNC)]
    rows = rows[tables.each_text(tables.name[rows], lambda text: text.lower().startswith("stream wait"))]
    at = side.at(rows)
    asked = _call_time(tables, tables.correlation[rows])
    marked = _call_time(tables, side.columns["wait_on_cuda_event_record_corr_id"][at]) if len(at) else asked
    known = (asked != NULL) & (marked != NULL)
    if not known.any():
        return None
    waiting, waited = tables.stream[rows].astype(np.int64)[known], side.columns["wait_on_stream"][at][known]
    numbers, stream = np.unique(np.concatenate([nodes.raw_stream, waiting, waited]), return_inverse=True)
    of_nodes, of_waiting, of_waited = np.split(stream.reshape(-1), np.cumsum([len(nodes), len(waiting)]))
    slots = np.arange(len(waiting))
    script = Script.of(
        (marked[known], RECORD, of_waited, slots),
        (asked[known], HOLD, of_waiting, slots),
        (nodes.called, NODE, of_nodes, np.arange(len(nodes))),
    )
    return waits_of(script, len(numbers), len(slots))


def _call_time(tables: RankTables, correlation: Int64Array) -> Int64Array:
    """Start of the runtime call of each correlation; NULL where it is not in the trace."""
    calls = tables.rows(Category.RUNTIME)
    calls = calls[tables.correlation[calls] > 0]
    if not len(calls):
        return np.full(len(correlation), NULL, np.int64)
    calls = calls[np.argsort(tables.correlation[calls], kind="stable")]
    keys = tables.correlation[calls]
    at = np.minimum(np.searchsorted(keys, correlation), len(keys) - 1)
    found: npt.NDArray[np.int64] = np.where(keys[at] == correlation, tables.ts[calls[at]], NULL).astype(np.int64)
    return found
