"""The units of one rank: parameters that are gathered, reduced and freed together; their elements, and their bytes in every form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tracekit.estimate.padding import Rules, local_state, padded
from tracekit.estimate.parameters import ROOT, Parameter, elements_of
from tracekit.estimate.plan import WHOLE_GRADIENTS, Plan

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
    rules = Rules(plan.framework, plan.recipe.compute, plan.strategy.use_orig_params, 3 if plan.strategy.shards_parameters else 1)
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


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of the units that are used together: a layer's, and its experts' where they are apart. Symbols: ``sharding``."""

    name: str
    whole: int
    """gathered parameters, q n [bytes]"""
    buffer: int
    """output of the all-gather; 0 in a group of one [bytes]"""
    cast: int
    """this rank's shard in the gathered type, where it is stored in another [bytes]"""
    gradients: int
    """gradients as autograd leaves them, g x elements [bytes]"""
    reduce: int
    """input of the reduce-scatter, r n [bytes]"""
    reduced: int
    """output of the reduce-scatter, r n / W [bytes]"""
    kept: int
    """gradients as they stay until the optimizer [bytes]"""
    accumulated: int
    """whole gradients in the reduced type, r x elements [bytes]"""
    parts: Mapping[str, int]
    """elements by the last but one word of a parameter's name (``down`` of layers.0.mlp.down.weight); '' is all of them"""


def unit_bytes(units: Sequence[Unit], plan: Plan) -> UnitBytes:
    """Sizes summed over ``units``."""
    recipe = plan.recipe
    many = [unit for unit in units if unit.w > 1]
    casts = recipe.compute != recipe.parameter
    return UnitBytes(
        units[0].name,
        sum(unit.padded for unit in units) * recipe.compute,
        sum(unit.padded for unit in many) * recipe.compute,
        sum(unit.shard for unit in many) * recipe.compute if casts else 0,
        sum(unit.elements for unit in units) * recipe.autograd,
        sum(unit.padded for unit in units) * recipe.reduce,
        sum(unit.shard for unit in units) * recipe.reduce,
        sum(unit.elements if plan.strategy.name in WHOLE_GRADIENTS else unit.shard for unit in units) * recipe.gradients,
        sum(unit.elements for unit in units) * recipe.reduce,
        _parts_of(units),
    )


def used_together(units: Sequence[Unit], plan: Plan) -> tuple[UnitBytes | None, list[UnitBytes]]:
    """(the root's unit, all others in order of use, a layer together with its experts)."""
    root = [unit for unit in units if unit.root]
    others: dict[str, list[Unit]] = {}
    for unit in units:
        if not unit.root:
            others.setdefault(unit.parameters[0].unit, []).append(unit)
    return unit_bytes(root, plan) if root else None, [unit_bytes(members, plan) for members in others.values()]


def _parts_of(units: Sequence[Unit]) -> Mapping[str, int]:
    found = [_parts(tuple(_part(p.name) for p in unit.parameters), shapes_of(unit.parameters)) for unit in units]
    return found[0] if len(found) == 1 else {key: sum(each.get(key, 0) for each in found) for key in set().union(*found)}


def _part(name: str) -> str:
    words = name.rsplit(".", 2)
    return words[-2] if len(words) > 1 else name


@lru_cache(maxsize=4096)
def _parts(names: tuple[str, ...], shapes: Shapes) -> Mapping[str, int]:
    """Elements by part of one unit; layers have the same."""
    parts = {"": 0}
    for name, parameter in zip(names, parameters_of(shapes), strict=True):
        parts[name] = parts.get(name, 0) + parameter.elements
        parts[""] += parameter.elements
    return parts
