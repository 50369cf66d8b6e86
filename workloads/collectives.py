"""Collectives alone: every kind over a range of sizes, checked, timed as nccl-tests times them, and recorded.

    torchrun --nproc-per-node 4 -m tracekit.workloads.collectives -o traces/collectives

No model and no training. Before the recording starts, each collective runs at each size: once to check its result, then ``--warm-up-calls``
times, then ``--iterations`` times against the host's clock (a profiler would cost some microseconds a call). The table is printed and
written to ``collectives.jsonl`` in the output folder, one JSON object a line:

    size_bytes   S, the full tensor: what all ranks have together of all_gather, gather, scatter, reduce_scatter, all_to_all
    count        elements of a share of S where there are shares, else of S; ``type`` of one element
    time_us      of one call, mean over the ranks of the group
    algbw_gb_s   S / time, 10^9 bytes a second
    busbw_gb_s   algbw times 2 (x-1)/x for all_reduce, (x-1)/x for those with shares, 1 for broadcast, reduce and send_recv
    wrong        elements of the result, on all ranks, that are not what they have to be; more than 0 ends the run

Collectives a rank and step, of x ranks on ``--axis``: R = ``--recorded`` calls of each kind at each size S, R S bytes.
    broadcast, scatter, gather, reduce   from or to the first rank of the group
    all_gather, reduce_scatter, all_reduce, all_to_all
    all_to_all with splits               1 to x pieces of S / (1 + 2 + ... + x) to the ranks
    send, recv                           S to the next rank and from the one before
    barrier                              R calls
Their purpose is ``metrics``: they run to be measured and serve no training. They are called within ranges ``benchmark NAME``, by which
``tracekit analyze`` knows them.
Numerics: results are compared exactly, data are whole numbers.
Sources: nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tracekit.errors import UsageError
from tracekit.manifest import Expected

from .common import bench, loop
from .common.job import Job, Training
from .common.settings import option

MESH = {"dp_replicate": 4}
DEFAULTS = {"wait": 0, "active": 1}
TYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
FILE = "collectives.jsonl"


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    min_bytes: int = option(1024, "smallest size")
    max_bytes: int = option(1 << 20, "largest size")
    factor: int = option(4, "each size is this many times the one before")
    iterations: int = option(20, "timed calls of each collective and size")
    warm_up_calls: int = option(5, "calls before those that are timed")
    recorded: int = option(3, "calls of each collective and size in a recorded step")
    dtype: str = option("float32", "element type", TYPES)
    only: str = option("", f"which collectives, divided by commas; empty: all of {','.join(bench.COLLECTIVES)}")
    axis: str = option("", "axis of the mesh along which they run; empty: the first")


def cases(job: Job, options: Options) -> list[tuple[str, int]]:
    """(collective, elements of the full tensor) of everything that is to run, in order. UsageError where the options make no sense."""
    axis = axis_of(job, options)
    for name in ("min_bytes", "iterations", "recorded"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(options, name)} is too small", "give at least 1")
    if options.max_bytes < options.min_bytes or options.factor < 2:
        raise UsageError(
            f"no sizes from {options.min_bytes} to {options.max_bytes} bytes by factors of {options.factor}",
            "give a --max-bytes of at least --min-bytes, and a --factor of at least 2",
        )
    names = [name for name in options.only.replace("-", "_").split(",") if name] or list(bench.COLLECTIVES)
    strange = [name for name in names if name not in bench.COLLECTIVES]
    if strange:
        raise UsageError(f"--only {strange[0]}: there is no such collective", f"there are {', '.join(bench.COLLECTIVES)}")
    sizes, itemsize = [options.min_bytes], type_of(options).itemsize
    while sizes[-1] * options.factor <= options.max_bytes:
        sizes.append(sizes[-1] * options.factor)
    result = [(name, bench.elements_of(name, size, job.size(axis), itemsize)) for name in names for size in sizes]
    return list(dict.fromkeys(result))  # the smallest sizes may be one size when rounded, and a barrier has none


def axis_of(job: Job, options: Options) -> str:
    """The axis along which collectives run. UsageError where the mesh has no other rank there."""
    axis = options.axis or next(iter(job.sizes))
    if axis not in job.sizes:
        raise UsageError(f"--axis {axis}: the mesh has no such axis", f"it has {', '.join(job.sizes)}")
    if job.size(axis) < 2:
        raise UsageError(f"a group of one rank on axis {axis} has nothing to communicate", "take 2 ranks or more: --nproc 2")
    return axis


def type_of(options: Options) -> torch.dtype:
    """The element type."""
    found: torch.dtype = getattr(torch, options.dtype)
    return found


def build(job: Job, options: Options) -> Training:
    """Measure everything; then each training step is one round of all collectives."""
    axis = axis_of(job, options)
    where = bench.Where(job.group(axis), job.place(axis), job.size(axis), job.device, type_of(options))
    todo = cases(job, options)
    if job.settings.backend != "fake":  # which moves nothing: there is nothing to check and nothing to measure
        measure(job, options, where, todo)

    def step(ids_BT: Tensor, targets_BT: Tensor, recorder: Any) -> None:  # noqa: ARG001
        recorded = replace(where, own=lambda tensor, category: recorder.own(tensor, category, "benchmark"))
        for name, elements in todo:
            case = bench.COLLECTIVES[name][1](recorded, elements)
            bench.reset(case)
            with recorder.phase(f"benchmark {name}"):
                for _ in range(options.recorded):
                    case.call()

    return Training(
        models=[],
        optimizer=None,
        gathered=dict,
        step=step,
        verified=lambda: f"verified: the results of {len(todo)} collectives were right on every rank",
        describe={"batch": None, "precision": None, "model_shape": {}},
    )


def measure(job: Job, options: Options, where: bench.Where, todo: list[tuple[str, int]]) -> None:
    """Check and time all collectives; the first rank prints the table and writes the file. RuntimeError where a result is wrong."""
    rows = [row(options, where, name, elements) for name, elements in todo]
    if job.rank == 0:
        print(table(rows), flush=True)
        if job.settings.output:
            folder = Path(job.settings.output)
            folder.mkdir(parents=True, exist_ok=True)
            about = {"backend": dist.get_backend(where.group), "ranks": where.size, "axis": axis_of(job, options)}
            (folder / FILE).write_text("".join(json.dumps({**r, **about}) + "\n" for r in rows), encoding="utf-8")
    wrong = [r for r in rows if r["wrong"]]
    if wrong:
        first = wrong[0]
        raise RuntimeError(f"{len(wrong)} collectives gave wrong results: {first['collective']} of {first['size_bytes']} bytes, ...")


def row(options: Options, where: bench.Where, name: str, elements: int) -> dict[str, Any]:
    """One line of the table."""
    case = bench.COLLECTIVES[name][1](where, elements)
    wrong = torch.tensor(bench.wrong_elements(case), device=where.device)
    dist.all_reduce(wrong, group=where.group)
    time_s = bench.seconds(case, where, options.warm_up_calls, options.iterations)
    size = elements * where.dtype.itemsize
    algbw, busbw = bench.bandwidths(name, size, where.size, time_s)
    return {
        "collective": name,
        "size_bytes": size,
        "count": bench.count_of(name, elements, where.size),
        "type": options.dtype,
        "time_us": time_s * 1e6,
        "algbw_gb_s": algbw,
        "busbw_gb_s": busbw,
        "wrong": int(wrong),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as nccl-tests prints them: bytes, elements, microseconds, GB/s."""
    head = f"{'collective':<15}{'size':>12}{'count':>12}{'type':>10}{'time':>12}{'algbw':>9}{'busbw':>9}{'#wrong':>8}"
    units = f"{'':<15}{'(B)':>12}{'(elements)':>12}{'':>10}{'(us)':>12}{'(GB/s)':>9}{'(GB/s)':>9}"
    lines = [head, units]
    for r in rows:
        speed = "".join(f"{'-' if r[k] is None else format(r[k], '.3g'):>9}" for k in ("algbw_gb_s", "busbw_gb_s"))
        lines.append(
            f"{r['collective']:<15}{r['size_bytes']:>12}{r['count']:>12}{r['type']:>10}{r['time_us']:>12.2f}{speed}{r['wrong']:>8}"
        )
    return "\n".join(lines)


def expected(job: Job, options: Options) -> list[Expected]:
    """All collectives of one rank and step."""
    width, axis = type_of(options).itemsize, axis_of(job, options)
    return [
        Expected(kind, axis, "metrics", options.recorded, options.recorded * elements * width)
        for name, elements in cases(job, options)
        for kind in bench.COLLECTIVES[name][0]
    ]


if __name__ == "__main__":
    loop.main(__name__)
