"""One parameter of a model, and how lists of them are grouped and divided before data parallelism shards them.

Everything in this room works on ``Sequence[Parameter]``: the list of a model shape (``shape.parameters``), that of a module on the meta
device, or the one a recorder wrote down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

#: What a parameter belongs to.
ROLES = ("embedding", "head", "attention", "mlp", "norm", "router", "expert", "other")
#: The unit of parameters that no unit of their own wraps: the root module's.
ROOT = ""


@dataclass(frozen=True)
class Parameter:
    """A parameter as one rank computes with it, before data-parallel sharding."""

    name: str
    shape: tuple[int, ...]
    unit: str = ROOT  # what FSDP gathers at once; '' the root
    element_bytes: int = 4  # as stored [bytes]
    role: str = "other"  # one of ``ROLES``
    tensor_dim: int | None = None  # what tensor parallelism divides; None: every tensor-parallel rank has all of it
    layer: int | None = None  # of the transformer; None outside its layers
    experts: int = 0  # stacked in its first dimension; 0: it belongs to none, all tokens use it
    trainable: bool = True

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes as stored, unsharded and unpadded."""
        return self.elements * self.element_bytes


def elements_of(parameters: Iterable[Parameter]) -> int:
    """Elements of all parameters."""
    return sum(parameter.elements for parameter in parameters)


def largest(parameters: Iterable[Parameter]) -> int:
    """Elements of the largest parameter; 0 for none."""
    return max((parameter.elements for parameter in parameters), default=0)


def tensor_parallel(parameters: Iterable[Parameter], t: int, expert_t: int = 1) -> list[Parameter]:
    """The parameters of the first of ``t`` tensor-parallel ranks: dimension ``tensor_dim`` in parts of ceil(d/t), the others whole.

    Experts are divided over ``expert_t`` ranks. The first rank holds the most where a size does not divide, as DTensor's Shard does.
    """
    return [_divided(p, expert_t if p.experts else t) for p in parameters]


def _divided(parameter: Parameter, parts: int) -> Parameter:
    if parts == 1 or parameter.tensor_dim is None:
        return parameter
    sizes = list(parameter.shape)
    sizes[parameter.tensor_dim] = -(-sizes[parameter.tensor_dim] // parts)
    return replace(parameter, shape=tuple(sizes))


def expert_parallel(parameters: Iterable[Parameter], ep: int) -> list[Parameter]:
    """The parameters of the first of ``ep`` expert-parallel ranks: of E stacked experts ceil(E/ep), all that is none."""
    kept = list(parameters)
    if ep == 1:
        return kept
    return [_of_experts(p, -(-p.experts // ep)) if p.experts else p for p in kept]


def _of_experts(parameter: Parameter, count: int) -> Parameter:
    return replace(parameter, shape=(count, *parameter.shape[1:]), experts=count)


def split_layers(layers: int, chunks: int) -> list[range]:
    """Layers of each of ``chunks`` consecutive pipeline chunks: as even as they go, the first chunks get what is left over."""
    each, more = divmod(layers, chunks)
    starts = [chunk * each + min(chunk, more) for chunk in range(chunks + 1)]
    return [range(starts[chunk], starts[chunk + 1]) for chunk in range(chunks)]


def stage_chunks(layers: int, p: int, v: int, stage: int, vee: bool = False) -> list[range]:
    """Layers of the ``v`` chunks that a stage holds: chunks stage, stage + p, ... of p v (looped placement); as a V two, there and back."""
    chunks = split_layers(layers, p * v)
    if vee:
        return [chunks[stage], chunks[2 * p - 1 - stage]]
    return [chunks[stage + turn * p] for turn in range(v)]


def stage_parameters(
    parameters: Sequence[Parameter], layers: int, p: int, v: int, stage: int, tied: bool = False, vee: bool = False
) -> list[Parameter]:
    """What one pipeline stage holds: its layers; the first also what comes before layer 0, the last what comes behind the last layer.

    Outside the layers, ``embedding`` goes to the first stage, everything else to the last. A head tied to the embedding is held by both.
    ``vee``: chunks lie as a V, so that the first stage has both ends of the model.
    """
    if p == 1:
        return list(parameters)
    held = {layer for chunk in stage_chunks(layers, p, v, stage, vee) for layer in chunk}
    first, last = stage == 0, stage == (0 if vee else p - 1)
    kept = []
    for parameter in parameters:
        if parameter.layer is not None:
            mine = parameter.layer in held
        elif parameter.role == "embedding":
            mine = first or (last and tied and parameter.name.endswith(("tokens.weight", "tokens")))
        else:
            mine = last
        if mine:
            kept.append(parameter)
    return kept


def early_root_elements(parameters: Sequence[Parameter]) -> int:
    """Elements of the root's gradients that backward computes before those of the other units.

    Parameters listed behind the first unit, or the first layer where all is one unit (norm, head) come first; so does an embedding that is
    the head as well.
    """
    first = next((index for index, p in enumerate(parameters) if p.unit or p.layer is not None), 0)
    root = [(index, p) for index, p in enumerate(parameters) if not p.unit and p.layer is None]
    tied = any(p.role == "norm" for _, p in root) and not any(p.role == "head" for p in parameters)
    return sum(p.elements for index, p in root if index >= first or (tied and p.role == "embedding"))
