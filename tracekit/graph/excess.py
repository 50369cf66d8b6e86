"""What a rank does beyond its peers: the part of its compute and of its delays that ranks in its place do not need.

Peers of a rank are the other ranks of its stage. They are compared slot by slot: a slot is what lies between two communications of a step
(where ranks differ in those: one kind of work of a step). For the compute of a rank in a slot, and for the gaps before its work there
(launches that came late, and what nothing explains):

    excess = own - median of its peers in the slot       [ns], where that is above 0

A rank that is alone in its stage is compared by its gaps alone, with all other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pandas as pd

from tracekit.graph.kinds import Kinds, Places
from tracekit.graph.step_graph import StepGraph
from tracekit.trace.events import BoolArray, Int64Array

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Loads:
    """One entry a rank and slot; ``of_node`` is the entry of each node. Times in ns; a reference is NaN where there are no peers."""

    rank: Int64Array
    slot: Int64Array
    step: Int64Array
    compute: Floats
    compute_reference: Floats
    gap: Floats
    gap_reference: Floats
    of_node: Int64Array

    @cached_property
    def compute_excess(self) -> Floats:
        """Compute above the peers'; 0 for a rank below them or without peers."""
        return _above(self.compute, self.compute_reference)

    @cached_property
    def gap_excess(self) -> Floats:
        """Gaps above the peers'."""
        return _above(self.gap, self.gap_reference)

    @cached_property
    def excess(self) -> Floats:
        """Both together."""
        total: Floats = self.compute_excess + self.gap_excess
        return total

    def net(self, entries: BoolArray) -> tuple[float, float]:
        """(compute, gaps) of these entries beyond their peers', less what they need less elsewhere [ns]; entries without peers count 0."""
        pairs = ((self.compute, self.compute_reference), (self.gap, self.gap_reference))
        compute, gap = (float(np.nansum((own - reference)[entries])) for own, reference in pairs)
        return compute, gap


def _above(own: Floats, reference: Floats) -> Floats:
    above: Floats = np.nan_to_num(np.maximum(own - reference, 0.0))
    return above


def loads_of(graph: StepGraph, kinds: Kinds, places: Places) -> Loads:
    """Loads of all ranks and slots beside those of their peers."""
    stage = places.of(graph.rank, places.stage)
    alone = without_peers(places)
    slot = _slots(graph, kinds, np.where(np.isin(graph.rank, alone), -2, stage), np.isin(graph.rank, alone))
    key = slot * (int(graph.rank.max()) + 1) + graph.rank
    entries, of_node = np.unique(key, return_inverse=True)
    of_node = of_node.reshape(-1)
    compute = np.bincount(of_node, np.where(graph.comm, 0.0, graph.cost), len(entries)).astype(np.float64)
    gap = np.bincount(of_node, np.maximum(graph.gap, 0), len(entries)).astype(np.float64)
    first = np.full(len(entries), len(graph))
    np.minimum.at(first, of_node, np.arange(len(graph)))
    rank, entry_slot = graph.rank[first].astype(np.int64), slot[first]
    reference = np.where(np.isin(rank, alone), np.nan, _of_others(entry_slot, compute))
    return Loads(rank, entry_slot, graph.step[first].astype(np.int64), compute, reference, gap, _of_others(entry_slot, gap), of_node)


def without_peers(places: Places) -> Int64Array:
    """Ranks without another one in their stage, in a job of several ranks."""
    size = pd.Series(places.stage).groupby(places.stage).transform("size").to_numpy()
    return places.ranks[size == 1] if len(places.ranks) > 1 else places.ranks[:0]


def _slots(graph: StepGraph, kinds: Kinds, stage: Int64Array, alone: BoolArray) -> Int64Array:
    """A number for each (stage, step, place among the communications); where ranks differ in those, the kind of work."""
    most = pd.Series(kinds.segment).groupby([graph.rank, graph.step]).transform("max")
    differs = most.groupby([stage, graph.step]).transform("nunique").to_numpy() > 1
    within = np.where(alone, 0, np.where(differs, -2 - kinds.kind, kinds.segment))
    frame = pd.DataFrame({"stage": stage, "step": graph.step, "within": within})
    return np.asarray(frame.groupby(list(frame.columns), sort=False).ngroup(), np.int64)


def _of_others(slot: Int64Array, load: Floats) -> Floats:
    """For each entry the median load of the other entries of its slot; NaN where there is no other."""
    order = np.lexsort((load, slot))
    ranked, value = slot[order], load[order]
    opens = np.flatnonzero(np.append(True, ranked[1:] != ranked[:-1]))
    size = np.diff(np.append(opens, len(ranked)))
    begin, count = np.repeat(opens, size), np.repeat(size, size)
    own = np.arange(len(ranked)) - begin
    low, high = (count - 2) // 2, (count - 1) // 2  # the middle of the others, of which there is one fewer
    low, high = low + (low >= own), high + (high >= own)
    result = np.full(len(load), np.nan)
    some = count > 1
    at = begin[some]
    result[order[some]] = (value[at + low[some]] + value[at + high[some]]) / 2
    return result


def without_excess(graph: StepGraph, loads: Loads, chosen: BoolArray) -> tuple[Int64Array, Int64Array, Int64Array]:
    """(cost, delay, host lag) of each node where the entries ``chosen`` are as loaded as their peers."""
    of_compute = _factor(loads.compute, loads.compute_reference, chosen)[loads.of_node]
    of_gap = _factor(loads.gap, loads.gap_reference, chosen)[loads.of_node]
    cost = np.where(graph.comm, graph.cost, np.rint(graph.cost * of_compute)).astype(np.int64)
    delay = np.where(graph.delay > 0, np.rint(graph.delay * of_gap), graph.delay).astype(np.int64)
    lag = np.where(graph.gap > 0, graph.host_lag - np.rint(np.maximum(graph.gap, 0) * (1 - of_gap)), graph.host_lag)
    return cost, delay, np.minimum(np.maximum(lag, 0), graph.host_lag).astype(np.int64)


def _factor(own: Floats, reference: Floats, chosen: BoolArray) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.where(chosen & (own > 0), np.minimum(reference / own, 1.0), 1.0)
    found: Floats = np.nan_to_num(factor, nan=1.0)
    return found
