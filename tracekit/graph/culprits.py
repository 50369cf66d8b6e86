"""Who makes a step longer, by replay: each candidate's excess is taken away and the step replayed; the gain is what the step would win.

Candidates: a rank (its loads set to its peers'), a team (ranks of tensor and context parallelism, which work on the same tokens), a node, a
stage (its micro-batches set to the other stages'), the transfers of one group (set to those of the other groups of its axis), and all ranks
at once, for a load that moves from rank to rank. The smallest that explains what a larger one does is the cause. Then the next is sought
without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pandas as pd

from tracekit.collectives.purpose import role_of_axis
from tracekit.graph.excess import Loads, loads_of, without_excess, without_peers
from tracekit.graph.kinds import Kinds, Places
from tracekit.graph.step_graph import StepGraph
from tracekit.job.model import Job
from tracekit.trace.events import BoolArray, Int64Array

Scope = Literal["rank", "team", "node", "stage", "group", "moving"]
#: So many of each scope, those with the most excess, are replayed; so many causes are sought.
MOST = {"rank": 10, "team": 4, "node": 4, "group": 6}
CAUSES = 3
#: A cause wins at least this share of the step.
WORTH = 0.01
#: A smaller scope is the cause if it wins this share of what a larger one does.
ENOUGH = 0.8
#: Loads and transfers this much above those of their peers are no noise (stages: what a stage's micro-batch takes).
STANDS_OUT, SLOW_LINK, UNEVEN = 0.1, 1.3, 1.05
#: A single excess so many times the largest of any other rank is no chance.
OUTLIER = 5.0
#: Chance is ruled out below this probability, over all candidates.
CHANCE = 0.01
_ORDER: tuple[Scope, ...] = ("rank", "team", "group", "node", "stage", "moving")


@dataclass(frozen=True)
class Culprit:
    """One cause. ``gain_ns``: what the mean step would win; ``excess_ns``: its own extra time a step; ``chance``: how likely ranks that are
    all alike would show as much (None: too few samples to tell).
    """

    scope: Scope
    ranks: tuple[int, ...]
    stage: int | None
    group: int | None
    axis: str
    gain_ns: float
    excess_ns: float
    chance: float | None
    steps: int  # steps in which it stands out
    entries: BoolArray = field(repr=False)  # of loads


@dataclass(frozen=True)
class Costs:
    """Costs, delays and host lags of all nodes [ns]."""

    cost: Int64Array
    delay: Int64Array
    lag: Int64Array

    def least(self, other: Costs) -> Costs:
        """The smaller of both for each node."""
        return Costs(np.minimum(self.cost, other.cost), np.minimum(self.delay, other.delay), np.minimum(self.lag, other.lag))


@dataclass(frozen=True)
class Search:
    """What was found: ``step_ns`` the replayed mean step, ``healthy_ns`` the same without the culprits' excess."""

    step_ns: float
    healthy_ns: float
    culprits: Sequence[Culprit]
    loads: Loads
    by_chance: Culprit | None = None  # of those that ranks which are alike may show as well, the one that wins most


@dataclass(frozen=True)
class _Candidate:
    scope: Scope
    ranks: tuple[int, ...]
    costs: Costs
    excess_ns: float
    entries: BoolArray
    stage: int | None = None
    group: int | None = None
    axis: str = ""


def culprits_of(job: Job, graph: StepGraph, kinds: Kinds, places: Places) -> Search:
    """The causes that a replay confirms, the one that wins most first.

    A rank that needs more than its peers here and as much less there, in compute and in gaps, is none, whatever the first would win: it
    jitters.
    """
    loads = loads_of(graph, kinds, places)
    alone = set(without_peers(places).tolist())  # beside ranks that were not read, what they wait for is not known
    measured = Costs(graph.cost, graph.delay, graph.host_lag)
    step = _step(graph, measured)
    candidates = [
        *(c for c in _ranks(graph, loads) if not (job.unread and c.ranks[0] in alone)),
        *_teams(job, graph, loads),
        *_nodes(job, graph, loads),
        *_stages(graph, kinds, places, loads),
        *_groups(job, graph, kinds, loads),
        *_moving(graph, loads),
    ]
    found: list[Culprit] = []
    doubts: list[Culprit] = []
    now, costs = step, measured
    while candidates and len(found) < CAUSES:
        gains = [(now - _step(graph, costs.least(c.costs)), c) for c in candidates]
        best = _smallest(gains)
        if best is None or best[0] < WORTH * step:
            break
        gain, cause = best
        chance, steps = _chance(graph, loads, cause)
        candidates = [c for c in candidates if c is not cause and not (c.scope == cause.scope == "moving")]
        culprit = Culprit(
            cause.scope, cause.ranks, cause.stage, cause.group, cause.axis, gain, cause.excess_ns, chance, steps, cause.entries
        )
        evened = cause.scope == "rank" and cause.ranks[0] not in alone and max(loads.net(cause.entries)) <= 0
        (found if (chance is None or chance < CHANCE) and not evened else doubts).append(culprit)
        if culprit in found[-1:]:
            costs = costs.least(cause.costs)
            now -= gain
    return Search(step, now, found, loads, max(doubts, key=lambda one: one.gain_ns, default=None))


def _step(graph: StepGraph, costs: Costs) -> float:
    return graph.step_ns(graph.replay(costs.cost, costs.delay, costs.lag))


def _smallest(gains: list[tuple[float, _Candidate]]) -> tuple[float, _Candidate] | None:
    """The candidate that wins most, or a smaller one that wins nearly as much."""
    if not gains:
        return None
    most = max(gain for gain, _ in gains)
    return max((pair for pair in gains if pair[0] >= ENOUGH * most), key=lambda pair: (-_ORDER.index(pair[1].scope), pair[0]))


def _of_entries(graph: StepGraph, loads: Loads, entries: BoolArray) -> Costs:
    return Costs(*without_excess(graph, loads, entries))


def _ranks(graph: StepGraph, loads: Loads) -> list[_Candidate]:
    excess = np.bincount(loads.rank, loads.excess)
    found = []
    for rank in np.argsort(-excess, kind="stable")[: MOST["rank"]].tolist():
        if excess[rank] > WORTH * 0.5 * _busy(graph):
            entries = loads.rank == rank
            found.append(_Candidate("rank", (rank,), _of_entries(graph, loads, entries), excess[rank] / graph.steps, entries))
    return found


def _busy(graph: StepGraph) -> float:
    return float(graph.end.max() - graph.begin)


def _teams(job: Job, graph: StepGraph, loads: Loads) -> list[_Candidate]:
    """Ranks that differ in their place on the axes of tensor and context parallelism only: the same tokens, and the same experts."""
    shared = [role_of_axis(axis.name) in ("tensor", "context") for axis in job.mesh.axes]
    if not any(shared) or all(shared):
        return []
    teams: dict[tuple[int, ...], list[int]] = {}
    for rank, place in job.mesh.coordinates.items():
        teams.setdefault(tuple(at for at, same in zip(place, shared, strict=True) if not same), []).append(rank)
    usual = np.bincount(loads.rank, loads.compute + loads.gap - loads.excess)
    total = np.bincount(loads.rank, loads.excess, len(usual))
    found = []
    for members in teams.values():
        own = np.array([rank for rank in sorted(members) if rank < len(usual)], np.int64)
        excess = float(total[own].mean()) if len(own) > 1 else 0.0
        # Each of them, by more than ranks that are alike differ: one alone is a rank.
        if excess > WORTH * 0.5 * _busy(graph) and (total[own] > STANDS_OUT * usual[own]).all():
            entries = np.isin(loads.rank, own)
            team = tuple(own.tolist())
            found.append(_Candidate("team", team, _of_entries(graph, loads, entries), excess / graph.steps, entries))
    return sorted(found, key=lambda c: -c.excess_ns)[: MOST["team"]]


def _nodes(job: Job, graph: StepGraph, loads: Loads) -> list[_Candidate]:
    """The ranks of each host, where there are several."""
    host = {w.rank: w.identity.host for w in job.windows if w.rank is not None}
    names = sorted({name for name in host.values() if name})
    if len(names) < 2:
        return []
    of_host: dict[str, list[int]] = {name: [] for name in names}
    for rank, name in sorted(host.items()):
        if name:
            of_host[name].append(rank)
    least = WORTH * 0.5 * _busy(graph)
    total = np.bincount(loads.rank, loads.excess, max(host) + 1)
    found = []
    for name in names:
        ranks = tuple(of_host[name])
        if float(total[list(ranks)].sum()) < 0.99 * least * len(ranks):  # most hosts by far, without a look at every entry
            continue
        entries = np.isin(loads.rank, ranks)
        excess = float(loads.excess[entries].sum()) / max(len(ranks), 1)
        if len(ranks) > 1 and excess > least:
            found.append(_Candidate("node", ranks, _of_entries(graph, loads, entries), excess / graph.steps, entries))
    return sorted(found, key=lambda c: -c.excess_ns)[: MOST["node"]]


def _moving(graph: StepGraph, loads: Loads) -> list[_Candidate]:
    """All ranks as loaded as their peers, where one stands out in most steps and it is not always the same."""
    everything = np.ones(len(loads.rank), np.bool_)
    keys = [loads.step, loads.rank]
    by_step = pd.Series(loads.excess).groupby(keys).sum().unstack(fill_value=0)
    if by_step.shape[0] < 3 or by_step.shape[1] < 2:
        return []
    usual = pd.Series(loads.compute + loads.gap).groupby(keys).sum().unstack(fill_value=0).median(axis=1)
    top, most = by_step.idxmax(axis=1).to_numpy(), by_step.max(axis=1)
    if pd.Series(top).value_counts().iloc[0] > 0.5 * len(top) or (most / usual.clip(lower=1)).median() < STANDS_OUT:
        return []
    return [_Candidate("moving", tuple(sorted(set(top.tolist()))), _of_entries(graph, loads, everything), float(most.mean()), everything)]


def _stages(graph: StepGraph, kinds: Kinds, places: Places, loads: Loads) -> list[_Candidate]:
    """Each stage with its micro-batches as short as those of the other stages."""
    inside = (graph.piece >= 0) & ~graph.comm
    if len(places.stages) < 2 or not inside.any():
        return []
    stage = places.of(graph.rank, places.stage)
    frame = pd.DataFrame({"portion": kinds.portion, "kind": kinds.kind, "stage": stage, "cost": graph.cost})[inside]
    portions = frame.groupby("portion").agg(kind=("kind", "first"), stage=("stage", "first"), cost=("cost", "sum"))
    mean = portions.groupby(["kind", "stage"])["cost"].median().unstack()
    # Layers that a stage holds beyond the others also communicate: with as many calls a rank as the others have, they take as long.
    calls = graph.comm & (graph.piece >= 0) & ~np.isin(kinds.kind, _messages(kinds))
    count = pd.Series(stage[calls]).value_counts() / pd.Series(places.stage).value_counts()
    fewer = {
        s: min(1.0, float(count.drop(s, errors="ignore").median() / count[s])) for s in count.dropna().index if len(count.dropna()) > 1
    }
    found = []
    for s in places.stages:
        others = mean.drop(columns=s, errors="ignore").median(axis=1)
        if s not in mean or others.isna().all():
            continue
        factor = (others / mean[s]).clip(upper=1.0).fillna(1.0)
        if not (mean[s] > UNEVEN * others).any():
            continue
        own = inside & (stage == s)
        scale = np.ones(len(graph))
        scale[own] = factor.reindex(kinds.kind[own]).to_numpy()
        scale[calls & (stage == s)] = fewer.get(s, 1.0)
        cost = np.rint(graph.cost * scale).astype(np.int64)
        ranks = tuple(places.ranks[places.stage == s].tolist())
        excess = float((graph.cost - cost).sum()) / max(len(ranks), 1) / graph.steps
        entries = np.isin(loads.rank, ranks)
        if excess * graph.steps > WORTH * 0.5 * _busy(graph):
            found.append(_Candidate("stage", ranks, Costs(cost, graph.delay, graph.host_lag), excess, entries, stage=s))
    return found


def _messages(kinds: Kinds) -> list[int]:
    return [i for i, name in enumerate(kinds.names) if name.endswith(("_send", "_recv"))]


def _groups(job: Job, graph: StepGraph, kinds: Kinds, loads: Loads) -> list[_Candidate]:
    """Each group (of messages: each pair of ranks) with transfers as short as those of its siblings for the same kind and size."""
    joined = graph.join >= 0
    if not joined.any():
        return []
    rows = graph.operation[joined]
    group = job.operations["group"].to_numpy()[rows].astype(np.int64)
    axis = job.operations["axis"].astype("str").to_numpy()[rows]
    frame = pd.DataFrame({"kind": kinds.kind[joined], "group": group, "cost": graph.cost[joined]})
    usual = frame.groupby(["kind", "group"])["cost"].median().rename("usual").reset_index()
    several = usual.groupby("kind")["group"].transform("size") > 1
    usual = usual[several & (usual["group"] >= 0)]
    if not len(usual):
        return []
    reference = np.full(len(usual), np.nan)
    for _, part in usual.groupby("kind"):
        values = part["usual"].to_numpy()
        for i, row in enumerate(part.index):
            reference[usual.index.get_loc(row)] = np.median(np.delete(values, i)) if len(values) <= 64 else np.median(values)
    usual = usual.assign(reference=reference)
    seen = frame.merge(usual, on=["kind", "group"], how="left")
    wanted = seen["reference"].to_numpy()
    wanted = np.where(seen["usual"].to_numpy() > SLOW_LINK * wanted, wanted, np.nan)
    over = np.nan_to_num(np.maximum(graph.cost[joined] - wanted, 0.0))
    by_group = pd.Series(over).groupby(group).sum().sort_values(ascending=False)
    found = []
    for number in by_group.index[: MOST["group"]].tolist():
        members = job.groups.groups[number].ranks or () if number >= 0 else ()
        excess = float(by_group[number]) / max(len(members), 1)
        if number < 0 or excess <= WORTH * 0.5 * _busy(graph):
            continue
        cost = graph.cost.copy()
        chosen = np.flatnonzero(joined)[group == number]
        cost[chosen] = np.minimum(cost[chosen], np.nan_to_num(wanted[group == number], nan=np.inf)).astype(np.int64)
        found.append(
            _Candidate(
                "group", tuple(members), Costs(cost, graph.delay, graph.host_lag), excess / graph.steps,
                np.zeros(len(loads.rank), np.bool_), group=number, axis=str(axis[group == number][0]),
            )
        )  # fmt: skip
    return found


def _chance(graph: StepGraph, loads: Loads, cause: _Candidate) -> tuple[float | None, int]:
    """(how likely a rank among alike ones would stand out so often, in how many steps it does).

    Among G peers that differ by chance alone each is the most loaded in a slot with probability 1 / G. With n slots the probability that
    any of them is it k times or more is at most G P(X >= k), X binomial(n, 1 / G). A group or stage stands out by the size of its excess.
    """
    if cause.scope != "rank":
        return 0.0, graph.steps
    load = loads.compute + loads.gap
    slots = pd.DataFrame({"slot": loads.slot, "rank": loads.rank, "load": load, "step": loads.step, "excess": loads.excess})
    own = slots[slots["rank"] == cause.ranks[0]].set_index("slot")
    others = slots[slots["slot"].isin(own.index)]
    size = others.groupby("slot")["rank"].size()
    weight = own["excess"].to_numpy()
    heavy = own.index[weight > 0.1 * weight.max()] if len(weight) and weight.max() > 0 else own.index
    top = own["load"] >= others.groupby("slot")["load"].max().reindex(own.index)
    by_step = own.groupby("step")["excess"].sum()
    stands_out = int((by_step > 0.25 * by_step.max()).sum()) if len(by_step) and by_step.max() > 0 else 0
    usual = own["load"].sum() - own["excess"].sum()
    if usual > 0 and own["excess"].sum() / usual > STANDS_OUT:
        return 0.0, stands_out  # far outside of what ranks that do the same differ by
    others_most = float(loads.excess[loads.rank != cause.ranks[0]].max(initial=0.0))
    if len(weight) and weight.max() > OUTLIER * others_most:
        return 0.0, stands_out  # one stop, far longer than any other rank's
    group = int(size.max()) if len(size) else 0
    count, hits = len(heavy), int(top.reindex(heavy).sum())
    return (None if group < 2 else min(1.0, group * tail(hits, count, 1 / group))), stands_out


def tail(hits: int, count: int, probability: float) -> float:
    """P(X >= hits) of a binomial(count, probability)."""
    from math import exp, lgamma, log

    if hits <= 0:
        return 1.0
    if probability >= 1:
        return 1.0
    terms = (
        exp(lgamma(count + 1) - lgamma(k + 1) - lgamma(count - k + 1) + k * log(probability) + (count - k) * log(1 - probability))
        for k in range(hits, count + 1)
    )
    return min(1.0, sum(terms))


__all__ = ["Costs", "Culprit", "Search", "culprits_of", "tail"]
