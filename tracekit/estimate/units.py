"""The units of one rank: parameters that are gathered, reduced and freed together, with their sizes sharded and whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tracekit.estimate.padding import Rules, local_state, padded
from tracekit.estimate.parameters import ROOT, Parameter, elements_of
from tracekit.estimate.plan import Plan

Shapes = tuple[tuple[tuple[int, ...], int], ...]


@dataclass(frozen=True)
class Unit:
    """Parameters of one unit, sharded over ``w`` ranks and replicated over ``r``.

    ``elements`` really there; ``padded`` as they are stored over all ranks and travel; ``shard`` of them on this rank; ``state`` those for
    which this rank's optimizer keeps state. ``expert``: its parameters belong to experts, whose groups are others.
    """

    name: str
    parameters: tuple[Parameter, ...]
    w: int
    r: int
    elements: int
    padded: int
    shard: int
    state: int
    root: bool = False
    expert: bool = False


def units_of(parameters: Sequence[Parameter], plan: Plan, shard_rank: int = 0) -> list[Unit]:
    """Units in order of use. Parameters are those of the stage, already divided by tp and ep; ``shard_rank`` is the place among the W.

    Experts form a unit of their own beside their layer's where their shard group is another one (``layers.3.experts``).
    """
    apart = plan.expert_shard != plan.shard or plan.mesh.ep > 1
    groups: dict[tuple[str, bool], list[Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.unit, apart and parameter.experts > 0), []).append(parameter)
    return [_unit(name, members, expert, plan, shard_rank) for (name, expert), members in groups.items()]


def _unit(name: str, members: list[Parameter], expert: bool, plan: Plan, shard_rank: int) -> Unit:
    w, r = (plan.expert_shard, plan.expert_replicas) if expert else (plan.shard, plan.replicas)
    rules = Rules(plan.strategy.framework, plan.recipe.compute, plan.strategy.use_orig_params, 3 if plan.strategy.shards_parameters else 1)
    elements, whole, state = _sizes(shapes_of(members), w, rules, shard_rank % w)
    label = f"{name}.experts" if expert and name else "experts" if expert else name
    return Unit(label, tuple(members), w, r, elements, whole, -(-whole // w), state, name == ROOT, expert)


def shapes_of(members: Sequence[Parameter]) -> Shapes:
    """What the sizes of a unit depend on: the shape of each parameter, and how many experts are stacked in it."""
    return tuple((parameter.shape, parameter.experts) for parameter in members)


def parameters_of(shapes: Shapes) -> list[Parameter]:
    """Parameters of these shapes."""
    return [Parameter(str(index), shape, experts=experts) for index, (shape, experts) in enumerate(shapes)]


@lru_cache(maxsize=4096)
def _sizes(shapes: Shapes, w: int, rules: Rules, rank: int) -> tuple[int, int, int]:
    """(elements, padded elements, elements of state) of a unit; the same for every layer, and asked for each."""
    members = parameters_of(shapes)
    return elements_of(members), padded(rules, members, w), local_state(rules, members, w, rank)
