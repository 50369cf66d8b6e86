"""Two steps of a workload as rank 0 on the fake group, the second under torch's own memory tracker; prints its peak as JSON.

python tests/memory/tracker_job.py WORKLOAD [OPTIONS]
"""

import dataclasses
import importlib
import json
import math
import sys

import torch
import torch.distributed as dist
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from tracekit.workloads.common import reference
from tracekit.workloads.common.job import Job
from tracekit.workloads.common.settings import mesh_sizes, parse
from tracekit.workloads.common.transformer import Shape, loss_of


def main() -> None:
    module = importlib.import_module(f"tracekit.workloads.{sys.argv[1]}")
    settings, options = parse(module, ["--backend", "fake", *sys.argv[2:]])
    sizes = mesh_sizes(module, settings)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(sizes.values()))
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    shape = Shape(**{f.name: getattr(settings, f.name) for f in dataclasses.fields(Shape)})
    job = Job(settings, shape, sizes, mesh, torch.device("cpu"), 0)
    training = module.build(job, options)
    model, optimizer = training.models[0], training.optimizer

    def step(number, watch=lambda batch: None):
        ids, targets = (job.share(tensor) for tensor in reference.batch_of(shape, job.global_batch, 0, number))
        watch((ids, targets))
        loss_of(model(ids), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)  # makes the optimizer's state
    sharded = isinstance(model, FSDPModule)
    tracker = FSDPMemTracker(model, optimizer) if sharded else MemTracker()
    if not sharded:
        tracker.track_external(model, optimizer)
    with tracker:
        step(1, tracker.track_inputs if sharded else lambda batch: None)
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    print(json.dumps({str(getattr(kind, "value", kind)): int(size) for kind, size in peak.items()}))


if __name__ == "__main__":
    main()
