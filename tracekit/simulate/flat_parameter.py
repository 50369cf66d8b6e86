"""FSDP1's flat parameter: all parameters of a unit end to end in one vector, cut into W equal shards wherever the cut falls.

Two ways of padding (torch.distributed.fsdp, ``FlatParamHandle``):

    use_orig_params=False   no padding between parameters; shards of ceil(n/W) elements, what is missing at the end is padding
    use_orig_params=True    each parameter begins at a multiple of 16 bytes, and the end is padded to a multiple of W elements

The second keeps the views of the original parameters aligned, and the optimizer works on those views: no state for padding.
Source: PyTorch FSDP, arXiv:2304.11277, section 3.2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tracekit.simulate.shard_layout import Parameter, Piece, ShardLayout, padding

#: Bytes at a multiple of which a view of an original parameter begins under use_orig_params.
ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Interval:
    """``[begin, end)`` of the flat parameter; ``parameter`` None is padding."""

    parameter: Parameter | None
    begin: int
    end: int


def intervals(parameters: Sequence[Parameter], world: int, aligned_elements: int = 0) -> tuple[Interval, ...]:
    """Where each parameter and each padding stands in the flat parameter, without gaps, up to ``W * shard`` elements.

    ``aligned_elements``: each parameter begins at a multiple of it (16 bytes over the size of an element); 0 or 1 pads only the end. Either
    way the end is padded to a multiple of ``world``. Parameters without elements have an empty interval.
    """
    found: list[Interval] = []
    at = 0
    for parameter in parameters:
        gap = -at % aligned_elements if aligned_elements else 0
        if gap:
            found.append(Interval(None, at, at + gap))
            at += gap
        found.append(Interval(parameter, at, at + parameter.elements))
        at += parameter.elements
    if at % world:
        found.append(Interval(None, at, at + -at % world))
    return tuple(found)


def flat_layout(name: str, parameters: Sequence[Parameter], world: int, aligned_elements: int = 0) -> ShardLayout:
    """The shards of a flat parameter: rank r keeps ``[r*s, (r+1)*s)`` of it, s its padded length over ``world``.

    Of aligned parameters the optimizer sees the views (state without padding), otherwise the shard as one parameter.
    """
    whole = intervals(parameters, world, aligned_elements)
    shard = (whole[-1].end if whole else 0) // world
    pieces = tuple(_cut(whole, rank * shard, (rank + 1) * shard) for rank in range(world))
    gathered = _cut(whole, 0, world * shard)
    return ShardLayout(name, world, tuple(parameters), pieces, shard, gathered, flat=True, state_has_padding=not aligned_elements)


def _cut(whole: Sequence[Interval], begin: int, end: int) -> tuple[Piece, ...]:
    """The pieces of ``[begin, end)``, at offsets from its begin."""
    pieces = []
    for interval in whole:
        low, high = max(begin, interval.begin), min(end, interval.end)
        if low >= high:
            continue
        if interval.parameter is None:
            pieces.append(padding(high - low, low - begin))
        else:
            first, last = low - interval.begin, high - interval.begin
            label = label_of_elements(interval.parameter, first, last)
            pieces.append(Piece(interval.parameter.name, first, last, low - begin, label))
    return tuple(pieces)


def label_of_elements(parameter: Parameter, begin: int, end: int) -> str:
    """``W1`` for a whole parameter, ``b1[0:1]`` for a part of a vector, ``flat(W1)[0:4]`` for a part of anything else, row by row."""
    if (begin, end) == (0, parameter.elements):
        return parameter.name
    return f"{parameter.name}[{begin}:{end}]" if len(parameter.shape) == 1 else f"flat({parameter.name})[{begin}:{end}]"
