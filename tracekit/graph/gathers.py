"""What a step would win if parameters that are gathered in small pieces moved as fast as in large ones."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tracekit.graph.study import Study
from tracekit.trace.events import BoolArray

#: All-gathers below this part of the largest are small; from half of it on they show what a large one takes.
SMALL, LARGE = 1 / 20, 1 / 2


def small_gathers(operations: pd.DataFrame) -> BoolArray:
    """Which operations gather a small part of what the largest gather of parameters moves."""
    gathers, size = _gathers(operations), operations["full_bytes"].to_numpy(np.int64)
    found: BoolArray = gathers & (size < size[gathers].max(initial=0) * SMALL)
    return found


def _gathers(operations: pd.DataFrame) -> BoolArray:
    of = (operations["purpose"] == "parameter_gather") & (operations["kind"] == "all_gather") & (operations["full_bytes"] > 0)
    return of.to_numpy(np.bool_)


def gain_of_larger(study: Study) -> float | None:
    """By replay with small gathers as long as their bytes take in large ones [ns a step]; None where nothing shows what that is."""
    graph, operations = study.graph, study.job.operations
    if not study.trusted or not len(operations):
        return None
    row = np.maximum(graph.operation, 0)
    joined = graph.comm & (graph.join >= 0) & (graph.operation >= 0)
    size = operations["full_bytes"].to_numpy(np.int64)
    small = joined & small_gathers(operations)[row]
    large = joined & (_gathers(operations) & (size >= LARGE * size[_gathers(operations)].max(initial=0)))[row]
    if not small.any() or not large.any():
        return None
    rate = float(np.median(graph.cost[large] / size[row[large]]))
    cost = np.where(small, np.minimum(graph.cost, np.rint(rate * size[row])), graph.cost).astype(np.int64)
    return study.step_ns - graph.step_ns(graph.replay(cost))
