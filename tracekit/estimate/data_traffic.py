"""What data parallelism sends: gathers of parameters, reductions of gradients. Symbols and formulas: ``communication``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tracekit.estimate.buckets import ddp_buckets, deepspeed_buckets, deepspeed_limit, zero_buckets
from tracekit.estimate.model_state import row_shard
from tracekit.estimate.padding import round_up
from tracekit.estimate.parameters import Parameter
from tracekit.estimate.plan import WHOLE_STATE, Plan
from tracekit.estimate.traffic import Traffic, axis_name, merged, stride_of
from tracekit.estimate.units import Unit, units_of


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
    return plan.batch.micro_batches if plan.strategy.syncs_each else 1


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
    once = not strategy.reshard_after_backward and strategy.reshard_after_forward is False
    yield Traffic(axis, "parameter_gather", "all_gather", "forward", unit.w, stride, 1 if once else m, whole)
    after = strategy.reshard_after_forward
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
