"""A job of two ranks that uses every way to communicate and every hook, for nine steps: three before, in and after the window.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python everything.py DIGESTS [FOLDER]

Writes a digest of everything it computed in each step to DIGESTS.RANK. With FOLDER it is recorded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

STEPS = 9


class Net(nn.Module):
    """Two linear layers in blocks, checkpointed on demand."""

    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 8)])
        self.register_buffer("scale", torch.ones(8))
        self.recomputed = recomputed

    def forward(self, x):
        hidden = self.blocks[0](x).relu()
        out = checkpoint(self.blocks[1], hidden, use_reentrant=False) if self.recomputed else self.blocks[1](hidden)
        return out * self.scale


def made(make):
    torch.manual_seed(0)
    return make()


def point_to_point(rank: int, step: int) -> list[torch.Tensor]:
    """Everything with one sender and one receiver: from Python, blocking, not blocking, as a batch, from anyone."""
    other = 1 - rank
    sent, got = torch.full((5,), rank + 10.0 * step), [torch.empty(5) for _ in range(5)]
    if rank == 0:
        dist.send(sent, other)
        dist.recv(got[0], other)
    else:
        dist.recv(got[0], other)
        dist.send(sent, other)
    works = [dist.isend(sent, other), dist.irecv(got[1], other)]
    for work in works:
        work.wait()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, got[2], other)]):
        work.wait()
    work = dist.isend(sent, other)
    dist.recv(got[3])
    work.wait()
    group = dist.group.WORLD
    pending = [group.send([sent], other, 3), group.recv([got[4]], other, 3)]
    for work in pending:
        work.wait()
    return got


def collectives(rank: int, step: int) -> list[torch.Tensor]:
    """Every collective that gloo has, synchronous, asynchronous, of objects, functional."""
    mine = torch.arange(4.0) + rank + step
    total, largest, root = mine.clone(), mine.clone(), mine.clone()
    dist.all_reduce(total)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True).wait()
    dist.reduce(root, 0)
    dist.broadcast(root, 0)
    listed, flat = [torch.empty(4), torch.empty(4)], torch.empty(8)
    dist.all_gather(listed, mine)
    dist.all_gather_into_tensor(flat, mine)
    gathered = [torch.empty(4), torch.empty(4)] if rank == 0 else None
    dist.gather(mine, gathered, 0)
    scattered, reduced, exchanged = torch.empty(4), torch.empty(2), torch.empty(4)
    dist.scatter(scattered, [mine, mine + 1] if rank == 0 else None, 0)
    dist.reduce_scatter_tensor(reduced, mine)
    dist.all_to_all_single(exchanged, mine)
    dist.barrier()
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank, "step": step})
    lazily = functional.wait_tensor(functional.all_reduce(mine, "sum", dist.group.WORLD))
    return [total, largest, root, *listed, flat, *(gathered or []), scattered, reduced, exchanged, lazily]


class Models:
    """One model a strategy, each with its optimizer, hooks of its own, and a step."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        self.seen: list[float] = []
        ddp = DistributedDataParallel(made(Net), broadcast_buffers=True)
        sharded = made(lambda: Net(recomputed=True))
        for block in sharded.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        flat = FullyShardedDataParallel(made(Net), device_id=torch.device("cpu"), use_orig_params=True)
        split = parallelize_module(made(Net), mesh, {"blocks.0": ColwiseParallel(), "blocks.1": RowwiseParallel()})
        compiled = torch.compile(made(Net), backend="aot_eager")
        self.models = {"ddp": ddp, "fsdp2": sharded, "fsdp1": flat, "tp": split, "compiled": compiled}
        adam = {name: torch.optim.AdamW(model.parameters(), lr=1e-2) for name, model in self.models.items() if name != "ddp"}
        self.optimizers = {"ddp": ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=1e-2), **adam}
        self.stage = PipelineStage(made(lambda: nn.Linear(8, 8)), rank, 2, torch.device("cpu"))
        self.schedule = Schedule1F1B(self.stage, 2, loss_fn=lambda out, target: (out - target).square().mean())
        self.hooked(ddp.module)

    def hooked(self, net: nn.Module) -> None:
        """The user's own hooks stay, and come in their order."""
        net.register_forward_hook(lambda module, args, out: self.seen.append(out.sum().item()))
        net.register_full_backward_hook(lambda module, inward, outward: self.seen.append(outward[0].sum().item()))
        next(net.parameters()).register_hook(lambda gradient: gradient * 1.5)
        next(net.parameters()).register_post_accumulate_grad_hook(lambda p: self.seen.append(p.grad.sum().item()))
        self.optimizers["fsdp2"].register_step_post_hook(lambda *_: self.seen.append(2.0))

    def step(self, number: int) -> list[torch.Tensor]:
        """One step of all of them; losses, gradients and parameters."""
        torch.manual_seed(100 * number + self.rank)
        x, results = torch.randn(4, 8), []
        for name, model in self.models.items():
            own = torch.randn(4, 8) if name != "tp" else torch.ones(4, 8) * number
            saved = torch.autograd.graph.save_on_cpu() if name == "ddp" else contextlib.nullcontext()
            with saved:
                loss = model(own).square().mean()
            loss.backward()
            self.optimizers[name].step()
            results += [loss, *(local(p.grad) for p in model.parameters() if p.grad is not None)]
            self.optimizers[name].zero_grad()
            results += [local(p) for p in model.parameters()]
        if self.rank == 0:
            self.schedule.step(x)
        else:
            self.schedule.step(target=torch.ones(4, 8))
        results += [p.grad for p in self.stage.submod.parameters()]
        with Join([self.models["ddp"]]):
            self.models["ddp"](x).sum().backward()
        self.optimizers["ddp"].zero_grad()
        return [*results, torch.tensor(self.seen)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


def digest(tensors: list[torch.Tensor]) -> str:
    parts = [tensor.detach().double().numpy().tobytes() for tensor in tensors]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def recorder(folder: str, models: Models):
    if not folder:
        return contextlib.nullcontext()
    from tracekit import record

    options = {"labels": "dispatch", "saved_tensors": True, "stacks": True} if os.environ.get("ALL_OPTIONS") else {}
    everything = [*models.models.values(), models.stage.submod]
    return record(folder, model=everything, optimizer=list(models.optimizers.values()), wait=2, warmup=1, active=3, **options)


def main(digests: str, folder: str = "") -> None:
    if not os.environ.get("ALL_OPTIONS"):
        warnings.simplefilter("error")
        for known in (FutureWarning, DeprecationWarning, UserWarning):  # torch's own about its strategies; ours come as "tracekit..."
            warnings.simplefilter("ignore", known)
        warnings.filterwarnings("error", message="tracekit")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    methods = dict(vars(dist.ProcessGroup))
    models = Models(rank)
    lines = []
    with recorder(folder, models) as recording:
        for number in range(STEPS):
            tensors = models.step(number) + point_to_point(rank, number) + collectives(rank, number)
            lines.append(digest(tensors))
            if recording is not None:
                recording.step()
    assert dict(vars(dist.ProcessGroup)) == methods
    assert not folder or (not recording.failed and len(recording.files) == 2), recording.failed
    Path(f"{digests}.{rank}").write_text("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
