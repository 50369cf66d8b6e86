"""Where ranks live: which node, and which groups cross nodes."""

from __future__ import annotations

from collections.abc import Mapping

from tracekit.errors import UsageError
from tracekit.mesh.process_groups import LARGEST_WORLD, ProcessGroup


def nodes(hosts: Mapping[int, str], world_size: int | None, gpus_per_node: int | None) -> Mapping[int, str] | None:
    """Node of each rank: by ``gpus_per_node`` consecutive ranks if the user gives it, else by host names ('' unknown); None: not known.

    A rank whose host is not known is absent from the mapping. UsageError for a number of GPUs below 1.
    """
    if gpus_per_node is not None:
        if gpus_per_node < 1:
            raise UsageError(f"--gpus-per-node {gpus_per_node}", "give the number of ranks on one node, 1 or more")
        size = world_size if world_size is not None else max(hosts, default=-1) + 1
        return {rank: f"node {rank // gpus_per_node}" for rank in range(min(size, LARGEST_WORLD))}
    known = {rank: host for rank, host in hosts.items() if host}
    return known or None


def spans_nodes(group: ProcessGroup, node_of: Mapping[int, str] | None) -> bool | None:
    """Whether a group has members on two nodes; None where that cannot be told."""
    if group.size == 1:
        return False
    if node_of is None:
        return None
    members = group.ranks if group.ranks is not None else group.known
    seen = {node_of[rank] for rank in members if rank in node_of}
    if len(seen) > 1:
        return True
    everywhere = group.ranks is not None and all(rank in node_of for rank in members)
    return False if everywhere else None
