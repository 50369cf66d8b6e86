"""Hooks on model and optimizer: ranges for phases and units, and registrations of the storages that they make.

Public hooks of modules, tensors and optimizers do nearly all; FSDP's gathered parameters are caught where torch allocates them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from tracekit.manifest import FREED
from tracekit.recorder import found, private
from tracekit.recorder.owners import OwnerLog, storage
from tracekit.recorder.units import fsdp2_units, holder, plain_name, state_of, unit_modules

Guarded = Callable[[Callable[..., Any]], Callable[..., Any]]


class Hooks:
    """Installs hooks; ``remove`` takes all of them away. Every hook runs behind ``guarded``, which swallows what goes wrong in it."""

    def __init__(self, owners: OwnerLog, guarded: Guarded) -> None:
        self._owners = owners
        self._guarded = guarded
        self._undo: list[Callable[[], Any]] = []
        self._places: dict[int, tuple[int, int] | None] = {}  # storage of each parameter when it was last looked at

    def remove(self) -> None:
        """Take away every hook, the last first."""
        while self._undo:
            self._undo.pop()()

    # Phases and units ------------------------------------------------------------------------------------------------

    def phases(self, models: Sequence[nn.Module]) -> None:
        """A range ``forward`` around the forward of every model, one ``unit NAME`` around that of each unit, its backward marked."""
        for model in models:
            self._range(model, lambda _: "forward", inputs=True)
        for name, module in unit_modules(models):
            self._range(module, lambda _, name=name: f"unit {name}", mark=name)  # type: ignore[misc]

    def _range(self, module: nn.Module, label: Callable[[nn.Module], str], *, inputs: bool = False, mark: str = "") -> None:
        open_ranges: list[Any] = []

        def before(module: nn.Module, args: Any) -> None:
            if inputs:
                for tensor in tensors_in(args):
                    if not tensor.requires_grad:  # else it came from another pipeline stage
                        self._owners.own(tensor, "inputs", "batch")
            opened = torch.profiler.record_function(label(module))
            opened.__enter__()
            open_ranges.append(opened)

        def after(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
            if open_ranges:
                open_ranges.pop().__exit__(None, None, None)
            if mark:
                for tensor in tensors_in(output):
                    if tensor.requires_grad:
                        tensor.register_hook(self._guarded(lambda _: instant(f"unit {mark} backward")))
                        break

        self._undo.append(module.register_forward_pre_hook(self._guarded(before)).remove)
        self._undo.append(module.register_forward_hook(self._guarded(after), always_call=True).remove)

    def pipeline(self) -> None:
        """Ranges ``PP:0F3`` (stage, action, micro-batch) around the work of pipeline stages, where torch itself writes none."""
        stage, torchs = private.pipeline_stage_type(), _Torchs()
        self._undo.append(private.replaced(private.pipeline_schedules(), "_get_profiler_function_name", torchs.remember))
        for name, action in (("forward_one_chunk", "F"), ("backward_one_chunk", "B"), ("backward_weight_one_chunk", "W")):
            self._undo.append(private.replaced(stage, name, self._around_chunk(action, torchs)))

    def _around_chunk(self, action: str, torchs: _Torchs) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        own = self._guarded(self._own_messages)

        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(stage: Any, *args: Any, **kwargs: Any) -> Any:
                chunk, full = private.pipeline_chunk(action, args, kwargs)
                if chunk is not None:
                    own(stage, action, chunk)
                what = "I" if action == "B" and not full else action
                name = f"PP:{getattr(stage, 'stage_index', '')}{what}{chunk}"
                if torchs.opened(name):
                    return original(stage, *args, **kwargs)
                with torch.profiler.record_function(name):
                    return original(stage, *args, **kwargs)

            return call

        return around

    def _own_messages(self, stage: Any, action: str, chunk: int) -> None:
        """What a stage received for this micro-batch lies in buffers that it keeps from step to step; what another one of this rank handed
        over is an activation that it keeps as long."""
        kind, forward = {"F": "hidden states", "B": "gradients"}.get(action), action == "F"
        here = private.pipeline_hands_over(stage, forward)
        if kind is not None and (forward or not here):
            category = "activations" if here else "communication_buffers"
            for tensor in private.pipeline_messages(stage, forward, chunk):
                self._owners.own(tensor, category, f"{kind} {chunk}", f"stage {getattr(stage, 'stage_index', '')}")

    # Memory ----------------------------------------------------------------------------------------------------------

    def memory(self, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
        """Registrations of gradients as they are accumulated, optimizer state as it is made, FSDP's gathered parameters."""
        for model in models:
            for name, parameter in model.named_parameters():
                self._gradient(plain_name(name), parameter, found.is_engine(model))
        for optimizer in optimizers:
            self._optimizer(models, optimizer)
        if any(isinstance(m, FSDPModule) for model in models for m in model.modules()):
            self._fsdp2(models)
        if any(isinstance(m, FullyShardedDataParallel) for model in models for m in model.modules()):
            self._fsdp1(models)

    def _optimizer(self, models: Sequence[nn.Module], optimizer: Any) -> None:
        """Around its steps; one that only has torch's fields, and not torch's hooks, is looked at when the window begins and ends."""
        inner = holder(optimizer)
        if not isinstance(inner, torch.optim.Optimizer):
            return
        before = self._guarded(lambda opt, args, kwargs: self.gradients(models))  # noqa: ARG005
        after = self._guarded(lambda opt, args, kwargs: self._stepped(models, opt))  # noqa: ARG005
        self._undo.append(inner.register_step_pre_hook(before).remove)
        self._undo.append(inner.register_step_post_hook(after).remove)

    def _stepped(self, models: Sequence[nn.Module], optimizer: Any) -> None:
        self.optimizer_state(models, [optimizer])
        self._moved(models)

    def _moved(self, models: Sequence[nn.Module]) -> None:
        """Register parameters whose storage is another one than before: some optimizers replace ``.data``."""
        for model in models:
            if found.is_engine(model) or any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
                continue  # these move storages themselves, in and out of gathers
            for name, parameter in model.named_parameters():
                before, now = self._places.get(id(parameter)), storage(parameter)
                if now is not None and before != now:
                    self._places[id(parameter)] = now
                    self._owners.own(parameter, "parameters", plain_name(name))
                    if before is not None and self._owners.active:
                        self._owners.row(before[0], FREED, "parameters", plain_name(name))

    def standing(self, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
        """Register everything that stands at this moment: parameters, buffers, gradients, optimizer state, DDP's buckets."""
        for model in models:
            for name, parameter in model.named_parameters():
                self._owners.own(parameter, "parameters", plain_name(name))
                self._places[id(parameter)] = storage(parameter)
            for name, buffer in model.named_buffers():
                self._owners.own(buffer, "buffers", plain_name(name))
            for module in model.modules():
                handle = private.fsdp1_handle(module) if isinstance(module, FullyShardedDataParallel) else None
                if handle is not None:
                    self._owners.own(private.fsdp1_flat(handle)["local"], "parameters", "flat_param")
        sizes = [private.ddp_bucket_bytes(replica) or [] for replica in found.replicas(models) if not replica.gradient_as_bucket_view]
        for number, size in enumerate(itertools.chain.from_iterable(sizes)):
            self._owners.row(0, size, "communication_buffers", f"bucket {number}")
        self.gradients(models)
        self.optimizer_state(models, optimizers)

    def gradients(self, models: Sequence[nn.Module]) -> None:
        """Register the gradient of every parameter that has one."""
        for model in models:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    self._own_gradient(parameter.grad, plain_name(name), found.is_engine(model))

    def optimizer_state(self, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
        """Register every tensor of optimizer state under its parameter's name."""
        names = {parameter: plain_name(name) for model in models for name, parameter in model.named_parameters()}
        for optimizer in optimizers:
            for parameter, state in state_of(optimizer).items():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        self._owners.own(value, "optimizer_state", f"{names.get(parameter, '')}.{key}".strip("."))

    def _own_gradient(self, gradient: torch.Tensor, name: str, engine: bool) -> None:
        """DeepSpeed lets gradients lie in its buffers for communication, which are as large as its settings say."""
        shared = engine and private.local(gradient).untyped_storage().nbytes() > gradient.numel() * gradient.element_size()
        self._owners.own(gradient, "communication_buffers" if shared else "gradients", "bucket of gradients" if shared else name)

    def _gradient(self, name: str, parameter: nn.Parameter, engine: bool) -> None:
        if not (parameter.requires_grad and parameter.is_leaf):
            return
        hook = self._guarded(lambda p: self._own_gradient(p.grad, name, engine) if p.grad is not None else None)
        with contextlib.suppress(RuntimeError):  # a parameter that cannot have the hook is caught before the optimizer's step
            self._undo.append(parameter.register_post_accumulate_grad_hook(hook).remove)

    def _fsdp2(self, models: Sequence[nn.Module]) -> None:
        parameter_type, group_type = private.fsdp2_types()
        names = self._names_of_groups(models)

        def gathered(original: Callable[..., Any]) -> Callable[..., Any]:
            note = self._guarded(
                lambda p: self._owners.own(private.fsdp2_unsharded(p), "gathered_parameters", private.fsdp2_fqn(p), names.get(id(p), ""))
            )

            def call(param: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(param, *args, **kwargs)
                note(param)
                return result

            return call

        def buffers(original: Callable[..., Any]) -> Callable[..., Any]:
            note = self._guarded(lambda t: self._owners.own(t, "communication_buffers", "fsdp buffer"))

            def call(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                note(result)
                return result

            return call

        def reduced(original: Callable[..., Any]) -> Callable[..., Any]:
            def note(group: Any) -> None:
                for p in private.fsdp2_params(group):
                    gradient = private.fsdp2_unsharded_gradient(p)
                    self._owners.own(gradient, "unsharded_gradients", private.fsdp2_fqn(p), names.get(id(p), ""))

            guarded = self._guarded(note)

            def call(group: Any, *args: Any, **kwargs: Any) -> Any:
                guarded(group)
                return original(group, *args, **kwargs)

            return call

        self._undo.append(private.replaced(parameter_type, "init_unsharded_param", gathered))
        for allocator in private.fsdp2_allocators():
            self._undo.append(private.replaced(allocator, "allocate", buffers))
        self._undo.append(private.replaced(group_type, "post_backward", reduced))

    def _names_of_groups(self, models: Sequence[nn.Module]) -> dict[int, str]:
        return {
            id(param): label
            for model in models
            for label, _, groups in fsdp2_units(model)
            for group in groups
            for param in private.fsdp2_params(group)
        }

    def _fsdp1(self, models: Sequence[nn.Module]) -> None:
        handles = {
            id(private.fsdp1_handle(m)): plain_name(n)
            for model in models
            for n, m in model.named_modules()
            if isinstance(m, FullyShardedDataParallel)
        }

        def after_unshard(original: Callable[..., Any]) -> Callable[..., Any]:
            def note(handle: Any) -> None:
                self._owners.own(private.fsdp1_flat(handle)["gathered"], "gathered_parameters", "flat_param", handles.get(id(handle), ""))

            guarded = self._guarded(note)

            def call(handle: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(handle, *args, **kwargs)
                guarded(handle)
                return result

            return call

        def before_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
            def note(handle: Any) -> None:
                gradient = private.fsdp1_flat(handle)["gradient"]
                self._owners.own(gradient, "unsharded_gradients", "flat_param.grad", handles.get(id(handle), ""))

            guarded = self._guarded(note)

            def call(state: Any, handle: Any, *args: Any, **kwargs: Any) -> Any:
                guarded(handle)
                return original(state, handle, *args, **kwargs)

            return call

        self._undo.append(private.replaced(private.fsdp1_handle_type(), "unshard", after_unshard))
        self._undo.append(private.replaced(private.fsdp1_runtime(), "_reduce_grad", before_reduce))

    def saved_tensors(self) -> contextlib.AbstractContextManager[Any]:
        """Registers every tensor that autograd saves as an activation, for as long as the context is open."""
        own = self._guarded(lambda t: self._owners.own(t, "activations", "saved for backward"))

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            own(tensor)
            return tensor.detach() if tensor.requires_grad else tensor  # a saved output would hold itself

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


class _Torchs:
    """The range that torch's own runner of schedules opened last: it writes them for most schedules, not for GPipe and 1F1B."""

    def __init__(self) -> None:
        self._last = ""

    def remember(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Around torch's function that names the range of an action just before it is opened."""

        def call(*args: Any, **kwargs: Any) -> Any:
            name = original(*args, **kwargs)
            self._last = str(name)
            return name

        return call

    def opened(self, name: str) -> bool:
        """Whether torch has just opened a range of this name. Asked once a range."""
        last, self._last = self._last, ""
        return last == name


def instant(text: str) -> None:
    """A range that begins and ends here: the mark of a moment."""
    with torch.profiler.record_function(text):
        pass


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in arguments or outputs, through tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_in(item)]
    if isinstance(value, list | tuple):
        return [t for item in value for t in tensors_in(item)]
    return []
