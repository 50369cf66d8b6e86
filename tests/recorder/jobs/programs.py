"""Training programs in the pattern of their frameworks' documentation, small: none of them knows a mesh of tracekit's.

    torchrun --nproc-per-node 2 programs.py NAME STEPS [FOLDER]

Prints the loss of every step. With FOLDER the loop is recorded by ``record``; without, ``tracekit run`` may do it from outside.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from loops import hf_trainer, lightning  # of this folder, which is first on the path of the script
from models import Conv, Gpt, Lstm, image_batch, text_batch, words_loss
from sharing import TensorSequence, ring_attention
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def usual(model, optimizer, batch, loss_of, *, clip=0.0, zero_first=True):
    """zero_grad, forward, backward, step."""

    def step(number):
        if zero_first:
            optimizer.zero_grad()
        inputs, goal = batch()
        loss = loss_of(model(inputs), goal)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad()
        return loss

    return model, optimizer, step


def ddp_conv():
    model = DistributedDataParallel(Conv())
    return usual(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), image_batch, F.cross_entropy)


def ddp_gpt_accumulating():
    model = DistributedDataParallel(Gpt(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(number):
        total = 0.0
        for piece in range(2):
            inputs, goal = text_batch()
            with model.no_sync() if piece == 0 else contextlib.nullcontext():
                loss = words_loss(model(inputs), goal) / 2
                loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return model, optimizer, step


def ddp_lstm():
    model = DistributedDataParallel(Lstm(), broadcast_buffers=False, static_graph=True)
    return usual(model, torch.optim.SGD(model.parameters(), 0.5), text_batch, words_loss, clip=0.25)


def ddp_compiled():
    model = torch.compile(DistributedDataParallel(Gpt()), backend="aot_eager")
    return usual(model, torch.optim.AdamW(model.parameters(), lr=1e-3), text_batch, words_loss, zero_first=False)


def gan():
    make, judge = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    maker, judger = DistributedDataParallel(make), DistributedDataParallel(judge, broadcast_buffers=False)
    optimizers = [torch.optim.Adam(judger.parameters(), 1e-3), torch.optim.Adam(maker.parameters(), 1e-3)]

    def step(number):
        fake = maker(torch.randn(4, 8))
        optimizers[0].zero_grad()
        first = judge(torch.randn(4, 4)).sigmoid().log().neg().mean() + judger(fake.detach()).sigmoid().mean()
        first.backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        second = judge(fake).sigmoid().log().neg().mean()
        second.backward()
        optimizers[1].step()
        return first + second

    return [maker, judger], optimizers, step


def zero_redundancy():
    model = DistributedDataParallel(Gpt())
    return usual(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3), text_batch, words_loss)


def fsdp2():
    model = Gpt(tied=False)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return usual(model, torch.optim.Adam(model.parameters(), lr=1e-3), text_batch, words_loss)


def fsdp2_mixed_recomputed():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Gpt(tied=False, recomputed=True)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return usual(model, torch.optim.AdamW(model.parameters(), lr=1e-3), text_batch, lambda out, goal: words_loss(out.float(), goal))


def fsdp1():
    model = FullyShardedDataParallel(Conv(), device_id=torch.device("cpu"), use_orig_params=True)
    return usual(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), image_batch, F.cross_entropy)


def tensor_parallel():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("model",))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return usual(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True), lambda: (torch.ones(4, 16), torch.ones(4, 4)), F.mse_loss
    )


def pipeline(kind):
    rank = dist.get_rank()
    module = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = kind(stage, 4, loss_fn=F.mse_loss)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)

    def step(number):
        optimizer.zero_grad()
        losses = []
        inputs, goal = torch.randn(8, 16), torch.randn(8, 16)
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=goal, losses=losses)
        optimizer.step()
        return torch.stack(losses).mean() if losses else sum(p.sum() for p in module.parameters())

    return module, optimizer, step


def distillation():
    """A frozen teacher beside the student; the last layer of the student frozen too."""
    teacher, student = Conv().requires_grad_(False).eval(), Conv()
    student.head.requires_grad_(False)
    model = DistributedDataParallel(student)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def step(number):
        images, _ = image_batch()
        with torch.no_grad():
            wanted = teacher(images)
        loss = F.mse_loss(model(images), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


def averaged_by_hand():
    """Gradients averaged by all-reduce in Python, and an average of the weights beside the model; LBFGS with a closure."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    mean, optimizer = copy.deepcopy(model), torch.optim.LBFGS(model.parameters(), max_iter=3)

    def step(number):
        inputs = torch.randn(8, 8)

        def closure():
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2
            return loss

        loss = optimizer.step(closure)
        with torch.no_grad():
            for old, new in zip(mean.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.1)
        return loss

    return model, optimizer, step


def deepspeed(stage):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed as library

    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    library.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, dist_init_required=False)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
    }
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    engine, optimizer, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=config, dist_init_required=False)

    def step(number):
        loss = engine(torch.randn(4, 16).bfloat16()).float().square().mean()
        engine.backward(loss)
        engine.step()
        return loss

    return engine, optimizer, step


def accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    plain = Gpt()
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))

    def step(number):
        inputs, goal = text_batch()
        optimizer.zero_grad()
        loss = words_loss(model(inputs), goal)
        accelerator.backward(loss)
        optimizer.step()
        return loss

    return plain, optimizer, step  # users hold on to the model that they made


def autocast_scaled():
    """Half precision with a scaler: its first scale is too large, so steps are skipped, one of them in the window."""
    model = DistributedDataParallel(Gpt())
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def step(number):
        inputs, goal = text_batch()
        with torch.autocast("cpu", torch.bfloat16):
            loss = words_loss(model(inputs), goal)
        scaler.scale(loss * (float("inf") if number == 4 else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return model, optimizer, step


def tensor_sequence():
    """Attention and MLP split over ranks, norms on a share of the tokens, the loss on a sharded vocabulary."""
    model, mesh = TensorSequence(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model.share(mesh)
    return usual(model, torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True), text_batch, words_loss)


def ring():
    """Each rank holds half of the sequence; keys and values go around by send and receive; gradients are averaged by DDP."""
    model = DistributedDataParallel(ring_attention())
    return usual(model, torch.optim.SGD(model.parameters(), 0.1), lambda: (torch.randn(2, 8, 16), torch.zeros(2, 8, 16)), F.mse_loss)


PROGRAMS = {
    "ddp_conv": ddp_conv,
    "ddp_gpt_accumulating": ddp_gpt_accumulating,
    "ddp_lstm": ddp_lstm,
    "ddp_compiled": ddp_compiled,
    "gan": gan,
    "zero_redundancy": zero_redundancy,
    "fsdp2": fsdp2,
    "fsdp2_mixed_recomputed": fsdp2_mixed_recomputed,
    "fsdp1": fsdp1,
    "tensor_parallel": tensor_parallel,
    "pipeline_1f1b": lambda: pipeline(Schedule1F1B),
    "pipeline_gpipe": lambda: pipeline(ScheduleGPipe),
    "distillation": distillation,
    "averaged_by_hand": averaged_by_hand,
    "deepspeed_zero1": lambda: deepspeed(1),
    "deepspeed_zero2": lambda: deepspeed(2),
    "deepspeed_zero3": lambda: deepspeed(3),
    "accelerate": accelerate,
    "autocast_scaled": autocast_scaled,
    "tensor_sequence": tensor_sequence,
    "ring_attention": ring,
}
#: Frameworks that have the loop themselves: called with the number of steps and a folder, '' where nothing is to be recorded.
LOOPS = {"hf_trainer": hf_trainer, "lightning": lightning}
SAME_DATA = ("tensor_parallel", "tensor_sequence")


def main(name: str, steps: str, folder: str = "") -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    if name in LOOPS:
        LOOPS[name](int(steps), folder)
        return
    model, optimizer, step = PROGRAMS[name]()
    recording = contextlib.nullcontext()
    if folder:
        from tracekit import record

        recording = record(folder, model=model, optimizer=optimizer, wait=2, warmup=1, active=2)
    with recording as recorder:
        for number in range(int(steps)):
            torch.manual_seed(1000 * number + (dist.get_rank() if name not in SAME_DATA else 0))
            print(f"rank {dist.get_rank()} step {number}: {float(step(number))!r}")
            if recorder is not None:
                recorder.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
