"""The device mesh of a job: named axes with sizes, and every rank's coordinate on it.

Ranks are numbered row-major over the axes (the last axis is the innermost, stride 1), as DeviceMesh and Megatron do. So a group of one
axis is a regular list: its stride tells which axis, its length the size. Names come from descriptions, or from the user.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from tracekit.errors import UsageError
from tracekit.mesh.lattice import Span, spans
from tracekit.mesh.layout import Placed, layout, span_of_axes
from tracekit.mesh.names import axis_of_description, is_overlay
from tracekit.mesh.process_groups import DEFAULT_GROUP, ProcessGroup, ProcessGroups
from tracekit.notes import Note, note
from tracekit.vocabulary import MeshSource

#: The axis of a group of all ranks in a job that has more than this one axis, or none that is known by name.
WORLD = "world"
#: Coordinates are worked out for all ranks of a world up to this size; in a larger one for the ranks that were read.
LARGEST_MESH = 200_000
_REST = -1


@dataclass(frozen=True)
class Axis:
    """One mesh axis."""

    name: str
    size: int


@dataclass(frozen=True)
class Mesh:
    """Axes from outermost (largest stride) to innermost; ``coordinates[rank][i]`` is the rank's place on ``axes[i]``.

    ``source`` says what the axes are known from (none: no axes). A rank without a coordinate is absent from the mapping.
    """

    axes: Sequence[Axis]
    coordinates: Mapping[int, tuple[int, ...]]
    source: MeshSource


@dataclass(frozen=True)
class Recorded:
    """The mesh as the recorder's manifests tell it: ``axes``, outermost first, and the axis of each group by (name, members).

    ``coordinates``: of the ranks that have a manifest; a DeviceMesh may number its ranks in another way than row by row.
    """

    axes: Sequence[Axis]
    axis_of: Mapping[tuple[str, tuple[int, ...]], str]
    coordinates: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


def parse_mesh(text: str) -> tuple[Axis, ...]:
    """``pp=2,dp_shard=4,tp=2`` as axes, outermost first; one size may be -1: what is left of the world. UsageError says what is wrong."""
    axes = []
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        number = int(size) if size.isascii() and size.isdigit() and len(size) <= 7 else (_REST if size == "-1" else 0)
        if not name or len(name) > 64 or number == 0:
            raise UsageError(f"--mesh: '{part.strip()[:80]}' is not NAME=SIZE", "write it like pp=2,dp_shard=4,tp=2, outermost axis first")
        axes.append(Axis(name, number))
    twice = [name for name, count in Counter(a.name for a in axes).items() if count > 1]
    if twice:
        raise UsageError(f"--mesh names axis {twice[0]} twice", "give each axis its own name")
    if sum(axis.size == _REST for axis in axes) > 1:
        raise UsageError("--mesh leaves the size of two axes open", "only one size can be -1")
    return tuple(axes)


def coordinate(rank: int, axes: Sequence[Axis]) -> tuple[int, ...]:
    """Place of a rank on every axis (row-major). ValueError for a rank that is not on the mesh."""
    index = []
    left = rank
    for axis in reversed(axes):
        left, at = divmod(left, axis.size)
        index.append(at)
    if left != 0:
        raise ValueError(f"rank {rank} is not on a mesh of {_shape(axes)}")
    return tuple(reversed(index))


def rank_of(index: Sequence[int], axes: Sequence[Axis]) -> int:
    """The rank at a coordinate. ValueError for a coordinate that is not on the mesh."""
    rank = 0
    for at, axis in zip(index, axes, strict=True):
        if not 0 <= at < axis.size:
            raise ValueError(f"{at} is no place on axis {axis.name} of size {axis.size}")
        rank = rank * axis.size + at
    return rank


def groups_of_axis(axes: Sequence[Axis], names: Iterable[str]) -> list[tuple[int, ...]]:
    """All groups along one axis, or along several flattened into one, in order of their first rank. ValueError for an unknown name."""
    wanted = set(names)
    unknown = wanted - {axis.name for axis in axes}
    if unknown:
        raise ValueError(f"no axis {min(unknown)} on a mesh of {_shape(axes)}")
    fixed = [range(1) if a.name in wanted else range(a.size) for a in axes]
    moving = [range(a.size) if a.name in wanted else range(1) for a in axes]
    steps = [rank_of(step, axes) for step in product(*moving)]
    return [tuple(base + step for step in steps) for base in (rank_of(index, axes) for index in product(*fixed))]


def infer_mesh(
    groups: ProcessGroups,
    world_size: int | None,
    ranks: Sequence[int],
    user: tuple[Axis, ...] | None,
    recorded: Recorded | None = None,
) -> tuple[Mesh, list[str], list[Note]]:
    """(mesh, axis of each group, notes). ``user``: axes given with --mesh, which win over everything; then come those of ``recorded``.

    ``ranks`` are those whose traces were read; groups of the other ranks need not be known, strides tell them. UsageError where the user's
    axes do not make up the world.
    """
    notes: list[Note] = []
    source: MeshSource
    told: Mapping[int, tuple[int, ...]] = {}
    if world_size is None:
        world_size = max((g.size for g in groups.groups if g.description == DEFAULT_GROUP and g.ranks is not None), default=None)
    placed = [Placed(g, axis_of_description(g.description), _spans(g, world_size)) for g in groups.groups]
    if user is not None:
        axes = _fitted(user, world_size, ranks)
        source = "user"
        names = [_user_axis(p, axes, world_size) for p in placed]
        notes = _against_user(placed, names, axes)
    elif recorded is not None and world_size in (None, math.prod(axis.size for axis in recorded.axes)):
        axes, source, told = tuple(recorded.axes), "manifest", recorded.coordinates
        names = [recorded.axis_of.get((p.group.name, p.group.ranks or ())) or p.described or _joined_axes(p, axes) for p in placed]
    else:
        if recorded is not None:
            notes.append(note("mesh_does_not_fit", mesh=_shape(recorded.axes), world=world_size))
        found, source, more = layout(placed, world_size, ranks)
        notes += more
        axes = tuple(Axis(name, span.size) for name, span in found)
        if not axes and world_size is not None and any(_is_world(p.group, world_size) for p in placed):
            axes, source = (Axis(WORLD, world_size),), "rank_lists"
        names = [p.described or (WORLD if _is_world(p.group, world_size) else _joined_axes(p, axes)) for p in placed]
    by_row = _coordinates(axes, world_size, ranks)
    odd = any(by_row.get(rank, place) != place for rank, place in told.items())
    return Mesh(axes, told if odd else by_row, source), names, notes


def _shape(axes: Sequence[Axis]) -> str:
    return " x ".join(f"{a.name}={a.size}" for a in axes)


def _is_world(group: ProcessGroup, world_size: int | None) -> bool:
    return world_size is not None and group.ranks is not None and len(group.ranks) == world_size > 1


def _spans(group: ProcessGroup, world_size: int | None) -> tuple[Span, ...] | None:
    if group.ranks is None or (world_size is not None and max(group.ranks, default=0) >= world_size):
        return None
    return spans(group.ranks)


def _fitted(user: tuple[Axis, ...], world_size: int | None, ranks: Sequence[int]) -> tuple[Axis, ...]:
    """The user's axes with every size known, or a UsageError that says how they miss the world."""
    size = math.prod(axis.size for axis in user if axis.size != _REST)
    shape = _shape(user)
    if any(axis.size == _REST for axis in user):
        if world_size is None:
            raise UsageError(f"--mesh {shape}: the world size is not recorded, so -1 cannot be worked out", "give every axis its size")
        if world_size % size:
            raise UsageError(f"--mesh {shape}: {size} does not divide the {world_size} ranks of the job", "give sizes that divide it")
        return tuple(replace(axis, size=world_size // size) if axis.size == _REST else axis for axis in user)
    if world_size is not None and size != world_size:
        missing = f"an axis of {world_size // size} is missing" if world_size % size == 0 else f"{size} does not divide {world_size}"
        raise UsageError(
            f"--mesh {shape} has {size} ranks, the job has {world_size}: {missing}", "give axes whose sizes multiply to the world size"
        )
    if world_size is None and max(ranks, default=0) >= size:
        raise UsageError(f"--mesh {shape} has {size} ranks, the job has a rank {max(ranks)}", "give axes that hold every rank")
    return user


def _coordinates(axes: Sequence[Axis], world_size: int | None, ranks: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Of all ranks where the axes make up the world; of those that were read where the world's size is unknown; else none."""
    total = math.prod(axis.size for axis in axes) if axes else 0
    if not axes or (world_size is not None and total != world_size):
        return {}
    whole = world_size is not None and total <= LARGEST_MESH
    return {rank: coordinate(rank, axes) for rank in (range(total) if whole else ranks) if 0 <= rank < total}


def _joined_axes(placed: Placed, axes: Sequence[Axis]) -> str:
    """The axis, or the axes joined by ``_`` from outermost to innermost, whose groups have just these members; '' where none has."""
    chosen: list[tuple[str, Span]] = []
    for wanted in placed.spans or ():
        inside = [(name, s) for name, s in span_of_axes(axes) if s.size > 1 and wanted.low <= s.low and s.high <= wanted.high]
        if math.prod(span.size for _, span in inside) != wanted.size:
            return ""
        chosen = inside + chosen
    return "_".join(name for name, _ in chosen)


def _user_axis(placed: Placed, axes: Sequence[Axis], world_size: int | None) -> str:
    """By members on the user's mesh. A description decides only what members cannot: experts and losses lie over axes of other names, and
    of a group of one rank, or of unknown members, nothing else is known.
    """
    own = {axis.name for axis in axes}
    described = placed.described
    if is_overlay(described) and described not in own:
        return described
    if placed.group.ranks is None or placed.group.size == 1:
        return described
    long = sum(axis.size > 1 for axis in axes)
    return WORLD if long > 1 and _is_world(placed.group, world_size) else _joined_axes(placed, axes)


def _against_user(placed: Sequence[Placed], names: Sequence[str], axes: Sequence[Axis]) -> list[Note]:
    """Notes on groups that are described as another axis than the user's, and on those that are along none of them."""
    own = {axis.name for axis in axes}
    notes = [
        note("described_otherwise", group=(p.group.id,), described=p.described, by_members=name or "no axis")
        for p, name in zip(placed, names, strict=True)
        if p.described in own and name != p.described
    ]
    lost = sorted({p.group.id for p, name in zip(placed, names, strict=True) if not name and p.group.size != 1})
    return notes + ([note("groups_of_no_axis", groups=tuple(lost))] if lost else [])
