"""Three ranks on gloo, watched by the recorder: what hangs is said by the first argument, the folder is the second."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tracekit import record

what, folder = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()


def load(step: int) -> None:
    if rank == 1 and step == 3:
        Path(folder, "stuck").touch()
        time.sleep(3 if what == "slow" else 600)


def stage(step: int) -> None:
    activations = torch.ones(16)
    if rank:
        dist.recv(activations, src=rank - 1)
    if rank == 1 and step == 3:
        Path(folder, "stuck").touch()
        raise ValueError("not finite")
    if rank < 2:
        dist.send(activations, dst=rank + 1)


with record(folder, wait=0, warmup=1, active=50, flight_recorder=60 if what == "raises" else 1) as recorder:
    for step in range(6):
        if what == "raises":
            stage(step)
        else:
            load(step)
            dist.all_reduce(torch.ones(100))
        recorder.step()
print("over", flush=True)
dist.barrier()
os._exit(0)
