"""Runs of a few lines: figures without a trace, and traces whose two sides differ in one thing."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.builder import Trace, group
from tracekit.compare.figures import NO_STEP, Quantity, Run


def run(
    times: Mapping[str, Sequence[float | None]] | None = None,
    counts: Mapping[str, Sequence[float | None]] | None = None,
    memory: Mapping[str, Sequence[float | None]] | None = None,
    *,
    steps: Sequence[int] = (10, 11, 12),
    ranks: Sequence[int] = (0, 1),
    world_size: int | None = 2,
    axes: Sequence[tuple[str, int]] = (("dp", 2),),
    not_measured: Mapping[str, str] | None = None,
    name: str = "run",
) -> Run:
    """``times`` [us] and ``counts`` have a value a rank and step, ``memory`` [bytes] one a rank."""
    quantities = [Quantity(key, key, "us", "time", "step", list(values)) for key, values in (times or {}).items()]
    quantities += [
        Quantity(key, key, "bytes" if key.endswith(".bytes") else "calls", "exact", "step", list(values))
        for key, values in (counts or {}).items()
    ]
    for key, values in (memory or {}).items():
        rule: Any = {"peak": "peak", "parameters": "exact"}.get(key, "detail")
        quantities.append(Quantity(f"memory.{key}", key, "bytes", rule, "rank", list(values)))
    places = [(rank, step) for rank in ranks for step in (steps or [NO_STEP])]
    return Run(name, world_size, "GPU", list(axes), list(ranks), places, quantities, dict(not_measured or {}))


def write_job(
    folder: Path,
    *,
    gemm: float = 250,
    calls: int = 1,
    elements: int = 1 << 20,
    dtype: str = "Float",
    steps: Sequence[int] = (10, 11, 12),
    warmup: int | None = None,
    pid: int = 4000,
    streams: tuple[int, int] = (7, 20),
    kernel: str = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)",
    gemm_name: str = "sm90_xmma_gemm_bf16_tn",
    names: str = "rank{}.json",
    shuffled: bool = False,
) -> Path:
    """Two ranks; each step of 1 ms runs a gemm of ``gemm`` us, then ``calls`` all-reduces of 80 us. ``warmup``: a slow step before."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in (0, 1):
        trace = Trace(rank=rank, world_size=2, groups=[group("0", "default_pg", [0, 1])], pid=pid)
        trace.ids = 1000 + pid
        if warmup is not None:
            trace.step(warmup, -3000, 3000)
            trace.kernel(gemm_name, -2900, 10 * gemm, stream=streams[0], launch=-2950, op="aten::mm")
        for place, number in enumerate(steps):
            start = 1000 * place
            trace.step(number, start, 1000)
            trace.kernel(gemm_name, start + 60, gemm, stream=streams[0], launch=start + 20, op="aten::mm")
            for call in range(calls):
                at = start + 100 + gemm + 90 * call
                size: dict[str, Any] = {"elements": elements, "dtype": dtype, "stream": streams[1], "kernel": kernel}
                trace.collective("allreduce", at, 80, seq=10 * number + call, launch=start + 40 + 8 * call, **size)
        if shuffled:
            random.Random(rank).shuffle(trace.events)
        trace.write(folder / names.format(rank))
    return folder
