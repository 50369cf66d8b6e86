"""Make the jobs that hang: ``hang_*/``, four ranks on gloo, each with what torch's flight recorder and Python's faulthandler say of it.

    python sample_traces/record_hangs.py [NAME...]

Every rank runs a few steps, then one of them does what its function says. A thread of each rank waits until nothing moves any more and
writes ``flight_recorder_rank_N`` (the pickle of torch's flight recorder) and ``rank_N.stacks.txt`` (all Python stacks). Paths of this
machine are cut to what follows ``site-packages`` or the folder of Python.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WORLD, QUIET_S = 4, 10.0


def sleeps(rank: int, dist: Any, torch: Any) -> None:
    """Rank 2 sleeps before an all-reduce."""
    gradients = torch.ones(1000)
    for step in range(6):
        if rank == 2 and step == 4:
            time.sleep(600)  # waits for a file that never comes
        dist.all_reduce(gradients)


def skips(rank: int, dist: Any, torch: Any) -> None:
    """Rank 1 leaves out one all-reduce; the next one fits as well, so nobody notices until the end."""
    gradients, loss = torch.ones(1000), torch.ones(1000)
    for step in range(6):
        dist.all_reduce(gradients)
        if not (rank == 1 and step == 3):
            dist.all_reduce(loss)


def opposite_order(rank: int, dist: Any, torch: Any) -> None:
    """Ranks 0 and 1 enter two groups in opposite order."""
    tp = dist.new_group([0, 1], group_desc="tp")
    dp = dist.new_group([0, 1], group_desc="dp")
    activations, gradients = torch.ones(64), torch.ones(1000)
    for step in range(4):
        first, second = ((dp, gradients), (tp, activations)) if rank == 1 and step == 3 else ((tp, activations), (dp, gradients))
        if rank < 2:
            dist.all_reduce(first[1], group=first[0])
            dist.all_reduce(second[1], group=second[0])
    dist.all_reduce(gradients)


def shapes(rank: int, dist: Any, torch: Any) -> None:
    """Rank 3 gathers a tensor of another size: gloo does not notice, and waits for bytes that nobody sends."""
    for step in range(4):
        mine = torch.ones(2000 if rank == 3 and step == 3 else 1000)
        full = torch.empty(4 * len(mine))
        dist.all_gather_into_tensor(full, mine)
        dist.barrier()


def killed(rank: int, dist: Any, torch: Any) -> None:
    """Rank 3 is killed between two steps, as the out-of-memory killer does it."""
    tp = dist.new_group([2, 3], group_desc="tp")
    gradients = torch.ones(1000)
    for step in range(6):
        if rank == 3 and step == 3:
            time.sleep(QUIET_S / 2)  # until the others wait for it
            os.kill(os.getpid(), signal.SIGKILL)
        if rank >= 2:
            dist.all_reduce(gradients, group=tp)
        dist.all_reduce(gradients)


def data_loader(rank: int, dist: Any, torch: Any) -> None:
    """The data loader of rank 1 waits for a worker that never answers; its tp peer waits for it, the rest for the peer."""
    tp = [dist.new_group([0, 1], group_desc="tp"), dist.new_group([2, 3], group_desc="tp")][rank // 2]
    pairs = [dist.new_group([0, 2], group_desc="dp"), dist.new_group([1, 3], group_desc="dp")]
    dp = pairs[rank % 2]
    loader = iter(torch.utils.data.DataLoader(Slow(rank), batch_size=2))
    for _ in range(6):
        batch = next(loader)
        dist.all_reduce(batch, group=tp)
        dist.all_reduce(batch, group=dp)


class Slow:
    """Samples; the reading of one never ends on rank 1."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        import torch

        if self.rank == 1 and index == 6:
            time.sleep(600)
        return torch.ones(8)


def pipeline(rank: int, dist: Any, torch: Any) -> None:
    """A pipeline of four stages; the second raises in its third micro-batch."""
    dist.all_reduce(torch.ones(1))
    activations = torch.ones(256)
    for microbatch in range(4):
        if rank > 0:
            dist.recv(activations, src=rank - 1)
        if rank == 1 and microbatch == 2:
            raise ValueError("stage 1 got an activation that is not finite")
        if rank < WORLD - 1:
            dist.send(activations, dst=rank + 1)
    dist.all_reduce(torch.ones(1))


SCENES: dict[str, Callable[[int, Any, Any], None]] = {
    "hang_sleep": sleeps,
    "hang_skip": skips,
    "hang_order": opposite_order,
    "hang_shapes": shapes,
    "hang_killed": killed,
    "hang_data_loader": data_loader,
    "hang_pipeline": pipeline,
}


def rank_main(name: str, rank: int, port: int, folder: str) -> None:
    """One rank: the scene, watched by a thread that writes what there is when everything stands still."""
    import torch
    import torch._dynamo  # otherwise imported in the middle of a scene
    import torch.distributed as dist
    import torch.utils.data

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD, timeout=timedelta(seconds=600))
    dist.barrier()
    Path(folder, f"started_{rank}").touch()
    threading.Thread(target=watch, args=(rank, folder), daemon=True, name="watch").start()
    try:
        SCENES[name](rank, dist, torch)
    except BaseException:  # noqa: BLE001 - whatever ends the rank is what is to be seen
        Path(folder, f"rank_{rank}.stacks.txt").write_text(traceback.format_exc())
        dump(rank, folder)
    time.sleep(600)  # at the end of the program, waiting for nobody


def watch(rank: int, folder: str) -> None:
    """Write everything when the parent says so, and wait: an end of one rank would end the waiting of the others."""
    while not Path(folder, "go").exists():
        time.sleep(0.1)
    if not Path(folder, f"flight_recorder_rank_{rank}").exists():  # it has not failed before
        with Path(folder, f"rank_{rank}.stacks.txt").open("w") as file:
            faulthandler.dump_traceback(file)
        dump(rank, folder)
    Path(folder, f"done_{rank}").touch()
    time.sleep(600)


def dump(rank: int, folder: str) -> None:
    """The flight recorder's pickle."""
    from torch._C._distributed_c10d import _dump_fr_trace

    Path(folder, f"flight_recorder_rank_{rank}").write_bytes(_dump_fr_trace(True, True, False))


_PATH = re.compile(r"/\S*?/(?:site-packages|python3\.\d+)/")


def short(path: str) -> str:
    """A path without what is particular to a machine."""
    return _PATH.sub("", path).replace(str(HERE) + "/", "")


def cut(value: Any) -> Any:
    """The same dump with short paths; frames that were one object stay one, as torch writes them."""
    known: dict[int, Any] = {}

    def walk(item: Any) -> Any:
        if id(item) in known:
            return known[id(item)]
        if isinstance(item, dict):
            found: Any = {key: short(inner) if key == "filename" else walk(inner) for key, inner in item.items()}
        elif isinstance(item, list):
            found = [walk(inner) for inner in item]
        else:
            return item
        known[id(item)] = found
        return found

    return walk(value)


def record(name: str) -> None:
    """Run one scene into its folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as scratch:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=rank_main, args=(name, rank, port, scratch)) for rank in range(WORLD)]
        for process in ranks:
            process.start()
        started = [Path(scratch, f"started_{rank}") for rank in range(WORLD)]
        while not all(path.exists() for path in started):
            time.sleep(0.5)
        time.sleep(2 * QUIET_S)
        Path(scratch, "go").touch()
        while not all(Path(scratch, f"done_{rank}").exists() or not process.is_alive() for rank, process in enumerate(ranks)):
            time.sleep(0.5)
        for process in ranks:
            process.kill()
            process.join()
        target = HERE / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for path in sorted([*Path(scratch).glob("*.txt"), *Path(scratch).glob("flight_*")]):
            if path.suffix == ".txt":
                (target / path.name).write_text(short(path.read_text()))
            else:
                told = cut(pickle.loads(path.read_bytes()))  # noqa: S301 - written a moment ago by this program
                (target / path.name).write_bytes(pickle.dumps(told, protocol=2))


def main() -> None:
    """The scenes named on the command line, all without one."""
    for name in sys.argv[1:] or SCENES:
        print(name, flush=True)
        record(name)


if __name__ == "__main__":
    main()
