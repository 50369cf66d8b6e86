"""What a step would take if one thing were otherwise. Every scenario is a replay of the measured steps with some costs changed.

bandwidth:AXIS=K   transfers along AXIS take 1/K of their time
perfect_overlap    communication takes no time, except that no rank is faster than its own transfers
no_straggler       no rank, node, group or stage is slower than its peers
equal_stages       a micro-batch takes equally long on all stages: the mean of them
microbatches=N     the same batch in N micro-batches, of GPipe, 1F1B, looped and interleaved schedules of m micro-batches on p places of v
                   stages each: the order of work with N pieces m/N as long, beside that with m (``graph.filling``). Where that order
                   cannot run (interleaved, p does not divide m or N) in closed form, as the pipeline fills and drains with pieces m/N
                   as long; with the compute W_s of place s in a step

                       step - (sum of W_s - largest W_s) / v (1/m - 1/N)

                   which for equal places is (p-1) W / v (1/m - 1/N), and what the order gives there, too
no_host            what waits for its launch starts at once
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd

from tracekit.collectives.purpose import role_of_axis
from tracekit.errors import UsageError
from tracekit.graph.filling import run_ns
from tracekit.graph.kinds import ideal
from tracekit.graph.local import PIECE_KINDS
from tracekit.graph.step_graph import launch_bound
from tracekit.graph.study import Study
from tracekit.trace.events import Int64Array

#: Those that need no figure of the user's.
STANDARD = ("perfect_overlap", "no_straggler", "equal_stages", "no_host")
_BANDWIDTH = re.compile(r"bandwidth:([^=]{1,64})=(\d{1,6}(?:\.\d{1,6})?)")
_BATCHES = re.compile(r"microbatches=(\d{1,6})")


@dataclass(frozen=True)
class Scenario:
    """``step_ns`` of the mean step; None where the job gives no ground for it: ``reason``."""

    name: str
    step_ns: float | None
    reason: str = ""


def check(name: str) -> str:
    """The name itself, where it is one; UsageError with those that are."""
    found = _BANDWIDTH.fullmatch(name)
    batches = _BATCHES.fullmatch(name)
    if name in STANDARD or (found and float(found[2]) > 0) or (batches and int(batches[1]) > 0):
        return name
    raise UsageError(f"there is no scenario {name!r}", "there are bandwidth:AXIS=2, microbatches=N, " + ", ".join(STANDARD))


def scenario(study: Study, name: str) -> Scenario:
    """The replay of one scenario."""
    check(name)
    found, batches = _BANDWIDTH.fullmatch(name), _BATCHES.fullmatch(name)
    if found:
        return _bandwidth(study, name, found[1], float(found[2]))
    if batches:
        return _micro_batches(study, name, int(batches[1]))
    replays = {"perfect_overlap": _overlap, "no_straggler": _no_straggler, "equal_stages": _equal_stages, "no_host": _no_host}
    return replays[name](study, name)


def _replayed(study: Study, name: str, cost: Int64Array | None = None, delay: Int64Array | None = None, no_host: bool = False) -> Scenario:
    graph = study.graph
    return Scenario(name, graph.step_ns(graph.replay(cost, delay, no_host=no_host)))


def _bandwidth(study: Study, name: str, axis: str, times: float) -> Scenario:
    graph = study.graph
    of = np.where(graph.operation >= 0, study.job.operations["axis"].astype("str").to_numpy()[np.maximum(graph.operation, 0)], "")
    chosen = graph.comm & (of == axis)
    if not chosen.any():
        there = sorted({text for text in of[graph.comm].tolist() if text})
        raise UsageError(f"nothing communicates along {axis!r}", f"there are {', '.join(there)}" if there else "no axis is known")
    if not (chosen & (graph.join >= 0)).any():
        return Scenario(name, None, f"no communication along {axis} was seen on two ranks: waiting and transfer cannot be told apart")
    return _replayed(study, name, np.where(chosen & (graph.join >= 0), np.rint(graph.cost / times), graph.cost).astype(np.int64))


def _overlap(study: Study, name: str) -> Scenario:
    graph = study.graph
    if not graph.comm.any():
        return Scenario(name, None, "the job does not communicate")
    free = np.where(graph.comm, 0, graph.cost)
    best = graph.step_ns(graph.replay(free, np.where(graph.comm, np.minimum(graph.delay, 0), graph.delay)))
    frame = pd.DataFrame({"rank": graph.rank, "stream": graph.stream, "cost": np.maximum(graph.cost, 0)})[graph.comm & (graph.join >= 0)]
    own = frame.groupby(["rank", "stream"])["cost"].sum()
    return Scenario(name, max(best, float(own.max()) / graph.steps if len(own) else 0.0))


def _no_straggler(study: Study, name: str) -> Scenario:
    if len(study.places.ranks) < 2:
        return Scenario(name, None, "one rank was read: there is nobody to compare it with")
    return Scenario(name, study.search.healthy_ns)


def _equal_stages(study: Study, name: str) -> Scenario:
    graph, kinds, places = study.graph, study.kinds, study.places
    if len(places.stages) < 2 or not (graph.piece >= 0).any():
        return Scenario(name, None, "no pipeline stages with marked micro-batches were read")
    over_all, of_stage = (ideal(graph, kinds, places, by_stage) for by_stage in (False, True))
    inside = (graph.piece >= 0) & ~graph.comm & (of_stage > 0)
    factor = np.where(inside, over_all / np.maximum(of_stage, 1), 1.0)
    return _replayed(study, name, np.where(inside, np.rint(graph.cost * factor), graph.cost).astype(np.int64))


def _no_host(study: Study, name: str) -> Scenario:
    graph = study.graph
    bound = launch_bound(graph)
    return _replayed(study, name, delay=np.where(bound, np.minimum(graph.delay, 0), graph.delay), no_host=True)


def _micro_batches(study: Study, name: str, wanted: int) -> Scenario:
    """Fill and drain shrink with the micro-batches."""
    graph, places = study.graph, study.places
    inside = graph.piece >= 0
    if len(places.stages) < 2 or not inside.any():
        return Scenario(name, None, "no pipeline stages with marked micro-batches were read")
    stage_and_kind, batch = np.divmod(graph.piece[inside], 10**6)
    stage, kind = np.divmod(stage_and_kind, len(PIECE_KINDS))
    if (kind >= PIECE_KINDS.index("I")).any():
        return Scenario(name, None, "the backward runs in two parts: how its schedule fills with other micro-batches has no closed form")
    place = places.of(graph.rank, places.stage)[inside]
    pieces = pd.DataFrame(
        {
            "step": graph.step[inside],
            "rank": graph.rank[inside],
            "place": place,
            "stage": stage,
            "up": kind == PIECE_KINDS.index("F"),
            "batch": batch,
            "cost": _of_stage(study)[inside],
        }
    )
    passes = _passes(study, pieces, len(places.stages), wanted)
    if passes is not None:
        return Scenario(name, study.step_ns - passes[0] + passes[1])
    work = pieces.groupby(["step", "place", "rank"])["cost"].sum().groupby(["step", "place"]).mean().groupby("step")
    virtual = len(np.unique(stage)) / len(places.stages)
    filling = float((work.sum() - work.max()).mean()) / virtual
    return Scenario(name, study.step_ns - filling / len(np.unique(batch)) + filling / wanted)


def _passes(study: Study, pieces: pd.DataFrame, places: int, wanted: int) -> tuple[float, float] | None:
    """(a pass as measured, one of ``wanted`` micro-batches of the same work) with the mean pieces of each stage [ns]; None: no such order.

    ``pieces``: one row a node: step, rank, place, stage, up (forward), batch, cost.
    """
    steps, batches = study.graph.steps, pieces["batch"].nunique()
    sums = pieces.groupby(["stage", "up", "rank"])["cost"].sum().groupby(["stage", "up"]).mean().unstack().fillna(0.0) / steps
    if sums.index.tolist() != list(range(len(sums))):
        return None  # stages that were not read
    forward, backward = (sums.get(up, pd.Series(0.0, sums.index)).to_numpy(np.float64) for up in (True, False))
    first = pieces[pieces["rank"] == pieces["rank"][pieces["place"] == pieces["place"].min()].min()]
    changes = int(np.count_nonzero(np.diff(first["up"].to_numpy(np.int8)))) + 1
    found = [
        run_ns((forward / m).tolist(), (backward / m).tolist(), places, m, forwards_first=changes <= 2 * steps) for m in (batches, wanted)
    ]
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def _of_stage(study: Study) -> Int64Array:
    """What each node adds to the time of its piece: compute, and the communication inside a layer."""
    graph = study.graph
    axis = study.job.operations["axis"].astype("str").to_numpy()
    inner = [name for name in set(axis.tolist()) if role_of_axis(name) in ("tensor", "expert", "context")]
    within = (graph.operation >= 0) & np.isin(axis[np.maximum(graph.operation, 0)], inner) if len(axis) else graph.comm & False
    return np.where(graph.comm & ~within, 0, np.maximum(graph.cost, 0))
