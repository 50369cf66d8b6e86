"""Which rank this process is, and in which groups: as it was while the process groups were there.

A job may end its process groups inside the window; asked then, every rank would be rank 0 of 1 and write the same files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from tracekit.manifest import Group
from tracekit.recorder import private
from tracekit.recorder.mesh import groups_of_rank


class Place:
    """Rank, world size, backend and groups; ``look`` renews them as long as torch.distributed knows."""

    def __init__(self) -> None:
        # Before init_process_group only the launcher has said who this is.
        self.rank, self.world = _told("RANK", 0), _told("WORLD_SIZE", 1)
        if not 0 <= self.rank < self.world:
            self.rank, self.world = 0, 1
        self.backend = ""
        self.groups: list[Group] = []
        self._seen = -1

    def look(self, mesh: Any) -> None:
        """Take over what torch.distributed says now. Groups that it has forgotten stay."""
        if not dist.is_initialized():
            return
        self.rank, self.world, self.backend = dist.get_rank(), dist.get_world_size(), str(dist.get_backend())
        number = len(private.all_groups())
        if number == self._seen:
            return
        self._seen = number
        now = {group.name: group for group in groups_of_rank(mesh)}
        self.groups = [*now.values(), *(group for group in self.groups if group.name not in now)]


def _told(name: str, default: int, environment: Mapping[str, str] = os.environ) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else default
