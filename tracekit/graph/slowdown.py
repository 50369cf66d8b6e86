"""How much slower a job is than it would be with ideal costs, and whose operations make it so.

By the definitions of "Understanding Stragglers in Large Model Training Using What-if Analysis" (ByteDance, 2025), with steps replayed
apart from each other and without launch delays, T the mean step:

    S       = T(measured costs) / T(ideal costs)
    S_X     = T(ideal costs, but measured ones in X) / T(ideal costs)                             of a kind, a stage, a replica
    S_rank  = min(S of its replica, S of its stage)                                               an estimate, not a replay
    M_X     = (T(measured) - T(measured, but ideal ones in X)) / (T(measured) - T(ideal))         the share that X explains

M_W: X = the worst 3% of the ranks (at least one) by S_rank; M_S: X = the last stage. Neither is bounded by 0 or 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from tracekit.graph.kinds import Kinds, Places, ideal, of_kind, together
from tracekit.graph.step_graph import StepGraph
from tracekit.trace.events import BoolArray, Int64Array

WORST_SHARE = 0.03
#: Replays of so many nodes in all for single replicas; of larger jobs only those that differ most from the ideal are replayed.
BUDGET = 15_000_000


@dataclass(frozen=True)
class Slowdown:
    """Times [ns] are of the mean step. Shares are None where the job is as fast as its ideal."""

    definition: str  # kind or role
    measured_ns: float
    replayed_ns: float
    ideal_ns: float
    by_step: list[float]
    by_kind: dict[str, float]
    by_stage: dict[int, float]
    by_rank: dict[int, float]
    worst_ranks: list[int]
    worst_ranks_share: float | None
    last_stage_share: float | None

    @property
    def slowdown(self) -> float:
        """S."""
        return self.replayed_ns / self.ideal_ns

    @property
    def error(self) -> float:
        """By how much the replay without launch delays differs from what was measured, of that."""
        return abs(self.replayed_ns - self.measured_ns) / self.measured_ns


class _Replays:
    """Mean steps of one graph of steps that stand apart, with mixtures of measured and ideal costs."""

    def __init__(self, graph: StepGraph, costs: Int64Array) -> None:
        self.graph, self.ideal = graph, costs
        self._no_delay = np.zeros(len(graph), np.int64)

    def steps(self, cost: Int64Array) -> Int64Array:
        return self.graph.each_step_ns(self.graph.replay(cost, self._no_delay))

    def mean(self, cost: Int64Array) -> float:
        return float(self.steps(cost).mean())

    def added(self, chosen: BoolArray) -> float:
        """The ideal step, with measured costs in ``chosen``."""
        return self.mean(np.where(chosen, self.graph.cost, self.ideal))

    def removed(self, chosen: BoolArray) -> float:
        """The measured step, with ideal costs in ``chosen``."""
        return self.mean(np.where(chosen, self.ideal, self.graph.cost))


def slowdown_of(apart: StepGraph, kinds: Kinds, places: Places, by_stage: bool) -> Slowdown:
    """S and its parts. ``apart``: the graph with each step by itself. ``by_stage``: one ideal a kind and stage, not one over all stages."""
    replays = _Replays(apart, ideal(apart, kinds, places, by_stage))
    actual, best = replays.steps(apart.cost), replays.steps(replays.ideal)
    t_actual, t_ideal = float(actual.mean()), float(best.mean())
    by_kind = {name: replays.added(of_kind(kinds, name)) / t_ideal for name in dict.fromkeys(together(kinds.names))}
    stage = places.of(apart.rank, places.stage)
    by_stage_s = {s: replays.added(stage == s) / t_ideal for s in places.stages}
    by_rank = _by_rank(replays, places, by_stage_s, t_ideal)
    worst = sorted(by_rank, key=lambda rank: (-by_rank[rank], rank))[: ceil(WORST_SHARE * len(places.ranks))]
    lost = t_actual - t_ideal
    explained = [
        (t_actual - replays.removed(chosen)) / lost if lost > 0 else None
        for chosen in (np.isin(apart.rank, worst), stage == max(places.stages, default=-2))
    ]
    return Slowdown(
        definition="role" if by_stage else "kind",
        measured_ns=float(apart.each_step_ns((apart.start, apart.end)).mean()),
        replayed_ns=t_actual,
        ideal_ns=t_ideal,
        by_step=(actual / best).tolist(),
        by_kind=by_kind,
        by_stage=by_stage_s,
        by_rank=by_rank,
        worst_ranks=worst,
        worst_ranks_share=explained[0],
        last_stage_share=explained[1] if places.stages else None,
    )


def _by_rank(replays: _Replays, places: Places, by_stage: dict[int, float], t_ideal: float) -> dict[int, float]:
    """S of each rank; of large jobs of the ranks of those replicas alone whose costs stand furthest above the ideal."""
    graph = replays.graph
    replica = places.of(graph.rank, places.replica)
    count = int(places.replica.max()) + 1
    excess = np.bincount(replica, np.maximum(graph.cost - replays.ideal, 0).astype(np.float64), count)
    chosen = np.argsort(-excess, kind="stable")[: max(BUDGET // len(graph), 8)]
    of_replica = {int(r): replays.added(replica == r) / t_ideal for r in chosen}
    ranks = zip(places.ranks.tolist(), places.stage.tolist(), places.replica.tolist(), strict=True)
    return {rank: min(of_replica[r], by_stage.get(stage, np.inf)) for rank, stage, r in ranks if r in of_replica}


__all__ = ["Slowdown", "slowdown_of"]
