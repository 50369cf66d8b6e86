"""Every private interface of torch that the recorder touches, each behind one function that gives nothing where it is not there.

Written against torch 2.13; the tests run all of it, so that a change in torch shows as a failing test and not as a recording that lacks
something in silence. A function that finds its interface missing returns None (or does nothing) and says so in ``missing``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

#: Interfaces that were asked for and are not in this torch; written into the manifest.
missing: set[str] = set()

Undo = Callable[[], None]


def _lookup(module: str, *names: str) -> Any:
    """An attribute of a module, by name; None (and noted) where it does not exist."""
    try:
        found: Any = importlib.import_module(module)
        for name in names:
            found = getattr(found, name)
    except (ImportError, AttributeError):
        missing.add(".".join((module, *names)))
        return None
    return found


def range_with_arguments(name: str, arguments: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """A profiler range whose keyword arguments stand in the trace (ints, floats, bools, str); needs ``record_shapes``.

    The name must not be one that the profiler treats itself (``record_param_comms`` crashes the process).
    """
    fast = _lookup("torch._C._profiler", "_RecordFunctionFast")
    if fast is None:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = fast(name, [], arguments)
    return context


def flight_recorder() -> list[dict[str, Any]] | None:
    """Entries of the process' flight recorder, oldest first; None where this torch has none."""
    dump = _lookup("torch._C._distributed_c10d", "_dump_fr_trace_json")
    if dump is None:
        return None
    text = json.loads(dump())
    entries = text.get("entries", []) if isinstance(text, dict) else []
    return [entry for entry in entries if isinstance(entry, dict)]


def flight_recorder_pickles() -> list[bytes]:
    """The dumps of the process' flight recorders with all stacks, NCCL's and that of the other backends; [] where this torch has none."""
    found = []
    module = importlib.import_module("torch._C._distributed_c10d")
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        dump = getattr(module, name, None)
        if dump is not None:
            with contextlib.suppress(RuntimeError):  # a recorder that was never switched on
                found.append(bytes(dump(includeCollectives=True, includeStackTraces=True, onlyActive=False)))
    return found


def flight_recorder_setting() -> str:
    """The environment variable that says how many calls torch's flight recorder keeps."""
    module = importlib.import_module("torch._C._distributed_c10d")
    return "TORCH_FR_BUFFER_SIZE" if hasattr(module, "_dump_fr_trace") else "TORCH_NCCL_TRACE_BUFFER_SIZE"


def open_calls() -> set[tuple[str, int, int]]:
    """(backend, record, when it was called) of every collective that is not over."""
    module = importlib.import_module("torch._C._distributed_c10d")
    found: set[tuple[str, int, int]] = set()
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(module, name, None)
        if dump is None:
            continue
        with contextlib.suppress(RuntimeError):
            told = json.loads(dump(includeCollectives=True, onlyActive=True))
            for entry in told.get("entries") or []:
                if not (entry.get("retired") or entry.get("state") == "completed"):
                    found.add((name, int(entry.get("record_id", -1)), int(entry.get("time_created_ns") or 0)))
    return found


def default_signal(number: int) -> None:
    """Let a signal end the process again, from any thread: Python lets only the main one say so."""
    ctypes.CDLL(None).signal(number, None)


def process_group_type() -> Any:
    """The class of which every process group is; None where it is not to be had."""
    return _lookup("torch._C._distributed_c10d", "ProcessGroup")


def all_groups() -> dict[Any, tuple[str, list[int]]]:
    """Every process group this process is in: the object -> (name, global ranks in group order)."""
    world = _lookup("torch.distributed.distributed_c10d", "_world")
    if world is None:
        return {}
    ranks = world.pg_group_ranks
    return {pg: (str(name), sorted(ranks[pg], key=lambda r: ranks[pg][r])) for pg, name in world.pg_names.items() if pg in ranks}


def replaced(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Undo:
    """Replace ``owner.name`` by ``make(original)``; calling the result puts back what was there. Nothing happens where there is none.

    What is put back is the object in ``vars(owner)``: ``getattr`` unwraps static methods and the methods of compiled classes, which would
    then be called without their ``self``. Where somebody has replaced it again in the meantime, ours stays below theirs and only calls on.
    """
    if owner is None or not callable(getattr(owner, name, None)):
        missing.add(f"{getattr(owner, '__name__', owner)}.{name}")
        return lambda: None
    inherited = name not in vars(owner)
    kept = vars(owner).get(name)
    original = getattr(owner, name)
    changed = make(original)
    in_place = True

    @functools.wraps(original, updated=())
    def switch(*args: Any, **kwargs: Any) -> Any:
        return (changed if in_place else original)(*args, **kwargs)

    put: Any = staticmethod(switch) if isinstance(kept, staticmethod) else switch
    try:
        setattr(owner, name, put)
    except (AttributeError, TypeError):
        missing.add(f"{getattr(owner, '__name__', owner)}.{name} (cannot be replaced)")
        return lambda: None

    def undo() -> None:
        nonlocal in_place
        in_place = False
        if vars(owner).get(name) is not put:
            return
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, kept)

    return undo


def kineto_profile(**options: Any) -> Any:
    """torch's profiler without a schedule: ``prepare_trace``, ``start_trace``, ``stop_trace``, ``export_chrome_trace``."""
    return torch.profiler._KinetoProfile(**options)


def freed(tensor: torch.Tensor) -> Callable[[], bool]:
    """Tells later whether the storage behind a tensor is gone; it does not keep it. Never gone where this torch cannot tell."""
    weak = _lookup("torch.multiprocessing.reductions", "StorageWeakRef")
    if weak is None:
        return lambda: False
    reference = weak(tensor.untyped_storage())
    return lambda: bool(reference.expired())


# FSDP2 ---------------------------------------------------------------------------------------------------------------


def fsdp2_types() -> tuple[Any, Any]:
    """(FSDPParam, FSDPParamGroup); each None where not there."""
    base = "torch.distributed.fsdp._fully_shard"
    return (
        _lookup(f"{base}._fsdp_param", "FSDPParam"),
        _lookup(f"{base}._fsdp_param_group", "FSDPParamGroup"),
    )


def fsdp2_allocators() -> list[Any]:
    """The classes of this torch that make communication buffers: plain, from the process group's memory, from symmetric memory."""
    module = _lookup("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    return [kind for name, kind in vars(module).items() if name.endswith("AllocMixin") and hasattr(kind, "allocate")] if module else []


def fsdp2_groups(module: nn.Module) -> list[Any]:
    """The FSDPParamGroups of one FSDPModule; [] where it has none of its own."""
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    if state is None:
        return []
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        one = getattr(state, "_fsdp_param_group", None)
        groups = [one] if one is not None else []
    return list(groups)


def fsdp2_params(group: Any) -> list[Any]:
    """The FSDPParams of one FSDPParamGroup."""
    return list(getattr(group, "fsdp_params", []))


def fsdp2_fqn(param: Any) -> str:
    """The name of the parameter that an FSDPParam shards, '' before torch has set it."""
    return str(getattr(param, "_param_fqn", "") or "")


def fsdp2_reshards(group: Any) -> bool | int | None:
    """``reshard_after_forward`` as it is in force: True, False, or the size of the smaller group; None where not known."""
    if not hasattr(group, "post_forward_mesh_info"):
        missing.add("FSDPParamGroup.post_forward_mesh_info")
        return None
    after, own = group.post_forward_mesh_info, getattr(group, "mesh_info", None)
    if after is None:
        return False
    return True if after is own else int(getattr(after, "shard_mesh_size", 0)) or None


def fsdp2_unsharded(param: Any) -> torch.Tensor | None:
    """The gathered tensor of an FSDPParam, where it has storage now."""
    tensor = getattr(param, "_unsharded_param", None)
    if tensor is None:
        outputs = getattr(param, "all_gather_outputs", None) or []
        tensor = outputs[0] if outputs else None
    return local(tensor) if isinstance(tensor, torch.Tensor) else None


def fsdp2_unsharded_gradient(param: Any) -> torch.Tensor | None:
    """The full gradient of an FSDPParam, autograd's or the accumulated one; None where there is none."""
    accumulated = getattr(param, "unsharded_accumulated_grad", None)
    if accumulated is not None:
        return local(accumulated)
    gathered = getattr(param, "_unsharded_param", None)
    gradient = gathered.grad if gathered is not None else None
    return local(gradient) if gradient is not None else None


def whole_mesh(mesh: Any) -> Any:
    """The DeviceMesh that a part of it was cut out of; the mesh itself where it was not."""
    if mesh is None:
        return None
    root = getattr(mesh, "_get_root_mesh", None)
    if root is not None:
        return root()
    old = _lookup("torch.distributed.device_mesh", "_mesh_resources")  # torch 2.5
    return old.get_root_mesh(mesh) if old is not None else mesh


# FSDP1, DDP ----------------------------------------------------------------------------------------------------------


def fsdp1_handle_type() -> Any:
    """FlatParamHandle, the class that gathers and frees a flat parameter."""
    return _lookup("torch.distributed.fsdp._flat_param", "FlatParamHandle")


def fsdp1_runtime() -> Any:
    """The module with FSDP1's hooks (``_post_backward_hook``...)."""
    return _lookup("torch.distributed.fsdp._runtime_utils")


def fsdp1_handle(module: nn.Module) -> Any:
    """The handle of one FullyShardedDataParallel module; None where it manages no parameter."""
    return getattr(module, "_handle", None)


def fsdp1_groups(module: nn.Module) -> list[tuple[Any, str]]:
    """(process group, what it is for) of one FullyShardedDataParallel module."""
    strategy = str(getattr(getattr(module, "sharding_strategy", None), "name", ""))
    shard = "dp_replicate" if strategy == "NO_SHARD" else "dp_shard"
    return [(getattr(module, "process_group", None), shard), (getattr(module, "_inter_node_pg", None), "dp_replicate")]


def fsdp1_flat(handle: Any) -> dict[str, Any]:
    """Of a flat parameter: names, elements without padding, padded, of the local shard, the gathered storage and its gradient's."""
    flat = handle.flat_param
    names = [".".join(filter(None, (info.module_name, info.param_name))) for info in getattr(flat, "_param_infos", ())]
    local_shard = getattr(flat, "_local_shard", None)
    shard = local_shard.numel() if local_shard is not None else flat.numel()
    return {
        "names": names,
        "elements": int(getattr(flat, "_unpadded_unsharded_size", flat.size()).numel()),
        "padded": int(shard * handle.world_size),
        "shard": int(shard),
        "local": local_shard if local_shard is not None else flat.data,
        "gathered": getattr(flat, "_full_param_padded", None),
        "gradient": flat.grad if flat.grad is not None else getattr(flat, "_saved_grad_shard", None),
    }


def ddp_bucket_bytes(module: nn.Module) -> list[int] | None:
    """Bytes of each bucket of a DistributedDataParallel, as they are now; None where torch does not say."""
    ask = getattr(module, "_get_ddp_logging_data", None)
    if ask is None:
        missing.add("DistributedDataParallel._get_ddp_logging_data")
        return None
    data = ask()
    text = str(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or "")
    sizes = [part.strip() for part in text.split(",")]
    return [int(size) for size in sizes if size.isdigit()]


def ddp_bucket_members(module: nn.Module) -> list[list[int]]:
    """Indices of the parameters (of those that need a gradient, in order) in each bucket, as they are reduced; [] before torch tells.

    It does so once it has cut the buckets anew, in the order in which gradients became ready: behind the first backward.
    """
    ask = getattr(module, "_get_ddp_logging_data", None)
    text = "" if ask is None else str(ask().get("rebuilt_per_bucket_param_indices") or "")
    found = [[int(word) for word in part.split() if word.isdigit()] for part in text.split(",")]
    return found if all(found) else []


def shards_state(*optimizers: Any) -> bool:
    """Whether one of these is torch's ZeroRedundancyOptimizer."""
    return any(type(optimizer).__name__ == "ZeroRedundancyOptimizer" for optimizer in optimizers)


def calls_step_hooks(optimizer: Any) -> bool:
    """Whether torch calls the hooks of optimizers around this one's step: not where a wrapper left out torch's ``__init__``."""
    return bool(getattr(type(optimizer).step, "hooked", False))


def deepspeed_groups(engine: Any) -> list[tuple[Any, str]]:
    """(process group, what it is for) of DeepSpeed's engine."""
    stage = deepspeed_stage(engine)
    group = getattr(engine, "data_parallel_group", None) or getattr(engine, "seq_data_parallel_group", None)
    if group is None and torch.distributed.is_initialized():
        group = torch.distributed.group.WORLD
    return [(group, "dp_shard" if stage else "dp_replicate")]


def deepspeed_stage(engine: Any) -> int:
    """DeepSpeed's stage of ZeRO, 0 where it shards nothing."""
    return int(getattr(engine, "zero_optimization_stage", lambda: 0)())


def ddp_bucket_cap(module: nn.Module) -> float:
    """``bucket_cap_mb`` of a DistributedDataParallel [MiB]; 0 where torch does not say."""
    return float(getattr(module, "bucket_bytes_cap", 0)) / 2**20


def is_member(group: Any) -> bool:
    """Whether it is a process group that this rank is in and that has not been destroyed."""
    return group in all_groups()


# Tensors, stages -----------------------------------------------------------------------------------------------------


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor, or of a parameter of DeepSpeed's stage 3, on this rank (without waiting for a collective); else the tensor."""
    partition = getattr(tensor, "ds_tensor", None)
    inner = getattr(tensor, "_local_tensor", tensor if partition is None else partition)
    elem = getattr(inner, "elem", inner)  # an asynchronous collective's result
    return elem if isinstance(elem, torch.Tensor) else tensor


def full_shape(tensor: torch.Tensor) -> list[int]:
    """Shape of a parameter that is not sharded, or before it was: under DeepSpeed's stage 3 it is empty while it is not gathered."""
    return [int(length) for length in getattr(tensor, "ds_shape", tensor.shape)]


def pipeline_stage_type() -> Any:
    """The base class of pipeline stages."""
    return _lookup("torch.distributed.pipelining.stage", "_PipelineStageBase")


def pipeline_schedule_type() -> Any:
    """The base class of pipeline schedules."""
    return _lookup("torch.distributed.pipelining.schedules", "_PipelineSchedule")


def stages_of_schedule(schedule: Any) -> list[Any]:
    """The stages on this rank that a schedule runs."""
    several = getattr(schedule, "_stages", None)
    one = getattr(schedule, "_stage", None)
    return list(several) if several else [one] if one is not None else []


def micro_batches_of(schedule: Any) -> int:
    """Micro-batches of one step of a schedule; 0 where it does not tell."""
    return int(getattr(schedule, "_n_microbatches", 0))


def pipeline_group(stage: Any) -> Any:
    """The process group over whose ranks the stages are spread: the world where the stage was given none."""
    group = getattr(stage, "group", None)
    return torch.distributed.group.WORLD if group is None else group


def pipeline_schedules() -> Any:
    """The module with the schedules, in which the range of an action gets its name."""
    return _lookup("torch.distributed.pipelining.schedules")


def pipeline_chunk(action: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | None, bool]:
    """(micro-batch, whether backward is whole) from the arguments of a stage's ``..._one_chunk``; None where it has no number.

    Behind the number ``backward_one_chunk`` has (loss, full_backward, last_backward).
    """
    given = args[0] if args else kwargs.get("fwd_chunk_id" if action == "F" else "bwd_chunk_id")
    full = args[2] if len(args) > 2 else kwargs.get("full_backward", True)
    return (given if isinstance(given, int) else None), bool(full)


def pipeline_hands_over(stage: Any, forward: bool) -> bool:
    """Whether what a stage gets comes from another stage of this rank, without a message."""
    of_stage, own = getattr(stage, "stage_index_to_group_rank", {}), getattr(stage, "group_rank", None)
    return bool(of_stage.get(getattr(stage, "stage_index", 0) + (-1 if forward else 1)) == own)


def pipeline_messages(stage: Any, forward: bool, chunk: int) -> list[torch.Tensor]:
    """What a stage gets for one micro-batch: hidden states, or gradients; [] where it gets nothing. It keeps them to the next step."""
    entries = getattr(stage, "args_recv_info" if forward else "grad_recv_info", {}).get(chunk, ())
    buffers = [getattr(entry, "buffer", None) for entry in entries]
    return [local(buffer) for buffer in buffers if isinstance(buffer, torch.Tensor)]


def keep_history(entries: int) -> None:
    """Let the CUDA allocator keep its last events with their Python stacks; 0: no more."""
    start = _lookup("torch.cuda.memory", "_record_memory_history")
    if start is None:
        return
    if entries:
        start(context="all", stacks="python", max_entries=entries)
    else:
        start(enabled=None)


def history() -> Any:
    """What the CUDA allocator has kept, and its segments, as plain values; None where torch does not say."""
    ask = _lookup("torch.cuda.memory", "_snapshot")
    return ask() if ask is not None else None


def history_is_on() -> bool:
    """Whether the CUDA allocator records its history now."""
    ask = _lookup("torch._C", "_cuda_isHistoryEnabled")
    return bool(ask()) if ask is not None else False


def pinned_host_bytes() -> int:
    """The most that torch's allocator of pinned host memory has held; 0 where it tells nothing."""
    ask = getattr(torch.cuda.memory, "host_memory_stats", None)
    try:
        return int(ask().get("allocated_bytes.peak", 0)) if ask is not None else 0
    except RuntimeError:
        return 0


def processes_on(index: int) -> dict[int, int]:
    """Process -> bytes that it holds on a device, by NVML; {} where NVML or its Python package is not there, or does not tell."""
    handle = getattr(torch.cuda, "_get_pynvml_handler", None)
    if handle is None:
        return {}
    try:
        nvml: Any = importlib.import_module("pynvml")
        listed = nvml.nvmlDeviceGetComputeRunningProcesses(handle(index))
        return {int(p.pid): int(p.usedGpuMemory) for p in listed if p.usedGpuMemory is not None}
    except Exception:  # noqa: BLE001 - a driver's own errors, whatever they are called
        return {}


def mark_allocations(text: str) -> str:
    """Write ``text`` on every CUDA allocation from now on ('' ends it); what was written before. Nothing where torch cannot."""
    mark, ask = (getattr(torch.cuda.memory, name, None) for name in ("_set_memory_metadata", "_get_memory_metadata"))
    if mark is None:
        return ""
    before = str(ask()) if ask is not None else ""
    mark(text)
    return before


def group_by_name(name: str) -> Any:
    """The process group that functional collectives call ``name``; None where there is none."""
    resolve = _lookup("torch.distributed.distributed_c10d", "_resolve_process_group")
    if resolve is None:
        return None
    try:
        return resolve(name)
    except (RuntimeError, ValueError, KeyError):
        return None


def unboxed_group(value: Any) -> Any:
    """A process group that the dispatcher handed over as a script object; None where it is none."""
    kind = process_group_type()
    if kind is None or value is None:
        return None
    if isinstance(value, kind):
        return value
    try:
        return kind.unbox(value)
    except (RuntimeError, TypeError, AttributeError):
        return None
