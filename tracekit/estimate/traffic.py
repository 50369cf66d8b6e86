"""Collectives of a rank by class (calls, bytes, the group's size and how far apart its ranks are), and what data parallelism sends.

Gathers of parameters, reductions of gradients: symbols and formulas stand in ``communication``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tracekit.estimate.buckets import ddp_buckets, deepspeed_buckets, deepspeed_limit, zero_buckets
from tracekit.estimate.model_state import row_shard
from tracekit.estimate.padding import round_up
from tracekit.estimate.parameters import Parameter
from tracekit.estimate.plan import WHOLE_STATE, Plan
from tracekit.estimate.units import Unit, units_of

#: Mesh axes, outermost first: where their groups lie, how many ranks apart their members are.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind, size and purpose on one axis in a step of one rank. ``full_bytes`` of one call; ``size`` of the group."""

    axis: str
    purpose: str
    kind: str
    phase: str
    size: int
    stride: int
    calls: int
    full_bytes: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in all calls under the ring algorithm."""
        return self.calls * sent_bytes(self.kind, self.full_bytes, self.size)


def sent_bytes(kind: str, full: int, size: int) -> int:
    """Bytes one rank sends for one call (ring): AG, RS, A2A F(x) S; AR 2 F(x) S; broadcast, reduce, send S; a group of one nothing.

    A share S/x that is no whole number is rounded down: the most that a rank of the ring sends, as ``collectives.semantics`` counts.
    """
    if kind == "send":
        return full
    if size == 1 or kind in ("recv", "barrier"):
        return 0
    share = full - full // size
    return {"all_reduce": 2 * share, "broadcast": full, "reduce": full, "gather": -(-full // size)}.get(kind, share)


def stride_of(plan: Plan, axis: str) -> int:
    """Ranks between neighbours on a mesh axis."""
    sizes = [getattr(plan.mesh, name) for name in AXES]
    result = 1
    for size in sizes[AXES.index(axis) + 1 :]:
        result *= size
    return result


def axis_name(plan: Plan, *axes: str) -> str:
    """Name of the groups over several axes: those longer than 1, joined by ``_``; the first where none is."""
    long = [axis for axis in axes if getattr(plan.mesh, axis) > 1]
    return "_".join(long) or axes[0]


def merged(rows: Sequence[Traffic]) -> list[Traffic]:
    """Rows that differ only in calls put together, in order of first appearance; groups of one and rows without calls left out."""
    calls: dict[tuple[object, ...], int] = {}
    first: dict[tuple[object, ...], Traffic] = {}
    for row in rows:
        if row.calls and (row.size > 1 or row.kind in ("send", "recv")):
            key = (row.axis, row.purpose, row.kind, row.phase, row.size, row.full_bytes)
            calls[key] = calls.get(key, 0) + row.calls
            first.setdefault(key, row)
    return [_with_calls(first[key], count) for key, count in calls.items()]


def _with_calls(row: Traffic, calls: int) -> Traffic:
    return Traffic(row.axis, row.purpose, row.kind, row.phase, row.size, row.stride, calls, row.full_bytes)


def data_parallel(parameters: Sequence[Parameter], plan: Plan) -> list[Traffic]:
    """Traffic of the data-parallel strategy, for the parameters of a rank (as ``memory.rank_memory`` takes them)."""
    units = units_of(parameters, plan)
    if plan.strategy.shards_parameters:
        rows = [row for unit in units for row in _sharded_unit(unit, plan, unit is units[-1])]
        if plan.framework == "deepspeed" and plan.strategy.bucket_cap_mb is not None:
            rows = _deepspeed_reductions(units, parameters, plan, rows)
    elif plan.strategy.name in WHOLE_STATE:
        rows = list(_ddp(parameters, plan))
    else:
        rows = list(_zero(parameters, units, plan))
    return merged(rows)


def _reduces(plan: Plan) -> int:
    """How often a step reduces each gradient."""
    return plan.batch.micro_batches if plan.syncs_each else 1


def _groups(unit: Unit, plan: Plan) -> tuple[tuple[str, int], tuple[str, int]]:
    """(axis and stride of the shard group, those of the replicas) of a unit."""
    if unit.expert:
        near = plan.mesh.expert_stride
        return ("dp_shard_in_ep", near), ("dp_replicate", stride_of(plan, "dp_replicate"))
    inner = "cp" if plan.mesh.dp_shard == 1 else "dp_shard"
    shard = stride_of(plan, "cp") if plan.mesh.cp > 1 else stride_of(plan, inner)
    return (axis_name(plan, "dp_shard", "cp"), shard), ("dp_replicate", stride_of(plan, "dp_replicate"))


def _sharded_unit(unit: Unit, plan: Plan, last: bool) -> Iterator[Traffic]:
    recipe, strategy, m = plan.recipe, plan.strategy, plan.batch.micro_batches
    (axis, stride), (replicas, replica_stride) = _groups(unit, plan)
    whole = unit.padded * recipe.compute
    once = not plan.reshard_after_backward and plan.reshard_after_forward is False
    yield Traffic(axis, "parameter_gather", "all_gather", "forward", unit.w, stride, 1 if once else m, whole)
    after = plan.reshard_after_forward
    root_stays = unit.root and strategy.name != "zero3" and not plan.implementation.root_reshards
    stays = after is False or (last and plan.implementation.last_stays) or root_stays
    if not stays:
        size = unit.w if after is True else min(int(after), unit.w)
        yield Traffic(axis, "parameter_gather", "all_gather", "backward", size, stride, m, whole)
    reduces = _reduces(plan)
    yield Traffic(axis, "gradient_scatter", "reduce_scatter", "backward", unit.w, stride, reduces, unit.padded * recipe.reduce)
    yield Traffic(replicas, "gradient_sync", "all_reduce", "backward", unit.r, replica_stride, reduces, unit.shard * recipe.reduce)


def _ddp(parameters: Sequence[Parameter], plan: Plan) -> Iterator[Traffic]:
    """Dense gradients over all data and context ranks, experts' over those with the same experts; each set has its own buckets."""
    stride = stride_of(plan, "cp") if plan.mesh.cp > 1 else stride_of(plan, "dp_replicate")
    apart = plan.mesh.ep > 1
    dense = [p for p in parameters if not (apart and p.experts)]
    sets = [(axis_name(plan, "dp_replicate", "cp"), stride, plan.replicas, dense)]
    if apart:
        experts = [p for p in parameters if p.experts]
        sets.append(("edp", plan.mesh.expert_stride, plan.expert_replicas, experts))
    for axis, near, size, members in sets:
        cut = ddp_buckets(members, plan.strategy.bucket_cap_mb, gradient_bytes=plan.recipe.gradient)
        seen = [elements * plan.recipe.gradient for elements in plan.buckets]
        for full in seen if seen and not apart else [bucket.bytes for bucket in cut]:
            yield Traffic(axis, "gradient_sync", "all_reduce", "backward", size, near, _reduces(plan), full)


def _zero(parameters: Sequence[Parameter], units: Sequence[Unit], plan: Plan) -> Iterator[Traffic]:
    """Gradients bucket by bucket, reduced to shards (all-reduced by torch's optimizer on top of DDP, and by DeepSpeed); then parameters.

    What was updated comes back bucket by bucket; from DeepSpeed all at once; from torch each parameter by itself.
    """
    recipe, strategy, w, reduces = plan.recipe, plan.strategy, plan.shard, _reduces(plan)
    (axis, stride), _ = _groups(units[0], plan)
    if plan.framework == "torch_zero":
        for bucket in ddp_buckets(parameters, strategy.bucket_cap_mb, gradient_bytes=recipe.gradient):
            yield Traffic(axis, "gradient_sync", "all_reduce", "backward", w, stride, reduces, bucket.bytes)
        for parameter in parameters:
            yield Traffic(axis, "parameter_sync", "broadcast", "optimizer", w, stride, 1, parameter.elements * recipe.parameter)
        return
    for size in _zero_bucket_bytes(parameters, plan):
        elements = round_up(size // recipe.reduce, w)
        if plan.implementation.deepspeed_allreduce:
            yield Traffic(axis, "gradient_sync", "all_reduce", "backward", w, stride, reduces, size)
        else:
            yield Traffic(axis, "gradient_scatter", "reduce_scatter", "backward", w, stride, reduces, elements * recipe.reduce)
        if plan.framework == "buckets":
            yield Traffic(axis, "parameter_sync", "all_gather", "optimizer", w, stride, 1, elements * recipe.parameter)
    if plan.framework != "buckets":
        full = row_shard(parameters, plan, w)[0] * w * recipe.parameter
        yield Traffic(axis, "parameter_sync", "all_gather", "optimizer", w, stride, 1, full)


def _zero_bucket_bytes(parameters: Sequence[Parameter], plan: Plan) -> list[int]:
    """Bytes of every bucket of ZeRO-1 and ZeRO-2. DeepSpeed's, where a limit is given, in elements of four bytes: stage 1 goes forward."""
    strategy, size = plan.strategy, plan.recipe.reduce
    if plan.framework != "deepspeed" or strategy.bucket_cap_mb is None:
        return [bucket.bytes for bucket in zero_buckets(parameters, strategy.bucket_cap_mb, size)]
    order = list(parameters) if strategy.name == "zero1" else list(reversed(parameters))
    return [bucket.bytes * size for bucket in deepspeed_buckets(order, deepspeed_limit(parameters, strategy.bucket_cap_mb))]


def _deepspeed_reductions(units: Sequence[Unit], parameters: Sequence[Parameter], plan: Plan, rows: Sequence[Traffic]) -> list[Traffic]:
    """Stage 3 gathers unit by unit, and reduces bucket by bucket, each parameter padded by itself."""
    cap, w = plan.strategy.bucket_cap_mb, plan.shard
    kept = [row for row in rows if row.purpose != "gradient_scatter"]
    (axis, stride), _ = _groups(units[0], plan)
    size = {parameter.name: round_up(parameter.elements, w) * plan.recipe.reduce for parameter in parameters}
    for bucket in deepspeed_buckets(list(reversed(parameters)), deepspeed_limit(parameters, cap or 0)):
        full = sum(size[name] for name in bucket.names)
        kept.append(Traffic(axis, "gradient_scatter", "reduce_scatter", "backward", w, stride, _reduces(plan), full))
    return kept
