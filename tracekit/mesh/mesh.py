"""The device mesh of a job: named axes with sizes, and every rank's coordinate on it.

Ranks are numbered row-major over the axes (the last axis is the innermost, stride 1), as DeviceMesh and Megatron do. So a group of one
axis is a regular list: its stride tells which axis, its length the size. Names come from descriptions, or from the user.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from tracekit.errors import UsageError
from tracekit.mesh.names import axis_of_description
from tracekit.mesh.process_groups import LARGEST_WORLD, ProcessGroup, ProcessGroups

#: Axes that are their own dimension of the mesh; ``ep`` and flattened meshes re-use the ranks of these.
_OWN_DIMENSION = ("pp", "dp_replicate", "dp_shard", "dp", "fsdp", "cp", "tp", "replicate", "shard")
WORLD = "world"


@dataclass(frozen=True)
class Axis:
    """One mesh axis."""

    name: str
    size: int


@dataclass(frozen=True)
class Mesh:
    """Axes from outermost (largest stride) to innermost; ``coordinates[rank][i]`` is the rank's place on ``axes[i]``.

    ``source``: manifest, descriptions, rank_lists, user, or none (no axes). A rank without a coordinate is absent from the mapping.
    """

    axes: Sequence[Axis]
    coordinates: Mapping[int, tuple[int, ...]]
    source: str


def parse_mesh(text: str) -> tuple[Axis, ...]:
    """``pp=2,dp_shard=4,tp=2`` as axes, outermost first. UsageError says what is wrong."""
    axes = []
    for part in text.split(","):
        name, _, size = part.partition("=")
        name, size = name.strip(), size.strip()
        if not name or not size.isascii() or not size.isdigit() or int(size) < 1 or len(size) > 7:
            raise UsageError(f"--mesh: '{part.strip()}' is not NAME=SIZE", "write it like pp=2,dp_shard=4,tp=2, outermost axis first")
        axes.append(Axis(name, int(size)))
    twice = [name for name, count in Counter(a.name for a in axes).items() if count > 1]
    if twice:
        raise UsageError(f"--mesh names axis {twice[0]} twice", "give each axis its own name")
    return tuple(axes)


def coordinate(rank: int, axes: Sequence[Axis]) -> tuple[int, ...]:
    """Place of a rank on every axis (row-major)."""
    place = []
    for axis in reversed(axes):
        rank, at = divmod(rank, axis.size)
        place.append(at)
    return tuple(reversed(place))


def rank_of(place: Sequence[int], axes: Sequence[Axis]) -> int:
    """The rank at a coordinate."""
    rank = 0
    for at, axis in zip(place, axes, strict=True):
        rank = rank * axis.size + at
    return rank


def groups_of_axis(axes: Sequence[Axis], names: Iterable[str]) -> list[tuple[int, ...]]:
    """All groups along one axis, or along several flattened into one, in order of their first rank."""
    wanted = set(names)
    fixed = [range(1) if a.name in wanted else range(a.size) for a in axes]
    moving = [range(a.size) if a.name in wanted else range(1) for a in axes]
    return [
        tuple(rank_of([f + m for f, m in zip(base, step, strict=True)], axes) for step in product(*moving))
        for base in product(*fixed)
    ]


def infer_mesh(
    groups: ProcessGroups, world_size: int | None, ranks: Sequence[int], user: tuple[Axis, ...] | None
) -> tuple[Mesh, list[str], list[str]]:
    """(mesh, axis of each group, notes). ``user``: axes given with --mesh, which win over everything inferred."""
    notes: list[str] = []
    if user is not None:
        size = math.prod(axis.size for axis in user)
        if world_size is not None and size != world_size:
            shape = " x ".join(f"{a.name}={a.size}" for a in user)
            raise UsageError(
                f"--mesh {shape} has {size} ranks, the job has {world_size}", "give axes whose sizes multiply to the world size"
            )
        axes, source = user, "user"
    else:
        axes, source = _inferred(groups.groups, world_size, notes)
    names = [_axis_name(group, axes, source, world_size) for group in groups.groups]
    lost = sorted({g.id for g, name in zip(groups.groups, names, strict=True) if not name and g.size != 1})
    if lost and user is not None:
        notes.append(f"--mesh: no axis has the members of process group {', '.join(lost[:6])}{' ...' if len(lost) > 6 else ''}")
    total = math.prod(axis.size for axis in axes) if axes else 0
    placed = range(total) if total and total == world_size and total <= LARGEST_WORLD else [r for r in ranks if r < total]
    return Mesh(axes, {rank: coordinate(rank, axes) for rank in placed} if axes else {}, source), names, notes


@dataclass(frozen=True)
class _Regular:
    """An axis as its groups show it."""

    name: str
    size: int
    stride: int


def _inferred(groups: Sequence[ProcessGroup], world_size: int | None, notes: list[str]) -> tuple[tuple[Axis, ...], str]:
    named = _regular(groups, lambda g: axis_of_description(g.description), notes)
    if named:
        return _stacked(named, world_size, notes), "descriptions"
    unnamed = _regular(groups, lambda g: "" if g.size == world_size else _neutral_name(g), notes)
    if unnamed:
        notes.append("no group describes its axis: axes are named by stride and size (use --mesh to name them)")
        return _stacked(unnamed, world_size, notes), "rank_lists"
    if world_size and world_size > 1 and any(g.ranks is not None and len(g.ranks) == world_size for g in groups):
        return (Axis(WORLD, world_size),), "rank_lists"
    return (), "none"


def _neutral_name(group: ProcessGroup) -> str:
    stride = _stride(group.ranks)
    return f"axis_{stride}x{group.size}" if stride else ""


def _stride(ranks: tuple[int, ...] | None) -> int:
    """The constant distance between members; 0 for an irregular or single list."""
    if ranks is None or len(ranks) < 2:
        return 0
    steps = {b - a for a, b in pairwise(ranks)}
    step = steps.pop()
    return step if not steps and step > 0 else 0


def _regular(groups: Sequence[ProcessGroup], name_of: object, notes: list[str]) -> list[_Regular]:
    """One entry an axis name: size and stride that its regular groups agree on (the most common where they do not)."""
    assert callable(name_of)
    seen: dict[str, Counter[tuple[int, int]]] = {}
    for group in groups:
        name, stride = name_of(group), _stride(group.ranks)
        if name and stride and group.ranks is not None:
            seen.setdefault(name, Counter())[len(group.ranks), stride] += 1
    for name, shapes in seen.items():
        if len(shapes) > 1:
            shown = ", ".join(f"{size} ranks at stride {stride}" for size, stride in sorted(shapes))
            notes.append(f"groups of axis {name} have different shapes: {shown}")
    return [_Regular(name, *max(shapes, key=lambda s: (shapes[s], s))) for name, shapes in seen.items()]


def _stacked(found: Sequence[_Regular], world_size: int | None, notes: list[str]) -> tuple[Axis, ...]:
    """Axes that fill the world from stride 1 outward. Of axes that start at one stride the smallest is the dimension, others are
    flattened meshes over it; ``ep`` lies inside a data axis and is a dimension only where nothing else is.
    """
    axes: list[Axis] = []
    stride = 1
    rest = sorted((a for a in found if a.size > 1), key=lambda a: (a.name not in _OWN_DIMENSION, a.size))
    while world_size is None or stride < world_size:
        here = next((a for a in rest if a.stride == stride), None)
        if here is None:
            further = min((a.stride for a in rest if a.stride > stride and a.stride % stride == 0), default=world_size or stride)
            if further <= stride or further % stride:
                break
            axes.append(Axis(_unnamed(axes), further // stride))
            size, name = axes[-1].size, axes[-1].name
            notes.append(f"no group was seen along the mesh axis of size {size} at stride {stride}: it is called {name}")
            stride = further
            continue
        axes.append(Axis(here.name, here.size))
        rest = [a for a in rest if a.name != here.name]
        stride *= here.size
    if world_size is not None and stride != world_size:
        notes.append(f"the axes {', '.join(f'{a.name}={a.size}' for a in reversed(axes))} do not fill a world of {world_size} ranks")
    return tuple(reversed(axes))


def _unnamed(axes: Sequence[Axis]) -> str:
    used = {axis.name for axis in axes}
    return next(name for name in ("rest", *(f"rest{i}" for i in range(2, 99))) if name not in used)


def _axis_name(group: ProcessGroup, axes: Sequence[Axis], source: str, world_size: int | None) -> str:
    """By members on a user's mesh, else by description, else by members; several axes are joined (``dp_shard_cp``)."""
    described = axis_of_description(group.description)
    if described and source != "user":
        return described
    joined = _joined_axes(group, axes, world_size)
    return joined or described


def _joined_axes(group: ProcessGroup, axes: Sequence[Axis], world_size: int | None) -> str:
    total = math.prod(axis.size for axis in axes) if axes else 0
    if group.ranks is None or len(group.ranks) < 2 or max(group.ranks) >= total:
        return WORLD if group.ranks is not None and world_size and len(group.ranks) == world_size > 1 else ""
    places = [coordinate(rank, axes) for rank in group.ranks]
    moving = [i for i in range(len(axes)) if len({place[i] for place in places}) > 1]
    if len(set(places)) != math.prod(axes[i].size for i in moving) or len(set(places)) != len(group.ranks):
        return ""
    if len(group.ranks) == total and len([a for a in axes if a.size > 1]) > 1:
        return WORLD
    return "_".join(axes[i].name for i in moving)
