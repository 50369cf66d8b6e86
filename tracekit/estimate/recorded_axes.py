"""Axes of a recorded mesh: those that the job uses, what it calls groups over several of them, a rank's place along them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from tracekit.errors import UsageError
from tracekit.estimate.plan import Plan
from tracekit.manifest import Axis, Manifest

#: Axes of a recorded mesh that the model knows.
AXES = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
#: Largest mesh that is looked at.
MOST_RANKS = 1_000_000


def by_roles(manifest: Manifest) -> Manifest:
    """The manifest with its mesh axes called as the model calls them (``Manifest.roles``), where no two of them do the same."""
    roles = {axis.name: manifest.roles.get(axis.name, axis.name) for axis in manifest.mesh}
    if len(set(roles.values())) != len(roles) or not set(manifest.roles.values()) <= set(AXES):
        return manifest
    return msgspec.structs.replace(
        manifest,
        mesh=[Axis(roles[axis.name], axis.size) for axis in manifest.mesh],
        coordinate={roles.get(name, name): at for name, at in manifest.coordinate.items()},
        parameters=[msgspec.structs.replace(p, axes=[roles.get(name, name) for name in p.axes]) for p in manifest.parameters],
    )


def used_sizes(manifest: Manifest) -> dict[str, int]:
    """Axes that the job does something along, with their sizes. UsageError for one that the model does not know."""
    sizes = {axis.name: axis.size for axis in manifest.mesh}
    if any(size < 1 for size in sizes.values()) or math.prod(sizes.values()) > MOST_RANKS:
        raise UsageError(f"the manifest's mesh has axes below 1, or more than {MOST_RANKS} ranks", "record the job again")
    used = {name: size for name, size in sizes.items() if size == 1 or _used(manifest, name)}
    strange = [name for name, size in used.items() if name not in AXES and size > 1]
    if strange:
        raise UsageError(f"the model knows no mesh axis {strange[0]!r}", f"it knows {', '.join(AXES)}")
    return used


def _used(manifest: Manifest, axis: str) -> bool:
    """A pipeline lists its stages, and parallel tensors their axes (``dp_shard_cp`` names two), FSDP2's those of data parallelism too."""
    if axis == "pp":
        return bool(manifest.pipeline)
    axes = {name for parameter in manifest.parameters for name in parameter.axes}
    named = any(f"_{axis}_" in f"_{name}_" for name in axes)
    return named if axis == "tp" else named or not axes or all(unit.kind != "fsdp2" for unit in manifest.units)


def axis_names(sizes: Mapping[str, int], world: int, roles: Mapping[str, str]) -> dict[str, str]:
    """The model's names of axes and of groups over several of them -> those of the recording, where the group of all ranks is ``world``.

    ``roles``: the recording's name of an axis -> the model's, where they differ.
    """
    own = {role: name for name, role in roles.items()}

    def joined(*axes: str) -> str:
        long = [name for name in sizes if name in axes and sizes[name] > 1]
        size = math.prod(sizes[name] for name in long)
        return "world" if len(long) > 1 and size == world else "_".join(own.get(name, name) for name in long)

    shard = joined("ep", "dp_shard", "cp")
    replicas = joined("dp_replicate", "ep", "cp")
    names = own | {"dp_shard": shard, "dp_shard_cp": shard, "cp_as_shard": shard, "dp_shard_in_ep": joined("dp_shard", "cp")}
    names |= {"dp_replicate_cp": replicas, "edp": joined("dp_replicate", "cp"), "embedding": "embedding"}
    return names


def axis_of(plan: Plan, names: Mapping[str, str], axis: str, purpose: str) -> str:
    """The recording's name of the axis of one line of predicted traffic; ``names`` as ``axis_names`` gives them."""
    data = purpose in ("parameter_gather", "gradient_scatter", "gradient_sync", "parameter_sync")
    plain = plan.strategy.name == "ddp" or (axis != "dp_replicate" and plan.strategy.shards_parameters)
    if data and axis in ("dp_replicate", "cp", "dp_shard") and plain:
        key = "dp_replicate_cp" if plan.strategy.name == "ddp" else "dp_shard"
        return names.get(key, axis) or axis
    return names.get(axis, axis) or axis


def shard_rank(manifest: Manifest, sizes: Mapping[str, int]) -> int:
    """Place of this rank among those that share its parameters."""
    place = 0
    for name in sizes:
        if name in ("ep", "dp_shard", "cp"):
            place = place * sizes[name] + manifest.coordinate.get(name, 0)
    return place
