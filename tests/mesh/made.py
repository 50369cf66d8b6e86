"""Process groups as DeviceMesh makes them, by numpy's reshape: the answer that the product's arithmetic is held to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tracekit.mesh.mesh import Axis
from tracekit.mesh.process_groups import LocalGroup


def along(axes: Sequence[Axis], names: Sequence[str]) -> list[tuple[int, ...]]:
    """Groups along one axis, or along several flattened into one."""
    ranks = np.arange(int(np.prod([a.size for a in axes]))).reshape([a.size for a in axes])
    moving = [i for i, a in enumerate(axes) if a.name in names]
    fixed = [i for i in range(len(axes)) if i not in moving]
    size = int(np.prod([axes[i].size for i in moving]))
    return [tuple(int(r) for r in row) for row in np.transpose(ranks, [*fixed, *moving]).reshape(-1, size)]


def device_mesh(axes: Sequence[Axis], flattened: Sequence[Sequence[str]] = (), described: bool = True) -> list[LocalGroup]:
    """All groups of a job: default_pg, one group a place of each axis, and of each flattened axis; an axis over all ranks is default_pg."""
    world = int(np.prod([a.size for a in axes]))
    groups = [LocalGroup("0", "default_pg", tuple(range(world)), world)]
    for names in [*([a.name] for a in axes), *flattened]:
        for ranks in along(axes, names):
            if len(ranks) < world or world == 1:
                groups.append(LocalGroup(str(len(groups)), "mesh_" + "_".join(names) if described else "undefined", ranks, len(ranks)))
    return groups


def seen_by(groups: Sequence[LocalGroup], ranks: Sequence[int]) -> list[tuple[int, list[LocalGroup]]]:
    """What these ranks know: the groups they are in."""
    return [(rank, [g for g in groups if g.ranks is not None and rank in g.ranks]) for rank in ranks]
