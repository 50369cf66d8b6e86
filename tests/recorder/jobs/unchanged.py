"""A small DDP program as anybody writes it, which knows nothing of a recorder: prints the loss of every step.

torchrun --nproc-per-node 2 unchanged.py STEPS [SECONDS A STEP]
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    alone = "RANK" not in os.environ
    if not alone:
        dist.init_process_group("gloo")
    rank = 0 if alone else dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model = net if alone else DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(int(sys.argv[1])):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        print(f"rank {rank} step {step}: {loss.item()!r}")
        time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 0)
        if step == 5 and "TRACEKIT_RECORD" in os.environ:
            Path(os.environ["TRACEKIT_RECORD"], "running").touch()
    if not alone:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
