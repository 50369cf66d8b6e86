"""Who is in a group with whom, as pictures: every rank and pair of ranks of a small world, the groups of each axis of a large one."""

from __future__ import annotations

from collections.abc import Iterator

from tracekit.analyses._common import UNKNOWN_AXIS, rank_labels
from tracekit.findings import Heatmap
from tracekit.mesh.process_groups import ProcessGroup, short_ranks

#: Larger worlds get no map; from SMALL on a map of ranks would be a carpet: there each axis gets its groups.
LARGEST_MAP, SMALL, MOST_AXES = 4096, 64, 6


def maps(groups: list[ProcessGroup], world: list[int]) -> Iterator[Heatmap]:
    """The pictures that can be read at this size; none where no members are known."""
    if not 1 < len(world) <= LARGEST_MAP or not any(ranks_of(group) for group in groups):
        return
    if len(world) <= SMALL:
        yield _rank_axis_map(groups, world)
        yield _rank_rank_map(groups, world)
    else:
        yield from _axis_maps(groups)


def _axis_maps(groups: list[ProcessGroup]) -> Iterator[Heatmap]:
    """A map an axis: a row is a group, a column a place in it, the colour the rank's number: strides and blocks are seen at once."""
    note = "A row is a group, its ranks in group order. Even steps of colour along a row are a regular stride."
    for axis in _axes(groups)[:MOST_AXES]:
        own = sorted((ranks_of(g), g.id) for g in groups if (g.axis or UNKNOWN_AXIS) == axis and len(ranks_of(g)) > 1)
        width = max(len(ranks) for ranks, _ in own)
        values = [[float(ranks[place]) if place < len(ranks) else None for place in range(width)] for ranks, _ in own]
        texts = [[f"rank {ranks[place]}" if place < len(ranks) else "" for place in range(width)] for ranks, _ in own]
        labels = [f"{short_ranks(ranks)} ({name})" for ranks, name in own]
        places = [str(place) for place in range(width)]
        yield Heatmap(f"Groups of axis {axis}", places, labels, values, " ", texts, "place in the group", note=note)


def ranks_of(group: ProcessGroup) -> tuple[int, ...]:
    """The members that are known."""
    return group.known if group.ranks is None else group.ranks


def members_of(group: ProcessGroup) -> str:
    """The members in short, and whether some are not known."""
    known_ranks = short_ranks(ranks_of(group))
    return known_ranks if group.ranks is not None else f"{known_ranks}, not all are recorded"


def _axes(groups: list[ProcessGroup]) -> list[str]:
    return list(dict.fromkeys(group.axis or UNKNOWN_AXIS for group in groups if len(ranks_of(group)) > 1))


def _rank_axis_map(groups: list[ProcessGroup], world: list[int]) -> Heatmap:
    """For each rank and axis which of the axis' groups the rank is in: 1 is the axis' first group."""
    axes = _axes(groups)
    row_index = {rank: i for i, rank in enumerate(world)}
    numbers: list[list[float | None]] = [[None] * len(axes) for _ in world]
    texts = [["in no group"] * len(axes) for _ in world]
    seen = dict.fromkeys(axes, 0)
    for group in groups:
        axis = group.axis or UNKNOWN_AXIS
        if axis not in seen:
            continue
        seen[axis] += 1
        for rank in ranks_of(group):
            if rank in row_index:
                y, x = row_index[rank], axes.index(axis)
                texts[y][x] = _label(group) if numbers[y][x] is None else f"{texts[y][x]}; {_label(group)}"
                numbers[y][x] = float(seen[axis]) if numbers[y][x] is None else numbers[y][x]
    note = "The number is that of the group among the groups of its axis: ranks with one number in a column communicate with each other."
    return Heatmap("Which group of each axis a rank is in", axes, rank_labels(world), numbers, "", texts, "mesh axis", note=note)


def _rank_rank_map(groups: list[ProcessGroup], world: list[int]) -> Heatmap:
    """For each two ranks the smallest group that holds both, shown as the number of its axis."""
    axes = _axes(groups)
    row_index = {rank: i for i, rank in enumerate(world)}
    numbers: list[list[float | None]] = [[None] * len(world) for _ in world]
    texts = [["no common group"] * len(world) for _ in world]
    for group in sorted(groups, key=lambda g: -len(ranks_of(g))):  # small groups last: they overwrite
        members = [row_index[rank] for rank in ranks_of(group) if rank in row_index]
        for y in members if len(members) > 1 else []:
            for x in members:
                if x != y:
                    numbers[y][x] = 1.0 + axes.index(group.axis or UNKNOWN_AXIS)
                    texts[y][x] = _label(group)
    legend = ", ".join(f"{i} {axis}" for i, axis in enumerate(axes, start=1))
    labels = [str(rank) for rank in world]
    title = "Which axis joins two ranks"
    return Heatmap(title, labels, labels, numbers, "", texts, "rank", "rank", note=f"The smallest common group, by its axis: {legend}.")


def _label(group: ProcessGroup) -> str:
    return f"{group.axis or 'unknown axis'}, group {group.id} ({members_of(group)})"
