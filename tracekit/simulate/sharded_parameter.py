"""FSDP2's per-parameter shards: each parameter is cut along its dimension 0, DTensor's ``Shard(0)``, and stays a tensor of its own.

With W ranks a chunk is ``c = ceil(d0 / W)`` rows; rank r keeps rows ``[r*c, min((r+1)*c, d0))``, the last ranks fewer or none. Storage is
c rows on every rank, so that one all-gather of equal pieces moves W * c rows of each parameter of the unit; what the parameter does not
fill is padding. The optimizer sees the rows alone: no state for padding. (torch.distributed.fsdp.fully_shard; a scalar cannot be sharded.)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tracekit.errors import UsageError
from tracekit.simulate.shard_layout import Parameter, Piece, ShardLayout, padding


def rows_of_rank(rows: int, world: int, rank: int) -> tuple[int, int]:
    """``[begin, end)`` of the rows that ``rank`` keeps of ``rows``; empty for the last ranks where there are too few."""
    chunk = -(-rows // world)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)


def sharded_layout(name: str, parameters: Sequence[Parameter], world: int) -> ShardLayout:
    """The shards of a unit whose parameters are sharded one by one: a rank's chunk of each, in order, each padded to a full chunk."""
    for parameter in parameters:
        if not parameter.shape:
            raise UsageError(f"parameter {parameter.name} is a scalar and has no dimension 0 to shard", "give it the shape (1,)")
    pieces, length = zip(*(_shard(parameters, world, rank) for rank in range(world)), strict=True)
    gathered = _gathered(parameters, world)
    return ShardLayout(name, world, tuple(parameters), pieces, length[0], gathered, flat=False, state_has_padding=False)


def _shard(parameters: Sequence[Parameter], world: int, rank: int) -> tuple[tuple[Piece, ...], int]:
    """(pieces, elements with padding) of one rank."""
    pieces: list[Piece] = []
    at = 0
    for parameter in parameters:
        rest = prod(parameter.shape[1:])
        begin, end = rows_of_rank(parameter.shape[0], world, rank)
        chunk = -(-parameter.shape[0] // world) * rest
        kept = (end - begin) * rest
        if kept:
            pieces.append(Piece(parameter.name, begin * rest, end * rest, at, label_of_rows(parameter, begin, end)))
        if chunk > kept:
            pieces.append(padding(chunk - kept, at + kept))
        at += chunk
    return tuple(pieces), at


def _gathered(parameters: Sequence[Parameter], world: int) -> tuple[Piece, ...]:
    """The gathered parameters: each in a storage of W chunks, of which it fills the front."""
    pieces: list[Piece] = []
    at = 0
    for parameter in parameters:
        stored = world * -(-parameter.shape[0] // world) * prod(parameter.shape[1:])
        if parameter.elements:
            pieces.append(Piece(parameter.name, 0, parameter.elements, at, parameter.name))
        if stored > parameter.elements:
            pieces.append(padding(stored - parameter.elements, at + parameter.elements))
        at += stored
    return tuple(pieces)


def label_of_rows(parameter: Parameter, begin: int, end: int) -> str:
    """``W1`` for all rows, ``W1[0:1]`` for a part of them."""
    return parameter.name if (begin, end) == (0, parameter.shape[0]) else f"{parameter.name}[{begin}:{end}]"
