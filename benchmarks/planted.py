"""FSDP2 with a planted change: what ``benchmarks/regression.py`` records to see whether ``tracekit check`` finds it.

slow       one rank's blocks take this share longer in forward (they multiply matrices until the time is over)
gathers    all-gathers of a small tensor that every block adds in forward
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tracekit.workloads import fsdp2
from tracekit.workloads.common import loop
from tracekit.workloads.common.job import Job, Training
from tracekit.workloads.common.settings import option
from tracekit.workloads.common.transformer import Block

from tracekit.manifest import Expected

MESH = fsdp2.MESH


@dataclass(frozen=True)
class Options(fsdp2.Options):
    """Options of FSDP2, and the planted changes."""

    slow: float = option(0.0, "share by which the blocks of the last rank take longer in forward")
    gathers: int = option(0, "all-gathers that every block adds in forward")


def build(job: Job, options: Options) -> Training:
    """The workload, with its blocks changed."""
    made = fsdp2.build(job, options)
    for model in made.models:
        for block in (module for module in model.modules() if isinstance(module, Block)):
            _plant(block, options)
    return made


def _plant(block: Block, options: Options) -> None:
    if options.slow and dist.get_rank() == dist.get_world_size() - 1:
        started: list[float] = []
        block.register_forward_pre_hook(lambda *_: started.append(time.perf_counter()))
        block.register_forward_hook(lambda *_: _burn(options.slow * (time.perf_counter() - started.pop())))
    if options.gathers:
        small = torch.ones(64)
        full = [torch.empty(64) for _ in range(dist.get_world_size())]
        block.register_forward_pre_hook(lambda *_: _gather(full, small, options.gathers))


def _burn(seconds: float) -> None:
    end, a = time.perf_counter() + seconds, torch.ones(48, 48)
    while time.perf_counter() < end:
        a.mm(a)


def _gather(full: list[Any], small: Any, times: int) -> None:
    for _ in range(times):
        dist.all_gather(full, small)


def expected(job: Job, options: Options) -> list[Expected]:
    """Nothing: the comparison is with another recording."""
    return []


if __name__ == "__main__":
    loop.main(__name__)
