"""Which rank this process is, and in which groups: as it was while the process groups were there.

A job may end its process groups inside the window; asked then, every rank would be rank 0 of 1 and write the same files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from tracekit.recorder import private
from tracekit.recorder.layout import Layout, layout


class Place:
    """Rank, world size and backend; ``layout``: mesh and groups. Renewed as long as torch.distributed knows."""

    def __init__(self) -> None:
        # Before init_process_group only the launcher has said who this is.
        self.rank, self.world = _told("RANK", 0), _told("WORLD_SIZE", 1)
        if not 0 <= self.rank < self.world:
            self.rank, self.world = 0, 1
        self.backend = ""
        self.layout = Layout()
        self._seen = -1

    def identify(self) -> None:
        """Who this is."""
        if dist.is_initialized():
            self.rank, self.world, self.backend = dist.get_rank(), dist.get_world_size(), str(dist.get_backend())

    def look(self, mesh: Any, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
        """Mesh and groups as they are now, if there are other groups than when they were looked at last. Forgotten groups stay."""
        number = len(private.all_groups()) if dist.is_initialized() else 0
        if number in (0, self._seen):
            return
        self._seen = number
        before, self.layout = self.layout, layout(mesh, models, optimizers)
        now = {group.name for group in self.layout.groups}
        self.layout.groups += [group for group in before.groups if group.name not in now]


def _told(name: str, default: int, environment: Mapping[str, str] = os.environ) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else default
