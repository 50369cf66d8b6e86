"""What the process holds that nobody handed over: the wrapper around a model, the stages of a pipeline.

Frameworks hand the plain module to the user and train with what they put around it (Trainer, Lightning, accelerate). The garbage
collector knows all of it; it is asked once, when the window begins.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tracekit.recorder import private
from tracekit.recorder.units import holder


def instances(*kinds: Any) -> list[Any]:
    """Every object of these classes in the process. Nothing is called on the others: some answer ``isinstance`` with code of their own."""
    wanted = tuple(kind for kind in kinds if isinstance(kind, type))
    return [found for found in gc.get_objects() if issubclass(type(found), wanted)]


def deepspeed_engine_type() -> Any:
    """DeepSpeed's engine, where the job has imported it; else None."""
    module = sys.modules.get("deepspeed.runtime.engine")
    return getattr(module, "DeepSpeedEngine", None)


def is_engine(module: Any) -> bool:
    """Whether it is DeepSpeed's engine."""
    kind = deepspeed_engine_type()
    return kind is not None and isinstance(module, kind)


def compiled_from(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` was called on; the module itself where it was not."""
    inner = getattr(module, "_orig_mod", None)
    return compiled_from(inner) if isinstance(inner, nn.Module) else module


def wrapped(models: Sequence[nn.Module]) -> list[nn.Module]:
    """The models, each as what is trained: without ``torch.compile`` around it, with DDP or DeepSpeed's engine where it is inside one."""
    plain = [compiled_from(model) for model in models]
    wrappers = instances(DistributedDataParallel, deepspeed_engine_type()) if plain else []
    result: list[nn.Module] = []
    for model in plain:
        around = [wrapper for wrapper in wrappers if any(inner is model for inner in wrapper.modules())]
        outermost = max(around, key=lambda wrapper: sum(1 for _ in wrapper.modules()), default=model)
        if not any(outermost is other for other in result):
            result.append(outermost)
    return result


def replicas(models: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    """Every DistributedDataParallel among the models and inside of them."""
    return [module for model in models for module in model.modules() if isinstance(module, DistributedDataParallel)]


def stages(models: Sequence[nn.Module]) -> list[Any]:
    """The pipeline stages that run one of these modules."""
    own = {id(module) for model in models for module in model.modules()}
    return [stage for stage in instances(private.pipeline_stage_type()) if id(getattr(stage, "submod", None)) in own]


def last_to_step() -> tuple[Any, bool]:
    """(what steps last in a step of this process, whether it is an engine), told from what there is; (None, False) with several.

    Wrappers count where torch calls its hooks on them: ZeroRedundancyOptimizer steps around the optimizer inside, Accelerate's has no step
    of its own.
    """
    engines = instances(deepspeed_engine_type())
    if engines:
        return (engines[0], True) if len(engines) == 1 else (None, False)
    stepping = [one for one in instances(Optimizer) if private.calls_step_hooks(one)]
    if len({id(holder(one)) for one in stepping}) != 1:
        return None, False
    inside = {id(getattr(one, name, None)) for one in stepping for name in ("optim", "optimizer")}
    outermost = [one for one in stepping if id(one) not in inside]
    return (outermost[0], False) if len(outermost) == 1 else (None, False)


def trained(optimizers: Sequence[Any]) -> tuple[list[nn.Module], list[Any], list[str]]:
    """(the outermost modules with parameters of these optimizers, the optimizers, what could not be found).

    An engine among the optimizers is its own model, and brings its optimizer along.
    """
    engines = [one for one in optimizers if is_engine(one)]
    if engines:
        own = [engine.optimizer for engine in engines if getattr(engine, "optimizer", None) is not None]
        return engines, own, []
    held = {id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]}
    modules = instances(nn.Module)
    inner = {id(child) for module in modules for child in module._modules.values() if child is not None}
    outermost = [module for module in modules if id(module) not in inner]
    models = [module for module in outermost if any(id(parameter) in held for parameter in module.parameters())]
    notes = [] if models else ["no module with the optimizer's parameters was found: owners of memory and units are not recorded"]
    return models, list(optimizers), notes
