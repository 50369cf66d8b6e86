"""A device mesh: every rank's coordinate, the groups of every axis, which of them cross nodes, and one micro-batch's walk through them.

Ranks are numbered row-major, the last axis innermost. Groups are worked out from strides and, for the checks, found again by moving data:
what an all-gather along an axis brings together has to be the ranks that differ in that place alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracekit.collectives.purpose import role_of_axis
from tracekit.errors import UsageError
from tracekit.findings import Table
from tracekit.mesh.mesh import Axis, coordinate, groups_of_axis, parse_mesh, rank_of
from tracekit.simulate.arguments import bytes_of_element, check, option, values
from tracekit.simulate.experiment import Check, Experiment
from tracekit.simulate.mesh.walk import MOST_WALKED, Walk, WalkSizes, walk
from tracekit.simulate.tables import Columns, table
from tracekit.simulate.virtual import Network
from tracekit.units import listed

TITLE = "A device mesh and its process groups"
EXAMPLE = "tracekit simulate mesh --mesh pp=2,dp_shard=4,tp=2 --gpus-per-node 8 --rank 5"
MOST_RANKS = 4096
#: Larger worlds are checked by arithmetic alone.
MOST_MOVED = 512


@dataclass(frozen=True)
class Arguments:
    """What can be chosen."""

    mesh: str = option("pp=2,dp_shard=4,tp=2", "Axes and sizes, outermost first.")
    rank: int = option(5, "The rank whose place and groups are shown, and whose micro-batch is followed.")
    gpus_per_node: int = option(8, "Consecutive ranks on one node.", most=MOST_RANKS)
    tokens: int = option(16, "Tokens of the micro-batch, for the walk.", most=1024)
    hidden: int = option(8, "Elements of a token, for the walk.", most=64)
    element_bytes: int = bytes_of_element(", for the walk")


def run(arguments: Arguments) -> Experiment:
    """Make the tables and walk. UsageError for a mesh that is none, or a rank that is not on it."""
    axes = _axes(arguments)
    size = math.prod(axis.size for axis in axes)
    walked = _walk(arguments, axes, size)
    place = coordinate(arguments.rank, axes)
    own = [(axis.name, _group(axes, axis.name, arguments.rank)) for axis in axes]
    words = ", ".join(f"{name} [{listed(group, 9)}]" for name, group in own if len(group) > 1)
    tables = [
        _axes_table(axes, arguments.gpus_per_node),
        _own_table(axes, arguments),
        _groups_table(axes, arguments.gpus_per_node),
        _ranks_table(axes, size, arguments.gpus_per_node),
    ]
    return Experiment(
        name="mesh",
        title=TITLE,
        about="Ranks are numbered along the last axis first; the ranks of a group differ in their place on its axis alone.",
        arguments=values(arguments),
        verdict=f"{size} {'rank' if size == 1 else 'ranks'}; rank {arguments.rank} = {place}, in groups {words or 'of its own alone'}",
        tables=[*tables, *([walked.table] if walked is not None else [])],
        moments=walked.moments if walked is not None else (),
        checks=[*_checks(axes, size), *(walked.checks if walked is not None else ())],
        calls=walked.calls if walked is not None else (),
        notes=_notes(axes, size, walked),
    )


def _axes(arguments: Arguments) -> tuple[Axis, ...]:
    check(arguments)
    axes = parse_mesh(arguments.mesh)
    open_ = next((axis.name for axis in axes if axis.size < 1), None)
    if open_ is not None:
        raise UsageError(f"--mesh leaves the size of {open_} open, and there is no job to take it from", "give every axis its size")
    size = math.prod(axis.size for axis in axes)
    if size > MOST_RANKS:
        raise UsageError(f"--mesh has {size} ranks", f"give at most {MOST_RANKS}")
    if not 0 <= arguments.rank < size:
        raise UsageError(f"--rank {arguments.rank} is not one of {size} ranks", f"give 0 to {size - 1}")
    return axes


def _walk(arguments: Arguments, axes: Sequence[Axis], size: int) -> Walk | None:
    if size > MOST_WALKED:
        return None
    sizes = WalkSizes(arguments.tokens, arguments.hidden, arguments.element_bytes)
    return walk(axes, arguments.rank, arguments.gpus_per_node, sizes)


def _group(axes: Sequence[Axis], name: str, rank: int) -> tuple[int, ...]:
    return next(group for group in groups_of_axis(axes, [name]) if rank in group)


def _crosses(group: Sequence[int], gpus_per_node: int) -> bool:
    return len({rank // gpus_per_node for rank in group}) > 1


def _strides(axes: Sequence[Axis]) -> list[int]:
    return [math.prod(axis.size for axis in axes[place + 1 :]) for place in range(len(axes))]


def _axes_table(axes: Sequence[Axis], gpus_per_node: int) -> Table:
    groups = [groups_of_axis(axes, [axis.name]) for axis in axes]
    crossing = [sum(_crosses(group, gpus_per_node) for group in found) for found in groups]
    nodes = [max(len({rank // gpus_per_node for rank in group}) for group in found) for found in groups]
    columns: Columns = {
        "axis": ("axis", [axis.name for axis in axes]),
        "role": ("role", [role_of_axis(axis.name) for axis in axes]),
        "size": ("size", [axis.size for axis in axes]),
        "stride": ("stride", _strides(axes)),
        "groups": ("groups", [len(found) for found in groups]),
        "crossing": ("groups that cross nodes", crossing),
        "nodes": ("most nodes of a group", nodes),
    }
    note = f"{gpus_per_node} consecutive ranks on a node. Put what talks most innermost: its groups stay on a node."
    return table("Axes", columns, note)


def _own_table(axes: Sequence[Axis], arguments: Arguments) -> Table:
    groups = [_group(axes, axis.name, arguments.rank) for axis in axes]
    columns: Columns = {
        "axis": ("axis", [axis.name for axis in axes]),
        "place": ("place", coordinate(arguments.rank, axes)),
        "group": ("its group", [str(list(group)) for group in groups]),
        "crosses": ("crosses nodes", [_crosses(group, arguments.gpus_per_node) for group in groups]),
    }
    return table(f"Rank {arguments.rank}, on node {arguments.rank // arguments.gpus_per_node}", columns)


def _groups_table(axes: Sequence[Axis], gpus_per_node: int) -> Table:
    rows = [(axis.name, group) for axis in axes for group in groups_of_axis(axes, [axis.name])]
    columns: Columns = {
        "axis": ("axis", [name for name, _ in rows]),
        "ranks": ("ranks", [str(list(group)) for _, group in rows]),
        "crosses": ("crosses nodes", [_crosses(group, gpus_per_node) for _, group in rows]),
    }
    return table("Groups of every axis", columns, shown=32)


def _ranks_table(axes: Sequence[Axis], size: int, gpus_per_node: int) -> Table:
    coordinates = np.array([coordinate(rank, axes) for rank in range(size)], np.int64)
    columns = {"rank": np.arange(size)} | {axis.name: coordinates[:, number] for number, axis in enumerate(axes)}
    columns["node"] = np.arange(size) // gpus_per_node
    return table("Coordinates", {name: (name, column.tolist()) for name, column in columns.items()}, shown=32)


def _checks(axes: Sequence[Axis], size: int) -> list[Check]:
    back = sum(rank_of(coordinate(rank, axes), axes) != rank for rank in range(size))
    checks = [Check("ranks that come back from their coordinate as another", back, 0, "ranks", "row-major: sum of place times stride")]
    for axis, stride in zip(axes, _strides(axes), strict=True):
        groups = groups_of_axis(axes, [axis.name])
        covered = len({rank for group in groups for rank in group})
        irregular = sum(tuple(range(group[0], group[0] + axis.size * stride, stride)) != group for group in groups)
        checks += [
            Check(f"{axis.name}: groups", len(groups), size // axis.size, "groups", "world size / size of the axis"),
            Check(f"{axis.name}: ranks in a group", covered, size, "ranks", "every rank is in just one group of an axis"),
            Check(
                f"{axis.name}: groups that are no list with stride {stride}", irregular, 0, "groups", "product of the sizes further inside"
            ),
        ]
        if size <= MOST_MOVED:
            wrong = _gathered_wrong(axes, axis, groups)
            checks.append(Check(f"{axis.name}: ranks that gather from any other", wrong, 0, "ranks", "equal in every other place"))
    return checks


def _gathered_wrong(axes: Sequence[Axis], axis: Axis, groups: Sequence[Sequence[int]]) -> int:
    """Ranks whose all-gather of coordinates along the axis brings anything but all its places, once each, beside equal other places."""
    network = Network(sum(map(len, groups)))
    at = list(axes).index(axis)
    wrong = 0
    for group in groups:
        for rank, got in zip(group, network.all_gather([np.array([coordinate(rank, axes)]) for rank in group], group), strict=True):
            others = np.delete(got, at, axis=1) == np.delete(np.array(coordinate(rank, axes)), at)
            wrong += not (bool(others.all()) and got[:, at].tolist() == list(range(axis.size)))
    return wrong


def _notes(axes: Sequence[Axis], size: int, walked: Walk | None) -> list[str]:
    notes = []
    if walked is None:
        notes.append(f"The walk of a micro-batch is shown for up to {MOST_WALKED} ranks; this mesh has {size}.")
    if any(role_of_axis(axis.name) == "expert" and axis.size > 1 for axis in axes):
        notes.append(
            "Along the expert axis the walk exchanges tokens; the gradients of layers without experts would be summed over it too."
        )
    unknown = [axis.name for axis in axes if role_of_axis(axis.name) in ("mixed", "whole")]
    if unknown:
        notes.append(f"No strategy is known by the name {', '.join(unknown)}: the walk sends nothing along it.")
    if size > MOST_MOVED:
        notes.append(f"Groups are found again by moving data for up to {MOST_MOVED} ranks.")
    return notes
