"""Many ranks: how long `tracekit analyze` takes, and in how much memory, where the job is large and each trace is small.

    python benchmarks/many_ranks.py FOLDER                              # 1,024 ranks x 2,000 events, all findings
    python benchmarks/many_ranks.py FOLDER --ranks 64 --operations 5000 --steps 1

Writes the traces of a synthetic job (dp x tp, tp 8: kernels, an all-reduce of tp a layer, an asynchronous one of dp a layer of backward)
unless they are there, and analyses them without cache. One rank's device is 10% slower: the first finding has to name it. All ranks run
the same program, so a trace is one template with other times in it: writing is cheap. The same call writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

TP = 8
KERNEL_NS, LAUNCH_NS, CALL_NS, LATENCY_NS = 100_000, 6_000, 24_000, 4_000
SLOWER = 1.1
BASE = 1_775_078_550_000_000_000
Times = npt.NDArray[np.int64]
_EVENT = '{"ph":"X","cat":"%s","name":"%s","pid":%s,"tid":%s,"ts":%%s,"dur":%%s,"args":{%s}}'


@dataclass
class Job:
    """All ranks at once: each time is an array with an entry a rank."""

    ranks: int
    slow: int
    rng: np.random.Generator
    host: Times
    compute: Times
    streams: dict[str, Times]
    held: Times  # until when the compute stream waits for a collective
    templates: list[str] = field(default_factory=list)
    times: list[tuple[Times, Times]] = field(default_factory=list)  # (start, duration) of each event
    correlation: int = 0
    seqs: dict[str, int] = field(default_factory=dict)

    def event(self, category: str, name: str, pid: str, tid: str, start: Times, dur: Times, args: str = "") -> None:
        """One event of every rank."""
        self.templates.append(_EVENT % (category, name, pid, tid, args))
        self.times.append((start, dur))

    def call(self, name: str, us: int) -> Times:
        """A runtime call; when it returned."""
        self.correlation += 1
        dur = np.full(self.ranks, us, np.int64)
        self.event("cuda_runtime", name, "9", "9", self.host, dur, f'"correlation":{self.correlation}')
        self.host = self.host + us
        return self.host

    def kernel(self, name: str, length: int) -> None:
        """A kernel on the compute stream."""
        returned = self.call("cudaLaunchKernel", LAUNCH_NS)
        dur = (length * (1 + 0.01 * (2 * self.rng.random(self.ranks) - 1))).astype(np.int64)
        dur[self.slow] = int(length * SLOWER)
        start = np.maximum(np.maximum(returned + LATENCY_NS, self.compute), self.held)
        self.event("kernel", name, "0", "7", start, dur, f'"device":0,"stream":7,"correlation":{self.correlation}')
        self.compute = start + dur

    def collective(self, axis: str, size: int, waited: bool) -> None:
        """An all-reduce along ``axis``; the next kernel waits for it if ``waited``."""
        self.seqs[axis] = self.seqs.get(axis, 0) + 1
        number, stream = ("1", "20") if axis == "tp" else ("2", "24")
        size_of, whose = f"%%(size_{axis})s", f"%%({axis})s"
        about = f'"Collective name":"allreduce","In msg nelems":{size},"Out msg nelems":{size},"dtype":"BFloat16","Group size":{size_of},'
        about += f'"Process Group Name":"{number}","Process Group Description":"mesh_{axis}","Process Group Ranks":"{whose}",'
        about += f'"Seq":{self.seqs[axis]},"Is asynchronized op":{json.dumps(str(not waited))}'
        begun = self.host
        self.host = self.host + 2_000
        returned = self.call("cudaLaunchKernelExC", CALL_NS - 2_000)
        self.event("cpu_op", "record_param_comms", "9", "9", begun, returned - begun + 1_000, about)
        self.host = self.host + 2_000
        start = np.maximum(np.maximum(returned + LATENCY_NS, self.streams[axis]), self.compute)
        together = start.reshape(-1, TP)
        last = together.max(axis=1, keepdims=True) if axis == "tp" else together.max(axis=0, keepdims=True)
        end = np.broadcast_to(last, together.shape).reshape(-1) + 15_000 + size // 50
        args = f'"device":0,"stream":{stream},"correlation":{self.correlation},{about}'
        self.event(
            "kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "0", stream, start, end - start, args
        )
        self.streams[axis] = end
        if waited:
            self.held = np.maximum(self.held, end)


def made(ranks: int, operations: int, steps: int) -> Job:
    """The job with about so many pieces of device work a rank and step."""
    zero = np.zeros(ranks, np.int64)
    job = Job(ranks, ranks // 2 + 3, np.random.default_rng(1), zero + 10_000, zero, {"tp": zero, "dp": zero}, zero)
    layers = max(1, (operations - 1) // 9)  # forward: 3 kernels, 1 tp; backward: 3 kernels, 1 tp, 1 dp
    for step in range(steps):
        begun = job.host
        place = len(job.times)
        for backward in (False, True):
            for _ in range(layers):
                for number in range(3):
                    job.kernel(f"gemm_{'fb'[backward]}{number}", KERNEL_NS * (1 + backward))
                job.collective("tp", 2_000_000, waited=True)
                if backward:
                    job.collective("dp", 4_000_000, waited=False)
        job.held = np.maximum(job.held, job.streams["dp"])
        job.kernel("multi_tensor_adam", 150_000)
        done = np.maximum(job.compute, job.host)
        job.event("cuda_runtime", "cudaDeviceSynchronize", "9", "9", job.host, done - job.host, f'"correlation":{10**6 + step}')
        job.host = done + 50_000
        job.templates.insert(place, _EVENT % ("user_annotation", f"ProfilerStep#{step + 1}", "9", "9", ""))
        job.times.insert(place, (begun, job.host - begun))
        job.host = job.host + 1_000
    return job


def write(job: Job, folder: Path) -> None:
    """One trace a rank."""
    folder.mkdir(parents=True, exist_ok=True)
    body = ",\n".join(job.templates)
    # times in us with their three decimals: the widest of what a profiler writes
    columns = np.stack([part for pair in job.times for part in pair])
    world = list(range(job.ranks))
    for rank in range(job.ranks):
        first = rank - rank % TP
        tp, dp = list(range(first, first + TP)), list(range(rank % TP, job.ranks, TP))
        groups = [("0", "default_pg", world), ("1", "mesh_tp", tp), ("2", "mesh_dp", dp)]
        listed = [{"pg_name": n, "pg_desc": d, "backend_config": "cuda:nccl", "pg_size": len(r), "ranks": r} for n, d, r in groups]
        top = {"rank": rank, "world_size": job.ranks, "backend": "nccl", "pg_count": 3, "pg_config": listed}
        values = columns[:, rank]
        texts = tuple(f"{ns // 1000}.{ns % 1000:03d}" for ns in values.tolist())
        events = body % texts % {"tp": tp, "dp": dp, "size_tp": TP, "size_dp": len(dp)}
        head = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}], "distributedInfo": top,
                "host_name": f"node{rank // 8}", "baseTimeNanoseconds": BASE}  # fmt: skip
        (folder / f"rank{rank}.json").write_text(f'{json.dumps(head)[:-1]}, "traceEvents": [\n{events}\n]}}')


def main() -> int:
    """Write what is not there, analyse, say what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--operations", type=int, default=400, help="device work of a rank and step; about 2.3 events each")
    parser.add_argument("--steps", type=int, default=2)
    given = parser.parse_args()
    folder = given.folder / f"{given.ranks}x{given.operations}x{given.steps}"
    begun = time.process_time()
    if not (folder / f"rank{given.ranks - 1}.json").exists():
        write(made(given.ranks, given.operations, given.steps), folder)
        print(f"written in {time.process_time() - begun:.1f} s CPU")
    out = folder.parent / f"{folder.name}.json"
    command = [sys.executable, "-m", "tracekit", "analyze", str(folder), "--no-cache", "--no-report", "-v", "--json", str(out)]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print("\n".join(line for line in done.stderr.splitlines() if line.strip())[-3000:])
    document = json.loads(out.read_text())
    print(f"{used.ru_utime + used.ru_stime:.1f} s CPU, {time.perf_counter() - began:.1f} s, peak {used.ru_maxrss / 1e6:.2f} GB")
    print(f"first finding: {document['findings'][0]['text']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
