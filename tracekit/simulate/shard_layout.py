"""Which elements of which parameters each rank keeps of one unit, and where in its shard they stand.

A unit's shards are equally long (``shard_elements``), so that gathering and scattering them is one collective of equal pieces: with W ranks
it moves W * shard_elements, padding included. FSDP1's flat parameter, FSDP2's per-parameter shards and ZeRO's partition are three ways to
fill the same description (``flat_parameter``, ``sharded_parameter``); cutting, packing and joining need only the description.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Parameter:
    """A parameter by name and shape; its elements are numbered row by row."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar (shape ())."""
        return prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """Elements that stand side by side in a shard: ``[begin, end)`` of a parameter, at ``offset`` of the shard.

    ``parameter`` None: padding, then ``begin`` is 0 and ``end`` its length. ``label`` is how a reader sees it (``b1[0:1]``).
    """

    parameter: str | None
    begin: int
    end: int
    offset: int
    label: str

    @property
    def elements(self) -> int:
        """Length of the piece."""
        return self.end - self.begin


@dataclass(frozen=True)
class ShardLayout:
    """The shards of one unit. ``pieces[rank]`` covers ``[0, shard_elements)`` without gap or overlap, in order of ``offset``.

    ``gathered`` are the pieces of the unit once it is gathered and usable: each parameter whole, with the padding that stays in its
    storage. ``flat``: the unit is one vector, and its shards end to end are that vector: gathering needs no copy. ``state_has_padding``:
    the optimizer sees the whole shard as one parameter, padding included.
    """

    name: str
    world: int
    parameters: tuple[Parameter, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    shard_elements: int
    gathered: tuple[Piece, ...]
    flat: bool
    state_has_padding: bool

    @property
    def elements(self) -> int:
        """Elements of the unit's parameters, without padding."""
        return sum(parameter.elements for parameter in self.parameters)

    @property
    def padded_elements(self) -> int:
        """What one all-gather or reduce-scatter of the unit moves: W shards."""
        return self.world * self.shard_elements

    @cached_property
    def _sources(self) -> npt.NDArray[np.int64]:
        """For each element of all shards in rank order: its place among the parameters laid end to end; -1 for padding."""
        starts = _starts(self.parameters)
        source = np.full(self.padded_elements, -1, np.int64)
        for rank, pieces in enumerate(self.pieces):
            for piece in pieces:
                if piece.parameter is not None:
                    at = rank * self.shard_elements + piece.offset
                    source[at : at + piece.elements] = starts[piece.parameter] + np.arange(piece.begin, piece.end)
        return source

    def pack(self, full: Mapping[str, Array]) -> Array:
        """All shards end to end, rank 0 first, from full tensors; padding is 0. The input of a reduce-scatter. Shape [W * shard]."""
        joined = np.concatenate([full[p.name].reshape(-1) for p in self.parameters] or [np.empty(0)])
        packed = np.zeros(self.padded_elements)
        kept = self._sources >= 0
        packed[kept] = joined[self._sources[kept]]
        return packed

    def split(self, full: Mapping[str, Array]) -> list[Array]:
        """The shard of every rank, each of shape [shard_elements]."""
        return [shard.copy() for shard in np.split(self.pack(full), self.world)]

    def unpack(self, packed: Array) -> dict[str, Array]:
        """Full tensors from all shards end to end; padding is dropped. Inverse of ``pack``."""
        joined = np.empty(self.elements)
        kept = self._sources >= 0
        joined[self._sources[kept]] = packed[kept]
        starts = _starts(self.parameters)
        return {p.name: joined[starts[p.name] : starts[p.name] + p.elements].reshape(p.shape) for p in self.parameters}

    def arrange(self, packed: Array) -> Array:
        """The storage of the gathered unit, as ``gathered`` describes it, from all shards end to end. Shape [W * shard], a copy."""
        if self.flat:
            return packed.copy()
        full = self.unpack(packed)
        stored = np.zeros(self.padded_elements)
        for piece in self.gathered:
            if piece.parameter is not None:
                stored[piece.offset : piece.offset + piece.elements] = full[piece.parameter].reshape(-1)
        return stored

    def views(self, stored: Array) -> dict[str, Array]:
        """Every parameter as a view into the storage of the gathered unit."""
        places = {piece.parameter: piece for piece in self.gathered}
        found = {}
        for parameter in self.parameters:
            begin = places[parameter.name].offset if parameter.elements else 0
            found[parameter.name] = stored[begin : begin + parameter.elements].reshape(parameter.shape)
        return found

    def state_pieces(self, rank: int) -> tuple[Piece, ...]:
        """The pieces that the optimizer keeps state for."""
        return tuple(piece for piece in self.pieces[rank] if self.state_has_padding or piece.parameter is not None)

    def state_mask(self, rank: int) -> npt.NDArray[np.bool_]:
        """Which elements of the rank's shard have optimizer state. Shape [shard_elements]."""
        mask = np.zeros(self.shard_elements, np.bool_)
        for piece in self.state_pieces(rank):
            mask[piece.offset : piece.offset + piece.elements] = True
        return mask


def padding(length: int, offset: int) -> Piece:
    """``length`` elements that belong to no parameter."""
    return Piece(None, 0, length, offset, "padding")


def _starts(parameters: Sequence[Parameter]) -> dict[str, int]:
    """Where each parameter begins when all are laid end to end."""
    starts, at = {}, 0
    for parameter in parameters:
        starts[parameter.name] = at
        at += parameter.elements
    return starts
