"""A plan from plain values: what a file or the command line says, checked key by key.

model: llama3-8b                  a preset, the path of a config.json, or sizes; with ``preset`` among them, a preset with some changed
mesh: {pp: 2, dp_shard: 8, tp: 4}     or pp=2,dp_shard=8,tp=4
strategy: fsdp2                   or its options: {name: fsdp2, reshard_after_forward: false}
recipe: fsdp_bf16                 or its bytes: {name: mine, parameter: 4, compute: 2, ...}
optimizer: adamw
batch: {micro_batch: 1, global_batch: 64, recompute: full}    micro_batches instead of global_batch
hardware: h100                    or {preset: h100, memory_bytes: 64000000000}
implementation: torch             (megatron with its recipes) or its habits: {name: megatron, norm_kernel: composite}
schedule: 1f1b                    and all other fields of ``plan.Plan``
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any

from tracekit.errors import UsageError, choose
from tracekit.estimate.hardware import NETWORKS, Hardware, Link, hardware
from tracekit.estimate.huggingface import read_config
from tracekit.estimate.plan import IMPLEMENTATIONS, Batch, Implementation, MeshSizes, Plan, Strategy
from tracekit.estimate.presets import preset
from tracekit.estimate.recipe import Recipe, recipe
from tracekit.estimate.shape import LatentAttention, ModelShape
from tracekit.estimate.time import Assumptions
from tracekit.mesh.mesh import parse_mesh

#: No size of a real model or job is larger; what is was typed wrong, and would only cost time and memory here.
MOST = {"layers": 10_000, "micro_batches": 1_000_000, "virtual_stages": 1_000}
MOST_RANKS, MOST_NUMBER = 10_000_000, 10**15
_PARTS = ("model", "mesh", "strategy", "recipe", "optimizer", "batch", "implementation", "hardware", "network")
_OWN = (*_PARTS, "efficiency", "overlap", "latency")
#: Habits of an implementation may stand beside the plan's own keys, and among the strategy's.
_HABITS = tuple(f.name for f in fields(Implementation) if f.name != "name")
#: Fields of the plan that only a recording tells.
_MEASURED = ("buckets", "expert_loads")


@dataclass(frozen=True)
class Spec:
    """What is to be estimated."""

    shape: ModelShape
    plan: Plan
    hardware: Hardware  # one device and its links
    assumptions: Assumptions  # of times


def spec_of(values: Mapping[str, Any]) -> Spec:
    """The plan that ``values`` describe. UsageError names the key that is wrong and what could stand there."""
    settable = [f.name for f in fields(Plan) if f.name not in (*_OWN, *_MEASURED)]
    only(values, [*_OWN, *settable, *_HABITS], "the plan")
    shape = shape_of(values.get("model"))
    mesh = mesh_of(values.get("mesh", {}))
    given, habits = _without_habits(values.get("strategy"))
    strategy = _default_strategy(mesh) if given is None else strategy_of(given, "strategy")
    mesh = _placed(mesh, strategy)
    batch, global_batch = _batch(values.get("batch", {}))
    if global_batch is not None:
        batch = replace(batch, micro_batches=_micro_batches(global_batch, batch.micro_batch, mesh))
    chosen = _recipe(values.get("recipe", "fsdp_bf16_fp32_reduce"), values.get("optimizer", "adamw"))
    rest = {name: values[name] for name in settable if name in values}
    usual = "megatron" if chosen.name.startswith("megatron") else "torch"
    habits |= {name: values[name] for name in _HABITS if name in values}
    how_made = _changed(implementation_of(values.get("implementation", usual), "implementation"), habits, "the plan")
    own = {"mesh": mesh, "strategy": strategy, "recipe": chosen, "batch": batch, "implementation": how_made}
    plan = built(Plan, {**own, **rest}, "the plan")
    how = {key: values[key] for key in ("efficiency", "overlap", "latency") if key in values}
    return Spec(shape, plan, _hardware(values.get("hardware", "h100"), values.get("network")), assumptions_of(how))


def shape_of(value: Any) -> ModelShape:
    """A preset's name, or a mapping of sizes."""
    if value is None:
        raise UsageError("no model is given", "name a preset (llama3-8b) or give its sizes")
    if isinstance(value, str):
        return _named(value)
    given = _mapping(value, "model")
    base = _named(_text(given["preset"], "model: preset")) if "preset" in given else None
    sizes = {key: item for key, item in given.items() if key != "preset"}
    if isinstance(sizes.get("latent"), Mapping):
        sizes["latent"] = built(LatentAttention, _mapping(sizes["latent"], "model: latent"), "model: latent")
    if base is None:
        shape: ModelShape = built(ModelShape, sizes, "model")
        return shape
    return _resized(base, sizes)


def _named(value: str) -> ModelShape:
    """A known model, or the shape in a ``config.json``."""
    return read_config(value) if value.lower().endswith(".json") else preset(value)


def _resized(base: ModelShape, sizes: Mapping[str, Any]) -> ModelShape:
    """The shape with other sizes; those that followed from the old ones follow from the new ones."""
    follow = {"kv_heads": base.heads, "head_dim": base.hidden // base.heads, "expert_ffn": base.ffn}
    rest = {name: 0 for name, size in follow.items() if getattr(base, name) == size and name not in sizes}
    shape: ModelShape = _changed(base, {**rest, **sizes}, "model")
    return shape


def mesh_of(value: Any) -> MeshSizes:
    """``pp=2,tp=4`` or a mapping; ``dp`` and ``fsdp`` are other names of dp_shard, ``ddp`` of dp_replicate."""
    if isinstance(value, str):
        value = {axis.name: axis.size for axis in parse_mesh(value)} if value.strip() else {}
    names = {"dp": "dp_shard", "fsdp": "dp_shard", "ddp": "dp_replicate"}
    given: dict[str, Any] = {}
    for key, size in _mapping(value, "mesh").items():
        name = names.get(key, key)
        if name in given:
            raise UsageError(f"mesh: axis {name} is given twice", "give each axis once")
        given[name] = size
    mesh: MeshSizes = built(MeshSizes, given, "mesh")
    if mesh.world > MOST_RANKS:
        raise UsageError(f"a mesh of {mesh.world} ranks", f"give at most {MOST_RANKS}")
    return mesh


def assumptions_of(values: Mapping[str, Any]) -> Assumptions:
    """Efficiency, overlap and where latencies come from."""
    how: Assumptions = built(Assumptions, values, "the plan")
    if not 0 < how.efficiency <= 1:
        raise UsageError(f"an efficiency of {how.efficiency}", "give a share above 0 and at most 1")
    if not 0 <= how.overlap <= 1:
        raise UsageError(f"an overlap of {how.overlap}", "give a share from 0 to 1")
    if how.latency not in ("preset", "nccl"):
        raise UsageError(f"there are no latencies called {how.latency!r}", "choose preset or nccl")
    return how


def _without_habits(value: Any) -> tuple[Any, dict[str, Any]]:
    """(what is given of the strategy, habits of the implementation that stand among it)."""
    if not isinstance(value, Mapping):
        return value, {}
    habits = {key: item for key, item in value.items() if key in _HABITS}
    return {key: item for key, item in value.items() if key not in _HABITS}, habits


def strategy_of(value: Any, where: str) -> Strategy:
    """A strategy's name, or a mapping of its options."""
    if isinstance(value, str):
        return Strategy(value)
    strategy: Strategy = built(Strategy, _mapping(value, where), where)
    return strategy


def implementation_of(value: Any, where: str) -> Implementation:
    """The name of an implementation, or a mapping of its habits with the name of the one that they change (torch)."""
    given = {"name": value} if isinstance(value, str) else _mapping(value, where)
    name = _text(given.get("name", "torch"), f"{where}: name")
    if name not in IMPLEMENTATIONS:
        raise UsageError(f"there is no implementation called {name[:80]!r}", choose(name, IMPLEMENTATIONS))
    made: Implementation = _changed(IMPLEMENTATIONS[name], given, where)
    return made


def _default_strategy(mesh: MeshSizes) -> Strategy:
    if mesh.dense_ranks == 1:
        return Strategy("none")
    return Strategy("hsdp" if mesh.dp_replicate > 1 and mesh.dp_shard > 1 else "ddp" if mesh.dp_replicate > 1 else "fsdp2")


def _placed(mesh: MeshSizes, strategy: Strategy) -> MeshSizes:
    """DDP has replicas only: a size given as dp or dp_shard is meant as dp_replicate."""
    if strategy.name == "ddp" and mesh.dp_shard > 1 and mesh.dp_replicate == 1:
        return replace(mesh, dp_replicate=mesh.dp_shard, dp_shard=1)
    return mesh


def _batch(value: Any) -> tuple[Batch, int | None]:
    given = dict(_mapping(value, "batch"))
    total = given.pop("global_batch", None)
    if total is not None and "micro_batches" in given:
        raise UsageError("batch: both global_batch and micro_batches are given", "give one of them; the other follows")
    batch: Batch = built(Batch, given, "batch")
    return batch, None if total is None else _number(total, "batch: global_batch")


def _micro_batches(total: int, micro_batch: int, mesh: MeshSizes) -> int:
    each = micro_batch * mesh.data
    if total % each or total < each:
        raise UsageError(
            f"a global batch of {total} does not divide into micro-batches of {micro_batch} over {mesh.data} data-parallel ranks",
            f"give a multiple of {each}",
        )
    return total // each


def _recipe(value: Any, optimizer: Any) -> Recipe:
    name = _text(optimizer, "optimizer")
    if isinstance(value, str):
        return recipe(value, name)
    given = dict(_mapping(value, "recipe"))
    if isinstance(given.get("moments"), list):
        given["moments"] = tuple(_number(size, "recipe: moments") for size in given["moments"])
    made: Recipe = built(Recipe, {"name": "own", **given}, "recipe")
    return made


def _hardware(value: Any, network: Any) -> Hardware:
    if isinstance(value, str):
        device = hardware(value)
    else:
        given = dict(_mapping(value, "hardware"))
        base = hardware(_text(given.pop("preset", "h100"), "hardware: preset"))
        numbers: dict[str, Any] = {key: given.pop(key) for key in ("memory_bytes", "per_node", "memory_gb_s") if key in given}
        tflops = given.pop("tflops", None)
        only(given, (), "hardware", ("preset", "memory_bytes", "per_node", "memory_gb_s", "tflops"))
        device = _changed(base, numbers, "hardware")
        if tflops is not None:
            device = replace(device, tflops={**device.tflops, 2: _real(tflops, "hardware: tflops")})
        if device.memory_bytes < 1 or device.per_node < 1 or not device.memory_gb_s > 0 or not device.tflops[2] > 0:
            raise UsageError("hardware: a size or rate of 0 or less", "give numbers above 0")
    return device if network is None else replace(device, outside=_network(network))


def _network(value: Any) -> Link:
    name = _text(value, "network")
    if name not in NETWORKS:
        raise UsageError(f"there is no network called {name[:80]!r}", choose(name, NETWORKS))
    return NETWORKS[name]


def built(kind: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """A dataclass from plain values of the right types."""
    only(values, [f.name for f in fields(kind)], where)
    return _guarded(lambda: kind(**_checked(kind, values, where)), kind, values, where)


def _changed(base: Any, values: Mapping[str, Any], where: str) -> Any:
    only(values, [f.name for f in fields(base)], where)
    return _guarded(lambda: replace(base, **_checked(type(base), values, where)), type(base), values, where)


def _guarded(make: Any, kind: type[Any], values: Mapping[str, Any], where: str) -> Any:
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING and f.name not in values]
    try:
        return make()
    except TypeError as error:
        raise UsageError(f"{where}: {', '.join(missing)} not given", "give a value for each") from error


def _checked(kind: type[Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    types_of = typing.get_type_hints(kind)
    return {key: _typed(types_of[key], value, key, where) for key, value in values.items()}


def _typed(wanted: Any, value: Any, key: str, where: str) -> Any:
    """The value if it is of the field's type; whole numbers stand for real ones."""
    options = typing.get_args(wanted) if typing.get_origin(wanted) in (types.UnionType, typing.Union) else (wanted,)
    plain = [typing.get_origin(option) or option for option in options]
    name = f"{where}: {key}"
    if any(is_dataclass(option) or option in (tuple, dict) for option in plain) and not isinstance(value, (str, int, float, list)):
        return value
    if value is None and type(None) in plain:
        return None
    if isinstance(value, bool) and bool in plain:
        return value
    if isinstance(value, str) and str in plain:
        return value
    if int in plain and isinstance(value, int) and not isinstance(value, bool):
        return _number(value, name, MOST.get(key, MOST_NUMBER))
    if float in plain:
        return _real(value, name)
    words = {int: "a whole number", bool: "true or false", str: "a word", float: "a number"}
    raise UsageError(f"{name} is {_shown(value)}", f"give {' or '.join(words[p] for p in plain if p in words) or 'a mapping'}")


def _number(value: Any, name: str, most: int = MOST_NUMBER) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{name} is {_shown(value)}", "give a whole number")
    if value > most:
        raise UsageError(f"{name} is larger than {most}", "give a number that a real job has")
    return value


def _real(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= MOST_NUMBER:
        raise UsageError(f"{name} is {_shown(value)}", "give a number")
    return float(value)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name} is {_shown(value)}", "give a word")
    return value


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} is {_shown(value)}", "give keys with values")
    odd = next((key for key in value if not isinstance(key, str)), None)
    if odd is not None:
        raise UsageError(f"{name} has a key that is no word: {_shown(odd)}", "give keys with values")
    return value


def only(values: Mapping[str, Any], known: typing.Sequence[str], where: str, hint: typing.Sequence[str] = ()) -> None:
    """UsageError for a key that is none of ``known``, with the one that was likely meant."""
    odd = next((key for key in _mapping(values, where) if key not in known), None)
    if odd is not None:
        near = difflib.get_close_matches(odd[:80], [*known, *hint], 1)
        raise UsageError(f"{where} has no {odd[:80]!r}", f"did you mean {near[0]}?" if near else f"it has {', '.join([*known, *hint])}")


def _shown(value: Any) -> str:
    """A value for a message: scalars as they are, cut; anything else by its kind, as it may be endless."""
    return repr(value)[:80] if isinstance(value, (str, float, bool)) or value is None else type(value).__name__
