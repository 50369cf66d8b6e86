"""Process groups of this rank and the mesh axis of each, from DeviceMesh objects and from what torch.distributed has registered."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tracekit.manifest import Axis, Group
from tracekit.mesh.mesh import WORLD
from tracekit.recorder import private


def axes_of(mesh: DeviceMesh | Mapping[str, int] | None) -> list[Axis]:
    """Axes of the mesh, outermost first: from a DeviceMesh with named dimensions, or from a mapping name -> size; [] for None."""
    if mesh is None:
        return []
    if isinstance(mesh, Mapping):
        return [Axis(str(name), int(size)) for name, size in mesh.items()]
    names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
    return [Axis(name, mesh.size(i)) for i, name in enumerate(names)]


def row_major(rank: int, axes: Sequence[Axis]) -> dict[str, int]:
    """Place of a rank on every axis of a mesh that numbers its ranks row by row."""
    place: dict[str, int] = {}
    for axis in reversed(axes):
        rank, place[axis.name] = divmod(rank, axis.size)
    return {axis.name: place[axis.name] for axis in axes}


def places(mesh: DeviceMesh | Mapping[str, int] | None, axes: Sequence[Axis]) -> dict[int, tuple[int, ...]]:
    """Rank -> its place on every axis; {} where the axes do not make up the world. A DeviceMesh may number its ranks as it likes."""
    world = dist.get_world_size()
    if not axes or math.prod(axis.size for axis in axes) != world:
        return {}
    if mesh is None or isinstance(mesh, Mapping):
        return {rank: tuple(row_major(rank, axes).values()) for rank in range(world)}
    return {int(mesh.mesh[at]): at for at in itertools.product(*(range(axis.size) for axis in axes))}


def coordinate_of(mesh: DeviceMesh | Mapping[str, int], axes: Sequence[Axis], rank: int) -> dict[str, int]:
    """This rank's place on every axis, {} where it is on none of this mesh."""
    if isinstance(mesh, Mapping):
        return row_major(rank, axes)
    at = mesh.get_coordinate()
    return {} if at is None else {axis.name: int(place) for axis, place in zip(axes, at, strict=True)}


def groups_of_rank(mesh: DeviceMesh | Mapping[str, int] | None, axes: Sequence[Axis], places: Mapping[int, tuple[int, ...]]) -> list[Group]:
    """Every process group this rank is in, with its whole rank list, and its axis where it runs along the mesh.

    A group has an axis if DeviceMesh made it for one, or if its members are exactly the ranks along one axis (or several, ``a_b``)
    through this rank. Groups of one rank get the axis of size 1 that they were made for.
    """
    made = _made_by_mesh(mesh)
    result = []
    for group, (name, ranks) in private.all_groups().items():
        description = str(getattr(group, "group_desc", "") or "")
        axis = made.get(name) or axis_of(ranks, axes, places, dist.get_rank())
        result.append(Group(name, ranks, description, axis, dist.get_backend(group)))
    return result


def axis_of(ranks: list[int], axes: Sequence[Axis], places: Mapping[int, tuple[int, ...]], rank: int) -> str:
    """The axis, or the axes joined by ``_`` outermost first, along which ``ranks`` lie; '' where they lie along none.

    ``ranks`` are all ranks through ``rank`` along these axes, or a part of those along one (a group inside of an axis, as FSDP2 makes for
    ``reshard_after_forward=2``). The group of all ranks of several axes is ``world``. Axes of size 1 have no say: a group of one rank
    belongs to none by its members alone.
    """
    if len(ranks) < 2 or not places:
        return ""
    of, own = {member: places[member] for member in ranks}, places[rank]
    moving = [i for i, axis in enumerate(axes) if axis.size > 1 and len({place[i] for place in of.values()}) > 1]
    whole = math.prod(axes[i].size for i in moving)
    along = all(place[i] == own[i] for place in of.values() for i in range(len(axes)) if i not in moving)
    if not along or (len(ranks) != whole and len(moving) > 1):
        return ""
    if len(ranks) == len(places) and len(moving) > 1:
        return WORLD
    return "_".join(axes[i].name for i in moving)


def _made_by_mesh(mesh: DeviceMesh | Mapping[str, int] | None) -> dict[str, str]:
    """Group name -> axis, for the groups that a DeviceMesh made for its dimensions."""
    if mesh is None or isinstance(mesh, Mapping) or mesh.mesh_dim_names is None:
        return {}
    result: dict[str, str] = {}
    for name in mesh.mesh_dim_names:
        group: Any = mesh.get_group(name)
        result.setdefault(str(group.group_name), name)
    return result
