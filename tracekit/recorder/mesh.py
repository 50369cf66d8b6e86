"""Process groups of this rank and the mesh axis of each, from DeviceMesh objects and from what torch.distributed has registered."""

from __future__ import annotations

import math
from collections.abc import Mapping
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


def groups_of_rank(mesh: DeviceMesh | Mapping[str, int] | None) -> list[Group]:
    """Every process group this rank is in, with its whole rank list, and its axis where it runs along the mesh.

    A group has an axis if DeviceMesh made it for one, or if its members are exactly the ranks along one axis (or several, ``a_b``)
    through this rank. Groups of one rank get the axis of size 1 that they were made for.
    """
    if not dist.is_initialized():
        return []
    made = _made_by_mesh(mesh)
    axes = axes_of(mesh)
    result = []
    for group, (name, ranks) in private.all_groups().items():
        description = str(getattr(group, "group_desc", "") or "")
        axis = made.get(name) or axis_of(ranks, axes, dist.get_rank())
        result.append(Group(name, ranks, description, axis, dist.get_backend(group)))
    return result


def axis_of(ranks: list[int], axes: list[Axis], rank: int) -> str:
    """The axis, or the axes joined by ``_`` outermost first, along which ``ranks`` lie; '' where they lie along none.

    ``ranks`` are all ranks through ``rank`` along these axes, or a part of those along one (a group inside of an axis, as FSDP2 makes for
    ``reshard_after_forward=2``). The group of all ranks of several axes is ``world``. Axes of size 1 have no say: a group of one rank
    belongs to none by its members alone.
    """
    if len(ranks) < 2 or math.prod(axis.size for axis in axes) != dist.get_world_size():
        return ""
    places = {member: _place(member, axes) for member in ranks}
    own = _place(rank, axes)
    moving = [i for i, axis in enumerate(axes) if axis.size > 1 and len({place[i] for place in places.values()}) > 1]
    whole = math.prod(axes[i].size for i in moving)
    along = all(place[i] == own[i] for place in places.values() for i in range(len(axes)) if i not in moving)
    if not along or (len(ranks) != whole and len(moving) > 1):
        return ""
    if len(ranks) == dist.get_world_size() and len(moving) > 1:
        return WORLD
    return "_".join(axes[i].name for i in moving)


def _place(rank: int, axes: list[Axis]) -> tuple[int, ...]:
    place = []
    for axis in reversed(axes):
        rank, at = divmod(rank, axis.size)
        place.append(at)
    return tuple(reversed(place))


def _made_by_mesh(mesh: DeviceMesh | Mapping[str, int] | None) -> dict[str, str]:
    """Group name -> axis, for the groups that a DeviceMesh made for its dimensions."""
    if mesh is None or isinstance(mesh, Mapping) or mesh.mesh_dim_names is None:
        return {}
    result: dict[str, str] = {}
    for name in mesh.mesh_dim_names:
        group: Any = mesh.get_group(name)
        result.setdefault(str(group.group_name), name)
    return result
