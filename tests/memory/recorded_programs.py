"""Training programs of others on two ranks, recorded one after the other: what the recorder says of their memory, and what is known of it.

    python recorded_programs.py FOLDER [NAME ...]      with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set

Prints one line of JSON a program: its name, the bytes that are known without any profiler, and the peak by torch's own memory trackers.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.memory.foreign_programs import Gpt, Lstm, Mixer, Unet, ids, images, patches, series, square_loss, tokens_loss
from tracekit import record


class Replacing(torch.optim.Optimizer):
    """Momentum whose steps put new storages into the parameters, as some optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["momentum"] = 0.9 * state["momentum"] + p.grad if "momentum" in state else p.grad.clone()
                p.data = p.data - group["lr"] * state["momentum"]


def zero1(params: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch.jit when it is imported

    return ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=1e-3)


def momentum(params: Any) -> Any:
    return torch.optim.SGD(params, 0.1, momentum=0.9)


@dataclass
class Program:
    """``ddp``: options of DistributedDataParallel, None without it; ``fsdp``: of fully_shard.

    ``compares``: the trackers see all that is allocated, but DDP's buckets; kernels of oneDNN have scratch memory of their own, and of
    ZeRO-1 they take a bucket for a temporary.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Any], Any]
    ddp: dict[str, Any] | None = None
    fsdp: dict[str, Any] | None = None
    micro_batches: int = 1
    bf16: bool = False
    zero_first: bool = True
    set_to_none: bool = True
    clip: float = 0.0
    compares: bool = True
    window: dict[str, int] = field(default_factory=lambda: {"wait": 2, "warmup": 1, "active": 2})


FROM_THE_FIRST_STEP = {"wait": 0, "warmup": 0, "active": 4}
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Adam, AdamW = torch.optim.Adam, torch.optim.AdamW
PROGRAMS = {
    "gpt": Program(Gpt, ids, tokens_loss, AdamW),
    "gpt ddp": Program(Gpt, ids, tokens_loss, AdamW, ddp={}),
    "gpt ddp from the first step": Program(Gpt, ids, tokens_loss, AdamW, ddp={"bucket_cap_mb": 1}, window=FROM_THE_FIRST_STEP),
    "gpt ddp views": Program(Gpt, ids, tokens_loss, AdamW, ddp={"gradient_as_bucket_view": True, "bucket_cap_mb": 1}, zero_first=False),
    "gpt ddp views from the first step": Program(
        Gpt, ids, tokens_loss, Adam, ddp={"gradient_as_bucket_view": True, "bucket_cap_mb": 1}, window=FROM_THE_FIRST_STEP
    ),
    "gpt ddp checkpointed adafactor": Program(lambda: Gpt(again=True), ids, tokens_loss, torch.optim.Adafactor, ddp={}),
    "unet ddp": Program(Unet, images, square_loss, momentum, ddp={}, compares=False),
    "unet ddp views keeps gradients": Program(
        Unet, images, square_loss, Adam, ddp={"gradient_as_bucket_view": True}, set_to_none=False, compares=False
    ),
    "lstm ddp static": Program(
        Lstm, series, square_loss, Adam, ddp={"static_graph": True, "broadcast_buffers": False}, clip=0.25, compares=False
    ),
    "lstm replacing": Program(Lstm, series, square_loss, Replacing, compares=False),
    "mixer ddp bf16 accumulating": Program(Mixer, patches, square_loss, AdamW, ddp={}, micro_batches=2, bf16=True),
    "mixer ddp zero1": Program(Mixer, patches, square_loss, zero1, ddp={}, compares=False),
    "mixer fsdp2": Program(Mixer, patches, square_loss, AdamW, fsdp={}),
    "mixer fsdp2 accumulating": Program(Mixer, patches, square_loss, AdamW, fsdp={}, micro_batches=2),
    "mixer fsdp2 bf16 kept": Program(
        Mixer, patches, square_loss, Adam, fsdp={"mp_policy": MIXED, "reshard_after_forward": False}, compares=False
    ),
}


class Training:
    """One program, built."""

    def __init__(self, program: Program) -> None:
        self.program = program
        torch.manual_seed(0)
        self.model = program.model()
        if program.fsdp is not None:
            for block in [*self.model.over_tokens, *self.model.over_channels]:
                fully_shard(block, **program.fsdp)
            fully_shard(self.model, **program.fsdp)
        if program.ddp is not None:
            self.model = DistributedDataParallel(self.model, **program.ddp)
        self.optimizer = program.optimizer(self.model.parameters())

    def step(self, seen: Callable[[Any], None] = lambda batch: None) -> None:
        program = self.program
        if program.zero_first:
            self.optimizer.zero_grad(set_to_none=program.set_to_none)
        for number in range(program.micro_batches):
            x, target = program.batch()
            seen((x, target))
            with self._unsynchronized(number), torch.autocast("cpu", torch.bfloat16, enabled=program.bf16):
                out = self.model(x)
                loss = program.loss(out, target)
                del out
                loss.backward()
        if program.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), program.clip)
        self.optimizer.step()
        if not program.zero_first:
            self.optimizer.zero_grad(set_to_none=program.set_to_none)

    @contextlib.contextmanager
    def _unsynchronized(self, number: int) -> Iterator[None]:
        last = number == self.program.micro_batches - 1
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        with contextlib.nullcontext() if last or self.program.ddp is None else self.model.no_sync():
            yield

    def known(self) -> dict[str, int]:
        """Bytes that stand between steps, on this rank."""
        inner = getattr(self.optimizer, "optim", self.optimizer)
        state = [value for values in inner.state.values() for value in values.values() if isinstance(value, Tensor)]
        storages = {s.data_ptr(): s.nbytes() for s in (here(p).untyped_storage() for p in self.model.parameters())}
        return {
            "parameters": sum(storages.values()),
            "optimizer_state": sum(here(tensor).untyped_storage().nbytes() for tensor in state),
            "buffers": sum(buffer.untyped_storage().nbytes() for buffer in self.model.buffers()),
            "gradients": sum(here(p).nbytes for p in self.model.parameters()),
            "batch": sum(tensor.nbytes for tensor in self.program.batch()),
        }

    def tracked(self) -> dict[str, int]:
        """The peak of one step by category, by torch's own trackers."""
        sharded = isinstance(self.model, FSDPModule)
        tracker = FSDPMemTracker(self.model, self.optimizer) if sharded else MemTracker()
        if not sharded:
            tracker.track_external(self.model, self.optimizer)
        with tracker:
            self.step(lambda batch: (tracker.reset_mod_stats(), tracker.track_inputs(batch) if sharded else None))
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
        return {str(getattr(kind, "value", kind)): int(size) for kind, size in peak.items()}


def here(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def run(name: str, folder: Path) -> None:
    training = Training(PROGRAMS[name])
    window = training.program.window
    with record(folder / name.replace(" ", "_"), model=training.model, optimizer=training.optimizer, **window) as recorder:
        for _ in range(sum(window.values())):
            training.step()
            recorder.step()
    known = training.known()
    tracked = training.tracked()
    if dist.get_rank() == 0:
        print(json.dumps({"name": name, "known": known, "tracked": tracked}), flush=True)
    del training
    gc.collect()


def main(folder: str, *names: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in names or PROGRAMS:
        run(name, Path(folder))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
