"""Models of many strategies on four ranks, none of them trained: what the recorder finds out about each, as JSON lines of rank 2.

python layouts.py OUTPUT
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tracekit.recorder.found import wrapped
from tracekit.recorder.layout import layout

CPU = torch.device("cpu")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def sharded(mesh) -> nn.Module:
    model = net()
    fully_shard(model, mesh=mesh)
    return model


def split(mesh) -> nn.Module:
    return parallelize_module(net(), mesh, {"0": ColwiseParallel()})


def both(mesh) -> nn.Module:
    model = split(mesh["model"])
    fully_shard(model, mesh=mesh["data"])
    return model


def cases():
    """(name, mesh that is handed over, model, optimizers)."""
    ddp = DistributedDataParallel(net())
    plain = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    columns = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp_shard", "tp"))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    yield "ddp", None, ddp, []
    yield "what ddp is around", None, ddp.module, []
    yield "compiled ddp", None, torch.compile(ddp), []
    yield "ddp with a mesh of words", {"batch": 4}, ddp, []
    yield "zero1", None, ddp, [ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam)]
    yield "ddp of pairs", None, DistributedDataParallel(net(), process_group=pairs[dist.get_rank() // 2]), []
    yield "fsdp2", None, sharded(plain), []
    yield "fsdp2 on an axis called dp", {"dp": 4}, sharded(plain), []
    yield "hsdp", None, sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))), []
    yield "fsdp2 and tensor parallel", None, both(grid), []
    yield "tensor parallel", None, split(plain), []
    yield "columns first", columns, both_of(columns), []
    yield "fsdp1", None, FullyShardedDataParallel(net(), device_id=CPU), []
    yield "fsdp1 that shards nothing", None, FullyShardedDataParallel(net(), device_id=CPU, sharding_strategy=ShardingStrategy.NO_SHARD), []
    yield "a plain model", None, net(), []
    yield "an axis of one's own", {"left": 2, "right": 2}, net(), []


def both_of(mesh) -> nn.Module:
    model = split(mesh["tp"])
    fully_shard(model, mesh=mesh["dp_shard"])
    return model


def main(output: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    lines = []
    for name, mesh, model, optimizers in cases():
        found = layout(mesh, wrapped([model]), optimizers)
        axes = {axis.name: axis.size for axis in found.axes}
        used = sorted({group.axis for group in found.groups if len(group.ranks) > 1 and group.axis})
        lines.append(
            {"case": name, "axes": axes, "coordinate": found.coordinate, "roles": found.roles, "groups": used, "notes": found.notes}
        )
    if dist.get_rank() == 2:
        Path(output).write_text("\n".join(map(json.dumps, lines)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
