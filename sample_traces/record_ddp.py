"""Record the sample: two ranks of data-parallel training on the CPU, with nothing but torch.profiler.

    torchrun --nproc-per-node 2 sample_traces/record_ddp.py sample_traces/ddp_gloo_2ranks

A multilayer perceptron of 4 linear layers, Adam, gradients all-reduced by DistributedDataParallel over gloo.
Of 6 steps the profiler sits out 1, warms up on 2 and records 3.
"""

import gzip
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

STEPS, WAIT, WARMUP, ACTIVE = 6, 1, 2, 3
BATCH, WIDTH = 256, 256


def build_model() -> nn.Module:
    """A perceptron of 4 linear layers."""
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def train(folder: Path) -> None:
    """Trains this rank and leaves its trace in ``folder``."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(build_model(), bucket_cap_mb=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1),
        on_trace_ready=lambda profiler: write(profiler, folder / f"rank{rank}.pt.trace.json.gz"),
        record_shapes=True,
    ) as profiler:
        for _ in range(STEPS):
            inputs, labels = torch.randn(BATCH, WIDTH), torch.randint(10, (BATCH,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            profiler.step()


def write(profiler: profile, path: Path) -> None:
    """Exports the window; the name of the machine it was recorded on is left out."""
    plain = path.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    text = plain.read_text()
    trace = json.loads(text)
    host = trace.get("host_name")
    if host:
        text = text.replace(json.dumps(host), '"sample-host"')
    with path.open("wb") as raw, gzip.GzipFile("", "wb", mtime=0, fileobj=raw) as packed:
        packed.write(text.encode())
    plain.unlink()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]))
    dist.destroy_process_group()
