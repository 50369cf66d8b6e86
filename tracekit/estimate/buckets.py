"""The gradient buckets of DistributedDataParallel, as torch assigns them.

Source: ``_compute_bucket_assignment_by_size`` in torch/csrc/distributed/c10d/reducer.cpp, and the limits that
torch/nn/parallel/distributed.py hands to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tracekit.estimate.parameters import Parameter, largest

MIB = 2**20
#: Limits of the first bucket and of all others [bytes], where the user gives none.
FIRST_BUCKET_BYTES, BUCKET_BYTES = MIB, 25 * MIB


@dataclass(frozen=True)
class Bucket:
    """Names of the gradients that are reduced at once, and their bytes."""

    names: tuple[str, ...]
    bytes: int


def limits(bucket_cap_mb: float | None) -> list[int]:
    """Limits of the buckets in turn, the last one for all that follow [bytes].

    By default a small first one, so that communication begins early; a given ``bucket_cap_mb`` [MiB] holds for all.
    """
    return [FIRST_BUCKET_BYTES, BUCKET_BYTES] if bucket_cap_mb is None else [int(bucket_cap_mb * MIB)]


def assign(parameters: Sequence[Parameter], sizes: Sequence[int], gradient_bytes: int | None = None) -> list[Bucket]:
    """Buckets of gradients that are ready in the order of ``parameters``: one is closed as soon as it holds at least its limit.

    ``sizes`` are the limits in turn [bytes], the last for all further buckets. Gradients of different element sizes never share a bucket:
    each size fills its own, with its own turn of limits. Parameters that need no gradient have none.
    """
    open_names: dict[int, list[str]] = {}
    filled: dict[int, int] = {}
    turn: dict[int, int] = {}
    closed: list[tuple[int, Bucket]] = []
    first_index: dict[int, int] = {}
    for index, parameter in enumerate(parameters):
        if not parameter.trainable:
            continue
        kind = gradient_bytes or parameter.element_bytes
        first_index.setdefault(kind, index)
        open_names.setdefault(kind, []).append(parameter.name)
        filled[kind] = filled.get(kind, 0) + parameter.elements * kind
        if filled[kind] >= sizes[min(turn.get(kind, 0), len(sizes) - 1)]:
            closed.append((first_index.pop(kind), Bucket(tuple(open_names.pop(kind)), filled.pop(kind))))
            turn[kind] = turn.get(kind, 0) + 1
    closed += [(first_index[kind], Bucket(tuple(names), filled[kind])) for kind, names in open_names.items()]
    return [bucket for _, bucket in sorted(closed, key=lambda entry: entry[0])]


def ddp_buckets(
    parameters: Sequence[Parameter],
    bucket_cap_mb: float | None = None,
    first_iteration: bool = False,
    find_unused_parameters: bool = False,
    gradient_bytes: int | None = None,
) -> list[Bucket]:
    """Buckets in the order in which they are reduced, for gradients that become ready in reverse order of ``parameters``.

    The first iteration has one bucket for each element type. After it torch cuts anew, in the order in which gradients became ready. With
    ``find_unused_parameters`` it never does so: buckets are cut in the order of the parameters, and reduced from the last one.
    """
    if find_unused_parameters:
        return list(reversed(assign(parameters, limits(bucket_cap_mb), gradient_bytes)))
    backwards = list(reversed(parameters))
    return assign(backwards, [2**63] if first_iteration else limits(bucket_cap_mb), gradient_bytes)


def deepspeed_buckets(parameters: Sequence[Parameter], most: int) -> list[Bucket]:
    """Buckets of DeepSpeed in the order of ``parameters``; ``bytes`` counts elements here.

    One is closed before a gradient that would bring it above ``most`` elements (``reduce_bucket_size`` in
    deepspeed/runtime/zero/stage_1_and_2.py).
    """
    names: list[list[str]] = [[]]
    filled = [0]
    for parameter in parameters:
        if parameter.trainable:
            if filled[-1] + parameter.elements > most:
                names.append([])
                filled.append(0)
            names[-1].append(parameter.name)
            filled[-1] += parameter.elements
    return [Bucket(tuple(members), size) for members, size in zip(names, filled, strict=True) if members]


def deepspeed_limit(parameters: Sequence[Parameter], bucket_cap_mb: float) -> int:
    """Elements that a bucket of DeepSpeed holds at most: the limit [MiB of four-byte elements], or the largest gradient."""
    return max(int(bucket_cap_mb * MIB / 4), largest(parameters))


def zero_buckets(parameters: Sequence[Parameter], bucket_cap_mb: float | None = None, gradient_bytes: int | None = None) -> list[Bucket]:
    """Buckets of ZeRO-1 and ZeRO-2: gradients in reverse order of ``parameters``, every one up to ``bucket_cap_mb`` (25 MiB by default)."""
    limit = BUCKET_BYTES if bucket_cap_mb is None else int(bucket_cap_mb * MIB)
    return assign(list(reversed(parameters)), [limit], gradient_bytes)
