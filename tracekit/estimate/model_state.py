"""Parameters, gradients and optimizer state of one rank, to the byte, with the padding of the framework.

Before padding (ZeRO, arXiv:1910.02054, section 5): N(P+G+O) for DDP, N(P+G+O/W) for ZeRO-1, N(P+(G+O)/W) for ZeRO-2, N(P+G+O)/W for
ZeRO-3 and FSDP; HSDP as FSDP over its shard group, replicas never divide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from tracekit.estimate.buckets import deepspeed_limit, zero_buckets
from tracekit.estimate.padding import Rules, fsdp1_starts, fsdp2_local, local_state, padded
from tracekit.estimate.parameters import Parameter, elements_of
from tracekit.estimate.plan import WHOLE_GRADIENTS, WHOLE_STATE, Plan
from tracekit.estimate.recipe import moment_bytes
from tracekit.estimate.units import Shapes, Unit, parameters_of, shapes_of


@dataclass(frozen=True)
class ModelState:
    """Bytes on one rank. ``gradients`` as kept until the optimizer; ``buckets`` of DDP that cost memory beside them.

    ``gradients_are_buckets``: gradients are views of buckets, which are there from the start. ``tensors``: sizes of everything that stays,
    one by one. ``optimizer_temporaries``: most that a step of the optimizer needs.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    buckets: int
    gradients_are_buckets: bool
    tensors: tuple[int, ...]
    optimizer_temporaries: int

    @property
    def total(self) -> int:
        """All of it [bytes]."""
        return self.parameters + self.gradients + self.optimizer_state + self.buckets


def model_state(units: Sequence[Unit], plan: Plan, order: Sequence[Parameter], shard_rank: int = 0) -> ModelState:
    """Model state of the rank that holds these units; ``order``: their parameters as the optimizer goes through them.

    ``shard_rank``: its place among those that share them.
    """
    strategy, recipe = plan.strategy, plan.recipe
    whole_parameters = not strategy.shards_parameters
    whole_gradients = strategy.name in WHOLE_GRADIENTS
    whole_state = strategy.name in WHOLE_STATE
    everything = sum(unit.elements for unit in units)
    shards = sum(unit.shard for unit in units)
    states = sum(unit.state for unit in units)
    row = row_shard(order, plan, plan.shard, shard_rank % plan.shard) if row_sharded(plan) else None
    shards, states = row or (shards, states)
    parameters = everything if whole_parameters else shards
    if row is not None and plan.framework == "buckets":
        parameters = shards * plan.shard  # flat buffers, one a bucket
    flat = row is not None and whole_gradients and plan.framework == "buckets" and strategy.gradient_as_bucket_view
    gradients = parameters if flat else everything if whole_gradients else shards
    state = everything if whole_state else states
    zero = strategy.name == "zero1" and plan.framework == "torch_zero"  # an optimizer on top of DDP
    ddp = zero or (strategy.name == "ddp" and not plan.implementation.averages_after)
    views = plan.framework == "megatron" or flat or (ddp and strategy.gradient_as_bucket_view)  # Megatron's gradients lie in one buffer
    buckets = everything * recipe.gradient if ddp and not views else _reserved_bucket(plan, order)
    return ModelState(
        parameters * recipe.parameter,
        gradients * recipe.gradients,
        state * recipe.optimizer_state,
        buckets,
        views,
        tuple(_tensors(units, plan, buckets, row, order)),
        optimizer_temporaries(units, plan, state, order),
    )


def _reserved_bucket(plan: Plan, order: Sequence[Parameter]) -> int:
    """One bucket of gradients that DeepSpeed's stage 3 allocates when it starts (``__ipg_bucket_flat_buffer`` of its stage3.py)."""
    strategy = plan.strategy
    if plan.framework != "deepspeed" or not strategy.shards_parameters or strategy.bucket_cap_mb is None:
        return 0
    return deepspeed_limit(order, strategy.bucket_cap_mb) * plan.recipe.reduce


def row_sharded(plan: Plan) -> bool:
    """Whether ranks share all parameters in a row: ZeRO-1 and ZeRO-2 over more than one rank."""
    return plan.strategy.name in ("zero1", "zero2") and plan.shard > 1


def bucket_shards(parameters: Sequence[Parameter], plan: Plan, w: int) -> list[int]:
    """Elements of every bucket on one of ``w`` ranks, padding too."""
    buckets = zero_buckets(parameters, plan.strategy.bucket_cap_mb, plan.recipe.reduce)
    return [-(-(bucket.bytes // plan.recipe.reduce) // w) for bucket in buckets]


def row_shard(parameters: Sequence[Parameter], plan: Plan, w: int, rank: int = 0) -> tuple[int, int]:
    """Elements of (gradients, optimizer state) on one rank of ZeRO-1 and ZeRO-2, which divide all parameters in a row, not unit by unit."""
    framework = plan.framework
    if framework == "buckets":
        each = sum(bucket_shards(parameters, plan, w))
        return each, each
    rules = Rules(framework, plan.recipe.compute, plan.strategy.use_orig_params, 1)
    return -(-padded(rules, parameters, w) // w), local_state(rules, parameters, w, rank)


def _tensors(units: Sequence[Unit], plan: Plan, buckets: int, row: tuple[int, int] | None, order: Sequence[Parameter]) -> Iterator[int]:
    """Sizes of the tensors that stay, in the order in which they are made: parameters, buckets, gradients, optimizer state.

    ``row``: elements of gradients and state where they are shards of all parameters in a row, each one tensor.
    """
    strategy, recipe = plan.strategy, plan.recipe
    if row is not None and plan.framework == "buckets":  # one flat buffer for each
        yield from (shard * plan.shard * recipe.parameter for shard in bucket_shards(order, plan, plan.shard))
    else:
        for unit in units:
            yield from _stored(unit, plan, not strategy.shards_parameters, recipe.parameter)
    if buckets:
        yield buckets
    one_gradient = plan.framework == "torch_fsdp2"  # all gradients of a unit are views of one reduce-scatter output
    for unit in units:
        for size in (recipe.gradient, recipe.accumulation):
            if size and row is not None and strategy.name == "zero2":
                yield row[0] * size if unit is units[0] else 0
            elif size and one_gradient:
                yield unit.shard * size
            elif size:
                yield from _stored(unit, plan, strategy.name in WHOLE_GRADIENTS, size)
    for unit in units:
        for size in moment_bytes(recipe):
            if row is not None:
                yield row[1] * size if unit is units[0] else 0
            else:
                yield from _stored(unit, plan, strategy.name in WHOLE_STATE, size, state=True)


def _stored(unit: Unit, plan: Plan, whole: bool, size: int, state: bool = False) -> Iterator[int]:
    """Tensors of a unit with ``size`` bytes an element: one a parameter where each is stored on its own, else one for all."""
    framework = plan.framework
    if whole or (unit.w == 1 and framework in ("none", "torch_fsdp2", "torch_zero")):
        yield from (elements * size for elements in _elements(shapes_of(unit.parameters), 1, "none", state))
    elif framework in ("torch_fsdp2", "deepspeed") and plan.strategy.shards_parameters:
        yield from (elements * size for elements in _elements(shapes_of(unit.parameters), unit.w, framework, state))
    else:
        yield (unit.state if state else unit.shard) * size


@lru_cache(maxsize=4096)
def _elements(shapes: Shapes, w: int, framework: str, state: bool) -> tuple[int, ...]:
    """Elements of each parameter on rank 0 of W, where each is stored by itself: as stored, or those with optimizer state."""
    rules = Rules(framework)
    if state:
        return tuple(local_state(rules, [parameter], w, 0) for parameter in parameters_of(shapes))
    return tuple(padded(rules, [parameter], w) // w for parameter in parameters_of(shapes))


def optimizer_temporaries(units: Sequence[Unit], plan: Plan, state: int, order: Sequence[Parameter]) -> int:
    """Most that Adam's step needs for a moment [bytes] (torch/optim/adam.py; the loop checked against torch 2.13).

    foreach: the square roots of all second moments at once. loop: two copies of one parameter's while the last parameter's is still there:
    the largest of 2 n_i + n_(i-1). fused, sgd and momentum: nothing.
    """
    recipe, loop = plan.recipe, plan.implementation.optimizer_loop
    if len(recipe.moments) < 2 or loop == "fused":
        return 0
    if loop == "auto":
        loop = "foreach" if plan.device == "cuda" and plan.framework != "torch_fsdp2" else "loop"
    if loop == "foreach":
        return state * recipe.moments[-1]
    if row_sharded(plan) and plan.framework == "buckets":
        sizes = [0, *bucket_shards(order, plan, plan.shard)]
    else:
        local = _local_elements(units, plan)
        sizes = [0, *(local[parameter.name] for parameter in order if local.get(parameter.name))]
    return max((2 * now + before for before, now in pairwise(sizes)), default=0) * recipe.moments[-1]


def _local_elements(units: Sequence[Unit], plan: Plan) -> dict[str, int]:
    """Elements of each parameter whose state this rank keeps (rank 0 of the shard group)."""
    strategy = plan.strategy
    found: dict[str, int] = {}
    for unit in units:
        if strategy.name in WHOLE_STATE or unit.w == 1:
            found.update({parameter.name: parameter.elements for parameter in unit.parameters})
        elif plan.framework == "torch_fsdp1" and strategy.use_orig_params:
            starts, _ = fsdp1_starts(unit.parameters, plan.recipe.compute, True)
            for start, parameter in zip(starts, unit.parameters, strict=True):
                found[parameter.name] = max(0, min(unit.shard, start + parameter.elements) - start)
        elif plan.framework == "torch_fsdp2":
            found.update({parameter.name: fsdp2_local(parameter, unit.w, 0) for parameter in unit.parameters})
        else:
            found[unit.parameters[0].name] = unit.state
    return found


def unsharded(parameters: Sequence[Parameter], plan: Plan) -> int:
    """N(P+G+O) of these parameters [bytes]: what one rank would hold without data-parallel sharding."""
    return elements_of(parameters) * plan.recipe.total
