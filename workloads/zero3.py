"""ZeRO-3: parameters, gradients and optimizer state sharded over axis ``dp_shard``, by hand: gathered only while a unit is at work.

    torchrun --nproc-per-node 2 -m tracekit.workloads.zero3 -o traces/zero3

A unit is the embedding, one block, or last norm and head: U = layers + 2 of them. Its parameters lie one after another in one flat tensor
of N_u elements and padding, P_u in all, of which each rank keeps an equal slice.
Collectives a micro-batch:
    all-gather       U of the P_u in forward, each just before its unit, and all but the last unit again in backward (the last is needed at
                     once, so it stays gathered); with --no-reshard-after-forward only those in forward
    reduce-scatter   U of the P_u in backward, each when the gradients of its unit are whole
and a step: under fp16 an all-reduce of one number, whether any rank found a gradient that is not finite.
The next unit is gathered while one computes (``prefetch``). Under bf16 and fp16 slices stay fp32, and what is gathered is 16-bit.
Numerics: after one step the gathered parameters equal the single-process reference within float rounding.
Sources: ZeRO, arXiv:1910.02054 (P_os+g+p); flat units as in PyTorch FSDP, arXiv:2304.11277.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tracekit.errors import UsageError
from tracekit.manifest import Expected, Unit

from .common import loop, sharding, zero
from .common.job import Job, Training
from .common.planned import Planned
from .common.reference import adam
from .common.settings import option
from .common.transformer import Transformer, initialize

MESH = {"dp_shard": 2}


@dataclass(frozen=True)
class Options:
    """Options of ZeRO-3."""

    reshard_after_forward: bool = option(
        True, "free a unit's parameters after its forward; without it they stay until its backward is over"
    )
    prefetch: bool = option(True, "gather the next unit while this one computes")
    reduce_dtype: str = option("fp32", "element type in which gradients are reduced under bf16 and fp16", ("fp32", "bf16"))


def units_of(model: Transformer) -> dict[str, list[nn.Module]]:
    """Unit -> its modules, in the order of forward."""
    assert model.embedding is not None and model.norm is not None and model.head is not None, "the whole model, not a stage"
    blocks = {f"layers.{name}": [block] for name, block in model.layers.items()}
    return {"embedding": [model.embedding], **blocks, "head": [model.norm, model.head]}


@dataclass(frozen=True)
class Place:
    """Where a parameter belongs: attribute ``attribute`` of ``module``, called ``name`` in the whole model."""

    module: nn.Module
    attribute: str
    name: str
    shape: torch.Size


class FlatUnit:
    """Parameters that are gathered and freed together.

    ``shard`` is this rank's slice, which the optimizer updates. ``full`` has storage only while it is gathered; the modules' weights are
    views of it, so autograd keeps no copy of them: what it saved in forward is there again once backward has gathered.
    """

    def __init__(
        self, name: str, modules: list[nn.Module], names: dict[nn.Parameter, str], group: dist.ProcessGroup, dtype: torch.dtype
    ) -> None:
        self.name, self.modules, self.group = name, modules, group
        self.rank, self.world = group.rank(), group.size()
        owned = [(module, key, p) for top in modules for module in top.modules() for key, p in module.named_parameters(recurse=False)]
        self.places = [Place(module, key, names[p], p.shape) for module, key, p in owned]
        self.elements = sum(p.numel() for _, _, p in owned)
        self.padded = zero.padded(self.elements, self.world)
        values = zero.flattened([p for _, _, p in owned], self.padded)
        self.shard = nn.Parameter(values.chunk(self.world)[self.rank].clone())
        self.full = torch.empty(self.padded, dtype=dtype, device=values.device, requires_grad=True)
        self.work: dist.Work | None = None
        self.free()
        for place in self.places:
            delattr(place.module, place.attribute)
        modules[0].register_parameter("shard", self.shard)

    @property
    def gathered(self) -> bool:
        """Whether ``full`` has storage: it is gathered, or being gathered."""
        return bool(self.full.untyped_storage().nbytes())

    def gather(self) -> None:
        """Begin to gather; nothing where it is gathered."""
        if self.gathered:
            return
        with torch.profiler.record_function(f"gather parameters of {self.name}"):
            self.full.untyped_storage().resize_(self.padded * self.full.element_size())
            own = self.full.data.chunk(self.world)[self.rank]
            own.copy_(self.shard.data)
            self.work = zero.all_gather(self.full.data, own, group=self.group, async_op=True)

    def wait(self) -> None:
        """Until it is gathered."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def views(self) -> list[Tensor]:
        """Every parameter as a view of ``full``, through which its gradient flows back."""
        pieces = self.full.split([*(place.shape.numel() for place in self.places), self.padded - self.elements])
        return [piece.view(place.shape) for piece, place in zip(pieces[:-1], self.places, strict=True)]

    def free(self) -> None:
        """Let go of what was gathered."""
        self.full.untyped_storage().resize_(0)


class Zero3:
    """Gathers units ahead of forward and backward by the modules' hooks, and reduces the gradient of each as soon as it is whole."""

    def __init__(self, units: list[FlatUnit], reducer: zero.Reducer, options: Options) -> None:
        self.units, self.reducer, self.options = units, reducer, options
        self.reduce_dtype = torch.float32 if units[0].full.dtype == torch.float32 else sharding.TYPES[options.reduce_dtype]
        for index, unit in enumerate(units):
            unit.modules[0].register_forward_pre_hook(partial(self.before_forward, index))
            unit.modules[-1].register_forward_hook(partial(self.after_forward, index))
            unit.full.register_post_accumulate_grad_hook(partial(self.reduce, unit))

    def need(self, index: int, following: int) -> None:
        """Unit ``index`` is to be there now; the one that follows may begin to come."""
        unit = self.units[index]
        self.begin(unit)
        unit.wait()
        if self.options.prefetch and 0 <= following < len(self.units):
            self.begin(self.units[following])

    def begin(self, unit: FlatUnit) -> None:
        """Begin to gather a unit, and say what the memory is for."""
        if not unit.gathered:
            unit.gather()
            self.reducer.recorder.own(unit.full, "gathered_parameters", unit.name, unit.name)

    def before_forward(self, index: int, module: nn.Module, args: Any) -> None:  # noqa: ARG002
        """Gather, and make the weights of the unit's modules."""
        self.need(index, index + 1)
        unit = self.units[index]
        for place, view in zip(unit.places, unit.views(), strict=True):
            setattr(place.module, place.attribute, view)

    def after_forward(self, index: int, module: nn.Module, args: Any, output: Tensor) -> None:  # noqa: ARG002
        """Free, and wait for backward to come to this unit's output."""
        if self.options.reshard_after_forward and index < len(self.units) - 1:
            self.units[index].free()
        if output.requires_grad:
            output.register_hook(lambda gradient: self.need(index, index - 1))  # noqa: ARG005

    def reduce(self, unit: FlatUnit, full: Tensor) -> None:
        """The gradient of a unit is whole: its parameters are not needed any more, and every rank gets the sum of its slice."""
        gradient, full.grad = full.grad, None
        unit.free()
        self.reducer.recorder.own(gradient, "unsharded_gradients", unit.name, unit.name)
        buffer = gradient.to(self.reduce_dtype)
        if buffer is not gradient:
            self.reducer.recorder.own(buffer, "communication_buffers", "gradients", unit.name)
        self.reducer.send(unit.shard, buffer, unit.name)

    def described(self) -> list[Unit]:
        """The units for the manifest."""
        reshards = [self.options.reshard_after_forward and unit is not self.units[-1] for unit in self.units]
        return [
            Unit(u.name, "zero_bucket", [place.name for place in u.places], u.elements, u.padded, reshard_after_forward=freed)
            for u, freed in zip(self.units, reshards, strict=True)
        ]

    def parameters(self) -> dict[str, Tensor]:
        """All parameters by their plain names (a collective: every rank has to call it)."""
        found = {}
        for unit in self.units:
            unit.gather()
            unit.wait()
            found.update({place.name: view.detach().clone() for place, view in zip(unit.places, unit.views(), strict=True)})
            unit.free()
        return found

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:  # noqa: ARG002
        """Around forward and backward of one micro-batch."""
        yield
        self.reducer.collect()


def build(job: Job, options: Options) -> Training:
    """The model cut into flat units, and Adam on this rank's slices of them."""
    if job.settings.precision == "fp8":
        raise UsageError("zero3 gathers 32-bit or 16-bit parameters only", "use --precision bf16, or zero2")
    zero.check(job, "dp_shard")
    model = Transformer(job.shape)
    initialize(model, job.settings.seed)
    model.to(job.device)
    names = {parameter: name for name, parameter in model.named_parameters()}
    dtype = sharding.TYPES.get(job.settings.precision, torch.float32)
    units = [FlatUnit(name, modules, names, job.group("dp_shard"), dtype) for name, modules in units_of(model).items()]
    zero3 = Zero3(units, zero.Reducer(job.group("dp_shard")), options)
    training = Training(
        models=[model],
        optimizer=adam([unit.shard for unit in units], job.settings.learning_rate),
        gathered=zero3.parameters,
        accumulating=zero3.micro_batch,
        autocast=False,
        scaler=zero.scaler(job, "dp_shard"),
        describe={"units": zero3.described(), "precision": sharding.precision(job, options.reduce_dtype)},
    )

    def step(ids_BT: Tensor, targets_BT: Tensor, recorder: Any) -> Tensor:
        zero3.reducer.recorder = recorder
        return loop.step(job, training, ids_BT, targets_BT, recorder)

    training.step = step
    return training


def expected(job: Job, options: Options) -> list[Expected]:
    """All-gathers and reduce-scatters of one rank and step."""
    rounds = job.settings.micro_batches
    gather_bytes, reduce_bytes = sharding.element_bytes(job, options.reduce_dtype)
    with torch.device("meta"):
        units = units_of(Transformer(job.shape)).values()
        sizes = [zero.padded(sum(p.numel() for module in unit for p in module.parameters()), job.size("dp_shard")) for unit in units]
    gathers = [*sizes, *sizes[:-1]] if options.reshard_after_forward else sizes
    return [
        Expected("all_gather", "dp_shard", "parameter_gather", rounds * len(gathers), rounds * gather_bytes * sum(gathers)),
        Expected("reduce_scatter", "dp_shard", "gradient_scatter", rounds * len(sizes), rounds * reduce_bytes * sum(sizes)),
        *zero.expected_of_scaler(job, "dp_shard"),
    ]


def planned(job: Job, options: Options) -> Planned:  # noqa: ARG001
    """What the analytical model is told."""
    strategy = {
        "name": "zero3",
        "reshard_after_forward": options.reshard_after_forward,
        "backward_prefetch": "pre" if options.prefetch else "none",
        "use_orig_params": False,
    }
    return {"strategy": strategy, "implementation": {"padding": "torch_fsdp1", "last_stays": True}, "wrap": "ends"}


if __name__ == "__main__":
    loop.main(__name__)
