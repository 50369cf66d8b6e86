"""Write the traces that the benchmarks read: synthetic, deterministic, shaped like a job of 8 GPUs on 2 nodes.

    python benchmarks/make_traces.py OUT [50MB 250MB 1GB 8x50MB 50MB.gz 250MB.gz 1GB.gz 8x50MB.gz 4GB 10GB]

Each name becomes a folder of ``OUT`` with one file a rank. The job: a transformer of 16 layers, weights sharded over
``dp_shard`` (4 ranks), each layer split over ``tp`` (2 ranks). Host calls, operators with shapes, Python functions, launches, kernels,
arrows and NCCL kernels with their metadata are written the way Kineto writes them (indented, microseconds with three decimals). All ranks
are simulated together: a collective ends at the same moment on every rank, and starts where the rank was ready; rank 3 computes slower.

A few steps are simulated; every step of a file is one of them with its times, ids, sequence numbers and step number written over.
That makes 1 GB a matter of seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
from isal import igzip

WORLD = 8
LAYERS = 16
VARIANTS = 4  # steps that are simulated
SLOW_RANK = 3
FIRST_STEP, FIRST_SEQ, FIRST_ID = 1000, 100_000, 1_000_000_000
START_NS = 1_000_000_000_000  # offset of the first step from baseTimeNanoseconds; keeps every ts ten digits wide
BASE_NS = 1_775_078_550_000_000_000
COMPUTE, SHARD, TENSOR = 7, 20, 24  # streams
GROUPS = {SHARD: ("2", "mesh_dp_shard"), TENSOR: ("3", "mesh_tp"), 0: ("0", "default_pg")}
SIZES = {"50MB": 50, "250MB": 250, "1GB": 1000}  # 10^6 bytes
LARGE = {"4GB": 4000, "10GB": 10000}  # only where they are named


# --- what a step does


@dataclass(frozen=True)
class Call:
    """One operator that launches one kernel, below its Python functions and outer operators."""

    python: str
    operators: tuple[str, ...]
    dims: list[list[int]]
    kernel: str
    nanoseconds: int  # on the device, before jitter
    stream: int = COMPUTE
    collective: tuple[str, int, int] | None = None  # c10d name, elements in, elements out


@dataclass
class Placed:
    """When a call happened: one entry a rank, ns after the step's start."""

    call: Call
    host: Any  # start of the outermost Python function
    start: Any  # of the kernel
    end: Any


H, T, WAYS = 4096, 2048, 4
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas"
POINTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::{}_kernel_cuda(at::TensorIteratorBase&)::"
    "{{lambda()#1}}::operator()() const::{{lambda(c10::BFloat16)#1}}, std::array<char*, 2ul> >(int, at::native::{}, std::array<char*, 2ul>)"
)
NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, false>(int, float, c10::BFloat16 const*)"
ADAM = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedOptimizerTensorListMetadata<4>>"
FLASH = "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>>(Flash_fwd_params)"
NCCL = "ncclDevKernel_{}(ncclDevKernelArgsStorage<4096ul>)"


def _collective(name: str, kernel: str, stream: int, given: int, got: int, nanoseconds: int) -> Call:
    operator = {
        "_allgather_base": "c10d::_allgather_base_",
        "_reduce_scatter_base": "c10d::_reduce_scatter_base_",
        "allreduce": "c10d::allreduce_",
    }[name]
    python = (
        "torch/distributed/distributed_c10d.py(2970): all_reduce"
        if name == "allreduce"
        else "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py(71): __call__"
    )
    return Call(python, (operator, "record_param_comms"), [[got], [given]], NCCL.format(kernel), nanoseconds, stream, (name, given, got))


def _gather(layer: int) -> Call:
    size = 12 * H * H // 2
    return _collective("_allgather_base", "AllGather_RING_LL", SHARD, size // WAYS, size, 420_000 + 1000 * layer)


def _scatter() -> Call:
    size = 12 * H * H // 2
    return _collective("_reduce_scatter_base", "ReduceScatter_Sum_bf16_RING_LL", SHARD, size, size // WAYS, 510_000)


def _tensor_reduce() -> Call:
    return _collective("allreduce", "AllReduce_Sum_bf16_RING_LL", TENSOR, H * T, H * T, 61_000)


def _linear(layer: int, rows: int, columns: int) -> Call:
    return Call(
        f"nn.Module: Linear_{layer * 4}",
        ("aten::linear", "aten::matmul", "aten::mm"),
        [[T, rows], [rows, columns]],
        GEMM,
        T * rows * columns // 270_000,
    )


def _pointwise(python: str, name: str, size: int, extra: tuple[str, ...] = ()) -> Call:
    return Call(python, (*extra, f"aten::{name}"), [[1, T, size], [1, T, size], []], POINTWISE.format(name, name), T * size // 900)


def step_calls() -> list[Call]:
    """All calls of one step, in the order of the host."""
    calls: list[Call] = []
    for layer in range(LAYERS):
        calls.append(_gather(layer))
        norm = Call("nn.Module: LayerNorm_0", ("aten::layer_norm", "aten::native_layer_norm"), [[1, T, H], [H], [H]], NORM, 9_400)
        attention = Call(
            "model.py(118): forward",
            ("aten::scaled_dot_product_attention", "aten::_flash_attention_forward"),
            [[1, 16, T, 128]] * 3,
            FLASH,
            84_000,
        )
        calls += [norm, _linear(layer, H, 3 * H // 2), attention, _linear(layer, H // 2, H), _tensor_reduce()]
        calls += [_pointwise("model.py(131): forward", "add", H), norm, _linear(layer, H, 2 * H)]
        calls += [
            _pointwise("nn.Module: GELU_0", "gelu", 2 * H),
            _linear(layer, 2 * H, H),
            _tensor_reduce(),
            _pointwise("model.py(137): forward", "add", H),
        ]
    for layer in reversed(range(LAYERS)):
        calls.append(_gather(layer))
        for rows, columns in ((2 * H, H), (H, 2 * H), (H // 2, H), (H, 3 * H // 2)):
            backward = ("autograd::engine::evaluate_function: MmBackward0", "MmBackward0", "aten::mm")
            product = Call(
                "torch/autograd/graph.py(823): _engine_run_backward",
                backward,
                [[columns, T], [T, rows]],
                GEMM,
                T * rows * columns // 260_000,
            )
            calls += [
                product,
                product,
                _pointwise(
                    "torch/autograd/graph.py(823): _engine_run_backward",
                    "mul",
                    rows,
                    ("autograd::engine::evaluate_function: MulBackward0",),
                ),
            ]
        calls += [_tensor_reduce(), _scatter()]
    calls += [Call("torch/optim/adam.py(949): adam", ("aten::_fused_adamw_",), [[12 * H * H // 8]] * 4, ADAM, 160_000)] * LAYERS
    calls.append(_collective("allreduce", "AllReduce_Sum_f32_RING_LL", 0, 1, 1, 24_000))
    return calls


# --- when it happens


def simulate(calls: list[Call], variant: int) -> tuple[list[Placed], int]:
    """Places the calls of all ranks; returns them and the step's length in ns."""
    random = np.random.default_rng(20_000 + variant)
    host = np.full(WORLD, 200_000)
    free = {stream: np.zeros(WORLD, np.int64) for stream in (COMPUTE, SHARD, TENSOR, 0)}
    placed = []
    for call in calls:
        begin = host.copy()
        host += 21_000 + 6_000 * len(call.operators) + random.integers(0, 9_000, WORLD)
        launched = host - 4_000
        ready = np.maximum(launched + 3_000, free[call.stream])
        if call.collective is None:
            slow = np.where(np.arange(WORLD) == SLOW_RANK, 1.12, 1.0)
            length = (call.nanoseconds * slow * random.uniform(0.97, 1.03, WORLD)).astype(np.int64) + 1
            end = ready + length
        else:
            if call.stream != SHARD:  # its input was just computed, and the next kernel waits for it
                ready = np.maximum(ready, free[COMPUTE] + 1_000)
            end = _last_arrival(ready, call.stream) + call.nanoseconds + int(random.integers(0, 9_000))
        free[call.stream] = end + 700
        if call.stream in (TENSOR, 0):
            free[COMPUTE] = np.maximum(free[COMPUTE], end + 1_500)
        placed.append(Placed(call, begin, ready, end))
    length = int(max(host.max(), *(f.max() for f in free.values()))) + 400_000
    return placed, -(-length // 1000) * 1000


def _last_arrival(ready: Any, stream: int) -> Any:
    last = ready.copy()
    for rank in range(WORLD):
        last[rank] = ready[members(stream, rank)].max()
    return last


def members(stream: int, rank: int) -> list[int]:
    """The ranks of the process group that a rank uses on this stream; rank = 2 x dp_shard + tp."""
    if stream == SHARD:
        return list(range(rank % 2, WORLD, 2))
    return [rank // 2 * 2, rank // 2 * 2 + 1] if stream == TENSOR else list(range(WORLD))


# --- how it is written


@dataclass
class Template:
    """The text of one step with places for numbers that change: (position of the digits, offset) by kind."""

    text: bytearray = field(default_factory=bytearray)
    places: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: {"ts": [], "id": [], "seq": [], "step": []})
    ids: int = 0
    sequences: dict[int, int] = field(default_factory=dict)

    WIDTH: ClassVar = {"ts": 14, "id": 10, "seq": 6, "step": 4}

    def put(self, text: str) -> None:
        """Append text in which <ts:5>, <id:5>, <seq:5> and <step:0> stand for numbers; names hold none of these."""
        for number, piece in enumerate(text.split("\x00")):
            if number % 2 == 0:
                self.text += piece.encode()
                continue
            kind, offset = piece.split(":")
            self.places[kind].append((len(self.text), int(offset)))
            self.text += b"0" * self.WIDTH[kind]

    def next_id(self) -> int:
        self.ids += 1
        return self.ids


def _number(kind: str, offset: int) -> str:
    return f"\x00{kind}:{offset}\x00"


def _event(cat: str, name: str, pid: object, tid: object, start: int, length: int, args: str) -> str:
    return (
        f'  {{\n    "ph": "X", "cat": "{cat}", "name": "{name}", "pid": {pid}, "tid": {tid},\n'
        f'    "ts": {_number("ts", start)}, "dur": {length // 1000}.{length % 1000:03d},\n    "args": {{\n      {args}\n    }}\n  }},\n'
    )


def _arrow(ph: str, correlation: str, pid: object, tid: object, start: int) -> str:
    ends = ', "bp": "e"' if ph == "f" else ""
    where = f'"pid": {pid}, "tid": {tid}, "ts": {_number("ts", start)}'
    return f'  {{\n    "ph": "{ph}", "id": {correlation}, {where},\n    "cat": "ac2g", "name": "ac2g"{ends}\n  }},\n'


def step_template(placed: list[Placed], length: int, rank: int) -> Template:
    """The text of one simulated step of one rank."""
    template = Template()
    pid = 4000 + rank
    template.put(
        _event(
            "user_annotation",
            "ProfilerStep#" + _number("step", 0),
            pid,
            pid,
            0,
            length - 1_000,
            f'"External id": {_number("id", template.next_id())}',
        )
    )
    device = [_host_call(template, one, rank, pid) for one in placed]
    template.put("".join(device))
    return template


def _host_call(template: Template, placed: Placed, rank: int, pid: int) -> str:
    """Writes what the host did for one call; returns the text of its kernel and arrow."""
    call = placed.call
    begin = int(placed.host[rank])
    parent = template.next_id()
    width = 15_000 + 6_000 * len(call.operators)
    python = f'"Python parent id": {_number("id", parent - 1)},"Python id": {_number("id", parent)}, "Ev Idx": {_number("id", parent)}'
    template.put(_event("python_function", call.python, pid, pid, begin, width + 4_000, python))
    own = template.next_id()
    inner = f'"Python parent id": {_number("id", parent)},"Python id": {_number("id", own)}, "Ev Idx": {_number("id", own)}'
    template.put(
        _event("python_function", "torch/nn/modules/module.py(1773): _wrapped_call_impl", pid, pid, begin + 1_000, width + 2_000, inner)
    )
    metadata = _metadata(template, call, rank)
    concrete, strides = json.dumps([""] * len(call.dims)), json.dumps([[d[-1], 1] if len(d) > 1 else d for d in call.dims])
    types = json.dumps(["c10::BFloat16" if dims else "Scalar" for dims in call.dims])
    for depth, name in enumerate(call.operators):
        own = template.next_id()
        args = (
            f'"External id": {_number("id", own)},"Record function id": 0, "Concrete Inputs": {concrete}, "Input type": {types}, '
            f'"Input Strides": {strides}, "Input Dims": {json.dumps(call.dims)}, "Ev Idx": {_number("id", own)}'
        )
        args += metadata if name == "record_param_comms" else ""
        template.put(_event("cpu_op", name, pid, pid, begin + 2_000 + 3_000 * depth, width - 6_000 * depth, args))
    launch = begin + 2_000 + 3_000 * len(call.operators) + 2_000
    return _launch(template, placed, rank, launch, own, metadata)


def _launch(template: Template, placed: Placed, rank: int, launch: int, operator: int, metadata: str) -> str:
    call = placed.call
    pid = 4000 + rank
    stream = call.stream or 28
    correlation = _number("id", template.next_id())
    external = f'"External id": {_number("id", operator)}'
    template.put(
        _event("cuda_runtime", "cudaLaunchKernel", pid, pid, launch, 4_210, f'{external}, "cbid": 211, "correlation": {correlation}')
    )
    template.put(_arrow("s", correlation, pid, pid, launch))
    start, end = int(placed.start[rank]), int(placed.end[rank])
    args = (
        f'{external}, "queued": 0, "device": {rank}, "context": 1,\n      "stream": {stream}, "correlation": {correlation},\n'
        f'      "registers per thread": 168, "shared memory": 213248,\n      "blocks per SM": 1.939394,\n      "warps per SM": 23.27273,\n'
        f'      "grid": [2, 64, 1],\n      "block": [384, 1, 1],\n      "est. achieved occupancy %": 0{metadata}'
    )
    return _event("kernel", call.kernel, rank, stream, start, end - start, args) + _arrow("f", correlation, rank, stream, start)


def _metadata(template: Template, call: Call, rank: int) -> str:
    if call.collective is None:
        return ""
    name, given, got = call.collective
    group, description = GROUPS[call.stream]
    ranks = members(call.stream, rank)
    sequence = template.sequences.get(call.stream, 0)
    template.sequences[call.stream] = sequence + 1
    stride, dtype = ranks[1] - ranks[0], "Float" if got == 1 else "BFloat16"
    return (
        f', "Collective name": "{name}", "In msg nelems": {given}, "Out msg nelems": {got}, "Group size": {len(ranks)}, "dtype": "{dtype}",'
        f' "In split size": "[]", "Out split size": "[]", "Global rank start": {ranks[0]}, "Global rank stride": {stride},'
        f' "Process Group Name": "{group}", "Process Group Description": "{description}", "Process Group Ranks": "{ranks}",'
        f' "Rank": {ranks.index(rank)}, "Seq": {_number("seq", sequence)}, "Is asynchronized op": true'
    )


# --- steps to bytes


class Filler:
    """Writes the changing numbers of one template over its text, as whole arrays."""

    def __init__(self, template: Template, length: int) -> None:
        self.text = np.frombuffer(bytes(template.text), np.uint8)
        self.length = length
        self.used = {"ts": 0, "id": template.ids, "step": 1}
        self.sequences = max(template.sequences.values())
        self.kinds = {}
        for kind, places in template.places.items():
            if places:
                position, offset = np.array(places, np.int64).T
                columns = np.array([i for i in range(Template.WIDTH[kind]) if kind != "ts" or i != 10])
                self.kinds[kind] = (position[:, None] + columns, offset, position)

    def fill(self, bases: dict[str, int]) -> bytes:
        """The step's text with these values added to the template's offsets."""
        text = self.text.copy()
        for kind, (columns, offset, position) in self.kinds.items():
            value = offset + bases[kind]
            for column in range(columns.shape[1] - 1, -1, -1):
                value, digit = np.divmod(value, 10)
                text[columns[:, column]] = digit + 48
            if kind == "ts":
                text[position + 10] = ord(".")
        return text.tobytes()


def head(rank: int) -> bytes:
    """Everything before the first step."""
    groups = [
        {
            "pg_name": name,
            "pg_desc": text,
            "backend_config": "cuda:nccl",
            "pg_size": len(members(stream, rank)),
            "ranks": members(stream, rank),
        }
        for stream, (name, text) in sorted(GROUPS.items())
    ]
    top = {
        "schemaVersion": 1,
        "deviceProperties": [
            {"id": i, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 84929347584, "computeMajor": 9, "computeMinor": 0}
            for i in range(WORLD)
        ],
        "distributedInfo": {
            "backend": "nccl",
            "rank": rank,
            "world_size": WORLD,
            "pg_count": len(groups),
            "pg_config": groups,
            "nccl_version": "2.27.5",
        },
        "record_shapes": 1,
        "with_stack": 1,
        "host_name": f"node{rank // 4}",
        "baseTimeNanoseconds": BASE_NS,
        "displayTimeUnit": "ms",
    }
    lines = [f'  "{key}": {json.dumps(value)},\n' for key, value in top.items()]
    named = [
        ("process_name", 4000 + rank, 0, "python3"),
        ("process_labels", rank, 0, f"GPU {rank}"),
        ("thread_name", 4000 + rank, 4000 + rank, "thread (python3)"),
    ]
    events = [
        f'  {{\n    "name": "{name}", "ph": "M", "ts": 1000000000.000, "pid": {pid}, "tid": {tid},\n'
        f'    "args": {{\n      "{"labels" if "label" in name else "name"}": "{text}"\n    }}\n  }},\n'
        for name, pid, tid, text in named
    ]
    return ("{\n" + "".join(lines) + '  "traceEvents": [\n' + "".join(events)).encode()


TAIL = b"""  {
    "name": "Record Window End", "ph": "i", "s": "g",
    "pid": "", "tid": "", "ts": %d.000
  }
  ],
  "traceName": "rank%d.pt.trace.json"
}
"""


def steps(fillers: list[Filler], target: int) -> Iterator[tuple[bytes, int]]:
    """The steps of one file of about ``target`` bytes, each with the time at its end."""
    bases = {"ts": START_NS, "id": FIRST_ID, "seq": FIRST_SEQ, "step": FIRST_STEP}
    count = max(2, round(target / np.mean([len(f.text) for f in fillers])))
    for number in range(count):
        filler = fillers[number % len(fillers)]
        text = filler.fill(bases)
        bases = {
            "ts": bases["ts"] + filler.length,
            "id": bases["id"] + filler.used["id"],
            "seq": bases["seq"] + filler.sequences,
            "step": bases["step"] + 1,
        }
        yield text, bases["ts"]


def write(out: BinaryIO, rank: int, fillers: list[Filler], target: int) -> None:
    """One trace of about ``target`` bytes."""
    out.write(head(rank))
    end = START_NS
    for text, step_end in steps(fillers, target):
        out.write(text)
        end = step_end
    out.write(TAIL % (end // 1000, rank))


def make(folder: Path, name: str) -> None:
    """One folder of inputs by its name, such as ``8x50MB.gz``."""
    size, _, packed = name.partition(".")
    ranks = WORLD if size.startswith("8x") else 1
    target = {**SIZES, **LARGE}[size.removeprefix("8x")] * 10**6
    folder = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    simulated = [simulate(step_calls(), variant) for variant in range(VARIANTS)]
    for rank in range(ranks):
        fillers = [Filler(step_template(placed, length, rank), length) for placed, length in simulated]
        path = folder / f"rank{rank}.json{'.gz' if packed else ''}"
        with igzip.open(path, "wb", compresslevel=2) if packed else path.open("wb") as out:
            write(out, rank, fillers, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [*SIZES, "8x50MB"]
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names)}, each also with .gz; all when none is given")
    given = parser.parse_args()
    wanted = given.names or [*names, *(f"{name}.gz" for name in names)]
    unknown = [name for name in wanted if name.removesuffix(".gz") not in (*names, *LARGE)]
    if unknown:
        sys.exit(f"no such input: {', '.join(unknown)}")
    for name in wanted:
        make(given.out, name)


if __name__ == "__main__":
    main()
