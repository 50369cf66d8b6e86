"""What a walk through a step needs to know of a rank's units: places in order of use, parts, and how their gradients come about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from tracekit.estimate.activations import Activations
from tracekit.estimate.gathered import UnitBytes, unit_bytes
from tracekit.estimate.parameters import Parameter
from tracekit.estimate.plan import Plan
from tracekit.estimate.units import Shapes, Unit, parameters_of, shapes_of


def needs_sharding(plan: Plan) -> bool:
    """False for a group of one that computes with what it stores: nothing is gathered, gradients are kept as they come."""
    return plan.strategy.framework == "torch_fsdp2" or plan.shard > 1 or plan.recipe.compute != plan.recipe.parameter


def receive_buffers(plan: Plan, stage: int, message: int) -> int:
    """Bytes of the buffers in which torch's stages receive: one for each micro-batch and neighbour, there from the start.

    torch/distributed/pipelining/stage.py, ``_create_act_recv_info``; with several chunks a rank, for each of them.
    """
    p, m, v = plan.mesh.pp, plan.batch.micro_batches, plan.virtual_stages
    if p == 1 or not plan.receive_buffers:
        return 0
    return m * message * (2 * v - (stage == 0) - (stage == p - 1))


def waiting_bytes(chunk: Activations) -> int:
    """What one micro-batch keeps of a chunk between its two passes, its output too [bytes]."""
    return sum(chunk.saved.values()) + chunk.logits_saved + chunk.inputs + (chunk.logits_output or chunk.stream)


def flat_copies(units: Sequence[Unit], plan: Plan) -> int:
    """Most that is copied at once to be averaged [bytes]: dense gradients, or experts', where other ranks have them too."""
    size = {expert: sum(u.elements for u in units if u.expert == expert and u.r > 1) for expert in (False, True)}
    return max(size.values()) * plan.recipe.gradient


def adds_in_place(plan: Plan, views: bool, many: bool) -> bool:
    """Whether autograd adds each whole gradient to one that is there (``many``: of micro-batches before; ``views``: of DDP's buckets).

    Then it lives for a moment only. That is so where gradients of several micro-batches are not reduced in between, and have no other type.
    """
    if not plan.strategy.shards_parameters:
        return views or (many and plan.strategy.name != "zero2" and plan.recipe.gradient == plan.recipe.autograd)
    return many and not plan.strategy.syncs_each and plan.recipe.reduce == plan.recipe.autograd


def by_part(units: Sequence[Unit]) -> dict[str, Mapping[str, int]]:
    """Elements of each unit by the last but one word of its parameters' names (``down`` of layers.0.mlp.down.weight); '' is all of it."""
    found: dict[str, Mapping[str, int]] = {}
    for unit in units:
        name = unit.parameters[0].unit
        own = _parts(tuple(_part(p.name) for p in unit.parameters), shapes_of(unit.parameters))
        before = found.get(name)
        found[name] = own if before is None else {key: before.get(key, 0) + own.get(key, 0) for key in {*before, *own}}
    return found


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


def places_of(units: Sequence[Unit], plan: Plan) -> tuple[UnitBytes | None, list[UnitBytes]]:
    """(the root's unit, all others in order of use: a layer together with its experts)."""
    places: dict[str, list[Unit]] = {}
    root: list[Unit] = []
    for unit in units:
        if unit.root:
            root.append(unit)
        else:
            places.setdefault(unit.parameters[0].unit, []).append(unit)
    return unit_bytes(root, plan) if root else None, [unit_bytes(members, plan) for members in places.values()]


def early_root_elements(parameters: Sequence[Parameter]) -> int:
    """Elements of the root's gradients that backward computes before those of the other units.

    Parameters listed behind the first unit (norm, head) come first; so does an embedding that is the head as well.
    """
    first = next((index for index, p in enumerate(parameters) if p.unit), 0)
    root = [(index, p) for index, p in enumerate(parameters) if not p.unit]
    tied = any(p.role == "norm" for _, p in root) and not any(p.role == "head" for p in parameters)
    return sum(p.elements for index, p in root if index >= first or (tied and p.role == "embedding"))
