"""How frameworks pad what they shard. Sizes are elements; W is the number of ranks that share a tensor.

framework     a rank stores                                                       source
torch_fsdp2   ceil(d0/W) rows of every parameter, ranks with fewer rows too       torch/distributed/fsdp/_fully_shard/_fsdp_param.py
torch_fsdp1   1/W of the unit's flat parameter, padded to a multiple of W; with   torch/distributed/fsdp/_flat_param.py
              use_orig_params every parameter starts at a multiple of 16 bytes
deepspeed     stage 3: ceil(n/W) of every parameter; stages 1 and 2: 1/W of all   deepspeed/runtime/zero/partition_parameters.py,
              parameters in a row, padded to a multiple of 2 W                    stage_1_and_2.py
megatron      1/d of every bucket; parameters start at multiples of 64 elements,  megatron/core/distributed/param_and_grad_buffer.py
              buckets end at multiples of lcm(d, 128)
torch_zero    whole parameters, the largest first to the rank with least so far   torch/distributed/optim/zero_redundancy_optimizer.py
buckets       stages 1 and 2 by hand: 1/W of every gradient bucket, each padded   workloads/zero2.py
              to a multiple of W
none          ceil(n/W) of all parameters in a row
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tracekit.errors import UsageError
from tracekit.estimate.parameters import Parameter, elements_of

FRAMEWORKS = ("torch_fsdp2", "torch_fsdp1", "deepspeed", "megatron", "torch_zero", "buckets", "none")
#: FSDP1 lines parameters up to this many bytes; Megatron to these many elements.
FSDP1_ALIGNMENT_BYTES, MEGATRON_START, MEGATRON_END = 16, 64, 128


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below n."""
    return -(-n // multiple) * multiple


def fsdp2_rows(parameter: Parameter, w: int) -> tuple[int, int]:
    """(length of the dimension that FSDP2 shards, elements of one slice of it).

    Dimension 0; of stacked experts that are fewer than the W ranks dimension 1, as torchtitan does (models/llama4/parallelize.py). A scalar
    counts as one row.
    """
    dim = 1 if parameter.experts > 1 and parameter.shape[0] < w else 0
    rows = parameter.shape[dim] if parameter.shape else 1
    return rows, parameter.elements // rows if rows else 0


def fsdp2_padded(parameter: Parameter, w: int) -> int:
    """Elements of a parameter as it travels and is stored over all ranks: W ceil(d0/W) * the rest of its shape."""
    rows, rest = fsdp2_rows(parameter, w)
    return w * -(-rows // w) * rest


def fsdp2_local(parameter: Parameter, w: int, rank: int) -> int:
    """Elements of the rows that really belong to a rank: what the optimizer keeps state for; 0 for a rank behind the last row."""
    rows, rest = fsdp2_rows(parameter, w)
    each = -(-rows // w)
    return max(0, min(each, rows - rank * each)) * rest


def fsdp1_starts(parameters: Sequence[Parameter], compute_bytes: int, use_orig_params: bool) -> tuple[list[int], int]:
    """(where each parameter starts in the flat parameter, its length before it is padded for W)."""
    step = max(1, FSDP1_ALIGNMENT_BYTES // compute_bytes) if use_orig_params else 1
    starts, total = [], 0
    for parameter in parameters:
        total = round_up(total, step)
        starts.append(total)
        total += parameter.elements
    return starts, total


def fsdp1_padded(parameters: Sequence[Parameter], w: int, compute_bytes: int, use_orig_params: bool) -> int:
    """Elements of a unit's flat parameter over all ranks."""
    return round_up(fsdp1_starts(parameters, compute_bytes, use_orig_params)[1], w)


def fsdp1_local(parameters: Sequence[Parameter], w: int, compute_bytes: int, use_orig_params: bool, rank: int) -> int:
    """Elements for which a rank's optimizer keeps state: with use_orig_params those of parameters; else the whole shard, padding too."""
    starts, _ = fsdp1_starts(parameters, compute_bytes, use_orig_params)
    shard = fsdp1_padded(parameters, w, compute_bytes, use_orig_params) // w
    if not use_orig_params:
        return shard
    low, high = rank * shard, (rank + 1) * shard
    return sum(max(0, min(high, start + p.elements) - max(low, start)) for start, p in zip(starts, parameters, strict=True))


def deepspeed_padded(parameters: Sequence[Parameter], w: int, stage: int) -> int:
    """Elements over all ranks: stage 3 pads each parameter to a multiple of W, stages 1 and 2 all in a row to one of 2 W."""
    if stage == 3:
        return sum(round_up(p.elements, w) for p in parameters)
    return round_up(elements_of(parameters), 2 * w)


def megatron_padded(parameters: Sequence[Parameter], d: int, bucket_elements: int | None = None) -> int:
    """Elements of Megatron's gradient buffer with the distributed optimizer over d ranks, filled in reverse order.

    A bucket is closed when it holds at least ``bucket_elements`` (None: one bucket): its end is a multiple of lcm(d, 128).
    """
    end_step = math.lcm(d, MEGATRON_END)
    total = bucket_start = 0
    for parameter in reversed(parameters):
        total = round_up(total, MEGATRON_START) + parameter.elements
        if bucket_elements is not None and total - bucket_start >= bucket_elements:
            total = bucket_start = round_up(total, end_step)
    return round_up(total, end_step)


def torch_zero_partition(parameters: Sequence[Parameter], w: int) -> list[list[Parameter]]:
    """Parameters of each rank: the largest first, each to the rank that has the fewest elements so far (the lowest of equal ones)."""
    parts: list[list[Parameter]] = [[] for _ in range(w)]
    ranks = [(0, rank) for rank in range(w)]
    for parameter in sorted(parameters, key=lambda p: -p.elements):
        size, rank = heapq.heappop(ranks)
        parts[rank].append(parameter)
        heapq.heappush(ranks, (size + parameter.elements, rank))
    return parts


@dataclass(frozen=True)
class Rules:
    """Which framework pads, and what its rules depend on: bytes of a gathered element and use_orig_params (FSDP1), stage (DeepSpeed)."""

    framework: str
    compute_bytes: int = 4
    use_orig_params: bool = True
    stage: int = 3

    def __post_init__(self) -> None:
        if self.framework not in FRAMEWORKS:
            raise UsageError(f"there are no padding rules of {self.framework!r}", f"choose one of {', '.join(FRAMEWORKS)}")


def padded(rules: Rules, parameters: Sequence[Parameter], w: int) -> int:
    """Elements of a unit over all ranks, as it is stored and as it travels. A group of one is padded as the framework does."""
    if rules.framework == "torch_fsdp2":
        return sum(fsdp2_padded(p, w) for p in parameters)
    if rules.framework == "torch_fsdp1":
        return fsdp1_padded(parameters, w, rules.compute_bytes, rules.use_orig_params)
    if rules.framework == "deepspeed":
        return deepspeed_padded(parameters, w, rules.stage)
    if rules.framework == "megatron":
        return megatron_padded(parameters, w)
    return elements_of(parameters) if rules.framework == "torch_zero" else round_up(elements_of(parameters), w)


def local_state(rules: Rules, parameters: Sequence[Parameter], w: int, rank: int) -> int:
    """Elements for which the optimizer of rank ``rank`` of W keeps state."""
    if rules.framework == "torch_fsdp2":
        return sum(fsdp2_local(p, w, rank) for p in parameters)
    if rules.framework == "torch_fsdp1":
        return fsdp1_local(parameters, w, rules.compute_bytes, rules.use_orig_params, rank)
    if rules.framework == "torch_zero":
        return elements_of(torch_zero_partition(parameters, w)[rank])
    return padded(rules, parameters, w) // w
