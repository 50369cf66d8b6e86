"""Hand-made traces: a few calls write the JSON that a test reads.

    trace = Trace(rank=0, world_size=2)
    trace.step(10, 0, 1000)
    trace.kernel("gemm", start=100, dur=200)
    trace.collective("allreduce", start=300, dur=50, elements=1024, group="0", seq=7)
    trace.write(tmp_path / "rank0.json")

Times are microseconds (int, float or decimal text) after ``base``. Everything made here is synthetic.
"""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

BASE = 1_775_078_550_000_000_000


def _exact(value: Any) -> Any:
    return _Number(value) if isinstance(value, str) else value


class _Number(float):
    """A decimal that json writes exactly as given."""

    def __new__(cls, text: str) -> _Number:
        self = super().__new__(cls, float(Decimal(text)))
        self.text = text
        return self

    def __repr__(self) -> str:
        return self.text


class Trace:
    """One synthetic Kineto trace of one rank."""

    def __init__(
        self,
        rank: int | None = 0,
        world_size: int = 1,
        groups: list[dict[str, Any]] | None = None,
        backend: str = "nccl",
        base: int | None = BASE,
        device: str | None = "NVIDIA H100 80GB HBM3",
        pid: int = 4000,
        **top: Any,
    ) -> None:
        self.rank = rank
        self.pid = pid + (rank or 0)
        self.gpu = rank or 0
        self.events: list[dict[str, Any]] = []
        self.ids = 1000
        self.top: dict[str, Any] = {"schemaVersion": 1}
        self.top["deviceProperties"] = [{"id": self.gpu, "name": device}] if device else []
        if rank is not None:
            if groups is None:
                groups = [group("0", "default_pg", list(range(world_size)))]
            self.top["distributedInfo"] = {
                "backend": backend,
                "rank": rank,
                "world_size": world_size,
                "pg_count": len(groups),
                "pg_config": groups,
            }
        self.top["displayTimeUnit"] = "ms"
        if base is not None:
            self.top["baseTimeNanoseconds"] = base
        self.top.update(top)

    def next_id(self) -> int:
        self.ids += 1
        return self.ids

    def add(self, cat: str | None, name: str, start: Any, dur: Any = None, tid: Any = None, pid: Any = None, **args: Any) -> dict[str, Any]:
        """One event as given; keys of ``args`` with spaces are passed with ``**{"External id": 3}``."""
        event: dict[str, Any] = {"ph": "X" if dur is not None else "i", "cat": cat, "name": name}
        if cat is None:
            del event["cat"]
        event |= {"pid": self.pid if pid is None else pid, "tid": self.pid if tid is None else tid, "ts": _exact(start)}
        if dur is not None:
            event["dur"] = _exact(dur)
        if args:
            event["args"] = args
        self.events.append(event)
        return event

    def step(self, number: int, start: Any, dur: Any) -> None:
        """A ProfilerStep annotation on the host."""
        self.add("user_annotation", f"ProfilerStep#{number}", start, dur)

    def annotation(self, name: str, start: Any, dur: Any, tid: Any = None, **args: Any) -> None:
        """A record_function range on the host."""
        self.add("user_annotation", name, start, dur, tid=tid, **args)

    def operator(self, name: str, start: Any, dur: Any, tid: Any = None, **args: Any) -> None:
        """An operator on the host."""
        self.add("cpu_op", name, start, dur, tid=tid, **{"External id": self.next_id(), **args})

    def launch(self, correlation: int, start: Any, dur: Any = 5, name: str = "cudaLaunchKernel", tid: Any = None) -> None:
        """The host call that launches the kernel of this correlation, with its arrow."""
        self.add("cuda_runtime", name, start, dur, tid=tid, correlation=correlation, cbid=211)
        self.events.append(
            {"ph": "s", "id": correlation, "pid": self.pid, "tid": self.pid, "ts": _exact(start), "cat": "ac2g", "name": "ac2g"}
        )

    def kernel(
        self,
        name: str,
        start: Any,
        dur: Any,
        stream: int = 7,
        launch: Any = None,
        op: str | None = None,
        cat: str = "kernel",
        correlation: int | None = None,
        tid: Any = None,
        **args: Any,
    ) -> int:
        """A kernel; with ``launch`` also its launch at that time, with ``op`` an operator around the launch. Returns the correlation."""
        correlation = self.next_id() if correlation is None else correlation
        if op is not None and launch is not None:
            self.operator(op, launch - 2, 12, tid=tid)
        if launch is not None:
            self.launch(correlation, launch, tid=tid)
        own = {"device": self.gpu, "stream": stream, "correlation": correlation}
        self.add(cat, name, start, dur, pid=self.gpu, tid=stream, **own, **args)
        return correlation

    def collective(
        self,
        name: str,
        start: Any,
        dur: Any,
        elements: int = 1024,
        out_elements: int | None = None,
        dtype: str = "Float",
        group: str = "0",
        description: str = "default_pg",
        ranks: list[int] | str = "[0, 1]",
        seq: int | None = None,
        stream: int = 20,
        launch: Any = None,
        kernel: str | None = None,
        **args: Any,
    ) -> int:
        """An NCCL kernel with its metadata; with ``launch`` also record_param_comms and the launch around that time."""
        text = ranks if isinstance(ranks, str) else str(ranks)
        size = args.pop("size", text.count(",") + 1)
        meta: dict[str, Any] = {
            "Collective name": name,
            "In msg nelems": elements,
            "Out msg nelems": elements if out_elements is None else out_elements,
            "Group size": size,
            "dtype": dtype,
            "In split size": "[]",
            "Out split size": "[]",
            "Process Group Name": group,
            "Process Group Description": description,
            "Process Group Ranks": text,
        }
        if seq is not None:
            meta["Seq"] = seq
        meta |= args
        if launch is not None:
            self.operator("record_param_comms", launch - 5, 20, **meta)
        camel = {
            "allreduce": "AllReduce_Sum_f32_RING_LL",
            "_allgather_base": "AllGather_RING_LL",
            "_reduce_scatter_base": "ReduceScatter_Sum_f32_RING_LL",
            "broadcast": "Broadcast_RING_LL",
        }
        kernel = kernel or f"ncclDevKernel_{camel.get(name, 'SendRecv')}(ncclDevKernelArgsStorage<4096ul>)"
        return self.kernel(kernel, start, dur, stream=stream, launch=launch, **meta)

    def document(self) -> dict[str, Any]:
        return {**self.top, "traceEvents": self.events}

    def text(self, indent: int | None = None) -> str:
        return json.dumps(self.document(), indent=indent)

    def write(self, path: Path) -> Path:
        """Write as JSON; gzip when the name ends in .gz."""
        data = self.text().encode()
        path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
        return path


def group(name: str, description: str, ranks: list[int]) -> dict[str, Any]:
    """One entry of distributedInfo.pg_config."""
    return {"pg_name": name, "pg_desc": description, "backend_config": "cuda:nccl", "pg_size": len(ranks), "ranks": ranks}
